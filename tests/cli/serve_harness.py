"""A running `tidelock serve`, for the tests that talk to it from outside."""

import http.client
import json
import re
import signal
import socket
import subprocess

from harness import BINARY, NANO, ROOT, Case

QUESTION = [{"role": "user", "content": "12*34?"}]


class Server:
    """A running server; closing it checks that it ends by itself and with exit code 0."""

    def __init__(self, case, *arguments, model=NANO):
        self.case = case
        self.process = subprocess.Popen([BINARY, "serve", model, "--port", "0", "--model-id", "nano", *map(str, arguments)],
                                        cwd=ROOT, env=case.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True)  # fmt: skip
        line = self.process.stdout.readline()
        match = re.fullmatch(r"nano at http://127\.0\.0\.1:(\d+)/v1\n", line)
        if not match:
            self.process.kill()
            raise AssertionError(line + self.process.stderr.read())
        self.port = int(match.group(1))
        self.url = f"http://127.0.0.1:{self.port}/v1"
        case.addCleanup(self.close)

    def close(self):
        if self.process.stdout.closed:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        text = self.process.stderr.read()
        self.process.stdout.close()
        self.process.stderr.close()
        self.case.assertEqual(self.process.returncode, 0, text)

    def connect(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        self.case.addCleanup(connection.close)
        return connection

    def ask(self, method, path, body=None, headers=None, connection=None):
        own = connection is None
        connection = connection or self.connect()
        raw = json.dumps(body) if isinstance(body, (dict, list)) else body
        connection.request(method, path, raw, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        text = response.read().decode()
        if own:
            connection.close()
        return response, (json.loads(text) if response.getheader("Content-Type") == "application/json" else text)

    def chat(self, **fields):
        return self.ask("POST", "/v1/chat/completions", {"model": "nano", "messages": QUESTION, "max_tokens": 64, "seed": 1, **fields})

    def complete(self, **fields):
        return self.ask("POST", "/v1/completions", {"model": "nano", "prompt": "1+1", "max_tokens": 16, "seed": 1, **fields})

    def metric(self, name):
        text = self.ask("GET", "/metrics")[1]
        return float(re.search(rf"(?m)^{re.escape(name)} (\S+)$", text).group(1))

    def raw(self, data, wait=True):
        """Sends bytes as they are; what comes back until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as s:
            s.sendall(data)
            return s.makefile("rb").read() if wait else b""


def events(text):
    """The JSON of a stream's events, which must end as the API says."""
    parts = text.split("\n\n")
    assert parts[-1] == "" and parts[-2] == "data: [DONE]", text[-200:]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


class ServeCase(Case):
    def serve(self, *arguments, **more):
        return Server(self, *arguments, **more)

    def check_error(self, answer, status, param=None):
        response, body = answer
        self.assertEqual(response.status, status, body)
        self.assertEqual(sorted(body["error"]), ["code", "message", "param", "type"])
        self.assertEqual(body["error"]["param"], param)
        return body["error"]["message"]
