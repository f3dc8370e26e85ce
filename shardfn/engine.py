"""The schedule of stages on one mesh: what is gathered when, into which slot, and what flies in backward.

Forward of a call: wait for its parameters, start the next gather, run the function on views of the slot. Backward:
the same from the other end, then send the gradients on their way. The calls of a step form a tape, which backward
follows in reverse to gather ahead; nothing outlives the step, so another order is never wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor

from shardfn import compat
from shardfn.agree import agree
from shardfn.layout import Layout
from shardfn.ledger import here
from shardfn.link import Link, all_gather, link
from shardfn.mesh import current_mesh, known_axes, scope
from shardfn.reduction import Links, Reductions, Step, current_step
from shardfn.residency import Key, Ring, Slot
from shardfn.signature import Signature, Wire, Wires, wires_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_STAGES = (
    "the stages",
    "All ranks run the same stages in the same order: a branch around a stage goes the same way on every rank",
)
_numbers = itertools.count(1)
LONGEST = 4096  # calls on one tape, for a program that never asks for a gradient

Group = tuple[tuple[Layout, ...], tuple[Tensor, ...]]  # the shards of one stage


@dataclass(eq=False)
class Turn:
    """One call's place on the tape, and what gathering its parameters takes.

    Attributes:
        key: says what a slot must hold for it.
        slot: where its parameters are, or have to be again for its backward; None if it needs none.
        kept: whether the slot is its own until its backward.
        reads: whether its backward reads the parameters.
        done: whether its backward has run.
    """

    name: str
    wires: Wires
    shards: tuple[Tensor, ...]
    key: Key
    slot: Slot | None = None
    kept: bool = False
    reads: bool = True
    done: bool = False


class Tape:
    """The calls of one step that may see a backward, in order."""

    __slots__ = ("closed", "count", "kept", "number", "step", "turns")

    def __init__(self, step: Step | None) -> None:
        self.number = next(_numbers)  # what keys know it by: a reference would be a cycle, and keep gradients alive
        self.turns: list[Turn] = []
        self.count = 0  # of slots taken from the ring
        self.closed = False
        self.step = step
        self.kept: dict[Key, Slot] = {}


@dataclass
class Residuals:
    """What one run of a stage's function leaves for its gradient."""

    parameters: list[list[Tensor]]
    inputs: list[Tensor]
    outputs: list[Tensor]


class Call:
    """One call of a stage: what its backward needs beside tensors. No pytree node, so transforms pass it through."""

    __slots__ = (
        "__weakref__",
        "at",
        "collected",
        "contexts",
        "differentiable",
        "engine",
        "index",
        "leaves",
        "needs",
        "residuals",
        "result",
        "signature",
        "static",
        "step",
        "surroundings",
        "tape",
        "transformed",
        "turn",
    )  # fmt: skip

    def __init__(
        self, signature: Signature, engine: Engine, leaves: list[Any], at: list[int], needs: list[bool]
    ) -> None:
        self.signature, self.engine = signature, engine
        self.leaves, self.at = leaves, at  # arguments that are no tensors, and where among them the others stand
        self.needs = needs  # which of shards and inputs are differentiated
        self.step = current_step()
        self.collected: list[Tensor | None] = []  # shards whose gradient the step collects
        self.tape: Tape | None = None
        self.index = 0
        self.turn: Turn | None = None
        self.residuals: Residuals | None = None
        self.surroundings = Surroundings(engine.device)
        self.contexts: list[Any] = []  # of the first run and the next, where a policy says what to keep
        self.transformed = compat.inside_transform()
        self.result: Any = None
        self.static: list[Any] = []
        self.differentiable: list[bool] = []

    def rebuilt(self, outputs: Sequence[Tensor]) -> Any:
        """The function's result with these tensors."""
        leaves = list(self.static)
        remaining = iter(outputs)
        for i, leaf in enumerate(leaves):
            if leaf is _TENSOR:
                leaves[i] = next(remaining)
        return optree.tree_unflatten(self.result, leaves)


_TENSOR: Any = object()


class Surroundings:
    """The state that a function may depend on beside its arguments, for running it again."""

    __slots__ = ("autocast", "device", "more", "numbers")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.numbers = torch.get_rng_state()
        self.more = None if device.type == "cpu" else _module(device).get_rng_state(device)
        kinds = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        self.autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}

    @contextlib.contextmanager
    def uncached(self) -> Iterator[None]:
        """Autocast as it is, without its cache: that goes by tensors, which in a slot get other numbers."""
        with contextlib.ExitStack() as stack:
            for kind, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            yield

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The same random numbers and the same autocast as then."""
        now = Surroundings(self.device)
        kinds = dict.fromkeys([*self.autocast, *now.autocast])
        self._restore()
        try:
            with contextlib.ExitStack() as stack:
                for kind in kinds:
                    on, dtype = kind in self.autocast, self.autocast.get(kind)
                    stack.enter_context(torch.autocast(kind, dtype, enabled=on, cache_enabled=False))
                yield
        finally:
            now._restore()

    def _restore(self) -> None:
        torch.set_rng_state(self.numbers)
        if self.more is not None:
            _module(self.device).set_rng_state(self.more, self.device)


class _Running(threading.local):
    stage: str | None = None


running = _Running()


@contextlib.contextmanager
def inside(signature: Signature) -> Iterator[None]:
    """The function of a stage is running on this thread; another stage inside it is refused."""
    if running.stage is not None:
        raise RuntimeError(
            f"stage {signature.name} ({signature.stage!r}) is called inside stage {running.stage}: what one stage "
            f"gathers it hands back before the next, so call them one after another"
        )
    running.stage = f"{signature.name} ({signature.stage!r})"
    try:
        yield
    finally:
        running.stage = None


class Engine:
    """What the stages on one mesh share: the ring, the tape, and the gradients in flight."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = weakref.ref(mesh)
        self.device = _device(mesh)
        self.ring = Ring(self.device)
        self.reductions = Reductions(self.device)
        self.tape = Tape(None)
        self.count = 0  # of slots taken from the ring by calls that no backward follows
        self.following: dict[int, list[Group]] = {}  # what `layers` will hand out after a shard
        self.met: set[Wires] = set()
        self.reads: dict[Wires, bool] = {}
        self.checked: set[Any] = set()
        self._links: dict[tuple[str, ...], Link | None] = {}

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh."""
        mesh = self._mesh()
        assert mesh is not None, "a mesh whose stages run is alive"
        return mesh

    def link(self, names: tuple[str, ...], layout: Layout) -> Link | None:
        """The axes, or None where there is one rank along them."""
        if names not in self._links:
            self._links[names] = link(self.mesh, names) if layout.grid.size(names) > 1 else None
        return self._links[names]

    # --- a call, forward and backward ---

    def forward(self, call: Call, shards: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Runs a call of a stage; its tensor outputs, without a graph."""
        signature, remat = call.signature, call.signature.options.remat
        with _serving(signature, backward=False):
            turn = self._begin(call, shards)
            self._gather(turn)
            self._ahead(call, turn)
            records = any(call.needs)
            keeps = records and remat in (False, "offload")
            if records and callable(remat):
                call.contexts = list(remat())
            made = self._run(call, turn, inputs, keeps)
            if keeps:
                call.residuals = made
                call.differentiable = [y.requires_grad for y in made.outputs]
            else:
                call.differentiable = [records and _floating(y) for y in made.outputs]
            if not records and turn.slot is not None:
                turn.slot.forget()
            return tuple([y.detach() for y in made.outputs])

    def backward(
        self,
        call: Call,
        needs: Sequence[bool],
        cotangents: Sequence[Tensor | None],
        shards: tuple[Tensor, ...],
        inputs: tuple[Tensor, ...],
        collect: bool,
    ) -> list[Tensor | None]:
        """Gradients of a call with respect to shards and inputs; None for those that are collected or not needed.

        Args:
            call: as it ran forward.
            needs: which gradients are needed.
            cotangents: of the outputs; None for one that the loss does not use.
            shards: as in forward.
            inputs: as in forward.
            collect: whether the step may take gradients past autograd, and let them fly.
        """
        turn = call.turn
        assert turn is not None, "a call runs forward before backward"
        if call.tape is not None:
            call.tape.closed = True
        made, call.residuals = call.residuals, None
        with _serving(call.signature, backward=True):
            if made is None or turn.reads:
                self._retake(call, turn)
                self._gather(turn)
            self._behind(call)
            if made is None:
                with call.surroundings.again():
                    made = self._run(call, turn, inputs, True)
            gradients = _differentiated(made, needs, cotangents)
            found = self._reduced(call, turn, needs, gradients, collect)
            turn.done = True
            self._release(call.tape, turn)
            return found

    # --- gathering ---

    def _begin(self, call: Call, shards: tuple[Tensor, ...]) -> Turn:
        """Gives a call its place on the tape and its slot, which starts to fill."""
        signature, options = call.signature, call.signature.options
        wires = signature.wires(shards)
        if wires not in self.met:
            self._meet(signature, wires)
        if any(call.needs):
            if self.tape.closed or self.tape.step is not call.step or len(self.tape.turns) >= LONGEST:
                self.tape = Tape(call.step)
            call.tape = self.tape
            if call.step is not None:
                call.step.join(self)
        turn = call.turn = Turn(signature.name, wires, shards, _key(call.tape, wires, shards))
        keep = signature.layouts[0].placement.keep if options.reshard is None else not options.reshard
        turn.kept = keep and call.tape is not None
        if wires.nbytes:
            self._take(call.tape, turn, options.prefetch + 1)
        if call.tape is not None:
            call.index = len(call.tape.turns)
            call.tape.turns.append(turn)
            if turn.kept and turn.slot is not None:
                turn.slot.users += 1
                weakref.finalize(call, self._release, call.tape, turn).atexit = False
        return turn

    def _take(self, tape: Tape | None, turn: Turn, slots: int, busy: Slot | None = None) -> bool:
        """Finds the slot that holds what a turn needs, or else fills one; False if that one is busy."""
        if turn.kept and tape is not None:
            turn.slot = tape.kept.get(turn.key)
            if turn.slot is None:
                turn.slot = tape.kept[turn.key] = self.ring.keep(turn.wires.nbytes)
                self._fill(turn)
            return True
        turn.slot = self.ring.find(turn.key)
        if turn.slot is None:
            counter: Any = self if tape is None else tape
            slot = self.ring.at(counter.count, slots, turn.wires.nbytes)
            if slot is busy:
                return False
            counter.count += 1
            turn.slot = slot
            self._fill(turn)
        return True

    def _retake(self, call: Call, turn: Turn) -> None:
        """A slot for a call that gave its own back, and runs backward again."""
        if turn.slot is None and turn.wires.nbytes:
            self._take(None, turn, call.signature.options.prefetch + 1)

    def _gather(self, turn: Turn) -> None:
        """Until a turn's parameters are in its slot."""
        slot = turn.slot
        if slot is None:
            return
        try:
            if slot.holds != turn.key:
                self._fill(turn)
            slot.settle()
        except RuntimeError as error:
            slot.forget()
            raise RuntimeError(f"stage {turn.name}: gathering its parameters failed on this rank: {error}") from error

    def _fill(self, turn: Turn) -> None:
        slot = turn.slot
        assert slot is not None, "a turn that moves bytes has a slot"
        slot.settle()
        slot.forget()
        for wire, values in zip(turn.wires.each, turn.shards, strict=True):
            if wire.moves:
                self._start(slot, wire, values, turn.name)
        slot.holds, slot.sources = turn.key, turn.shards

    def _start(self, slot: Slot, wire: Wire, values: Tensor, name: str) -> None:
        layout = wire.layout
        region, own, tail = _parts(slot, wire)
        axis = self.link(layout.placement.axes, layout)
        own.copy_(values.detach())
        if axis is None:
            return
        if axis.axis.index == axis.axis.size - 1:
            tail.copy_(wire.tag)
        work = all_gather(region, axis, wire.dtype)
        slot.works.append(_Arrival(work, tail, wire, name) if axis.checks else work)

    def _ahead(self, call: Call, turn: Turn) -> None:
        """Starts the gathers of the layers that come next."""
        options = call.signature.options
        for layouts, shards in self.following.get(id(turn.shards[0]), [])[: options.prefetch]:
            wires = wires_of(turn.name, options.gather_dtype, layouts, tuple([shard.dtype for shard in shards]))
            if wires in self.met and wires.nbytes:
                coming = Turn(turn.name, wires, shards, _key(call.tape, wires, shards), kept=turn.kept)
                if not self._take(call.tape, coming, options.prefetch + 1, busy=turn.slot):
                    return

    def _behind(self, call: Call) -> None:
        """Starts the gathers for the calls whose backward comes next."""
        if call.tape is None or call.turn is None:
            return
        left = call.signature.options.prefetch
        for turn in reversed(call.tape.turns[: call.index]):
            if left == 0:
                return
            if turn.done or turn.slot is None or turn.kept or not turn.reads:
                continue
            if turn.slot is call.turn.slot:
                return
            if turn.slot.holds != turn.key:
                self._fill(turn)
            left -= 1

    def _release(self, tape: Tape | None, turn: Turn) -> None:
        """A kept slot goes back when its last call is done, or gone."""
        slot = turn.slot
        if turn.kept and slot is not None:
            turn.slot, turn.kept = None, False
            slot.users -= 1
            if slot.users == 0:
                if tape is not None:
                    tape.kept.pop(turn.key, None)
                self.ring.give_back(slot)

    def end(self) -> None:
        """A step is over: nothing that it gathered is used again."""
        self.reductions.drain()
        self.tape = Tape(None)
        for slot in self.ring.slots:
            slot.forget()

    # --- the function ---

    def _run(self, call: Call, turn: Turn, inputs: tuple[Tensor, ...], records: bool) -> Residuals:
        """The function on the gathered parameters; with `records`, under autograd."""
        signature, options = call.signature, call.signature.options
        parameters = self._parameters(turn, call.needs)
        arguments = [
            x.detach().requires_grad_(records and need)
            for x, need in zip(inputs, call.needs[len(turn.shards) :], strict=True)
        ]
        leaves = list(call.leaves)
        for i, x in zip(call.at, arguments, strict=True):
            leaves[i] = cast(x, options.input_dtype)
        versions = _versions(turn)
        with contextlib.ExitStack() as stack:
            if current_mesh() is not self.mesh:
                stack.enter_context(scope(self.mesh, known_axes(self.mesh)))
            if call.surroundings.autocast:
                stack.enter_context(call.surroundings.uncached())
            if call.transformed:
                stack.enter_context(_RefuseWrapped(signature))
            if call.contexts:
                stack.enter_context(call.contexts.pop(0))
            stack.enter_context(inside(signature))
            saw = self._watching(stack, call, turn) if records else None
            stack.enter_context(torch.set_grad_enabled(records))
            try:
                result = signature.call(leaves, parameters)
            except RuntimeError as error:
                raise _explained(error, signature) from error
            result = (
                optree.tree_map(lambda y: cast(y, options.output_dtype), result) if options.output_dtype else result
            )
        if _versions(turn) != versions:
            if turn.slot is not None:
                turn.slot.forget()
            raise RuntimeError(_in_place(signature))
        if saw is not None:
            turn.reads = self.reads[turn.wires] = bool(saw)
        found, call.result = optree.tree_flatten(result)
        outputs = [y for y in found if isinstance(y, Tensor)]
        call.static = [_TENSOR if isinstance(y, Tensor) else y for y in found]
        _check_outputs(signature, turn, outputs, call)
        made = Residuals(parameters, arguments, outputs)
        if records and (signature, turn.wires) not in self.checked:
            _check_closure(signature, made)
            self.checked.add((signature, turn.wires))
        return made

    def _parameters(self, turn: Turn, needs: Sequence[bool]) -> list[list[Tensor]]:
        """Each shard's whole parameters: leaves of autograd that are views of the slot, or of the shard itself."""
        wanted = tuple(needs[: len(turn.shards)])
        slot = turn.slot
        found: list[list[Tensor]] | None = slot.views.get((turn.wires, wanted)) if slot else None
        if found is None or slot is None:
            found = []
            for wire, values, need in zip(turn.wires.each, turn.shards, wanted, strict=True):
                whole = _parts(slot, wire)[0].view(wire.dtype) if wire.moves and slot else values.detach()
                if wire.moves and slot:
                    whole = slot.buffer[wire.start : wire.stop].view(wire.dtype)
                found.append([view.detach().requires_grad_(need) for view in wire.layout.views(whole)])
            if slot and all(wire.moves for wire in turn.wires.each):
                slot.views[(turn.wires, wanted)] = found
        return found

    def _watching(self, stack: contextlib.ExitStack, call: Call, turn: Turn) -> list[bool] | None:
        """Watches what autograd saves: whether backward will read parameters; moves the rest away, if asked to.

        None where nobody looks, since such a stage was seen to read them before. One that did not is watched
        at every call, since gathering them for its backward is left out.
        """
        offload = call.signature.options.remat == "offload" and self.device.type != "cpu"
        if (not offload and self.reads.get(turn.wires, False)) or not compat.saved_tensors_hooks_allowed():
            return None
        own = {compat.storage_of(turn.slot.buffer)} if turn.slot else set()
        own |= {compat.storage_of(x) for x in turn.shards}
        saw: list[bool] = []

        def pack(x: Tensor) -> Any:
            if compat.storage_of(x) in own:
                saw.append(True)
            elif offload and x.device == self.device:
                away = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
                return away.copy_(x, non_blocking=True), None
            return x, x._version

        def unpack(packed: Any) -> Tensor:
            x, version = packed
            if version is None:
                return x.to(self.device, non_blocking=True)
            if x._version != version:
                raise RuntimeError(
                    f"stage {call.signature.name}: a tensor that its backward needs has been modified in place since"
                )
            return x

        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
        return saw

    def _reduced(
        self,
        call: Call,
        turn: Turn,
        needs: Sequence[bool],
        gradients: tuple[list[list[Tensor | None]], list[Tensor | None]],
        collect: bool,
    ) -> list[Tensor | None]:
        """The gradients of the parameters become those of the shards."""
        of_parameters, of_inputs = gradients
        found: list[Any] = [None] * len(turn.shards)
        for k, (wire, shard) in enumerate(zip(turn.wires.each, turn.shards, strict=True)):
            if not needs[k]:
                continue
            layout = wire.layout
            links = Links(self.link(layout.placement.axes, layout), self.link(layout.placement.replicas, layout))
            variable = call.collected[k] if collect else None
            step = call.step
            total = step.sum_of(variable, layout, links, self.reductions) if step and variable is not None else None
            dtype = call.signature.options.sum_dtype(shard.dtype)
            defer = step.defer if step and total else "nothing"
            flight = self.reductions.start(k, layout, of_parameters[k], links, dtype, shard.dtype, total, defer)
            found[k] = flight if total is None else None
        landed = [None if flight is None else self.reductions.land(flight) for flight in found]
        return [*landed, *of_inputs]

    def _meet(self, signature: Signature, wires: Wires) -> None:
        """What runs here for the first time is compared between ranks, and the ring made large enough for its like."""
        expected: dict[str, list[Layout]] = self.mesh.__dict__.get("_shardfn_stages", {})
        lower = signature.options.gather_dtype
        for layouts in expected.values():
            sizes = [one.padded * (lower or one.dtype).itemsize for one in layouts if one.size > 1 or lower]
            self.ring.reserve(sum(-(-size // 512) * 512 for size in sizes))
        told = [
            f"{signature.name} on {wire.layout}, gathered as {wire.dtype}, layout {bytes(wire.tag[:8].tolist()).hex()}"
            for wire in wires.each
        ]
        agree(told, self.mesh, "stage", subject=_STAGES)
        self.met.add(wires)


class _Arrival:
    """A gather that looks whether what came is what was meant."""

    __slots__ = ("name", "tail", "wire", "work")

    def __init__(self, work: Any, tail: Tensor, wire: Wire, name: str) -> None:
        self.work, self.tail, self.wire, self.name = work, tail, wire, name

    def wait(self) -> None:
        self.work.wait()
        tag = self.wire.tag
        if self.tail.device.type != "cpu":
            compat.assert_on_device((self.tail == tag.to(self.tail.device)).all(), "ranks run different stages")
        elif not torch.equal(self.tail, tag):
            other = bytes(self.tail[8:].tolist()).decode(errors="replace").strip()
            raise RuntimeError(
                f"it gathers for {self.wire.layout.stage} ({self.name}), but the last rank along "
                f"{' x '.join(self.wire.layout.placement.axes)} for {other or 'another stage'}: ranks run different "
                f"stages. A branch around a stage must go the same way on every rank"
            )


class _RefuseWrapped(torch.overrides.TorchFunctionMode):
    """Refuses tensors of a running torch.func transform, which a stage's function can only have closed over."""

    def __init__(self, signature: Signature) -> None:
        super().__init__()
        self.signature = signature

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not compat.inside_transform():
            for x in optree.tree_leaves((args, kwargs)):
                if compat.wrapped(x):
                    raise RuntimeError(_closes_over(self.signature, x))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _serving(signature: Signature, backward: bool) -> Iterator[None]:
    """What moves meanwhile is entered in the ledger for this stage."""
    before = here.stage, here.backward, here.scheduled
    here.stage, here.backward, here.scheduled = signature.stage, backward, True
    try:
        yield
    finally:
        here.stage, here.backward, here.scheduled = before


def engine_of(mesh: DeviceMesh) -> Engine:
    """The engine of a mesh."""
    found: Engine | None = mesh.__dict__.get("_shardfn_engine")
    if found is None:
        found = mesh.__dict__["_shardfn_engine"] = Engine(mesh)
    return found


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """Floating tensors in another dtype, other things as they are."""
    return x.to(dtype) if dtype is not None and isinstance(x, Tensor) and x.is_floating_point() else x


def _floating(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _key(tape: Tape | None, wires: Wires, shards: tuple[Tensor, ...]) -> Key:
    return (tape.number if tape else 0, wires, tuple([(id(x), 0 if x.is_inference() else x._version) for x in shards]))


def _parts(slot: Slot, wire: Wire) -> tuple[Tensor, Tensor, Tensor]:
    """Of a slot: the bytes of one buffer, this rank's piece of them in its dtype, and the end of the last piece."""
    found = slot.parts.get(wire)
    if found is None:
        region = slot.write[wire.start : wire.stop]
        layout = wire.layout
        index = layout.grid.index(compat.global_rank(), layout.placement.axes)
        own = region.view(wire.dtype).view(layout.size, -1)[index]
        found = slot.parts[wire] = (region, own, region[len(region) - len(wire.tag) :])
    return found


def _versions(turn: Turn) -> list[int]:
    """Change when the function writes into its parameters."""
    watched = [] if turn.slot is None else [turn.slot.buffer]
    watched += [x for x in turn.shards if not x.is_inference()]
    return [x._version for x in watched]


def _differentiated(
    made: Residuals, needs: Sequence[bool], cotangents: Sequence[Tensor | None]
) -> tuple[list[list[Tensor | None]], list[Tensor | None]]:
    """Gradients with respect to each shard's parameters, and to the inputs."""
    n = len(made.parameters)
    wanted = [p for ps, need in zip(made.parameters, needs[:n], strict=True) if need for p in ps]
    wanted += [x for x, need in zip(made.inputs, needs[n:], strict=True) if need]
    pairs = [(y, ct) for y, ct in zip(made.outputs, cotangents, strict=True) if ct is not None and y.requires_grad]
    found: list[Tensor | None] = [None] * len(wanted)
    if pairs and wanted:
        ys, cts = zip(*pairs, strict=True)
        found = list(torch.autograd.grad(ys, wanted, cts, allow_unused=True))
    rest = iter(found)
    of_parameters: list[list[Tensor | None]] = [
        [next(rest) for _ in ps] if need else [] for ps, need in zip(made.parameters, needs[:n], strict=True)
    ]
    return of_parameters, [next(rest) if need else None for need in needs[n:]]


def _check_outputs(signature: Signature, turn: Turn, outputs: list[Tensor], call: Call) -> None:
    own = {compat.storage_of(x) for x in turn.shards}
    if turn.slot is not None:
        own.add(compat.storage_of(turn.slot.buffer))
    for i, y in enumerate(outputs):
        if compat.storage_of(y) in own:
            raise RuntimeError(
                f"stage {signature.name} ({signature.stage!r}) returns a parameter, or a view of one, as output "
                f"{i}, of shape {tuple(y.shape)}: its memory is lent to the stage and gets other numbers afterwards. "
                f"Return a clone, or compute with it inside the stage"
            )


def _check_closure(signature: Signature, made: Residuals) -> None:
    """Raises if the function reached a tensor that needs a gradient and was not passed to it."""
    known = {id(x) for x in [*(p for ps in made.parameters for p in ps), *made.inputs]}
    nodes = [y.grad_fn for y in made.outputs]
    lost = [y for y in made.outputs if y.grad_fn is None and y.requires_grad and id(y) not in known]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            lost.append(variable)
        nodes += [parent for parent, _ in node.next_functions]
    if lost:
        raise RuntimeError(_closes_over(signature, lost[0]))


def _closes_over(signature: Signature, x: Tensor) -> str:
    return (
        f"stage {signature.name} ({signature.stage!r}): its function uses a tensor of shape {tuple(x.shape)}, "
        f"{x.dtype}, that needs a gradient and is not among its arguments: the gradient would be lost. Pass it as an argument, "
        f"or detach it"
    )


def _in_place(signature: Signature) -> str:
    return (
        f"stage {signature.name} ({signature.stage!r}): its function writes into its parameters. They are a gathered "
        f"copy, so what is written would be lost: compute a new tensor, and update parameters outside of stages"
    )


def _explained(error: RuntimeError, signature: Signature) -> RuntimeError:
    if "leaf Variable that requires grad" in str(error):
        return RuntimeError(_in_place(signature))
    return error


def _device(mesh: DeviceMesh) -> torch.device:
    kind = torch.device(mesh.device_type)
    return kind if kind.type == "cpu" else torch.device(kind.type, _module(kind).current_device())


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type)
