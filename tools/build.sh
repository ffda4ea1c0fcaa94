#!/usr/bin/env bash
# Configures and builds one of: release, asan (address and undefined-behaviour sanitizers), fuzz (clang, libFuzzer).
#   tools/build.sh NAME [target...]
# Sources are compiled in batches, which suits a whole build; who edits and builds sets TIDELOCK_UNITY=OFF.
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1
shift
case "$name" in
  release) options=(-DCMAKE_BUILD_TYPE=Release) ;;
  asan) options=(-DCMAKE_BUILD_TYPE=Debug -DTIDELOCK_SANITIZE=ON -DTIDELOCK_BENCH=OFF) ;;
  fuzz) options=(-DCMAKE_BUILD_TYPE=Release -DTIDELOCK_FUZZ=ON -DCMAKE_CXX_COMPILER=clang++) ;;
  *) echo "build: expected release, asan or fuzz, not $name" >&2; exit 2 ;;
esac
options+=("-DTIDELOCK_UNITY=${TIDELOCK_UNITY:-ON}")
[[ -f build/$name/build.ninja ]] || cmake -S . -B "build/$name" -G Ninja "${options[@]}" >/dev/null
ninja -C "build/$name" --quiet "$@"
