"""The record of a call: a node for each value, and an event for each use of one."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from shardfn.check.callsites import Site

Mask = int
"""A set, with a bit for each member: of the mesh axes with several ranks, or of variables."""

Effect = Literal["union", "plus", "minus", "exactly"]
Root = Literal["", "input", "parameter", "closure", "random", "constant", "statistics"]


@dataclass(slots=True)
class Node:
    """A value.

    Attributes:
        op: the op that made it.
        parents: the nodes that it was made from.
        site: the line that made it.
        effect: the axes along which it varies: `"union"`: those of its parents; `"plus"`: those and `axes`; `"minus"`:
            those without `axes`; `"exactly"`: `axes`.
        root: kind of a value that begins here; empty if it is made from others.
        backward: whether a backward pass made it.
        records: whether autograd differentiates it with respect to its parents.
        variable: the bit of an input or parameter that may be differentiated; 0 for other values.
        like: shape and dtype.
        count: the number of elements that each of its own is the mean of; 0 if it is no mean.
        rows: for a sum, the number of elements in the first of the summed dimensions, in the first two, and so on.
        by_row: whether it was reduced along dimensions other than the first.
        number: the Python number by which it was divided.
        own: whether a line of the user's made it.
        about: details for a message.
    """

    op: str
    parents: tuple[int, ...]
    site: Site | None
    effect: Effect = "union"
    axes: Mask = 0
    root: Root = ""
    backward: bool = False
    records: bool = False
    variable: Mask = 0
    like: tuple[tuple[int, ...], torch.dtype] | None = None
    count: int = 0
    rows: tuple[int, ...] = ()
    by_row: bool = False
    number: float | None = None
    own: bool = False
    about: str = ""


class Variable(NamedTuple):
    """An input or parameter.

    Attributes:
        path: as Python: `params['w']`.
        same: the axes along which it is declared to be the same.
        node: its node.
    """

    path: str
    same: Mask
    node: int


class CollectiveCall(NamedTuple):
    """A collective that the function calls, before it runs.

    Attributes:
        number: its argument, if that is a Python number.
        own: whether a line of the user's calls it, rather than this package.
        backward: whether the user's own backward pass calls it.
        pieces: the axes that shard its argument if that is a flat shard.
    """

    name: str
    axes: Mask
    node: int
    site: Site | None
    number: float | None
    axis_name: Any
    own: bool
    backward: bool
    pieces: Mask = 0


class Gradient(NamedTuple):
    """The gradients that `value_and_grad` returns.

    Attributes:
        loss: node of what was differentiated.
        begin, end: the range of nodes in which backward ran.
        pairs: node of each variable, and node of its gradient.
        site: the line that asked for them.
        inner: whether the gradient is itself differentiated.
        pushed: whether it has tangents, as in `shardfn.jvp`, where the loss's operations run inside of torch.func.
    """

    loss: int
    begin: int
    end: int
    pairs: list[tuple[int, int]]
    site: Site | None
    inner: bool = False
    pushed: bool = False


class Summed(NamedTuple):
    """A stage sums gradients of its parameters over ranks."""

    at: int
    axes: Mask


class PartialGradient(NamedTuple):
    """A stage's gradient of one parameter before it is summed along `allowed`, the axes that shard or repeat it."""

    variable: int
    node: int
    allowed: Mask


class Used(NamedTuple):
    """A parameter and its gradient in an optimizer's step; `cut`: the axes that shard a flat shard, else None."""

    parameter: int
    gradient: int
    site: Site | None
    cut: Mask | None = None


class Output(NamedTuple):
    """A result of the function.

    Attributes:
        path: as Python: `result[0]`.
        node: its node.
        allowed: the axes along which it may vary; None if nothing is declared.
        outer: whether an outer caller may differentiate it.
    """

    path: str
    node: int
    allowed: Mask | None
    outer: bool = False


class Claimed(NamedTuple):
    """An argument or a result of a function that is mapped inside the checked one.

    Attributes:
        function: the inner function's name, for messages.
        side: `"in_specs"` or `"out_specs"`.
        path: of the argument or result.
        node: its value.
        allowed: the axes that its spec names.
        site: the user's line.
    """

    function: str
    side: str
    path: str
    node: int
    allowed: Mask
    site: Site | None


class Ordered(NamedTuple):
    """Positions of a sequence that is sharded over some axes, in a balanced order or not.

    Attributes:
        name: of the function: `"positions"` returned them, attention masks by them.
        axes: that cut the sequence.
        balanced: the order.
        at: how many nodes there were.
        site: the user's line.
    """

    name: str
    axes: Mask
    balanced: bool
    at: int
    site: Site | None


class Counted(NamedTuple):
    """A total that `accumulate` divides by a count: the node of a tensor, or a number and -1."""

    total: int
    by: int
    number: float | None


Event = CollectiveCall | Gradient | Summed | PartialGradient | Used | Output | Claimed | Ordered | Counted


@dataclass
class Trace:
    """A recorded call.

    Attributes:
        name: the name of the call, for messages.
        axes: name -> size of the axes with several ranks.
        nodes: the nodes in the order of their creation.
        variables: the variables by position of their bit.
        events: the events in order.
        outer: whether an outer caller differentiates.
        closed: whether a tensor that is closed over has a gradient.
        unfollowed: whether autograd has a derivative that the record has not, as of a custom Function.
        prefix: whether some rank's record ends before the function does.
        flat: the nodes of flat shards that were passed, and the axes that shard them.
        cut: the nodes of parameters, as stages receive them, and the axes along which ranks have other elements.
    """

    name: str
    axes: dict[str, int]
    nodes: list[Node] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    outer: bool = False
    closed: bool = False
    unfollowed: bool = False
    prefix: bool = False
    flat: dict[int, Mask] = field(default_factory=dict)
    cut: dict[int, Mask] = field(default_factory=dict)

    @property
    def everywhere(self) -> Mask:
        """The set of all axes."""
        return (1 << len(self.axes)) - 1

    def gradients(self) -> list[Gradient]:
        """Returns the gradients that the function asked for."""
        return [event for event in self.events if isinstance(event, Gradient)]

    def mask(self, names: Any) -> Mask:
        """Returns the set of these axes, without those of size 1."""
        order = list(self.axes)
        return sum(1 << order.index(name) for name in set(names) if name in self.axes)

    def names(self, axes: Mask) -> tuple[str, ...]:
        """Returns the names of the axes in a set."""
        return tuple(name for i, name in enumerate(self.axes) if axes >> i & 1)


def union(masks: Iterable[Mask]) -> Mask:
    """Returns the union of these sets."""
    return functools.reduce(operator.or_, masks, 0)


def reached(starts: Iterable[int], neighbors: Callable[[int], Iterable[int]]) -> Iterator[int]:
    """Yields the start nodes and all nodes reached from them by `neighbors`, each once."""
    pending = list(starts)
    visited = set(pending)
    while pending:
        node_id = pending.pop()
        yield node_id
        new = [other for other in dict.fromkeys(neighbors(node_id)) if other not in visited]
        visited.update(new)
        pending += new


JOINING = ("psum", "all_gather_invariant")
"""Collectives that make one value for all ranks, with a derivative on each."""
Given = dict[tuple[str, int, Site | None], int]


def given_by(trace: Trace) -> Given:
    """Returns the first result of each such collective, by its name, the node of its argument, and its line."""
    results: Given = {}
    for node_id, node in enumerate(trace.nodes):
        if node.op in JOINING and len(node.parents) == 1:
            results.setdefault((node.op, node.parents[0], node.site), node_id)
    return results
