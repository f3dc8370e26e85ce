"""Batches of tokenizers and processors, as arguments of steps and of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn import P
from shardfn.interop import functional
from shardfn.testing import World
from tests.interop import zoo
from tests.interop.modules import meshed
from tests.reference import worst

transformers = pytest.importorskip("transformers")


def of_batches() -> list[float]:
    mesh, module = meshed(), zoo.build("llama")
    whole = zoo.text()
    want = module(**whole).logits.sum().item()
    model = functional(zoo.build("llama"), min_stage_params=512)
    params = model.shard(mesh, sf.full_shard("shard"))
    found = []
    for kind in (transformers.BatchEncoding, transformers.BatchFeature):

        def total(p: Any, batch: Any) -> Any:
            return sf.psum(model(p, **batch).logits.sum(), "shard")

        for micro in (1, 2):

            def step(p: Any, batch: Any, micro: int = micro, total: Any = total) -> Any:
                return sf.accumulate(total, batch, micro=micro)(p)[0]

            mapped = sf.shard_map(step, mesh=mesh, in_specs=(..., P("shard")), out_specs=P(), inputs="global")
            found.append(abs(mapped(params, kind(whole)).item() / want - 1))
    dist.barrier()
    return found


@pytest.mark.world(2, "processes")
def test_batches_of_tokenizers_are_cut_like_dicts(world: World) -> None:
    for found in world.with_deadline(100).run(of_batches):
        assert len(found) == 4
        assert worst(found) < 1e-10


def test_they_keep_their_class_and_names() -> None:
    functional(zoo.build("llama"), min_stage_params=512)
    batch = transformers.BatchEncoding({"b": torch.ones(2), "a": torch.zeros(2)})
    doubled = torch.utils._pytree.tree_map(lambda x: x * 2, batch)
    assert type(doubled) is transformers.BatchEncoding
    assert [*doubled] == ["b", "a"]
    assert doubled.b.equal(torch.full((2,), 2.0))
