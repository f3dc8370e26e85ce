"""Losses that a module adds to the mean over tokens: as on one process with the same micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import P, parallel
from shardfn.interop import functional
from shardfn.testing import World
from tests.interop import zoo
from tests.interop.modules import meshed, off, seeded
from tests.refusals import refused

COEFFICIENT, EXPERTS, CHOSEN = 0.1, 4, 2
TOKENS = zoo.tokens()


def mixture() -> Any:
    return seeded(zoo.mixtral)


def tokens_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def balance(router_logits: tuple[Tensor, ...]) -> Tensor:
    logits = torch.stack(router_logits)
    weights, experts = logits.softmax(-1).topk(CHOSEN)
    return CHOSEN * parallel.balance_loss(parallel.Routing(experts, weights, logits), "shard")


def by_formula(router_logits: tuple[Tensor, ...]) -> Tensor:
    """Fedus et al., equation 4, on one process."""
    logits = torch.cat(router_logits)
    chosen = F.one_hot(logits.topk(CHOSEN).indices, EXPERTS).sum(1).to(logits.dtype)
    return EXPERTS * (chosen.mean(0) * logits.softmax(-1).mean(0)).sum()


def trained() -> dict[str, float]:
    mesh, ranks, found = meshed(), dist.get_world_size(), {}
    with zoo.norms_in_float64():
        module = mixture()
        model = functional(copy.deepcopy(module), min_stage_params=512)
        params = model.shard(mesh, sf.full_shard("shard"))
        for micro in (1, 2, 4):

            def part(p: Any, tokens: Tensor, micro: int = micro) -> Tensor:
                out = model(p, tokens, output_router_logits=True, use_cache=False)
                total = sf.psum(tokens_loss(out.logits, tokens), "shard") / TOKENS[:, 1:].numel()
                return total + COEFFICIENT * balance(out.router_logits) / micro

            def step(p: Any, tokens: Tensor, micro: int = micro, part: Any = part) -> Any:
                return sf.accumulate(part, tokens, micro=micro)(p)

            mapped = sf.shard_map(step, mesh=mesh, in_specs=(..., P("shard")), out_specs=(P(), ...), inputs="global")
            value, grads = mapped(params, TOKENS)
            module.zero_grad()
            want = torch.zeros((), dtype=torch.float64)
            for tokens in TOKENS.view(ranks, micro, -1, TOKENS.shape[1]).transpose(0, 1).flatten(1, 2):
                out = module(tokens, output_router_logits=True, use_cache=False)
                assert abs(by_formula(out.router_logits).item() - out.aux_loss.item()) < 1e-6
                loss = tokens_loss(out.logits, tokens) / TOKENS[:, 1:].numel()
                loss = loss + COEFFICIENT * by_formula(out.router_logits) / micro
                loss.backward()
                want += loss.detach()
            wanted = {k: p.grad for k, p in module.named_parameters()}
            found[f"{micro}"] = max(abs(float(value / want) - 1), off(model.state_dict(grads), wanted))
    return found


@pytest.mark.parametrize("world", [(1, "processes"), (2, "processes")], indirect=True)
def test_a_router_loss_is_that_of_one_process_with_the_same_micro_batches(world: World) -> None:
    for found in world.with_deadline(100).run(trained):
        assert {case: value for case, value in found.items() if not value < 1e-12} == {}


def test_a_router_loss_within_a_sum_over_tokens_is_an_error() -> None:
    model = functional(mixture(), min_stage_params=512)
    given: dict[str, Any] = {"labels": TOKENS, "use_cache": False}
    told = refused(
        lambda: model(model.tree, TOKENS, **given, output_router_logits=True, num_items_in_batch=48), ValueError
    )
    assert told.startswith("MixtralForCausalLM: num_items_in_batch must come without output_router_logits, got both")
    assert model(model.tree, TOKENS, **given, num_items_in_batch=48).loss > 0
