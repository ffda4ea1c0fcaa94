#!/usr/bin/env python3
"""Output tokens a second of `tidelock serve` with several clients at once, against llama.cpp on the same GGUF file.

    tools/fetch_llama.sh; bench/serve_clients.py MODEL.gguf [--clients 1,4,16] [--prompt 128] [--tokens 64] [--rounds 5] [--threads N] [--json]

Every client sends a prompt that no other has and reads its stream to the end; all start together. The peer is llama.cpp's
library in one process, without HTTP and sampling, given the same work in the batches that suit it: all prompts, then all
sequences token by token. Both take turns, round by round; medians.
"""

import os
import statistics
import threading
import time

import compare_llama
import serving


def together(server, clients, prompt, tokens, number):
    """Seconds until the last of them has its answer, and the tokens that all got."""
    got = []

    def client(i):
        got.append(len(server.stream(serving.ids(prompt, 1000 * number + i), tokens)[2]))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin, sum(got)


def main():
    parser = serving.parser(__doc__)
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    threads = options.threads or len(os.sched_getaffinity(0))
    peer = compare_llama.Program(compare_llama.llama(options, threads))
    with serving.Server(options.model, "--threads", threads) as server:
        for clients in map(int, options.clients.split(",")):
            ours, theirs = [], []
            for number in range(options.rounds + 1):
                seconds, tokens = together(server, clients, options.prompt, options.tokens, 100 * clients + number)
                other = float(peer.ask(f"{options.prompt} {options.tokens} 0 {clients}")[0])
                if number > 0:  # the first touches every page
                    ours.append(tokens / seconds)
                    theirs.append(clients * options.tokens / other)
            mine, his = statistics.median(ours), statistics.median(theirs)
            serving.show(options.json, f"{clients} clients, prompts of {options.prompt}, answers of {options.tokens}, {threads} threads", mine, "tokens/s",
                         f"llama.cpp's library ({his:.1f})", mine / his)  # fmt: skip
    peer.process.stdin.close()
    peer.process.wait()


if __name__ == "__main__":
    main()
