"""Sequences that are cut in one order, and masked in another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from tests.check.gallery.setting import AS_FIXED, normal, wrong

LENGTH, CUT = 8, {"context": 2}
HEADS = normal(2, 2, LENGTH, 4, seed=8)


def attended() -> Tensor:
    scores = (HEADS @ HEADS.mT / 2).masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1) @ HEADS).square().sum()


def cut(shard_map: Any, attend: Any) -> Any:
    @shard_map(in_specs=P(), out_specs=P())
    def run(heads: Tensor) -> Tensor:
        return sf.psum(attend(heads).square().sum(), "context")

    return run(HEADS)


@wrong("order", "context", "", AS_FIXED, attended, CUT, "ulysses_attention")
def balanced_places_and_exchanged_heads(shard_map, mesh):
    def attend(heads):
        # fix: own = sf.parallel.positions(LENGTH, "context", balanced=False)
        own = sf.parallel.positions(LENGTH, "context", balanced=True)  # here
        x = heads[:, :, own]
        return sf.parallel.ulysses_attention(x, x, x, "context")

    return cut(shard_map, attend)


@wrong("order", "context", "", AS_FIXED, attended, CUT, "or ring_attention(..., balanced=True)")
def balanced_places_and_a_ring_in_order(shard_map, mesh):
    def attend(heads):
        # fix: own = sf.parallel.positions(LENGTH, 'context', balanced=False)
        own = sf.parallel.positions(LENGTH, "context", balanced=True)  # here
        x = heads[:, :, own]
        return sf.parallel.ring_attention(x, x, x, "context")

    return cut(shard_map, attend)


@wrong("order", "context", "", AS_FIXED, attended, CUT, "or ring_attention(..., balanced=False)")
def places_in_order_and_a_balanced_ring(shard_map, mesh):
    def attend(heads):
        # fix: own = sf.parallel.positions(LENGTH, 'context', balanced=True)
        own = sf.parallel.positions(LENGTH, "context")  # here
        x = heads[:, :, own]
        return sf.parallel.ring_attention(x, x, x, "context", balanced=True)

    return cut(shard_map, attend)
