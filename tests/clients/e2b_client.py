"""What programs that use E2B's Python client do, against the server at E2B_API_URL and E2B_SANDBOX_URL. One part a run:
e2b_client.py PART [ARGUMENTS]."""

import contextlib
import os
import sys
import time

import httpx
from e2b import (AuthenticationException, CommandExitException, FileNotFoundException, InvalidArgumentException, NotFoundException,
                 PtySize, Sandbox, SandboxException, SandboxQuery, SandboxState, TimeoutException)  # fmt: skip

COUNTER = "i=0; while :; do i=$((i+1)); echo $i >/root/count; sleep 0.1; done"


@contextlib.contextmanager
def sandbox(**options):
    box = Sandbox.create(**{"timeout": 120, **options})
    try:
        yield box
    finally:
        box.kill()


def raises(kind, action, says=""):
    try:
        result = action()
    except kind as error:
        assert says in str(error), error
        return error
    raise AssertionError(f"{kind.__name__} was not raised; got {result!r}")


def count(box):
    """A count that is seen to grow."""
    def now():
        return int((box.files.read("/root/count") if box.files.exists("/root/count") else "") or 0)
    first = now()
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if (latest := now()) > first:
            return latest
        time.sleep(0.1)
    raise AssertionError(f"it stands still at {first}")


def commands():
    with sandbox(envs={"OF_THE_SANDBOX": "1", "BOTH": "sandbox"}) as box:
        done = box.commands.run("echo out; echo err >&2; echo $OF_THE_SANDBOX $BOTH $OWN; pwd; id -un",
                                envs={"OWN": "3", "BOTH": "call"}, cwd="/tmp")  # fmt: skip
        assert done.stdout == "out\n1 call 3\n/tmp\nuser\n", done
        assert done.stderr == "err\n" and done.exit_code == 0 and done.error is None, done
        assert box.commands.run("id -u", user="root").stdout == "0\n"
        assert box.commands.run("id -u", user="user").stdout == "1000\n"
        raises(AuthenticationException, lambda: box.commands.run("id", user="nobody-here"), "nobody-here")
        failed = raises(CommandExitException, lambda: box.commands.run("echo told >&2; exit 7"))
        assert (failed.exit_code, failed.stderr) == (7, "told\n"), failed
        raises(InvalidArgumentException, lambda: box.commands.run("true", cwd="/no/such/folder"), "working directory")
        pieces = []
        done = box.commands.run("echo a; sleep 0.3; echo b", on_stdout=pieces.append)
        assert "".join(pieces) == "a\nb\n" and len(pieces) == 2, pieces
        assert len(box.commands.run("head -c 2000000 /dev/zero | tr '\\0' x").stdout) == 2_000_000
        started = time.monotonic()
        raises(TimeoutException, lambda: box.commands.run("sleep 61", timeout=1))
        assert time.monotonic() - started < 20
        end = time.monotonic() + 20
        while any("sleep 61" in " ".join(p.args) for p in box.commands.list()):  # a time-out ends it
            assert time.monotonic() < end


def files():
    with sandbox() as box:
        info = box.files.write("/root/a/text.txt", "grüße\n")
        assert info.path == "/root/a/text.txt" and info.name == "text.txt", info
        assert box.files.read("/root/a/text.txt") == "grüße\n"
        binary = bytes(range(256)) * 1000
        box.files.write("/root/a/b.bin", binary)
        assert bytes(box.files.read("/root/a/b.bin", format="bytes")) == binary
        box.files.write("/root/a/c.bin", binary, use_octet_stream=True)
        assert b"".join(box.files.read("/root/a/c.bin", format="stream")) == binary
        box.files.write_files([{"path": "m/one", "data": "1"}, {"path": "/root/m/two", "data": "22"}])
        assert [(e.name, e.size) for e in box.files.list("/root/m")] == [("one", 1), ("two", 2)]
        box.files.write("m/one", "")
        assert box.files.read("m/one") == ""
        entry = box.files.get_info("/root/a/text.txt")
        assert (entry.type.value, entry.size, entry.permissions, entry.owner) == ("file", 8, "-rw-r--r--", "user"), entry
        box.files.write("/etc/of-root", "x", user="root")
        assert box.files.get_info("/etc/of-root").owner == "root"
        assert box.files.make_dir("/root/new/deep") is True
        assert box.files.make_dir("/root/new/deep") is False
        assert sorted(e.path for e in box.files.list("/root/new", depth=2)) == ["/root/new/deep"]
        assert box.files.rename("/root/m/two", "/root/new/deep/three").path == "/root/new/deep/three"
        assert not box.files.exists("/root/m/two") and box.files.exists("/root/new/deep/three")
        box.files.remove("/root/new")
        assert not box.files.exists("/root/new")
        raises(FileNotFoundException, lambda: box.files.read("/root/nothing"))
        raises(FileNotFoundException, lambda: box.files.list("/root/nothing"))
        raises(InvalidArgumentException, lambda: box.files.read("/root"), "not a file")


def watches():
    with sandbox() as box:
        box.files.make_dir("/root/w/deep")
        seen = {}
        def until(handle, name):  # of (type, name), in order
            told = seen.setdefault(handle, [])
            end = time.monotonic() + 30
            while name not in [n for _, n in told]:
                assert time.monotonic() < end, told
                told += [(e.type.value, e.name) for e in handle.get_new_events()]
            return told
        flat = box.files.watch_dir("w")
        deep = box.files.watch_dir("/root/w", recursive=True, include_entry=True)
        assert flat.get_new_events() == []
        box.commands.run("cd /root/w; echo 1 >deep/inner; echo 2 >a; chmod 600 a; mv a b; rm b; touch end")
        assert until(flat, "end")[:6] == [("create", "a"), ("write", "a"), ("chmod", "a"), ("rename", "a"), ("create", "b"),
                                          ("remove", "b")], seen  # fmt: skip
        assert until(deep, "end")[:2] == [("create", "deep/inner"), ("write", "deep/inner")], seen
        box.files.write("/root/w/sized", "12345")
        entries, end = [], time.monotonic() + 30
        while not any(e and e.size == 5 for e in entries):
            assert time.monotonic() < end, entries
            entries += [e.entry for e in deep.get_new_events() if e.name == "sized"]
        flat.stop()
        raises(SandboxException, flat.get_new_events, "already stopped")
        raises(FileNotFoundException, lambda: box.files.watch_dir("/root/none"))
        raises(InvalidArgumentException, lambda: box.files.watch_dir("/etc/passwd"), "not a folder")
        box.pause()
        box = Sandbox.connect(box.sandbox_id, timeout=60)
        raises(SandboxException, deep.get_new_events)  # a pause ends it, and says so
        again = box.files.watch_dir("/root/w")
        box.files.remove("/root/w/sized")
        assert ("remove", "sized") in until(again, "sized")


def ports():
    with sandbox() as box:
        assert box.get_host(8080) == f"8080-{box.sandbox_id}.{box.sandbox_domain}", box.get_host(8080)
        box.files.write("/root/www/index.html", "a page")
        box.commands.run("httpd -f -p 8080 -h /root/www", background=True, timeout=0)
        url = os.environ["E2B_SANDBOX_URL"]
        end = time.monotonic() + 30
        while (page := httpx.get(url, headers={"Host": box.get_host(8080)})).status_code == 502:
            assert time.monotonic() < end and page.json()["port"] == 8080, page.text
        assert (page.status_code, page.text) == (200, "a page"), page
        port = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "8080"}
        with httpx.Client(headers=port) as client:  # one client asks again and again
            assert [client.get(url).text for _ in range(20)] == ["a page"] * 20


def background():
    with sandbox() as box:
        counter = box.commands.run(COUNTER, background=True, timeout=0)
        count(box)
        assert [p.pid for p in box.commands.list()] == [counter.pid]
        counter.disconnect()
        count(box)  # nobody listens, it goes on
        again = box.commands.connect(counter.pid)
        assert again.kill() is True
        raises(CommandExitException, again.wait)
        assert box.commands.kill(counter.pid) is False and box.commands.list() == []
        cat = box.commands.run("cat; echo over", background=True, stdin=True)
        box.commands.send_stdin(cat.pid, "line\n")
        box.commands.send_stdin(cat.pid, "more\n")
        box.commands.close_stdin(cat.pid)
        assert cat.wait().stdout == "line\nmore\nover\n"
        raises(SandboxException, lambda: box.commands.send_stdin(99999, "x"))
        assert box.commands.connect(cat.pid).wait().exit_code == 0  # an end can be heard of for a while
        raises(SandboxException, lambda: box.commands.connect(99999), "no such process")


def terminals():
    with sandbox(envs={"OF_THE_SANDBOX": "1"}) as box:
        shell = box.pty.create(size=PtySize(rows=31, cols=97), envs={"OWN": "2"}, cwd="/tmp", timeout=0)
        shown = b""
        def until(wanted):  # what the terminal shows, in pieces of any size
            nonlocal shown
            while wanted not in shown:
                out, err, piece = next(pieces)
                assert out is None and err is None, (out, err)
                shown += piece or b""
            shown = shown.partition(wanted)[2]
        pieces = iter(shell)
        box.pty.send_stdin(shell.pid, b"echo $((6*7)) $(stty size) $OF_THE_SANDBOX$OWN $PWD $TERM $(id -un)\n")
        until(b"42 31 97 12 /tmp xterm-256color user")
        box.pty.resize(shell.pid, PtySize(rows=40, cols=120))
        box.pty.send_stdin(shell.pid, b"stty size\n")
        until(b"40 120")
        box.pty.send_stdin(shell.pid, b"kept=safe; sh -c \"echo aslee''p; exec sleep 1000\"\n")
        until(b"asleep")
        box.pty.send_stdin(shell.pid, b"\x03")  # control-C
        until(b"^C"), until(b"$ ")  # the prompt: a shell may drop what was typed before it
        box.pty.send_stdin(shell.pid, b"echo code $?\n")
        until(b"code 130")
        shell.disconnect()
        again = box.pty.connect(shell.pid, timeout=0)
        pieces = iter(again)
        box.pty.send_stdin(shell.pid, b"echo it is $kept\n")
        until(b"it is safe")
        box.pty.send_stdin(shell.pid, b"exit 3\n")
        assert raises(CommandExitException, again.wait).exit_code == 3
        assert box.pty.kill(shell.pid) is False
        root = box.pty.create(size=PtySize(rows=10, cols=10), user="root")
        assert box.pty.kill(root.pid) is True
        raises(InvalidArgumentException, lambda: box.pty.create(size=PtySize(rows=0, cols=0)), "pty.size.rows")
        plain = box.commands.run("sleep 5", background=True)
        raises(InvalidArgumentException, lambda: box.pty.resize(plain.pid, PtySize(rows=1, cols=1)), "no terminal")
        raises(SandboxException, lambda: box.pty.stream_input(plain.pid, [b"x"]), "not built")


def lifecycle():
    with sandbox(metadata={"team": "a b&c=d", "n": "1"}) as one, sandbox(metadata={"team": "other"}) as two:
        page = Sandbox.list(query=SandboxQuery(metadata={"team": "a b&c=d"})).next_items()
        assert [s.sandbox_id for s in page] == [one.sandbox_id] and page[0].metadata["n"] == "1", page
        seen, pages = [], Sandbox.list(limit=1)
        while pages.has_next:
            seen += [s.sandbox_id for s in pages.next_items()]
        assert {one.sandbox_id, two.sandbox_id} <= set(seen) and len(seen) == len(set(seen)), seen
        before = one.get_info()
        assert before.state == SandboxState.RUNNING and before.template_id == "base", before
        one.set_timeout(600)
        assert (one.get_info().end_at - before.end_at).total_seconds() > 400
        counter = one.commands.run(COUNTER, background=True, timeout=0)
        reached = count(one)
        assert one.pause() and not one.pause()  # the second: it is paused already
        assert one.get_info().state == SandboxState.PAUSED and not one.is_running()
        paused = Sandbox.list(query=SandboxQuery(state=[SandboxState.PAUSED])).next_items()
        assert [s.sandbox_id for s in paused] == [one.sandbox_id], paused
        same = Sandbox.connect(one.sandbox_id, timeout=60)
        assert same.is_running() and count(same) > reached
        assert [p.pid for p in same.commands.list()] == [counter.pid]
        same.commands.kill(counter.pid)
        assert two.kill() is True and two.kill() is False and not two.is_running()
        raises(NotFoundException, lambda: Sandbox.connect("vffffffffffffffff"))
        raises(NotFoundException, lambda: Sandbox.set_timeout("vffffffffffffffff", 5))
        raises(SandboxException, lambda: two.commands.run("true"), "not found")
        raises(AuthenticationException, lambda: Sandbox.create(api_key="e2b_00"))
        raises(SandboxException, lambda: Sandbox.create("no-such-template"), "no template")


def copies():
    with sandbox(metadata={"who": "first"}) as box:
        counter = box.commands.run(COUNTER, background=True, timeout=0)
        reached = count(box)
        copy = box.fork()[0]
        try:
            assert count(copy) > reached and copy.sandbox_id != box.sandbox_id
            copy.files.write("/root/mine", "x")
            assert not box.files.exists("/root/mine")
        finally:
            copy.kill()
        taken = box.create_snapshot(name="as-it-was")
        assert taken.snapshot_id == "as-it-was", taken
        assert [s.snapshot_id for s in Sandbox.list_snapshots(sandbox_id=box.sandbox_id).next_items()] == ["as-it-was"]
        box.commands.kill(counter.pid)
        with sandbox(template="as-it-was") as other:
            assert count(other) > reached
        assert Sandbox.delete_snapshot("as-it-was") is True and Sandbox.delete_snapshot("as-it-was") is False
        [now] = box.get_metrics()
        assert now.cpu_count == 1 and 0 < now.mem_used < now.mem_total and 0 < now.disk_used < now.disk_total, now


def before_a_crash():
    running = Sandbox.create(timeout=600, metadata={"crash": "running"})
    paused = Sandbox.create(timeout=600, metadata={"crash": "paused"}, envs={"KEPT": "yes"})
    counters = [box.commands.run(COUNTER, background=True, timeout=0).pid for box in (running, paused)]
    reached = [count(running), count(paused)]
    paused.pause()
    print("RESULT", running.sandbox_id, paused.sandbox_id, *counters, *reached)


def after_a_crash(running, paused, running_pid, paused_pid, running_count, paused_count):
    states = {s.sandbox_id: s.state for s in Sandbox.list().next_items()}
    assert states == {running: SandboxState.RUNNING, paused: SandboxState.PAUSED}, states
    for name, pid, reached in ((running, running_pid, running_count), (paused, paused_pid, paused_count)):
        box = Sandbox.connect(name, timeout=300)
        assert count(box) > int(reached)
        assert [p.pid for p in box.commands.list()] == [int(pid)]
        handle = box.commands.connect(int(pid))  # a process of before can be heard and ended
        assert handle.kill() is True
        raises(CommandExitException, handle.wait)
    assert Sandbox.connect(paused).commands.run("echo $KEPT").stdout == "yes\n"
    assert Sandbox.kill(running) and Sandbox.kill(paused)


def signed():
    with sandbox() as box:
        text = "again and again " * 5000
        box.files.write("/root/zipped", text, gzip=True)
        assert box.files.read("/root/zipped") == text

        def ask(method, url, **more):
            """As a browser that the host's name leads to the sandbox."""
            asked = httpx.URL(url)
            return httpx.request(method, os.environ["E2B_API_URL"] + asked.raw_path.decode(),
                                 headers={"Host": f"49983-{box.sandbox_id}.local"}, **more)  # fmt: skip
        put = ask("POST", box.upload_url("/root/b c", use_signature_expiration=60), files={"file": ("b c", b"signed & sent")})
        assert put.status_code == 200, put.text
        url = box.download_url("/root/b c")
        assert ask("GET", url).content == b"signed & sent"
        assert ask("GET", box.download_url("/root/b c", user="root")).status_code == 200
        for wrong in (url.replace("b%20c", "zipped").replace("b+c", "zipped"), url[:-1], url + "&username=root",
                      box.download_url("/root/b c", use_signature_expiration=-1)):  # fmt: skip
            assert ask("GET", wrong).status_code == 401, wrong
        assert ask("POST", url, files={"file": ("b", b"over")}).status_code == 401
        with sandbox() as other:  # a signature is one sandbox's
            assert httpx.get(os.environ["E2B_API_URL"] + httpx.URL(url).raw_path.decode(),
                             headers={"Host": f"49983-{other.sandbox_id}.local"}).status_code == 401  # fmt: skip


def templates(folder):
    from e2b import BuildException, Template, wait_for_file

    os.makedirs(f"{folder}/tree/deep")
    for name, text in (("one.txt", "1"), ("tree/deep/leaf", "leaf")):
        with open(f"{folder}/{name}", "w") as file:
            file.write(text)

    def recipe(last):
        return (Template(file_context_path=folder).from_image("busybox")
                .set_user("root").run_cmd("mkdir /app && echo built by $(id -u)").set_user("user").set_workdir("/app")
                .set_envs({"COLOUR": "deep blue", "LEVEL": "3"}).copy("one.txt", "/app/", mode=0o600).copy("tree", "leaves")
                .run_cmd(f"echo {last} $COLOUR >/tmp/last; pwd >>/tmp/last")
                .set_start_cmd("echo up >/tmp/up; exec sleep 4321", wait_for_file("/tmp/up")))  # fmt: skip

    def build(template, name, **options):
        said = []
        made = Template.build(template, name, on_build_logs=lambda entry: said.append(entry.message), **options)
        return made, said

    assert not Template.exists("made-here")
    made, said = build(recipe("first"), "made-here", cpu_count=1, memory_mb=128)
    assert made.template_id == "made-here" and made.build_id and Template.exists("made-here"), made
    assert "built by 0" in said and any("8 steps done, 0 were done before" in line for line in said), said
    with sandbox(template="made-here", envs={"LEVEL": "4"}) as box:
        done = box.commands.run("cat /tmp/last; pwd; echo $COLOUR $LEVEL; cat one.txt leaves/deep/leaf; stat -c %a:%u one.txt")
        assert done.stdout == "first deep blue\n/app\n/app\ndeep blue 4\n1leaf600:1000\n", done
        assert box.commands.run("ps | grep -c '[s]leep 4321'").stdout == "1\n"
        box.pause()
        assert Sandbox.connect(box.sandbox_id).commands.run("printf resumed").stdout == "resumed"
    _, said = build(recipe("second"), "made-here:v2", tags=["stable"], memory_mb=128)
    assert any("1 steps done, 7 were done before" in line for line in said), said
    with sandbox(template="made-here:stable") as box:
        assert box.commands.run("head -1 /tmp/last").stdout == "second deep blue\n"
    assert sorted(tag.tag for tag in Template.get_tags("made-here")) == ["default", "stable", "v2"]
    Template.assign_tags("made-here:v2", "also")
    Template.remove_tags("made-here", ["stable", "v2"])
    assert sorted(tag.tag for tag in Template.get_tags("made-here")) == ["also", "default"]
    build(Template().from_template("made-here").run_cmd("echo onward $LEVEL >/tmp/onward"), "onward")
    with sandbox(template="onward") as box:
        assert box.commands.run("cat /tmp/onward").stdout == "onward 3\n"
    failed = raises(BuildException, lambda: build(Template().from_template("onward").run_cmd("echo why >&2; exit 6"), "onward"))
    assert "ended with code 6: why" in str(failed), failed
    with sandbox(template="onward") as box:  # the old one is whole
        assert box.commands.run("cat /tmp/onward").stdout == "onward 3\n"
    raises(BuildException, lambda: build(Template().from_image("python:3"), "never"), "no network to fetch it")
    raises(BuildException, lambda: build(Template().from_template("absent"), "never"), "no template 'absent'")
    assert not Template.exists("never")
    assert Sandbox.delete_snapshot("onward") and not Template.exists("onward")


globals()[sys.argv[1]](*sys.argv[2:])
print("passed", sys.argv[1])
