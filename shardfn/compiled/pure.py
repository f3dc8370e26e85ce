"""A traced graph without overwriting, in operations that inductor knows.

Operations that touch overwritten memory are made functional together. All others depend on their arguments alone, so
one of each kind is decomposed, and the rest are copies of it: equal layers are decomposed once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor, fx

from shardfn.compat import autograd, inductor
from shardfn.compiled.watch import written

_EXACT = (
    type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types of arguments whose `repr` says all that they are."""


def pure(module: fx.GraphModule) -> fx.GraphModule:
    """The same operations on new tensors; arguments are overwritten at the end."""
    nodes = list(module.graph.nodes)
    chained = _chained(nodes)
    kinds: dict[Any, fx.Node] = {}
    calls = [node for node in nodes if node.op == "call_function"]
    plain = [node for node in calls if node not in chained and node.target is not operator.getitem]
    first = {node: kinds.setdefault(_decomposition_key(node), node) for node in plain}
    return _Decompositions([node for node in calls if node in chained or first.get(node) is node], chained).joined(
        nodes, first
    )


def _node_tensors(node: fx.Node) -> list[Tensor]:
    return [x for x in optree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]


def _with_values(x: Any, value: Callable[[fx.Node], Any]) -> Any:
    """Arguments of a node with values in place of nodes, in containers that are no longer fx's own."""
    if isinstance(x, (list, tuple)):
        return [_with_values(y, value) for y in x]
    if isinstance(x, dict):
        return {k: _with_values(y, value) for k, y in x.items()}
    return value(x) if isinstance(x, fx.Node) else x


def overwrites(node: fx.Node) -> list[fx.Node]:
    """The arguments into which an operation writes."""
    args, kwargs = _with_values((node.args, node.kwargs), lambda x: x)
    return written(node.target, args, kwargs, fx.Node)


def _chained(nodes: list[fx.Node]) -> set[fx.Node]:
    """The operations that read, make or write memory that any of them overwrites."""
    calls = [node for node in nodes if node.op == "call_function"]
    tensors = {node: _node_tensors(node) for node in nodes}
    if any(x.layout is not torch.strided for node_tensors in tensors.values() for x in node_tensors):
        return set(calls)  # whose memory says nothing of aliases
    storages = {node: {autograd.storage_of(x) for x in node_tensors} for node, node_tensors in tensors.items()}
    overwritten: set[int] = set()
    for node in calls:
        if node.target is not operator.getitem and node.target._schema.is_mutable:  # type: ignore[union-attr]
            overwritten |= {storage for x in overwrites(node) for storage in storages[x]}
    chained: set[fx.Node] = set()
    for node in calls:
        if node.target is operator.getitem:  # stays with the operation
            touches = node.args[0] in chained
        else:
            touches = any(overwritten & storages[x] for x in (node, *node.all_input_nodes))
        if touches:
            chained.add(node)
    return chained


def _decomposition_key(node: fx.Node) -> Any:
    """A key, equal for operations with the same decomposition."""
    index = {x: i for i, x in enumerate(node.all_input_nodes)}

    def exact(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return tuple(map(exact, x))
        if isinstance(x, dict):
            return tuple((k, exact(v)) for k, v in x.items())
        if isinstance(x, fx.Node):
            return fx.Node, index[x]
        return (type(x), repr(x)) if isinstance(x, _EXACT) else (node, x)

    kinds = [
        (x.dtype, x.shape, x.stride(), x.storage_offset(), x.device, x.is_conj(), x.is_neg())
        for y in index for x in _node_tensors(y)
    ]  # fmt: skip
    return node.target, exact((node.args, node.kwargs)), tuple(kinds)


class _Decompositions:
    """Decomposed operations.

    Attributes:
        run: which operations: those that are chained, and one of each other kind.
        chained: the operations that are traced as one.
        reads: what is read besides: an operation that is not chained, or None, and what it reads.
        inputs: the traced nodes of these.
        results: the traced nodes of each operation's tensors.
        members: the traced nodes that each operation has become; under None those that overwrite arguments at the end.
    """

    def __init__(self, run: list[fx.Node], chained: set[fx.Node]) -> None:
        self.run, self.chained = run, chained
        self.reads = list(
            dict.fromkeys(
                (None if node in chained else node, x)
                for node in run for x in node.all_input_nodes if node not in chained or x not in chained
            )
        )  # fmt: skip
        self.members: dict[fx.Node | None, list[fx.Node]] = {}
        self.places: dict[fx.Node, list[int | None]] = {}
        # The tracer knows a tensor by its identity, so each input is one of its own.
        self.module = inductor.functional(self._traced, [x.meta["val"].detach() for _, x in self.reads])
        nodes = list(self.module.graph.nodes)
        traced = nodes[-1].args[0]
        self.results = {
            node: [None if i is None else traced[i] for i in indices] for node, indices in self.places.items()
        }
        self.inputs = dict(zip(self.reads, nodes, strict=False))
        known = {x for members in self.members.values() for x in members}
        self.members[None] = [x for x in nodes if x not in known and x.op not in ("placeholder", "output")]

    def _traced(self, *tensors: Tensor) -> list[Tensor]:
        """Runs the operations; returns the tensors that others read, and notes at which place each is."""
        inputs, values, results = dict(zip(self.reads, tensors, strict=True)), dict[fx.Node, Any](), list[Tensor]()
        last = inductor.newest_nodes()[-1:]

        def keep(node: fx.Node, result: Any) -> None:
            self.places[node] = []
            for x in result if isinstance(result, (tuple, list)) else [result]:
                self.places[node].append(len(results) if isinstance(x, Tensor) else None)
                results.extend([x] if isinstance(x, Tensor) else [])

        def read(reader: fx.Node, x: fx.Node) -> Any:
            if reader not in self.chained:
                return inputs[reader, x]
            return values[x] if x in values else inputs[None, x]

        for node in self.run:
            args, kwargs = _with_values((node.args, node.kwargs), functools.partial(read, node))
            result = node.target(*args, **kwargs)  # type: ignore[operator]
            self.members[node] = inductor.newest_nodes(*last)
            last = self.members[node][-1:] or last
            if node in self.chained:
                values[node] = result
            else:
                keep(node, result)
        for node, result in values.items():
            if any(user not in self.chained for user in node.users):
                keep(node, result)
        return results

    def joined(self, nodes: list[fx.Node], first: dict[fx.Node, fx.Node]) -> fx.GraphModule:
        """The whole graph; `first` has the operation that was traced for each that is not chained."""
        graph, chain, new = fx.Graph(), dict[fx.Node, Any](), dict[fx.Node, Any]()

        def value(x: fx.Node) -> Any:
            return chain[self.results[x][0]] if x in self.chained else new[x]  # type: ignore[index]

        def write(node: fx.Node | None, known: dict[fx.Node, Any]) -> None:
            for x in self.members[node]:
                known[x] = graph.node_copy(x, known.__getitem__)

        for node in nodes:
            if node.op == "placeholder":
                new[node] = graph.node_copy(node)
            elif node in self.chained:
                chain |= {self.inputs[None, x]: value(x) for x in node.all_input_nodes if x not in self.chained}
                write(node, chain)
            elif node.target is operator.getitem:
                new[node] = new[node.args[0]][node.args[1]]  # type: ignore[index]
            elif node.op != "output":
                traced = first[node]
                pairs = zip(traced.all_input_nodes, node.all_input_nodes, strict=True)
                known = {self.inputs[traced, x]: value(y) for x, y in pairs}
                write(traced, known)
                copies = [None if x is None else known[x] for x in self.results[traced]]
                new[node] = copies if isinstance(node.meta.get("val"), (tuple, list)) else copies[0]
        write(None, chain)
        graph.output(fx.map_arg(nodes[-1].args[0], value))
        return fx.GraphModule(self.module, graph)
