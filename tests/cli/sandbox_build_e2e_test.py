#!/usr/bin/env python3
"""`tidelock sandbox build` with recipes and OCI images, from outside. Needs TIDELOCK_BINARY and a static busybox."""

import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from harness import BINARY, Case  # noqa: E402
from oci_image import blobs_of, busybox_layer, entry, layer, write_archive, write_folder  # noqa: E402

SIZES = ("--memory", "128", "--disk", "64")
RECIPE = """# a comment
FROM image.tar
ENV GREETING="hello there" \\
    LEVEL=3
USER root
RUN echo made >/made && chmod 600 /made
WORKDIR /app
COPY *.txt tree /app/
USER user
RUN echo "last: {last}" >/tmp/last; id -u >>/tmp/last; pwd >>/tmp/last
START while :; do date +%s.%N >/tmp/beat; sleep 0.2; done
READY test -s /tmp/beat
"""


class SandboxBuild(Case):
    @classmethod
    def setUpClass(cls):
        cls.work = pathlib.Path(tempfile.mkdtemp(prefix="tidelock-build-"))
        cls.addClassCleanup(shutil.rmtree, cls.work)
        cls.state = cls.work / "state"
        cls.context = cls.work / "context"
        (cls.context / "tree" / "deep").mkdir(parents=True)
        (cls.context / "a.txt").write_text("first\n")
        (cls.context / "b.txt").write_text("second\n")
        (cls.context / "tree" / "deep" / "leaf").write_text("leaf\n")
        (cls.context / "tree" / "link").symlink_to("deep/leaf")
        (cls.work / "outside").write_text("untouched")
        cls.base = busybox_layer()
        second = layer(
            entry("etc/keep", b"kept"), entry("etc/lower", b"lower"), entry("data", mode=0o755), entry("data/old", b"old"),
            entry("var", kind=tarfile.SYMTYPE, target="/data"), entry("hard", kind=tarfile.LNKTYPE, target="etc/keep"),
            entry("dev", mode=0o755), entry("dev/sda", kind=tarfile.BLKTYPE))  # fmt: skip
        third = layer(
            entry("etc/.wh.lower", b""), entry("data/new", b"new"), entry("data/.wh..wh..opq", b""),
            entry("var/through", b"a link leads here", uid=1000), entry("escape", kind=tarfile.SYMTYPE, target="/.."),
            entry("escape/here", b"inside"))  # fmt: skip
        files = blobs_of([cls.base, second, third], {"Env": ["PATH=/bin:/usr/bin", "FROM_IMAGE=yes"], "WorkingDir": "/srv"})
        write_archive(cls.context / "image.tar", files)
        write_folder(cls.work / "layout", files)

    def verb(self, *arguments, **more):
        return self.tidelock("sandbox", "--dir", self.state, *arguments, **more)

    def recipe(self, text, name="recipe"):
        path = self.context / name
        path.write_text(text)
        return path

    def box(self, template):
        made = self.verb("create", "--template", template).out.strip()
        self.addCleanup(self.verb, "rm", made)
        return lambda command, **more: self.verb("exec", made, "--", "sh", "-c", command, **more).out

    def test_a_recipe_becomes_a_template_and_only_what_changed_is_done_again(self):
        built = self.verb("build", self.recipe(RECIPE.format(last="one")), "--name", "first", *SIZES)
        self.assertIn("template first: 8 steps done, 0 were done before", built.out)
        run = self.box("first")
        self.assertEqual(run("cat /tmp/last; pwd; id -u; echo $GREETING $LEVEL $FROM_IMAGE"),
                         "last: one\n1000\n/app\n/app\n1000\nhello there 3 yes\n")  # fmt: skip
        self.assertEqual(run("cat a.txt b.txt deep/leaf link; stat -c %u:%a /made /app/a.txt"),
                         "first\nsecond\nleaf\nleaf\n0:600\n0:644\n")  # fmt: skip
        before = run("cat /tmp/beat")
        time.sleep(1)
        self.assertNotEqual(run("cat /tmp/beat"), before, "what START started does not run")
        # The image: whiteouts, an opaque folder, links, nothing outside.
        self.assertEqual(run("cat /etc/keep /hard; ls /etc/lower /data 2>&1; cat /data/through; cat /here; ls -d /dev/sda"
                             " 2>&1 | grep -c No"),
                         "keptkeptls: /etc/lower: No such file or directory\n/data:\nnew\nthrough\na link leads hereinside1\n")  # fmt: skip
        again = self.verb("build", self.recipe(RECIPE.format(last="one")), "--name", "first", *SIZES)
        self.assertIn("0 steps done, 8 were done before", again.out)
        changed = self.verb("build", self.recipe(RECIPE.format(last="two")), "--name", "first", *SIZES)
        self.assertIn("1 steps done, 7 were done before", changed.out)
        self.assertTrue(self.box("first")("cat /tmp/last").startswith("last: two\n"))
        (self.context / "b.txt").write_text("changed\n")
        changed = self.verb("build", self.recipe(RECIPE.format(last="two")), "--name", "second", *SIZES)
        self.assertIn("4 steps done, 4 were done before", changed.out)
        onward = self.verb("build", self.recipe("FROM template:second\nRUN echo $LEVEL >>/tmp/last\n"), "--name", "third")
        self.assertIn("1 steps done", onward.out)
        self.assertTrue(self.box("third")("cat /tmp/last").endswith("3\n"))

    def test_a_failed_step_leaves_the_old_template(self):
        good = "FROM busybox\nRUN echo good >/tmp/which\n"
        self.verb("build", self.recipe(good), "--name", "stays", *SIZES)
        failed = self.verb("build", self.recipe(good + "RUN echo trouble; exit 9\n"), "--name", "stays", *SIZES, code=2)
        self.assertIn("RUN echo trouble; exit 9: ended with code 9: trouble", failed.err)
        self.assertEqual(self.box("stays")("cat /tmp/which"), "good\n")
        never = self.verb("build", self.recipe("FROM busybox\nSTART exit 4\nREADY false\n"), "--name", "stays", *SIZES, code=2)
        self.assertIn("START ended with code 4", never.err)
        self.assertEqual(self.box("stays")("cat /tmp/which"), "good\n")

    def test_a_killed_build_leaves_nothing_running(self):
        path = self.recipe("FROM busybox\nRUN sleep 1000\n", "slow")
        building = subprocess.Popen([BINARY, "sandbox", "--dir", self.state, "build", path, "--name", "never", *SIZES],
                                    stderr=subprocess.PIPE, text=True)  # fmt: skip
        while "RUN sleep" not in building.stderr.readline():
            self.assertIsNone(building.poll())
        building.kill()
        building.wait()
        building.stderr.close()
        listed = self.verb("ls").out
        self.assertNotIn("sandbox ", listed)
        self.assertNotIn("never", listed)
        machines = subprocess.run(["pgrep", "-f", f"{self.state}.*qemu|qemu.*{self.state}"], capture_output=True).stdout
        self.assertEqual(machines, b"")

    def test_what_is_wrong_with_a_recipe_is_said_with_its_line(self):
        for text, said in (
            ("RUN true\n", "line 1: expected FROM first"),
            ("FROM busybox\n\nFLY high\n", "line 3: 'FLY' is not known"),
            ("FROM busybox\nENV a\n", "line 2: ENV: expected NAME=VALUE"),
            ("FROM busybox\nUSER www\n", "user 'www'"),
            ("FROM busybox\nCOPY ../outside /x\n", "below the folder"),
            ("FROM busybox\nCOPY --chown=a b c\n", "options are not known"),
            ("FROM busybox\nCOPY nothing /x\n", "cannot be read from"),
            ("FROM busybox\nREADY true\n", "READY without START"),
            ("FROM template:absent\n", "no template or snapshot 'absent'"),
            ("FROM registry.invalid/image:1\n", "not fetched from registries"),
            ("# nothing\n", "no FROM"),
        ):
            with self.subTest(said):
                refused = self.verb("build", self.recipe(text, "wrong"), "--name", "wrong", *SIZES, code=2)
                self.assertIn(said, refused.err)

    def test_images_that_lie_are_refused(self):
        def shorten(files):
            name = max(files, key=lambda one: len(files[one]))
            files[name] = files[name][:-1]

        def change(files):
            name = max(files, key=lambda one: len(files[one]))
            files[name] = bytes([files[name][0] ^ 1]) + files[name][1:]

        out = entry("../../outside", b"overwritten")
        for said, files in (
            ("its descriptor tells", blobs_of([self.base], lie=shorten)),
            ("its content has the digest", blobs_of([self.base], lie=change)),
            ("leads out", blobs_of([self.base, layer(out)])),
            ("is a hard link to", blobs_of([self.base, layer(entry("a", kind=tarfile.LNKTYPE, target="etc"))])),
            ("leads out", blobs_of([self.base, layer(entry("a", kind=tarfile.LNKTYPE, target="../../outside"))])),
            ("names nothing", blobs_of([self.base, layer(entry("etc/.wh...", b""))])),
            ("it is not in the layout", blobs_of([self.base], lie=lambda files: files.pop("index.json"))),
            ("not a tar header", blobs_of([b"x" * 1024], zipped=False)),
        ):
            with self.subTest(said):
                folder = self.work / "lie"
                shutil.rmtree(folder, ignore_errors=True)
                write_folder(folder, files)
                refused = self.verb("build", "--image", folder, *SIZES, code=2 if "is not in" in said else 1)
                self.assertIn(said, refused.err)
        self.assertEqual((self.work / "outside").read_text(), "untouched")

    def test_files_go_in_and_out_byte_by_byte(self):
        box = self.verb("create", *SIZES).out.strip()
        self.addCleanup(self.verb, "rm", box)
        content = bytes(range(256)) * 5000
        (self.work / "there").write_bytes(content)
        self.verb("upload", box, self.work / "there", "/srv/new/file")
        self.verb("download", box, "/srv/new/file", self.work / "back")
        self.assertEqual((self.work / "back").read_bytes(), content)
        refused = self.verb("download", box, "/srv/absent", self.work / "back", code=2)
        self.assertIn("/srv/absent", refused.err)
        self.assertEqual((self.work / "back").read_bytes(), content)
        self.verb("upload", box, self.work / "absent", "/x", code=2)


if __name__ == "__main__":
    unittest.main()
