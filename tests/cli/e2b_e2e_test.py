#!/usr/bin/env python3
"""`tidelock sandbox serve` from outside: E2B's own clients, HTTP by hand, a server that is killed. Needs TIDELOCK_BINARY and
build/clients (tools/clients.sh)."""

import hashlib
import http.client
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from harness import BINARY, ROOT, Case  # noqa: E402

KEY = "e2b_0123456789abcdef"
PYTHON = ROOT / "build/clients/python/bin/python"


class Server:
    """A server of a state directory. Sandboxes outlive it: remove() ends them."""

    def __init__(self, folder):
        self.folder = folder
        self.process = None

    def start(self, *arguments):
        keys = self.folder.parent / "keys.txt"
        keys.write_text(f"{hashlib.sha256(KEY.encode()).hexdigest()} tests\n")
        with open(self.folder.parent / "log", "a") as log:
            self.process = subprocess.Popen(
                [BINARY, "sandbox", "serve", "--directory", self.folder, "--listen", "127.0.0.1:0", "--api-key-file", keys,
                 "--memory", "128", "--disk", "64", "--pool", "1", *arguments],
                cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)  # fmt: skip
        line = self.process.stdout.readline()
        match = re.fullmatch(r"sandboxes at http://127\.0\.0\.1:(\d+)\n", line)
        assert match, f"{line!r} {(self.folder.parent / 'log').read_text()}"
        self.port = int(match.group(1))
        return self

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        self.process.wait(60)
        self.process.stdout.close()
        return self.process.returncode

    def remove(self):
        if self.process.poll() is None:
            self.end()
        listed = subprocess.run([BINARY, "sandbox", "--dir", self.folder, "ls"], capture_output=True, text=True).stdout
        for line in listed.splitlines():
            if line.startswith("sandbox "):
                subprocess.run([BINARY, "sandbox", "--dir", self.folder, "rm", line.split()[1]], check=True)
        shutil.rmtree(self.folder.parent)

    def ask(self, method, path, body=None, key=KEY, sandbox=None, headers=None, chunked=False):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        all_headers = {**({"X-API-KEY": key} if key else {}), **(headers or {})}
        if sandbox:
            all_headers |= {"E2b-Sandbox-Id": sandbox["sandboxID"], "X-Access-Token": sandbox.get("envdAccessToken", "")}
        if isinstance(body, dict):
            body = json.dumps(body).encode()
            all_headers["Content-Type"] = all_headers.get("Content-Type", "application/json")
        connection.request(method, path, iter([body[:5], body[5:]]) if chunked else body, all_headers, encode_chunked=chunked)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response, (json.loads(text) if text and response.getheader("Content-Type") == "application/json" else text)

    def environment(self, case):
        url = f"http://127.0.0.1:{self.port}"
        return case.environment(E2B_API_URL=url, E2B_SANDBOX_URL=url, E2B_API_KEY=KEY)


class E2b(Case):
    @classmethod
    def setUpClass(cls):
        cls.server = Server(pathlib.Path(tempfile.mkdtemp(prefix="tidelock-e2b-")) / "state").start()
        cls.addClassCleanup(cls.server.remove)

    def client(self, *words):
        """A part of the Python client's script; what it says in a line RESULT."""
        done = subprocess.run([PYTHON, ROOT / "tests/clients/e2b_client.py", *words], env=self.server.environment(self),
                              capture_output=True, text=True, timeout=300)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr + (self.server.folder.parent / "log").read_text()[-2000:])
        self.assertIn(f"passed {words[0]}", done.stdout)
        found = re.search(r"(?m)^RESULT (.*)$", done.stdout)
        return found.group(1).split() if found else []

    def create(self, **fields):
        response, body = self.server.ask("POST", "/v2/sandboxes", {"templateID": "base", **fields})
        self.assertEqual(response.status, 201, body)
        self.addCleanup(self.server.ask, "DELETE", f"/sandboxes/{body['sandboxID']}")
        return body

    def check(self, answer, status, says=""):
        response, body = answer
        self.assertEqual(response.status, status, body)
        self.assertEqual(body["code"], status)
        self.assertIn(says, body["message"])
        return body

    # ---- E2B's own clients

    def test_python_commands(self):
        self.client("commands")

    def test_python_files(self):
        self.client("files")

    def test_python_background(self):
        self.client("background")

    def test_python_terminals(self):
        self.client("terminals")

    def test_python_watches(self):
        self.client("watches")

    def test_python_lifecycle(self):
        self.client("lifecycle")

    def test_python_copies(self):
        self.client("copies")

    def test_javascript(self):
        done = subprocess.run(["node", ROOT / "tests/clients/e2b_client.mjs"], env=self.server.environment(self),
                              capture_output=True, text=True, timeout=300)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr + (self.server.folder.parent / "log").read_text()[-2000:])
        self.assertIn("all passed", done.stdout)

    def test_a_killed_server_loses_no_sandbox(self):
        before = self.client("before_a_crash")
        self.server.end(signal.SIGKILL)
        self.server.start()
        self.client("after_a_crash", *before)
        self.assertEqual(self.server.end(), 0)  # asked to end, it ends well
        self.server.start()

    # ---- by hand

    def test_older_routes_and_chunked_bodies(self):
        response, made = self.server.ask("POST", "/sandboxes", {"templateID": "base", "timeout": 60}, chunked=True)
        self.assertEqual(response.status, 201, made)
        self.assertNotIn("envdAccessToken", made)  # not asked to be secure
        where = f"/sandboxes/{made['sandboxID']}"
        self.assertEqual(self.server.ask("POST", f"{where}/refreshes", {"duration": 300})[0].status, 204)
        self.assertEqual(self.server.ask("POST", f"{where}/pause", {})[0].status, 204)
        self.check(self.server.ask("POST", f"{where}/pause", {}), 409, "paused already")
        self.assertNotIn(made["sandboxID"], str(self.server.ask("GET", "/sandboxes")[1]))  # running ones alone
        self.assertEqual(self.server.ask("POST", f"{where}/resume", {"timeout": 60})[0].status, 201)
        self.check(self.server.ask("POST", f"{where}/resume", {}), 409, "is running")
        self.assertEqual(self.server.ask("POST", f"{where}/connect", {"timeout": 60})[0].status, 200)
        response, body = self.server.ask("DELETE", where)
        self.assertEqual((response.status, body), (204, b""))
        self.check(self.server.ask("GET", where), 404)
        self.check(self.server.ask("DELETE", where), 404)

    def test_only_keys_and_tokens_open_doors(self):
        box = self.create()
        for key in (None, "e2b_00", KEY + "0", box["envdAccessToken"]):
            self.check(self.server.ask("GET", "/v2/sandboxes", key=key), 401)
        self.check(self.server.ask("GET", "/v2/sandboxes", key=None, headers={"Authorization": f"Bearer {KEY}"}), 401)
        other = {**box, "envdAccessToken": self.create()["envdAccessToken"]}
        for door in (other, {**box, "envdAccessToken": ""}, {**box, "envdAccessToken": KEY}):
            self.check(self.server.ask("GET", "/files?path=/etc/passwd", sandbox=door), 401)
            self.check(self.server.ask("POST", "/process.Process/Start", b"x", sandbox=door), 401)
        self.assertEqual(self.server.ask("GET", "/files?path=/etc/passwd", key=None, sandbox=box)[0].status, 200)
        for who in (box, {"sandboxID": box["sandboxID"]}):
            self.assertEqual(self.server.ask("GET", "/health", key=None, sandbox=who)[0].status, 204)
        gone = {"sandboxID": "v0000000000000000"}
        self.assertEqual(self.check(self.server.ask("GET", "/health", sandbox=gone), 502)["sandboxId"], gone["sandboxID"])
        host = {"Host": f"49983-{box['sandboxID']}.example.org", "X-Access-Token": box["envdAccessToken"]}
        self.assertEqual(self.server.ask("GET", "/files?path=/etc/hosts", key=None, headers=host)[0].status, 200)

    def test_what_is_wrong_or_not_built_is_said(self):
        make = lambda **fields: self.server.ask("POST", "/v2/sandboxes", {"templateID": "base", **fields})  # noqa: E731
        self.check(make(timeout=-1), 400, "timeout")
        self.check(make(metadata={"a": 1}), 400, "metadata")
        self.check(make(allow_internet_access=True), 501, "network")
        self.check(make(network={"allowOut": ["1.1.1.1"]}), 501, "network")
        self.check(make(autoPauseMemory=False), 501, "autoPauseMemory")
        self.check(make(somethingNew=1), 501, "somethingNew")
        self.check(self.server.ask("POST", "/v2/sandboxes", b"{"), 400)
        self.check(self.server.ask("GET", "/v2/sandboxes?limit=0"), 400, "limit")
        self.check(self.server.ask("POST", "/v3/templates", {}), 501)
        box = self.create()
        self.check(self.server.ask("GET", "/", sandbox=box, headers={"E2b-Sandbox-Port": "8080"}), 501, "8080")
        self.check(self.server.ask("POST", "/init", {}, sandbox=box), 501)
        self.check(self.server.ask("POST", "/files?path=a", b"x", sandbox=box, headers={"Content-Type": "text/plain"}), 415)
        envelope = {"Content-Type": "application/connect+json"}
        for body in (b"", b"\0\0\0\0\7{", b"\0\xff\xff\xff\xff{}", b"\0\0\0\0\2[]", b"\1\0\0\0\2{}"):
            response, text = self.server.ask("POST", "/process.Process/Start", body, sandbox=box, headers=envelope)
            self.assertEqual((response.status, text[0]), (200, 2), body)
            self.assertIn("error", json.loads(text[5:]))
        response, body = self.server.ask("POST", "/filesystem.Filesystem/Stat", b"[" * 5000, sandbox=box)
        self.assertEqual((response.status, body["code"]), (400, "invalid_argument"))

    def test_time_outs_kill_or_pause_and_pauses_may_end_by_themselves(self):
        killed = self.create(timeout=1)
        paused = self.create(timeout=1, autoPause=True)
        woken = self.create(timeout=1, autoPause=True, autoResume={"enabled": True})
        state = lambda box: self.server.ask("GET", f"/sandboxes/{box['sandboxID']}")[1].get("state", "gone")  # noqa: E731
        wanted = ["gone", "paused", "paused"]
        self.eventually(lambda: [state(b) for b in (killed, paused, woken)] != wanted, "time-outs do nothing", 30)
        self.check(self.server.ask("GET", "/files?path=/etc/hosts", sandbox=paused), 502, "paused")
        self.assertEqual(self.server.ask("GET", "/files?path=/etc/hosts", sandbox=woken)[0].status, 200)


if __name__ == "__main__":
    unittest.main()
