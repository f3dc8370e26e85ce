"""Fingerprints of parameters and losses, compared before a call reads or continues a folder."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shardfn.checkpoint import CheckpointError
from shardfn.curvature.labels import SampledLabels, batch_functions
from shardfn.curvature.operators import each_of
from shardfn.curvature.per_example import Losses, batch_of, checked_batch, examples
from shardfn.curvature.row_axes import row_place
from shardfn.curvature.row_moments import max_over_ranks, over_all
from shardfn.curvature.vectors import Space, draws_restored
from shardfn.local_paths import local_path

KEYS = ("values", "norm", "rows", "losses", "sizes", "gradients", "rounding")


def begun(folder: str | os.PathLike[str] | None) -> bool:
    """Whether a path exists and is not an empty folder."""
    path = None if folder is None else local_path(folder, "folder")
    return path is not None and path.exists() and not (path.is_dir() and not any(path.iterdir()))


def made_of(
    space: Space, name: str, losses: Losses | SampledLabels | None = None, batches: Iterable[Any] | None = None
) -> dict[str, float]:
    """Returns a fingerprint of parameters and of the first batch's losses, on any mesh.

    Entries about losses are 0 without batches. Losses that draw random numbers draw the same ones each time, though not
    on another mesh.
    """
    values, norm = space.probe()
    fingerprint = dict.fromkeys(KEYS, 0.0) | {"values": values, "norm": norm}
    if losses is None or batches is None:
        return fingerprint
    params, batch = space.params, next(each_of(batches, name, *batch_functions(losses)))
    with draws_restored(space.local_params):
        torch.manual_seed(0)
        arguments, _ = checked_batch(params, lambda: _first_batch(losses, params, batch), name)
        rows = examples(losses.losses if isinstance(losses, SampledLabels) else losses, params, arguments, name)
    row_losses, squares = rows.values.double(), rows.norms.double().square()
    count = row_losses.new_tensor(float(len(row_losses)))
    local = torch.stack([count, row_losses.sum(), row_losses.abs().sum(), squares.sum()])
    if isinstance(losses, SampledLabels):  # other ranks have other draws
        rank, _ = row_place(params)
        place = local.new_tensor([-float(rank) if len(row_losses) else -math.inf])
        local *= float(max_over_ranks(params, place)) == float(place)
    eps = torch.finfo(rows.values.dtype).eps
    totals = dict(zip(KEYS[2:6], over_all(params, local).tolist(), strict=True))
    return fingerprint | totals | {"rounding": max(space.rounding, 8 * eps)}


def _first_batch(losses: Losses | SampledLabels, params: Any, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the first batch; for sampled labels its first row, which any mesh labels the same."""
    if not isinstance(losses, SampledLabels):
        return batch
    return losses.labeled(params, batch_of(batch).having(lambda x: x[:1]), 0)


def compare_fingerprints(stored: Mapping[str, float], current: Mapping[str, float], subject: str) -> None:
    """Raises CheckpointError if the fingerprint of a folder is not that of this call.

    Losses are compared if both fingerprints have a first batch.
    """
    fix = "Pass another folder, or remove this one"
    if not abs(stored["values"] - current["values"]) <= 1e-9 * max(stored["norm"], current["norm"]):
        raise CheckpointError(
            f"{subject} is of different values of the parameters: their sum with certain signs is "
            f"{stored['values']:.10g}, not {current['values']:.10g}. {fix}"
        )
    if not stored["rounding"] or not current["rounding"]:
        return
    if stored["rows"] != current["rows"]:
        raise CheckpointError(
            f"{subject} is of another first batch, of {stored['rows']:.0f} rows on all ranks together, not "
            f"{current['rows']:.0f}. {fix}, or cut the batch so that ranks have the same rows together"
        )
    rounding = max(stored["rounding"], current["rounding"])
    sizes = max(stored["sizes"], current["sizes"])
    losses_match = abs(stored["losses"] - current["losses"]) <= min(1e3 * rounding, 0.02) * sizes
    scale = max(stored["gradients"], current["gradients"])
    if not losses_match or not abs(stored["gradients"] - current["gradients"]) <= min(4 * rounding**0.5, 0.1) * scale:
        raise CheckpointError(
            f"{subject} is of other losses, or of another first batch, whose losses sum up to {stored['losses']:.6g}, "
            f"not {current['losses']:.6g}, and the squares of the norms of their gradients to "
            f"{stored['gradients']:.6g}, not {current['gradients']:.6g}. {fix}"
        )
