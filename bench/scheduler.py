#!/usr/bin/env python3
"""What scheduling costs: the share of a step of `tidelock serve` in which it decides what runs, takes requests in and hands tokens out.

    bench/scheduler.py [MODEL] [--clients 16] [--prompt 500] [--tokens 200] [--rounds 3] [--threads N] [--event-log] [--json]

All clients stream at once, every prompt half of one that came before; the server counts its own time (`/metrics`,
`tidelock_schedule_seconds_total` over `tidelock_step_seconds_total`). With models/nano, whose steps take a millisecond, the share
is as large as it can be.
"""

import pathlib
import statistics
import tempfile
import threading

import serving


def main():
    parser = serving.parser(__doc__, "models/nano")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--event-log", action="store_true", help="with the decisions written to a file")
    options = parser.parse_args()
    shares, steps = [], []
    with tempfile.TemporaryDirectory() as folder:
        more = ["--event-log", pathlib.Path(folder) / "events"] if options.event_log else []
        with serving.Server(options.model, "--threads", options.threads, "--sequences", options.clients, *more) as server:
            for number in range(options.rounds):
                before = [server.metric(name) for name in ("schedule_seconds", "step_seconds", "engine_steps")]
                prompts = [serving.ids(options.prompt // 2, i) + serving.ids(options.prompt // 2, 1000 * number + i + 1)
                           for i in range(options.clients)]  # fmt: skip
                threads = [threading.Thread(target=server.stream, args=(prompt, options.tokens)) for prompt in prompts]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                after = [server.metric(name) for name in ("schedule_seconds", "step_seconds", "engine_steps")]
                spent, all_of_it, count = (b - a for a, b in zip(before, after))
                shares.append(spent / all_of_it)
                steps.append(all_of_it / count)
    serving.show(options.json, f"{options.clients} clients, prompts of {options.prompt}, answers of {options.tokens}",
                 1e3 * statistics.median(steps), "ms a step", "scheduling's share", statistics.median(shares))  # fmt: skip


if __name__ == "__main__":
    main()
