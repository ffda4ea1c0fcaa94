#!/usr/bin/env python3
"""Prefill and decode of one GGUF file: Tidelock against llama.cpp, interleaved, medians.

    tools/fetch_llama.sh
    bench/compare_llama.py MODEL.gguf [--threads 1] [--repetitions 5] [--tests pp512,tg32,...] [--json]
    bench/compare_llama.py MODEL.gguf --busy       2 threads while another process keeps a core busy, against 1 thread alone
    bench/compare_llama.py MODEL.gguf --start      from the start of the process to the first token, the file in the page cache

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
import tempfile
import time

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


def tidelock(options, threads, *more):
    return [os.path.join(ROOT, "build/release/tidelock"), "bench", "model", options.model, "-t", str(threads), "--interactive", *more]


def llama(options, threads, *more):
    return [PEER, os.path.join(ROOT, "build/llama/backends"), options.model, str(threads), *more]


def busy(options):
    """Ratios of two threads that share a core with a spinning process to one thread alone."""
    programs = {"ours": [Program(tidelock(options, n)) for n in (1, 2)], "llama.cpp": [Program(llama(options, n)) for n in (1, 2)]}
    cores = sorted(os.sched_getaffinity(0))
    for test in ("512 0 0 1", "0 32 0 1"):
        ratios = {name: [] for name in programs}
        for round_number in range(options.repetitions + 1):
            for name, (one, two) in programs.items():
                alone = float(one.ask(test)[0])
                spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                try:
                    os.sched_setaffinity(spinner.pid, cores[-1:])
                    shared = float(two.ask(test)[0])
                finally:
                    spinner.kill()
                    spinner.wait()
                if round_number > 0:
                    ratios[name].append(alone / shared)
        medians = {name: statistics.median(values) for name, values in ratios.items()}
        title = "pp512" if test.startswith("512") else "tg32"
        if options.json:
            print(json.dumps({"test": title, "busy_core": medians}), flush=True)
        else:
            print(f"{title:<12} 2 threads beside a busy core, of 1 thread alone: {medians['ours']:.2f}   llama.cpp {medians['llama.cpp']:.2f}", flush=True)


def start(options):
    """Seconds from the start of the process to the first token of a prompt of one."""
    with tempfile.TemporaryDirectory(dir=os.path.join(ROOT, "build")) as folder:
        packed = os.path.join(folder, "packed")
        ways = {
            "ours, packed anew": tidelock(options, options.threads),
            "ours, --packed": tidelock(options, options.threads, "--packed", packed),
            "ours, --packed --weights mmap": tidelock(options, options.threads, "--packed", packed, "--weights", "mmap"),
            "llama.cpp (mapped)": llama(options, options.threads, "512"),
        }
        seconds = {name: [] for name in ways}
        seconds["reading the file"] = []
        for round_number in range(options.repetitions + 1):
            for name, command in ways.items():
                begin = time.monotonic()
                program = Program(command)
                program.ask("1 0 0 1")
                taken = time.monotonic() - begin
                program.process.stdin.close()
                program.process.wait()
                if round_number > 0:
                    seconds[name].append(taken)
            begin = time.monotonic()
            with open(options.model, "rb", buffering=0) as file:
                buffer = bytearray(1 << 20)
                while file.readinto(buffer):
                    pass
            seconds["reading the file"].append(time.monotonic() - begin)
    for name, values in seconds.items():
        value = statistics.median(values)
        print(json.dumps({"start": name, "seconds": value}) if options.json else f"{name:<32} {value:.3f} s", flush=True)


PEER = os.path.join(ROOT, "build/llama/llama_model")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tests", default="pp512,pp4096,tg32,tg32@2048,tg32x16")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--start", action="store_true")
    options = parser.parse_args()
    if not os.path.exists(PEER):
        sys.exit("build/llama/llama_model is missing: run tools/fetch_llama.sh")
    if options.busy or options.start:
        (busy if options.busy else start)(options)
        return
    ours, peer = Program(tidelock(options, options.threads)), Program(llama(options, options.threads))
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
