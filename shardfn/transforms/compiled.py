"""`compile`: a whole training step as one program of compiled regions and collectives."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import optree
import torch
import torch.distributed as dist
from torch import Tensor, fx

from shardfn.collectives import late_checks, ops
from shardfn.collectives.agree import agree, failing_together
from shardfn.collectives.capturing import Watch, written
from shardfn.collectives.ledger import attribution, unrecorded
from shardfn.collectives.ops import LIBRARY
from shardfn.collectives.scheduled import SCHEDULED, Scheduled, known
from shardfn.compat import autograd, dispatch, inductor, modes
from shardfn.mesh import callsites
from shardfn.mesh.axes import known_axes
from shardfn.mesh.scope import scope
from shardfn.quoting import listed, short, short_errors
from shardfn.transforms import regions
from shardfn.transforms.captured import Form, Program, donate
from shardfn.transforms.graphed import Graphs, host_checks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

F = TypeVar("F", bound=Callable[..., Any])
_log = logging.getLogger("shardfn")
_aten: Any = torch.ops.aten


@short_errors
def compile(step: F, /, *, mesh: DeviceMesh | None = None) -> F:
    """The step as one compiled program: its operations are fused, and its collectives keep the schedule of the stages.

    The first call runs as it is, with all checks. The second is traced: the gradient, its reductions, clipping and the
    optimizer's step become one graph. Between collectives inductor compiles the operations, those of equal layers once.
    A gather starts while the stage before computes, and parameters are gathered again for backward, as without a
    compiler; so the program sends what the step sends, and needs no more memory. The third call is traced again, to
    find what differs between calls.

    As for `graphed`, what the step returns and the program passes back in the next call is *carried*: parameters and
    optimizer state. It is overwritten in place, and each use of a carried argument after the call is a RuntimeError. A
    number in a carried tree that changes from call to call, such as an optimizer's step count, becomes a 0-d tensor.
    All other numbers stay what they are at the first call. Arguments of other shapes, strides, dtypes or structure are
    compiled for themselves, which is logged.

    Args:
        step: a function of trees of tensors on one device, such as `step(params, state, batch)`, which returns such
            trees: a gradient by `shard_map`, and an optimizer's step. Arguments must not require gradients.
        mesh: the mesh whose ranks compile together; default: those of the flat shards among the arguments.

    Returns:
        The function with the same arguments and results. Ranks must call it alike: they compare their collectives
        before they compile, and an error on one rank is raised on all. Results have no graph of autograd.

    Raises:
        ValueError: a number among the arguments has changed; there is no mesh, or ranks differ.
        TypeError: an argument is not a tensor, a number or another constant; or a schedule cannot take a tensor.
        RuntimeError: the step reads a result on the host, copies between host and device, does something else at the
            next call, draws from a generator of its own, or keeps anything on the host or on disk; a carried argument
            is used again; a debug mode is on; more than 8 programs would be made.

    Example:
        ``step = sf.compile(step)``, then ``params, state, loss = step(params, state, batch)`` for each batch
    """
    return Programs(step, mesh).wrapped()  # type: ignore[return-value]


class Programs(Graphs):
    """The programs of one step, by the kind of its arguments."""

    caller, warm_up = "compile", 1

    def _kind(self, x: Any) -> Any:
        return (super()._kind(x), x.stride()) if isinstance(x, Tensor) else super()._kind(x)

    def _warm_up(self, program: Program, leaves: list[Any]) -> Any:
        found, tree = program.step(leaves)
        program.form = Form.of(found, tree)
        return optree.tree_unflatten(tree, [x.detach() if isinstance(x, Tensor) else x for x in found])

    def _refuse_unfit(self, program: Program, leaves: list[Any]) -> None:
        self._refuse_away(program, leaves)
        if checks := host_checks():
            raise RuntimeError(f"{self.name}: {listed(checks)} checks each call on the host: leave it off")

    def _captured(self, program: Program, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        meshes = list(self._meshes(args, kwargs))
        with failing_together(meshes, self.name):
            self._refuse_unfit(program, leaves)
            traced = _Traced.of(program, leaves)
            traced.schedule()
            traced.meshes = meshes
            traced.scope = lambda: scope(meshes[0], known_axes(meshes[0])) if meshes else contextlib.nullcontext()
        for mesh in meshes:
            agree(traced.collectives, mesh, self.name, subject=_ALIKE)
        shapes = [
            list(x.shape) for i, x in enumerate(leaves) if isinstance(x, Tensor) and i not in program.roles.carried
        ]
        _log.info("%s: compiles for arguments of shapes %s", self.name, listed(shapes))
        # One process of a host compiles, and the others find what it made on disk. What is for a GPU is for that alone.
        apart = bool(meshes) and program.device.type == "cpu"
        for first in (True, False) if apart else (True,):
            with failing_together(meshes, self.name):
                if not apart or first is _first_of_host():
                    traced.compile()
            for mesh in meshes:
                agree(["compiled"], mesh, self.name)
        return traced


_ALIKE = (
    "the collectives of the step",
    "All ranks run the same stages and collectives in the same order: what they do must not depend on the rank",
)


def _first_of_host() -> bool:
    return int(os.environ.get("LOCAL_RANK", dist.get_rank() if dist.is_initialized() else 0)) == 0


@dataclass(eq=False)
class _Traced:
    """One traced call, and the program that it becomes.

    Attributes:
        program: what is known of the step.
        at: which leaves of the arguments are tensors, the first inputs of the graph.
        graph: its operations.
        constants: tensors from elsewhere, which the graph takes as its last inputs.
        works: the collectives of stages, which the graph knows by number.
        sent: of the other collectives, in order: the stage that they serve, and whether in a backward pass.
        tree: structure of the result.
        results: its leaves, with a mark in place of tensors.
        made: what operations have made while it was traced, and by which.
        text: its operations, to compare with those of another call.
        collectives: what ranks compare.
        meshes: whose ranks run it together.
        scope: the context of runs.
        function, source: the compiled program, and its text.
        times: how often it ran.
    """

    program: Program
    at: list[int]
    graph: fx.GraphModule
    constants: list[Tensor]
    works: list[Scheduled]
    sent: list[tuple[str, bool]]
    tree: optree.PyTreeSpec
    results: list[Any]
    made: list[tuple[weakref.ref[Tensor], str]]
    text: str = ""
    collectives: list[str] = field(default_factory=list)
    meshes: list[DeviceMesh] = field(default_factory=list)
    scope: Callable[[], Any] = contextlib.nullcontext
    function: Callable[[list[Any]], list[Any]] | None = None
    source: str = ""
    times: int = 0

    @classmethod
    def of(cls, program: Program, leaves: list[Any]) -> _Traced:
        """Traces a call.

        Raises:
            RuntimeError: the step does what a graph cannot hold, or returns something else than at the first call.
        """
        outside: list[Tensor] = []
        while True:
            traced, more = cls._of(program, leaves, outside)
            if not more:
                return traced
            outside += more  # what is overwritten elsewhere becomes an input

    @classmethod
    def _of(cls, program: Program, leaves: list[Any], outside: list[Tensor]) -> tuple[_Traced, list[Tensor]]:
        """One trace with these tensors from elsewhere as inputs, and those that it overwrites besides."""
        at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        more: list[Tensor] = []
        made: list[tuple[weakref.ref[Tensor], str]] = []
        works: list[Scheduled] = []
        sent: list[tuple[str, bool]] = []
        found: list[Any] = []
        trees: list[optree.PyTreeSpec] = []

        def flat(*tensors: Tensor) -> list[Tensor]:
            own = list(leaves)
            for i, x in zip(at, tensors, strict=False):
                own[i] = x
            watch = _Tracing(program.name, tensors, program.device)
            watch.known = {id(x): traced for x, traced in zip(outside, tensors[len(at) :], strict=True)}
            storages = [autograd.storage_of(x) for x in tensors]
            with watch, _random_state(watch):
                results, tree = program.step(own)
            if storages != [autograd.storage_of(x) for x in tensors]:
                raise RuntimeError(
                    f"{program.name}: the step gives an argument other memory, as x.data = y does: write x.copy_(y)"
                )
            results = [watch.known.get(id(x), x) for x in results]
            works.extend(watch.works)
            sent.extend(watch.sent)
            made.extend(watch.results)
            more.extend(watch.overwritten)
            found.extend(results)
            trees.append(tree)
            return [x for x in results if isinstance(x, Tensor)]

        try:
            with unrecorded():
                graph = inductor.traced(flat, [*(leaves[i] for i in at), *outside])
        except inductor.NEEDS_NUMBERS as error:
            raise RuntimeError(
                f"{program.name}: the step does what needs numbers on the host, and a step that is traced has none: "
                f"{short(str(error), 300)}"
            ) from error
        form = Form.of(found, trees[0])
        if program.form is not None and (difference := program.form.difference(form)):
            raise RuntimeError(f"{program.name}: the step returns {difference}: a program always returns the same")
        program.refuse_results(leaves, found)
        constants = [*outside, *_lift(graph)]
        results = [_TENSOR if isinstance(x, Tensor) else x for x in found]
        return cls(program, at, graph, constants, works, sent, trees[0], results, made), more

    def schedule(self) -> None:
        """Orders the operations, and writes results that become arguments into these.

        Raises:
            RuntimeError: the step overwrites an argument that it does not return, or that shares memory with another.
        """
        regions.unaliased(self.graph.graph)
        tensors = [node.meta["val"] for node in self.graph.graph.nodes if node.op == "placeholder"]
        with unrecorded():
            functional = inductor.functional(self.graph, tensors)
        self.constants += _lift(functional)  # what decompositions have made
        graph = functional.graph
        self._carry(graph)
        others = [node for node in graph.nodes if regions.is_collective(node) and node.target is not SCHEDULED]
        for node, serves in zip(others, self.sent, strict=True):
            node.meta["serves"] = serves
        regions.simplified(graph)
        self.collectives = [_collective(node) for node in graph.nodes if regions.is_collective(node)]
        self.graph, self.text = fx.GraphModule({}, graph), regions.described(graph)
        del functional
        gc.collect()
        kept = [(x, what) for reference, what in self.made if (x := reference()) is not None]
        self.made = []
        for x, what in kept:
            raise RuntimeError(
                f"{self.program.name}: a tensor of shape {list(x.shape)}, {what}, is kept when the step has returned, "
                f"in a list, a cache or an attribute, where it would have no numbers: return it"
            )

    def _carry(self, graph: fx.Graph) -> None:
        """Writes results into the arguments that they become; the others stay results."""
        program, carried = self.program, self.program.roles.carried
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        (output,) = (node for node in graph.nodes if node.op == "output")
        written = {node.args[0]: node for node in graph.nodes if node.target is _aten.copy_.default}
        for i, node in zip(self.at, inputs, strict=False):
            if node in written and i not in carried:
                raise RuntimeError(
                    f"{program.name}: the step overwrites {program.labels(i)}, and the program does not pass back what "
                    f"it returned for it: write params, state, loss = step(params, state, batch)"
                )
        place = {j: k for k, j in enumerate(j for j, x in enumerate(self.results) if x is _TENSOR)}
        results: list[Any] = list(output.args[0])
        overwritten = {inputs[self.at.index(i)] for i in carried}
        kept = set(range(len(results))) - {place[j] for j in carried.values()}
        for k in kept:
            if isinstance(results[k], fx.Node) and regions.origin(results[k]) in overwritten:
                with graph.inserting_before(output):  # before it is overwritten
                    results[k] = _like(graph.call_function(_aten.clone.default, (results[k],)), results[k])
        writes = []
        for i, j in carried.items():
            into, result = inputs[self.at.index(i)], results[place[j]]
            own = written.pop(into, None)
            if result in (own, into):
                continue  # in place, or left as it was
            if own is not None:  # by something that is not the result
                own.replace_all_uses_with(own.args[1])
                graph.erase_node(own)
            with graph.inserting_before(output):
                if regions.origin(result).op == "placeholder":  # which may be overwritten before it is read
                    result = _like(graph.call_function(_aten.clone.default, (result,)), result)
                writes.append((into, result))
        for into, result in writes:
            with graph.inserting_before(output):
                _like(graph.call_function(_aten.copy_.default, (into, result)), into)
        dropped = {place[j] for j in carried.values()}
        output.args = ([None if k in dropped else x for k, x in enumerate(results)],)

    def compile(self) -> None:
        """Compiles the program."""
        self.function, self.source = regions.program(self.graph.graph)
        for work in self.works:
            work.prepare()

    # --- runs ---

    def run(self, leaves: list[Any], first: bool = False) -> Any:
        """Runs the step on new arguments, and donates those that are carried."""
        assert self.function is not None, "it is compiled"
        program, carried = self.program, self.program.roles.carried
        if self.times == 1:
            with failing_together(self.meshes, program.name):
                self._compare(leaves)
        self.times += 1
        late_checks.look(program.device)
        inputs = [leaves[i].detach() for i in self.at]
        shared = [autograd.storage_of(x) for x in (*inputs, *self.constants)]
        for i in carried if len(set(shared)) < len(shared) else ():
            if shared.count(autograd.storage_of(leaves[i])) > 1:
                raise RuntimeError(
                    f"{program.name}: {program.labels(i)} shares memory with another argument, and the step overwrites "
                    f"it: pass a clone"
                )
        try:
            with self.scope(), torch.no_grad(), inductor.without_autocast():
                found = iter(self.function([*inputs, *self.constants]))
        except BaseException:  # some may be overwritten already
            for work in self.works:
                work.abandon()
            for i in carried:
                donate(leaves[i])
            raise
        if program.device.type != "cpu":
            late_checks.late_checks().close()
        results = [next(found) if x is _TENSOR else x for x in self.results]
        for i, j in carried.items():
            results[j] = leaves[i].detach()
            donate(leaves[i])
        if carried:
            torch.autograd.graph.increment_version([results[j] for j in carried.values()])
        return optree.tree_unflatten(self.tree, results)

    def _compare(self, leaves: list[Any]) -> None:
        """Raises RuntimeError if the step does something else than when it was traced."""
        other = _Traced.of(self.program, leaves)
        other.schedule()
        pairs = zip(self.text.split("\n"), other.text.split("\n"), strict=False)
        before, now = next(((a, b) for a, b in pairs if a != b), ("", ""))
        if self.text != other.text or not all(map(_same, self.constants, other.constants)):
            what = f"{short(now, 200)}, and at the last call {short(before, 200)}" if now else "other tensors"
            raise RuntimeError(
                f"{self.program.name}: the step does {what}: a compiled program always does the same. What the step "
                f"reads besides its arguments must not change: pass it as a 0-d tensor among the arguments"
            )


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether tensors from elsewhere are the same, or numbers that the step writes out."""
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all()))


_TENSOR: Any = object()


class _Tracing(Watch):
    """The watch over a step that is traced, whose tensors have no numbers.

    Attributes:
        sent: the stage of each collective that is none of a stage's own, and whether it belongs to a backward pass.
        known: inputs of the graph for tensors from elsewhere, by the ids of these.
        overwritten: other tensors from elsewhere that the step overwrites.
        reset: whether the state of random numbers was set.
        results: what operations have made, and by which.
    """

    def __init__(self, name: str, inputs: Iterable[Tensor], device: torch.device) -> None:
        super().__init__(name, inputs, device)
        self.traces = True
        self.sent: list[tuple[str, bool]] = []
        self.known: dict[int, Tensor] = {}
        self.overwritten: list[Tensor] = []
        self.reset = False
        self.results: list[tuple[weakref.ref[Tensor], str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            raise RuntimeError(f"{self.name}: a compiled step cannot hold {func} (at {callsites.caller()})")
        if func.namespace == "profiler":
            with modes.unseen():
                return func(*args, **kwargs)
        if self.known:
            args, kwargs = optree.tree_map(lambda x: self.known.get(id(x), x), (args, kwargs))
        tensors = [x for x in optree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func._schema.is_mutable and tensors and not any(map(dispatch.fake, tensors)):
            return self._elsewhere(func, args, kwargs)
        if self.reset and torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(
                f"{self.name}: {func.name()} at {callsites.caller()} draws random numbers after their state was set, "
                f"as by torch.manual_seed or in torch.utils.checkpoint, which a compiled step does not do again: use "
                f"stage(..., remat=True), or checkpoint(..., preserve_rng_state=False) around what draws none"
            )
        if func is _aten.pow.Scalar and isinstance(args[0], int) and not args[1].is_floating_point():
            raise RuntimeError(
                f"{self.name}: {func.name()} at {callsites.caller()} raises an integer to a power that has become a "
                f"tensor of integers, where negative powers are 0: write {float(args[0])} ** n"
            )
        for x in tensors:
            if inductor.traced_elsewhere(x):
                raise RuntimeError(
                    f"{self.name}: {func.name()} at {callsites.caller()} uses a tensor of shape {list(x.shape)} that "
                    f"an earlier call kept in a list, a cache or an attribute: return it, and pass it to the next call"
                )
        if any(map(dispatch.fake, tensors)) or torch.Tag.nondeterministic_seeded in func.tags:
            self._refuse(func, args, kwargs, tensors)
        if func.namespace == LIBRARY.ns:
            inductor.keep(func)
        if func.namespace == LIBRARY.ns and func is not SCHEDULED:
            backward = autograd.inside_backward() if attribution.backward is None else attribution.backward
            self.sent.append((attribution.stage, backward))
        result = func(*args, **kwargs)
        what = f"made by {func.name()}"
        self.results += [(weakref.ref(x), what) for x in optree.tree_leaves(result) if isinstance(x, Tensor)]
        return result

    def _elsewhere(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Notes which tensors from elsewhere an operation would overwrite now; the step is traced again with them."""
        for x in written(func, args, kwargs):
            if x._base is not None:
                raise RuntimeError(
                    f"{self.name}: {func.name()} at {callsites.caller()} overwrites a part of a tensor of shape "
                    f"{list(x._base.shape)} from elsewhere: pass that tensor as an argument, and return it"
                )
            if all(x is not other for other in self.overwritten):
                self.overwritten.append(x)
        return args[0] if args else None

    def finish(self, results: Any) -> None:
        """Nothing: a graph keeps its tensors."""


@contextlib.contextmanager
def _random_state(watch: _Tracing) -> Iterator[None]:
    """Notes whether the state of torch's random numbers is set, which a graph would not do again."""
    names = ("set_rng_state", "manual_seed", "seed")
    before = {(place, name): getattr(place, name) for place in (torch, torch.random) for name in names}

    def noting(plain: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            watch.reset = True
            return plain(*args, **kwargs)

        return run

    for (place, name), plain in before.items():
        setattr(place, name, noting(plain))
    try:
        yield
    finally:
        for (place, name), plain in before.items():
            setattr(place, name, plain)


def _lift(graph: fx.GraphModule) -> list[Tensor]:
    """Makes tensors from elsewhere the last inputs of a graph; returns them."""
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    lifted: dict[str, fx.Node] = {}
    constants: list[Tensor] = []
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        name = str(node.target)
        if name not in lifted:
            constant = getattr(graph, name)
            if not isinstance(constant, Tensor):
                raise RuntimeError(f"a compiled step cannot hold {type(constant).__name__}, as flex_attention makes it")
            with graph.graph.inserting_after(places[-1]) if places else graph.graph.inserting_before():
                lifted[name] = graph.graph.placeholder(f"constant{len(constants)}")
            lifted[name].meta["val"] = node.meta.get("val", constant)
            places.append(lifted[name])
            constants.append(constant)
        node.replace_all_uses_with(lifted[name])
        graph.graph.erase_node(node)
    graph.recompile()
    return constants


def _like(node: fx.Node, other: fx.Node) -> fx.Node:
    node.meta["val"] = other.meta["val"]
    return node


def _collective(node: fx.Node) -> str:
    """A collective as ranks compare it."""
    if node.target is SCHEDULED:
        return str(known(node.args[1]))  # type: ignore[arg-type]
    op: Any = node.target
    x, *statics = node.args
    names = [argument.name for argument in op._schema.arguments]
    name = op._schema.name.rpartition("::")[2]
    return f"{name} of {ops.described(name, x.meta['val'], dict(zip(names[1:], statics, strict=True)))}"  # type: ignore[union-attr]
