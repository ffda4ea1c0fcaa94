#!/usr/bin/env python3
"""One training step of a model: ours against PyTorch, the same config, batch and threads, interleaved runs, medians.

    /usr/bin/python3 bench/compare_train_step.py [--config models/nano/config.json] [--batch 8] [--tokens 256] [--runs 3] [--json]

Needs python3-torch with OpenBLAS (libopenblas0-pthread) and build/release/train_step. Prints name, value, unit, peer, ratio.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def measure(command):
    # Peers are measured with the OpenBLAS that suits the processor: an override from outside would slow them.
    environment = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])["value"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="models/nano/config.json")
    parser.add_argument("--batch", default="8")
    parser.add_argument("--tokens", default="256")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for threads in ("1", "2"):
        common = ["--config", options.config, "--batch", options.batch, "--tokens", options.tokens, "--threads", threads]
        ours, peer = [], []
        for _ in range(options.runs):
            ours.append(measure(["build/release/train_step"] + common))
            peer.append(measure(["/usr/bin/python3", "bench/torch_train_step.py"] + common))
        row = {
            "name": f"train step, {threads} thread(s), batch {options.batch} x {options.tokens}",
            "value": round(statistics.median(ours), 1),
            "unit": "tokens/s",
            "peer": f"PyTorch, {statistics.median(peer):.0f} tokens/s",
            "ratio": round(statistics.median(ours) / statistics.median(peer), 2),
        }
        print(json.dumps(row) if options.json else f"{row['name']:45} {row['value']:>10} tokens/s   {row['ratio']:.2f}x of {row['peer']}")


if __name__ == "__main__":
    main()
