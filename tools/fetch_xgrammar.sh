#!/usr/bin/env bash
# Fetches XGrammar (Apache-2.0; Debian 12 has no package of it), which turns JSON Schemas into the tokens that may come next, as source
# from PyPI, pinned by hash, and builds its static library in build/xgrammar. Idempotent: a second run needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.2.9
sha256=87b466bca2475e29bb0323abc62c6c33cbcbcff47e5fb800a3e2099ac9620b90
folder=build/xgrammar
[[ -f $folder/$version.built ]] && exit
echo "setup: building XGrammar $version in $folder"
rm -rf "$folder"
mkdir -p "$folder"
# pip asks an archive of sources for its metadata, for which it needs the archive's own build tools: in an environment that goes again.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
/usr/bin/python3 -m venv "$scratch/python"
"$scratch/python/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary xgrammar -d "$scratch" "xgrammar==$version"
echo "$sha256  $scratch/xgrammar-$version.tar.gz" | sha256sum --check --quiet
tar xzf "$scratch/xgrammar-$version.tar.gz" -C "$folder" --strip-components=1 "xgrammar-$version/"{cpp,include,3rdparty/picojson,3rdparty/dlpack,LICENSE,NOTICE}
rm -r "$folder/cpp/tvm_ffi"
cat >"$folder/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(xgrammar LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")
find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
endif()
file(GLOB_RECURSE sources cpp/*.cc)
add_library(xgrammar STATIC ${sources})
target_include_directories(xgrammar PRIVATE include 3rdparty/picojson 3rdparty/dlpack/include)
target_compile_definitions(xgrammar PRIVATE XGRAMMAR_ENABLE_CPPTRACE=0 XGRAMMAR_ENABLE_INTERNAL_CHECK=0)
CMAKE
cmake -S "$folder" -B "$folder/objects" -G Ninja -DCMAKE_BUILD_TYPE=Release >/dev/null
ninja -C "$folder/objects" --quiet
touch "$folder/$version.built"
