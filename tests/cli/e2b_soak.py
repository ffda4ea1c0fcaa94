#!/usr/bin/env python3
"""`tidelock sandbox serve` killed at random moments of random operations, again and again. Needs TIDELOCK_BINARY.

  e2b_soak.py MINUTES [SEED [SCHEDULES]]

After each kill a new server must know every sandbox that was told to a client and not asked to go, in the state that was
told, with the file that was written into it; none that is gone; nothing in quarantine; no machine that nobody owns. What
was under way at the kill may have happened or not."""

import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from e2b_e2e_test import Server  # noqa: E402

MOST = 4  # sandboxes at once


class Soak:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.server = Server(pathlib.Path(tempfile.mkdtemp(prefix="tidelock-e2b-soak-")) / "state")
        self.boxes = {}  # id -> what is known: its state, token, mark; state None: not known
        self.gone = set()
        self.snapshots = {}  # name -> True, or None when it is not known
        self.under_way = None
        self.done = {}
        self.number = 0

    def ask(self, *arguments, **more):
        return self.server.ask(*arguments, **more)

    def files(self, method, id, **more):
        box = self.boxes[id]
        response, body = self.ask(method, "/files?path=/root/mark", key=None, headers={
            "E2b-Sandbox-Id": id, "X-Access-Token": box["token"], "Content-Type": "application/octet-stream"}, **more)  # fmt: skip
        return response.status, body

    def added(self, body, mark):
        self.boxes[body["sandboxID"]] = {"state": "running", "token": body["envdAccessToken"], "mark": mark}

    def act(self):
        """One operation; what it says of the sandboxes is believed when it has answered."""
        choices = ["create"] if len(self.boxes) < MOST else []
        choices += ["pause", "connect", "mark", "snapshot", "kill"] * bool(self.boxes)
        choices += ["fork"] * (0 < len(self.boxes) < MOST) + ["drop"] * bool(self.snapshots)
        what = self.random.choice(choices)
        id = self.random.choice(sorted(self.boxes)) if self.boxes else None
        name = f"s{self.number}"
        self.number += 1
        before = dict(self.boxes.get(id, {}))
        if what in ("pause", "connect", "mark", "kill", "fork") and id:
            self.under_way = (what, id)
        if what == "create":
            response, body = self.ask("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 3600})
            assert response.status == 201, body
            self.added(body, None)
        elif what in ("pause", "connect"):
            response, body = self.ask("POST", f"/v2/sandboxes/{id}/{what}", {"timeout": 3600} if what == "connect" else {})
            assert response.status in (200, 201, 204) or (what == "pause" and response.status == 409), body
            self.boxes[id]["state"] = "paused" if what == "pause" else "running"
        elif what == "mark" and before["state"] == "running":
            text = f"mark {self.number}".encode()
            self.boxes[id]["mark"] = None
            status, body = self.files("POST", id, body=text)
            assert status == 200, body
            self.boxes[id]["mark"] = text
        elif what == "fork":
            response, body = self.ask("POST", f"/sandboxes/{id}/fork", {"count": 1, "timeout": 3600})
            assert response.status == 201, body
            self.added(body[0]["sandbox"], before["mark"])
        elif what == "snapshot":
            self.snapshots[name] = None
            response, body = self.ask("POST", f"/sandboxes/{id}/snapshots", {"name": name})
            assert response.status == 201, body
            self.snapshots[name] = True
        elif what == "drop":
            name = self.random.choice(sorted(self.snapshots))
            known, self.snapshots[name] = self.snapshots[name], None
            response, body = self.ask("DELETE", f"/templates/{name}")
            assert response.status == 204 or (known is None and response.status == 404), body
            del self.snapshots[name]
        elif what == "kill":
            response, body = self.ask("DELETE", f"/sandboxes/{id}")
            assert response.status == 204, body
            del self.boxes[id]
            self.gone.add(id)
        self.under_way = None
        self.done[what] = self.done.get(what, 0) + 1

    def operate(self):
        try:
            while True:
                self.act()
        except (ConnectionError, OSError, __import__("http").client.HTTPException):
            pass  # the server is gone
        except AssertionError as error:
            self.fault = error

    def check(self):
        what, unsure = self.under_way or (None, None)
        self.under_way = None
        listed = {one["sandboxID"]: one["state"] for one in self.ask("GET", "/v2/sandboxes?limit=100")[1]}
        for id, box in list(self.boxes.items()):
            if id == unsure and what == "kill" and id not in listed:
                del self.boxes[id]
                continue
            assert id in listed, f"{id} is lost; under way: {what} {unsure}"
            assert listed[id] == box["state"] or id == unsure, f"{id} is {listed[id]}, told was {box['state']} ({what} {unsure})"
            box["state"] = listed[id]
            if box["mark"] and box["state"] == "running":
                assert self.files("GET", id) == (200, box["mark"]), f"{id}: its file is not what was written"
        assert not self.gone & set(listed), "one that was removed is back"
        for id in set(listed) - set(self.boxes):  # made, and nobody was told
            assert self.ask("DELETE", f"/sandboxes/{id}")[0].status == 204
        names = {one["snapshotID"] for one in self.ask("GET", "/snapshots")[1]}
        for name, known in list(self.snapshots.items()):
            assert known is None or name in names, f"snapshot {name} is lost"
            if name not in names:
                del self.snapshots[name]
        for place in ("quarantine", "e2b/quarantine"):
            assert not list((self.server.folder / place).glob("*")), f"something is in {place}"
        running = sum(box["state"] == "running" for box in self.boxes.values())
        machines = subprocess.run(["pgrep", "-fc", str(self.identity())], capture_output=True, text=True).stdout.strip()
        assert int(machines) <= running + 1, f"{machines} machines for {running} running sandboxes and a pool of one"

    def identity(self):
        text = (self.server.folder / "journal").read_bytes()
        at = text.index(b'"id":"s')
        return "guest=tidelock-" + text[at + 6 : at + 19].decode()

    def run(self, minutes, schedules):
        end = time.monotonic() + minutes * 60
        kills = 0
        self.fault = None
        self.server.start()
        self.act()  # a sandbox, and with it the template, which takes longer to boot than a server lives here
        self.server.end()
        try:
            while time.monotonic() < end and kills < schedules:
                self.server.start()
                self.check()
                worker = threading.Thread(target=self.operate)
                worker.start()
                time.sleep(self.random.random() ** 2 * 3)
                self.server.end(signal.SIGKILL)
                worker.join()
                if self.fault:
                    raise self.fault
                kills += 1
            self.server.start()
            self.check()
        finally:
            print(f"{kills} kills; done: {self.done}", flush=True)
        self.server.remove()


if __name__ == "__main__":
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**6)
    print("seed", seed, flush=True)
    Soak(seed).run(float(sys.argv[1]), int(sys.argv[3]) if len(sys.argv) > 3 else 10**9)
