"""Operations that only move memory: bytes per second, beside a copy on the same device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import shardfn.optim as so
from benchmarks.gpu_setting import Answer, Where
from benchmarks.report import interleaved
from shardfn import quant
from shardfn.quant import fused

REPEATS, INNER = 5, 10
PIECES = 64  # gradients of a stage


class Case(NamedTuple):
    """An operation.

    Attributes:
        run: performs it.
        rate: bytes per element that it cannot avoid reading or writing.
        least: its goal, as a fraction of a copy's bytes per second; 0: none.
    """

    run: Callable[[], Any]
    rate: float
    least: float


def kernels(where: Where) -> Answer:
    numel, answer = 2**16 if where.tiny else 2**28, Answer()
    found = cases(numel, where.device)
    runs = {name: timed(case.run, where) for name, case in found.items()}
    seconds = interleaved(runs, repeats=REPEATS, inner=1)
    speed = {name: case.rate * numel * INNER / seconds[name] / 1e9 for name, case in found.items()}
    for name, case in found.items():
        share = speed[name] / speed["copy"]
        answer.rows.append({"operation": name, "bytes an element": case.rate, "GB/s": speed[name], "/ a copy's": share})
        if case.least:
            answer.goal(f"{name}: GB/s / a copy's", share, case.least, "at least")
    return answer


def cases(numel: int, device: str) -> dict[str, Case]:
    def normal(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(numel // 256, 256, device=device, dtype=dtype)

    x, y = normal(), normal()
    int8, nf4 = quant.int8(), quant.nf4()
    eight, four = int8.encode(x.view(-1)), nf4.encode(x.view(-1))
    grads, flat = list(normal(torch.bfloat16).view(PIECES, -1).unbind()), torch.empty(numel, device=device)
    views = list(flat.view(PIECES, -1).unbind())
    clip = so.clip_by_global_norm(1.0)
    clipped, norms = {"w": normal()}, clip.init({"w": x})

    def decode(format: quant.Format, packed: Tensor) -> Callable[[], Any]:
        return lambda: format.decode(packed, numel, torch.bfloat16)

    few_bits = {
        "8-bit AdamW": Case(stepping(so.adamw8bit(1e-5), normal(), normal()), 16, 0.3),
        "int8 blocks, encode": Case(lambda: int8.encode(x.view(-1)), 4 + int8.rate, 0.3),
        "int8 blocks, decode": Case(decode(int8, eight), 2 + int8.rate, 0.3),
        "nf4, decode": Case(decode(nf4, four), 2 + nf4.rate, 0.3),
    }
    twins = {f"{name}, eager twin": Case(eagerly(case.run), case.rate, 0) for name, case in few_bits.items()}
    return (
        few_bits
        | twins
        | {
            "copy": Case(lambda: y.copy_(x), 8, 0),
            "AdamW": Case(stepping(so.adamw(1e-5), normal(), normal()), 28, 0.8),
            "SGD, rounding at random": Case(
                stepping(so.stochastic_rounding(so.sgd(1e-5)), normal(torch.bfloat16), normal(torch.bfloat16)), 6, 0.1
            ),
            "clipping": Case(lambda: clip.update({"w": x}, clipped, norms), 12, 0.8),
            "gradients, copied in": Case(lambda: torch._foreach_copy_(views, grads), 6, 0.8),
        }
    )


def eagerly(run: Callable[[], Any]) -> Callable[[], Any]:
    """The same without kernels of shardfn's own, which other devices than CUDA's do not have anyway."""

    def without() -> None:
        kinds, fused.KINDS = fused.KINDS, ()
        try:
            run()
        finally:
            fused.KINDS = kinds

    return without


def stepping(optimizer: so.Optimizer, param: Tensor, grad: Tensor) -> Callable[[], Any]:
    params, grads = {"w": param}, {"w": grad}
    state = optimizer.init(params)

    def step() -> None:
        nonlocal params, state
        params, state = optimizer.step(params, grads, state)

    return step


def timed(run: Callable[[], Any], where: Where) -> Callable[[], None]:
    """Runs it several times, until the device has finished."""

    def several() -> None:
        for _ in range(INNER):
            run()
        if where.cuda:
            torch.cuda.synchronize()

    several()
    return several
