"""Compiled steps on a simulated accelerator: traced without values, and then run one operation after another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardfn.compat import dynamo, inductor
from shardfn.compat.dispatch import tensors_in


class _Tracing(threading.local):
    depth = 0


_tracing = _Tracing()


def tracing() -> bool:
    """Whether this thread traces a step, so that nothing runs."""
    return _tracing.depth > 0


def patches(name: str) -> Iterator[tuple[Any, str, Any]]:
    """The patches of the tracer and the graph compiler, for tensors on the device of this name."""
    traced, functional, compiled = inductor.trace_operations, inductor.functional, inductor.compiled

    def bare(x: Tensor) -> Tensor:
        if x.device.type != name:
            return x
        return dynamo.fake_of(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), x.device)

    def in_order(graph: fx.GraphModule) -> Callable[[list[Tensor]], Sequence[Tensor]]:
        kinds = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        if all(x.device.type != name for node in graph.graph.nodes for x in tensors_in(node.meta.get("val"))):
            return compiled(graph)

        def run(xs: list[Tensor]) -> Sequence[Tensor]:
            for x, kind in zip(xs, kinds, strict=True):
                if _layout(x) != _layout(kind):  # compiled code reads it as it was in the trace
                    raise RuntimeError(f"a region gets {_layout(x)} where the trace had {_layout(kind)}")
            found: Sequence[Tensor] = graph(*xs)
            xs.clear()
            return found

        return run

    yield inductor, "trace_operations", lambda f, tensors: _trace_separately(traced, f, [bare(x) for x in tensors])
    yield inductor, "functional", lambda f, tensors: _trace_separately(functional, f, tensors)
    yield inductor, "compiled", in_order


def _trace_separately(trace: Callable[..., Any], *args: Any) -> Any:
    _tracing.depth += 1
    try:
        return trace(*args)
    finally:
        _tracing.depth -= 1


def _layout(x: Tensor) -> Any:
    """The properties of a tensor that compiled code relies on; strides of dimensions of size 1 do not matter."""
    return x.dtype, x.device, x.shape, [step for step, n in zip(x.stride(), x.shape, strict=True) if n != 1]
