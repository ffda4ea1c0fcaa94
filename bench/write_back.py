#!/usr/bin/env python3
"""Bytes written to disk for each byte read again: conversations that go on in random order, more than memory holds.

    bench/write_back.py [MODEL] [--conversations 24] [--turns 8] [--turn 120] [--answer 40] [--memory 8M] [--disk 4G] [--threads N] [--json]

Each conversation's next turn is its last prompt and answer and new tokens. Which goes on is drawn anew each time, the ones that spoke
last more often (Zipf), as agents whose tools return do. Counted are what the server wrote because memory was short, and what it read
back (`/metrics`); a write-through cache would have written every state that was kept, which is the second line's peer. Prompt tokens
that were found are the check that the states were of use.
"""

import pathlib
import random
import tempfile

import serving


def main():
    parser = serving.parser(__doc__, "models/nano")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--turn", type=int, default=120)
    parser.add_argument("--answer", type=int, default=40)
    parser.add_argument("--memory", default="8M")
    parser.add_argument("--disk", default="4G")
    options = parser.parse_args()
    draw = random.Random(7)
    talks = [serving.ids(options.turn, i + 1) for i in range(options.conversations)]
    order = list(range(options.conversations))  # who spoke last stands first
    with tempfile.TemporaryDirectory(prefix="tidelock-bench-") as folder:
        with serving.Server(options.model, "--threads", options.threads, "--state-memory", options.memory,
                            "--state-dir", pathlib.Path(folder) / "states", "--state-disk", options.disk) as server:  # fmt: skip
            for number in range(options.conversations * options.turns):
                place = min(int(draw.paretovariate(0.7)) - 1, len(order) - 1) if number >= len(order) else number
                one = order.pop(place)
                order.insert(0, one)
                talks[one] += server.stream(talks[one], options.answer)[2] + serving.ids(options.turn, 1000 + number)
            stored, loaded, kept = (server.metric(name) for name in ("disk_stored_bytes", "disk_loaded_bytes", "states_kept"))
            asked, hit = server.metric("prefix_asked_tokens"), server.metric("prefix_hit_tokens")
            states = server.metric("disk_stored")
    name = f"{options.conversations} conversations of {options.turns} turns in {options.memory}"
    serving.show(options.json, name, stored / 1e6, "MB written", f"read again ({loaded / 1e6:.1f} MB)", stored / max(loaded, 1))
    serving.show(options.json, "states written", states, "states", f"all that were kept ({kept:.0f}): write-through", states / kept)
    serving.show(options.json, "prompt tokens found", hit, "tokens", f"asked for ({asked:.0f})", hit / asked)


if __name__ == "__main__":
    main()
