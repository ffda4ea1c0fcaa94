#!/usr/bin/env python3
"""Runs clang-tidy over src/, two files at a time, and remembers clean files by content.

  check_tidy.py BUILD [FILE...]      all of src/, or the files given
  check_tidy.py --twin BUILD         fails unless a planted fault is found

Where the build compiles several sources at once, so does this, which takes a fraction of the time.
A file is clean as long as it, everything of ours that it includes, its compile command, .clang-tidy and the tool stay
the same: the hash over all of these names an empty file under build/tidy/. Faults are never remembered.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOL = "clang-tidy-14"
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)


def closure(path, seen):
    """`path` and all headers of ours that it includes, directly or not."""
    if path in seen:
        return seen
    seen.add(path)
    for target in INCLUDE.findall(path.read_text()):
        for base in (ROOT / "src", path.parent):
            if (base / target).is_file():
                closure((base / target).resolve(), seen)
                break
    return seen


def key(path, command, setting):
    digest = hashlib.sha256(setting + command.encode())
    for part in sorted(closure(path, set())):
        digest.update(str(part.relative_to(ROOT)).encode() + b"\0" + part.read_bytes() + b"\0")
    return digest.hexdigest()


def sources(path):
    """The sources of ours that a file of the build stands for: itself, or those that it includes."""
    if path.is_relative_to(ROOT / "src"):
        return [path] if path.suffix == ".cpp" else []
    if "Unity" in path.parts:
        included = [pathlib.Path(p) for p in INCLUDE.findall(path.read_text())]
        return [p for p in included if p.is_relative_to(ROOT / "src") and p.suffix == ".cpp"]
    return []


def run(build, file):
    # Options that only GCC knows; and the one check that several sources at once must fail.
    more = ["--extra-arg=-Wno-unknown-warning-option", "--extra-arg=-Wno-unused-command-line-argument"]
    if "Unity" in file.parts:
        more.append("--checks=-bugprone-suspicious-include")
    done = subprocess.run([TOOL, "-p", build, "--quiet", *more, str(file)], cwd=ROOT, capture_output=True, text=True)
    return done.returncode == 0, done.stdout


def check(build, wanted):
    commands = {}
    for entry in json.loads((ROOT / build / "compile_commands.json").read_text()):
        path = (pathlib.Path(entry["directory"]) / entry["file"]).resolve()
        if sources(path):
            commands[path] = entry["command"].replace(str(ROOT), "")
    chosen = {pathlib.Path(w).resolve() for w in wanted}
    files = [f for f in sorted(commands) if not chosen or chosen & set(sources(f))]
    if chosen and not files:
        sys.exit(f"{build} compiles none of: {' '.join(wanted)}")
    setting = (ROOT / ".clang-tidy").read_bytes() + subprocess.run([TOOL, "--version"], capture_output=True).stdout
    cache = ROOT / "build" / "tidy"
    cache.mkdir(parents=True, exist_ok=True)
    todo = [(f, cache / key(f, commands[f], setting)) for f in files]
    todo = [(f, mark) for f, mark in todo if not mark.exists()]
    print(f"{len(files) - len(todo)} of {len(files)} files are known to be clean")
    bad = 0
    # Largest first, so that no long file is left for the end.
    todo.sort(key=lambda item: -sum(p.stat().st_size for p in sources(item[0])))
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (file, mark), (clean, text) in zip(todo, pool.map(lambda item: run(build, item[0]), todo)):
            if clean:
                mark.touch()
            else:
                bad += 1
                print(f"{file.relative_to(ROOT)}:\n{text}")
    used = {key(f, commands[f], setting) for f in files}
    if not wanted:
        for old in cache.iterdir():
            if old.name not in used:
                old.unlink()
    return 1 if bad else 0


def twin(build):
    with tempfile.TemporaryDirectory() as folder:
        fault = pathlib.Path(folder) / "fault.cpp"
        fault.write_text("#include <string>\n#include <utility>\nstd::string twice(std::string a) { std::string b = std::move(a); return a + b; }\n")
        done = subprocess.run([TOOL, "--quiet", f"--config-file={ROOT / '.clang-tidy'}", str(fault), "--", "-std=c++20"],
                              capture_output=True, text=True)  # fmt: skip
    found = done.returncode != 0 and "bugprone-use-after-move" in done.stdout
    if not found:
        print(done.stdout)
    return 0 if found else 1


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(twin(arguments[1]) if arguments[0] == "--twin" else check(arguments[0], arguments[1:]))
