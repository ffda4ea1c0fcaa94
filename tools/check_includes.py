#!/usr/bin/env python3
"""Checks that includes run downward only, and that a room's private headers stay inside it.

A room may include the rooms below it, transitively (the table of the design). A header whose opening comment says
"Private to ROOM/" is refused everywhere else.
"""

import pathlib
import re
import sys

DIRECT = {
    "base": [],
    "numerics": ["base"],
    "model": ["numerics"],
    "state": ["model"],
    "engine": ["model", "state"],
    "train": ["model", "state"],
    "sandbox": ["base"],
    "rl": ["engine", "train", "sandbox"],
    "serve": ["engine", "sandbox", "rl"],
    "cli": ["rl", "serve"],
}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)


def below(room):
    rooms, todo = {room}, list(DIRECT[room])
    while todo:
        r = todo.pop()
        if r not in rooms:
            rooms.add(r)
            todo += DIRECT[r]
    return rooms


def main():
    root = pathlib.Path(__file__).resolve().parent.parent / "src"
    faults = 0
    private = {}
    for header in root.rglob("*.hpp"):
        # The sentence may be wrapped: comment marks and line ends count as one space.
        opening = re.sub(r"\s*\n//\s*", " ", header.read_text()[:1200])
        match = re.search(r"Private to (\w+)/", opening)
        if match:
            private[str(header.relative_to(root))] = match.group(1)
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".hpp", ".cpp", ".inl")):
        room = path.relative_to(root).parts[0]
        if room not in DIRECT:
            print(f"{path.relative_to(root)}: no such room in the design: {room}")
            faults += 1
            continue
        allowed = below(room)
        for target in INCLUDE.findall(path.read_text()):
            other = target.split("/")[0]
            if other not in allowed:
                print(f"{path.relative_to(root)}: {room}/ may not include {target}")
                faults += 1
            elif private.get(target, room) != room:
                print(f"{path.relative_to(root)}: {target} is private to {private[target]}/")
                faults += 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
