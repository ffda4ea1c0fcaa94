#!/usr/bin/env python3
"""Time to the first token of short prompts, alone and while long prompts are computed: the same server, the same prompts.

    bench/first_token.py [MODEL] [--short 64] [--long 3900] [--requests 60] [--step-time 0.02] [--threads N] [--json]

Nothing is reused (--no-prefix-reuse): every prompt is computed.
"""

import threading
import time

import serving


def main():
    parser = serving.parser(__doc__, "models/nano")
    parser.add_argument("--short", type=int, default=64)
    parser.add_argument("--long", type=int, default=3900)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--step-time", default="0.02")
    options = parser.parse_args()
    with serving.Server(options.model, "--no-prefix-reuse", "--step-time", options.step_time, "--threads", options.threads) as server:

        def ask(count, seed):
            return server.stream(serving.ids(count, seed), 1)[0]

        ask(options.short, 0)
        alone = [ask(options.short, i) for i in range(options.requests)]
        stop = threading.Event()
        done = []

        def long_prompts():
            while not stop.is_set():
                done.append(ask(options.long, 1000 + len(done)))

        worker = threading.Thread(target=long_prompts)
        worker.start()
        time.sleep(0.3)
        beside = []
        for i in range(options.requests):
            beside.append(ask(options.short, 500 + i))
            time.sleep(0.013 * (i % 7))  # at any moment of a step
        stop.set()
        worker.join()
    for share, name in ((0.5, "p50"), (0.99, "p99")):
        one, two = serving.percentile(alone, share), serving.percentile(beside, share)
        serving.show(options.json, f"{name} to first token, {options.short} tokens beside {options.long}", 1000 * two, "ms",
                     f"alone ({1000 * one:.1f} ms)", two / one)  # fmt: skip
    serving.show(options.json, "long prompts meanwhile, each (p50)", 1000 * serving.percentile(done, 0.5), "ms", f"of {len(done)}", 1)


if __name__ == "__main__":
    main()
