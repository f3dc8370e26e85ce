"""In a checked call, ranks that call a function of `parallel` with other shapes or options hear of it at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import parallel
from shardfn.testing import World

Make = Callable[[Any], Any]  # a call, in which one of two values differs between ranks


def some(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def heads(length: int, rows: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    x = some(rows, 2, length, 4, dtype=dtype)
    return x, x, x


def labels(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.long)


def ring(n: int, **options: Any) -> Any:
    return parallel.ring_attention(*heads(n), "c", **options)


def ulysses(n: int, **options: Any) -> Any:
    return parallel.ulysses_attention(*heads(n), "c", **options)


def gradient(n: int) -> Any:
    return sf.grad(lambda q: sf.psum(parallel.ring_attention(q, q, q, "c").sum(), "c"))(heads(n)[0])


def in_a_stage(n: int) -> Any:
    return sf.stage(lambda p, x: parallel.ring_attention(x, x, x, "c"), remat=True)({}, heads(n)[0])


def batched(n: int) -> Any:
    return torch.func.vmap(lambda x: parallel.ring_attention(x, x, x, "c"))(heads(n)[0][None])


def entropy(rows: int = 3, columns: int = 4, **options: Any) -> Any:
    return parallel.cross_entropy(some(rows, 5), some(5, columns), labels(rows), "c", **options)


def mixture(length: int = 4, width: int = 3, **options: Any) -> Any:
    x = some(1, length, width)
    routing = parallel.route(x, some(width, 4), 2)
    return parallel.mixture_of_experts(lambda p, t: t * p, some(2, width), x, routing, "c", **options)


LENGTH = "k: torch.float64 (1, 2, 4, 4)", "k: torch.float64 (1, 2, 6, 4)", "pad it to one length"
WRONG: dict[str, tuple[Make, tuple[Any, Any], tuple[str, ...]]] = {
    "lengths in a ring": (ring, (4, 6), ("ring_attention: the arguments differ", *LENGTH)),
    "one odd length": (
        lambda n: ring(n, balanced=True),
        (4, 5),
        ("ring_attention", "(1, 2, 5, 4)", "pad it to one length"),
    ),
    "lengths in a balanced ring": (lambda n: ring(n, balanced=True), (4, 6), ("ring_attention", *LENGTH)),
    "lengths under a gradient": (gradient, (4, 6), ("ring_attention", *LENGTH)),
    "lengths in a stage": (in_a_stage, (4, 6), ("ring_attention", *LENGTH)),
    "lengths under vmap": (batched, (4, 6), ("ring_attention", *LENGTH)),
    "rows": (lambda n: parallel.ring_attention(*heads(4, n), "c"), (1, 2), ("ring_attention", "(2, 2, 4, 4)")),
    "dtypes": (
        lambda dtype: parallel.ring_attention(*heads(4, dtype=dtype), "c"),
        (torch.float32, torch.float64),
        ("ring_attention", "k: torch.float32"),
    ),
    "a causal rank": (
        lambda on: ring(4, mask=parallel.Mask(causal=on)),
        (True, False),
        ("ring_attention", "causal=True", "causal=False"),
    ),
    "orders": (lambda on: ring(4, balanced=on), (True, False), ("ring_attention", "balanced=False")),
    "lengths, exchanging heads": (ulysses, (4, 6), ("ulysses_attention", *LENGTH)),
    "a causal rank, exchanging heads": (
        lambda on: ulysses(4, mask=parallel.Mask(causal=on)),
        (True, False),
        ("ulysses", "causal=False"),
    ),
    "columns": (lambda n: entropy(columns=n), (4, 6), ("cross_entropy", "w: torch.float64 (5, 6)", "pad that")),
    "targets": (entropy, (3, 4), ("cross_entropy", "targets: torch.int64 (4,)")),
    "vocabularies": (lambda n: entropy(vocabulary=n), (7, 8), ("cross_entropy", "vocabulary=7")),
    "chunks": (lambda n: entropy(chunk=n), (1, 2), ("cross_entropy", "chunk=2")),
    "tables": (lambda n: parallel.embedding(labels(3), some(n, 3), "c"), (4, 6), ("embedding", "table", "pad that")),
    "tokens": (lambda n: parallel.embedding(labels(n), some(4, 3), "c"), (4, 6), ("embedding", "tokens", "(6,)")),
    "widths": (lambda n: parallel.rms_norm(some(3, n), some(n), "c"), (4, 6), ("rms_norm", "(3, 6)", "pad that")),
    "eps": (lambda e: parallel.rms_norm(some(3, 4), some(4), "c", eps=e), (1e-5, 1e-6), ("rms_norm", "eps=1e-05")),
    "capacities": (lambda n: mixture(capacity=n), (2, None), ("mixture", "capacity=2", "capacity=None")),
    "widths of tokens": (lambda n: mixture(width=n), (3, 5), ("mixture", "[..., ..., 5]")),
}
RIGHT: dict[str, tuple[Make, tuple[Any, Any]]] = {
    "queries of other lengths, where none is later": (
        lambda n: parallel.ring_attention(heads(n)[0], *heads(4)[1:], "c", mask=parallel.Mask(causal=False)),
        (4, 6),
    ),
    "other numbers of tokens": (mixture, (4, 6)),
    "shorter groups": (lambda n: mixture(n, capacity=2), (4, 6)),
}


def told(case: str) -> str:
    make, values = RIGHT[case] if case in RIGHT else WRONG[case][:2]
    mesh = sf.make_mesh(c=2, device="cpu")
    value = values[mesh.get_rank()]
    try:
        sf.shard_map(lambda: make(value), mesh=mesh, in_specs=(), out_specs=...)()
    except sf.check.VaryingError as error:
        return f"{error.findings[0].kind}: {error}"
    return ""


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.world(2, "threads")
def test_ranks_are_told_who_has_what_and_what_to_do(world: World, case: str) -> None:
    here, there = world.run(told, case)
    assert here == there
    for part in ("collectives: ", "rank 0 has", "rank 1 has", *WRONG[case][2]):
        assert part in here, here


@pytest.mark.parametrize("case", RIGHT)
@pytest.mark.world(2, "threads")
def test_what_may_differ_is_not_compared(world: World, case: str) -> None:
    assert world.run(told, case) == ["", ""]
