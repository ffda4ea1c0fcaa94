#!/usr/bin/env python3
"""Writes the corpus that models/nano's vocabulary is trained on: the K3 chat protocol's segments and shell commands.

  tools/nano_corpus.py > corpus.txt && tools/train_bpe.py corpus.txt --size 448 --out models/nano

Deterministic. One segment a line, repeated by how often a conversation holds it.
"""

import json
import random

TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
DECLARATION = (
    "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
    + json.dumps([TOOL], sort_keys=True, separators=(",", ":"))
    + "\n```"
)
TAGS = ["message", "response", "think", "tools", "call", "argument"]
ATTRIBUTES = [" role", " type", " tool", " index", " key", " name"]
VALUES = ["system", "user", "assistant", "tool", "tool-declare", "shell", "command", "string", "hidden?"]
COMMANDS = [
    "ls -A /data", "ls -a /data", "ls /data", "ls -la /data", "cat /data/.{w}", "cat /data/{w}", "cat /vault/{l}", "cat /vault/{l} /vault/{m}",
    "ls /vault", "echo $(({a}*{b}))", "echo $(({a}+{b}))", "cat /vault/*", "cat /data/*", "cat /data/.*", "pwd", "ls", "ls -a", "echo {a}",
]
TEXTS = ["{l}+{m}?", "{a}*{b}?", "{a}", ".{w}", "exit 1", "cat: can't open '/data/{w}': No such file or directory", "sh: {w}: not found"]


def escape(text):
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


def main():
    rng = random.Random(2026)

    def fill(text):
        word = "".join(rng.choice("0123456789") for _ in range(3))
        return text.format(w=word, l=rng.choice("abcdef"), m=rng.choice("abcdef"), a=rng.randint(10, 99), b=rng.randint(10, 99))

    lines = []
    for text in TAGS + ATTRIBUTES + VALUES:
        lines += [text] * 100
    lines += ['="'] * 200 + ['"'] * 200
    lines += [DECLARATION] * 40
    for _ in range(10):
        lines += [fill(text) for text in COMMANDS + TEXTS]
    print("\n".join(escape(line) for line in lines))


if __name__ == "__main__":
    main()
