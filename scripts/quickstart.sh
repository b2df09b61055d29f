#!/usr/bin/env bash
# From a fresh checkout to a policy that is being trained with speculative rollouts, on this machine's CPU.
#
#   bash scripts/quickstart.sh [SETTING=VALUE ...]      e.g. trainer.steps=8 controller=ar tracker=wandb
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
bash scripts/setup.sh trl
exec .venv/bin/taildraft run "$@"
