#!/usr/bin/env bash
# Reports sources longer than 500 lines: past that, a file usually does two things. A report, not a check.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files | grep -E '\.(cpp|hpp|inl|py|sh)$' | xargs wc -l | awk '$1 > 500 && $2 != "total" { print "   longer than 500 lines: " $2 " (" $1 ")" }'
