#!/usr/bin/env python3
"""Runs the quick start with three seeds and its controls, and prints the table of docs/quickstart.md.

    python3 bench/quickstart.py [--out runs/report] [--only seed1,vault_no_tool]

Needs build/release/tidelock; takes about half an hour on 2 cores. Each run is `tidelock rl recipes/quickstart.toml` with the overrides
that its row names. Runs that are there already are read, not repeated.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
VAULT_ONLY = ['tasks.mixture[0].weight=1e-9', 'tasks.mixture[2].weight=1e-9']
RUNS = {
    "seed1": ["rl.seed=1"],
    "seed2": ["rl.seed=2"],
    "seed3": ["rl.seed=3"],
    "shuffled": ['rl.control="shuffled_rewards"'],
    "zero": ['rl.control="zero_advantage"'],
    "vault_no_tool": VAULT_ONLY + ["rollout.tool_enabled=false"],
}


def run(name, overrides, out):
    folder = out / name
    log = out / f"{name}.time"
    if not log.exists():
        command = [str(ROOT / "build/release/tidelock"), "rl", "recipes/quickstart.toml", "--out", str(folder)]
        for override in overrides:
            command += ["--set", override]
        start = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        if status != 0:
            sys.exit(f"{name} failed: {' '.join(command)}")
        log.write_text(f"{time.monotonic() - start:.1f} {usage.ru_maxrss // 1024}\n")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, *log.read_text().split()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/report")
    parser.add_argument("--only", help="names of runs, separated by commas")
    options = parser.parse_args()
    out = (ROOT / options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    wanted = options.only.split(",") if options.only else list(RUNS)
    print("| run | overrides | mean@8 before | mean@8 after | rise | pass@8 before | pass@8 after | tokens compared | differ | time | memory |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in wanted:
        rows, seconds, memory = run(name, RUNS[name], out)
        evaluations = [row for row in rows if row["kind"] == "eval"]
        steps = [row for row in rows if row["kind"] == "train"]
        first, last = evaluations[0], evaluations[-1]

        def interval(row, key):
            return f"{row[key]:.3f} [{row[key + '_low']:.3f}, {row[key + '_high']:.3f}]"

        print(
            f"| {name} | `{' '.join(RUNS[name])}` | {interval(first, 'mean_at_k')} | {interval(last, 'mean_at_k')} | "
            f"{last['mean_at_k'] - first['mean_at_k']:+.3f} | {interval(first, 'pass_at_k')} | {interval(last, 'pass_at_k')} | "
            f"{sum(row['compared_tokens'] for row in steps):,} | {sum(row['mismatch_tokens'] for row in steps)} | {float(seconds):.0f} s | {memory} MB |",
            flush=True,
        )


if __name__ == "__main__":
    main()
