"""Modules as they are on a mesh with a tensor axis, against the unsharded module on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import shardfn as sf
from shardfn import P
from shardfn.interop import GPT2, LLAMA, functional, load
from shardfn.testing import World
from tests.interop import zoo
from tests.interop.modules import laid, mapped, meshed, off, product
from tests.reference import worst
from tests.refusals import told

STRATEGIES = {"full_shard": sf.full_shard("shard"), "shard_grad_op": sf.strategies.shard_grad_op("shard")}
HEADS = {"tie_word_embeddings": False, "num_key_value_heads": 2, "use_cache": False, "num_hidden_layers": 2}


def causal(kind: str, **more: Any) -> nn.Module:
    """A causal language model of `transformers`."""
    return zoo.made(kind, "ForCausalLM", **{**zoo._TEXT, **HEADS, "pad_token_id": 0, **more})


class Heads(nn.Module):
    """Attention that asks its attributes for the number of heads and lets a view find out the length."""

    def __init__(self, kept: str = "num_heads") -> None:
        super().__init__()
        self.kept, self.head_dim = kept, 4
        setattr(self, kept, 4)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        count = getattr(self, self.kept)
        q, k, v = (f(x).view(len(x), -1, count, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = torch.softmax(q @ k.mT, -1) @ v
        found: Tensor = self.o(y.transpose(1, 2).reshape(*x.shape[:2], -1))
        return found


class Normed(nn.Module):
    """With a norm between the layers that are cut."""

    def __init__(self, norm: Callable[[int], nn.Module] = lambda n: nn.LayerNorm(4)) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 16), norm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.norm(self.up(x).unflatten(-1, (-1, 4))).flatten(-2))
        return found


class Mean(Normed):
    """Takes a mean over features that are cut, which is no parameter's business."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        found: Tensor = self.down(y - y.mean(-1, keepdim=True))
        return found


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], padding: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.VOCABULARY, 16, padding_idx=padding)
        self.layers = nn.ModuleList([make() for _ in range(2)])
        self.dropout = nn.Dropout(0.0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x: Tensor = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(self.dropout(x))
        return x


UP: dict[str, str] = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
ATTEND = {**{f"layers.*.{name}": "colwise" for name in "qkv"}, "layers.*.o": "rowwise"}
Made = tuple[Callable[[], nn.Module], Any]

MODELS: dict[str, Made] = {
    "llama": (lambda: causal("Llama"), LLAMA),
    "llama_tied": (lambda: causal("Llama", tie_word_embeddings=True), "auto"),
    "qwen2": (lambda: causal("Qwen2"), "auto"),
    "qwen3": (lambda: causal("Qwen3", head_dim=8), "auto"),
    "mistral": (lambda: causal("Mistral"), LLAMA),
    "gemma": (lambda: causal("Gemma", tie_word_embeddings=True, head_dim=8), "auto"),
    "phi3": (lambda: causal("Phi3"), "auto"),
    "mixtral": (
        lambda: causal("Mixtral", num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"), "auto"
    ),
    "gpt2": (zoo.gpt2, GPT2),
    "attend": (lambda: Stack(Heads), ATTEND),
    "attend_said": (lambda: Stack(lambda: Heads("many")), {**ATTEND, "layers.*.many": "divided"}),
    "normed": (lambda: Stack(Normed), {**UP, "layers.*.norm": "replicated_with_grad_allreduce"}),
    "embedded": (lambda: Stack(Normed, padding=5), {"embed": "embedding_rowwise"}),
}  # fmt: skip
CAUSAL = [name for name in MODELS if name not in ("attend", "attend_said", "normed", "embedded")]


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    with zoo.norms_in_float64():
        module = MODELS[name][0]().double()
    for m in module.modules():
        if type(m).__name__.endswith("RMSNorm") and hasattr(m, "variance_epsilon"):
            type(m).forward = norm
        elif type(m).__name__ == "GemmaRMSNorm":
            type(m).forward = one_more
        elif isinstance(m, (nn.Linear, nn.LayerNorm)) and m.bias is not None:
            nn.init.normal_(m.bias, std=0.1)  # biases count, too
    return module


def norm(self: Any, x: Tensor) -> Tensor:
    weight: Tensor = self.weight
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))


def one_more(self: Any, x: Tensor) -> Tensor:
    found: Tensor = (1 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
    return found


def total(name: str, out: Any, batch: zoo.Batch) -> tuple[Tensor, Tensor]:
    return zoo.next_tokens(out, batch) if name in CAUSAL else zoo.squared(out, batch)


class Whole:
    """The module as it is, on the whole batch."""

    def __init__(self, name: str) -> None:
        self.name, self.module, self.batch = name, build(name), zoo.text()
        self.params = {k: p.detach().clone() for k, p in self.module.named_parameters()}

    def loss(self, p: dict[str, Tensor]) -> Tensor:
        summed, count = total(self.name, functional_call(self.module, p, (), self.batch, tie_weights=True), self.batch)
        return summed / count

    def tangent(self) -> dict[str, Tensor]:
        draw = zoo.generator(5)
        return {k: torch.randn(p.shape, generator=draw, dtype=p.dtype) for k, p in self.params.items()}


def rows(batch: zoo.Batch) -> zoo.Batch:
    """Of this rank's position along `shard`."""
    return {k: x.chunk(sf.axis_size("shard"))[sf.axis_index("shard")] for k, x in batch.items()}


def loss_of(name: str, model: Any) -> Any:
    """Of this rank's rows, averaged over the whole batch."""

    def loss(params: Any, batch: zoo.Batch) -> Tensor:
        summed, count = total(name, model(params, **batch), batch)
        return sf.psum(summed, "shard") / sf.psum(count, "shard")

    return loss


def made(name: str, mesh: Any, strategy: str = "full_shard", **options: Any) -> tuple[Any, Any]:
    model = functional(build(name), tensor=MODELS[name][1], **{"min_stage_params": 512, **options})
    return model, model.shard(mesh, STRATEGIES[strategy])


def against_one_process(name: str, cases: list[tuple[str, dict[str, Any]]]) -> list[float]:
    reference, mesh = Whole(name), meshed(2)
    want = torch.func.grad(reference.loss)(reference.params)
    found = []
    for strategy, options in cases:
        model, params = made(name, mesh, strategy, **options)
        loss = loss_of(name, model)

        def step(p: Any, batch: zoo.Batch, loss: Any = loss) -> Any:
            return sf.value_and_grad(loss)(p, rows(batch))

        for _ in range(2):  # the second is followed by nobody, and knows the order of the stages
            value, grads = mapped(step, mesh)(params, reference.batch)
            got = model.state_dict(grads)
            found += [abs(float(value - reference.loss(reference.params))), off({k: got[k] for k in want}, want)]
    tangent = reference.tangent()
    along = sf.shard(laid(model, tangent), mesh, STRATEGIES[strategy], frozen=model.frozen, specs=model.specs)

    def hvp(p: Any, t: Any, batch: zoo.Batch) -> Any:
        return product(lambda p: sf.grad(loss)(p, rows(batch)), p, t, True)

    got = model.state_dict(mapped(hvp, mesh)(params, along, reference.batch))
    want = product(torch.func.grad(reference.loss), reference.params, tangent, True)
    return [*found, off({k: got[k] for k in want}, want)]


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "qwen3", "mixtral"])
@pytest.mark.world(4, "processes")
def test_derivatives_on_shard_and_tensor_are_those_of_one_process(world: World, name: str) -> None:
    for found in world.run(against_one_process, name, [("full_shard", {}), ("shard_grad_op", {"remat": True})]):
        assert worst(found) < 1e-12, found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.world(2, "processes")
def test_derivatives_on_tensor_alone_are_those_of_one_process(world: World, name: str) -> None:
    for found in world.run(
        against_one_process, name, [("full_shard", {"remat": True}), ("full_shard", {"min_stage_params": 2**20})]
    ):
        assert worst(found) < 1e-12, found


# --- what is cut, and what moves ---


def sizes() -> Any:
    mesh = meshed(2)
    found = {}
    for name in ("llama_tied", "gpt2", "mixtral"):
        model, params = made(name, mesh)
        step = mapped(lambda p, b, model=model, name=name: sf.value_and_grad(loss_of(name, model))(p, rows(b)), mesh)
        step(params, zoo.text())
        with sf.collectives.ledger() as log:
            step(params, zoo.text())
        held = sum(x.numel() for x in torch.utils._pytree.tree_leaves(params))
        found[name] = (held, {op: log.count(op=op, axis=("tensor",)) for op in ("all_reduce", "all_to_all")})
    return found


@pytest.mark.world(2, "processes")
def test_a_rank_holds_its_part_and_each_layer_has_two_sums_each_way(world: World) -> None:
    for found in world.run(sizes):
        for name, (held, _) in found.items():
            whole = sum(p.numel() for p in set(build(name).parameters()))
            assert held < 0.55 * whole, name
        # Two layers; the embedding has a sum in forward, the head one in backward.
        assert found["llama_tied"][1]["all_reduce"] == 2 * (2 + 2) + 1 + 1, found
        assert found["gpt2"][1]["all_reduce"] == 3 * (2 + 2), found
        assert found["gpt2"][1]["all_to_all"] == 3 * 2 * 2, found  # the fused matrix and its bias


def behaviors() -> dict[str, Any]:
    """Cases that need one mesh and no more, by name."""
    mesh = meshed(2)
    batch = zoo.text()
    found: dict[str, Any] = {}

    def refused(case: str, run: Callable[[], Any]) -> None:
        found[case] = told(run)

    def step(make: Callable[[], nn.Module], table: Any, batch: zoo.Batch = batch, kind: str = "embedded") -> Any:
        torch.manual_seed(0)
        model = functional(make().double(), tensor=table, min_stage_params=100)
        params = model.shard(mesh, sf.full_shard("shard"))
        return mapped(lambda p: sf.value_and_grad(loss_of(kind, model))(p, batch), mesh)(params)

    refused("heads", lambda: step(lambda: causal("Llama", num_key_value_heads=1), LLAMA, kind="llama"))
    refused("count", lambda: step(lambda: Stack(lambda: Heads("many")), ATTEND))
    refused("norm", lambda: step(lambda: Stack(Normed), UP))
    refused("end", lambda: step(lambda: Stack(lambda: nn.Linear(16, 16)), {"layers.*": "colwise"}))
    refused("begin", lambda: step(lambda: Stack(Normed), {"layers.*.down": "rowwise"}))
    refused("rows", lambda: step(lambda: causal("Llama", vocab_size=41), {"lm_head": "colwise_gather_output"}))
    halves = {"mlp.gate_up_proj": "colwise", "mlp.down_proj": "rowwise"}
    refused("two in one", lambda: step(lambda: causal("Phi3"), halves, kind="llama"))
    inside = {"attention.query_key_value": "qkv_colwise", "attention.dense": "rowwise"}
    refused("by heads", lambda: step(lambda: causal("GPTNeoX"), inside, kind="llama"))
    refused("features", lambda: step(lambda: Stack(Mean), UP))
    whole = Stack(Normed)
    refused("in no stage", lambda: functional(whole, stages="Embedding", min_stage_params=2**20, tensor=UP))
    functional(whole)  # which was not touched
    rank = dist.get_rank() % 2
    mine = {k: x.chunk(2)[rank] for k, x in batch.items()}
    refused("batch", lambda: step(lambda: Stack(Normed), {"embed": "embedding_rowwise", **UP}, mine))

    def dropped(seed: int) -> Any:
        def make() -> nn.Module:
            module = Stack(Heads)
            module.layers = nn.ModuleList([nn.Sequential(Heads(), nn.Dropout(0.5)) for _ in range(2)])
            return module

        torch.manual_seed(0)
        table = {f"layers.*.0.{key[9:]}": word for key, word in ATTEND.items()}
        model = functional(make().double(), tensor=table, min_stage_params=100)
        params = model.shard(mesh, sf.full_shard("shard"))
        torch.manual_seed(seed)
        return mapped(lambda p: sf.value_and_grad(loss_of("attend", model))(p, batch), mesh)(params)

    refused("seeds", lambda: dropped(rank))
    found["same seeds"] = float(dropped(3)[0])

    def away(place: Any) -> Any:
        torch.manual_seed(0)
        model = functional(Stack(Normed).double(), tensor={**UP, "layers.*.norm": "replicated_with_grad_allreduce"})
        params = place(model)
        want = model(model.tree, **batch)
        return float((mapped(lambda p: model(p, **batch), mesh)(params) - want).abs().max())

    def of_another(model: Any) -> Any:
        return lambda path, shape: P("tensor") if path.endswith("down.weight") else model.specs(path, shape)

    strategy = sf.full_shard("shard")
    found["sharded"] = away(lambda model: model.shard(mesh, strategy))
    found["loaded"] = away(lambda model: load(model.state_dict(model.tree), model, mesh, strategy))
    refused("forgotten", lambda: away(lambda model: sf.shard(model.tree, mesh, strategy)))
    refused("forgotten by load", lambda: away(lambda m: load(m.state_dict(m.tree), m, mesh, strategy, specs=P())))
    refused("other", lambda: away(lambda model: sf.shard(model.tree, mesh, strategy, specs=of_another(model))))
    refused(
        "path",
        lambda: sf.shard({"w": torch.ones(4)}, mesh, sf.full_shard("shard"), specs=made("normed", mesh)[0].specs),
    )
    return found


MESSAGES: dict[str, tuple[str, ...]] = {
    "heads": ("self_attn.k_proj has 1 heads, which 2 ranks along 'tensor' cannot have",),
    "count": ("layers.0 computes with its many", '"layers.*.many": "divided"'),
    "norm": ("norm.weight", "replicated_with_grad_allreduce"),
    "end": ("layers.0 returns a value of shape (8, 7, 8)", "rowwise"),
    "begin": ("has 8 of its 16 input features on each rank along 'tensor', but is given 16",),
    "two in one": ("model.layers.0 computes a different result", "packed_colwise for several matrices in one"),
    "by heads": ("gpt_neox.layers.0 computes a different result with layers sharded over 'tensor'",),
    "features": ("layers.0 computes a different result",),
    "in no stage": ("layers.0.up has the word 'colwise' and is in no stage",),
    "rows": ("lm_head.weight has shape (41, 32)", "pad it to 42"),
    "batch": ("differ between ranks", "cut the batch over other axes"),
    "seeds": ("differ between ranks", "seed these ranks alike"),
    "forgotten": ("is full on each of 2 ranks along 'tensor'", "Write params = model.shard(mesh, strategy)"),
    "forgotten by load": ("is full on each of 2 ranks along 'tensor'", "Write params = model.shard(mesh, strategy)"),
    "other": ("layers.0.down.weight came as (8, 16)", "specs=model.specs"),
    "path": ("no parameter 'w'",),
}


@pytest.mark.world(2, "processes")
def test_what_cannot_be_cut_is_refused_on_every_rank(world: World) -> None:
    for found in world.run(behaviors):
        assert {k: found[k] for k, parts in MESSAGES.items() if not all(part in found[k] for part in parts)} == {}
        assert found["same seeds"] > 0
        assert worst([found["sharded"], found["loaded"]]) < 1e-14


def squashed() -> nn.Module:
    """A model of which one linear layer has another forward."""
    model: Any = causal("Llama")
    own = model.lm_head.forward
    vars(model.lm_head)["forward"] = lambda x: torch.tanh(own(x))
    return model


TABLES: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "no such word": (lambda: causal("Llama"), {"lm_head": "columns"}, "'columns', which is not one of colwise"),
    "of another model": (zoo.gpt2, LLAMA, "nothing of GPT2LMHeadModel matches 'layers.*.self_attn.q_proj'"),
    "none shipped": (zoo.gpt2, "auto", "classes of GPT2LMHeadModel ship no table"),
    "a name": (zoo.gpt2, "megatron", "tensor must be a table, such as interop.LLAMA"),
    "no table": (zoo.gpt2, ["h.*.attn"], "tensor must be a dict"),
    "two words": (lambda: causal("Llama"), {**LLAMA, "q_proj": "rowwise"}, "is both 'colwise' and 'rowwise'"),
    "no layer": (lambda: causal("Llama"), {"model.norm": "colwise"}, "norm (LlamaRMSNorm) must not be 'colwise'"),
    "another forward": (squashed, {"lm_head": "colwise_gather_output"}, "which is for nn.Linear and Conv1D"),
    "no embedding": (lambda: causal("Llama"), {"lm_head": "embedding_rowwise"}, "which is for nn.Embedding"),
    "thirds": (lambda: Stack(Normed), {"layers.*.up": "qkv_colwise"}, "are not 3 equal parts"),
    "tied": (
        lambda: causal("Llama", tie_word_embeddings=True), {"lm_head": "rowwise_split_input"},
        "model.embed_tokens.weight and lm_head.weight are one parameter",
    ),
    "experts": (lambda: causal("Mixtral"), {"experts.down_proj": "rowwise"}, "only experts are sharded by parameter"),
    "some experts": (
        lambda: causal("Mixtral"), {"experts.down_proj": "rowwise", "mlp.experts": "moe_tp_experts"},
        "gate_up_proj of shape (8, 96, 32) has the word None",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLES)
def test_tables_that_do_not_fit_are_refused_before_the_module_is_touched(case: str) -> None:
    make, table, message = TABLES[case]
    module = make()
    with pytest.raises((ValueError, TypeError)) as error:
        functional(module, tensor=table)
    assert message in str(error.value)
    functional(module)


# --- what else works ---


def uses() -> dict[str, Any]:
    mesh, batch = meshed(2), zoo.text()
    found: dict[str, Any] = {}
    module = build("llama").eval()
    module.generation_config.pad_token_id = 0  # type: ignore[union-attr]
    asked: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    want = module.generate(batch["input_ids"], **asked)  # type: ignore[operator]
    hidden = [x.detach() for x in module(**batch, output_hidden_states=True).hidden_states]
    model = functional(module, tensor="auto", min_stage_params=512)
    params = model.shard(mesh, sf.full_shard("shard"))
    with torch.no_grad():
        found["generated"] = torch.equal(model(params, batch["input_ids"], method="generate", **asked), want)
    got = model(params, **batch, output_hidden_states=True).hidden_states
    found["hidden states"] = max(float((g - w).abs().max()) for g, w in zip(got, hidden, strict=True))
    found["attentions"] = told(lambda: model(params, **batch, output_attentions=True))
    logits = build("llama").eval()(**batch).logits.detach()
    found["whole, without a mesh"] = float((model(model.tree, **batch).logits - logits).abs().max())

    reference = Whole("llama")

    def one(p: Any, row: zoo.Batch, call: Any) -> Tensor:
        row = {k: x[None] for k, x in row.items()}
        return zoo.next_tokens(call(p, row), row)[0]

    per = torch.func.vmap(sf.grad(lambda p, row: one(p, row, lambda p, row: model(p, **row))), in_dims=(None, 0))
    each = mapped(per, mesh)(params, batch)
    last = model.state_dict(torch.utils._pytree.tree_map(lambda x: x[-1], each))
    wanted = torch.func.grad(lambda p: one(p, {k: x[-1] for k, x in batch.items()}, lambda p, row: functional_call(
        reference.module, p, (), row)))(reference.params)  # fmt: skip
    found["per sample"] = off({k: last[k] for k in wanted}, wanted)

    compiled, cut = made("attend", mesh, compile={"backend": "aot_eager"}, min_stage_params=100)
    step = mapped(lambda p, b: sf.value_and_grad(loss_of("attend", compiled))(p, b), mesh)
    wanted = torch.func.grad(Whole("attend").loss)(Whole("attend").params)
    for _ in range(3):
        got = compiled.state_dict(step(cut, batch)[1])
    found["compiled"] = off({k: got[k] for k in wanted}, wanted)

    kinds: list[torch.dtype] = []
    low, cut = made("llama", mesh, gather_dtype=torch.bfloat16)
    low.module.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda m, args: kinds.append(m.weight.dtype))
    value, grads = mapped(lambda p, b: sf.value_and_grad(loss_of("llama", low))(p, b), mesh)(cut, batch)
    peer = functional(build("llama"), gather_dtype=torch.bfloat16)
    whole = sf.shard(peer.tree, mesh, sf.full_shard("shard"))
    wanted = mapped(lambda p, b: sf.value_and_grad(loss_of("llama", peer))(p, b), mesh)(whole, batch)
    found["bfloat16"] = (
        str(kinds[-1]),
        abs(float(value / wanted[0] - 1)),
        off(low.state_dict(grads), peer.state_dict(wanted[1])),
    )

    padded = {"input_ids": batch["input_ids"].clamp(max=7), "attention_mask": batch["attention_mask"]}
    model, params = made("embedded", mesh)
    grads = mapped(lambda p, b: sf.grad(loss_of("embedded", model))(p, b), mesh)(params, padded)
    table = model.state_dict(grads)["embed.weight"]
    found["padding"] = float(table[5].abs().max()), float(table[6].abs().max())
    return found


@pytest.mark.world(2, "processes")
def test_a_cut_module_generates_records_compiles_and_maps_as_the_whole_one(world: World) -> None:
    for found in world.run(uses):
        assert found["generated"]
        assert "attention weights of local heads" in found["attentions"]
        for case in ("hidden states", "whole, without a mesh", "per sample", "compiled"):
            assert found[case] < 1e-12, case
        kinds, value, gradient = found["bfloat16"]
        assert kinds == "torch.bfloat16"
        assert (value < 5e-3, gradient < 5e-2) == (True, True)
        none, some = found["padding"]
        assert none == 0.0
        assert some > 0.0
