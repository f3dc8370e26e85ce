"""A traced step as a short program: regions that inductor compiles, and between them the collectives.

Regions of the same operations, such as those of equal layers, are compiled once. A gather starts when the one before
it has arrived, so that it is in flight while the stage before computes; a reduction starts at its place, and is waited
for where its result is used.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardfn.collectives.ledger import attributed_to
from shardfn.collectives.ops import LIBRARY
from shardfn.collectives.scheduled import SCHEDULED, known
from shardfn.compat import inductor

_aten: Any = torch.ops.aten


def is_collective(node: fx.Node) -> bool:
    """Whether a node is a collective."""
    return node.op == "call_function" and getattr(node.target, "namespace", None) == LIBRARY.ns


def is_free(node: fx.Node) -> bool:
    """Whether a node is a view, or a constant number: everybody makes these for themselves."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_free(node.args[0])  # type: ignore[arg-type]
    packet = getattr(node.target, "overloadpacket", None)
    view = bool(getattr(node.target, "is_view", False)) or packet is _aten._unsafe_view
    return view or (packet in (_aten.full, _aten.scalar_tensor) and _numel(node) == 1)


def _only_puts(node: fx.Node) -> bool:
    """Whether a node writes into an argument what other operations may not have computed: a view, or a copy.

    Inductor leaves copies out, and computes views in place, while it still reads other elements of the argument.
    """
    if node.target is not _aten.copy_.default:
        return False
    source: Any = node.args[1]
    while source.target in (_aten.clone.default, _aten.copy.default):
        source = source.args[source.target is _aten.copy.default]
    same_kind = any(_value_kind(x) == _value_kind(source) for x in source.all_input_nodes)
    return source.op == "placeholder" or is_free(source) or (same_kind and inductor.leaves_out(source.target))


def _value_kind(node: fx.Node) -> Any:
    value = node.meta["val"]
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


def _is_item(node: fx.Node) -> bool:
    """Whether a node is one of the results of a collective."""
    return node.target is operator.getitem and is_collective(node.args[0])  # type: ignore[arg-type]


@dataclass(eq=False)
class Region:
    """Operations that are compiled together.

    Attributes:
        nodes: in order.
        inputs: what they read of others, without views.
        outputs: those of them that others read.
        graph: the same as a graph of its own.
        key: equal for regions of the same operations on tensors of the same kinds.
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    graph: fx.GraphModule
    key: str

    @property
    def scalar(self) -> bool:
        """Whether it computes single numbers only, which is not worth compiling."""
        return all(_numel(node) <= 1 for node in self.nodes)

    def _alone(self, xs: list[Tensor]) -> Sequence[Tensor]:
        results: Sequence[Tensor] = self.graph(*xs)
        xs.clear()
        return results

    def function(self) -> Callable[[list[Tensor]], Sequence[Tensor]]:
        """The compiled operations."""
        if self.scalar:
            return self._alone
        if self.key not in _functions:
            _functions[self.key] = inductor.compiled(self.graph)
        return _functions[self.key]


_functions: dict[str, Callable[[list[Tensor]], Sequence[Tensor]]] = {}


def _numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    values = [value] if isinstance(value, Tensor) else value or ()
    return max((x.numel() for x in values if isinstance(x, Tensor)), default=0)


def origin(node: fx.Node) -> fx.Node:
    """The node of which another is a view."""
    while is_free(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def unaliased(graph: fx.Graph) -> None:
    """Removes other names of the same tensor, and what nobody reads."""
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "overloadpacket", None) in (_aten.alias, _aten.detach):
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()


def uncloned(graph: fx.Graph) -> None:
    """Removes copies of what nothing overwrites before its end, except those that are results."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not _aten.clone.default:
            continue
        if _value_kind(node) == _value_kind(node.args[0]) and not any(user.op == "output" for user in _readers(node)):
            node.replace_all_uses_with(node.args[0])


def _permuted_once(graph: fx.Graph) -> None:
    """Makes one permutation of two in a row, and none of two that undo each other."""
    for node in graph.nodes:
        inner = node.args[0] if node.target is _aten.permute.default else None
        if inner is not None and inner.target is _aten.permute.default:
            dims = [inner.args[1][d] % len(inner.args[1]) for d in node.args[1]]
            node.args = (inner.args[0], dims)
            if dims == sorted(dims):
                node.replace_all_uses_with(inner.args[0])


def simplified(graph: fx.Graph) -> None:
    """Writes into arguments as soon as nothing else reads them."""
    _permuted_once(graph)
    unaliased(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not _aten.copy_.default:
            continue
        target, source = node.args[0], node.args[1]
        node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op == "output")
        last = max([source, *(user for user in _readers(target) if user is not node)], key=order.__getitem__)
        last.append(node)


def _readers(node: fx.Node) -> Iterable[fx.Node]:
    """The nodes that read a tensor, also through views of it."""
    for user in node.users:
        yield user
        if is_free(user):
            yield from _readers(user)


# --- regions ---


def _sources(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes that a node reads, through views."""
    sources: dict[fx.Node, None] = {}

    def visit(x: fx.Node) -> None:
        if is_free(x):
            for y in x.all_input_nodes:
                visit(y)
        else:
            sources[x] = None

    for x in node.all_input_nodes:
        visit(x)
    return list(sources)


def _independent_parts(run: list[fx.Node]) -> list[list[fx.Node]]:
    """Parts of a run of operations that need nothing of each other, or only single numbers, such as a norm.

    Numbers are computed apart from the rest, so that equal parts are regions of the same kind.
    """
    inside, random_ops = set(run), list[fx.Node]()
    reads: dict[fx.Node, list[fx.Node]] = {}
    for node in run:
        reads[node] = [x for x in _sources(node) if x in inside]
        if node.target is _aten.copy_.default:  # after all that reads what it overwrites
            target = node.args[0]
            reads[node] += [x for x in _readers(target) if x in inside and x is not node]  # type: ignore[arg-type]
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):  # numbers are drawn in order
            reads[node] += random_ops[-1:]
            random_ops.append(node)
    small: dict[fx.Node, bool] = {}
    for node in run:  # one of several results stays with the operation
        small[node] = small[node.args[0]] if node.target is operator.getitem else _numel(node) <= 1  # type: ignore[index]
    same_size_reads = {node: [x for x in reads[node] if small[x] is small[node]] for node in run}
    level = _levels(run, reads, small, same_size_reads)
    numbers: dict[int, fx.Node] = {}  # those of one level are one part
    for node in run:
        same_size_reads[node] = [x for x in same_size_reads[node] if level[x] == level[node]]
        if small[node]:
            same_size_reads[node].append(numbers.setdefault(level[node], node))
    return sorted(_components(run, same_size_reads), key=lambda nodes: level[nodes[0]])


Edges = dict[fx.Node, list[fx.Node]]


def _levels(run: list[fx.Node], reads: Edges, small: dict[fx.Node, bool], same_size_reads: Edges) -> dict[fx.Node, int]:
    """Returns how often the path to each operation alternates between scalars and tensors.

    What overwrites an argument comes with the last of what belongs together, and everything beside what reads it, so
    that nothing need be kept in between.
    """
    level: dict[fx.Node, int] = {}
    for node in run:
        level[node] = max((level[x] + (small[x] is not small[node]) for x in reads[node]), default=0)
    for nodes in _components(run, same_size_reads):
        last = max(level[node] for node in nodes)
        level |= {node: last for node in nodes if node.target is _aten.copy_.default}
    readers: Edges = {node: [] for node in run}
    for node in run:
        for x in reads[node]:
            readers[x].append(node)
    for node in reversed(run):
        if readers[node] and not small[node]:
            level[node] = min(level[x] - small[x] for x in readers[node])
    for node in run:
        if node.target is operator.getitem:
            level[node] = level[node.args[0]]  # type: ignore[index]
    return level


def _components(run: list[fx.Node], edges: Edges) -> list[list[fx.Node]]:
    """The nodes that edges connect, in order."""
    parent = {node: node for node in run}

    def find(x: fx.Node) -> fx.Node:
        while parent[x] is not x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    for node in run:
        for x in edges[node]:
            parent[find(node)] = find(x)
    parts: dict[fx.Node, list[fx.Node]] = {}
    for node in run:
        parts.setdefault(find(node), []).append(node)
    return list(parts.values())


def _region(nodes: list[fx.Node]) -> Region:
    """A region of these nodes; views that they read are made inside."""
    inside = set(nodes)
    inputs = list(dict.fromkeys(x for node in nodes for x in _sources(node) if x not in inside))
    outputs = [node for node in nodes if any(user not in inside and not is_free(user) for user in _readers(node))]
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for i, x in enumerate(inputs):
        known[x] = graph.placeholder(f"x{i}")
        known[x].meta["val"] = x.meta["val"]

    def copied(node: fx.Node) -> fx.Node:
        if node not in known:
            known[node] = graph.node_copy(node, copied)
        return known[node]

    for node in nodes:
        copied(node)
    graph.output(tuple(known[node] for node in outputs))
    return Region(nodes, inputs, outputs, fx.GraphModule({}, graph), graph_text(graph))


def graph_text(graph: fx.Graph) -> str:
    """A graph's operations, without names."""
    index = {node: i for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            x = node.meta["val"]
            lines.append(f"{x.dtype} {tuple(x.shape)} {x.stride()} {x.device}")
        else:
            args = node.args if node.target is not SCHEDULED else (node.args[0], str(known(node.args[1])))
            lines.append(f"{node.target} {fx.map_arg((args, node.kwargs), lambda x: f'%{index[x]}')}")
    return "\n".join(lines)


# --- the program ---


@dataclass(eq=False)
class ProgramLine:
    """A line of the program.

    Attributes:
        does: Python, without the assignment; for a call of a region, its name.
        reads, makes: variables.
        region: whether it is such a call, which takes a list and empties it.
    """

    does: str
    reads: list[str]
    makes: list[str]
    region: bool = False


class _ProgramWriter:
    """Writes the program of a graph.

    Attributes:
        names: of variables, by node.
        within: by variable, those in whose memory it lies.
        values: what the program refers to by name.
        started: collectives whose results nobody has used.
        gathers: the lines in which gathers have arrived.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.names: dict[fx.Node, str] = {}
        self.within: dict[str, list[str]] = {}
        self.values: dict[str, Any] = {}
        self.lines: list[ProgramLine] = []
        self.started: dict[fx.Node, tuple[str, str, list[str]]] = {}
        self.gathers: list[ProgramLine] = []
        self.made: dict[str, ProgramLine] = {}
        self.arguments = [self._new(node) for node in graph.nodes if node.op == "placeholder"]

    def _new(self, node: fx.Node | None = None) -> str:
        name = f"v{len(self.within)}"
        self.within[name] = []
        if node is not None:
            self.names[node] = name
        return name

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.values)}"
        self.values[name] = value
        return name

    def _add(self, line: ProgramLine, index: int | None = None) -> ProgramLine:
        self.lines.insert(len(self.lines) if index is None else index, line)
        for name in line.makes:
            self.made[name] = line
        return line

    # --- values ---

    def variable(self, node: fx.Node) -> str:
        """The variable of a node; a view is made, and a collective waited for, where it is first used."""
        if _is_item(node) and node.args[0] in self.started:
            self._finish(node.args[0])  # type: ignore[arg-type]
        if node in self.names:
            return self.names[node]
        assert is_free(node) or _is_item(node), f"{node} is made before it is used"
        reads = [self.variable(x) for x in node.all_input_nodes]
        does = self._call(node)
        name = self._new(node)
        self.within[name] = [x for read in reads for x in (read, *self.within[read])]
        # Where what it reads was made: a gather that takes it may start there.
        self._add(ProgramLine(does, reads, [name]), self._after(reads))
        return name

    def _after(self, reads: Sequence[str], other_lines: Sequence[ProgramLine] = ()) -> int:
        """The first place where these variables are known, behind other lines."""
        earlier = {id(line) for line in (*(self.made[x] for x in reads if x in self.made), *other_lines)}
        return max((i + 1 for i, line in enumerate(self.lines) if id(line) in earlier), default=0)

    def _call(self, node: fx.Node) -> str:
        """A node as Python."""
        if node.target is operator.getitem:
            return f"{self.code(node.args[0])}[{node.args[1]!r}]"
        arguments = [self.code(x) for x in node.args] + [f"{k}={self.code(x)}" for k, x in node.kwargs.items()]
        target = _serving(node.target, *node.meta["serves"]) if is_collective(node) else node.target
        return f"{self._constant(target)}({', '.join(arguments)})"

    def code(self, x: Any) -> str:
        """An argument as Python."""
        if isinstance(x, fx.Node):
            return self.variable(x)
        if isinstance(x, (list, tuple)):
            return f"[{', '.join(self.code(y) for y in x)}]"
        return repr(x) if x is None or type(x) in (bool, int) else self._constant(x)

    # --- steps ---

    def write(self, step: Region | fx.Node) -> None:
        """Writes a region, or a collective or another operation between regions."""
        if isinstance(step, Region):
            reads = [self.variable(x) for x in step.inputs]
            function = self._constant(step.function())
            self._add(ProgramLine(function, reads, [self._new(node) for node in step.outputs], region=True))
        elif step.target is SCHEDULED:
            self._start(step)
        else:
            does, reads = self._call(step), [self.variable(x) for x in step.all_input_nodes]
            self._add(ProgramLine(does, reads, [self._new(step)]))

    def _start(self, node: fx.Node) -> None:
        inputs, work_id = node.args
        work = known(work_id)  # type: ignore[arg-type]
        reads = [self.variable(x) for x in node.all_input_nodes]
        name, constant = self._new(), self._constant(work)
        start, index = ProgramLine(f"{constant}.start({self.code(inputs)})", reads, [name]), None
        if work.ahead:
            index = self._after(reads, self.gathers[: len(self.gathers) - work.ahead + 1][-1:])
        self._add(start, index)
        items = {user.args[1]: user for user in node.users}
        self.started[node] = name, constant, [self._new(items.get(i)) for i in range(len(node.meta["val"]))]
        if work.ahead:
            self.gathers.append(self._finish(node))

    def _finish(self, node: fx.Node) -> ProgramLine:
        name, constant, makes = self.started.pop(node)
        self.within.update({x: [] for x in makes})
        return self._add(ProgramLine(f"{constant}.finish({name})", [name], makes))

    # --- the whole ---

    def finished(self, results: Sequence[Any]) -> tuple[Callable[[list[Any]], list[Any]], str]:
        """The function `[arguments] -> results`, and its text."""
        for node in list(self.started):
            self._finish(node)
        returned = self.code(list(results))
        last = ProgramLine(returned, [self.names[x] for x in results if isinstance(x, fx.Node)], [])
        ends: dict[str, int] = {}
        for i, line in enumerate([*self.lines, last]):
            for name in [*line.makes, *(x for read in line.reads for x in (read, *self.within[read]))]:
                ends[name] = i
        text = ["def program(a):", f"    {', '.join(self.arguments)}, = a", "    a.clear()"]
        unused = [name for name in self.arguments if name not in ends]
        text += [f"    {' = '.join(unused)} = None"] if unused else []
        dying: dict[int, list[str]] = {}
        for name, i in ends.items():
            dying.setdefault(i, []).append(name)
        for i, line in enumerate(self.lines):
            freed = dying.get(i, [])
            assignment = (
                f"{', '.join(line.makes)}, = " if line.makes and (line.region or ".finish(" in line.does) else ""
            )
            assignment = assignment or (f"{line.makes[0]} = " if line.makes else "")
            if line.region:
                text.append(f"    b = [{', '.join(line.reads)}]")
                early = [name for name in freed if name not in line.makes]
                text += [f"    {' = '.join(early)} = None"] if early else []
                text.append(f"    {assignment}{line.does}(b)")
                freed = [name for name in freed if name in line.makes]
            else:
                text.append(f"    {assignment}{line.does}")
            text += [f"    {' = '.join(freed)} = None"] if freed else []
        text.append(f"    return {returned}")
        exec("\n".join(text), self.values)  # as torch.fx makes functions of graphs
        return self.values["program"], "\n".join(text)


def _serving(op: Any, stage: str, backward: bool) -> Callable[..., Any]:
    """A collective that ledgers know as this stage's."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with attributed_to(stage, backward, scheduled=False):
            return op(*args, **kwargs)

    return run


def program(graph: fx.Graph) -> tuple[Callable[[list[Any]], list[Any]], str]:
    """The program of a graph, `[arguments] -> results`, which empties the list, and its text."""
    writer = _ProgramWriter(graph)
    for step in _steps(graph):
        writer.write(step)
    (output,) = (node for node in graph.nodes if node.op == "output")
    return writer.finished(output.args[0])


def _steps(graph: fx.Graph) -> list[Region | fx.Node]:
    """Regions, collectives, and other operations between regions, in order."""
    steps: list[Region | fx.Node] = []
    run: list[fx.Node] = []

    def end_run() -> None:
        steps.extend(_region(nodes) for nodes in _independent_parts(run))
        run.clear()

    for node in graph.nodes:
        if node.op != "call_function" or is_free(node) or _is_item(node):
            continue
        if is_collective(node) or _only_puts(node):
            end_run()
            steps.append(node)
        else:
            run.append(node)
    end_run()
    return steps
