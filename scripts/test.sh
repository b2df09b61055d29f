#!/usr/bin/env bash
# All checks and tests, after the same set-up as the quickstart. Exit code 0: everything passed.
#
#   bash scripts/test.sh              everything
#   bash scripts/test.sh GROUP ...    some of: lint types layers wheel unit slow lossless service bridge
#
# Every group runs even when an earlier one failed, so that one run shows all there is to mend.
set -uo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
bash scripts/setup.sh trl,dev || exit 1

BIN="$ROOT/.venv/bin"
UNIT_BUDGET_S=60
ALL=(lint types layers wheel unit slow lossless service bridge)
PYTEST_GROUPS=(unit slow lossless service bridge)
GROUPS_WANTED=("${@:-${ALL[@]}}")
LOGS="$(mktemp -d)"
trap 'rm -rf "$LOGS"' EXIT
FAILED=()
TIMES=()
NOTES=()
START=$SECONDS
export RAY_USAGE_STATS_ENABLED=0 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=offline

run_lint() { "$BIN/ruff" check . && "$BIN/ruff" format --check . && bash -n scripts/*.sh .ci/run; }
run_types() { "$BIN/mypy"; }
run_layers() { "$BIN/lint-imports"; }
run_wheel() {
  local out="$LOGS/wheel"
  "$BIN/python" -m build --wheel --no-isolation --outdir "$out" . >"$LOGS/build.log" 2>&1 ||
    { cat "$LOGS/build.log"; return 1; }
  "$BIN/check-wheel-contents" "$out" && "$BIN/python" scripts/check_wheel.py "$out"/*.whl
}
run_unit() {
  local started=$SECONDS
  tests unit tests/unit -m "not slow" || return 1
  if ((SECONDS - started > UNIT_BUDGET_S)); then
    # Said and not failed: a busy machine must not turn a true suite red.
    NOTES+=("unit tests took $((SECONDS - started)) s; their budget on two idle cores is $UNIT_BUDGET_S s")
  fi
}
run_slow() { tests slow tests/unit -m slow; }
run_lossless() { tests lossless tests/lossless; }
run_service() { tests service tests/service; }
run_bridge() { tests bridge tests/bridge; }

# Runs pytest and keeps its summary for the end.
tests() {
  local name="$1"
  shift
  "$BIN/python" -m pytest "$@" --durations=5 -q 2>&1 | tee "$LOGS/$name.log"
  return "${PIPESTATUS[0]}"
}

for group in "${GROUPS_WANTED[@]}"; do
  if ! declare -F "run_$group" >/dev/null; then
    echo "no group '$group'; known: ${ALL[*]}" >&2
    exit 2
  fi
  printf '\n=== %s\n' "$group"
  started=$SECONDS
  "run_$group" || FAILED+=("$group")
  TIMES+=("$group $((SECONDS - started)) s")
done

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
