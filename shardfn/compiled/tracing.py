"""A call of a step as a graph: what is traced, what must not be in it, and which arguments it overwrites."""

from __future__ import annotations

import ast
import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor, fx

from shardfn import callers
from shardfn.collectives import ops
from shardfn.collectives.capturing import capturing
from shardfn.collectives.ledger import attribution, unrecorded
from shardfn.collectives.ops import LIBRARY
from shardfn.collectives.scheduled import SCHEDULED, Scheduled, known
from shardfn.compat import autograd, dispatch, inductor
from shardfn.compat.replacing import replaced
from shardfn.compiled import regions
from shardfn.compiled.captured import StepProgram, meaning, same_elements
from shardfn.compiled.pure import overwrites, pure
from shardfn.compiled.stages import in_graph
from shardfn.compiled.watch import StepWatch, written
from shardfn.quoting import listed, short
from shardfn.shards.partition import with_leaves

_aten: Any = torch.ops.aten
_UPDATES = _aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default
_TRACES = 4  # of one call: the second has as inputs what the first overwrites elsewhere, and finds no more
TENSOR: Any = object()
"""The mark of a tensor among the leaves of a result."""


@dataclass(eq=False)
class TracedCall:
    """One traced call.

    Attributes:
        program: what is known of the step.
        at: which leaves of the arguments are tensors, the first inputs of the graph.
        graph: its operations.
        outside: tensors from elsewhere that the step overwrites.
        constants: these and all others from elsewhere, which the graph takes as its last inputs.
        overwritten: those of the constants that the step overwrites.
        works: the collectives of stages, which the graph knows by number.
        sent: of the other collectives, in order: the stage that they serve, and whether in a backward pass.
        tree: structure of the result.
        results: its leaves, with a mark in place of tensors.
        traced, text: its operations as traced, and as they are compiled, to compare with those of another call.
        collectives: what ranks compare.
    """

    program: StepProgram
    at: list[int]
    graph: fx.GraphModule
    outside: list[Tensor]
    constants: list[Tensor]
    works: list[Scheduled]
    sent: list[tuple[str, bool]]
    tree: optree.PyTreeSpec
    results: list[Any]
    traced: str = ""
    text: str = ""
    collectives: list[str] = field(default_factory=list)
    overwritten: list[Tensor] = field(default_factory=list)

    @classmethod
    def of_call(cls, program: StepProgram, leaves: list[Any], outside: Sequence[Tensor] = ()) -> TracedCall:
        """Traces a call; `outside` are tensors from elsewhere that it is known to overwrite.

        Raises:
            RuntimeError: the step does what a graph cannot hold, or returns something else than at the first call.
        """
        outside = list(outside)
        for _ in range(_TRACES):
            traced, more = cls._trace_once(program, leaves, outside)
            if not more:
                return traced
            outside += {id(x): x for x in more}.values()  # what is overwritten elsewhere becomes an input
        raise _foreign(program, more[0])

    @classmethod
    def _trace_once(
        cls, program: StepProgram, leaves: list[Any], outside: list[Tensor]
    ) -> tuple[TracedCall, list[Tensor]]:
        """Traces once with these tensors from elsewhere as inputs; also returns others that it overwrites."""
        tensor_indices = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        runs: list[tuple[_TraceWatch, list[Any], optree.PyTreeSpec]] = []

        def flat(*tensors: Tensor) -> list[Tensor]:
            watch = _TraceWatch(program.name, tensors, program.device)
            watch.known = list(zip(outside, tensors[len(tensor_indices) :], strict=True))
            with watch, in_graph(), _random_state(watch), _memory(program.name):
                results, tree = program.step(with_leaves(leaves, tensor_indices, tensors[: len(tensor_indices)]))
            results = [watch.traced_input(x) for x in results]
            runs.append((watch, results, tree))
            return [x for x in results if isinstance(x, Tensor)]

        try:
            with unrecorded():
                graph = inductor.trace_operations(flat, [*(leaves[i] for i in tensor_indices), *outside])
        except inductor.needs_numbers() as error:
            raise RuntimeError(
                f"{program.name}: the step does what needs numbers on the host, and a step that is traced has none: "
                f"{short(str(error), 300)}"
            ) from error
        ((watch, outputs, tree),) = runs
        program.refuse_results(leaves, outputs, tree)
        results = [TENSOR if isinstance(x, Tensor) else x for x in outputs]
        lifted = _lift(graph)
        constants = [*outside, *lifted]
        places = [node for node in graph.graph.nodes if node.op == "placeholder"][len(tensor_indices) + len(outside) :]
        for x, place in zip(lifted, places, strict=True):
            if _overwritten(place):
                watch.overwritten.append(x)
            # Torch takes what `lift_fresh` is given for new, and an array of NumPy is not.
            fresh = [user for user in place.users if user.target is _aten.lift_fresh_copy.default]
            if any(map(_overwritten, fresh)) and not x.untyped_storage().resizable():
                raise _foreign(program, x)
        regions.unaliased(graph.graph)
        traced = regions.graph_text(graph.graph)
        parts = program, tensor_indices, graph, list(outside), constants, watch.works, watch.sent, tree, results, traced
        return cls(*parts), watch.overwritten

    def schedule(self) -> None:
        """Orders the operations, and writes results that become arguments into these.

        Raises:
            RuntimeError: the step overwrites an argument that it does not return, or that shares memory with another.
        """
        with unrecorded():
            functional = pure(self.graph)
        self.constants += _lift(functional)  # what decompositions have made
        graph = functional.graph
        regions.uncloned(graph)
        self._carry(graph)
        unscheduled = [node for node in graph.nodes if regions.is_collective(node) and node.target is not SCHEDULED]
        for node, serves in zip(unscheduled, self.sent, strict=True):
            node.meta["serves"] = serves
        regions.simplified(graph)
        self.collectives = [_collective_text(node) for node in graph.nodes if regions.is_collective(node)]
        self.graph, self.text = fx.GraphModule({}, graph), regions.graph_text(graph)

    def _carry(self, graph: fx.Graph) -> None:
        """Writes results into the arguments that they become; the others stay results."""
        program, carried = self.program, self.program.roles.carried
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        (output,) = (node for node in graph.nodes if node.op == "output")
        written = {node.args[0]: node for node in graph.nodes if node.target is _aten.copy_.default}
        for i, node in zip(self.at, inputs, strict=False):
            if node in written and i not in carried:
                raise program.overwrites(i)
        self.overwritten = [
            x for x, node in zip(self.constants, inputs[len(self.at) :], strict=True) if node in written
        ]
        result_index = {j: k for k, j in enumerate(j for j, x in enumerate(self.results) if x is TENSOR)}
        results: list[Any] = list(output.args[0])
        overwritten = {inputs[self.at.index(i)] for i in carried}
        returned = set(range(len(results))) - {result_index[j] for j in carried.values()}
        for k in returned:
            if isinstance(results[k], fx.Node) and regions.origin(results[k]) in overwritten:
                with graph.inserting_before(output):  # before it is overwritten
                    results[k] = _with_meta_of(graph.call_function(_aten.clone.default, (results[k],)), results[k])
        writes = []
        for i, j in carried.items():
            argument, result = inputs[self.at.index(i)], results[result_index[j]]
            write = written.pop(argument, None)
            if result in (write, argument):
                continue  # in place, or left as it was
            if write is not None:  # by something that is not the result
                write.replace_all_uses_with(write.args[1])
                graph.erase_node(write)
            with graph.inserting_before(output):
                if regions.origin(result).op == "placeholder":  # which may be overwritten before it is read
                    result = _with_meta_of(graph.call_function(_aten.clone.default, (result,)), result)
                writes.append((argument, result))
        for argument, result in writes:
            with graph.inserting_before(output):
                _with_meta_of(graph.call_function(_aten.copy_.default, (argument, result)), argument)
        dropped = {result_index[j] for j in carried.values()}
        output.args = ([None if k in dropped else x for k, x in enumerate(results)],)

    def difference(self, other: TracedCall) -> str:
        """Returns how another, unscheduled trace of the step differs, as a message; empty if nothing."""
        if self.traced == other.traced and all(map(_same_elements, self.constants, other.constants)):
            return ""
        other.schedule()
        pairs = zip(self.text.split("\n"), other.text.split("\n"), strict=False)
        previous, current = next(((a, b) for a, b in pairs if a != b), ("", ""))
        if self.text == other.text and all(map(_same_elements, self.constants, other.constants)):
            return ""
        if current:
            return f"{short(current, 200)}, and at the last call {short(previous, 200)}"
        different = [x for x, y in zip(self.constants, other.constants, strict=False) if not _same_elements(x, y)]
        return f"the same with other tensors from elsewhere, of shapes {listed([list(x.shape) for x in different])}"


def _same_elements(a: Tensor, b: Tensor) -> bool:
    """Whether tensors from elsewhere are the same, or numbers that the step writes out."""
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all()))


class _TraceWatch(StepWatch):
    """The watch over a step that is traced, whose tensors have no numbers.

    Attributes:
        sent: the stage of each collective that is none of a stage's own, and whether it belongs to a backward pass.
        known: tensors from elsewhere that are inputs of the graph, with what is traced for them.
        overwritten: other tensors from elsewhere that the step overwrites.
        reset: whether the state of random numbers was set.
    """

    traces = True

    def __init__(self, name: str, inputs: Iterable[Tensor], device: torch.device) -> None:
        super().__init__(name, inputs, device)
        self.sent: list[tuple[str, bool]] = []
        self.known: list[tuple[Tensor, Tensor]] = []
        self.overwritten: list[Tensor] = []
        self.reset = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not dispatch.is_op(func):
            raise RuntimeError(f"{self.name}: a compiled step cannot hold {func} (at {callers.caller()})")
        if func.namespace == "profiler":
            with dispatch.outside_modes():
                return func(*args, **kwargs)
        if self.known:
            args, kwargs = optree.tree_map(self.traced_input, (args, kwargs))
        if func in _UPDATES and args[3] is not None and args[5]:  # batch norm, which trains and has running statistics
            # Inductor runs this one in their place, and its schema says what it overwrites.
            results = self.__torch_dispatch__(_aten._native_batch_norm_legit.default, types, args)
            return (
                (*results, args[0].new_empty(0, dtype=torch.uint8))
                if func is _aten.cudnn_batch_norm.default
                else results
            )
        tensors = [x for x in optree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func._schema.is_mutable and tensors and not any(map(dispatch.fake, tensors)):
            return self._elsewhere(func, args, kwargs)
        if self.reset and torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(
                f"{self.name}: {func.name()} at {callers.caller()} draws random numbers after their state was set, "
                f"as by torch.manual_seed or torch.utils.checkpoint, which a compiled step does not repeat. Use "
                f"stage(..., remat=True), or checkpoint(..., preserve_rng_state=False) if it draws none"
            )
        for x in tensors:
            if inductor.traced_elsewhere(x):
                raise RuntimeError(
                    f"{self.name}: {func.name()} at {callers.caller()} uses a tensor of shape {list(x.shape)} that "
                    f"an earlier call kept in a list, a cache or an attribute: return it, and pass it to the next call"
                )
        if any(map(dispatch.fake, tensors)) or torch.Tag.nondeterministic_seeded in func.tags:
            self._refuse(func, args, kwargs, tensors)
        if func._schema.is_mutable and torch.Tag.nondeterministic_seeded in func.tags and len(tensors) == 1:
            (x,) = tensors
            return x.copy_(_DRAWN(x.shape, x.stride(), x.dtype, x.device, str(func), repr(args[1:])))
        if func.namespace == LIBRARY.ns:
            inductor.keep(func)
        if func.namespace == LIBRARY.ns and func is not SCHEDULED:
            backward = autograd.inside_backward() if attribution.backward is None else attribution.backward
            self.sent.append((attribution.stage, backward))
        return func(*args, **kwargs)

    def traced_input(self, x: Any) -> Any:
        """Returns the traced input for a tensor from elsewhere, or an alias such as `x.data`; others unchanged."""
        if isinstance(x, Tensor) and not dispatch.fake(x):
            for tensor, traced in self.known:
                if x is tensor or _same_memory(x, tensor):
                    return traced
        return x

    def _elsewhere(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Notes which tensors from elsewhere an operation would overwrite now; the step is traced again with them."""
        for x in written(func, args, kwargs, Tensor):
            if x._base is not None:
                raise RuntimeError(
                    f"{self.name}: {func.name()} at {callers.caller()} overwrites a part of a tensor of shape "
                    f"{list(x._base.shape)} from elsewhere: pass that tensor as an argument, and return it"
                )
            self.overwritten.append(x)
        return args[0] if func._schema.returns else None

    def finish(self, results: Any) -> None:
        """Nothing: a graph keeps its tensors."""


# --- random numbers ---

_LIBRARY = torch.library.Library("shardfn_random", "FRAGMENT")
_LIBRARY.define(
    "drawn(SymInt[] size, SymInt[] stride, ScalarType dtype, Device device, str op, str args) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def _random_like(size: Any, stride: Any, dtype: torch.dtype, device: torch.device, op: str, args: str) -> Tensor:
    """The random numbers that an in-place operation, such as `aten.bernoulli_.float`, draws in this layout.

    The same operation on new tensors fills contiguous ones.
    """
    out = torch.empty_strided(size, stride, dtype=dtype, device=device)
    _, name, overload = op.split(".")
    getattr(getattr(_aten, name), overload)(out, *ast.literal_eval(args))
    return out


_LIBRARY.impl("drawn", _random_like, "CompositeExplicitAutograd")
torch.library.register_fake(
    "shardfn_random::drawn",
    lambda size, stride, dtype, device, op, args: torch.empty_strided(size, stride, dtype=dtype, device=device),
    lib=_LIBRARY,
)
_DRAWN: Any = torch.ops.shardfn_random.drawn.default


@contextlib.contextmanager
def _random_state(watch: _TraceWatch) -> Iterator[None]:
    """Notes whether the state of torch's random numbers is set, which a graph would not do again."""
    names = ("set_rng_state", "set_rng_state_all", "manual_seed", "manual_seed_all", "seed", "seed_all")
    module = torch.get_device_module(watch.device)
    places = torch, torch.random, module, getattr(module, "random", module)

    def noting(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            watch.reset = watch.reset or capturing() is watch  # and not another thread's
            return original(*args, **kwargs)

        return run

    with contextlib.ExitStack() as stack:
        for module_to_patch in places:
            noting_functions = {
                name: noting(getattr(module_to_patch, name)) for name in names if hasattr(module_to_patch, name)
            }
            stack.enter_context(replaced(module_to_patch, **noting_functions))
        yield


@contextlib.contextmanager
def _memory(name: str) -> Iterator[None]:
    """Refuses to give a tensor other memory, which no operation shows: the graph would go on with the old one."""
    original: Any = torch._C.TensorBase.data

    def put(tensor: Tensor, source: Tensor) -> None:
        if capturing() is not None and not (dispatch.fake(tensor) and same_elements(tensor, source)):
            raise RuntimeError(
                f"{name}: x.data = y at {callers.caller()} gives a tensor other memory, which a compiled step cannot "
                f"hold: write x.copy_(y)"
            )
        original.__set__(tensor, source)

    torch.Tensor.data = property(original.__get__, put)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor.data


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


def _foreign(program: StepProgram, x: Tensor) -> RuntimeError:
    return RuntimeError(
        f"{program.name}: the step overwrites a tensor of shape {list(x.shape)} in memory that is not torch's, such as "
        f"an array of NumPy, or that is another in each call: overwrite a clone() of it, or a tensor made outside"
    )


def _same_memory(x: Tensor, y: Tensor) -> bool:
    """As `same_elements`, of tensors with numbers, whose memory may have several storages."""
    strided = x.layout is y.layout is torch.strided and x.device == y.device
    return strided and x.data_ptr() == y.data_ptr() != 0 and meaning(x) == meaning(y)


def _overwritten(place: fx.Node) -> bool:
    """Whether a graph overwrites one of its inputs, or a part of it by a view."""
    aliases = [place]
    for alias in aliases:
        for user in alias.users:
            if user.op == "call_function" and user.target is not operator.getitem and alias in overwrites(user):
                return True
            if regions.is_free(user):
                aliases.append(user)
    return False


def _with_meta_of(node: fx.Node, other: fx.Node) -> fx.Node:
    node.meta["val"] = other.meta["val"]
    return node


def _collective_text(node: fx.Node) -> str:
    """A collective as ranks compare it."""
    if node.target is SCHEDULED:
        return str(known(node.args[1]))  # type: ignore[arg-type]
    op: Any = node.target
    x, *statics = node.args
    names = [argument.name for argument in op._schema.arguments]
    name = op._schema.name.rpartition("::")[2]
    return f"{name} of {ops.describe_call(name, x.meta['val'], dict(zip(names[1:], statics, strict=True)))}"  # type: ignore[union-attr]
