#!/usr/bin/env python3
"""`tidelock serve` for a long time: clients that ask, stream, cancel, hang and send rubbish, while the server is ended and killed.

    TIDELOCK_BINARY=build/release/tidelock tests/cli/serve_soak.py MINUTES [CLIENTS] [LIFE]

A server lives for LIFE seconds (30), more or less. Every whole answer must be the one that an undisturbed server gave before; at the end nothing may be left running, and memory must not have
grown. Part of tools/soak.sh, not of ./test. Ends with exit code 1 at the first fault.
"""

import http.client
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time

BINARY = os.environ["TIDELOCK_BINARY"]
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LIMIT = 64 << 20  # memory for state: far less than the clients need together


def prompt(kind):
    """Prompts that start alike and part at many places, a few of them long."""
    rng = random.Random(kind)
    tokens = [rng.randrange(7, 400) for _ in range(30)]
    family = random.Random(kind % 5)
    start = [family.randrange(7, 400) for _ in range((0, 64, 200, 500, 2500)[kind % 5])]
    return start + tokens


class Server:
    def __init__(self, folder):
        self.folder = folder
        self.port = None
        self.start()

    def start(self, *more):
        self.process = subprocess.Popen([BINARY, "serve", "models/nano", "--port", "0", "--model-id", "m", "--state-memory", str(LIMIT),
                                         "--state-dir", str(self.folder), "--state-disk", "300M", "--sequences", "48", "--queue", "64",
                                         "--connections", "400", "--patience", "3", *more], cwd=ROOT, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True)  # fmt: skip
        line = self.process.stdout.readline()
        if "/v1" not in line:
            raise SystemExit(f"the server did not start: {line}")
        self.port = int(line.rsplit(":", 1)[1].split("/")[0])

    def stop(self, kill):
        self.port = None
        (self.process.kill if kill else self.process.terminate)()
        code = self.process.wait(120)
        if not kill and code != 0:
            raise SystemExit(f"the server ended with {code}")

    def metrics(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return {line.split()[0]: float(line.split()[1]) for line in lines if line and line[0] != "#" and " " in line}

    def resident(self):
        for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
        return 0


def complete(port, kind, stream=False, read=None):
    """Token ids of the whole answer; None where this client let go of it or was turned away."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"model": "m", "prompt": prompt(kind), "max_tokens": 24, "temperature": 0, "return_token_ids": True, "stream": stream,
            "priority": kind % 3 - 1}  # fmt: skip
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status in (429, 503):
            response.read()
            return None
        if response.status != 200:
            raise SystemExit(f"status {response.status}: {response.read()[:300]}")
        if not stream:
            return json.loads(response.read())["choices"][0]["token_ids"]
        ids = []
        for number, line in enumerate(response):
            if read is not None and number > read:
                return None
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    ids += choice.get("token_ids", [])
            elif line.startswith(b"data: [DONE]"):
                return ids
        return None
    finally:
        connection.close()


def rubbish(port, rng):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as s:
        what = rng.randrange(4)
        if what == 0:
            s.sendall(bytes(rng.randrange(256) for _ in range(rng.randrange(1, 4000))))
        elif what == 1:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{\"model\"")
            time.sleep(rng.random() * 4)  # hangs
        elif what == 2:
            s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n" + b"[" * 20)
            s.recv(100)
        else:
            s.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")


def main():
    minutes, clients = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200
    life = float(sys.argv[3]) if len(sys.argv) > 3 else 30
    with tempfile.TemporaryDirectory(prefix="tidelock-soak-") as scratch:
        server = Server(pathlib.Path(scratch) / "states")
        kinds = list(range(60))
        expected = {kind: complete(server.port, kind) for kind in kinds}
        end = time.monotonic() + 60 * minutes
        counts = {"whole": 0, "let go": 0, "rubbish": 0, "turned away or cut off": 0}
        faults, lock = [], threading.Lock()

        def count(what):
            with lock:
                counts[what] += 1

        def client(number):
            rng = random.Random(number)
            while time.monotonic() < end and not faults:
                port = server.port
                if port is None:
                    time.sleep(0.1)
                    continue
                try:
                    what = rng.random()
                    kind = rng.choice(kinds)
                    if what < 0.1:
                        rubbish(port, rng)
                        count("rubbish")
                        continue
                    read = rng.randrange(20) if what < 0.3 else None
                    ids = complete(port, kind, what < 0.6, read)
                    if ids is None:
                        count("let go" if read is not None else "turned away or cut off")
                    elif ids != expected[kind]:
                        faults.append(f"prompt {kind}: {ids} instead of {expected[kind]}")
                    else:
                        count("whole")
                    time.sleep(rng.random() * 0.2)
                except (OSError, http.client.HTTPException, json.JSONDecodeError):
                    count("turned away or cut off")  # the server was ended meanwhile
                    time.sleep(0.1)
                except SystemExit as fault:
                    faults.append(str(fault))

        threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(clients)]
        for thread in threads:
            thread.start()
        rng, lives, residents = random.Random(0), 1, []
        while time.monotonic() < end and not faults:
            life_end = min(end, time.monotonic() + life * (0.5 + rng.random()))
            while time.monotonic() < life_end and not faults:
                time.sleep(1)
                metrics = server.metrics()
                residents.append(server.resident())
                if metrics["tidelock_state_used_bytes"] > LIMIT or metrics["tidelock_state_bytes"] > LIMIT:
                    faults.append(f"{metrics['tidelock_state_bytes']} bytes of state")
                if server.process.poll() is not None:
                    faults.append(f"the server ended by itself: {server.process.returncode}")
            if time.monotonic() < end and not faults:
                server.stop(kill=rng.random() < 0.5)
                server.start()
                lives += 1
        for thread in threads:
            thread.join(180)
        if any(thread.is_alive() for thread in threads):
            faults.append("a request is stuck")
        for _ in range(100):
            metrics = server.metrics()
            busy = metrics["tidelock_sequences_running"] + metrics["tidelock_requests_waiting"]
            if busy == 0:
                break
            time.sleep(0.1)
        else:
            faults.append(f"{busy} sequences and requests are left")
        loads, loaded = metrics["tidelock_disk_loads_total"], metrics["tidelock_disk_found_states"]
        server.stop(kill=False)
        first, last = max(residents[: len(residents) // 3]), max(residents[-len(residents) // 3 :])
        if last > 1.2 * first + (64 << 20):
            faults.append(f"memory grew from {first >> 20} to {last >> 20} MiB")
        print(f"{lives} lives, {counts}; memory at most {first >> 20} MiB in the first third, {last >> 20} in the last; "
              f"last life: {loads:.0f} loads, {loaded:.0f} states found at its start")  # fmt: skip
        if faults:
            raise SystemExit(faults[0])
        if counts["whole"] < 10 * minutes:
            raise SystemExit("hardly anything was answered")


if __name__ == "__main__":
    main()
