"""Records ops: their inputs, results and writes, known from their schemas before they run."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shardfn.check import callsites
from shardfn.check.bits import digest_of, ordinary
from shardfn.check.callsites import quietly
from shardfn.check.trace import Node, Root
from shardfn.check.values import UNKNOWN, Values, like_of
from shardfn.compat import autograd
from shardfn.compat.dispatch import tensors_in

MEAN, SUM = 1, 2  # torch's numbers for a loss's `reduction` argument


def op(values: Values, func: Any, facts: Facts, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an op and records what it did."""
    if facts.kind == "each":
        return _foreach_op(values, func, facts, args, kwargs)
    written = [
        args[k] if isinstance(k, int) else kwargs[k]
        for k in facts.writes
        if k in kwargs or (isinstance(k, int) and k < len(args))
    ]
    replaced = written if facts.kind in ("copy", "empty") else [kwargs.get(k) for k in facts.out]
    inputs = [
        x
        for x in tensors_in(args, kwargs)
        if (not ordinary(x) or x.numel()) and not any(x is y for y in tensors_in(replaced))
    ]
    parents = () if facts.kind == "like" else tuple(dict.fromkeys(map(values.node_of, inputs)))
    if parents and torch.is_grad_enabled() and not values.trace.unfollowed:
        values.trace.unfollowed = any(x.requires_grad and not values.follows(x) for x in inputs)
    stream = _generator_state([*args, *kwargs.values()], inputs[0].device) if facts.distributed and inputs else None
    for x in inputs if stream is not None else ():
        values.note(values.watched, values.node_of(x), values.site(), facts.digest + 2, x)
    out = func(*args, **kwargs)
    results = tensors_in(out)
    if not results and not written:
        if facts.base == "_local_scalar_dense":
            values.add(Node("item", parents, values.site()))
        return out
    if facts.base == "set_" and not inputs:  # set to a storage, whose state the memory records
        return out
    if facts.kind == "empty":
        for x in results:
            values.keep(x, UNKNOWN)
        return out
    first = results[0] if results else next(iter(tensors_in(written)), None)
    if first is None:
        return out
    node = _add_op_node(values, facts, parents, args, kwargs, inputs, results or [first])
    if stream is not None:
        values.note(values.watched, node, values.site(), facts.digest + 3, stream)
    random = facts.random and (facts.chance is None or bool([*args, 0.0][min(facts.chance, len(args))]))
    if random and facts.drawn is not None:
        node, random = _by_seed(values, node, facts, results[facts.drawn]), False
    into = tensors_in(written)
    for x in into:
        values.keep(x, node, written=True, full=bool(replaced))
    for x in results:
        if not any(x is y for y in into):
            values.keep(x, _add_random_node(values, facts, x, node) if random else values.view_of(x, node))
    if random:
        for x in into:
            values.keep(x, _add_random_node(values, facts, x, node), written=True, full=bool(replaced))
    return out


def _add_op_node(
    values: Values,
    facts: Facts,
    parents: tuple[int, ...],
    args: Any,
    kwargs: Any,
    inputs: list[Tensor],
    results: list[Tensor],
) -> int:
    first = results[0]
    root: Root = "" if parents else "constant"
    numbers, caller = _python_numbers(args, kwargs, facts.sizes), callsites.caller()
    dims = _dims(facts, args, inputs)
    node = Node(
        facts.base, parents, values.site(), root=root, backward=autograd.inside_backward(),
        records=not (facts.detaches and not callsites.stands_in())
        and torch.is_grad_enabled() and differentiable(first),
        like=like_of(first), own=caller == "user", by_row=bool(dims) and 0 not in dims,
    )  # fmt: skip
    if facts.base == "mean" and inputs and not node.by_row:
        node.count = max(inputs[0].numel() // max(first.numel(), 1), 1)
    elif facts.base in ("sum", "dot") and inputs and not node.by_row:
        node.rows = _row_counts(dims, inputs[0])
    elif facts.reduction is not None:
        reduction = args[facts.reduction] if facts.reduction < len(args) else MEAN
        node.count = args[0].numel() if reduction == MEAN else 0
        node.rows = _row_counts([], args[1 if facts.base.startswith("nll_loss") else 0]) if reduction == SUM else ()
    elif facts.statistics and _trains(facts, args, kwargs) and not callsites.called_by("instance_norm"):
        node.root = "statistics"
    node.number = _divisor(facts.base, args)
    node_id = values.add(node)
    # The library's own numbers may rightly differ, and backward repeats those of forward.
    if numbers and caller == "user" and not node.backward:
        values.note(values.evidence, node_id, node.site, facts.digest, hash(numbers))
    count: Any = None
    if facts.base.startswith("nll_loss") and facts.base.endswith("forward") and node.count:
        count = results[1]  # its weight
    elif node.count and (facts.base == "mean" or facts.reduction is not None):
        count = node.count
    elif facts.base in ("div", "div_") and len(inputs) == 2 and inputs[1].numel() == 1:
        count = inputs[1]
    elif node.number is not None:
        count = hash(node.number)
    if count is not None:
        values.note(values.counts, node_id, node.site, facts.digest + 1, count)
    return node_id


def _generator_state(arguments: list[Any], device: torch.device) -> Tensor:
    """Returns the state of the generator that an op on a device is about to draw from."""
    with quietly():
        for argument in arguments:
            if isinstance(argument, torch.Generator):
                return argument.get_state()
        if device.type == "cpu":
            return torch.get_rng_state()
        return torch.get_device_module(device).get_rng_state(device)


def communicated(values: Values, func: Any, args: Any, kwargs: Any) -> Any:
    """Runs one of torch's own collectives, whose result is known only by its bits."""
    out = func(*args, **kwargs)
    changed = tensors_in(args, kwargs) if str(func).split(".")[1].endswith("_") else []
    for x in (*changed, *tensors_in(out)):
        values.filled(x)
    return out


def _add_random_node(values: Values, facts: Facts, x: Tensor, parent: int) -> int:
    """Adds a node for random numbers, which ranks compare."""
    op_node = values.trace.nodes[parent]
    node_id = values.add(
        Node(facts.base, (parent,), op_node.site, root="random", backward=op_node.backward, records=op_node.records,
             like=like_of(x))
    )  # fmt: skip
    values.note(values.evidence, node_id, op_node.site, facts.digest, x)
    return node_id


def _by_seed(values: Values, node: int, facts: Facts, seed: Tensor) -> int:
    """Adds nodes for a seed that an op drew, which ranks compare, and for the op's result."""
    source = values.trace.nodes[node]
    seed_id = values.add(Node(facts.base, (), source.site, root="random", backward=source.backward, like=like_of(seed)))
    values.note(values.evidence, seed_id, source.site, facts.digest, seed)
    return values.add(
        Node(
            facts.base, (node, seed_id), source.site, backward=source.backward, records=source.records, like=source.like
        )
    )


def _foreach_op(values: Values, func: Any, facts: Facts, args: Any, kwargs: Any) -> Any:
    """Runs an op on lists and records it item by item."""
    sequences = [(k, v) for k, v in (*enumerate(args), *kwargs.items()) if isinstance(v, (list, tuple)) and v]
    lists = [(k, v) for k, v in sequences if isinstance(v[0], Tensor)]
    if not lists:
        return func(*args, **kwargs)
    shared = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    copies = facts.base in ("_foreach_copy_", "_foreach_zero_")
    length = len(lists[0][1])
    shared_nodes = tuple(map(values.node_of, shared))
    parents = []
    for i in range(length):
        read = [v[i] for k, v in lists if len(v) == length and not (copies and k in facts.writes)]
        parents.append(tuple(dict.fromkeys((*map(values.node_of, read), *shared_nodes))))
    out = func(*args, **kwargs)
    numbers = _python_numbers(args, kwargs, frozenset())
    for i in range(length):
        template = lists[0][1][i]
        node_id = values.add(
            Node(facts.base, parents[i], values.site(), root="" if parents[i] else "constant",
                 backward=autograd.inside_backward(),
                 records=torch.is_grad_enabled() and differentiable(template), like=like_of(template),
                 number=_divisor(facts.base.removeprefix("_foreach_"), args), own=callsites.caller() == "user")
        )  # fmt: skip
        if numbers and callsites.caller() == "user" and not values.trace.nodes[node_id].backward:
            values.note(values.evidence, node_id, values.trace.nodes[node_id].site, facts.digest, hash(numbers))
        for k, v in lists:
            if k in facts.writes and i < len(v):
                values.keep(v[i], node_id, written=True, full=copies)
        if isinstance(out, (list, tuple)) and i < len(out) and isinstance(out[i], Tensor):
            values.keep(out[i], node_id)
    for k, x in (*enumerate(args), *kwargs.items()):
        if k in facts.writes and isinstance(x, Tensor):  # one result for all items, such as whether any is infinite
            combined_id = values.add(Node(facts.base, tuple(dict.fromkeys(sum(parents, ()))), values.site()))
            values.keep(x, combined_id, written=True)
    return out


def _python_numbers(args: Any, kwargs: Any, sizes: frozenset[int | str]) -> tuple[Any, ...]:
    """Returns the Python numbers among an op's arguments, except for shapes."""
    numbers: list[Any] = []
    for k, v in (*enumerate(args), *kwargs.items()):
        if k in sizes or isinstance(v, Tensor):
            continue
        for item in v if isinstance(v, (list, tuple)) else (v,):
            if isinstance(item, float) and math.isnan(item):
                numbers.append(3)  # in place of nan, whose hash differs between ranks
            elif isinstance(item, (int, float, complex)):
                numbers += [item, item + item]  # the double, too, since -1 and -2 have equal hashes
    return tuple(numbers)


def differentiable(x: Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return x.is_floating_point() or x.is_complex()


def _divisor(base: str, args: Any) -> float | None:
    """Returns the Python number that an op divides by, or whose inverse it multiplies by."""
    number = args[1] if len(args) > 1 and isinstance(args[1], (int, float)) else 0
    if base not in ("div", "div_", "mul", "mul_") or not number or not math.isfinite(number):
        return None
    if base.startswith("div"):
        return float(number)
    inverse = 1 / number
    if not math.isfinite(inverse):
        return None
    nearest = round(inverse)
    return float(nearest) if math.isclose(inverse, nearest, rel_tol=1e-12) else inverse


def _row_counts(dims: list[int], x: Tensor) -> tuple[int, ...]:
    """Returns the numbers of elements in the first summed dimension, in the first two, and so on."""
    shape = [n for d, n in enumerate(x.shape) if not dims or d in dims]
    return tuple(itertools.accumulate(shape, operator.mul)) if x.numel() > 1 else ()


def _dims(facts: Facts, args: Any, inputs: list[Tensor]) -> list[int]:
    """Returns the dimensions along which an op reduces; empty if along all."""
    if facts.dims is None:
        return []
    position, default = facts.dims
    dims = args[position] if position < len(args) else default
    numbers = [dims] if isinstance(dims, int) else dims if isinstance(dims, (list, tuple)) else []
    return [d % max(inputs[0].ndim, 1) for d in numbers if isinstance(d, int)] if inputs else []


def _trains(facts: Facts, args: Any, kwargs: Any) -> bool:
    if "legit" in facts.base or facts.base in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"):
        return any(v is True for v in args[3:])
    return "with_update" in facts.base or any(v is True for v in args)


Kind = Literal["made", "like", "empty", "copy", "each", "plain"]

_KINDS: dict[Kind, str] = {
    "empty": "empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_",
    "like": "zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full",
    "copy": "copy_ fill_ zero_ normal_ uniform_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_ random_ set_",
}
_DETACH = ("detach", "detach_", "_local_scalar_dense", "argmax", "argmin")
_SIZES = ("size", "sizes", "input_sizes", "self_sizes", "normalized_shape", "stride", "output_size", "implicit")
_STATISTICS = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm",
               "_batch_norm_with_update", "batch_norm_with_update", "_batch_norm_impl_index")  # fmt: skip
_DRAWN = {"native_dropout": 1, "_scaled_dot_product_flash_attention": 6, "_scaled_dot_product_cudnn_attention": 6,
          "_scaled_dot_product_efficient_attention": 2}  # fmt: skip
DISTRIBUTIONS = ("multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet")


@dataclass(frozen=True)
class Facts:
    """Facts about one op.

    Attributes:
        base: its name as in `aten.mul.Tensor`, without library and overload: `mul`.
        digest: a hash of its name, equal on every rank.
        kind: `"made"`: takes no tensor; `"like"`: uses only a tensor's shape; `"empty"`: leaves its result unset;
            `"copy"`: replaces what it writes to; `"each"`: works item by item on lists; `"plain"`: anything else.
        random: whether it draws random numbers.
        drawn: the index of the result that holds what it drew, or the seed of that; None if all results do.
        distributed: whether it draws each number from its own distribution, given by a tensor.
        chance: position of the probability argument; it draws nothing if that is 0.
        writes: positions and names of the arguments that it writes to.
        out: names of those that it does not read, such as `out=`.
        sizes: positions and names of arguments that are only shapes.
        detaches: whether its result has no derivative.
        reduction: position of a loss's `reduction` argument; None for other ops.
        dims: position and default of the argument with the dimensions that it reduces; None without one.
        statistics: whether it normalizes by batch statistics when it trains.
    """

    base: str
    digest: int
    kind: Kind
    random: bool
    drawn: int | None
    distributed: bool
    chance: int | None
    writes: tuple[int | str, ...]
    out: tuple[str, ...]
    sizes: frozenset[int | str]
    detaches: bool
    reduction: int | None
    dims: tuple[int, Any] | None
    statistics: bool


@functools.cache
def facts_of(op: Any) -> Facts:
    """Returns the facts of an op, read from its schema."""
    schema = getattr(op, "_schema", None)
    name = str(getattr(op, "name", lambda: str(op))()).split("::")[-1] if schema is not None else str(op)
    base = name.split(".")[0]
    arguments = [] if schema is None else schema.arguments
    writes, sizes = [], []
    reduction = chance = dims = None
    for i, argument in enumerate(arguments):
        place = argument.name if argument.kwarg_only else i
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(place)
        if argument.name == "reduction":
            reduction = i
        if argument.name == "dim":
            dims = (i, argument.default_value)
        if argument.name == "dropout_p" or (argument.name == "p" and base == "native_dropout"):
            chance = i
        if argument.name in _SIZES:
            sizes.append(place)
    takes = schema is None or any("Tensor" in str(argument.type) for argument in arguments)
    random = schema is not None and torch.Tag.nondeterministic_seeded in op.tags
    digest = digest_of(name.encode())
    kind: Kind = next((kind for kind, names in _KINDS.items() if base in names.split()), "plain" if takes else "made")
    lists = any("List[Tensor]" in str(argument.type) for argument in arguments)
    if lists and base.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        kind = "each"
    return Facts(
        base, digest, kind, random, _DRAWN.get(base), base in DISTRIBUTIONS, chance, tuple(writes),
        tuple(place for place in writes if isinstance(place, str)), frozenset(() if kind == "made" else sizes),
        base in _DETACH, reduction, dims, base in _STATISTICS,
    )  # fmt: skip
