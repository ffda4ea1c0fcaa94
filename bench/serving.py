"""What the benchmarks of `tidelock serve` share: a server of their own, prompts, and how results are printed."""

import argparse
import http.client
import json
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Server:
    """`tidelock serve MODEL` with further arguments, on a free port; with-statements end it."""

    def __init__(self, model, *arguments):
        command = [str(ROOT / "build/release/tidelock"), "serve", str(model), "--port", "0", "--model-id", "m", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        match = re.search(r":(\d+)/", self.process.stdout.readline())
        if not match:
            sys.exit(f"the server did not start: {' '.join(command)}")
        self.port = int(match.group(1))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def metric(self, name):
        """A counter of /metrics: tidelock_NAME_total."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return float(re.search(rf"(?m)^tidelock_{name}_total (\S+)$", text).group(1))

    def stream(self, prompt, tokens, connection=None):
        """Greedy. Seconds to the first token and to the last, the answer's ids, and how many prompt tokens were reused."""
        own = connection is None
        connection = connection or http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "return_token_ids": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        begin = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            sys.exit(response.read().decode())
        first, ids, cached = None, [], 0
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter() - begin
            event = json.loads(line[6:])
            for choice in event["choices"]:
                ids += choice.get("token_ids", [])
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        if own:
            connection.close()
        return first, time.perf_counter() - begin, ids, cached


def ids(count, seed):
    """A prompt of its own for each seed, from the first."""
    return [(seed * 131 + i * i * 7 + i) % 240 + 7 for i in range(count)]


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def parser(doc, model=None):
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", **({"nargs": "?", "default": model} if model else {}))
    made.add_argument("--threads", type=int, default=0, help="0: all processors")
    made.add_argument("--json", action="store_true")
    return made


def show(as_json, name, value, unit, peer, ratio):
    if as_json:
        print(json.dumps({"name": name, "value": value, "unit": unit, "peer": peer, "ratio": ratio}), flush=True)
    else:
        print(f"{name:56} {value:>9.1f} {unit:9} {ratio:>6.3g} x {peer}", flush=True)
