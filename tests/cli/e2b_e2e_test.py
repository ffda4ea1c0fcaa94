#!/usr/bin/env python3
"""`tidelock sandbox serve` from outside: E2B's own clients, HTTP by hand, a server that is killed. Needs TIDELOCK_BINARY and
build/clients (tools/clients.sh)."""

import base64
import hashlib
import http.client
import json
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
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

    def test_python_ports(self):
        self.client("ports")

    def test_python_lifecycle(self):
        self.client("lifecycle")

    def test_python_copies(self):
        self.client("copies")

    def test_python_signed_urls_and_gzip(self):
        self.client("signed")

    def test_python_templates(self):
        self.client("templates", str(self.folder / "context"))

    def test_templates_are_refused_with_a_reason(self):
        ask = self.server.ask
        response, body = ask("POST", "/v3/templates", {"name": "by-hand:v1", "memoryMB": 128})
        self.assertEqual((response.status, body["templateID"], body["tags"]), (202, "by-hand", ["v1"]))
        build = f"/v2/templates/by-hand/builds/{body['buildID']}"
        self.check(ask("POST", build, {"fromImage": "python:3"}), 400, "no network to fetch it")
        self.check(ask("POST", build, {"fromImage": "busybox", "fromImageRegistry": {"type": "registry"}}), 501, "no network")
        self.check(ask("POST", build, {"fromTemplate": "absent"}), 404, "absent")
        self.check(ask("POST", build, {"fromImage": "busybox", "steps": [{"type": "FLY", "args": []}]}), 400, "steps[0].type")
        copy = {"type": "COPY", "args": ["a", "/a"], "filesHash": "0" * 64}
        self.check(ask("POST", build, {"fromImage": "busybox", "steps": [copy]}), 400, "were not sent")
        copy["filesHash"] = "../../../../etc/passwd"
        self.check(ask("POST", build, {"fromImage": "busybox", "steps": [copy]}), 400, "expected a hash")
        copy = {"type": "COPY", "args": ["../a", "/a"], "filesHash": "0" * 64}
        self.check(ask("POST", build, {"fromImage": "busybox", "steps": [copy]}), 400, "below the folder")
        self.check(ask("POST", build + "0", {"fromImage": "busybox"}), 404, "was not found")
        self.check(ask("POST", build.replace("by-hand", "base"), {"fromImage": "busybox"}), 404, "was not found")
        status = f"/templates/by-hand/builds/{body['buildID']}/status"
        self.assertEqual(ask("GET", status)[1]["status"], "waiting")
        self.check(ask("GET", status + "?logsOffset=many"), 400, "logsOffset")
        self.check(ask("GET", status, key=None), 401)
        for name, code in (("base", 409), ("", 400), ("../up", 400), ("step-0", 400), ("a:b:c", 400)):
            self.check(ask("POST", "/v3/templates", {"name": name}), code)
        self.check(ask("POST", "/templates", {"dockerfile": "FROM a"}), 501, "/v3/templates")
        response, place = ask("GET", f"/templates/by-hand/files/{'a' * 64}")
        self.assertEqual((response.status, place["present"]), (201, False))
        path = place["url"].partition(str(self.server.port))[2]
        self.check(ask("PUT", path + "0", b"x", key=None), 403, "not known")
        self.assertEqual(ask("PUT", path, b"sent", key=None)[0].status, 200)
        self.check(ask("PUT", path, b"again", key=None), 403, "was used")
        self.assertTrue(ask("GET", f"/templates/by-hand/files/{'a' * 64}")[1]["present"])
        self.assertIn("base", [one["templateID"] for one in ask("GET", "/templates")[1]])
        self.check(ask("GET", "/templates/aliases/absent"), 404)
        self.assertEqual(ask("GET", "/templates/aliases/base")[1], {"templateID": "base", "public": False})
        self.check(ask("DELETE", "/templates/absent"), 404)

    def javascript(self, script):
        done = subprocess.run(["node", ROOT / "tests/clients" / script], env=self.server.environment(self),
                              capture_output=True, text=True, timeout=300)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr + (self.server.folder.parent / "log").read_text()[-2000:])
        self.assertIn("all passed", done.stdout)

    def test_javascript(self):
        self.javascript("e2b_client.mjs")

    def test_javascript_templates(self):
        self.javascript("e2b_templates.mjs")

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

    def test_logs_tell_what_happened(self):
        box = self.create()
        where = f"/sandboxes/{box['sandboxID']}/logs"
        self.serve(box, "echo 'two\twords'; sleep 100")
        self.assertEqual(self.server.ask("POST", f"/sandboxes/{box['sandboxID']}/pause", {})[0].status, 204)
        response, body = self.server.ask("GET", f"/v2{where}")
        self.assertEqual(response.status, 200, body)
        self.assertEqual([entry["message"] for entry in body["logs"]], ["create done", "process started", "pause done"])
        started = body["logs"][1]
        self.assertEqual((started["level"], started["fields"]["user"]), ("info", "user"))
        self.assertIn("echo 'two\twords'", started["fields"]["command"])
        response, last = self.server.ask("GET", f"/v2{where}?direction=backward&limit=1&search=done")
        self.assertEqual(last["logs"], [body["logs"][2]])
        response, older = self.server.ask("GET", where)
        self.assertEqual(older["logEntries"], body["logs"])
        self.assertTrue(older["logs"][2]["line"].startswith("pause done layer="))
        self.assertEqual(self.server.ask("GET", f"/v2{where}?level=error")[1], {"logs": []})
        self.check(self.server.ask("GET", f"/v2{where}?level=loud"), 400, "level: expected debug, info, warn or error")
        self.check(self.server.ask("GET", "/v2/sandboxes/v000000000000/logs"), 404, "v000000000000")
        self.check(self.server.ask("GET", where, key=None), 401)

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

    def serve(self, box, script):
        """A script in the sandbox that goes on; its files can be put there before."""
        message = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", script]}, "stdin": False}).encode()
        body = b"\0" + len(message).to_bytes(4, "big") + message
        connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=60)
        self.addCleanup(connection.close)
        connection.sendall((f"POST /process.Process/Start HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {box['sandboxID']}\r\nX-Access-Token: "
                            f"{box['envdAccessToken']}\r\nContent-Length: {len(body)}\r\n\r\n").encode() + body)  # fmt: skip
        said = b""
        while b"start" not in said:
            self.assertTrue(more := connection.recv(4096), said)
            said += more

    def port(self, box, number, method="GET", path="/", body=None, headers=None, chunked=False):
        """What a port answers, once something listens there."""
        ask = lambda: self.server.ask(method, path, body, None, None,  # noqa: E731
                                      {"E2b-Sandbox-Id": box["sandboxID"], "E2b-Sandbox-Port": str(number), **(headers or {})}, chunked)
        self.eventually(lambda: ask()[0].status == 502, "nothing listens", 30)
        return ask()

    def put(self, box, path, content):
        response, body = self.server.ask("POST", f"/files?path={path}", content, sandbox=box, headers={"Content-Type": "application/octet-stream"})
        self.assertEqual(response.status, 200, body)

    def test_clients_that_go_at_the_moment_of_their_time_out_harm_nobody(self):
        box = self.create()
        message = json.dumps({"process": {"cmd": "/bin/sleep", "args": ["100"]}, "stdin": False}).encode()
        body = b"\0" + len(message).to_bytes(4, "big") + message
        for i in range(150):
            with socket.create_connection(("127.0.0.1", self.server.port), timeout=60) as connection:
                connection.sendall((f"POST /process.Process/Start HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {box['sandboxID']}\r\nX-Access-Token: "
                                    f"{box['envdAccessToken']}\r\nConnect-Timeout-Ms: 40\r\nContent-Length: {len(body)}\r\n\r\n").encode() + body)  # fmt: skip
                self.assertTrue(connection.recv(4096))
                time.sleep(0.02 + i % 30 / 1000)
        self.assertIsNone(self.server.process.poll(), "the server has ended")
        left = lambda: self.server.ask("POST", "/process.Process/List", {}, sandbox=box)[1]["processes"]  # noqa: E731
        self.eventually(left, "processes outlive their time-out", 30)

    def test_ports_answer_http_by_header_and_by_host(self):
        box = self.create()
        large = bytes(range(256)) * 12_000
        self.put(box, "/root/www/large.bin", large)
        self.put(box, "/root/www/cgi-bin/count", b"#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\n\\r\\n'\nwc -c\necho $HTTP_X_ACCESS_TOKEN$HTTP_X_KEPT\n")
        self.serve(box, "chmod 755 /root/www/cgi-bin/count; exec httpd -f -p 8080 -h /root/www")
        closed = {"E2b-Sandbox-Id": box["sandboxID"], "E2b-Sandbox-Port": "9"}
        answer = self.check(self.server.ask("GET", "/", key=None, headers=closed), 502, "port 9 is not open")
        self.assertEqual((answer["sandboxId"], answer["port"]), (box["sandboxID"], 9))
        response, body = self.port(box, 8080, path="/large.bin")
        self.assertEqual((response.status, response.getheader("Connection"), body == large), (200, "close", True))
        host = {"Host": f"8080-{box['sandboxID']}.example.org"}
        self.assertEqual(self.server.ask("GET", "/large.bin", key=None, headers=host)[1], large)
        self.assertEqual(self.port(box, 8080, path="/none")[0].status, 404)  # the guest's own
        secret = {"X-Access-Token": box["envdAccessToken"], "X-Kept": "kept"}
        for size, chunked in ((0, False), (200_000, False)):
            response, body = self.port(box, 8080, "POST", "/cgi-bin/count", b"x" * size, secret, chunked)
            self.assertEqual(body, f"{size}\nkept\n".encode())
        self.put(box, "/root/echo", b"""#!/bin/sh
printf 'HTTP/1.1 200 OK\\r\\n\\r\\n'
while IFS= read -r line; do echo "$line"; case $line in 0*) exit;; esac; done
""")
        self.serve(box, "chmod 755 /root/echo; exec nc -ll -p 8082 -e /root/echo")
        told = self.port(box, 8082, "POST", "/", b"first second", chunked=True)[1].replace(b"\r", b"")  # as it was sent on
        self.assertIn(b"Transfer-Encoding: chunked\n", told)
        sizes_and_pieces = told.partition(b"\n\n")[2].split(b"\n")
        self.assertEqual(b"".join(sizes_and_pieces[1::2]), b"first second", told)
        self.check(self.server.ask("GET", "/", key=None, headers={**closed, "E2b-Sandbox-Port": "70000"}), 400)
        self.check(self.server.ask("GET", "/", key=None, headers={**closed, "E2b-Sandbox-Id": "v0"}), 502)
        self.assertEqual(self.server.ask("POST", f"/sandboxes/{box['sandboxID']}/pause", {})[0].status, 204)
        self.check(self.server.ask("GET", "/", key=None, headers={**closed, "E2b-Sandbox-Port": "8080"}), 502, "paused")

    def test_ports_change_to_web_sockets_and_carry_bytes_both_ways(self):
        box = self.create()
        self.put(box, "/root/ws", b"""#!/bin/sh
while read -r name value; do
  value=${value%?}
  case $name in [Ss]ec-[Ww]eb[Ss]ocket-[Kk]ey:) key=$value;; ?) break;; esac
done
accept=$(printf %s "${key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11" | sha1sum | cut -c1-40 | xxd -r -p | base64)
printf 'HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\nSec-WebSocket-Accept: %s\\r\\n\\r\\n' "$accept"
printf '\\201\\005hello'
exec cat
""")  # fmt: skip
        self.serve(box, "chmod 755 /root/ws; exec nc -ll -p 8081 -e /root/ws")
        key = base64.b64encode(b"0123456789abcdef").decode()
        ask = (f"GET /chat HTTP/1.1\r\nHost: 8081-{box['sandboxID']}.example.org\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
               f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n").encode()  # fmt: skip
        def open_socket():
            connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=60)
            self.addCleanup(connection.close)
            connection.sendall(ask)
            got = b""
            while b"hello" not in got:
                more = connection.recv(4096)
                if not more or got.startswith(b"HTTP/1.1 502"):
                    return None, got
                got += more
            return connection, got
        self.eventually(lambda: open_socket()[0] is None, "no web socket", 30)
        connection, got = open_socket()
        accept = base64.b64encode(hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        self.assertIn(b"Sec-WebSocket-Accept: " + accept + b"\r\n", got)
        self.assertTrue(got.endswith(b"\r\n\r\n\x81\x05hello"), got)
        sent = bytes(range(256)) * 8_000  # there and back at once: each side waits for the other
        writer = threading.Thread(target=connection.sendall, args=(sent,))
        writer.start()
        back = b""
        while len(back) < len(sent):
            back += connection.recv(65536)
        writer.join()
        self.assertEqual(back, sent)
        connection.shutdown(socket.SHUT_WR)  # the echo ends with what it echoes
        self.assertEqual(connection.recv(1), b"")
        connection, _ = open_socket()
        self.assertEqual(self.server.ask("POST", f"/sandboxes/{box['sandboxID']}/pause", {})[0].status, 204)
        with self.assertRaises(ConnectionResetError):  # a pause cuts it off, and that is seen
            connection.recv(1)

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
        self.check(self.server.ask("POST", "/v3/templates", {}), 400, "name")
        box = self.create()
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
