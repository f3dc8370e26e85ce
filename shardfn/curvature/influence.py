"""Influence of training rows on what a model does: products of their gradients with a preconditioned gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.curvature.operators import check_batches, count_of, each_of, must_take
from shardfn.curvature.per_example import Batch, Losses, checked
from shardfn.curvature.row_axes import cuts, same_along
from shardfn.curvature.vectors import Space
from shardfn.optim.hyperparameters import kind
from shardfn.transforms.autodiff import name_of
from shardfn.transforms.jvp import jvp


def influence(
    inverse: Callable[[Any], Any], queries: Sequence[Any], losses: Losses, params: Any, batches: Iterable[Any]
) -> Tensor:
    r"""Scores :math:`q^\top (F + \lambda)^{-1} g_n` of this rank's training rows for queries.

    To first order, giving row n a weight of :math:`\epsilon` more in the training objective, a mean over rows, changes
    what q is the gradient of by :math:`-\epsilon` times the score. Rows of all ranks are scored at once, a batch after
    another; each query takes one forward pass over the batches, and one solution.

    Args:
        inverse: `q -> (F + damping)^-1 q`: ``lambda q: F.solve(q, 1e-3)`` with F by `ekfac`; ``lambda q: solve(H, q,
            damping=1e-3).x`` with any operator; ``lambda q: q`` for the products of the gradients themselves.
        queries: gradients, trees like that of the parameters, such as ``grad(measure)(params)``.
        losses: of training rows, as for `per_example`.
        params: as for `per_example`.
        batches: this rank's training batches, as for `hvp`. They are read once.

    Returns:
        `[queries, rows]`, float32 or wider: of this rank's rows, batch after batch.

    Raises:
        TypeError, ValueError, RuntimeError: as `per_example` and `hvp`; a query that is no such tree.

    Sources: Koh and Liang, Understanding black-box predictions via influence functions (2017); Grosse et al., Studying
        large language model generalization with influence functions (2023).

    Example:
        ``scores = influence(lambda q: F.solve(q, 1e-3), [grad(measure)(params)], losses, params, batches)``
    """
    name = f"influence of {name_of(losses)}"
    space = Space(params, name)
    check_batches(batches, params, name)
    cut = cuts(params, name)
    count_of(queries, space, name)
    if not callable(inverse):
        raise TypeError(
            f"{name}: the first argument is a function q -> (F + damping)^-1 q, and this is {kind(inverse)}: pass "
            f"lambda q: F.solve(q, 1e-3), say"
        )
    must_take(inverse, [None], name, "a query", "Pass a function of a query alone: lambda q: F.solve(q, 1e-3), say")
    values = [x.detach() for x in space.variables.values]
    directions = []
    for query in queries:
        space.read(query, "a query", ". Queries are a list of such trees: [q] for one")
        solved = space.read(
            inverse(query), "a solution", ". The first argument returns one, as F.solve or solve(...).x is"
        )
        directions.append(space.tangents(solved))
    found = []
    for batch in each_of(batches, name, losses):
        rows = checked(params, functools.partial(tuple, batch), name)[1]
        same_along(cut, params, rows.leaves, name)

        def of(values: Any, rows: Batch = rows) -> Tensor:
            return rows.of(losses, space.variables.tree(values), name)

        each = [jvp(of, (values,), (direction,))[1] for direction in directions]
        found.append(torch.stack(each) if each else torch.zeros((0, rows.rows), device=rows.device))
    return torch.cat(found, 1)
