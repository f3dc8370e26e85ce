"""`compile`: a whole training step as one program of compiled regions and collectives."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.collectives import late_checks
from shardfn.collectives.agree import agree, failing_together
from shardfn.compat import autograd, inductor, process_groups
from shardfn.compiled import regions
from shardfn.compiled.captured import ResultStructure, StepProgram, donate, unshared_result
from shardfn.compiled.graphed import ALIKE, NTH_CALL, Graphs, host_checks
from shardfn.compiled.tracing import TENSOR, TracedCall
from shardfn.mesh import comparisons, watchdog
from shardfn.mesh.axes import known_axes
from shardfn.mesh.scope import scope
from shardfn.quoting import listed
from shardfn.tracebacks import api_boundary

F = TypeVar("F", bound=Callable[..., Any])
_log = logging.getLogger("shardfn")
_aten: Any = torch.ops.aten


@api_boundary
def compile(step: F, /, *, mesh: DeviceMesh | None = None) -> F:
    """The step as one compiled program: its operations are fused, and its collectives keep the schedule of the stages.

    The first call runs eagerly, with all checks. The second is traced: the gradient, its reductions, clipping and the
    optimizer's step become one graph. Between collectives inductor compiles the operations, those of equal layers once.
    A gather starts while the stage before computes, and parameters are gathered again for backward, as without a
    compiler; so the program sends what the step sends, and needs no more memory. The third call is traced again, to
    find what differs between calls.

    As for `cuda_graph`, what the step returns and the program passes back in the next call is *carried*: parameters and
    optimizer state. It is overwritten in place, and each use of a carried argument after the call is a RuntimeError. A
    number in a carried tree that changes from call to call, such as an optimizer's step count, becomes a 0-d tensor.
    Any other number is a constant: a call with another one is an error. Arguments of other shapes, strides, dtypes or
    structure are compiled for themselves, which is logged.

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

    caller, warm_up, settled = "compile", 1, 3

    def _kind(self, x: Any) -> Any:
        return (super()._kind(x), x.stride()) if isinstance(x, Tensor) else super()._kind(x)

    def _warm_up(self, program: StepProgram, leaves: list[Any]) -> Any:
        results, tree = program.step(leaves)
        program.form = ResultStructure.from_leaves(results, tree)
        return unshared_result(results, tree)

    def _refuse_unfit(self, program: StepProgram, leaves: list[Any]) -> None:
        self._refuse_away(program, leaves)
        if checks := host_checks(("collectives", "nan")):
            raise RuntimeError(f"{self.name}: {listed(checks)} checks each call on the host: leave it off")
        if process_groups.worlds_of_threads() and dist.get_world_size() > 1:
            raise RuntimeError(
                f"{self.name}: ranks are threads of one process, and torch traces only one at a time. Use "
                f'processes, World({dist.get_world_size()}, kind="processes")'
            )

    def _captured(self, program: StepProgram, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        meshes = list(self._meshes(args, kwargs))
        with failing_together(meshes, self.name):
            self._refuse_unfit(program, leaves)
            trace = TracedCall.of_call(program, leaves)
            trace.schedule()
        agree([NTH_CALL.format("second"), *trace.collectives], meshes, self.name, subject=_COLLECTIVES)
        shapes = [
            list(x.shape) for i, x in enumerate(leaves) if isinstance(x, Tensor) and i not in program.roles.carried
        ]
        _log.info("%s: compiles for arguments of shapes %s", self.name, listed(shapes))
        compiled = _Compiled(trace, meshes)
        comparisons.reached(f"{self.name} began to compile")
        # One process of a host compiles, and the others find what it made on disk. What is for a GPU is for that alone.
        in_turns = bool(meshes) and program.device.type == "cpu"
        leads = int(os.environ.get("LOCAL_RANK", process_groups.global_rank())) == 0
        for first in (True, False) if in_turns else (True,):
            with failing_together(meshes, self.name):
                if not in_turns or first is leads:
                    compiled.compile()
            agree([], meshes, self.name, subject=("the programs", watchdog.COMPILES))
        comparisons.reached(f"{self.name} was compiled")
        return compiled


_COLLECTIVES = (
    "the collectives of the step",
    "All ranks run the same stages and collectives in the same order: what they do must not depend on the rank",
)


@dataclass(eq=False)
class _Compiled:
    """The program of a traced call.

    Attributes:
        trace: the call.
        meshes: whose ranks run it together.
        function, source: the program, and its text.
        times: how often it ran.
    """

    trace: TracedCall
    meshes: list[DeviceMesh]
    function: Callable[[list[Any]], list[Any]] | None = None
    source: str = ""
    times: int = 0

    def compile(self) -> None:
        """Compiles the program."""
        self.function, self.source = regions.program(self.trace.graph.graph)
        for work in self.trace.works:
            work.prepare()

    # --- runs ---

    def run(self, leaves: list[Any], first: bool = False) -> Any:
        """Runs the step on new arguments, and donates those that are carried."""
        assert self.function is not None, "it is compiled"
        trace, program, carried = self.trace, self.trace.program, self.trace.program.roles.carried
        if self.times == 1:
            with failing_together(self.meshes, program.name):
                self._compare(leaves)
            agree([NTH_CALL.format("third")], self.meshes, program.name, subject=ALIKE)
        self.times += 1
        late_checks.poll_checks(program.device)
        inputs = [leaves[i].detach() for i in trace.at]
        self._refuse_shared(leaves, inputs)
        try:
            around = scope(self.meshes[0], known_axes(self.meshes[0])) if self.meshes else contextlib.nullcontext()
            with around, torch.no_grad(), inductor.without_autocast():
                outputs = iter(self.function([*inputs, *trace.constants]))
        except BaseException:  # some may be overwritten already
            for work in trace.works:
                work.abandon()
            for i in carried:
                donate(leaves[i])
            raise
        if program.device.type != "cpu":
            late_checks.late_checks().close()
        results = [next(outputs) if x is TENSOR else x for x in trace.results]
        for i, j in carried.items():
            results[j] = leaves[i].detach()
            donate(leaves[i])
        if carried:
            torch.autograd.graph.increment_version([results[j] for j in carried.values()])
        return optree.tree_unflatten(trace.tree, results)

    def _refuse_shared(self, leaves: list[Any], inputs: list[Tensor]) -> None:
        """Raises RuntimeError if what the step overwrites shares memory with something else that it takes."""
        trace, program = self.trace, self.trace.program
        shared = [autograd.storage_of(x) for x in (*inputs, *trace.constants)]
        if len(set(shared)) == len(shared):
            return
        for i in program.roles.carried:
            if shared.count(autograd.storage_of(leaves[i])) > 1:
                raise RuntimeError(
                    f"{program.name}: {program.labels(i)} shares memory with another argument, and the step overwrites "
                    f"it: pass a clone"
                )
        for x in trace.overwritten:
            if shared.count(autograd.storage_of(x)) > 1:
                raise RuntimeError(
                    f"{program.name}: the step overwrites a tensor of shape {list(x.shape)} from elsewhere, which "
                    f"shares memory with another that it takes: use views of one tensor inside of the step, or clones"
                )

    def _compare(self, leaves: list[Any]) -> None:
        """Raises RuntimeError if the step does something else than when it was traced."""
        other = TracedCall.of_call(self.trace.program, leaves, self.trace.outside)
        if difference := self.trace.difference(other):
            raise RuntimeError(
                f"{other.program.name}: the step does {difference}: a compiled program cannot change. Pass tensors "
                f"that change as arguments, and numbers as 0-d tensors"
            )
