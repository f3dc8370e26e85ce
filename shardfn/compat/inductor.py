"""torch's tracer and compiler of graphs, by names that are not public."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedFakeTensorException
from torch.utils import checkpoint

from shardfn.compat.devices import without_collector
from shardfn.compat.dynamo import DEPENDS_ON_NUMBERS
from shardfn.compat.replacing import replaced

_lock = threading.RLock()
"""The compiler keeps state for the whole process."""


def needs_numbers() -> tuple[type[Exception], ...]:
    """The errors of operations that need numbers, where tensors have none."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # which takes a while

    return (*DEPENDS_ON_NUMBERS, GuardOnDataDependentSymNode, UnsupportedFakeTensorException)


def traced_elsewhere(x: Tensor) -> bool:
    """Whether a tensor without numbers is of another trace than the running one."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return isinstance(x, FakeTensor) and mode is not None and x.fake_mode is not mode


def trace_operations(f: Callable[..., list[Tensor]], tensors: Sequence[Tensor]) -> fx.GraphModule:
    """The operations of `f(*tensors)`, on tensors without numbers, in order; autograd and transforms are run through.

    Tensors from elsewhere are attributes of the graph.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    trace = make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)
    # Collecting garbage would look at the whole growing graph again and again.
    # Functions that torch.compile has made are traced like others.
    # In a trace policies of checkpointing would keep all, and leave the choice to torch.compile.
    chosen = replaced(checkpoint, _is_compiling=lambda *_: False)
    with without_collector(), torch._dynamo.config.patch(error_on_nested_fx_trace=False), chosen:
        return trace(*tensors)


def keep(op: Any) -> None:
    """Lets graphs keep an operation of which nobody uses the result: other ranks wait for it."""
    fx.node.has_side_effect(op)


def leaves_out(op: Any) -> bool:
    """Whether inductor leaves an operation out where it changes nothing."""
    from torch._inductor.fx_passes.post_grad import noop_registry

    return op in noop_registry


def functional(f: Callable[..., list[Tensor]], tensors: Sequence[Tensor]) -> fx.GraphModule:
    """The operations of `f` on new tensors, in those that inductor knows; arguments are overwritten at the end."""
    import torch._inductor.config as config
    import torch._inductor.lowering  # decompositions of pooling look there
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    pure = torch.func.functionalize(f, remove="mutations")
    seeded = torch.Tag.nondeterministic_seeded  # such operations draw what they draw without a compiler
    table = {op: parts for op, parts in select_decomp_table().items() if seeded not in getattr(op, "tags", ())}
    with without_collector(), config.patch(fallback_random=True), without_autocast():
        return make_fx(pure, tracing_mode="fake", decomposition_table=table, _allow_non_fake_inputs=True)(*tensors)


def newest_nodes(after: fx.Node | None = None) -> list[fx.Node]:
    """The nodes of the graph that is being traced behind another, in order."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    nodes = reversed(get_proxy_mode().tracer.graph.nodes)  # type: ignore[union-attr]
    return list(itertools.takewhile(lambda node: node is not after, nodes))[::-1]


def compiled(graph: fx.GraphModule) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """A function compiled by inductor: `[inputs] -> outputs`; it empties the list.

    Random numbers are those that torch's own operations draw. Whatever the user has set, results have memory of their
    own, which a graph of CUDA's would write to again in the next run, and the strides of the trace.
    """
    import torch._inductor.config as config
    from torch._guards import TracingContext, tracing
    from torch._inductor import lowering
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    for op in select_decomp_table().keys() - lowering.lowerings.keys():
        if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()):  # it knows some, such as bernoulli, in parts
            lowering.make_fallback(op, lowering.constrain_to_fx_strides, warn=False, override_decomp=True)
    kinds = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    # Others read them by the strides that the trace found, so they must not be padded.
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    output.meta["original_output_strides"] = [x.meta["val"].stride() for x in output.args[0]]
    # inductor runs the graph on these, and finds by their storages which tensors are views of others.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in kinds]
    options = config.patch({"fallback_random": True, "triton.cudagraphs": False, "keep_output_stride": True})
    with _lock, options, tracing(TracingContext(mode)), torch.no_grad(), without_autocast():
        return compile_fx_inner(graph, inputs)


def without_autocast() -> Any:
    """A context without autocast, for operations that are what autocast has made."""
    return torch._C._DisableAutocast()
