#!/usr/bin/env bash
# All checks and tests, after the same set-up as the quickstart. Exit code 0: everything passed.
#
#   bash scripts/test.sh              everything
#   bash scripts/test.sh GROUP ...    some of: unit lint types layers wheel slow service lossless bridge
#
# Every group runs even when an earlier one failed, so that one run shows all there is to mend. Two groups run
# at a time, because most of them keep one core busy or wait; what a group prints is shown whole when it ends.
# TAILDRAFT_TEST_LANES=1 runs one after the other and shows what they print at once.
set -uo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
# In this order. The first runs beside the short ones, so that its own time is told by an undisturbed core; of the
# others the longest begins first, so that the last to end has little left.
ALL=(unit lint types layers wheel lossless slow service bridge)
PYTEST_GROUPS=(unit slow service lossless bridge)
GROUPS_WANTED=("${@:-${ALL[@]}}")
for group in "${GROUPS_WANTED[@]}"; do
  [[ " ${ALL[*]} " == *" $group "* ]] || { echo "no group '$group'; known: ${ALL[*]}" >&2; exit 2; }
done
LANES="${TAILDRAFT_TEST_LANES:-2}"
((${#GROUPS_WANTED[@]} == 1)) && LANES=1
[[ "$LANES" =~ ^[1-9]$ ]] || { echo "TAILDRAFT_TEST_LANES must be 1 to 9, got '$LANES'" >&2; exit 2; }
bash scripts/setup.sh trl,dev || exit 1

BIN="$ROOT/.venv/bin"
UNIT_BUDGET_S=60
LOGS="$(mktemp -d)"
FAILED=()
TIMES=()
NOTES=()
START=$SECONDS
# Tests start some thirty processes, and pytest rewrites every test file: without bytecode all of it is compiled anew.
unset PYTHONDONTWRITEBYTECODE
export RAY_USAGE_STATS_ENABLED=0 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=offline

run_lint() { "$BIN/ruff" check . && "$BIN/ruff" format --check . && bash -n scripts/*.sh .ci/run; }
run_types() { "$BIN/mypy"; }
run_layers() { "$BIN/lint-imports"; }
run_wheel() {
  local out="$LOGS/wheel"
  "$BIN/python" -m build --wheel --no-isolation --outdir "$out" . >"$LOGS/build.out" 2>&1 ||
    { cat "$LOGS/build.out"; return 1; }
  "$BIN/check-wheel-contents" "$out" && "$BIN/python" scripts/check_wheel.py "$out"/*.whl
}
run_unit() { tests tests/unit -m "not slow"; }
run_slow() { tests tests/unit -m slow; }
run_lossless() { tests tests/lossless; }
run_service() { tests tests/service; }
run_bridge() { tests tests/bridge; }
tests() { "$BIN/python" -m pytest "$@" --durations=5 -q; }

# Runs one group and leaves its exit code and its seconds: of the clock, and of the processors as far as its own
# child processes tell them.
run_group() {
  local TIMEFORMAT='%0R %0U %0S'
  {
    time if ((LANES == 1)); then
      "run_$1" 2>&1 | tee "$LOGS/$1.log"
      code="${PIPESTATUS[0]}"
    else
      "run_$1" >"$LOGS/$1.log" 2>&1
      code=$?
    fi
  } 2>"$LOGS/$1.time"
  echo "$code" >"$LOGS/$1.new" && mv "$LOGS/$1.new" "$LOGS/$1.code"
}

# Shows a group that has ended, and notes how.
report_group() {
  local group="$1" wall_s=0 user_s=0 system_s=0 verdict=passed
  if [ "$(cat "$LOGS/$group.code" 2>/dev/null)" != 0 ]; then
    verdict=FAILED
    FAILED+=("$group")
  fi
  read -r wall_s user_s system_s <"$LOGS/$group.time"
  printf '\n=== %s: %s, %d s\n' "$group" "$verdict" "$wall_s"
  ((LANES == 1)) || cat "$LOGS/$group.log"
  TIMES+=("$group $wall_s s ($((user_s + system_s)) s of CPU)")
  if [ "$group" = unit ] && ((wall_s > UNIT_BUDGET_S)); then
    # Said and not failed: a busy machine must not turn a true suite red.
    NOTES+=("unit tests took $wall_s s; their budget on two idle cores is $UNIT_BUDGET_S s")
  fi
}

# Each group is a process group of its own, so that an interrupt reaches all it has started.
set -m
RUNNING=() # each GROUP:PID
interrupt() {
  for job in "${RUNNING[@]}"; do kill -INT -- "-${job#*:}" 2>/dev/null; done
  wait
  exit 130
}
trap 'rm -rf "$LOGS"' EXIT
trap interrupt INT TERM

# Waits until fewer than $1 groups run, and shows those that ended.
wait_for_lane() {
  local still job
  while ((${#RUNNING[@]} >= $1)); do
    sleep 0.2
    still=()
    for job in "${RUNNING[@]}"; do
      if kill -0 "${job#*:}" 2>/dev/null; then still+=("$job"); else report_group "${job%%:*}"; fi
    done
    RUNNING=("${still[@]}")
  done
}

for group in "${GROUPS_WANTED[@]}"; do
  wait_for_lane "$LANES"
  printf '\n=== %s: running\n' "$group"
  run_group "$group" &
  RUNNING+=("$group:$!")
done
wait_for_lane 1

printf '\n=== summary\n'
printf 'time: %s; in all %d s\n' "$(IFS=,; echo "${TIMES[*]}")" "$((SECONDS - START))"
for note in "${NOTES[@]}"; do echo "note: $note"; done
echo "skipped, and why:"
grep -h '^SKIPPED' "$LOGS"/*.log 2>/dev/null | sort -u | sed 's/^/  /' || true
grep -qh '^SKIPPED' "$LOGS"/*.log 2>/dev/null || echo "  nothing"
for group in "${PYTEST_GROUPS[@]}"; do
  [ -e "$LOGS/$group.log" ] && printf '%s: %s\n' "$group" "$(tail -n 1 "$LOGS/$group.log")"
done
if ((${#FAILED[@]})); then
  echo "FAILED: ${FAILED[*]}"
  exit 1
fi
# The last line sums up pytest's own counts.
"$BIN/python" - "$LOGS" <<'PY'
import pathlib
import re
import sys

counts: dict[str, int] = {}
for log in sorted(pathlib.Path(sys.argv[1]).glob("*.log")):
    last = (log.read_text().strip().splitlines() or [""])[-1]
    for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|deselected)", last):
        counts[word] = counts.get(word, 0) + int(number)
print("all checks passed: " + ", ".join(f"{n} {word}" for word, n in counts.items()))
PY
