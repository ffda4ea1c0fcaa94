#!/usr/bin/env python3
"""Time to the first token of short prompts, alone and while long prompts are computed: the same server, the same prompts.

    python3 bench/first_token.py [MODEL] [--short 64] [--long 3900] [--requests 60] [--step-time 0.02] [--threads N] [--json]

Nothing is reused (--no-prefix-reuse): every prompt is computed. Prints name, value, unit, peer, ratio.
"""

import argparse
import http.client
import json
import pathlib
import re
import subprocess
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def ask(port, prompt, tokens):
    """Seconds to the first token."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    start = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(response.read().decode())
    first = None
    for line in response:
        if line.startswith(b"data: ") and first is None:
            first = time.monotonic() - start
    connection.close()
    return first


def ids(count, seed):
    return [(seed * 131 + i * i * 7 + i) % 400 + 7 for i in range(count)]


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="models/nano")
    parser.add_argument("--short", type=int, default=64)
    parser.add_argument("--long", type=int, default=3900)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--step-time", default="0.02")
    parser.add_argument("--threads", default="0")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    command = ["build/release/tidelock", "serve", options.model, "--port", "0", "--model-id", "m", "--no-prefix-reuse",
               "--step-time", options.step_time, "--threads", options.threads]  # fmt: skip
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        port = int(re.search(r":(\d+)/", server.stdout.readline()).group(1))
        ask(port, ids(options.short, 0), 1)
        alone = [ask(port, ids(options.short, i), 1) for i in range(options.requests)]
        stop = threading.Event()
        done = []

        def long_prompts():
            while not stop.is_set():
                done.append(ask(port, ids(options.long, 1000 + len(done)), 1))

        worker = threading.Thread(target=long_prompts)
        worker.start()
        time.sleep(0.3)
        beside = []
        for i in range(options.requests):
            beside.append(ask(port, ids(options.short, 500 + i), 1))
            time.sleep(0.013 * (i % 7))  # at any moment of a step
        stop.set()
        worker.join()
    finally:
        server.terminate()
        server.wait()
    for share, name in ((0.5, "p50"), (0.99, "p99")):
        one, two = percentile(alone, share), percentile(beside, share)
        row = {"name": f"{name} to first token, {options.short} tokens beside {options.long}", "value": round(1000 * two, 1),
               "unit": "ms", "peer": f"alone ({1000 * one:.1f} ms)", "ratio": round(two / one, 2)}  # fmt: skip
        print(json.dumps(row) if options.json else f"{row['name']:52} {row['value']:>8} ms  {row['ratio']:.2f} x {row['peer']}")
    print(json.dumps({"name": "long prompts meanwhile", "value": len(done), "unit": "prompts", "peer": "", "ratio": 0}) if options.json
          else f"{len(done)} long prompts were answered meanwhile, in {1000 * percentile(done, 0.5):.0f} ms each (p50)")  # fmt: skip


if __name__ == "__main__":
    main()
