"""A derivative in forward mode through attention, in a loss: the same on every mesh, and as when written out."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn.testing import world

if find_spec("sklearn") is None:  # which takes seconds to load, and not every worker needs it
    pytest.skip("scikit-learn is not installed", allow_module_level=True)
from examples import mean_flow as example

TINY = example.Config(batch=16, width=16, layers=2, heads=2, patch=4, warmup=2, clip=1e9, dtype=torch.float64)


def numbers(replica: int, shard: int) -> dict[str, Any]:
    mesh = sf.make_mesh(device="cpu", replica=replica, shard=shard)
    run = example.train(TINY, mesh, sf.hybrid_shard(shard="shard", replica="replica"), 4, 0)
    whole = sf.unshard(run.params)
    digits = example.sample(run.params, torch.arange(4), 0, TINY)
    assert torch.equal(example.images_of(example.patches_of(digits, TINY), TINY).clamp(-9, 9), digits.clamp(-9, 9))
    return {"errors": run.errors, "out": whole["head"]["out"], "digits": digits}


def test_mean_flow_trains_alike_on_every_mesh() -> None:
    wanted = world(1).run(numbers, 1, 1)[0]
    assert wanted["errors"][-1] != wanted["errors"][0]
    for sizes in ((1, 2), (2, 2)):
        for found in world(sizes[0] * sizes[1]).run(numbers, *sizes):
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def test_mean_flow_is_that_of_attention_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    params = {
        key: [f(g) for f in make] if isinstance(make, list) else make(g) for key, make in example.init(TINY).items()
    }
    x, noise = torch.randn(2, 5, TINY.patches, 16, generator=g, dtype=torch.float64)
    r, t = torch.rand(2, 5, generator=g, dtype=torch.float64).sort(0).values
    rows = x, torch.arange(5), noise, r, t
    value, grads = sf.value_and_grad(example.mean_flow, has_aux=True)(params, rows, TINY)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(sf, "jvp", torch.func.jvp)
    wanted_grads, wanted = torch.func.grad_and_value(example.mean_flow, has_aux=True)(params, rows, TINY)
    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-11, atol=1e-12)
