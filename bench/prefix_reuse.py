#!/usr/bin/env python3
"""Time to the first token of a conversation's next turn: with the state that the last turn left, and computed anew.

  prefix_reuse.py MODEL [--prefix 4096] [--turn 64] [--rounds 5] [--threads 2] [--binary build/release/tidelock]

Starts two servers of the same model, one with --no-prefix-reuse. Each round sends both a new conversation of `prefix`
tokens, then its next turn: the same tokens, the answer and `turn` more. Printed: medians over the rounds of the second
request's time to its first token, their ratio, and the limit - how many times fewer tokens there are to compute. The
answers of both servers must be equal.
"""

import argparse
import http.client
import json
import pathlib
import random
import re
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Server:
    def __init__(self, options, *arguments):
        command = [options.binary, "serve", options.model, "--port", "0", "--threads", str(options.threads), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        match = re.search(r"(\S+) at http://127\.0\.0\.1:(\d+)/", line)
        if not match:
            sys.exit(f"the server did not start: {' '.join(command)}")
        self.model, port = match.group(1), int(match.group(2))
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)

    def first_token(self, prompt, tokens):
        """Seconds to the first of `tokens` tokens, the answer's ids, and how many prompt tokens were reused."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
                "return_token_ids": True, "stream_options": {"include_usage": True}}  # fmt: skip
        begin = time.perf_counter()
        self.connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        if response.status != 200:
            sys.exit(response.read().decode())
        seconds, ids, cached = None, [], 0
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            seconds = seconds or time.perf_counter() - begin
            event = json.loads(line[6:])
            for choice in event["choices"]:
                ids += choice.get("token_ids", [])
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        return seconds, ids, cached

    def close(self):
        self.process.terminate()
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--turn", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--binary", default=str(ROOT / "build/release/tidelock"))
    options = parser.parse_args()
    warm, cold = Server(options), Server(options, "--no-prefix-reuse")
    try:
        times, draw = {"warm": [], "cold": []}, random.Random(1)
        for _ in range(options.rounds):
            prompt = [draw.randrange(10, 250) for _ in range(options.prefix)]
            _, answer, _ = warm.first_token(prompt, 8)
            prompt += answer + [draw.randrange(10, 250) for _ in range(options.turn)]
            answers = {}
            for name, server in (("warm", warm), ("cold", cold)):
                seconds, answers[name], cached = server.first_token(prompt, 8)
                times[name].append(seconds)
                if name == "warm":
                    computed = len(prompt) - cached
            if answers["warm"] != answers["cold"]:
                sys.exit("the answers differ")
        warm_s, cold_s = (statistics.median(times[name]) for name in ("warm", "cold"))
        print(f"{options.model}, {options.threads} threads, {options.rounds} rounds: next turn of {len(prompt)} tokens, {computed} of them new")
        print(f"time to first token, median: reused {warm_s * 1e3:.1f} ms, anew {cold_s * 1e3:.1f} ms")
        print(f"ratio {cold_s / warm_s:.1f}; tokens say at most {len(prompt) / computed:.1f}")
    finally:
        warm.close()
        cold.close()


if __name__ == "__main__":
    main()
