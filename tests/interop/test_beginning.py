"""What files lack begins as its classes let it begin: the same numbers on any mesh, and said once."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfn as sf
from shardfn import interop, quant
from shardfn.shards.random import mixed
from shardfn.testing import World
from tests.interop.modules import data_mesh, on_first
from tests.models import STRATEGIES
from tests.refusals import refused

Loaded = dict[str, Tensor]


class Scales(nn.Module):
    """With a parameter of its own, which it sets as torch's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.empty(40)), nn.Linear(5, 8)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale, 2.0, 3.0)
        nn.init.constant_(self.inner.bias, 7.0)


class Applies(nn.Module):
    """Sets the weights of all modules inside, as many vision models do."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.blocks = nn.Parameter(torch.zeros(3)), nn.ModuleList([nn.Linear(50, 50), nn.LayerNorm(4)])
        self.apply(self._init_weights)

    def _init_weights(self, m: nn.Module) -> None:
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, 5.0, 0.1)
        elif m is self or isinstance(m, Applies):
            nn.init.zeros_(m.token)


class Silent(nn.Module):
    """Nobody but its constructor knows how it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(4))


class Shares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4, padding_idx=2), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def within(low: float, high: float) -> Callable[[Tensor], bool]:
    return lambda x: bool((x >= low).all() and (x <= high).all() and (x.numel() < 2 or x.std() > 0))


def constant(value: float) -> Callable[[Tensor], bool]:
    return lambda x: bool((x == value).all())


UNIT = within(-1 / math.sqrt(6), 1 / math.sqrt(6))
TABLE: dict[str, tuple[Callable[[], nn.Module], dict[str, Callable[[Tensor], bool]]]] = {
    "LSTM": (lambda: nn.LSTM(3, 6), {"weight_ih_l0": UNIT, "bias_hh_l0": UNIT}),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2),
        {"in_proj_weight": within(-0.5, 0.5), "in_proj_bias": constant(0), "out_proj.bias": constant(0)},
    ),
    "norm": (lambda: nn.LayerNorm(9), {"weight": constant(1), "bias": constant(0)}),
    "tied, padded": (Shares, {"embed.weight": lambda x: bool((x[2] == 0).all() and x.std() > 0.3)}),
    "of one's own": (Scales, {"scale": within(2, 3), "inner.bias": constant(7), "inner.weight": within(-0.5, 0.5)}),
    "applied": (Applies, {"token": constant(0), "blocks.0.weight": within(4, 6), "blocks.1.weight": constant(1)}),
}


def begun(module: nn.Module, mesh: Any, strategy: str = "full_shard", files: Any = None, **more: Any) -> Loaded:
    model = interop.functional(module, min_stage_params=16)
    params = interop.load(files or {}, model, mesh, STRATEGIES[strategy], **{"strict": False, **more})
    return model.state_dict(params)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with interop.meta():
        return make().double()


def tables() -> dict[str, Any]:
    mesh, found = data_mesh(dist.get_world_size()), dict[str, Any]()
    for name, (make, wanted) in TABLE.items():
        values = begun(on_meta(make), mesh)
        found[name] = [key for key, right in wanted.items() if not right(values[key])]
        again, other = begun(on_meta(make), mesh, "ddp"), begun(on_meta(make), mesh, seed=1)
        found[f"{name}, replicated"] = [key for key, x in values.items() if not x.equal(again[key])]
        drawn = [key for key, x in values.items() if x.numel() > 1 and x.std() > 0]
        found[f"{name}, another seed"] = [key for key in drawn if values[key].equal(other[key])]
    draw = torch.Generator().manual_seed(mixed(0, "1.weight"))
    want = nn.init.kaiming_uniform_(torch.empty(4, 4, dtype=torch.float64), a=math.sqrt(5), generator=draw)
    linears = begun(on_meta(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))), mesh)
    found["bit for bit"] = [] if linears["1.weight"].equal(want) else ["1.weight"]
    state, values = torch.get_rng_state(), begun(on_meta(Scales), mesh, files={"scale": torch.ones(40)})
    found["what is there"] = [] if (values["scale"] == 1).all() else ["scale"]
    found["torch's generator"] = [] if state.equal(torch.get_rng_state()) else ["moved"]
    kept = nn.Linear(3, 3).double()
    nn.init.constant_(kept.weight, 4.0), nn.init.constant_(kept.bias, 5.0)
    found["what the module has"] = [key for key, x in begun(kept, mesh).items() if x.mean() not in (4.0, 5.0)]
    packed = interop.functional(on_meta(lambda: nn.Linear(64, 64)), min_stage_params=16)
    whole = begun(on_meta(lambda: nn.Linear(64, 64)), mesh)["weight"]
    packed.tree = quant.quantize(packed.tree, quant.nf4(), "weight")
    loaded = sf.unshard(interop.load({}, packed, mesh, STRATEGIES["full_shard"], strict=False, frozen="weight"))
    far = float((quant.dequantize(loaded)[""]["weight"] - whole).abs().max())
    found["in few bits"] = [] if 0 < far < 0.05 else [far]
    return found


@pytest.mark.world(2, "processes")
def test_parameters_begin_as_their_classes_do_on_any_mesh(world: World) -> None:
    for found in world.with_deadline(120).run(tables):
        assert {case: wrong for case, wrong in found.items() if wrong} == {}


def refusals() -> dict[str, str]:
    mesh = data_mesh(dist.get_world_size())
    normed = lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))  # noqa: E731
    return {
        "silent": refused(lambda: begun(on_meta(lambda: nn.Sequential(Silent())), mesh)),
        "silent, from one": refused(lambda: begun(on_meta(Silent), mesh, files={}, src_rank=0)),
        "computed": refused(lambda: begun(on_meta(normed), mesh)),
        "strict": refused(lambda: begun(on_meta(Scales), mesh, strict=True)),
        "seeds": refused(lambda: begun(on_meta(Scales), mesh, seed=dist.get_rank()), ValueError),
        "no seed": refused(lambda: begun(on_meta(Scales), mesh, seed="0"), TypeError),
    }


@pytest.mark.world(2, "processes")
def test_what_has_no_beginning_is_an_error_on_every_rank(world: World) -> None:
    for said in world.run(refusals):
        assert (
            "these files lack 0.gate, which neither reset_parameters() nor _init_weights() of Silent" in said["silent"]
        )
        assert "these files lack gate" in said["silent, from one"]
        assert "build it outside of interop.meta(), or give its class a reset_parameters()" in said["silent"]
        assert "parametrizations.weight.original0" in said["computed"]
        assert "with strict=False what these files lack begins as its classes let it begin" in said["strict"]
        assert "the seeds differ between ranks" in said["seeds"]
        assert "seed must be an int, got '0'" in said["no seed"]


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """What the log of shardfn says on this rank."""
    told, handler, log = list[str](), logging.Handler(), logging.getLogger("shardfn")
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: "not strict" in record.getMessage())
    log.addHandler(handler)
    try:
        yield told
    finally:
        log.removeHandler(handler)


def headed(folder: Path) -> tuple[Loaded, dict[str, bool], list[str]]:
    """A head on the files of a model without one."""
    import transformers

    theirs: Any = transformers
    config = theirs.BertConfig(
        vocab_size=48, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=40,
        initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    base = transformers.BertModel(config)
    on_first(lambda: base.save_pretrained(folder))
    mesh = data_mesh(dist.get_world_size())

    def loaded(**more: Any) -> Loaded:
        with interop.meta():
            module = transformers.BertForSequenceClassification(config)
        return begun(module, mesh, files=folder, **more)

    others: dict[str, dict[str, Any]] = {"replicated": {"strategy": "ddp"}, "from one": {"src_rank": 0}}
    with logged() as told:
        values = loaded()
        checks = {name: same(loaded(**how), values) for name, how in others.items()}
    checks["the base"] = all(values[f"bert.{name}"].equal(p) for name, p in base.named_parameters())
    return values, checks, told


def same(a: Loaded, b: Loaded) -> bool:
    return a.keys() == b.keys() and all(x.equal(b[name]) for name, x in a.items())


@pytest.mark.world(2, "processes")
def test_a_head_on_a_model_without_one_is_that_of_its_class(world: World, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    values, checks, told = world.with_deadline(120).run(headed, tmp_path)[0]
    weight = values["classifier.weight"]
    assert all(checks.values()), checks
    assert values["classifier.bias"].eq(0).all()
    assert 0.45 < weight.std() < 0.55
    assert len(told) == 3
    assert all("classifier.bias, classifier.weight begin as their classes let them begin" in one for one in told)
    draw = torch.Generator().manual_seed(mixed(0, "classifier.weight"))
    nn.init.kaiming_uniform_(torch.empty(40, 16), a=math.sqrt(5), generator=draw)
    assert weight.equal(torch.empty(40, 16).normal_(0.0, 0.5, generator=draw))


def many() -> list[str]:
    with logged() as told:
        begun(on_meta(lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(60)))), data_mesh(dist.get_world_size()))
    return told


@pytest.mark.world(2, "processes")
def test_the_message_is_short_whatever_is_missing(world: World) -> None:
    first, *others = world.run(many)
    assert others == [[]]
    (said,) = first
    assert re.search(r"and 112 more \(all of it in \S+\) begin as their classes let them begin", said)
    assert len(said) < 600
