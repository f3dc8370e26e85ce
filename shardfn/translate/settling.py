"""What follows from several facts together: the strategy, the sizes of axes, and the product of a batch."""

from __future__ import annotations

import math

from shardfn.quoting import listed
from shardfn.translate.draft import Draft
from shardfn.translate.facts import TranslateError

_REPLICATED = {"full_shard": "hybrid_shard", "shard_grad_op": "hybrid_shard_zero2"}


def settle(draft: Draft) -> None:
    """Adds what follows.

    Raises:
        TranslateError: sizes, or a batch's product, that do not hold.
    """
    draft.facts.setdefault("cut", "ddp")
    if draft.get("hpz"):
        draft.put("cut", "hpz", *draft.of("hpz"))
        draft.put("shard", draft.get("hpz"), *draft.of("hpz"))
    if draft.get("mics"):
        draft.put("cut", "mics" if draft.get("hierarchical") else "hybrid_shard", *draft.of("mics", "hierarchical"))
        draft.put("shard", draft.get("mics"), *draft.of("mics"))
    replicas, shards = draft.get("dp_replicate") or 1, draft.get("dp_shard") or 1
    if replicas > 1 or draft.get("hybrid"):
        draft.put("cut", _REPLICATED.get(draft.get("cut"), draft.get("cut")), *draft.of("dp_replicate"))
    for fact, size, said in (("replica", replicas, "dp_replicate"), ("shard", shards, "dp_shard")):
        if size > 1:
            draft.say(fact, size, *draft.of(said))
    ranks, machines = draft.get("ranks"), draft.get("machines", 1)
    if draft.get("cut").startswith("hybrid") and "replica" not in draft.facts and draft.of("ranks"):
        if ranks % machines:
            raise TranslateError(f"num_processes: {ranks} does not divide by num_machines: {machines}")
        draft.say("replica", machines, *draft.of("machines"))
    product = replicas * shards * draft.get("tensor", 1)
    if ranks and draft.of("dp_replicate", "dp_shard") and product != ranks:
        raise TranslateError(f"parallelism_config: its sizes make {product} ranks, and num_processes is {ranks}")
    if draft.get("by_value") and "clip" in draft.facts:
        draft.say("clip_value", draft.facts.pop("clip"), *draft.of("clip", "by_value"))
    if {"fixed", "scale", "every"} & set(draft.facts):
        draft.facts.setdefault("scaled", True)
    _batches(draft)


def _batches(draft: Draft) -> None:
    """The product rule: rows of a step = ranks x micro-batches x rows of one."""
    total, micro, count = (draft.get(fact) for fact in ("train_batch", "micro_batch", "accumulate"))
    if total is None or not all(isinstance(one, (int, type(None))) for one in (total, micro, count)):
        return
    ranks = draft.get("ranks") and draft.get("ranks") // draft.get("tensor", 1)
    parts = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": count, "ranks": ranks}
    known = {name: one for name, one in parts.items() if one}
    if total % math.prod(known.values()) or (len(known) == 3 and total != math.prod(known.values())):
        said = listed(f"{name} {one}" for name, one in known.items())
        raise TranslateError(f"train_batch_size: {total} is not the product of {said}, and of what is not said")
