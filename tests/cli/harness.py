"""What the end-to-end tests share: running the program, small models and recipes, a look at what a run left behind."""

import json
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BINARY = pathlib.Path(os.environ.get("TIDELOCK_BINARY", ROOT / "build/release/tidelock")).resolve()
NANO = ROOT / "models/nano"
VOCAB = json.loads((NANO / "config.json").read_text())["vocab_size"]
PATIENCE = 1200  # seconds until a call counts as hanging; far more than any needs on a loaded machine


class Result:
    def __init__(self, done):
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.text = self.out + self.err


class Case(unittest.TestCase):
    """A test with a temporary folder of its own, which is also the program's."""

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="tidelock-e2e-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.tmp = self.folder / "tmp"
        self.tmp.mkdir()

    def environment(self, **more):
        env = {k: v for k, v in os.environ.items() if not k.startswith("TIDELOCK_")}
        return {**env, "TMPDIR": str(self.tmp), **more}

    def tidelock(self, *arguments, code=0, env=None):
        """Runs the program in the repository's root and checks its exit code (None: any)."""
        done = subprocess.run([BINARY, *map(str, arguments)], cwd=ROOT, env=self.environment(**(env or {})),
                              capture_output=True, text=True, errors="replace", timeout=PATIENCE)  # fmt: skip
        result = Result(done)
        if code is not None:
            self.assertEqual(result.code, code, f"{' '.join(map(str, arguments))}\n{result.text}")
        return result

    def start(self, *arguments):
        return subprocess.Popen([BINARY, *map(str, arguments)], cwd=ROOT, env=self.environment(),
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip

    def refused(self, *arguments, code=2, says=(), env=None):
        """The program ends with `code` and one message that holds every text of `says`."""
        result = self.tidelock(*arguments, code=code, env=env)
        for text in says:
            self.assertIn(text, result.err, " ".join(map(str, arguments)))
        for word in ("terminate called", "std::", "Segmentation"):
            self.assertNotIn(word, result.err)
        return result

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def eventually(self, condition, what, patience=60):
        """Waits until `condition()` is falsy; what is left otherwise is the failure's text."""
        end = time.monotonic() + patience
        while (left := condition()) and time.monotonic() < end:
            time.sleep(0.02)
        self.assertFalse(left, what)

    # ---- what a program that used this test's folder has on the host

    def sandbox_runs(self):
        return [p.name for p in self.tmp.iterdir() if p.name.startswith("tidelock-sandbox-")]

    def traces(self, runs):
        """Processes, mounts, folders and cgroups of ours; `runs` are names of sandbox runs seen while it lived."""
        found = [f"folder {name}" for name in self.sandbox_runs()]
        marker = f"TMPDIR={self.tmp}".encode()
        for process in pathlib.Path("/proc").iterdir():
            if not process.name.isdigit() or int(process.name) == os.getpid():
                continue
            try:
                if marker in (process / "environ").read_bytes().split(b"\0"):
                    found.append(f"process {process.name} " + (process / "cmdline").read_text().replace("\0", " "))
                elif any(run in (process / "cgroup").read_text() for run in runs):
                    found.append(f"process {process.name} in a sandbox")
            except OSError:
                continue  # it ended while we looked, or is not ours to see
        mounts = pathlib.Path("/proc/self/mountinfo").read_text()
        found += [f"mount {line}" for line in mounts.splitlines() if str(self.tmp) in line]
        for path, folders, _ in os.walk("/sys/fs/cgroup"):
            found += [f"cgroup {path}/{name}" for name in folders if any(run in name for run in runs)]
        return found


# ---- files


def npy_shape(path):
    raw = pathlib.Path(path).read_bytes()
    assert raw[:6] == b"\x93NUMPY", raw[:16]
    header = raw[10 : 10 + struct.unpack("<H", raw[8:10])[0]].decode()
    assert "'<f4'" in header, header
    return tuple(int(n) for n in re.search(r"\(([\d, ]*)\)", header).group(1).split(",") if n.strip())


def safetensors_header(raw):
    size = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + size]), 8 + size


def records_of_tensorboard(folder):
    """The number of TFRecords; every frame must end where the next begins."""
    count = 0
    for path in pathlib.Path(folder).iterdir():
        raw, at = path.read_bytes(), 0
        while at < len(raw):
            at += 8 + 4 + struct.unpack("<Q", raw[at : at + 8])[0] + 4
            count += 1
        assert at == len(raw), f"{path}: a frame reaches beyond the end"
    return count


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def adapter_bytes(run):
    return (run / "adapter/adapter_model.safetensors").read_bytes()


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


# ---- recipes

SMALL_RUN = """
[model]
path = "{model}"
[adapter]
rank = 2
[rl]
steps = {steps}
groups = 2
group_size = 4
learning_rate = 1e-2
[rollout]
max_tokens = 96
concurrent = 8
[eval]
tasks = 2
samples = 2
"""

MIXTURE = """
[[tasks.mixture]]
family = "calc"
difficulty = 1
[[tasks.mixture]]
family = "vault"
difficulty = 1
[[tasks.mixture]]
family = "shell"
difficulty = 1
"""

# Any two different answers most likely get different rewards: every group teaches something, whatever the model can do.
LOTTERY = """#!/bin/sh
digit=$(md5sum </logs/agent/answer.txt | tr -dc 0-9 | cut -c 1)
echo "{\\"reward\\": 0.$digit}" >/logs/verifier/reward.json
"""


def lottery_tasks(folder, count=24):
    """A folder of Harbor tasks whose grader rewards answers by their checksum."""
    for i in range(count):
        task = folder / f"product-{i}"
        (task / "tests").mkdir(parents=True)
        (task / "task.toml").write_text('version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n')
        (task / "instruction.md").write_text(f"{11 + i}*{50 - i}?")
        (task / "tests/test.sh").write_text(LOTTERY)
    return folder
