"""Losses at labels that are sampled from a model, whose gradients make up the Fisher matrix."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributions import Distribution

from shardfn.check.callsites import paused
from shardfn.collectives.functional import axis_index
from shardfn.compat.replacing import replaced
from shardfn.curvature.per_example import batch_of
from shardfn.curvature.row_axes import row_axes
from shardfn.mesh.scope import scope
from shardfn.shards.random import int_seed, mixed
from shardfn.transforms.shortage import RandomNumbers


@dataclass(frozen=True)
class SampledLabels:
    """Losses of rows at labels sampled from the model, in place of losses, for the Fisher matrix.

    A row's loss is its negative log-likelihood, summed over its labels. They depend on the seed, the number of the
    batch, and the rank among those with other rows, so they are the same in each pass, but not on every mesh.

    Args:
        model: `(params, *batch) -> outputs`, as for `fisher`.
        likelihood: `(outputs, *batch) -> torch.distributions.Distribution`, one for each row or each label, with rows
            in dim 0.
        seed: any int.

    Example:
        ``F = ekfac(SampledLabels(model, lambda z, x, y: Categorical(logits=z)), params, batches)``
    """

    model: Callable[..., Any]
    likelihood: Callable[..., Any]
    seed: int = 0

    @property
    def losses(self) -> Callable[..., Tensor]:
        """`(params, labels, *batch) -> [rows]`."""
        model, likelihood = self.model, self.likelihood

        def losses(params: Any, labels: Tensor, *batch: Any) -> Tensor:
            with replaced(Distribution, _validate_args=False):  # which it cannot do row by row
                values: Tensor = -likelihood(model(params, *batch), *batch).log_prob(labels)
            return values.flatten(1).sum(1) if values.ndim > 1 else values

        return losses

    def labeled(self, params: Any, batch: tuple[Any, ...], number: int) -> tuple[Any, ...]:
        """Returns the labels, followed by the batch.

        Raises:
            TypeError: the likelihood is no distribution.
        """
        rows, (mesh, axes) = batch_of(batch, "SampledLabels"), row_axes(params)
        filled = optree.tree_unflatten(rows.tree, rows.filled())
        with torch.no_grad(), scope(mesh) if axes else contextlib.nullcontext(), paused():
            rank = axis_index(axes) if axes else 0
            distribution = self.likelihood(self.model(params, *filled), *filled)
            if not isinstance(distribution, Distribution):
                raise TypeError(
                    f"SampledLabels: the likelihood returned {type(distribution).__name__}. Return a "
                    "torch.distributions object"
                )
            before = RandomNumbers([x for x in batch if isinstance(x, Tensor)])
            torch.manual_seed(mixed(int_seed(self.seed), "labels", number, rank))
            labels = distribution.sample()[: rows.rows]
            before.restore()
        return labels, *batch


def batch_functions(losses: Any) -> tuple[Callable[..., Any], ...]:
    """The functions called with each batch: both of `SampledLabels`, or the losses."""
    return (losses.model, losses.likelihood) if isinstance(losses, SampledLabels) else (losses,)
