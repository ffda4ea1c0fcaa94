#!/usr/bin/env bash
# Longer runs than ./test makes: what shows itself once in an hour. Not part of ./test; run it before a release, or over
# night. Everything is written below build/soak and a temporary folder; nothing is left running.
#   tools/soak.sh                 all parts, 10 minutes each
#   tools/soak.sh fuzz 60         each fuzz target for 60 minutes; a finding is kept in build/soak/TARGET
#   tools/soak.sh resume 30       a run killed at random moments and resumed, again and again: equal bytes, nothing left
#   tools/soak.sh sandbox 30      the sandbox tests over and over, in random order
#   tools/soak.sh microvm 30     the microVM tests with every step of every operation killed and long chains, over and over
#   tools/soak.sh serve 30       200 clients that come, cancel, hang and send rubbish, while the server is ended and killed
#   tools/soak.sh e2b 30         the E2B server killed at random moments of random operations: nothing that was told is lost
#   tools/soak.sh asan 30         all tests of the sanitizer build over and over, with other random cases each time
# Fails at the first fault and says how to see it again.
set -euo pipefail
cd "$(dirname "$0")/.."
part=${1:-all}
minutes=${2:-10}
mkdir -p build/soak
scratch=$(mktemp -d "${TMPDIR:-/tmp}/tidelock-soak-XXXXXX")
trap 'rm -rf "$scratch"' EXIT
export TMPDIR=$scratch
within() { ((SECONDS < deadline)); }
start() { deadline=$((SECONDS + minutes * 60)); }

soak_fuzz() {
  tools/build.sh fuzz
  for program in build/fuzz/fuzz_*; do
    local name=${program##*/fuzz_}
    echo "== $name for $minutes min"
    mkdir -p "build/soak/$name"
    "$program" -max_total_time=$((minutes * 60)) -timeout=20 -rss_limit_mb=2048 -print_final_stats=1 \
      -artifact_prefix="build/soak/$name/" "build/soak/$name" "tests/fuzz/corpus/$name" >"build/soak/$name.log" 2>&1 ||
      { tail -n 40 "build/soak/$name.log"; echo "see build/soak/$name.log; again: $program build/soak/$name/crash-..."; exit 1; }
    grep -E 'stat::(number_of_executed_units|new_units_added)' "build/soak/$name.log"
  done
}

soak_resume() {
  tools/build.sh release
  local binary=$PWD/build/release/tidelock settings=(--set rl.steps=8 --set rl.groups=4 --set rl.group_size=4
    --set eval.tasks=4 --set eval.samples=2 --set rl.learning_rate=1e-2)
  "$binary" rl recipes/quickstart.toml --out "$scratch/whole" "${settings[@]}" >/dev/null
  local whole=$scratch/whole/adapter/adapter_model.safetensors rounds=0 kills=0
  start
  while within; do
    rm -rf "$scratch/run"
    local arguments=(rl recipes/quickstart.toml --out "$scratch/run" "${settings[@]}")
    while true; do
      "$binary" "${arguments[@]}" >"$scratch/log" 2>&1 &
      local pid=$!
      sleep "0.$((RANDOM % 1000))"
      sleep "$((RANDOM % 4))"
      if ! kill -9 "$pid" 2>/dev/null; then
        wait "$pid" || { cat "$scratch/log"; exit 1; }
        break
      fi
      wait "$pid" 2>/dev/null || true
      kills=$((kills + 1))
      [[ -f "$scratch/run/recipe.toml" ]] && arguments=(rl --resume "$scratch/run")
    done
    cmp "$whole" "$scratch/run/adapter/adapter_model.safetensors"
    sleep 1
    # The helper's command line is hidden; its environment is not.
    if env -u TMPDIR grep -lz "^TMPDIR=$scratch$" /proc/[0-9]*/environ 2>/dev/null; then
      echo "these processes are left"
      exit 1
    fi
    [[ -z "$(find "$scratch" -maxdepth 1 -name 'tidelock-sandbox-*')" ]] || { ls "$scratch"; exit 1; }
    rounds=$((rounds + 1))
    echo "round $rounds: equal after $kills kills in all"
  done
}

soak_sandbox() {
  tools/build.sh release test_sandbox
  start
  while within; do
    local seed=$((RANDOM % 99999 + 1))
    build/release/test_sandbox --gtest_brief=1 --gtest_shuffle --gtest_random_seed="$seed" >"$scratch/log" 2>&1 ||
      { tail -n 60 "$scratch/log"; echo "again: build/release/test_sandbox --gtest_shuffle --gtest_random_seed=$seed"; exit 1; }
    [[ -z "$(find "$scratch" -maxdepth 1 -name 'tidelock-sandbox-*')" ]] || { ls "$scratch"; exit 1; }
  done
}

soak_microvm() {
  tools/build.sh release test_sandbox
  start
  while within; do
    local seed=$((RANDOM % 99999 + 1))
    TIDELOCK_SOAK=1 build/release/test_sandbox --gtest_filter='Microvm*:Vm*' --gtest_brief=1 --gtest_shuffle \
      --gtest_random_seed="$seed" >"$scratch/log" 2>&1 ||
      { tail -n 60 "$scratch/log"; echo "again: TIDELOCK_SOAK=1 build/release/test_sandbox --gtest_filter='Microvm*:Vm*' --gtest_shuffle --gtest_random_seed=$seed"; exit 1; }
    if pgrep -f "guest=tidelock-" >/dev/null; then pgrep -fa "guest=tidelock-" | cut -c 1-100; echo "these machines are left"; exit 1; fi
  done
}

soak_serve() {
  tools/build.sh release tidelock
  TIDELOCK_BINARY=$PWD/build/release/tidelock python3 tests/cli/serve_soak.py "$minutes"
}

soak_e2b() {
  tools/build.sh release tidelock
  TIDELOCK_BINARY=$PWD/build/release/tidelock python3 tests/cli/e2b_soak.py "$minutes"
}

soak_asan() {
  tools/build.sh asan
  start
  while within; do
    for program in build/asan/test_*; do
      local seed=$RANDOM
      RC_PARAMS="seed=$seed max_success=400" "$program" --gtest_brief=1 --gtest_shuffle >"$scratch/log" 2>&1 ||
        { tail -n 80 "$scratch/log"; echo "again: RC_PARAMS='seed=$seed max_success=400' $program"; exit 1; }
      within || break
    done
  done
}

case "$part" in
  all) for one in fuzz resume sandbox microvm serve e2b asan; do echo "== $one"; "soak_$one"; done ;;
  fuzz | resume | sandbox | microvm | serve | e2b | asan) "soak_$part" ;;
  *) echo "soak: expected fuzz, resume, sandbox, microvm, serve, e2b, asan or all, not $part" >&2; exit 2 ;;
esac
echo "soak: nothing found"
