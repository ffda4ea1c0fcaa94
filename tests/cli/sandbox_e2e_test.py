#!/usr/bin/env python3
"""`tidelock sandbox VERB` from outside. Needs TIDELOCK_BINARY."""

import fcntl
import json
import os
import pathlib
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from harness import BINARY, ROOT, Case  # noqa: E402


class Terminal:
    """A terminal of the given size with a program on it."""

    def __init__(self, rows, columns, *arguments, env):
        self.ours, self.theirs = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(self.theirs)
        self.process = subprocess.Popen(arguments, stdin=self.theirs, stdout=self.theirs, stderr=subprocess.PIPE, cwd=ROOT, env=env)
        self.shown = b""

    def resize(self, rows, columns):
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys):
        os.write(self.ours, keys)

    def until(self, wanted):
        end = time.monotonic() + 60
        while wanted not in self.shown:
            assert time.monotonic() < end and (self.process.poll() is None or select.select([self.ours], [], [], 0)[0]), self.shown
            if select.select([self.ours], [], [], 0.1)[0]:
                self.shown += os.read(self.ours, 4096)
        self.shown = self.shown.partition(wanted)[2]

    def end(self):
        """The exit code and what was said; the terminal is as it was."""
        said = self.process.communicate(timeout=60)[1].decode()
        assert termios.tcgetattr(self.theirs) == self.before, "the terminal is left changed"
        assert os.get_blocking(self.theirs), "the terminal is left non-blocking"
        os.close(self.ours), os.close(self.theirs)
        return self.process.returncode, said


class SandboxVerbs(Case):
    @classmethod
    def setUpClass(cls):
        cls.state = pathlib.Path(tempfile.mkdtemp(prefix="tidelock-verbs-")) / "state"
        made = subprocess.run([BINARY, "sandbox", "--dir", cls.state, "create", "--memory", "128", "--disk", "64"],
                              capture_output=True, text=True, check=True)  # fmt: skip
        cls.id = made.stdout.strip()
        cls.addClassCleanup(shutil.rmtree, cls.state.parent)
        cls.addClassCleanup(subprocess.run, [BINARY, "sandbox", "--dir", cls.state, "rm", cls.id], check=True)

    def verb(self, *arguments, **more):
        return self.tidelock("sandbox", "--dir", self.state, *arguments, **more)

    def shell(self, *arguments):
        terminal = Terminal(31, 97, BINARY, "sandbox", "--dir", self.state, "shell", self.id, *arguments,
                            env=self.environment(TERM="vt220"))  # fmt: skip
        self.addCleanup(terminal.process.kill)  # it holds the directory's lock
        return terminal

    def test_a_shell_is_typed_in_and_follows_its_window(self):
        terminal = self.shell()
        terminal.type(b"echo $((6*7)) $(stty size) $TERM $(id -u)\r")  # as a keyboard sends it
        terminal.until(b"42 31 97 vt220 1000")
        terminal.resize(12, 40)
        os.kill(terminal.process.pid, signal.SIGWINCH)  # what the kernel sends to a terminal's foreground
        terminal.type(b"sleep 0.5; stty size\r")
        terminal.until(b"12 40")
        terminal.type(b"sh -c \"echo aslee''p; exec sleep 1000\"\r")  # before it runs, control-C finds only the shell
        terminal.until(b"asleep")
        terminal.type(b"\x03")
        terminal.until(b"^C"), terminal.until(b"$ ")  # the prompt: a shell may drop what was typed before it
        terminal.type(b"echo code $?\r")
        terminal.until(b"code 130")
        terminal.type(b"exit 7\r")
        self.assertEqual(terminal.end(), (7, ""))

    def test_a_shell_that_is_told_to_end_ends_its_session_and_restores_the_terminal(self):
        terminal = self.shell("--root", "--", "sh", "-c", "sleep 2000 & echo rea''dy $(id -u); cat")
        terminal.until(b"ready 0")
        terminal.process.send_signal(signal.SIGTERM)
        self.assertEqual(terminal.end(), (128 + signal.SIGTERM, ""))
        self.assertEqual(self.verb("exec", self.id, "--", "sh", "-c", "ps | grep -c '[s]leep 2000'", code=1).out, "0\n")

    def test_pasting_more_than_a_reader_takes_loses_nothing_of_what_it_shows(self):
        terminal = self.shell("--", "sh", "-c", "stty raw -echo; echo rea''dy; head -c 300000 | tr x y; echo over")
        terminal.until(b"ready")
        paste = b"x" * 300_000
        os.set_blocking(terminal.ours, False)
        sent = 0
        got = b""
        end = time.monotonic() + 120
        while got.count(b"y") < len(paste):
            self.assertLess(time.monotonic(), end, f"{sent} sent, {len(got)} shown")
            readable, writable, _ = select.select([terminal.ours], [terminal.ours] if sent < len(paste) else [], [], 1)
            if writable:
                sent += os.write(terminal.ours, paste[sent:sent + 1000])  # fmt: skip
            if readable:
                got += os.read(terminal.ours, 65536)
        terminal.shown = got
        terminal.until(b"over")
        self.assertEqual(terminal.end(), (0, ""))

    def test_logs_tell_what_happened_to_a_sandbox(self):
        self.assertEqual(self.verb("snapshot", self.id, "told").code, 0)
        self.addCleanup(self.verb, "rm", "--snapshot", "told")
        shown = self.verb("logs", self.id)
        self.assertEqual(shown.code, 0, shown.err)
        first, *_, last = shown.out.splitlines()
        self.assertRegex(first, r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} info  create done  seconds=\d+\.\d{3}  template=")
        self.assertRegex(last, "snapshot done  layer=.*  name=told")
        with open(self.state / "logs" / f"{self.id}.jsonl", "a") as log:  # what a client of a server may have written
            log.write(json.dumps({"time": 1, "level": "info", "message": "\x1b]0;title\x07\x9b1m\n", "fields": {}}) + "\n")
        self.assertIn("\\x1b]0;title\\x07\\x9b1m\\x0a\n", self.verb("logs", self.id).out)
        self.refused("sandbox", "--dir", self.state, "logs", "nobody", says=["no sandbox nobody"])

    def test_a_shell_needs_a_terminal_and_a_sandbox(self):
        self.refused("sandbox", "--dir", self.state, "shell", self.id, says=["not a terminal", "exec"])
        terminal = Terminal(9, 9, BINARY, "sandbox", "--dir", self.state, "shell", "v0", env=self.environment())
        code, said = terminal.end()
        self.assertEqual(code, 2)
        self.assertIn("v0", said)


if __name__ == "__main__":
    unittest.main()
