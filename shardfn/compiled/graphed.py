"""`cuda_graph`: a whole training step as one graph, which the host launches at once."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.collectives.agree import agree, failing_together
from shardfn.collectives.capturing import capturing, current
from shardfn.compat import dispatch, dynamo, functorch
from shardfn.compat.replacing import replaced
from shardfn.compiled.captured import Captured, Donated, Roles, StepProgram, captured, unshared_result
from shardfn.compiled.surroundings import captured_values, changed, unchanged_values
from shardfn.debugging import KINDS, debugging
from shardfn.mesh.scope import current_mesh, mesh_of
from shardfn.mesh.spec import dotted
from shardfn.quoting import listed, short
from shardfn.shards.layout import flat_shards
from shardfn.tracebacks import api_boundary
from shardfn.transforms.autodiff import name_of
from shardfn.transforms.checking import check_setting

F = TypeVar("F", bound=Callable[..., Any])

WARM_UP = 3  # calls in which a result may become an argument, which shows its role
MOST = 8  # graphs of one step
NTH_CALL = "{} call with arguments of this kind"
ALIKE = (
    "the arguments",
    "Each kind of shapes, strides, dtypes and structure gets a program of its own, on all ranks in the same calls: pad "
    "batches to a few lengths, and drop or pad a last batch with fewer rows",
)
_NUMBERS = {int: torch.int64, float: torch.float64}


@api_boundary
def cuda_graph(step: F, /, *, mesh: DeviceMesh | None = None) -> F:
    """The step as one graph: after a few calls the host launches all its work at once, in place of each operation.

    This pays for small models, whose operations take less time on the device than the host needs to launch them. Three
    calls run eagerly, and the third is watched. The fourth is captured, and each call from then on copies new
    arguments to where the graph reads them, and replays it. Arguments of other shapes, dtypes or structure get a graph
    of their own, in the same way. On the CPU there is no graph: the step runs, with the same checks, of which a debug
    mode leaves out those that look at operations.

    What the step returns, and the program passes back in the next call, is *carried*: parameters and optimizer state.
    It stays in the graph's memory and is not copied. From the fourth call on, carried arguments are donated: each use
    of one after the call is a RuntimeError. Other results are tensors of their own.

    A number in a carried tree that changes from call to call, such as an optimizer's step count, becomes a 0-d tensor
    on the device, int64 or float64. Any other number is a constant: a call with
    another one is an error.

    Args:
        step: a function of trees of tensors on one device, such as `step(params, state, batch)`, which returns such
            trees: a gradient by `shard_map`, and an optimizer's step. Arguments must not require gradients.
        mesh: the mesh whose ranks capture together; default: those of the flat shards among the arguments.

    Returns:
        The function with the same arguments and results. Ranks must call it alike: they compare before they capture,
        and an error on one rank is raised on all. Results have no graph of autograd.

    Raises:
        ValueError: a number among the arguments has changed; there is no mesh, or ranks differ.
        TypeError: an argument is not a tensor, a number or another constant; or a schedule cannot take a tensor.
        RuntimeError: the step reads a result on the host, copies between host and device, passes another number to an
            operation than at the call before, draws from a generator of its own, or keeps anything on the host or on
            disk; a carried argument is used again; a debug mode is on; more than 8 graphs would be made.

    Example:
        ``step = sf.cuda_graph(step)``, then ``params, state, loss = step(params, state, batch)`` for each batch
    """
    return Graphs(step, mesh).wrapped()  # type: ignore[return-value]


class Graphs:
    """The graphs of one step, by the kind of its arguments.

    Attributes:
        warm_up: calls that run eagerly; the last is the rehearsal.
        settled: the call in which the step has been found to do the same as in the call before.
        roles: which results become arguments, by the structure of the arguments.
        first: the numbers among the arguments and the result of the last call, by structure, until roles are known.
        programs: by the kind of arguments.
        earlier: programs from before their roles were known, by structure.
    """

    caller, warm_up, settled = "cuda_graph", 3, 4

    def __init__(self, step: Callable[..., Any], mesh: DeviceMesh | None) -> None:
        self.step, self.mesh, self.name = step, mesh, f"{self.caller}({name_of(step)})"
        self.roles: dict[optree.PyTreeSpec, Roles] = {}
        self.first: dict[optree.PyTreeSpec, tuple[list[Any], Any]] = {}
        self.programs: dict[Any, StepProgram] = {}
        self.earlier: dict[optree.PyTreeSpec, StepProgram] = {}
        self.stream: Any = None
        self.pool: Any = None

    def wrapped(self) -> Callable[..., Any]:
        """The step by graphs."""

        @api_boundary
        @functools.wraps(self.step)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.called(args, kwargs)

        return call

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the step, eagerly or by a graph."""
        if torch.compiler.is_compiling():
            dynamo.refuse_in_graph(f"{self.name} is one program already: call it outside of torch.compile")
        if functorch.inside_transform() or functorch.inside_forward_mode() or capturing() is not None:
            raise RuntimeError(
                f"{self.name}: it cannot be part of a transform or of another program: {self.caller} the whole once"
            )
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{self.name}: its memory is written to again and again: use no_grad, not inference_mode"
            )
        leaves, tree = optree.tree_flatten((args, kwargs))
        self._refuse(leaves, tree)
        roles = self._roles(leaves, tree, [*args, *kwargs.values()])
        devices = [x.device for x in leaves if isinstance(x, Tensor)]
        device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
        for i, dtype in roles.lifted.items():
            if not isinstance(leaves[i], Tensor):
                leaves[i] = torch.full((), leaves[i], dtype=dtype, device=device)
        program = self._program(leaves, tree, roles, device, args, kwargs)
        self._refuse_numbers(program, leaves)
        program.calls += 1
        self._refuse_surroundings(program)
        if program.captured is not None:
            return program.captured.run(leaves)
        if program.calls > self.warm_up:
            captured_call = self._captured(program, leaves, args, kwargs)
            result = captured_call.run(leaves, first=True)
            program.captured = captured_call
        else:
            with replaced(current, prepares=True):
                result = self._warm_up(program, leaves)
        if tree not in self.roles and program.calls <= WARM_UP:
            self.first[tree] = [x if type(x) in _NUMBERS else None for x in leaves], result
        return result

    # --- arguments ---

    def _refuse(self, leaves: list[Any], tree: optree.PyTreeSpec) -> None:
        for i, x in enumerate(leaves):
            if type(x) is Donated:
                raise RuntimeError(
                    f"{self.name}: {_label(self.step, tree, i)} was given to an earlier call, which has overwritten "
                    f"it: pass what that call returned, params, state, loss = step(params, state, batch)"
                )
            if isinstance(x, Tensor):
                if not dispatch.ordinary(x):
                    raise TypeError(
                        f"{self.name}: {_label(self.step, tree, i)} is a {type(x).__name__}, and a program takes plain "
                        f"tensors: pass x.to_local() of a DTensor"
                    )
                if x.requires_grad:
                    raise RuntimeError(
                        f"{self.name}: {_label(self.step, tree, i)} requires a gradient, and a program cannot be "
                        f"differentiated: pass x.detach(), and take gradients inside the step"
                    )
            elif type(x).__hash__ is None or isinstance(x, torch.Generator):
                raise TypeError(
                    f"{self.name}: {_label(self.step, tree, i)} is a {type(x).__name__}: a program takes trees of "
                    f"tensors, such as torch.from_numpy(x), and constants"
                )

    def _roles(self, leaves: list[Any], tree: optree.PyTreeSpec, values: list[Any]) -> Roles:
        """The roles of results, which show when the program passes back what the first call returned."""
        if tree in self.roles:
            return self.roles[tree]
        if tree not in self.first:
            return Roles()
        numbers, result = self.first.pop(tree)
        carried, lifted = _carried(values, result), {}
        if not carried:
            return Roles()
        for i in carried:
            x = leaves[i]
            if type(x) in _NUMBERS and x != numbers[i]:
                lifted[i] = _NUMBERS[type(x)]
            elif isinstance(x, Tensor) and x.ndim == 0 and x.dtype in _NUMBERS.values():
                lifted[i] = x.dtype  # an earlier call made it of a number, which may come again
        roles = {i: j for i, j in carried.items() if isinstance(leaves[i], Tensor) or i in lifted}
        self.roles[tree] = Roles(roles, lifted, set(carried) - set(roles))
        for key in [key for key in self.programs if key[0] == tree]:
            self.earlier[tree] = self.programs.pop(key)
        return self.roles[tree]

    def _kind(self, x: Any) -> Any:
        """The properties of an argument's leaf that select its program."""
        return (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else type(x) if type(x) in _NUMBERS else (x,)

    def _program(
        self, leaves: list[Any], tree: optree.PyTreeSpec, roles: Roles, device: torch.device, args: Any, kwargs: Any
    ) -> StepProgram:
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        key = tree, tuple(map(self._kind, leaves)), torch.is_grad_enabled(), autocast
        program = self.programs.get(key)
        if program is None:
            if len(self.programs) >= MOST:
                raise RuntimeError(
                    f"{self.name}: there are {MOST} programs already, each for different shapes or constants, and "
                    f"these are new. Pad batches to a few lengths"
                )

            def run(values: list[Any]) -> tuple[list[Any], optree.PyTreeSpec]:
                args, kwargs = optree.tree_unflatten(tree, values)
                # Backward would run on a thread of its own, which no watch sees, and a capture does not guard.
                with torch.autograd.set_multithreading_enabled(False), _without_cache():
                    return optree.tree_flatten(self.step(*args, **kwargs))

            earlier = self.earlier.pop(tree, None)
            known = earlier.numbers if earlier else {}
            numbers = {i: known.get(i, x) for i, x in enumerate(leaves) if type(x) in _NUMBERS}
            label = functools.partial(_label, self.step, tree)
            if earlier is None:  # new to one rank alone, it would wait for others that run theirs
                self._compare_with_ranks(key, label, leaves, list(self._meshes(args, kwargs)))
            program = StepProgram(self.name, run, device, roles, numbers, label, calls=int(earlier is not None))
            self.programs[key] = program
        return program

    def _compare_with_ranks(
        self, key: Any, label: Callable[[int], str], leaves: list[Any], meshes: list[DeviceMesh]
    ) -> None:
        """Raises an error on all ranks unless these arguments are new to all of them."""
        tree, kinds = key[:2]
        previous = next((known for other, known, *_ in reversed(self.programs) if other == tree), kinds)
        new = [f"{label(i)}: {_argument_text(leaves[i])}" for i, kind in enumerate(kinds) if kind != previous[i]]
        subject, advice = ALIKE
        advice = f"New here: {listed(new, 3)}. {advice}" if new else advice
        agree([NTH_CALL.format("first")], meshes, self.name, subject=(subject, advice))

    def _refuse_numbers(self, program: StepProgram, leaves: list[Any]) -> None:
        """Raises ValueError for a number that was another at the first call."""
        for i, number in program.numbers.items():
            if repr(leaves[i]) != repr(number):
                fix = "Pass it as a 0-d tensor on the device"
                if i in program.roles.fixed:
                    fix = (
                        "The step returned it as it was, at first: let a schedule or a 0-d tensor change it; if the "
                        "host decides when it changes, call the step as it is"
                    )
                raise ValueError(
                    f"{self.name}: {program.labels(i)} is {short(leaves[i], 40)}, and was {short(number, 40)}: a "
                    f"program keeps numbers as constants. {fix}"
                )

    def _refuse_surroundings(self, program: StepProgram) -> None:
        """Raises RuntimeError if the step's functions read something that has changed since the graph was made.

        What changed between two calls that did the same is none of the graph's.
        """
        if program.calls == self.settled - 1:
            program.around = captured_values(self.step)
        elif program.calls == self.settled:
            program.around = unchanged_values(program.around, captured_values(self.step))
        elif change := changed(program.around, self.step):
            raise RuntimeError(
                f"{self.name}: {change}: a program keeps what the step read when the program was made. Pass numbers as "
                f"0-d tensor arguments, write into the old tensor, or make a new program by "
                f"shardfn.{self.name.partition('(')[0]}(step)"
            )

    # --- calls ---

    def _warm_up(self, program: StepProgram, leaves: list[Any]) -> Any:
        """Runs the step eagerly: communicators connect, and buffers are allocated."""
        rehearses = program.calls == self.warm_up
        if rehearses:
            self._refuse_unfit(program, leaves)
            rehearses = program.device.type != "cpu" or not host_checks()
        run = program.rehearse if rehearses else program.step
        if program.device.type == "cpu":
            results, tree = run(leaves)
        else:
            module = torch.get_device_module(program.device)
            current = module.current_stream(program.device)
            self.stream = self.stream or module.Stream(program.device)
            self.stream.wait_stream(current)
            with module.stream(self.stream):
                results, tree = run(leaves)
            current.wait_stream(self.stream)
            for x in results:
                if isinstance(x, Tensor) and x.device.type == program.device.type:
                    x.record_stream(current)
        return unshared_result(results, tree)

    def _captured(self, program: StepProgram, leaves: list[Any], args: Any, kwargs: Any) -> Captured:
        """Captures a call on all ranks, or raises on all."""
        meshes = list(self._meshes(args, kwargs))
        described = [
            f"{program.labels(i)}: {x.dtype}" if isinstance(x, Tensor) else f"{program.labels(i)}: {x!r}"
            for i, x in enumerate(leaves)
        ]
        with failing_together(meshes, self.name):
            self._refuse_unfit(program, leaves)
        graph_number = 1 + sum(other.captured is not None for other in self.programs.values())
        agree([f"graph {graph_number}", *described], meshes, self.name)
        if self.pool is None and program.device.type != "cpu":
            self.pool = torch.get_device_module(program.device).graph_pool_handle()
        with failing_together(meshes, self.name):
            captured_call = captured(program, leaves, self.stream, self.pool)
        agree(["captured"], meshes, self.name)
        return captured_call

    def _meshes(self, args: Any, kwargs: Any) -> Iterator[DeviceMesh]:
        """The meshes whose ranks capture together."""
        grids = dict.fromkeys(flat.layout.grid for flat in flat_shards((args, kwargs)))
        mesh = self.mesh or current_mesh()
        if mesh is not None:
            yield mesh
            return
        if not grids and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(f"{self.name}: the arguments contain no flat shard: pass {self.caller}(step, mesh=...)")
        for grid in grids:
            yield mesh_of(grid, self.name)

    def _refuse_unfit(self, program: StepProgram, leaves: list[Any]) -> None:
        """Raises RuntimeError for what a graph cannot do, before anything runs."""
        self._refuse_away(program, leaves)
        kind = program.device.type
        if kind != "cpu" and not hasattr(torch.get_device_module(program.device), "CUDAGraph"):
            raise RuntimeError(f"{self.name}: torch has no graphs for {kind}. Call the eager step")
        if kind != "cpu" and (checks := host_checks()):
            raise RuntimeError(
                f"{self.name}: {listed(checks)} checks each call on the host, and a graph runs without it: leave it off"
            )

    def _refuse_away(self, program: StepProgram, leaves: list[Any]) -> None:
        """Raises RuntimeError for arguments that are not on the device."""
        kind = program.device.type
        elsewhere = [program.labels(i) for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.device.type != kind]
        if elsewhere:
            raise RuntimeError(
                f"{self.name}: {listed(elsewhere)} is on the CPU, and the graph on {kind}: move it there before "
                f"the step"
            )


def host_checks(kinds: Iterable[str] = KINDS) -> list[str]:
    """The checks that are on, of these debug modes and others, of which the host makes some in each call."""
    enabled = [f"debug({name}=True)" for name in kinds if getattr(debugging, name)]
    enabled += ["SHARDFN_CHECK=always"] if check_setting() == "always" else []
    return [*enabled, *(["torch.autograd.detect_anomaly"] if torch.is_anomaly_enabled() else [])]


def _argument_text(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)} with strides {list(x.stride())}" if isinstance(x, Tensor) else short(x, 40)


def _subtrees(tree: Any, structure: optree.PyTreeSpec, first: int = 0) -> Iterator[tuple[int, Any, optree.PyTreeSpec]]:
    """A tree and those in it, with the number of the first leaf, from the top."""
    yield first, tree, structure
    if not structure.is_leaf():
        for child, inner in zip(optree.tree_flatten_one_level(tree)[0], structure.children(), strict=True):
            yield from _subtrees(child, inner, first)
            first += inner.num_leaves


def _carried(values: list[Any], result: Any) -> dict[int, int]:
    """The leaves of arguments that are those of a result: the same objects, or trees with the same tensors."""
    returned, structure = optree.tree_flatten(result)
    top, index = [(0, result)], 0
    for part in result if type(result) is tuple else ():
        top.append((index, part))
        index += len(optree.tree_leaves(part))
    known: dict[Any, int] = {}
    for index, part, inner in _subtrees(result, structure):
        known.setdefault((inner, _tensor_ids(returned[index : index + inner.num_leaves])), index)
        if not inner.is_leaf():
            known.setdefault(id(part), index)
    matches: dict[int, int] = {}

    def match_subtree(value: Any, inner: optree.PyTreeSpec, start: int) -> None:
        size, tensors = inner.num_leaves, _tensor_ids(optree.tree_leaves(value))
        match = known.get((inner, tensors)) if tensors else None if inner.is_leaf() else known.get(id(value))
        if match is not None:
            matches.update((start + k, match + k) for k in range(size))
        elif not inner.is_leaf():
            for child, part in zip(optree.tree_flatten_one_level(value)[0], inner.children(), strict=True):
                match_subtree(child, part, start)
                start += part.num_leaves

    start = 0
    for value in values:
        inner = optree.tree_structure(value)
        match = next((index for index, part in top if value is part), None)
        if match is None:
            match_subtree(value, inner, start)
        else:
            matches.update((start + k, match + k) for k in range(inner.num_leaves))
        start += inner.num_leaves
    return matches


def _tensor_ids(leaves: list[Any]) -> tuple[tuple[int, int], ...]:
    return tuple((i, id(x)) for i, x in enumerate(leaves) if isinstance(x, Tensor))


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Autocast without its cache: a graph would keep what an earlier call has cast."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _label(step: Callable[..., Any], tree: optree.PyTreeSpec, i: int) -> str:
    """The name of an argument's leaf: `state.step`."""
    accessor = tree.accessors()[i]
    (side, key), rest = (entry.entry for entry in accessor[:2]), accessor[2:]
    if side == 0:
        try:
            names = list(inspect.signature(step).parameters)
        except (TypeError, ValueError):
            names = []
        key = names[key] if key < len(names) else f"argument {key}"
    return ".".join(filter(None, [str(key), dotted(rest)]))
