#!/usr/bin/env bash
# One node: torchrun starts one process per device, and chooses a free port.
#   bash examples/launch/torchrun_one_node.sh [arguments of examples.train_lm]
set -euo pipefail

exec torchrun --standalone --nproc-per-node "${NPROC:-8}" \
    -m examples.train_lm --mesh shard=-1 --out runs/train_lm "$@"
