"""Buffers that change in forward are arguments and results; batch norms by the statistics of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfn as sf
from shardfn.interop import functional
from shardfn.testing import World
from tests.interop import zoo
from tests.interop.modules import Named, mapped, meshed, off, seeded, summed
from tests.reference import worst
from tests.refusals import refused

Norm = Callable[[int], nn.Module]


class Columns(nn.Module):
    """Batch norms of numbers `[rows, features]` or `[rows, features, length]`."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), norm(6), nn.Tanh()) for _ in range(2)])
        self.last = norm(6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        found: Tensor = self.last(x)
        return found


class Activated(nn.BatchNorm2d):
    """A batch norm and an activation in one class, by F.batch_norm itself."""

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        update = (self.running_mean, self.running_var)
        return torch.tanh(F.batch_norm(x, *update, self.weight, self.bias, self.training, 0.2, eps=self.eps)) * scale


class Around(nn.BatchNorm1d):
    """Torch's forward, and more."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class ByHand(nn.BatchNorm1d):
    """A formula of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) * self.weight if self.training else x


def squashed(n: int) -> nn.Module:
    """A batch norm of which one instance has another forward."""
    norm = nn.BatchNorm1d(n)
    own = norm.forward
    vars(norm)["forward"] = lambda x: torch.tanh(own(x))
    return norm


def differing(module: nn.Module) -> nn.Module:
    """Weights that are not 1, and statistics that are not 0."""
    torch.manual_seed(2)
    for m in module.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            for x in (m.weight, m.bias, m.running_mean):
                if x is not None:
                    nn.init.normal_(x, 0.5, 0.2)
    return module


PICTURES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "2d": (lambda: zoo.Pictures(), (3, 6, 6)),
    "2d cumulative": (lambda: zoo.Pictures(lambda n: nn.BatchNorm2d(n, momentum=None)), (3, 6, 6)),
    "2d without weights": (lambda: zoo.Pictures(lambda n: nn.BatchNorm2d(n, affine=False)), (3, 6, 6)),
    "2d with an activation": (lambda: zoo.Pictures(Activated), (3, 6, 6)),
    "1d": (lambda: Columns(nn.BatchNorm1d), (6,)),
    "1d with an activation": (lambda: Columns(Around), (6,)),
    "1d without statistics": (lambda: Columns(lambda n: nn.BatchNorm1d(n, track_running_stats=False)), (6,)),
    "1d of sequences": (lambda: Columns(lambda n: nn.BatchNorm1d(n, momentum=0.3)), (6, 6)),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = PICTURES[name]
    return differing(seeded(make)), zoo.numbers(*shape)


def steps(
    model: Any, params: Any, mesh: Any, x: Tensor, count: Callable[[Any], Any], check: bool
) -> tuple[Tensor, Named, Named]:
    """Two steps, the second with the buffers of the first: the last value and gradient, and the buffers."""
    buffers = model.buffers

    def loss(p: Any, b: Named) -> Any:
        y, b = model(p, x, buffers=b)
        return count(y.square().sum()), b

    for _ in range(2):
        (value, buffers), grads = mapped(sf.value_and_grad(loss, has_aux=True), mesh, check)(params, buffers)
    return value, model.state_dict(grads), buffers


def of_module(module: nn.Module, x: Tensor) -> tuple[Tensor, Named, Named]:
    for _ in range(2):
        module.zero_grad()
        value = module(x).square().sum()
        value.backward()
    grads = {k: p.grad.clone() for k, p in module.named_parameters() if p.grad is not None}
    return value.detach(), grads, dict(module.named_buffers())


def distances(got: tuple[Tensor, Named, Named], want: tuple[Tensor, Named, Named]) -> float:
    grads = {k: got[1][k] for k in want[1]}
    buffers = [float((got[2][k].double() - x.double()).abs().max()) for k, x in want[2].items()]
    assert got[2].keys() == want[2].keys()
    return max(abs(float(got[0] / want[0]) - 1), off(grads, want[1]) if grads else 0.0, *buffers, 0.0)


def of_ranks() -> dict[str, float]:
    """Each rank's own batch norms, and those of the whole batch, against the module on the rows or on all of them."""
    mesh, found, rank = meshed(), {}, dist.get_rank()
    for name in PICTURES:
        module, whole = made(name)
        for remat in (False, True):
            # Unequal rows: five here, three there.
            for kind, x in (("alone", whole.chunk(2)[rank]), ("together", whole.split([5, 3])[rank])):
                more: dict[str, Any] = {"sync_batch_norm": "shard"} if kind == "together" else {}
                model = functional(copy.deepcopy(module), min_stage_params=0, remat=remat, **more)
                params = sf.shard(model.tree, mesh, sf.full_shard("shard"))
                count = partial(sf.psum, axis="shard") if kind == "together" else (lambda v: v)
                got = steps(model, params, mesh, x, count, check=kind == "together")
                if kind == "together":
                    want = of_module(copy.deepcopy(module), whole)
                else:
                    value, grads, buffers = of_module(copy.deepcopy(module), x)
                    want = value, summed(grads), buffers
                found[f"{name}, {kind}, remat={remat}"] = distances(got, want)
                kept = dict(model.module.named_buffers())
                untouched = all(torch.equal(kept[k], b) for k, b in module.named_buffers())
                found[f"{name}, {kind}, kept"] = 0.0 if untouched else 1.0
    return found


@pytest.mark.world(2, "processes")
def test_batch_norms_alone_and_together_are_those_of_the_module(world: World) -> None:
    for found in world.run(of_ranks):
        assert {case: value for case, value in found.items() if not value < 1e-12} == {}


def curved() -> dict[str, float]:
    mesh, found, rank = meshed(), {}, dist.get_rank()
    module, whole = made("1d")
    x = whole.split([5, 3])[rank]
    model = functional(copy.deepcopy(module), min_stage_params=0, sync_batch_norm="shard")
    params = sf.shard(model.tree, mesh, sf.full_shard("shard"))
    draw = zoo.generator(4)
    along = {k: torch.randn(p.shape, generator=draw, dtype=p.dtype) for k, p in module.named_parameters()}

    def slope(p: Named) -> Any:
        return torch.func.grad(
            lambda p: (
                torch.func.functional_call(
                    copy.deepcopy(module), (p, {k: b.clone() for k, b in module.named_buffers()}), (whole,)
                )
                .square()
                .sum()
            )
        )(p)

    whole_params = {k: p.detach() for k, p in module.named_parameters()}
    want = torch.func.jvp(slope, (whole_params,), (along,))[1]
    cut = {stage: {k: along[f"{stage}.{k}" if stage else k] for k in part} for stage, part in model.tree.items()}
    t = sf.shard(cut, mesh, sf.full_shard("shard"))

    def loss(p: Any) -> Tensor:
        return sf.psum(model(p, x, buffers=model.buffers)[0].square().sum(), "shard")

    got = model.state_dict(mapped(lambda p, t: torch.func.jvp(sf.grad(loss), (p,), (t,))[1], mesh)(params, t))
    found["hvp"] = off({k: got[k] for k in want}, want)
    model.module.eval()
    module.eval()
    y = mapped(lambda p: model(p, x), mesh)(params)
    found["eval"] = float((y - module(x).detach()).abs().max())
    found["eval, buffers"] = float((mapped(lambda p: model(p, x, buffers={})[0], mesh)(params) - y).abs().max())
    return found


def run(model: Any, x: Tensor, params: Any) -> Any:
    return model(params, x, buffers=model.buffers)


def of_odd_classes() -> list[Any]:
    """Values with statistics of all rows of norms with other forwards, against those of norms on all rows."""
    mesh, whole, found = meshed(), zoo.numbers(6), []
    for norm, reference in ((nn.SyncBatchNorm, nn.BatchNorm1d), (squashed, squashed)):
        model = functional(seeded(partial(Columns, norm)), min_stage_params=0, sync_batch_norm="shard")
        params = model.shard(mesh, sf.full_shard("shard"))
        mine = whole.chunk(2)[dist.get_rank()]
        y, _ = mapped(partial(run, model, mine), mesh)(params)
        want = seeded(partial(Columns, reference))(whole).detach().chunk(2)[dist.get_rank()]
        found.append(float((y - want).abs().max()))
    model = functional(seeded(lambda: Columns(ByHand)), min_stage_params=0, sync_batch_norm="shard")
    params = model.shard(mesh, sf.full_shard("shard"))
    call = mapped(lambda p: model(p, whole, buffers=model.buffers), mesh)
    return [*found, refused(lambda: call(params), TypeError)]


@pytest.mark.world(2, "processes")
def test_batch_norms_with_other_forwards_are_synchronised_or_refused_by_name(world: World) -> None:
    for *distances, message in world.run(of_odd_classes):
        assert worst(distances) < 1e-12
        assert message.startswith("sync_batch_norm: ByHand must normalize by torch.nn.functional.batch_norm")


def alone_in_its_batch(axis: str = "shard") -> str:
    model = functional(seeded(lambda: Columns(nn.BatchNorm1d)), min_stage_params=0, sync_batch_norm=axis)
    mesh = meshed()
    params = sf.shard(model.tree, mesh, sf.full_shard("shard"))
    x = zoo.numbers(6)[dist.get_rank() : 1]  # one row on all ranks together
    return refused(lambda: mapped(lambda p: model(p, x, buffers=model.buffers), mesh)(params), ValueError)


@pytest.mark.world(2, "processes")
def test_a_batch_of_one_row_has_no_variance(world: World) -> None:
    for found in world.run(alone_in_its_batch):
        assert "got one value for each channel on all ranks along 'shard' together" in found


@pytest.mark.world(2, "processes")
def test_an_axis_that_the_mesh_lacks_is_told_by_the_option_that_names_it(world: World) -> None:
    for found in world.run(alone_in_its_batch, "dat"):
        assert found.startswith("sync_batch_norm: unknown axis 'dat'")


@pytest.mark.world(2, "processes")
def test_batch_norms_together_have_second_derivatives_and_an_end_of_training(world: World) -> None:
    for found in world.run(curved):
        assert {case: value for case, value in found.items() if not value < 1e-12} == {}


# --- rotary frequencies that are computed again for longer texts ---

ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("Llama", {"factor": 2.0}),
    "longrope": ("Phi3", {"factor": 2.0, "original_max_position_embeddings": 8,
                          "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}),
}  # fmt: skip


def longer(rope: str) -> nn.Module:
    tr, (kind, more) = zoo._transformers(), ROPES[rope]
    config = getattr(tr, f"{kind}Config")(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, max_position_embeddings=16, use_cache=False, pad_token_id=0,
        attn_implementation="eager", rope_parameters={"rope_type": rope, "rope_theta": 10000.0, **more},
    )  # fmt: skip
    return seeded(lambda: getattr(tr, f"{kind}ForCausalLM")(config))


def of_lengths(rope: str, remat: bool) -> dict[str, float]:
    """How far a loss and its gradient are from the module's, for texts of these lengths one after another."""
    alone, mesh, found = longer(rope), meshed(), {}
    model = functional(longer(rope), min_stage_params=512, remat=remat)
    params, stale = model.shard(mesh, sf.full_shard("shard")), dict(model.buffers)

    def fails(m: Any, args: Any) -> None:
        raise KeyError("in the middle of a call")

    for turn, length in enumerate((6, 20, 30, 12, 5)):
        tokens = zoo.tokens(length).chunk(dist.get_world_size())[dist.get_rank()]
        hook = model.module.lm_head.register_forward_pre_hook(fails)  # type: ignore[union-attr]
        with pytest.raises(KeyError):
            model(params, tokens)
        hook.remove()
        given = {"buffers": stale} if turn % 2 else {}

        def loss(p: Any, given: Any = given, tokens: Tensor = tokens) -> Tensor:
            out = model(p, tokens, **given)
            return (out[0] if given else out).logits.square().sum()

        value, grads = mapped(sf.value_and_grad(loss), mesh)(params)
        alone.zero_grad()
        want = alone(tokens).logits.square().sum()
        want.backward()
        gradient = summed({k: p.grad.clone() for k, p in alone.named_parameters() if p.grad is not None})
        found[f"{turn}: {length}"] = max(abs(float(value / want.detach()) - 1), off(model.state_dict(grads), gradient))
    return found


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.world(2, "processes")
def test_frequencies_follow_the_lengths_of_texts(world: World, rope: str) -> None:
    for found in world.with_deadline(120).run(of_lengths, rope, True):
        assert {case: x for case, x in found.items() if not x < 1e-12} == {}
