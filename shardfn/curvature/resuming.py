"""What a folder was made of: a call that reads one, or goes on from it, compares its parameters and losses with it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shardfn.checkpoint import CheckpointError
from shardfn.curvature.labels import Drawn, called
from shardfn.curvature.operators import each_of
from shardfn.curvature.per_example import Losses, batch_of, checked, examples
from shardfn.curvature.row_axes import row_place
from shardfn.curvature.row_moments import largest, over_all
from shardfn.curvature.vectors import Space, draws_restored
from shardfn.local_paths import local_path

KEYS = ("values", "norm", "rows", "losses", "sizes", "gradients", "rounding")


def begun(folder: str | os.PathLike[str] | None) -> bool:
    """Whether there is something at a path: an empty folder is as good as none."""
    path = None if folder is None else local_path(folder, "folder")
    return path is not None and path.exists() and not (path.is_dir() and not any(path.iterdir()))


def made_of(
    space: Space, name: str, losses: Losses | Drawn | None = None, batches: Iterable[Any] | None = None
) -> dict[str, float]:
    """Numbers that tell other parameters, and with batches other losses of the first one, on any mesh; 0 without.

    Losses that draw random numbers draw the same ones each time, though not on another mesh.
    """
    values, norm = space.probe()
    found = dict.fromkeys(KEYS, 0.0) | {"values": values, "norm": norm}
    if losses is None or batches is None:
        return found
    params, batch = space.params, next(each_of(batches, name, *called(losses)))
    with draws_restored(space.like):
        torch.manual_seed(0)
        given, _ = checked(params, lambda: _given(losses, params, batch), name)
        rows = examples(losses.losses if isinstance(losses, Drawn) else losses, params, given, name)
    each, squares = rows.values.double(), rows.norms.double().square()
    own = torch.stack([each.new_tensor(float(len(each))), each.sum(), each.abs().sum(), squares.sum()])
    if isinstance(losses, Drawn):  # other ranks have other draws
        number, _ = row_place(params)
        place = own.new_tensor([-float(number) if len(each) else -math.inf])
        own *= float(largest(params, place)) == float(place)
    eps = torch.finfo(rows.values.dtype).eps
    totals = dict(zip(KEYS[2:6], over_all(params, own).tolist(), strict=True))
    return found | totals | {"rounding": max(space.rounding, 8 * eps)}


def _given(losses: Losses | Drawn, params: Any, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """The first batch; of labels that are drawn only the first row, which has the same ones on any mesh."""
    if not isinstance(losses, Drawn):
        return batch
    return losses.labelled(params, batch_of(batch).having(lambda x: x[:1]), 0)


def compare(found: Mapping[str, float], told: Mapping[str, float], where: str) -> None:
    """Raises CheckpointError if what a folder was made of is not what a call is told.

    Losses are compared if both have a first batch.
    """
    fix = "Pass another folder, or remove this one"
    if not abs(found["values"] - told["values"]) <= 1e-9 * max(found["norm"], told["norm"]):
        raise CheckpointError(
            f"{where} is of other values of the parameters: their sum with certain signs is {found['values']:.10g}, "
            f"not {told['values']:.10g}. {fix}"
        )
    if not found["rounding"] or not told["rounding"]:
        return
    if found["rows"] != told["rows"]:
        raise CheckpointError(
            f"{where} is of another first batch, of {found['rows']:.0f} rows on all ranks together, not "
            f"{told['rows']:.0f}. {fix}, or cut the batch so that ranks have the same rows together"
        )
    rounding = max(found["rounding"], told["rounding"])
    near = abs(found["losses"] - told["losses"]) <= min(1e3 * rounding, 0.02) * max(found["sizes"], told["sizes"])
    most = max(found["gradients"], told["gradients"])
    if not near or not abs(found["gradients"] - told["gradients"]) <= min(4 * rounding**0.5, 0.1) * most:
        raise CheckpointError(
            f"{where} is of other losses, or of another first batch, whose losses sum up to {found['losses']:.6g}, not "
            f"{told['losses']:.6g}, and the squares of the norms of their gradients to {found['gradients']:.6g}, not "
            f"{told['gradients']:.6g}. {fix}"
        )
