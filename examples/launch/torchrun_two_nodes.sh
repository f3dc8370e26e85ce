#!/usr/bin/env bash
# Two nodes without a scheduler: run this on both, with the same MASTER_ADDR, and NODE_RANK=0 on the node it names.
#   MASTER_ADDR=node1 NODE_RANK=0 bash examples/launch/torchrun_two_nodes.sh [arguments of examples.train_lm]
#   MASTER_ADDR=node1 NODE_RANK=1 bash examples/launch/torchrun_two_nodes.sh [the same arguments]
set -euo pipefail

exec torchrun --nnodes 2 --node-rank "${NODE_RANK:?0 on the first node, 1 on the second}" \
    --master-addr "${MASTER_ADDR:?the name of the first node}" --master-port "${MASTER_PORT:-29500}" \
    --nproc-per-node "${NPROC:-8}" \
    -m examples.train_lm --mesh replica=2,shard=-1 --out runs/train_lm "$@"
