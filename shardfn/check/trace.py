"""What the recorder takes down: a node for each value, an event for each thing that is asked of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from shardfn.check.callsites import Site

Mask = int
"""A set of the mesh's axes along which there are several ranks, or of variables: one bit for each."""

Effect = Literal["union", "plus", "minus", "exactly"]
Root = Literal["", "input", "parameter", "closure", "random", "constant", "statistics"]


@dataclass(slots=True)
class Node:
    """A value.

    Attributes:
        op: what made it.
        parents: the values that it was made of.
        site: where.
        effect: what it varies along: what its parents do; that and `axes`; that without `axes`; or `axes`.
        root: where values begin that have no parents here.
        backward: whether a backward pass made it.
        records: whether it is differentiated with respect to its parents.
        variable: the bit of an input or parameter that somebody may differentiate; 0 for another value.
        like: shape and dtype.
        count: how many elements each of its own is the mean of.
        rows: of a sum over rows, how many these are, how many elements in the first two dimensions, and so on.
        by_row: whether it was made along other dimensions than the first.
        number: the Python number by which it was divided.
        own: whether a line of the user's did it.
        about: more, for a message.
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
        path: as Python, `params['w']`.
        same: along which axes it is declared to be the same.
        node: its own.
    """

    path: str
    same: Mask
    node: int


class Call(NamedTuple):
    """A collective that the function called, before it runs.

    Attributes:
        own: whether a line of the user's called it, and not one of this package.
        backward: whether a backward pass of the user's own did.
        pieces: the axes that cut the flat shard it is given.
    """

    name: str
    axes: Mask
    node: int
    site: Site | None
    number: bool
    said: Any
    own: bool
    backward: bool
    pieces: Mask = 0


class Gradient(NamedTuple):
    """A gradient, as `value_and_grad` returns it.

    Attributes:
        loss: node of what was differentiated.
        begin, end: between which nodes backward ran.
        pairs: path, node of the variable, node of its gradient.
        site: who asked.
        inner: whether it is differentiated itself.
    """

    loss: int
    begin: int
    end: int
    pairs: list[tuple[int, int]]
    site: Site | None
    inner: bool = False


class Summed(NamedTuple):
    """A stage sums gradients of its parameters over ranks."""

    at: int
    axes: Mask


class Part(NamedTuple):
    """The gradient of one of a stage's parameters, before it is summed along `allowed`, which cut or repeat it."""

    variable: int
    node: int
    allowed: Mask


class Used(NamedTuple):
    """A parameter and its gradient in an optimizer's step; `cut`: the axes that cut a flat shard, None for another."""

    parameter: int
    gradient: int
    site: Site | None
    cut: Mask | None = None


class Output(NamedTuple):
    """What the function returned.

    Attributes:
        path: `result[0]`.
        node: its own.
        allowed: along which axes it may vary; None where nothing is claimed.
        outer: whether somebody outside may differentiate it.
    """

    path: str
    node: int
    allowed: Mask | None
    outer: bool = False


class Claimed(NamedTuple):
    """An argument, or a result, of a function mapped inside the one that is checked."""

    what: str
    node: int
    allowed: Mask
    site: Site | None


Event = Call | Gradient | Summed | Part | Used | Output | Claimed


@dataclass
class Trace:
    """A recorded call.

    Attributes:
        name: what is checked, for messages.
        axes: names of those along which there are several ranks, and how many.
        nodes: in the order in which they came to be.
        variables: by the position of their bit.
        events: in order.
        outer: whether somebody outside differentiates.
        prefix: whether some rank's record ends before the function does.
        flat: the nodes of flat shards that were passed, and the axes that cut them into pieces.
    """

    name: str
    axes: dict[str, int]
    nodes: list[Node] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    outer: bool = False
    prefix: bool = False
    flat: dict[int, Mask] = field(default_factory=dict)

    def gradients(self) -> list[Gradient]:
        """The gradients that the function asked for."""
        return [event for event in self.events if isinstance(event, Gradient)]

    def mask(self, names: Any) -> Mask:
        """The set of these axes, of which those of one rank are none."""
        order = list(self.axes)
        return sum(1 << order.index(name) for name in set(names) if name in self.axes)

    def names(self, axes: Mask) -> tuple[str, ...]:
        """The axes in a set."""
        return tuple(name for i, name in enumerate(self.axes) if axes >> i & 1)


def reached(starts: Iterable[int], onward: Callable[[int], Iterable[int]]) -> Iterator[int]:
    """Yields some nodes and those to which `onward` leads from one after another, each once."""
    ahead = list(starts)
    seen = set(ahead)
    while ahead:
        at = ahead.pop()
        yield at
        more = [other for other in dict.fromkeys(onward(at)) if other not in seen]
        seen.update(more)
        ahead += more


JOINING = ("psum", "all_gather_invariant")
"""Collectives that make one value for all ranks, which has a derivative on each."""
Given = dict[tuple[str, int, Site | None], int]


def given_by(trace: Trace) -> Given:
    """What such collectives gave first, by which it was, the node that it was given, and where."""
    found: Given = {}
    for at, node in enumerate(trace.nodes):
        if node.op in JOINING and len(node.parents) == 1:
            found.setdefault((node.op, node.parents[0], node.site), at)
    return found
