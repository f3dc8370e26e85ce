"""Parallelism over mesh axes other than the batch's: pure functions of local tensors, exact under every transform.

Tensor, sequence and vocabulary parallelism (`to_parallel`, `from_parallel`, `embedding`, `rms_norm`, `cross_entropy`),
context parallelism (`ring_attention`, `ulysses_attention`), expert parallelism (`route`, `mixture_of_experts`) and
pipelines (`pipeline`).
Each takes the name of its axis; with `()` for none it is the ordinary function, on one process too.

Imports `transforms` and what is below, not `stages`.
"""

from shardfn.parallel.attention import Mask, attention, positions, ring_attention, ulysses_attention
from shardfn.parallel.linear import embedding, from_parallel, rms_norm, to_parallel
from shardfn.parallel.losses import cross_entropy
from shardfn.parallel.moe import Routing, balance_loss, mixture_of_experts, num_dropped, route, router_loss
from shardfn.parallel.pipeline import pipeline, schedule_of, split_layers

__all__ = [
    "Mask",
    "Routing",
    "attention",
    "balance_loss",
    "cross_entropy",
    "embedding",
    "from_parallel",
    "mixture_of_experts",
    "num_dropped",
    "pipeline",
    "positions",
    "ring_attention",
    "rms_norm",
    "route",
    "router_loss",
    "schedule_of",
    "split_layers",
    "to_parallel",
    "ulysses_attention",
]
