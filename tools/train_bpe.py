#!/usr/bin/env python3
"""Trains a small byte-level BPE vocabulary and writes it as Tidelock reads it.

  tools/train_bpe.py CORPUS --size 505 --out FOLDER

CORPUS has one segment per line; \\n, \\t, \\r and \\\\ stand for the characters they name. Segments are counted
separately, as the chat template encodes them, so no merge crosses one. FOLDER receives

  tiktoken.model         "BASE64 RANK" lines: the 256 bytes in byte order, then the merges in the order they were found
  tokenizer_config.json  the special tokens of the K3 chat protocol, placed after the base tokens

The result depends on the corpus and the options only: equal counts are decided by the smaller pair of ids. Standard
library only, which has no script property: the corpus must be ASCII (other text still encodes, byte by byte).
"""

import argparse
import base64
import collections
import json
import os
import re
import sys

SPECIALS = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "[PAD]"]

# The pre-tokenizer of src/model/pretokenizer.hpp, restricted to ASCII.
SPACE = r"\t\n\x0b\x0c\r "
CONTRACTION = r"(?:'[sStTmMdD]|'[rR][eE]|'[vV][eE]|'[lL][lL])?"
PIECE = re.compile(
    "|".join(
        [
            rf"[^\r\nA-Za-z0-9]?[A-Z]*[a-z]+{CONTRACTION}",
            rf"[^\r\nA-Za-z0-9]?[A-Z]+[a-z]*{CONTRACTION}",
            r"[0-9]{1,3}",
            rf" ?[^{SPACE}A-Za-z0-9]+[\r\n]*",
            rf"[{SPACE}]*[\r\n]+",
            rf"[{SPACE}]+(?![^{SPACE}])",
            rf"[{SPACE}]+",
        ]
    )
)

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


def unescape(line, where):
    def replace(match):
        if match.group(1) not in ESCAPES:
            sys.exit(f"{where}: unknown escape {match.group(0)!r}; expected \\n, \\t, \\r or \\\\")
        return ESCAPES[match.group(1)]

    return re.sub(r"\\(.?)", replace, line)


def count_pieces(path, merge_digits):
    """Pieces of all segments as tuples of ids, with how often each stands in the corpus."""
    counts = collections.Counter()
    with open(path, "rb") as file:
        content = file.read()
    for number, line in enumerate(content.split(b"\n"), 1):
        where = f"{path}:{number}"
        if not line.isascii():
            sys.exit(f"{where}: not ASCII; the standard library cannot cut other text as the tokenizer does")
        for piece in PIECE.findall(unescape(line.decode("ascii"), where)):
            if merge_digits or not piece.isdigit():
                counts[tuple(piece.encode())] += 1
    return counts


def replace_pair(word, pair, token):
    out = []
    at = 0
    while at < len(word):
        if word[at : at + 2] == pair:
            out.append(token)
            at += 2
        else:
            out.append(word[at])
            at += 1
    return tuple(out)


def train(counts, size):
    """Bytes of each token by rank."""
    tokens = [bytes([byte]) for byte in range(256)]
    known = set(tokens)
    words = dict(counts)
    while len(tokens) < size:
        pairs = collections.Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += count
        # Two pairs can spell the same bytes; a second token for them could never be told from the first.
        candidates = [pair for pair in pairs if tokens[pair[0]] + tokens[pair[1]] not in known]
        if not candidates:
            sys.exit(f"the corpus has pairs for {len(tokens)} tokens only; asked for {size}: enlarge it or lower --size")
        best = min(candidates, key=lambda pair: (-pairs[pair], pair))
        merged = tokens[best[0]] + tokens[best[1]]
        tokens.append(merged)
        known.add(merged)
        merged_words = collections.Counter()
        for word, count in words.items():
            merged_words[replace_pair(word, best, len(tokens) - 1)] += count
        words = merged_words
    return tokens


def write_atomic(path, text):
    temporary = path + ".tmp"
    with open(temporary, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    parser.add_argument("--size", type=int, required=True, help="base tokens, the 256 bytes included, specials not")
    parser.add_argument("--out", required=True, help="folder to write, created if missing")
    parser.add_argument("--merge-digits", action="store_true", help="let digits merge; otherwise each is one token")
    options = parser.parse_args()
    if options.size < 256:
        parser.error(f"--size {options.size}: at least the 256 bytes are needed")
    tokens = train(count_pieces(options.corpus, options.merge_digits), options.size)
    added = {str(len(tokens) + i): {"content": name, "special": True} for i, name in enumerate(SPECIALS)}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "num_reserved_special_tokens": len(SPECIALS),
        "bos_token": "[BOS]",
        "eos_token": "<|end_of_msg|>",
        "pad_token": "[PAD]",
        "added_tokens_decoder": added,
    }
    os.makedirs(options.out, exist_ok=True)
    ranks = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    write_atomic(os.path.join(options.out, "tiktoken.model"), ranks)
    write_atomic(os.path.join(options.out, "tokenizer_config.json"), json.dumps(config, indent=2) + "\n")
    print(f"{len(tokens)} base tokens and {len(SPECIALS)} special ones in {options.out}")


if __name__ == "__main__":
    main()
