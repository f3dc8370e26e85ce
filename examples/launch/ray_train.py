"""Runs `examples.train_lm` under Ray Train, which starts the processes and initializes torch.distributed.

    python -m examples.launch.ray_train --workers 8 --gpus 1 -- --mesh shard=-1 --out /shared/runs/train_lm

The arguments after `--` are those of `examples.train_lm`. Needs `pip install "ray[train]"`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def program(config: dict[str, Any]) -> None:
    """Runs in each worker. Ray has initialized the process group, and `make_mesh` uses it."""
    from examples import train_lm

    sys.argv = ["train_lm", *config["arguments"]]
    train_lm.main()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train examples.train_lm under Ray Train.")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs per process (default: none)")
    parser.add_argument(
        "--storage", type=Path, default=Path("runs/ray"), help="Ray's own folder (default: %(default)s)"
    )
    parser.add_argument("arguments", nargs="*", help="arguments of examples.train_lm, after --")
    args = parser.parse_args()
    resources = {"CPU": 1, "GPU": args.gpus} if args.gpus else {"CPU": 1}
    trainer = TorchTrainer(
        program,
        train_loop_config={"arguments": args.arguments},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus > 0, resources_per_worker=resources),
        run_config=RunConfig(name="train_lm", storage_path=str(args.storage.resolve())),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
