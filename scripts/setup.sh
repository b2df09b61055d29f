#!/usr/bin/env bash
# Prepares this checkout: .venv in the repo root, the package with its extras, the embedded policy.
#
#   bash scripts/setup.sh [EXTRAS]      EXTRAS: a comma-separated list, default "trl"
#
# Idempotent: what is already there is kept, and a step whose inputs have not changed is skipped.
# pip is used with your own settings (index, proxy, certificates); nothing here names an index.
#   TAILDRAFT_PYTHON       the Python to build .venv from (>= 3.11); default: the first found
#   TAILDRAFT_CONSTRAINTS  a constraints file; default scripts/constraints-cpu.txt
#   TAILDRAFT_CACHE        where the policy, kernels and calibrations are kept
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
EXTRAS="${1:-trl}"
CONSTRAINTS="${TAILDRAFT_CONSTRAINTS:-$ROOT/scripts/constraints-cpu.txt}"
STAMPS="$VENV/.taildraft"
SETUP_START=$SECONDS
cd "$ROOT"

say() { printf '[setup %4ds] %s\n' "$((SECONDS - SETUP_START))" "$*"; }
fail() { printf '[setup] %s\n' "$*" >&2; exit 1; }

# Runs a step with its output in a file, says what it is doing every 15 s, and how long it took.
# What the step wrote is shown only when it fails.
step() {
  local title="$1" started=$SECONDS output status=0
  shift
  output="$(mktemp)"
  say "$title"
  bash -c "$TICK" tick "$output" "$$" 2>/dev/null &
  TICKER=$!
  disown "$TICKER"  # or the shell would report its end
  "$@" >"$output" 2>&1 || status=$?
  stop_ticking
  if ((status != 0)); then
    tail -n 40 "$output" >&2
    rm -f "$output"
    fail "$title: failed after $((SECONDS - started)) s"
  fi
  rm -f "$output"
  say "$title: done in $((SECONDS - started)) s"
}

# Shows the last line of a file every 15 s until it is ended, or the set-up is gone. Its sleep must not
# outlive it: that would hold the terminal or pipe open.
TICK='
trap "kill \$nap 2>/dev/null; exit 0" TERM
while kill -0 "$2"; do
  sleep 15 >/dev/null 2>&1 &
  nap=$!
  wait "$nap"
  printf "              ... %s\n" "$(grep -v -e "^WARNING" -e "^\$" "$1" | tail -n 1 | cut -c 1-100)"
done
'
TICKER=""
stop_ticking() {
  [ -z "$TICKER" ] || kill "$TICKER" 2>/dev/null || true
  TICKER=""
}

find_python() {
  local name
  for name in ${TAILDRAFT_PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11 python; do
    if command -v "$name" >/dev/null 2>&1 &&
      "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      command -v "$name"
      return
    fi
  done
  fail "Python 3.11 or newer with its venv module is needed and was not found; set TAILDRAFT_PYTHON to one"
}

check_compiler() {
  local name scratch found=""
  for name in ${CXX:-} c++ g++ clang++; do
    if command -v "$name" >/dev/null 2>&1; then
      found="$name"
      break
    fi
  done
  [ -n "$found" ] || fail "a C++17 compiler with OpenMP is needed and was not found; install g++, or set CXX"
  scratch="$(mktemp -d)"
  printf '#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n' >"$scratch/probe.cpp"
  if ! "$found" -std=c++17 -fopenmp "$scratch/probe.cpp" -o "$scratch/probe" 2>"$scratch/said"; then
    cat "$scratch/said" >&2
    rm -rf "$scratch"
    fail "$found cannot compile C++17 with -fopenmp; install g++ (or clang++ with libomp), or set CXX"
  fi
  rm -rf "$scratch"
  say "C++ compiler: $found"
}

make_venv() {
  "$PYTHON" -m venv "$VENV"
}

# A name for everything an installation depends on.
install_key() {
  {
    printf '%s\n' "$ROOT" "$EXTRAS"
    cat pyproject.toml "$CONSTRAINTS"
    "$VENV/bin/python" -c 'import sys; print(sys.version)'
  } | "$VENV/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# Byte code is left to the first import: compiling every file of every package takes a minute.
install_package() {
  "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-compile \
    --constraint "$CONSTRAINTS" --editable ".[$EXTRAS]"
}

fetch_policy() {
  TQDM_DISABLE=1 PYTHONUNBUFFERED=1 "$VENV/bin/python" -c '
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
logging.getLogger("httpx").setLevel(logging.WARNING)
from rollout.policy.embedded import embedded_folder
embedded_folder()
'
}

check_compiler
if [ ! -x "$VENV/bin/python" ] || ! "$VENV/bin/python" -c 'import pip' >/dev/null 2>&1; then
  PYTHON="$(find_python)"
  step "making .venv with $("$PYTHON" --version) ($PYTHON)" make_venv
fi
mkdir -p "$STAMPS"
# The extras are part of the name: the tests' installation and the quickstart's do not undo each other.
STAMP="$STAMPS/installed-$(install_key)"
if [ -e "$STAMP" ] && [ -x "$VENV/bin/taildraft" ]; then
  say "taildraft[$EXTRAS] is installed"
else
  step "installing taildraft[$EXTRAS] (a few minutes the first time)" install_package
  touch "$STAMP"
fi
step "embedded policy (downloaded and converted once)" fetch_policy
say "ready: .venv/bin/taildraft --help"
