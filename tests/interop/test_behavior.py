"""What modules do besides computing: buffers, recorded outputs, generation, several sets of parameters, and the rest.

Each is compared with what the module itself does on the same rank, whose gradients are summed over the ranks.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree

import shardfn as sf
from shardfn.interop import Functional, functional, generation
from shardfn.testing import World
from tests.interop import zoo
from tests.interop.modules import Call, Fails, Net, mapped, meshed, of_module, off, seeded
from tests.reference import library, worst


def mine(batch: zoo.Batch) -> zoo.Batch:
    return {k: x.chunk(dist.get_world_size())[dist.get_rank()] for k, x in batch.items()}


def sharded(module: nn.Module, **options: Any) -> tuple[Functional, Any, Any]:
    model = functional(module, **{"min_stage_params": 512, **options})
    mesh = meshed()
    return model, sf.shard(model.tree, mesh, sf.full_shard("shard"), frozen=model.frozen), mesh


def away(module: nn.Module, run: Callable[[Call], Tensor], **options: Any) -> dict[str, float]:
    """How far value and gradient are from the module's, with and without remat, in the first call and the next."""
    value, want = of_module(copy.deepcopy(module), run)
    found = {}
    for remat in (False, True):
        model, params, mesh = sharded(copy.deepcopy(module), remat=remat, **options)

        for turn in range(2):
            got, grads = mapped(sf.value_and_grad(lambda p, m=model: run(partial(m, p))), mesh)(params)
            named = model.state_dict(grads)
            gradient = off({k: named[k] for k in want}, want)
            found[f"{'remat' if remat else 'plain'} {turn}"] = max(abs(float(got - value)), gradient)
    return found


# --- products of matrices in 8 bits ---


def in_8_bits() -> dict[str, float]:
    """Scales are those of this rank's rows and of whole weights; gradients are rounded before they are summed."""
    float8 = library("torchao.float8")
    found: dict[str, float] = {}
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    own = x.chunk(dist.get_world_size())[dist.get_rank()]
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        torch.manual_seed(0)
        module = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)])
        module = float8.convert_to_float8_training(module.float(), config=config)
        assert isinstance(module[0][0], float8.float8_linear.Float8Linear)
        numbers = away(module, lambda call: (call(own) / 20).square().sum())
        found |= {f"{recipe}, {name}": number for name, number in numbers.items()}
    return found


def test_layers_of_torchao_that_multiply_in_8_bits_are_the_modules_own() -> None:
    library("torchao.float8")
    for found in World(2).run(in_8_bits):
        assert worst(found.values()) < 1e-6, found  # in float32; another scale would change 1e-2


# --- what is recorded, dropped, kept ---


def recorded() -> dict[str, dict[str, float]]:
    llama, mixtral = zoo.build("llama"), zoo.build("mixtral")
    batch = mine(zoo.text())

    def states(call: Call) -> Tensor:
        out = call(**batch, output_hidden_states=True, output_attentions=True)
        assert len(out.hidden_states) == 4
        assert len(out.attentions) == 3
        return torch.stack([x.square().sum() for x in (*out.hidden_states, *out.attentions)]).sum()

    def routers(call: Call) -> Tensor:
        out = call(**batch, labels=batch["input_ids"], output_router_logits=True)
        assert len(out.router_logits) == 2
        return out.loss + 10 * out.aux_loss + sum(x.square().sum() for x in out.router_logits)

    def dropped(name: str) -> Callable[[Call], Tensor]:
        def run(call: Call) -> Tensor:
            torch.manual_seed(7 + dist.get_rank())
            return zoo.ZOO[name].loss(call(**batch), batch)[0]

        return run

    return {
        "hidden states and attentions": away(llama, states),
        "router logits": away(mixtral, routers),
        "dropout of GPT-2": away(zoo.build("gpt2", dropout=0.2).train(), dropped("gpt2")),
        "dropout of BERT": away(zoo.build("bert", dropout=0.2).train(), dropped("bert")),
    }


@pytest.mark.world(2, "processes")
def test_what_models_record_and_drop_is_what_the_module_does(world: World) -> None:
    for found in world.with_deadline(240).run(recorded):
        assert {case: value for case, value in found.items() if max(value.values()) > 1e-12} == {}


# --- what models of speech do in training ---

MASKED = {"mask_time_prob": 0.3, "mask_time_length": 2, "mask_feature_prob": 0.2, "mask_feature_length": 2}
SPEECH: dict[str, tuple[str, dict[str, Any]]] = {
    "layers left out": ("Hubert", {"layerdrop": 0.5}),
    "layers left out, masked": ("Wav2Vec2", {"layerdrop": 0.5, "apply_spec_augment": True, **MASKED}),
    "masked": ("UniSpeech", {"apply_spec_augment": True, **MASKED}),
    "without a norm": ("WavLM", {"layerdrop": 0.3}),
}


def speech(kind: str, more: dict[str, Any]) -> nn.Module:
    tr = zoo._transformers()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3}
    dropouts = ("hidden", "activation", "attention", "feat_proj", "final")
    config = getattr(tr, f"{kind}Config")(
        **sizes, conv_dim=(8, 8), conv_stride=(2, 2), conv_kernel=(4, 4), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, attn_implementation="eager",
        **{f"{name}_dropout": 0.0 for name in dropouts} | {"apply_spec_augment": False, "layerdrop": 0.0} | more,
    )  # fmt: skip
    return seeded(lambda: getattr(tr, f"{kind}Model")(config)).train()


def spoken(case: str) -> dict[str, Any]:
    """Where layers are left out ranks draw alike; masks are of a rank's own rows, and drawn apart."""
    rank, (kind, more) = dist.get_rank(), SPEECH[case]
    x, apart = zoo.numbers(200).chunk(2)[rank], rank if "layerdrop" not in more else 0

    def run(call: Call) -> Tensor:
        torch.manual_seed(5 + apart)
        numpy.random.seed(5 + rank)
        found: Tensor = call(x).last_hidden_state.square().sum()
        return found

    found: dict[str, Any] = {"away": max(away(speech(kind, more), run, min_stage_params=256).values())}
    if "layerdrop" in more:
        model, params, mesh = sharded(speech(kind, more), min_stage_params=256)
        torch.manual_seed(rank)
        with pytest.raises(ValueError, match=r"leaves layers out while it trains \(layerdrop=0\.\d\), differ") as error:
            mapped(sf.grad(lambda p: model(p, x).last_hidden_state.sum()), mesh)(params)
        model.module.eval()  # nothing is left out
        model(params, x)
        found["said"] = "call torch.manual_seed with the same number on every rank" in str(error.value)
    return found


@pytest.mark.parametrize("case", SPEECH)
@pytest.mark.world(2, "processes")
def test_models_of_speech_train_as_they_do_alone(world: World, case: str) -> None:
    for found in world.with_deadline(120).run(spoken, case):
        assert found["away"] < 1e-12
        assert found.get("said", True)


# --- outputs, methods, orders ---


def orders() -> dict[str, Any]:
    module = seeded(Net)
    x = zoo.numbers(4).chunk(2)[dist.get_rank()]
    found: dict[str, Any] = {
        "once": away(module, lambda call: call(x).logits.square().sum(), min_stage_params=0),
        "twice, and backwards": away(
            module, lambda call: call(x, (2, 1, 2, 0)).logits.square().sum(), min_stage_params=0
        ),
    }
    model, params, mesh = sharded(copy.deepcopy(module), min_stage_params=0)
    assert model.stages == ("blocks.0", "blocks.1", "blocks.2")

    def gradient(order: tuple[int, ...]) -> float:
        def run(call: Call) -> Tensor:
            return call(x, order).logits.square().sum()

        grads = mapped(sf.grad(lambda p: run(lambda *a: model(p, *a))), mesh)(params)
        named, want = model.state_dict(grads), of_module(module, run)[1]
        return off({k: named[k] for k in want}, want)

    each = {order: gradient(order) for order in ((0, 1, 2), (2, 0, 1), (1, 1, 1), (0,), (2, 1, 0, 2, 1, 0))}
    found["another order each step"] = {str(k): v for k, v in each.items()}
    with torch.no_grad():
        there = float((model(params, x, method="doubled") - module.doubled(x)).abs().max())  # type: ignore[operator]
    unused = model.state_dict(mapped(sf.grad(lambda p: model(p, x).logits.sum()), mesh)(params))["blocks.1.unused"]
    found["method"] = {"value": there, "unused": float(unused.abs().max())}

    def broken(m: Any, args: Any) -> None:
        raise Fails

    hook = module_of(model, "blocks.1.w").register_forward_pre_hook(broken)
    for _ in range(2):
        with pytest.raises(Fails):
            mapped(sf.grad(lambda p: model(p, x).logits.sum()), mesh)(params)
    hook.remove()
    found["after an exception"] = {"next": gradient((0, 1, 2))}
    shell = copy.deepcopy(model.module)
    names = [k for k, _ in module.named_parameters()]
    assert [k for k, _ in shell.named_parameters()] == names == list(model.module.state_dict())
    assert shell.blocks[0].w.weight.shape == (4, 4)  # type: ignore[union-attr, index]
    there = model(model.tree, x).logits - module(x).logits.detach()
    found["whole tensors, no mesh"] = {"value": float(there.detach().abs().max())}
    return found


def module_of(model: Functional, path: str) -> nn.Module:
    return model.module.get_submodule(path)


@pytest.mark.world(2, "processes")
def test_blocks_in_any_order_with_outputs_of_any_kind(world: World) -> None:
    for found in world.run(orders):
        assert {case: value for case, value in found.items() if max(value.values()) > 1e-12} == {}


class Pairs(NamedTuple):
    first: Tensor
    second: Tensor


class OwnPairs(Pairs):
    """A subclass of a named tuple."""


class Noted(tuple[Any, ...]):
    """A tuple that has something besides its items."""

    note: Any


def noted(x: Tensor) -> Noted:
    made = Noted((x, 2))
    made.note = {"more": x * 3}
    return made


TUPLES: dict[str, Callable[[Tensor], Any]] = {
    "torch.Size": lambda x: x.shape,
    "in a dict": lambda x: {"shape": [x.shape], "x": x},
    "named": lambda x: Pairs(x, x * 2),
    "a subclass of a named one": lambda x: OwnPairs(x, x * 2),
    "of torch": lambda x: torch.max(x, 0),
    "with attributes": noted,
    "of Python": lambda x: time.gmtime(0),
}


def read(x: Any) -> Any:
    """All numbers of a tree, by way of its types."""
    match x:
        case Tensor():
            return x.square().sum() if x.is_floating_point() else 0
        case torch.Size():
            return x.numel()
        case dict():
            return sum(map(read, x.values()))
        case Noted():
            return sum(map(read, x)) + read(x.note)
        case list() | tuple():
            return sum(map(read, x))
    return 0


class HandsOn(nn.Module):
    """Is given a tuple, and returns another of the same type."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.w, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor, given: Any) -> Any:
        assert type(given) is type(self.make(x))
        y = torch.tanh(self.w(x)) * (1 + read(given))
        return y, self.make(y)


class Chain(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.blocks, self.make = nn.ModuleList([HandsOn(make) for _ in range(3)]), make

    def forward(self, x: Tensor) -> Tensor:
        given = self.make(x)
        for block in self.blocks:
            x, given = block(x, given)
            assert type(given) is type(self.make(x))
        found: Tensor = x.square().sum() + read(given)
        return found


def handed_on() -> dict[str, dict[str, float]]:
    x = zoo.numbers(4).chunk(2)[dist.get_rank()] / 8
    return {
        name: away(seeded(partial(Chain, make)), lambda call: call(x), min_stage_params=0)
        for name, make in TUPLES.items()
    }


@pytest.mark.world(2, "processes")
def test_tuples_keep_their_types_on_the_way_into_stages_and_out(world: World) -> None:
    for found in world.run(handed_on):
        assert {case: value for case, value in found.items() if max(value.values()) > 1e-12} == {}


# --- several sets of parameters, several steps, several dtypes ---


class Pair(nn.Module):
    """Of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)).float()).double()


class MixedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pair() for _ in range(2)])
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.norm(x)
        return found


def mixed() -> nn.Module:
    module = seeded(MixedNet)
    for block in module.blocks:  # type: ignore[union-attr]
        block.b.float()
        block.a.bias.requires_grad_(False)
    module.norm.weight.requires_grad_(False)  # type: ignore[union-attr]
    return module


def several() -> dict[str, Any]:
    batch, x = mine(zoo.text()), zoo.numbers(4).chunk(2)[dist.get_rank()]
    found: dict[str, Any] = {}
    policy, reference = zoo.build("llama"), zoo.build("llama")
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.01)
    then = reference(**batch).logits.detach()
    _, want = of_module(policy, lambda call: (call(**batch).logits - then).square().sum())
    other = functional(reference, min_stage_params=512)
    model, params, mesh = sharded(policy)
    frozen = sf.shard(other.tree, mesh, sf.full_shard("shard"), frozen=".*")

    def preference(p: Any) -> Tensor:
        return (model(p, **batch).logits - model(frozen, **batch).logits).square().sum()

    named = model.state_dict(mapped(sf.grad(preference), mesh)(params))
    found["two sets in one loss"] = off({k: named[k] for k in want}, want)

    def halves(p: Any, rows: zoo.Batch) -> Tensor:
        return model(p, **rows).logits.square().sum()

    parts = [{k: x.chunk(2)[i] for k, x in batch.items()} for i in range(2)]
    total, want = of_module(zoo.build("llama"), lambda call: call(**batch).logits.square().sum())
    value, grads = mapped(lambda p: sf.accumulate(halves, parts)(p), mesh)(params)
    named = model.state_dict(grads)
    found["accumulated"] = max(off({k: named[k] for k in want}, want), abs(float(value / total) - 1))
    found["mixed dtypes, frozen ones"] = max(
        v for v in away(mixed(), lambda call: call(x).square().sum(), min_stage_params=0).values()
    )

    kinds: dict[str, torch.dtype] = {}
    low, cut, mesh = sharded(zoo.build("llama").float(), gather_dtype=torch.bfloat16)
    for path in ("model.layers.0.mlp.up_proj", "model.norm", "model.embed_tokens"):
        module_of(low, path).register_forward_pre_hook(lambda m, _, path=path: kinds.update({path: m.weight.dtype}))
    value = mapped(lambda p: low(p, **batch).logits, mesh)(cut)
    peer = zoo.build("llama").bfloat16()(**batch).logits.detach()
    found["dtypes"] = sorted(set(map(str, kinds.values()))), len(kinds), str(value.dtype)
    found["bfloat16"] = float(((value - peer).abs().max() / peer.abs().max()).detach())
    return found


@pytest.mark.world(2, "processes")
def test_one_shell_serves_several_sets_steps_and_dtypes(world: World) -> None:
    for found in world.run(several):
        for case in ("two sets in one loss", "accumulated"):
            assert found[case] < 1e-12, case
        assert found["mixed dtypes, frozen ones"] < 1e-6  # some of it is in float32
        assert found["dtypes"] == (["torch.bfloat16"], 3, "torch.bfloat16")
        assert found["bfloat16"] < 2e-2


# --- compiled, generated ---


def compiled() -> tuple[float, list[int]]:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    module, batch = zoo.build("llama"), mine(zoo.text())

    def run(call: Call) -> Tensor:
        return zoo.next_tokens(call(**batch), batch)[0]

    value, want = of_module(copy.deepcopy(module), run)
    model, params, mesh = sharded(
        module, compile={"backend": counter}, stages=r"model\.layers\.1", min_stage_params=2**20
    )
    frames = []
    for _ in range(3):
        got, grads = mapped(sf.value_and_grad(lambda p: run(partial(model, p))), mesh)(params)
        frames.append(counter.frame_count)
    named = model.state_dict(grads)
    return max(abs(float(got - value)), off({k: named[k] for k in want}, want)), frames


@pytest.mark.world(2, "processes")
def test_compiled_layers_are_equal_and_compiled_once(world: World) -> None:
    for distance, frames in world.run(compiled):
        assert distance < 1e-12
        assert frames[0] == frames[1] == frames[2] > 0


def generated(name: str, free_bytes: float) -> tuple[dict[str, bool], int, int]:
    """Whether what is generated is what the module does, by case; how long the ranks' own prompts became; and how many
    gathers the first case took."""
    generation._free_bytes = lambda *_: free_bytes
    tokens, module = zoo.tokens(), zoo.build(name).eval()
    module.generation_config.pad_token_id = 0  # type: ignore[union-attr]
    asked: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "use_cache": True}
    rank = dist.get_rank()
    own = tokens[:1] if rank == 0 else tokens[1:3, :5]
    free = module.generate(own, **asked)  # type: ignore[operator]
    # An end that the ranks' own prompts come to after different numbers of tokens.
    asked["eos_token_id"] = int(free[0, own.shape[1] + 1]) if rank == 0 else 99
    prompts = {"same": tokens[:3], "different": own}
    want = {case: module.generate(x, **asked) for case, x in prompts.items()}  # type: ignore[operator]
    model, params, mesh = sharded(module)
    with torch.no_grad():
        with sf.collectives.ledger() as log:
            got = {"same": model(params, prompts["same"], method="generate", **asked)}
        got["different"] = model(params, prompts["different"], method="generate", **asked)
        again = mapped(lambda p: model(p, prompts["same"], method="generate", **asked), mesh)(params)
    equal = {case: torch.equal(x, want[case]) for case, x in got.items()}
    gathers = sum(record.op == "all_gather" for record in log.records)
    return {**equal, "mapped": torch.equal(again, want["same"])}, got["different"].shape[1] - own.shape[1], gathers


@pytest.mark.world(2, "processes")
def test_models_generate_from_shards_with_a_cache(world: World) -> None:
    for name, free_bytes in (("llama", math.inf), ("llama", 0.0), ("gpt2", math.inf)):
        ranks = world.run(generated, name, free_bytes)
        for equal, *_ in ranks:
            assert all(equal.values()), equal
        assert ranks[0][1] < ranks[1][1] == 8
        assert (ranks[0][2] < 16) == (free_bytes > 0), "once, or for each of 8 tokens"


def generated_on_replicas() -> tuple[bool, int]:
    """Whether the result is the module's where one replica alone has room for all parameters, and the gathers."""
    module = zoo.build("llama").eval()
    mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
    generation._free_bytes = lambda *_: 0.0 if mesh.get_rank() == 3 else math.inf
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    want = module.generate(zoo.tokens()[:2], **asked)  # type: ignore[operator]
    model = functional(module, min_stage_params=512)
    params = model.shard(mesh, sf.hybrid_shard(shard="shard", replica="replica"))
    with torch.no_grad(), sf.collectives.ledger() as log:
        got = model(params, zoo.tokens()[:2], method="generate", **asked)
    return torch.equal(got, want), sum(record.op == "all_gather" for record in log.records)


@pytest.mark.world(4, "processes")
def test_replicas_decide_together_whether_parameters_are_gathered_once(world: World) -> None:
    ranks = world.run(generated_on_replicas)
    assert all(equal for equal, _ in ranks)
    assert len({gathers for _, gathers in ranks}) == 1


class OwnCache:
    """That some library made a node of torch's pytrees, as exports do with those of `transformers`."""

    def __init__(self, kept: list[Tensor]) -> None:
        self.kept = kept


_pytree.register_pytree_node(OwnCache, lambda cache: (cache.kept, None), lambda kept, _: OwnCache(list(kept)))


class Remembers(nn.Linear):
    def forward(self, x: Tensor, cache: OwnCache | None = None) -> Tensor:
        y = super().forward(x)
        if cache is not None:
            cache.kept.append(y)
        return y


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Remembers(4, 4) for _ in range(2)])

    def forward(self, x: Tensor, cache: OwnCache) -> Tensor:
        for block in self.blocks:
            x = block(x, cache=cache)
        return x


def test_a_cache_stays_the_object_that_it_is_even_where_it_is_a_node_of_pytrees() -> None:
    model, cache = functional(Two(), min_stage_params=0), OwnCache([])
    with torch.no_grad():
        model(model.tree, torch.ones(1, 4), cache)
    assert len(cache.kept) == 2
    with pytest.raises(TypeError, match=r"blocks\.0 is given a OwnCache"):
        model(model.tree, torch.ones(1, 4), cache)


# --- stages ---

LAYERS = [f"model.layers.{i}" for i in range(3)]
REST = ["model.embed_tokens", "lm_head"]
WAYS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "the model's own": ({}, [*LAYERS, *REST]),
    "a class name": ({"stages": {"LlamaDecoderLayer"}}, [*LAYERS, *REST]),
    "a pattern": ({"stages": r"model\.layers\.[01]"}, [*LAYERS[:2], *REST, LAYERS[2]]),
    "a class": ({"stages": nn.Linear, "min_stage_params": 2**20}, []),
    "the outermost": ({"stages": ["LlamaDecoderLayer", "LlamaMLP"]}, [*LAYERS, *REST]),
    "a predicate": (
        {"stages": lambda path, m: path.endswith("mlp"), "min_stage_params": 2**20},
        [f"{x}.mlp" for x in LAYERS],
    ),
    "a size": ({"min_num_params": 5000, "min_stage_params": 2**20}, LAYERS),
    "all that is large": ({"stages": r"lm_head", "min_stage_params": 2**20}, ["lm_head"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_stages_are_chosen(way: str) -> None:
    options, expected = WAYS[way]
    module = zoo.build("llama")
    if way == "a class":
        expected = [path for path, m in module.named_modules() if isinstance(m, nn.Linear)]
    model = functional(module, **{"min_stage_params": 512, **options})
    assert sorted(model.stages) == sorted(expected)
    assert set(model.tree) <= {*expected, ""}
