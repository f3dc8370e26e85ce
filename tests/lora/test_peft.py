"""Adapters beside peft's, on the same models: files both ways, and training."""

from __future__ import annotations

import importlib
import json
import re
import warnings
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfn as sf
import shardfn.optim as so
from shardfn import P, interop, lora, quant
from shardfn.lora import files
from shardfn.mesh.spec import joined
from shardfn.quant import bitsandbytes
from shardfn.testing import World
from tests.interop import zoo
from tests.models import distance, mesh_of
from tests.reference import worst

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("peft")

Kind = dict[str, Any]
CONFIGS: dict[str, tuple[str, Kind]] = {
    "all-linear": ("llama", {"target_modules": "all-linear", "lora_dropout": 0.1}),
    "dora": ("llama", {"target_modules": ["q_proj", "lm_head", "embed_tokens"], "use_dora": True}),
    "patterns": (
        "gpt2",
        {
            "target_modules": r".*\.(c_attn|c_fc)", "use_rslora": True, "rank_pattern": {"h.0.attn.c_attn": 3},
            "alpha_pattern": {"c_fc": 5}, "exclude_modules": ["1.attn.c_attn"], "modules_to_save": ["ln_f"],
        },
    ),
    "ends of names": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["layernorm", "head"]}),
    "tied": ("llama_tied", {"target_modules": ["embed_tokens", "v_proj"]}),
    "own": ("joint", {"target_modules": r"blocks\.\d\.0"}),
    "experts": ("mixtral", {"target_modules": "all-linear"}),
    "turned experts": (
        "gpt_oss",
        {
            "target_modules": ["q_proj", "o_proj"], "target_parameters": ["experts.down_proj", "experts.gate_up_proj"],
            "bias": "lora_only", "use_rslora": True, "rank_pattern": {"0.mlp.experts.gate_up_proj": 3},
        },
    ),
    "parameters alone": (
        "gpt_oss",
        {
            "target_modules": [], "target_parameters": ["1.mlp.experts.down_proj", "router.weight", "lm_head.weight"],
            "bias": "lora_only", "alpha_pattern": {"lm_head.weight": 3},
        },
    ),
    "biases": ("gpt2", {"target_modules": ["c_attn", "wte"], "bias": "all", "modules_to_save": ["ln_f"]}),
    "biases of layers": ("bert", {"target_modules": ["query", "intermediate.dense"], "bias": "lora_only"}),
    "parameters above layers": (
        "banks", {"target_modules": ["inner"], "target_parameters": ["mixed", "first.up"], "bias": "all"}
    ),
    "all biases": ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": ["router.weight"], "bias": "all"}),
}  # fmt: skip


def gpt_oss() -> Any:
    return zoo.made(
        "GptOss", "ForCausalLM", vocab_size=zoo.VOCABULARY, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
        attn_implementation="eager", use_cache=False, experts_implementation="eager",
        layer_types=["full_attention"] * 2,
    )  # fmt: skip


class Bank(nn.Module):
    """Parameters of its own, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.up, self.mixed = (nn.Parameter(torch.randn(*shape) / 4) for shape in ((8, 8), (3, 8, 8)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(torch.tanh(self.inner(x)) @ self.mixed.sum(0)) + x @ self.up.tanh()
        return found


class Banks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Bank(), Bank()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x))
        return found


FAMILIES = zoo.ZOO | {
    "gpt_oss": zoo.Case(gpt_oss, zoo.text, zoo.next_tokens),
    "banks": zoo.Case(Banks, lambda: {"x": zoo.numbers(8)}, zoo.squared),
}


def build(kind: str) -> Any:
    torch.manual_seed(0)
    with zoo.norms_in_float64():
        return FAMILIES[kind].make().double()


def library() -> Any:
    return quiet(importlib.import_module, "peft")


def quiet(f: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return f(*args, **kwargs)


def injected(module: Any, config: Kind, **more: Any) -> Any:
    peft = library()
    torch.manual_seed(3)
    made = quiet(peft.get_peft_model, module, peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **config))
    return made.double().eval()


def ours(config: Kind, model: Any) -> Any:
    names = {
        "use_dora": "dora", "use_rslora": "rslora", "lora_dropout": "dropout", "exclude_modules": "exclude",
    }  # fmt: skip
    more = {names.get(key, key): x for key, x in config.items() if key != "target_modules"}
    return lora.init(model, config["target_modules"], 4, alpha=8, **more)


def output(module: Any, batch: Any) -> Tensor:
    """Of a module, or of what `functional` made."""
    out = module(**batch)
    return out if isinstance(out, Tensor) else out[0]


def meant(config: Kind, theirs: Any) -> Kind:
    """A configuration in which peft said by itself which parameters of a mixture of experts it means."""
    names = ("target_modules", "target_parameters", "rank_pattern", "alpha_pattern")
    made = theirs.peft_config["default"]
    return config if made.target_parameters is None else config | {name: getattr(made, name) for name in names}


def both_ways(name: str, folder: str) -> dict[str, float]:
    """peft's files are read here, give what they give there, and come back as they were."""
    kind, config = CONFIGS[name]
    path, mesh, rank = Path(folder) / f"{name} {dist.get_world_size()}", mesh_of(shard=-1), dist.get_rank()
    batch = FAMILIES[kind].batch()
    theirs = injected(build(kind), config)
    _moved(theirs)
    if rank == 0:
        quiet(theirs.save_pretrained, path / "theirs")
    dist.barrier()
    model = interop.functional(build(kind), min_stage_params=512)
    model.module.eval()
    params = sf.shard(model.tree, mesh, sf.full_shard("shard"), frozen=model.frozen)
    adapters = lora.load(path / "theirs", model, mesh, sf.ddp("shard"), params=params)
    want, found = output(theirs, batch), {}
    found["read"] = distance(_out(model, params, adapters, batch), want.detach())
    found["gradients"] = distance(*_gradients(kind, model, params, adapters, theirs), floor=1e-3)
    new = ours(meant(config, theirs), model)
    assert {k: sorted(part) for k, part in sf.unshard(adapters).items()} == {k: sorted(part) for k, part in new.items()}
    assert _recipes(sf.unshard(adapters)) == _recipes(new)

    cut = sf.shard(optree.tree_map(lambda x: x * 1.5, sf.unshard(adapters)), mesh, sf.full_shard("shard"))
    lora.save_pretrained(path / "ours", model, cut)
    again = quiet(library().PeftModel.from_pretrained, build(kind), path / "ours").double().eval()
    found["written"] = distance(_out(model, params, cut, batch), output(again, batch))
    back = lora.load(path / "ours", model, mesh, sf.ddp("shard"))
    found["read again"] = distance(sf.unshard(back), sf.unshard(cut))
    assert sorted(file.name for file in (path / "ours").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    written = [json.loads((path / one / "adapter_config.json").read_text()) for one in ("ours", "theirs")]
    assert written[0]["bias"] == written[1]["bias"]
    return found


def _moved(theirs: Any) -> None:
    """What is trained has other numbers than the base."""
    draw = torch.Generator().manual_seed(4)
    for name, p in theirs.named_parameters():
        if p.requires_grad and "lora_" not in name:
            p.data += torch.randn(p.shape, generator=draw, dtype=p.dtype) / 4


def _gradients(kind: str, model: Any, params: Any, adapters: Any, theirs: Any) -> tuple[Any, Any]:
    """By their names in a file, here and there."""
    batch, loss = FAMILIES[kind].batch(), FAMILIES[kind].loss

    def mine(adapters: Any, batch: Any) -> Tensor:
        total, count = loss(model(params, adapters=adapters, **batch), batch)
        return sf.psum(total, "shard") / sf.psum(count, "shard")

    step = sf.shard_map(sf.grad(mine), mesh=mesh_of(shard=-1), in_specs=(..., P("shard")), out_specs=...)
    rows = {k: x.chunk(dist.get_world_size())[dist.get_rank()] for k, x in batch.items()}
    found = files._adapter_tensors(model, sf.unshard(step(adapters, rows)))
    total, count = loss(theirs(**batch), batch)
    (total / count).backward()
    want = {}
    for name, p in theirs.named_parameters():
        if p.requires_grad and ".original_module." not in name:
            name = re.sub(r"\.modules_to_save\.default|\.default(\.weight$)?", lambda m: m[1] or "", name)
            want[name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")] = p.grad
    return found, want


def _out(model: Any, params: Any, adapters: Any, batch: Any) -> Tensor:
    return output(lambda **batch: model(params, adapters=adapters, **batch), batch).detach()


def _recipes(adapters: Any) -> Any:
    return {
        joined(stage, name): one.recipe
        for stage, part in adapters.items()
        for name, one in part.items()
        if isinstance(one, lora.Adapter)
    }


@pytest.mark.world(2, "processes")
def test_adapters_go_to_peft_and_come_from_it(world: World, tmp_path: Path) -> None:
    for name in CONFIGS:
        for found in world.run(both_ways, name, str(tmp_path)):
            assert {key: x for key, x in found.items() if not x < 1e-12} == {}, name


@pytest.mark.world(1, "processes")
def test_parameters_and_biases_are_those_of_peft_on_one_rank(world: World, tmp_path: Path) -> None:
    for name in ("experts", "turned experts", "parameters alone", "parameters above layers", "biases"):
        (found,) = world.run(both_ways, name, str(tmp_path))
        assert {key: x for key, x in found.items() if not x < 1e-12} == {}, name


# --- a module that peft changed ---


def through_functional(config: Kind, folder: str) -> list[float]:
    mesh = mesh_of(shard=-1)
    theirs, again = (injected(zoo.build("llama"), config) for _ in range(2))
    batch = zoo.ZOO["llama"].batch()
    model = interop.functional(again, min_stage_params=512, remat=True)
    strategy = {True: sf.ddp("shard"), False: sf.full_shard("shard")}
    params = sf.shard(model.tree, mesh, lambda path, shape: strategy["lora_" in path], frozen=model.frozen)

    def loss(params: Any, batch: Any) -> Tensor:
        total, count = zoo.next_tokens(model(params, **batch), batch)
        return sf.psum(total, "shard") / sf.psum(count, "shard")

    opt = so.adamw(1e-2, weight_decay=0.0)
    state = opt.init(params)
    reference = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P("shard")), out_specs=(..., ..., P()))
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = sf.value_and_grad(loss)(params, batch)
        return *opt.step(params, grads, state), value

    found = []
    rows = {k: x.chunk(mesh.size())[mesh.get_rank()] for k, x in batch.items()}
    for _ in range(3):
        params, state, value = step(params, state, rows)
        total, count = zoo.next_tokens(theirs(**batch), batch)
        (total / count).backward()
        reference.step()
        reference.zero_grad()
        found.append(distance(value, (total / count).detach()))
    whole = model.state_dict(params)
    found.append(distance(whole, {name: p.detach() for name, p in theirs.named_parameters()}))
    kept = quiet(library().get_peft_model_state_dict, again, state_dict=whole)
    assert set(kept) == set(quiet(library().get_peft_model_state_dict, theirs))
    assert folder
    return found


@pytest.mark.world(2, "processes")
def test_modules_that_peft_changed_are_modules(world: World, tmp_path: Path) -> None:
    for config in ({"target_modules": ["q_proj", "v_proj"], "use_dora": True}, {"target_modules": "all-linear"}):
        assert worst(worst(found) for found in world.run(through_functional, config, str(tmp_path))) < 1e-9


# --- the whole recipe, beside transformers, bitsandbytes and peft ---


def base_model() -> Any:
    torch.manual_seed(0)
    return zoo.made(
        "Llama", "ForCausalLM", vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, attn_implementation="eager",
        use_cache=False,
    )  # fmt: skip


def mean_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return (
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / tokens[:, 1:].numel()
    )


def tuned_in_four_bits(double: bool, folder: str) -> list[float]:
    """Five steps of AdamW in fp32, from peft's files; the losses, and adapters at the end, relative."""
    tr, peft, mesh = zoo._transformers(), library(), mesh_of(shard=-1)
    path = Path(folder) / str(double)
    if dist.get_rank() == 0:
        base_model().save_pretrained(path / "base")
    dist.barrier()
    four = quiet(
        tr.AutoModelForCausalLM.from_pretrained, path / "base", dtype=torch.float32, attn_implementation="eager",
        device_map="cpu", quantization_config=tr.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_use_double_quant=double,
        ),
    )  # fmt: skip
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    theirs = quiet(peft.get_peft_model, four, config)
    if dist.get_rank() == 0:
        quiet(theirs.save_pretrained, path / "adapter")
    dist.barrier()
    theirs.train()  # bitsandbytes computes in bfloat16 in eval mode
    model = interop.functional(base_model(), min_stage_params=512)
    there = theirs.get_base_model().state_dict()
    there = {name.replace("base_layer.", ""): x for name, x in there.items()}
    tree = {
        stage: {
            name: bitsandbytes.packed(joined(stage, name), there) if f"{joined(stage, name)}.absmax" in there else x
            for name, x in part.items()
        }
        for stage, part in model.tree.items()
    }
    assert sum(isinstance(x, quant.Packed) for part in tree.values() for x in part.values()) == 14
    params = sf.shard(tree, mesh, sf.full_shard("shard"))
    adapters = lora.load(path / "adapter", model, mesh, sf.ddp("shard"))
    tokens = torch.randint(0, 64, (8, 9), generator=torch.Generator().manual_seed(2))
    opt = so.adamw(1e-3, weight_decay=0.0)
    state = opt.init(adapters)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    reference = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., ..., P("shard")), out_specs=(..., ..., P()))
    def step(adapters: Any, state: Any, params: Any, tokens: Tensor) -> Any:
        def loss(adapters: Any) -> Tensor:
            return sf.pmean(mean_loss(model(params, adapters=adapters, input_ids=tokens).logits, tokens), "shard")

        value, grads = sf.value_and_grad(loss)(adapters)
        return *opt.step(adapters, grads, state), value

    found = []
    for _ in range(5):
        adapters, state, value = step(adapters, state, params, tokens.chunk(mesh.size())[mesh.get_rank()])
        want = mean_loss(theirs(input_ids=tokens).logits, tokens)
        want.backward()
        reference.step()
        reference.zero_grad()
        found.append(float((value - want.detach()).abs() / want.detach()))
    got = {joined(stage, name): one for stage, part in sf.unshard(adapters).items() for name, one in part.items()}
    named = {re.sub(r"base_model\.model\.|\.default\.weight", "", name): p for name, p in theirs.named_parameters()}
    for path_, one in got.items():
        for letter, x in (("A", one.a), ("B", one.b)):
            want = named[f"{path_}.lora_{letter}"].detach()
            found.append(float((x - want).norm() / want.norm()))
    return found


@pytest.mark.world(2, "processes")
def test_four_bits_and_adapters_train_as_bitsandbytes_and_peft_do(world: World, tmp_path: Path) -> None:
    quiet(pytest.importorskip, "bitsandbytes")
    for double in (False, True):
        for found in world.run(tuned_in_four_bits, double, str(tmp_path)):
            assert worst(found) < 1e-5, found


class Experts(torch.nn.Module):
    """Of which peft adapts a parameter that is no layer's weight: it parametrises that in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.randn(3, 4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        each = torch.einsum("bi,eio->ebo", x, self.up).tanh()
        return torch.einsum("ebi,eio->bo", each, self.down) + x


def adapted_experts() -> Any:
    peft = library()
    torch.manual_seed(5)
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["up", "down"], init_lora_weights=False)
    return quiet(peft.get_peft_model, torch.nn.Sequential(Experts(), Experts()).double(), config).double()


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("small", [0, 2**62])
def test_a_module_in_which_peft_adapts_parameters_of_experts_is_what_it_is_alone(small: int, remat: bool) -> None:
    x, alone = zoo.numbers(4), adapted_experts()
    alone(x).square().sum().backward()
    model = interop.functional(adapted_experts(), min_stage_params=small, remat=remat)
    params = model.tree
    for _ in range(2):
        named = model.state_dict(sf.grad(lambda p: model(p, x).square().sum())(params))
        for name, p in alone.named_parameters():
            assert not p.requires_grad or distance(named[name], p.grad) < 1e-12, name
    assert not any("original" in name for name, _ in model.module.named_buffers())
