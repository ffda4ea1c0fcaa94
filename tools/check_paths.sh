#!/usr/bin/env bash
# No tracked file names a folder of the machine it was written on, or a package registry's host.
#   check_paths.sh           prints each offending line; fails when there is one
#   check_paths.sh --twin    fails unless planted lines are found
set -euo pipefail
cd "$(dirname "$0")/.."
# Written in pieces, so that this file does not find itself. /root alone is the home inside a sandbox; what starts with a
# dot below it is a machine's own.
slash=/
paths="(^|[^[:alnum:]_.~/-])${slash}(work|home|Users|mnt${slash}data)${slash}[[:alnum:]_.-]+|${slash}root${slash}\.[[:alnum:]_-]+|${slash}tmp${slash}tl"
hosts="(pypi|npmjs|crates|rubygems)\.(org|io|com)|files\.pythonhosted|registry\.[a-z-]+\.(com|org|io)|deb\.debian|proxy\.golang|ghcr\.io|quay\.io|docker\.io"

offending() { grep -InE "$paths|$hosts" "$@"; }

if [[ "${1:-}" == --twin ]]; then
  planted=$(mktemp)
  trap 'rm -f "$planted"' EXIT
  for text in "${slash}work/main/src" "path = \"${slash}home/someone/model\"" "${slash}root/.cache/x" "https:/${slash}pypi"".org/simple" "registry.""example.com"; do
    echo "$text" >"$planted"
    offending "$planted" >/dev/null || { echo "not found: $text"; exit 1; }
  done
  echo "cd ${slash}root; ls src/work/x; build/home" >"$planted"
  ! offending "$planted"
  exit
fi
# Not of any machine: paths inside a sandbox, and a sample text that a tokenizer is tested with.
allowed='^(tests/sandbox/files_test\.cpp|tests/model/fixtures/bpe_corpus\.txt):'
mapfile -d '' -t files < <(git ls-files -z)
! { offending -- "${files[@]}"; grep -InF -- "$PWD/" "${files[@]}"; } | grep -vE "$allowed"
