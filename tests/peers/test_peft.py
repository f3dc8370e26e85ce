"""Behaviors that peft's tests check: adapters on shards beside peft's own, on the same small module."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfn as sf
import shardfn.optim as so
from shardfn import P, interop, lora
from shardfn.testing import world
from tests.models import distance, drawn
from tests.peers.modules import filled

VOCABULARY, WIDTH = 12, 8
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed: pip install peft"),
    pytest.mark.filterwarnings("ignore"),  # of peft's own
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(torch.tanh(self.up(self.q_proj(x) * self.k_proj(x).sigmoid()))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TOKENS = torch.arange(4 * 6).view(4, 6) * 7 % VOCABULARY
Config = dict[str, Any]
CONFIGS: dict[str, Config] = {
    "ends of names": {"target_modules": ["q_proj", "k_proj"]},
    "a pattern": {"target_modules": r"layers\.1\.(up|down)"},
    "one layer by its path": {"target_modules": ["layers.0.q_proj"]},
    "all linear layers": {"target_modules": ["q_proj", "k_proj", "up", "down", "head"]},
    "an embedding": {"target_modules": ["embed"]},
    "rank-stabilized": {"target_modules": ["q_proj", "up"], "use_rslora": True},
    "weight-decomposed": {"target_modules": ["q_proj", "up"], "use_dora": True},
    "both": {"target_modules": ["down"], "use_rslora": True, "use_dora": True},
    "ranks by pattern": {"target_modules": ["q_proj", "up"], "rank_pattern": {"layers.0.q_proj": 3},
                         "alpha_pattern": {"up": 5}},
    "excluded layers": {"target_modules": ["q_proj", "up"], "exclude_modules": ["layers.0.up"]},
    "modules that are trained whole": {"target_modules": ["q_proj"], "modules_to_save": ["head"]},
    "norms that are trained whole": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "biases of adapted layers": {"target_modules": ["q_proj"], "bias": "lora_only"},
    "all biases": {"target_modules": ["k_proj"], "bias": "all"},
}  # fmt: skip
RANK, ALPHA = 2, 6


def theirs(config: Config) -> Any:
    """peft's model, whose adapters and copies have drawn numbers."""
    peft = importlib.import_module("peft")
    made = peft.get_peft_model(filled(Model()), peft.LoraConfig(r=RANK, lora_alpha=ALPHA, **config)).double().eval()
    draw = drawn(3, 0.3)
    for _, p in sorted(made.named_parameters()):
        if p.requires_grad:
            p.data += draw(*p.shape)
    return made


def ours(config: Config) -> tuple[Any, Any, Any]:
    """The mesh, a function of the module, and its parameters."""
    mesh = sf.make_mesh(device="cpu", shard=-1)
    model = interop.functional(filled(Model()), min_stage_params=8)
    model.module.eval()
    return mesh, model, sf.shard(model.tree, mesh, sf.full_shard("shard"), frozen=model.frozen)


def of_theirs(config: Config, folder: Path) -> tuple[Any, ...]:
    """Both models, with adapters that shardfn reads from peft's files."""
    made, (mesh, model, params) = theirs(config), ours(config)
    if dist.get_rank() == 0:
        made.save_pretrained(folder / "theirs")
    dist.barrier()
    adapters = lora.load(folder / "theirs", model, mesh, sf.full_shard("shard"), params=params)
    return made, mesh, model, params, adapters


def read_with_outputs_and_gradients(config: Config, folder: Path) -> None:
    made, mesh, model, params, adapters = of_theirs(config, folder)
    want = made(TOKENS)
    want.square().sum().backward()
    mine = TOKENS.chunk(dist.get_world_size())[dist.get_rank()]

    def loss(adapters: Any, tokens: Tensor) -> Tensor:
        return sf.psum(model(params, tokens, adapters=adapters).square().sum(), "shard")

    run = sf.shard_map(sf.value_and_grad(loss), mesh=mesh, in_specs=(..., P("shard")), out_specs=(P(), ...))
    value, slopes = run(adapters, mine)
    assert abs(value - want.square().sum().detach()) < 1e-10 * value
    assert distance(model(params, TOKENS, adapters=adapters), want.detach()) < 1e-12
    lora.save_pretrained(folder / "slopes", model, slopes)
    got = files_of(folder / "slopes")
    named = {
        name.replace("lora_magnitude_vector.default.weight", "lora_magnitude_vector").replace(".default", ""): p.grad
        for name, p in made.named_parameters()
        if "lora_" in name
    }
    assert distance({name: x for name, x in got.items() if "lora_" in name}, named, floor=1e-6) < 1e-10


def files_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def written_and_read_by_peft(config: Config, folder: Path) -> None:
    _, mesh, model, params, adapters = of_theirs(config, folder)
    moved = sf.shard(optree.tree_map(lambda x: x * 1.25, sf.unshard(adapters)), mesh, sf.full_shard("shard"))
    lora.save_pretrained(folder / "ours", model, moved)
    peft = importlib.import_module("peft")
    again = peft.PeftModel.from_pretrained(filled(Model()), folder / "ours").double().eval()
    assert distance(model(params, TOKENS, adapters=moved), again(TOKENS).detach()) < 1e-12


def merged_and_unmerged(config: Config, folder: Path) -> None:
    made, _, model, params, adapters = of_theirs(config, folder)
    before = model.state_dict(params)
    merged = lora.merge(params, adapters, model)
    want = made(TOKENS).detach()
    assert distance(model(merged, TOKENS), want) < 1e-12
    assert distance(made.merge_and_unload()(TOKENS).detach(), want) < 1e-12
    if not config.get("use_dora") and "modules_to_save" not in config and "bias" not in config:
        assert distance(model.state_dict(lora.unmerge(merged, adapters, model)), before) < 1e-12


CHECKS = [read_with_outputs_and_gradients, written_and_read_by_peft, merged_and_unmerged]


def checked(name: str, folder: str) -> None:
    for check in CHECKS:
        path = Path(folder) / check.__name__
        check(CONFIGS[name], path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_are_those_of_peft(name: str, tmp_path: Path) -> None:
    """Read with outputs and gradients, written and read again, and merged."""
    world(2).run(checked, name, str(tmp_path))


# --- behaviors of one module ---


def new_adapters_change_nothing() -> None:
    for options in ({}, {"dora": True}, {"rslora": True}, {"bias": "all"}, {"modules_to_save": ["head"]}):
        _, model, params = ours({})
        adapters = lora.init(model, ["q_proj", "embed"], RANK, **options)
        assert distance(model(params, TOKENS, adapters=adapters), model(params, TOKENS)) < 1e-12


def only_adapters_are_trained_and_the_base_stays() -> None:
    mesh, model, params = ours({})
    before = model.state_dict(params)
    adapters = sf.shard(lora.init(model, ["q_proj", "up"], RANK), mesh, sf.ddp("shard"))
    optimizer = so.adamw(0.05)
    state = optimizer.init(adapters)
    loss = lambda a: model(params, TOKENS, adapters=a).square().mean() / dist.get_world_size()  # noqa: E731
    values = []
    for _ in range(4):
        value, slopes = sf.value_and_grad(loss)(adapters)
        adapters, state = optimizer.step(adapters, slopes, state)
        values.append(value.item())
    assert values == sorted(values, reverse=True)
    assert distance(model.state_dict(params), before) == 0


def training_is_that_of_one_process() -> None:
    """Three steps of AdamW on the products' factors, beside a module with sums in the places of weights."""
    mesh, model, params = ours({})
    whole = lora.init(model, ["q_proj"], RANK, alpha=ALPHA, seed=1)
    adapters = sf.shard(whole, mesh, sf.full_shard("shard"))
    plain = filled(Model())
    factors = {key: [x.detach().clone().requires_grad_() for x in optree.tree_leaves(part)]
               for key, part in whole.items() if optree.tree_leaves(part)}  # fmt: skip
    ours_, theirs_ = so.adamw(0.05), torch.optim.AdamW([x for pair in factors.values() for x in pair], lr=0.05)
    state, mine = ours_.init(adapters), TOKENS.chunk(2)[dist.get_rank()]
    for _ in range(3):
        slopes = sf.grad(lambda a: model(params, mine, adapters=a).square().sum() / TOKENS.numel())(adapters)
        adapters, state = ours_.step(adapters, slopes, state)
        theirs_.zero_grad()
        sums = {f"{key}.q_proj.weight": plain.get_parameter(f"{key}.q_proj.weight") + ALPHA / RANK * b @ a
                for key, (a, b) in factors.items()}  # fmt: skip
        (torch.func.functional_call(plain, sums, (TOKENS,)).square().sum() / TOKENS.numel()).backward()
        theirs_.step()
    got = {key: optree.tree_leaves(part) for key, part in sf.unshard(adapters).items()}
    for key, pair in factors.items():
        assert distance(got[key], [x.detach() for x in pair]) < 1e-11


def a_name_that_matches_nothing_is_refused() -> None:
    for options in ({"targets": ["nowhere"]}, {"targets": r"none\..*"}, {"targets": ["norm"]},
                    {"targets": ["q_proj"], "modules_to_save": ["nowhere"]}):  # fmt: skip
        _, model, _ = ours({})
        with pytest.raises((ValueError, TypeError)):
            lora.init(model, rank=RANK, **options)


def dropout_is_of_training_alone() -> None:
    _, model, params = ours({})
    adapters = lora.init(model, ["q_proj"], RANK, dropout=0.5)
    moved = optree.tree_map(lambda x: x + 1, adapters)
    outputs = [model(params, TOKENS, adapters=moved) for _ in range(2)]
    assert distance(*outputs) == 0
    model.module.train()
    outputs = [model(params, TOKENS, adapters=moved) for _ in range(2)]
    assert distance(*outputs) > 1e-3


def several_adapters_share_a_base() -> None:
    _, model, params = ours({})
    one, two = (lora.init(model, ["q_proj"], rank, seed=rank) for rank in (1, 3))
    one, two = (optree.tree_map(lambda x: x + 0.1, tree) for tree in (one, two))
    first = model(params, TOKENS, adapters=one)
    assert distance(model(params, TOKENS, adapters=two), first) > 1e-3
    assert distance(model(params, TOKENS, adapters=one), first) == 0


def a_module_that_peft_has_changed_is_a_module() -> None:
    made = theirs(CONFIGS["ends of names"])
    plain, mesh = copy.deepcopy(made), sf.make_mesh(device="cpu", shard=-1)
    model = interop.functional(made, min_stage_params=8)
    params = model.shard(mesh, sf.full_shard("shard"))
    slopes = sf.grad(lambda p: model(p, TOKENS).square().sum() / dist.get_world_size())(params)
    plain(TOKENS).square().sum().backward()
    got = model.state_dict(slopes)
    for name, p in plain.named_parameters():
        if p.requires_grad:
            assert distance(got[name], p.grad) < 1e-11, name


BEHAVIORS = [
    new_adapters_change_nothing, training_is_that_of_one_process, a_name_that_matches_nothing_is_refused,
    only_adapters_are_trained_and_the_base_stays, dropout_is_of_training_alone, several_adapters_share_a_base,
    a_module_that_peft_has_changed_is_a_module,
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("behavior", BEHAVIORS, ids=lambda f: f.__name__)
def test_behavior_of_peft(behavior: Callable[[], None]) -> None:
    world(2).run(behavior)
