#!/usr/bin/env python3
"""Time to the first token of a conversation's next turn: with the state that the last turn left, and computed anew.

    bench/prefix_reuse.py MODEL [--prefix 4096] [--turn 64] [--rounds 5] [--threads N] [--json]

Two servers of the same model, one with --no-prefix-reuse. Each round sends a new conversation of `prefix` tokens, then its
next turn: the same tokens, the answer and `turn` more. Printed: medians over the rounds of the second request's time to
its first token, their ratio, and the limit - how many times fewer tokens there are to compute. The answers of both
servers must be equal.
"""

import random
import statistics
import sys

import serving


def main():
    parser = serving.parser(__doc__)
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--turn", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    threads = ("--threads", options.threads)
    with serving.Server(options.model, *threads) as warm, serving.Server(options.model, "--no-prefix-reuse", *threads) as cold:
        times, draw = {warm: [], cold: []}, random.Random(1)
        for _ in range(options.rounds):
            prompt = [draw.randrange(10, 250) for _ in range(options.prefix)]
            prompt += warm.stream(prompt, 8)[2] + [draw.randrange(10, 250) for _ in range(options.turn)]
            answers = []
            for server in (warm, cold):
                first, _, ids, cached = server.stream(prompt, 8)
                times[server].append(first)
                answers.append(ids)
                if server is warm:
                    computed = len(prompt) - cached
            if answers[0] != answers[1]:
                sys.exit("the answers differ")
        reused, anew = (statistics.median(times[server]) for server in (warm, cold))
    serving.show(options.json, f"next turn of {len(prompt)} tokens, {computed} of them new, to first token", 1e3 * reused, "ms",
                 f"computed anew ({1e3 * anew:.1f} ms); tokens say at most {len(prompt) / computed:.1f}", anew / reused)  # fmt: skip


if __name__ == "__main__":
    main()
