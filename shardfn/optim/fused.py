"""A step of AdamW on state in 8 bits by one kernel, which is chosen as in `shardfn.quant.fused`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.compat.trusted import trusted
from shardfn.optim.state_dtype import Coded, Opened
from shardfn.quant import codes
from shardfn.quant.fused import DTYPES, difference, fits, tables
from shardfn.shards.blocks import BLOCK, BlockRun, Runs
from shardfn.shards.pieces import units

SLOTS = "mean", "square"
ULPS = 8  # of float32: each of the two ways rounds at most eight times by half of one


class AdamW:
    """The kernel; its eager twin decodes, calls torch's kernel for `in_place`, and encodes.

    It computes in float32, while torch's kernel keeps intermediate results in float64 on CUDA. So parameters may differ
    by 8 units in the last place of float32, before they are rounded to their own dtype: units of the old number, the
    new one, and the step that the two terms of the mean would make together if neither cancelled the other. State
    differs by no more than that, relative to its terms, before it is encoded. Where one is not finite, neither is the
    other; but one may be inf, and the other nan.
    """

    def __init__(self, in_place: Callable[..., None]) -> None:
        self._in_place = in_place

    def takes(self, columns: Sequence[Tensor]) -> bool:
        """Whether it runs on parameters, gradients, and codes and scales of both slots: vectors that match."""
        p, g = columns[:2]
        if p.dtype not in DTYPES or g.dtype not in DTYPES or not fits(*columns):
            return False
        kernel_name = f"shardfn's kernel for 8-bit AdamW of {p.dtype}, gradients {g.dtype}"
        return trusted(kernel_name, p.device, lambda: self._check(p.dtype, g.dtype, p.device))

    def __call__(
        self, columns: Sequence[Tensor], part: Runs, step: int, n: dict[str, Any], ready: bool
    ) -> list[Tensor]:
        """Updates parameters; encodes the state if it is `ready`, and otherwise returns its numbers.

        Args:
            columns: parameters, gradients, codes and scales of the means, codes and scales of the squares.
            part: their blocks.
            step: the number of the step.
            n: the numbers of the rule, and how many of the steps these parameters have missed, if any.
            ready: whether no other rank has a part of the blocks.
        """
        from shardfn.optim import kernels  # imports Triton, which only CUDA devices need

        p, *_ = columns
        out = [] if ready else [p.new_zeros(len(p), dtype=torch.float32) for _ in SLOTS]
        rate, step = n["lr"], step - n.get("missed", 0)
        with torch.accelerator.device_index(p.device.index):
            if isinstance(rate, Tensor) and rate.device.type != "cpu":  # a copy from the CPU would make the host wait
                rate = rate.to(p.device, torch.float32)
            else:
                rate = torch.full((), float(rate), dtype=torch.float32, device=p.device)
            biases = 1 - n["b1"] ** step, math.sqrt(1 - n["b2"] ** step)
            settings = rate, n["b1"], 1 - n["b1"], n["b2"], 1 - n["b2"], *biases, n["eps"], n["weight_decay"]
            numbers = [x if isinstance(x, Tensor) else float(x) for x in settings]
            code_tables = [tables(code, p.device) for code in (codes.dynamic, codes.positive)]
            for run in part:
                element_slice = slice(run.start - part[0].start, run.stop - part[0].start)
                block_slice = slice(run.at - part[0].at, run.at - part[0].at + run.blocks)
                run_columns = [x[block_slice if i in (3, 5) else element_slice] for i, x in enumerate(columns)]
                table_values = [x for table in code_tables for x in (table.numbers, table.bounds)]
                kernels.adamw(run_columns, [x[element_slice] for x in out], table_values, numbers, BLOCK)
        torch.autograd.graph.increment_version([p, *([] if out else columns[2:])])
        return out

    def _check(self, dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device) -> str:
        """Describes a difference from the eager twin, on inputs for which both are exact; empty if none."""
        columns, part = _samples(dtype, grad_dtype, device)
        old, results, expected = columns[0].clone(), [x.clone() for x in columns], [x.clone() for x in columns]
        numbers = {"lr": 0.25, "b1": 0.75, "b2": 0.875, "eps": 2.0**-20, "weight_decay": 0.5}
        self(results, part, 3, numbers, True)
        self._twin(expected, part, 3, numbers)
        mismatch = _far(old, results[0], expected[0])
        for i, slot in enumerate(SLOTS):
            pairs = [Coded().decode(slot, (x[2 + 2 * i], x[3 + 2 * i]), part) for x in (results, expected)]
            finite = pairs[1].isfinite()
            mismatch = mismatch or difference(f"the {slot}", *map(_one_nan, pairs))
            of_codes, scales = ([x[j + 2 * i] for x in (results, expected)] for j in (2, 3))
            mismatch = mismatch or difference(f"the code of the {slot}", *(x[finite] for x in of_codes))
            mismatch = mismatch or difference(f"the scale of the {slot}", *map(_one_nan, scales))
        return mismatch

    def _twin(self, columns: Sequence[Tensor], part: Runs, step: int, numbers: dict[str, Any]) -> None:
        p, g, *stored = columns
        slots = [Coded().decode(slot, (stored[2 * i], stored[2 * i + 1]), part) for i, slot in enumerate(SLOTS)]
        moving = p.float()
        self._in_place([moving], [g.float()], [[x] for x in slots], step, numbers)
        p.copy_(moving)
        (closed,) = Coded().closed(units({"w": p}), SLOTS, [Opened(0, part, slots)], None, collective=False)
        for x, new in zip(stored, (x for pair in closed for x in pair), strict=True):
            x.copy_(new)


def _one_nan(x: Tensor) -> Tensor:
    """The numbers, with nan for any that is not finite: of an infinite gradient, some of torch's kernels make nan."""
    return torch.where(x.isfinite(), x, torch.nan)


def _samples(dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], Runs]:
    """Parameters, gradients and state, as columns, and their blocks: eight whole ones, and a short one.

    Where gradients are not zero, all numbers have so few bits that state is exact, in whatever order it is computed.
    """
    draw = torch.Generator().manual_seed(0)
    n, cpu = 8 * BLOCK + 57, torch.device("cpu")
    part = BlockRun(0, 8 * BLOCK, 0, 8, -1), BlockRun(8 * BLOCK, n, 8, 1, -1)
    p, g = (torch.randint(-64, 65, (n,), generator=draw, device=cpu) / 16 for _ in range(2))
    random = torch.randint(256, (2, n), generator=draw, dtype=torch.uint8, device=cpu)
    short = torch.stack([torch.where(row % 2 == 0, zero, 255) for row, zero in zip(random, (127, 0), strict=True)])
    exact = torch.arange(n, device=cpu) // BLOCK % 2 == 0
    of_codes = torch.where(exact, short, random).to(torch.uint8)
    g[~exact] = 0
    g[0], g[2 * BLOCK], g[4 * BLOCK] = torch.nan, torch.inf, -torch.inf
    scales = torch.tensor([0.5, 0.3, 2.0, 1e-41, 4.0, 0.0, 1.0, 3e-20, 64.0], device=cpu)
    # The short block has means that are small, but would not be if numbers outside of it counted.
    of_codes[0, 8 * BLOCK :] = 127
    columns = p.to(dtype), g.to(grad_dtype), of_codes[0], scales, of_codes[1], scales.clone()
    return [x.to(device) for x in columns], part


def _far(old: Tensor, result: Tensor, reference: Tensor, cancelled: float | Tensor = 0.0) -> str:
    """Describes a parameter that differs from its twin by more than `ULPS` allow; empty if none.

    `cancelled` is the size of steps that terms of the mean would have made, float32.
    """
    before, computed, expected = (x.float() for x in (old, result, reference))
    allowed = ULPS * torch.finfo(torch.float32).eps * (before.abs() + expected.abs() + cancelled)
    if old.dtype != torch.float32:
        limits = torch.finfo(old.dtype)
        allowed += limits.eps * expected.abs().clamp_min(limits.smallest_normal)
    near = torch.where(expected.isfinite(), (computed - expected).abs() <= allowed, computed == expected)
    return difference("the parameter", _one_nan(torch.where(near, reference, result)), _one_nan(reference))
