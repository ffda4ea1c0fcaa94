#!/usr/bin/env bash
# Proves that tools/check_includes.py can fail: in a copy of the sources, three forbidden includes must be found.
set -euo pipefail
cd "$(dirname "$0")/.."
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir "$copy/tools"
cp tools/check_includes.py "$copy/tools/"
cp -r src "$copy/src"
"$copy/tools/check_includes.py"  # the copy is clean

expect() {  # FILE INCLUDE: adding it must be refused
  cp "$copy/src/$1" "$copy/kept"
  printf '#include "%s"\n' "$2" >>"$copy/src/$1"
  if "$copy/tools/check_includes.py" >"$copy/out"; then
    echo "not found: src/$1 includes $2"
    exit 1
  fi
  grep -q "$1.*$2" "$copy/out"
  mv "$copy/kept" "$copy/src/$1"
}
expect numerics/isa.cpp model/model.hpp      # upward
expect sandbox/guest.cpp engine/engine.hpp   # sideways
expect cli/main.cpp rl/learner.hpp           # another room's private header
