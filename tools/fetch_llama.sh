#!/usr/bin/env bash
# Fetches llama.cpp as the peer of bench/compare_llama.py and of tests/oracle/test_llama.py: the prebuilt library and, for its
# headers, the source, both from npm and pinned; and builds their programs into build/llama. Idempotent: a second run needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."
version=3.22.1
folder=build/llama/$version
libraries=$folder/node_modules/@node-llama-cpp/linux-x64/bins/linux-x64
if [[ ! -e $libraries/libllama-common.so || ! -e $folder/src/include/llama.h ]]; then
  command -v npm >/dev/null || { echo "fetch_llama: npm is needed (Debian: apt-get install npm)" >&2; exit 1; }
  command -v git >/dev/null || { echo "fetch_llama: git is needed" >&2; exit 1; }
  rm -rf "$folder"
  mkdir -p "$folder"
  (cd "$folder" && npm install --silent --no-audit --no-fund --ignore-scripts "@node-llama-cpp/linux-x64@$version" &&
    npm pack --silent "node-llama-cpp@$version" && tar xzf "node-llama-cpp-$version.tgz" package/llama/gitRelease.bundle &&
    git clone --quiet package/llama/gitRelease.bundle src && rm -rf package "node-llama-cpp-$version.tgz")
fi
# The fastest variant that runs these models: the one for AMX aborts while it places their weights.
mkdir -p build/llama/backends
for library in "$libraries"/*.so; do
  [[ $library == *sapphirerapids* ]] || ln -sf "$(realpath "$library")" build/llama/backends/
done
for program in bench/llama_model tests/oracle/llama_peer; do
  binary=build/llama/$(basename "$program")
  [[ $program.cpp -nt $binary ]] || continue
  g++ -O2 -std=c++20 -I"$folder/src/include" -I"$folder/src/ggml/include" "$program.cpp" -o "$binary" -L"$libraries" \
    -l:"$(basename "$(ls "$libraries"/libllama.v*.so)")" -l:"$(basename "$(ls "$libraries"/libggml.v*.so)")" -l:libggml-base.so \
    -Wl,-rpath,"$(realpath "$libraries")" -Wl,--allow-shlib-undefined
done
