#!/usr/bin/env bash
# Writes docs/recipes.md from the program's own schema. `--check` compares instead (for the tests).
set -euo pipefail
cd "$(dirname "$0")/.."
page() {
  cat <<'TEXT'
# Recipes: every key

Recipes are TOML. Unknown keys, wrong types and values out of range are refused with file, line and key. `--set a.b=VALUE` overrides a
key; `--set 'tasks.mixture[0].difficulty=3'` reaches into an array. A run's folder holds the recipe as run. This page is printed by the
program (`tools/make_docs.sh`).

## `tidelock rl` and `tidelock eval`

TEXT
  build/release/tidelock rl --keys --markdown
  printf '\n## `tidelock train`\n\n'
  build/release/tidelock train --keys --markdown
}
if [[ "${1:-}" == "--check" ]]; then
  page | diff -u docs/recipes.md - || { echo "docs/recipes.md is not what the program prints: run tools/make_docs.sh" >&2; exit 1; }
else
  page >docs/recipes.md
fi
