#!/usr/bin/env python3
"""Prefill and decode of one GGUF file: Tidelock against llama.cpp, interleaved, medians.

    tools/fetch_llama.sh
    bench/compare_llama.py MODEL.gguf [--threads 1] [--repetitions 5] [--tests pp512,tg32,...] [--json]

Both programs keep the model loaded and take turns test by test, so that both meet the same machine. A test is
pp<PROMPT>, tg<TOKENS>, tg<TOKENS>@<DEPTH> or tg<TOKENS>x<SEQUENCES>. "of limit" is, for decoding, the share of the
memory's read bandwidth (measured in the same run) that the bytes of `tidelock plan` make up.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Program:
    def __init__(self, arguments):
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"{self.process.args[0]} ended with code {self.process.wait()} at \"{line}\"")
        return answer.split()


def parse(test):
    match = re.fullmatch(r"pp(\d+)|tg(\d+)(?:@(\d+))?(?:x(\d+))?", test)
    if not match:
        sys.exit(f"{test}: expected pp512, tg32, tg32@2048 or tg32x16")
    prompt, generate, depth, sequences = (int(x) if x else 0 for x in match.groups())
    return prompt, generate, depth, max(sequences, 1)


def measure(ours, peer, test, repetitions):
    prompt, generate, depth, sequences = test
    line = f"{prompt} {generate} {depth} {sequences}"
    ours.ask(line), peer.ask(line)  # touches every page once
    mine, theirs, bandwidth = [], [], []
    for _ in range(repetitions):
        seconds, step = ours.ask(line)
        mine.append(float(seconds))
        theirs.append(float(peer.ask(line)[0]))
        bandwidth.append(float(ours.ask("bandwidth")[0]))
    tokens = (prompt + generate) * sequences
    ratio = statistics.median(b / a for a, b in zip(mine, theirs))
    row = {"tokens_per_second": tokens / statistics.median(mine), "llama": tokens / statistics.median(theirs),
           "ratio": ratio}
    if generate:
        moved = int(step) * generate / statistics.median(mine)
        row["bytes_per_second"] = moved
        row["of_bandwidth"] = moved / statistics.median(bandwidth)
    return row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tests", default="pp512,pp4096,tg32,tg32@2048,tg32x16")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    peer_program = os.path.join(ROOT, "build/llama/llama_model")
    if not os.path.exists(peer_program):
        sys.exit("build/llama/llama_model is missing: run tools/fetch_llama.sh")
    ours = Program([os.path.join(ROOT, "build/release/tidelock"), "bench", "model", options.model, "-t",
                    str(options.threads), "--interactive"])
    peer = Program([peer_program, os.path.join(ROOT, "build/llama/backends"), options.model, str(options.threads)])
    if not options.json:
        print(f"{os.path.basename(options.model)}, {options.threads} thread(s), medians of {options.repetitions}")
    for name in options.tests.split(","):
        row = measure(ours, peer, parse(name), options.repetitions)
        if options.json:
            print(json.dumps({"test": name, "threads": options.threads, "model": options.model, **row}), flush=True)
            continue
        limit = f", {row['of_bandwidth']:.2f} of read bandwidth" if "of_bandwidth" in row else ""
        print(f"{name:<12} {row['tokens_per_second']:9.1f} tokens/s   llama.cpp {row['llama']:8.1f}   "
              f"{row['ratio']:.2f} x{limit}", flush=True)


if __name__ == "__main__":
    main()
