"""Few bits: errors of formats, a QLoRA step next to FSDP2 + bitsandbytes + peft, and convergence of training.

    OMP_NUM_THREADS=1 python -m benchmarks.bits
    OMP_NUM_THREADS=1 python -m benchmarks.bits --only formats convergence

formats      bytes, errors and times for a million float32 draws from N(0, 1), on one thread, with bfloat16 for
             comparison; and the bits per byte of a trained model whose matrices are stored in each format
memory       a QLoRA step on two ranks: `benchmarks/qlora.py`
convergence  training with messages, optimizers and parameters in few bits: `benchmarks/few_bits_training.py`;
             `--model example` trains the model of `examples/train_lm.py` unchanged, which takes longer
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from benchmarks.few_bits_training import FORMATS, convergence, kept
from benchmarks.report import Goal, interleaved, lacks, parser, publish
from shardfn import quant

PARTS = ("formats", "memory", "convergence")


def measured(format: quant.Format, x: Tensor, repeats: int) -> dict[str, Any]:
    packed = format.encode(x)
    arrived = format.decode(packed, len(x), torch.float32)
    times = interleaved(
        {
            "encode": functools.partial(format.encode, x),
            "decode": functools.partial(format.decode, packed, len(x), torch.float32),
        },
        repeats=repeats,
        inner=1,
    )
    return row(str(format), len(packed) / len(x), arrived - x, times)


def row(name: str, rate: float, error: Tensor, times: dict[str, float]) -> dict[str, Any]:
    return {
        "format": name,
        "bytes a number": rate,
        "error, root of mean square": error.square().mean().sqrt().item(),
        "largest": error.abs().max().item(),
        "encode ms": times["encode"] * 1e3,
        "decode ms": times["decode"] * 1e3,
    }


def formats(tiny: bool, repeats: int) -> tuple[list[dict[str, Any]], list[Goal]]:
    torch.set_num_threads(1)
    x = torch.randn(2**12 if tiny else 2**20, generator=torch.Generator().manual_seed(0))
    rows = [measured(format, x, repeats) for format in FORMATS]
    half = x.bfloat16()
    times = interleaved({"encode": x.bfloat16, "decode": half.float}, repeats=repeats, inner=1)
    rows.append(row("bfloat16", 2.0, half.float() - x, times))
    off = max(abs(found["bytes a number"] / format.rate - 1) for found, format in zip(rows, FORMATS, strict=False))
    return rows, [Goal("bytes a number beside the formats' formula, largest relative difference", off, 1e-3)]


def qlora(tiny: bool, rounds: int) -> tuple[list[dict[str, Any]], list[Goal]]:
    from benchmarks.qlora import memory  # imports transformers

    return memory(tiny, rounds)


def absent(chosen: list[str]) -> list[str]:
    """Packages that the chosen parts need but that are not installed."""
    needed = ("transformers", "safetensors", "bitsandbytes", "peft") if "memory" in chosen else ()
    return [name for name in needed if importlib.util.find_spec(name) is None]


def main() -> None:
    options = parser("Few bits: formats, a QLoRA step next to its peer, and convergence.")
    options.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=" ".join(PARTS))
    options.add_argument("--repeats", type=int, default=9, help="measurements of encoding and decoding")
    options.add_argument("--rounds", type=int, default=5, help="rounds of QLoRA steps")
    options.add_argument("--steps", type=int, default=400, help="steps of a training run")
    options.add_argument("--tiny", action="store_true", help="tiny models, to try the command")
    options.add_argument(
        "--model", choices=("small", "example"), default="small", help="model to train (default: %(default)s)"
    )
    args = options.parse_args()
    model = "tiny" if args.tiny else args.model
    missing = absent(args.only)
    if missing:
        lacks(
            f"benchmarks.bits: the part memory compares with packages of which {', '.join(missing)} cannot be found: "
            f"pip install 'shardfn[dev]', or leave it out with --only formats convergence"
        )
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    if "formats" in args.only:
        rows, goals = formats(args.tiny, args.repeats)
        rows += kept(model, args.steps)
    if "memory" in args.only:
        found, ends = qlora(args.tiny, args.rounds)
        rows, goals = [*rows, *found], [*goals, *ends]
    if "convergence" in args.only:
        found, ends = convergence(model, args.steps)
        rows, goals = [*rows, *found], [*goals, *ends]
    publish("few bits", rows, goals, args.json)


if __name__ == "__main__":
    main()
