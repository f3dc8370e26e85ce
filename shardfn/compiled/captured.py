"""One captured call of a step: a graph of the device, the memory that it works on, and what a replay returns.

Arguments lie in memory that stays. What the step returns in the role of an argument is in that argument's memory when
the graph ends, so it goes back in without a copy. On the CPU there is no graph: the step runs, and all else is alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.collectives import late_checks
from shardfn.collectives.capturing import Late
from shardfn.collectives.ledger import Ledger, ledger, record_again
from shardfn.compat import autograd, dispatch
from shardfn.compiled.surroundings import Around
from shardfn.compiled.watch import Note, StepWatch
from shardfn.quoting import short
from shardfn.stages.schedule import forget_gathered


class Donated(Tensor):
    """A tensor whose memory a step has taken over: each use of it raises RuntimeError."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} of a tensor that was given to a step, which has overwritten "
            f"it. Use what the step returned, params, state, loss = step(params, state, batch), or pass it a clone"
        )


def donate(x: Tensor) -> None:
    """Makes every later use of this tensor object an error."""
    if dispatch.ordinary(x) and not isinstance(x, torch.nn.Parameter):
        x.__class__ = Donated


@dataclass
class Roles:
    """Which results of a step become its arguments again.

    Attributes:
        carried: index of the leaf among the results, by index of the leaf among the arguments.
        lifted: dtypes of the arguments that are numbers to the program and tensors to the step, by index.
        fixed: indices of the other carried numbers, which the step left as they were.
    """

    carried: dict[int, int] = field(default_factory=dict)
    lifted: dict[int, torch.dtype] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)


@dataclass
class ResultStructure:
    """A step's result without its tensors."""

    tree: optree.PyTreeSpec
    kinds: list[Any]

    @staticmethod
    def from_leaves(leaves: Sequence[Any], tree: optree.PyTreeSpec) -> ResultStructure:
        """The form of these leaves."""
        return ResultStructure(tree, [(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves])

    def difference(self, other: ResultStructure) -> str:
        """Returns how a later result differs, as a message; empty if it does not."""
        if self.tree != other.tree:
            return f"the structure {short(other.tree)}, and before {short(self.tree)}"
        pairs = enumerate(zip(self.kinds, other.kinds, strict=True))
        return next((f"{short(b)} as leaf {i}, and before {short(a)}" for i, (a, b) in pairs if repr(a) != repr(b)), "")


@dataclass
class StepProgram:
    """The state of one step for arguments of one kind.

    Attributes:
        name: of the step, for messages.
        step: `leaves -> (leaves of the result, its structure)`.
        device: where it runs.
        roles: which results become arguments.
        numbers: the arguments that are numbers, by index.
        labels: the arguments' names.
        calls: how often it was called.
        notes, form: what the rehearsal did, and returned.
        captured: the captured call.
        around: what the step's functions read besides, and must not change.
    """

    name: str
    step: Callable[[list[Any]], tuple[list[Any], optree.PyTreeSpec]]
    device: torch.device
    roles: Roles
    numbers: dict[int, Any]
    labels: Callable[[int], str]
    calls: int = 0
    notes: list[Note] = field(default_factory=list)
    form: ResultStructure | None = None
    captured: Captured | None = None
    around: Around = field(default_factory=dict)

    def rehearse(self, leaves: list[Any]) -> tuple[list[Any], optree.PyTreeSpec]:
        """Runs the step as it will be captured, and notes what it does."""
        forget_gathered(self.device)  # as before the graph, whose operations are compared with these
        watch = StepWatch(self.name, _only_tensors(leaves), self.device)
        results, tree = self.watched(watch, leaves)
        late_checks.after_replay(watch.late)
        self.notes, self.form = watch.notes, ResultStructure.from_leaves(results, tree)
        return results, tree

    def watched(self, watch: StepWatch, leaves: list[Any]) -> tuple[list[Any], optree.PyTreeSpec]:
        """Runs the step under a watch, backward included.

        Raises:
            RuntimeError: the step needs the host, differs from the rehearsal, or writes into an argument whose result
                does not become the argument again.
        """
        single = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor) and i not in self.roles.carried}
        versions = {i: x._version for i, x in single.items() if not x.is_inference()}
        with watch:
            results, tree = self.step(leaves)
            if not watch.traces:
                forget_gathered(self.device)
        watch.finish(results)
        shared = {autograd.storage_of(leaves[i]) for i in self.roles.carried}
        for i, version in versions.items():
            if single[i]._version != version and autograd.storage_of(single[i]) not in shared:
                raise self.overwrites(i)
        self.refuse_results(leaves, results, tree)
        return results, tree

    def overwrites(self, i: int) -> RuntimeError:
        """The error for a step that overwrites an argument whose result does not become the argument again."""
        return RuntimeError(
            f"{self.name}: the step overwrites {self.labels(i)}, and the program does not pass back what it returned "
            f"for it: write params, state, loss = step(params, state, batch)"
        )

    def refuse_results(self, leaves: list[Any], results: list[Any], tree: optree.PyTreeSpec) -> None:
        """Raises RuntimeError for results that differ from earlier ones, cannot stay in the memory of an argument, or
        are not in a graph.
        """
        if self.form is not None and (difference := self.form.difference(ResultStructure.from_leaves(results, tree))):
            raise RuntimeError(f"{self.name}: the step returns {difference}: a program always returns the same")
        for i, j in self.roles.carried.items():
            x, y = leaves[i], results[j] if j < len(results) else None
            if not isinstance(y, Tensor) or (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
                got = f"{y.dtype} {list(y.shape)} on {y.device}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
                raise RuntimeError(
                    f"{self.name}: for {self.labels(i)}, {x.dtype} {list(x.shape)} on {x.device}, the step returns "
                    f"{got}: what becomes an argument again keeps its shape and dtype"
                )
        if any(isinstance(y, Tensor) and y.device.type != self.device.type for y in results):
            raise RuntimeError(
                f"{self.name}: the step returns a tensor that is not on {self.device.type}, where the graph computes: "
                f"no replay would update it"
            )


@dataclass
class Captured:
    """A captured call.

    Attributes:
        program: to which it belongs.
        graph: the device's graph; None on the CPU, where the step runs.
        arguments: the tensors that the graph reads, and numbers, by index of the argument.
        results: what it returns, where it leaves it.
        tree: structure of the result.
        held: memory that it uses besides.
        late: what the host checks after each run.
        streams: those on which it has run.
        log: the collectives that it issues.
    """

    program: StepProgram
    graph: Any = None
    arguments: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    tree: Any = None
    held: list[Tensor] = field(default_factory=list)
    late: list[Late] = field(default_factory=list)
    streams: set[Any] = field(default_factory=set)
    log: Ledger = field(default_factory=Ledger)

    def run(self, leaves: list[Any], first: bool = False) -> Any:
        """Runs the step on new arguments, and donates those that are carried."""
        carried = self.program.roles.carried
        if self.graph is None:
            results = self._on_cpu(leaves, first)
        else:
            late_checks.poll_checks(self.program.device)
            forget_gathered(self.program.device)
            self._record_stream()
            if not first:
                self._fill(leaves)
            self.graph.replay()
            results = self._returned()
            late_checks.after_replay(self.late)
            if not first:  # open ledgers have heard the capture
                record_again(self.log)
        for i in carried:
            donate(leaves[i])
        return optree.tree_unflatten(self.tree, results)

    def _record_stream(self) -> None:
        """Lets the allocator know that this stream uses the graph's memory."""
        stream = torch.get_device_module(self.program.device).current_stream(self.program.device)
        if stream not in self.streams:
            self.streams.add(stream)
            for x in (*_only_tensors(self.arguments), *_only_tensors(self.results), *self.held):
                x.record_stream(stream)

    def _on_cpu(self, leaves: list[Any], first: bool) -> list[Any]:
        carried = self.program.roles.carried
        arguments = [x.detach() if i in carried else x for i, x in enumerate(leaves)]
        if first and self.program.form is not None:
            forget_gathered(self.program.device)
            watch = StepWatch(self.program.name, _only_tensors(arguments), self.program.device, self.program.notes)
            results, self.tree = self.program.watched(watch, arguments)
        else:
            results, self.tree = self.program.step(arguments)
        shared = {autograd.storage_of(arguments[i]) for i in carried}
        carried_results = set(carried.values())
        return [
            _unshared(x, shared) if isinstance(x, Tensor) and j not in carried_results else x
            for j, x in enumerate(results)
        ]

    def _fill(self, leaves: list[Any]) -> None:
        """Copies arguments to where the graph reads them, except those that are there already."""
        pairs = [
            (argument, x)
            for argument, x in zip(self.arguments, leaves, strict=True)
            if isinstance(argument, Tensor) and not same_elements(argument, x)
        ]
        shared = {autograd.storage_of(argument) for argument in self.arguments if isinstance(argument, Tensor)}
        # What lies in the memory of another argument is overwritten before it is read.
        sources = [x.clone() if autograd.storage_of(x) in shared else x for _, x in pairs]
        for (argument, _), x in zip(pairs, sources, strict=True):
            argument.copy_(x)

    def _returned(self) -> list[Any]:
        """The results: carried ones in the graph's memory, copies of the others."""
        carried = {j: i for i, j in self.program.roles.carried.items()}
        torch.autograd.graph.increment_version([self.arguments[i] for i in carried.values()])
        results = []
        for j, x in enumerate(self.results):
            if j in carried:
                results.append(self.arguments[carried[j]].detach())
            else:
                results.append(x.clone() if isinstance(x, Tensor) else x)
        return results


def captured(program: StepProgram, leaves: list[Any], stream: Any, pool: Any) -> Captured:
    """Captures a call; nothing has run when this returns.

    Raises:
        RuntimeError: the step does what a graph cannot hold.
    """
    if program.device.type == "cpu":
        return Captured(program)
    late_checks.poll_checks(program.device, wait=True)
    forget_gathered(program.device)
    carried = program.roles.carried
    arguments = [
        x.detach() if i in carried else x.clone() if isinstance(x, Tensor) else x for i, x in enumerate(leaves)
    ]
    module, error = torch.get_device_module(program.device), None
    graph = module.CUDAGraph()
    watch = StepWatch(program.name, _only_tensors(arguments), program.device, program.notes)
    result = Captured(program, graph, arguments)
    stream.wait_stream(module.current_stream(program.device))
    try:
        # Threads that fetch batches or watch communicators may go on meanwhile.
        # The outer context: torch's own leaves the stream current if the capture cannot end.
        with (
            module.stream(module.current_stream(program.device)),
            module.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            try:
                with ledger() as result.log:
                    results, result.tree = program.watched(watch, arguments)
                _carry(program, arguments, results)
            except Exception as raised:  # the capture must end first, or its end would hide the reason
                error = raised
    except Exception as raised:
        error = error or raised
    if error is not None:
        raise error
    result.results = [x.detach() if isinstance(x, Tensor) else x for x in results]
    result.held, result.late = list(watch.held.values()), watch.late
    return result


def _carry(program: StepProgram, arguments: list[Any], results: list[Any]) -> None:
    """Copies results to the memory of the arguments in whose role they are, as the last part of the graph."""
    pairs = [
        (arguments[i], results[j])
        for i, j in program.roles.carried.items()
        if not same_elements(arguments[i], results[j])
    ]
    targets = [autograd.storage_of(x) for x, _ in pairs]
    if len(set(targets)) < len(targets):
        raise RuntimeError(f"{program.name}: arguments that the step replaces share memory: pass clones of them")
    carried = {autograd.storage_of(arguments[i]) for i in program.roles.carried}
    with torch.no_grad():
        sources = [x.clone() if autograd.storage_of(x) in carried else x for _, x in pairs]
        for (target, _), x in zip(pairs, sources, strict=True):
            target.copy_(x)


def unshared_result(leaves: list[Any], tree: optree.PyTreeSpec) -> Any:
    """The result of a call without a program: what one part of it shares with another before is a copy.

    One of them may become an argument again, which a program overwrites.
    """
    owner: dict[int, int] = {}
    part_ids = [k for k, part in enumerate(tree.children() or [tree]) for _ in range(part.num_leaves)]
    unaliased = []
    for k, x in zip(part_ids, leaves, strict=True):
        if isinstance(x, Tensor):
            x = x.detach().clone() if owner.setdefault(autograd.storage_of(x), k) != k else x.detach()
        unaliased.append(x)
    return optree.tree_unflatten(tree, unaliased)


def _only_tensors(leaves: Iterable[Any]) -> list[Tensor]:
    return [x for x in leaves if isinstance(x, Tensor)]


def same_elements(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same elements in memory, with the same meaning."""
    same = autograd.storage_of(x) == autograd.storage_of(y) and x.storage_offset() == y.storage_offset()
    return same and meaning(x) == meaning(y)


def meaning(x: Tensor) -> tuple[Any, ...]:
    """The dtype, shape, strides and lazy flags with which a tensor views its memory."""
    return x.dtype, x.shape, x.stride(), x.is_conj(), x.is_neg()


def _unshared(x: Tensor, shared: set[int]) -> Tensor:
    return x.detach().clone() if autograd.storage_of(x) in shared else x.detach()
