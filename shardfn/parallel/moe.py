"""Expert parallelism: mixtures of experts sharded over an axis, to which tokens are sent and returned.

A router chooses `k` experts for each token. With a *capacity* each expert takes at most that many tokens of every group
and the rest are dropped, so all sizes are known in advance; without one nothing is dropped, and sizes vary.
The user chooses the groups: as long as no group is cut, the mesh does not change which tokens are dropped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.collectives import ops
from shardfn.collectives.functional import all_to_all, axis_index, axis_size, psum, ragged_all_to_all
from shardfn.compat import functorch
from shardfn.mesh.grid import AxisName, as_names
from shardfn.mesh.planned import notes, planned
from shardfn.parallel.linear import as_indices, check_range, wide_dtype
from shardfn.transforms.custom_vjp import custom_vjp

Expert = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to.

    Attributes:
        experts: indices of the chosen experts, best first: `[g, t, k]` integers.
        weights: weights of their results: `[g, t, k]`.
        logits: logits of all experts: `[g, t, e]`.
    """

    experts: Tensor
    weights: Tensor
    logits: Tensor


optree.register_pytree_node(
    Routing,
    lambda r: ((r.experts, r.weights, r.logits), None, ("experts", "weights", "logits")),
    lambda _, children: Routing(*children),
    path_entry_type=optree.GetAttrEntry,
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)


def route(x: Tensor, gate: Tensor, k: int, *, normalize: bool = True) -> Routing:
    """Chooses the `k` most probable experts for each token: `[g, t, d], [d, e] -> Routing`.

    Args:
        x: groups of tokens.
        gate: the router's matrix.
        k: experts per token, from 1 to `e`.
        normalize: the weights are the probabilities divided by their sum over the `k`; otherwise the probabilities.

    Raises:
        ValueError: `k` is not from 1 to `e`; the shapes do not fit.

    Sources: Shazeer et al., Outrageously Large Neural Networks (2017), section 2.1; Fedus et al., Switch Transformers
    (2021), section 2.1, for `k` of 1, where the router is trained only with `normalize=False`.
    """
    if x.ndim != 3 or gate.ndim != 2 or gate.shape[0] != x.shape[-1]:
        raise ValueError(f"route: x {tuple(x.shape)}, gate {tuple(gate.shape)}; they are [g, t, d] and [d, e]")
    if not 1 <= k <= gate.shape[1]:
        raise ValueError(f"route: k={k}, but there are {gate.shape[1]} experts")
    logits = (x @ gate).to(wide_dtype(x))
    weights, experts = logits.softmax(-1).topk(k)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(experts, weights.to(x.dtype), logits)


def mixture_of_experts(
    expert: Expert,
    params: Any,
    x: Tensor,
    routing: Routing,
    axis: AxisName = (),
    *,
    capacity: int | None = None,
    overflow: Literal["drop", "error"] = "drop",
    axes: AxisName = (),
) -> Tensor:
    """The weighted sum of the results of each token's experts: `[g, t, d] -> [g, t, d]`.

    With a capacity it takes two all-to-alls of `[e, g * capacity, d]`; without, two of the chosen tokens, and one of
    their counts, for which the host waits. A rank may have fewer tokens than others, or none: with a capacity, shorter
    groups, but as many; without, fewer groups too.

    Args:
        expert: `(params, x) -> y`, `[n, d] -> [n, d]`: one expert, on any number of its tokens.
        params: a pytree with this rank's experts, `[e / size, ...]` each.
        x: groups of tokens; with a capacity, equally many groups on all ranks along `axis`.
        routing: the result of `route` for the same tokens.
        axis: the axis that cuts the experts, in order; `()` if a rank has them all.
        capacity: tokens that an expert takes from one group, first choices first, then in order; the others get nothing
            from it. None: no limit.
        overflow: `"drop"`, or `"error"` to raise, on all ranks along `axis` and `axes`, if tokens exceed the capacity.
        axes: further axes along which ranks have different tokens: those that cut the batch.

    Raises:
        IndexError: an index of the routing is that of no expert. On an accelerator it is a RuntimeError at a later
            call, as for `embedding`.
        TypeError: the indices of the routing are not integers.
        ValueError: sizes do not fit; tokens exceed the capacity; it runs inside vmap without a capacity, or inside vmap
            or jvp with `overflow="error"`.

    Sources: Lepikhin et al., GShard (2020), algorithm 1, for groups and capacity; Gale et al., MegaBlocks (2022), for
    dropping none.
    """
    groups, length, width = x.shape
    if routing.experts.shape[:2] != (groups, length):
        raise ValueError(
            f"mixture_of_experts: x {tuple(x.shape)}, but the routing is of {tuple(routing.experts.shape[:2])} tokens"
        )
    count = routing.logits.shape[-1]
    local_sizes = {leaf.shape[0] for leaf in optree.tree_leaves(params)}
    if local_sizes != {count // axis_size(axis)} or count % axis_size(axis):
        raise ValueError(
            f"mixture_of_experts: {count} experts over {axis!r}, of {axis_size(axis)} ranks, but this rank's "
            f"parameters have leading dimensions {sorted(local_sizes)}: cut the experts with a spec, P({axis!r}), and "
            f"make their number divide"
        )
    some = "..." if capacity is None else groups  # which may be shorter on some ranks
    facts = f"x: {x.dtype} [{some}, ..., {width}]", f"experts={count}", f"capacity={capacity}"
    ops.compare_arguments(
        "mixture_of_experts", axis, x, lambda: [*facts, f"overflow={overflow!r}"], "Every rank passes the same"
    )
    routing = _with_indices("mixture_of_experts", routing)
    check_range("mixture_of_experts", "routing.experts", routing.experts, count)
    if capacity is None:
        return _dropless(expert, params, x, routing, axis)
    if overflow not in ("drop", "error"):
        raise ValueError(f'mixture_of_experts: overflow must be "drop" or "error", got {overflow!r}')
    if capacity < 1:
        raise ValueError(
            f"mixture_of_experts: capacity must be 1 or more tokens of a group for each expert, got {capacity}"
        )
    slots, is_kept = _slots(routing, capacity)
    if overflow == "error":
        _refuse(is_kept, capacity, count, tuple(dict.fromkeys((*as_names(axis), *as_names(axes)))))
    full, k = count * capacity, routing.experts.shape[-1]
    slots, number = slots.flatten(1), torch.arange(length * k, device=x.device)
    choices = torch.full((groups, full + 1), length * k, device=x.device)  # an empty slot takes the row of zeros
    choices = choices.index_put((_numbered(slots), slots), number.expand(groups, -1))[:, :full]
    sent = _take_rows(k, True)(x, choices // k, slots)[0]
    sent = sent.view(groups, count, capacity, width).transpose(0, 1).reshape(count, groups * capacity, width)
    received = all_to_all(sent, axis, split_dim=0, concat_dim=1)
    results = torch.func.vmap(expert)(params, received)
    returned = all_to_all(results, axis, split_dim=1, concat_dim=0)
    returned = returned.view(count, groups, capacity, width).transpose(0, 1).reshape(groups, full, width)
    chosen = _take_rows(1, True)(returned, slots, choices)[0]
    return (chosen.view(groups, length, k, width) * routing.weights[..., None]).sum(2)


def num_dropped(routing: Routing, capacity: int) -> Tensor:
    """The number of choices of this rank's tokens that exceed the capacity: 0-d, an integer."""
    return (~_slots(_with_indices("num_dropped", routing), capacity)[1]).sum()


def balance_loss(routing: Routing, axes: AxisName = ()) -> Tensor:
    """The imbalance of experts, from 1 (even) to `e`: 0-d, the same on all ranks along `axes`, `V -> I`.

    `e` times the sum over experts of share of choices times mean probability; the shares have no derivative. Shares and
    means are over the tokens of all ranks, which may have different numbers of them. Without any token it is 0.

    Args:
        routing: the routing of this rank's tokens.
        axes: axes along which ranks have different tokens: those that cut the batch.

    Source: Fedus et al., Switch Transformers (2021), equations 4 to 6.
    """
    count, k = routing.logits.shape[-1], routing.experts.shape[-1]
    logits = routing.logits.to(wide_dtype(routing.logits))  # 16 bits have no room for numbers of tokens
    choices = _hot(_with_indices("balance_loss", routing).experts, count).sum((0, 1, 2)).to(logits.dtype)
    probabilities = logits.softmax(-1).sum((0, 1))
    shares, mean_probabilities = _mean_over_tokens((choices, probabilities), routing, axes).view(2, count)
    return count / k * (shares * mean_probabilities).sum()


def router_loss(routing: Routing, axes: AxisName = ()) -> Tensor:
    """The router's z-loss: the mean of the squared log-sum-exp of its logits, which keeps them small: 0-d, `V -> I`.

    The mean is over the tokens of all ranks, as for `balance_loss`; without any token it is 0.

    Args:
        routing: the routing of this rank's tokens.
        axes: as for `balance_loss`.

    Source: Zoph et al., ST-MoE (2022), equation 5.
    """
    logits = routing.logits.to(wide_dtype(routing.logits))
    return _mean_over_tokens((logits.logsumexp(-1).square().sum()[None],), routing, axes)[0]


def _mean_over_tokens(totals: tuple[Tensor, ...], routing: Routing, axes: AxisName) -> Tensor:
    """The means over the tokens of all ranks, of which `totals` are this rank's sums, one after another: `[n]`."""
    tokens = totals[0].new_full((1,), math.prod(routing.logits.shape[:-1]))
    sums = psum(torch.cat((*totals, tokens)), axes)
    return sums[:-1] / sums[-1].clamp(min=1)


def _with_indices(caller: str, routing: Routing) -> Routing:
    """The routing with indices that torch takes; raises TypeError if they are not integers."""
    return Routing(as_indices(caller, "routing.experts", routing.experts), routing.weights, routing.logits)


def _hot(experts: Tensor, count: int) -> Tensor:
    """One-hot choices, bool: `[..., e]`. torch's `one_hot` reads values, which vmap does not allow."""
    return experts[..., None] == torch.arange(count, device=experts.device)


def _slots(routing: Routing, capacity: int) -> tuple[Tensor, Tensor]:
    """The slot of each choice, `[g, t, k]`: `expert * capacity + place`, or past the end; and whether it is kept."""
    length, k = routing.experts.shape[1:]
    count = routing.logits.shape[-1]
    hot = _hot(routing.experts.transpose(1, 2).flatten(1), count)  # first choices first
    place = (hot.cumsum(1) - 1).where(hot, capacity).amin(-1)  # of no expert, none
    place = place.unflatten(1, (k, length)).transpose(1, 2)
    is_kept = place < capacity
    return (routing.experts * capacity + place).where(is_kept, count * capacity), is_kept


def _refuse(is_kept: Tensor, capacity: int, count: int, axis: AxisName) -> None:
    if functorch.inside_batching_or_forward():
        raise ValueError(
            'mixture_of_experts: overflow="error" reads values, which it cannot do under vmap and jvp: use "drop"'
        )
    excess = int(psum((~is_kept).sum(), axis))
    if planned():
        notes().assume("no token beyond the capacity")
    elif excess:
        raise ValueError(
            f"mixture_of_experts: {excess} choices of tokens are beyond the capacity of {capacity} a group for each of "
            f"{count} experts: raise it (with {is_kept.shape[1]}, the tokens of a group, none is lost), or pass "
            f'overflow="drop" or capacity=None'
        )


def _dropless(expert: Expert, params: Any, x: Tensor, routing: Routing, axis: AxisName) -> Tensor:
    if functorch.batching():
        raise ValueError(
            "mixture_of_experts: without a capacity sizes depend on numbers, which vmap cannot batch: pass capacity="
        )
    size, count, k = axis_size(axis), routing.logits.shape[-1], routing.experts.shape[-1]
    choices = routing.experts.flatten()
    order = choices.argsort(stable=True)  # by expert
    back = order.argsort()
    counts = _hot(choices, count).sum(0).view(size, -1)  # bincount would make the host wait for the largest number
    coming = all_to_all(counts, axis, split_dim=0, concat_dim=0)  # from each rank, for each expert here
    going, lengths = torch.stack((counts, coming)).tolist()
    if planned():
        notes().assume("as many tokens for each expert")
        loads = [len(choices) // count + (i < len(choices) % count) for i in range(count)]
        going = [loads[i : i + count // size] for i in range(0, count, count // size)]
        lengths = [going[axis_index(axis)]] * size
    send, receive = ([sum(row) for row in rows] for rows in (going, lengths))
    rows = _take_rows(k, False)(x.flatten(0, 1)[None], order[None] // k, back[None])[0][0]
    received = ragged_all_to_all(rows, axis, send, receive)
    pieces = received.split([n for row in lengths for n in row])
    num_local = count // size
    results = []
    for number in range(num_local):
        p = optree.tree_map(lambda leaf: leaf[number], params)  # noqa: B023  # called at once
        results.append(expert(p, torch.cat(pieces[number::num_local])))
    split = [y.split([row[number] for row in lengths]) for number, y in enumerate(results)]
    returned = torch.cat([split[number][rank] for rank in range(size) for number in range(num_local)])
    chosen = ragged_all_to_all(returned, axis, receive, send)
    chosen = _take_rows(1, False)(chosen[None], back[None], order[None])[0]
    return (chosen.view(*routing.weights.shape, chosen.shape[-1]) * routing.weights[..., None]).sum(2)


@functools.cache
def _take_rows(k: int, holes: bool) -> custom_vjp:
    """Takes rows of each group: `[g, n, d], [g, m], [g, n * k] -> [g, m, d]`.

    With `holes`, row `n` is zeros. Each row is taken at most `k` times, and the last argument says where each time
    went, `m` if nowhere. So the gradient is a sum of `k` rows, taken likewise: to scatter it would add in the order in
    which threads happen to come.
    """

    def rows_at(x: Tensor, index: Tensor) -> Tensor:
        return (F.pad(x, (0, 0, 0, 1)) if holes else x)[_numbered(index), index]

    def fwd(x: Tensor, index: Tensor, back: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return (rows_at(x, index),), (back,)

    def bwd(residuals: Any, cotangents: Any, needs: Any) -> list[Tensor | None]:
        (back,), (ct,) = residuals, cotangents
        return [None if ct is None else rows_at(ct, back).unflatten(1, (back.shape[1] // k, k)).sum(2), None, None]

    return custom_vjp(lambda x, index, _: (rows_at(x, index),), fwd, bwd)


def _numbered(index: Tensor) -> Tensor:
    """The number of each group, to index with: `[g, 1]`."""
    return torch.arange(len(index), device=index.device)[:, None]
