"""Adapters on functions and trees, and what is said where there can be none."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardfn as sf
import shardfn.optim as so
from shardfn import P, interop, lora, quant
from shardfn.checkpoint.team import CheckpointError
from shardfn.lora import files, merging
from shardfn.lora.adapters import BARE, PARTS, thin
from shardfn.shards.layout import Range
from shardfn.testing import World
from tests.interop import zoo
from tests.lora import dense
from tests.models import DATA, STRATEGIES, data_mesh, distance, drawn, mesh_of
from tests.reference import worst
from tests.refusals import told

# --- what is computed with a weight and its adapter ---

OPS: dict[str, Any] = {
    "x @ w": lambda w, n, k, x: x(3, n) @ w,
    "x @ w, batched": lambda w, n, k, x: x(2, 3, n) @ w,
    "x @ w, of one row": lambda w, n, k, x: x(n) @ w,
    "w @ x": lambda w, n, k, x: w @ x(k, 3),
    "w @ x, of one column": lambda w, n, k, x: w @ x(k),
    "matmul": lambda w, n, k, x: torch.matmul(x(3, n), w),
    "mm": lambda w, n, k, x: torch.mm(x(3, n), w),
    "linear": lambda w, n, k, x: F.linear(x(3, k), w),
    "linear with a bias": lambda w, n, k, x: F.linear(x(2, 3, k), w, x(n)),
    "addmm": lambda w, n, k, x: torch.addmm(x(k), x(3, n), w),
    "linear of w.T": lambda w, n, k, x: F.linear(x(3, n), w.T, x(k)),
    "x @ w.mT": lambda w, n, k, x: x(3, k) @ w.mT,
    "x @ w.t()": lambda w, n, k, x: x(3, k) @ w.t(),
    "x @ w.transpose(-1, 0)": lambda w, n, k, x: x(3, k) @ w.transpose(-1, 0),
    "x @ torch.transpose(w, 0, 1)": lambda w, n, k, x: x(3, k) @ torch.transpose(w, 0, 1),
    "embedding": lambda w, n, k, x: F.embedding(torch.arange(6).view(2, 3) % n, w),
    "w[rows]": lambda w, n, k, x: w[torch.arange(6).view(2, 3) % n],
    "w[0]": lambda w, n, k, x: w[0],
    "w.T[rows]": lambda w, n, k, x: w.T[torch.arange(6) % k],
}
REFUSED: dict[str, Any] = {
    "einsum": lambda w, x: torch.einsum("bi,io->bo", x, w),
    "w + 1": lambda w, x: torch.add(w, 1),
    "tanh": lambda w, x: torch.tanh(w),
    "w.tanh()": lambda w, x: w.tanh(),
    "stack": lambda w, x: torch.stack([w, w]),
    "slice": lambda w, x: w[:2],
    "mask": lambda w, x: w[torch.ones(5, dtype=torch.bool)],
    "linear of it": lambda w, x: F.linear(w, x),
    "conv": lambda w, x: F.conv1d(x, w),
    "max_norm": lambda w, x: F.embedding(torch.arange(2), w, max_norm=1.0),
    "clone": lambda w, x: w.clone(),
    "beta": lambda w, x: torch.addmm(x.new_zeros(4), x, w, beta=2),
}


def one(kind: Any, dora: bool, n: int = 5, k: int = 4) -> tuple[Tensor, lora.Adapter]:
    draw = drawn(n * k)
    outputs, inputs = (n, k) if kind == "linear" else (k, n)
    magnitude = draw(outputs) if dora else None
    return draw(n, k), lora.Adapter(draw(2, inputs), draw(outputs, 2), magnitude, lora.Recipe(kind, 2, 3.0))


@given(st.sampled_from(list(OPS)), st.sampled_from(["linear", "conv1d", "embedding"]), st.booleans())
@settings(max_examples=120, deadline=None)
def test_what_is_computed_is_that_of_the_sum(op: str, kind: Any, dora: bool) -> None:
    weight, adapter = one(kind, dora)

    def run(adapter: lora.Adapter, meant: Any) -> Tensor:
        found: Tensor = OPS[op](meant(weight, adapter), 5, 4, drawn(1)).sin().sum()
        return found

    got = torch.func.grad_and_value(run)(adapter, lambda w, a: a.apply_to(w, training=True))
    want = torch.func.grad_and_value(run)(adapter, dense.summed)
    assert distance(got, want) < 1e-12, op


@given(st.data(), st.sampled_from([*PARTS]))
@settings(max_examples=120, deadline=None)
def test_elements_of_a_product_are_those_of_the_whole(data: st.DataObject, kind: Any) -> None:
    shape = (3, 5, 4) if "experts" in kind else (5, 4)
    draw, (a, b, *_) = drawn(1), thin(kind, shape, 2)
    adapter = lora.Adapter(draw(*a), draw(*b), None, lora.Recipe(kind, 2, 3.0))
    assert adapter.unlike(shape) == ""
    whole = dense.summed(torch.zeros(shape, dtype=torch.float64), adapter)
    assert distance(adapter.apply_to(torch.zeros_like(whole), True) if kind in BARE else whole, whole) < 1e-14
    sizes = [data.draw(st.integers(1, n)) for n in shape]
    corner = [data.draw(st.integers(0, n - size)) for n, size in zip(shape, sizes, strict=True)]
    start = data.draw(st.integers(0, math.prod(sizes)))
    at = Range("w", start, data.draw(st.integers(start, math.prod(sizes))), (*sizes,), (*corner,))
    assert distance(merging._delta(adapter, at), merging._elements(whole, at)) < 1e-14


def test_padding_has_no_gradient_in_the_table_of_an_adapter() -> None:
    weight, adapter = one("embedding", False)
    tokens, padding = torch.tensor([[0, 1, 3], [2, 0, 0]]), 0

    def written_out(adapter: lora.Adapter) -> Tensor:  # as peft has it
        through = F.embedding(tokens, adapter.a.T, padding) @ adapter.b.T
        return (F.embedding(tokens, weight, padding) + through * adapter.recipe.scale).sin().sum()

    def run(adapter: lora.Adapter) -> Tensor:
        table: Any = adapter.apply_to(weight, training=True)
        return F.embedding(tokens, table, padding).sin().sum()

    got, want = torch.func.grad_and_value(run)(adapter), torch.func.grad_and_value(written_out)(adapter)
    assert distance(got, want) < 1e-14
    assert bool((got[0].a[:, 0] == 0).all())


def test_everything_else_is_refused() -> None:
    weight, adapter = one("conv1d", False)
    for name, f in REFUSED.items():
        with pytest.raises((TypeError, AttributeError), match=r"adapters know"):
            f(adapter.apply_to(weight, True), torch.randn(3, 5, dtype=torch.float64))
        assert name


def linear(x: Tensor, weight: Any) -> Tensor:
    """`F.linear`, whose type knows of no weights but tensors."""
    return F.linear(x, weight)


def test_no_matrix_of_the_weights_shape_is_made() -> None:
    n = 512
    weight, x = torch.randn(n, n), torch.randn(4, n)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for y in optree.tree_leaves(out):
                if isinstance(y, Tensor) and y.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
                    self.found = max(self.found, y.numel())
            return out

    for dora in (False, True):
        a, b, m = (torch.randn(*shape).requires_grad_() for shape in ((2, n), (n, 2), (n,)))
        adapter = lora.Adapter(a, b, m if dora else None, lora.Recipe("linear", 2, 3.0))
        with Largest() as largest:
            out = linear(x, adapter.apply_to(weight, True))
            torch.autograd.grad(out.sum(), [adapter.a, adapter.b])
        assert largest.found <= 4 * n, dora


def test_dropout_is_of_what_goes_through_the_adapter_alone() -> None:
    weight, adapter = one("linear", False)
    adapter.recipe = lora.Recipe("linear", 2, 3.0, dropout=0.5)
    x = torch.ones(2000, 4, dtype=torch.float64)
    torch.manual_seed(0)
    out = linear(x, adapter.apply_to(weight, training=True))
    torch.manual_seed(0)
    want = F.linear(x, weight) + F.dropout(x, 0.5) @ adapter.a.T @ adapter.b.T * 1.5
    assert distance(out, want) < 1e-13
    assert distance(out.mean(0), F.linear(x[0], dense.summed(weight, adapter))) < 0.5
    assert (
        distance(linear(x, adapter.apply_to(weight, training=False)), linear(x, dense.summed(weight, adapter))) < 1e-13
    )


# --- functions of one's own ---


def tree() -> Any:
    draw = drawn(0, 0.3)
    blocks = [{"qkv": draw(16, 48), "out": draw(16, 16), "norm": draw(16)} for _ in range(3)]
    return {"wte": draw(11, 16), "blocks": blocks, "head": (draw(11, 16), draw(11))}


def layer(p: Any, x: Tensor) -> Tensor:
    q, k, v = (x * p["norm"] @ p["qkv"]).chunk(3, -1)
    return x + F.linear(torch.tanh(q * k + v), p["out"])


def loss_of(stage: Any) -> Any:
    """The same functions with and without adapters: `stage` takes one of parameters, and of parameters and adapters."""
    embed, block, head = stage(lambda p, x: p[x]), stage(layer), stage(lambda p, x: F.linear(x, p[0], p[1]))

    def loss(adapters: Any, params: Any, tokens: Tensor) -> Tensor:
        x = embed(params["wte"], adapters["wte"], tokens)
        for p, a in sf.layers(zip(params["blocks"], adapters["blocks"], strict=True)):
            x = block(p, a, x)
        return head(params["head"], adapters["head"], x).square().sum()

    return loss


def written_out(adapters: Any, params: Any, tokens: Tensor) -> Tensor:
    def whole(p: Any, a: Any) -> Any:
        if isinstance(a, lora.Adapter):
            return dense.summed(p, a)
        if isinstance(a, dict):
            return {**p, **{key: whole(p[key], x) for key, x in a.items()}}
        return [x if y == {} else whole(x, y) for x, y in zip(p, a, strict=True)] if isinstance(a, list) else a

    loss = loss_of(lambda f: lambda p, a, x: f(whole(p, a) if not isinstance(a, dict) or a else p, x))
    found: Tensor = loss(adapters, params, tokens)
    return found


def on_functions(strategy: str, own: str, few_bits: bool, options: dict[str, Any]) -> float:
    mesh, base = data_mesh(mesh_size()), tree()
    names: Any = {"targets": ["wte", "qkv", "out", "head.0"], "fan_in_fan_out": ["qkv", "wte"]}
    format = quant.int8(64)
    base = quant.quantize(base, format, r"blocks\.\d\..*t|blocks\.\d\.qkv") if few_bits else base
    params = sf.shard(base, mesh, STRATEGIES[strategy])
    adapters = dense.drawn(lora.init(params, rank=2, alpha=3, dora=few_bits, **names))
    assert distance(dense.drawn(lora.init(base, rank=2, alpha=3, dora=few_bits, **names)), adapters) < 1e-15
    tokens = torch.arange(24).view(8, 3) % 11
    want, value = torch.func.grad_and_value(written_out)(adapters, quant.dequantize(base), tokens)
    shards = sf.shard(adapters, mesh, STRATEGIES[own])
    loss = loss_of(lambda f: sf.stage(lambda p, a, x: f(lora.adapted(p, a), x), **options))
    step = sf.shard_map(
        sf.value_and_grad(lambda a, p, x: sf.psum(loss(a, p, x), DATA)), mesh=mesh, in_specs=(..., ..., P(DATA)),
        out_specs=(P(), ...),
    )  # fmt: skip
    rows = tokens.chunk(mesh.size())[mesh.get_rank()]
    found, grads = step(shards, params, rows)
    worst = distance([found, sf.unshard(grads)], [value, want], floor=1e-3)
    made = sf.unshard(lora.merge(params, shards))
    plain = loss_of(lambda f: lambda p, a, x: f(p, x))
    return max(worst, distance(plain(adapters, made, tokens), value))


def mesh_size() -> int:
    return torch.distributed.get_world_size()


@pytest.mark.world(2, "processes")
def test_functions_with_adapters_are_those_of_the_sums(world: World) -> None:
    for strategy, own, few_bits, options in (
        ("full_shard", "ddp", False, {}), ("full_shard", "ddp", True, {"remat": True}), ("zero1", "zero1", True, {}),
        ("full_shard", "full_shard", False, {"reshard": False}),
    ):  # fmt: skip
        assert worst(world.run(on_functions, strategy, own, few_bits, options)) < 1e-11, (strategy, own)


def kept_and_cut(folder: str) -> list[float]:
    """Adapters in checkpoints, and in weights that are cut over another axis."""
    base, mesh = {"layer": {name: tree()["blocks"][0][name] for name in ("qkv", "out")}}, mesh_of(shard=-1)
    whole = dense.drawn(lora.init(base, ["qkv", "out"], 2, dora=True, fan_in_fan_out=["qkv"]))
    opt, adapters = so.adamw(1e-2), sf.shard(whole, mesh, sf.strategies.zero1("shard"))
    sf.checkpoint.save(f"{folder}/kept", {"adapters": adapters, "state": opt.init(adapters)})
    other = sf.shard(
        lora.init(base, ["qkv", "out"], 2, dora=True, fan_in_fan_out=["qkv"]), mesh, sf.full_shard("shard")
    )
    again = sf.checkpoint.load(f"{folder}/kept", {"adapters": other, "state": opt.init(other)})["adapters"]
    two = mesh_of(shard=1, tensor=-1)
    specs = sf.by_path([(r".*qkv", P(None, "tensor")), (r".*out", P("tensor"))])
    made = lora.merge(sf.shard(base, two, sf.full_shard("shard"), specs=specs), whole)
    want = {"layer": {name: dense.summed(base["layer"][name], whole["layer"][name]) for name in ("qkv", "out")}}
    names = {entry.path for entry in adapters["layer"].layout.entries}
    assert names == {f"layer.{name}.{part}" for name in ("qkv", "out") for part in PARTS["linear"]}
    return [distance(sf.unshard(again), whole), distance(sf.unshard(made), want)]


@pytest.mark.world(2, "processes")
def test_adapters_are_kept_in_checkpoints_and_merged_into_weights_that_are_cut(world: World, tmp_path: Path) -> None:
    assert worst(map(worst, world.run(kept_and_cut, str(tmp_path)))) < 1e-14


def test_adapters_change_nothing_at_first_and_do_not_depend_on_their_order() -> None:
    base = tree()
    made = lora.init(base, ["qkv", "wte"], 3, fan_in_fan_out=True, dora=True, seed=1)
    x = torch.arange(6) % 11
    p = lora.adapted(base, made)
    assert distance(layer(p["blocks"][1], p["wte"][x]), layer(base["blocks"][1], base["wte"][x])) < 1e-13
    alone = lora.init(base, ["qkv"], 3, fan_in_fan_out=True, dora=True, seed=1)
    assert distance(alone["blocks"], made["blocks"]) == 0
    assert "wte" not in alone
    assert "head" not in alone
    other = lora.init(base, ["qkv"], 3, fan_in_fan_out=True, dora=True, seed=2)
    assert distance(alone, other) > 0.1
    assert distance(made["blocks"][0]["qkv"].a, made["blocks"][1]["qkv"].a) > 0.1
    half = optree.tree_map(lambda x: x.bfloat16(), base)
    assert {x.dtype for x in optree.tree_leaves(lora.init(half, ["qkv"], 3))} == {torch.float32}


# --- what there cannot be ---


class Reads(nn.Module):
    """Computes with a weight by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        last: Any = self.blocks[1]
        return F.linear(self.blocks[0](x), last.weight.tanh())


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 1)
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Two(nn.Module):
    def __init__(self, one: nn.Module) -> None:
        super().__init__()
        self.one, self.two = one, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.one(x)) + self.two(x)
        return found


class Listed(nn.Module):
    """Has a weight in a list, too, and a module at two places."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        one = nn.Linear(8, 8)
        first, second = Two(one), Two(one)
        self.blocks = nn.ModuleList([first, second])
        if tied:
            first.two.weight = one.weight
        self.weights = [one.weight, second.two.weight]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.linear(F.linear(x, self.weights[0]), self.weights[1])


def test_a_weight_is_adapted_under_all_of_its_names() -> None:
    reference, model = Listed().double(), interop.functional(Listed().double(), stages=lambda path, m: False)
    x = drawn(3)(4, 8)
    adapters = dense.drawn(lora.init(model, "all-linear", 2))
    for path, m in reference.named_modules():
        if isinstance(m, nn.Linear):
            m.weight.data = dense.summed(m.weight.data, adapters[""][path])
    want = reference(x).detach()
    assert distance(model(model.tree, x, adapters=adapters), want) < 1e-13
    assert distance(model(lora.merge(model.tree, adapters, model), x), want) < 1e-13


def refused(folder: str) -> dict[str, str]:
    found: dict[str, str] = {}
    mesh = mesh_of(shard=-1)
    model = interop.functional(zoo.build("llama_tied"), min_stage_params=512)
    params = sf.shard(model.tree, mesh, sf.full_shard("shard"))
    batch = zoo.ZOO["llama"].batch()

    def init(targets: Any = ("q_proj",), rank: Any = 2, base: Any = None, **more: Any) -> Any:
        return lora.init(model if base is None else base, targets, rank, **more)

    found["nothing"] = told(lambda: init(["qproj", "vproj"]))
    found["some"] = told(lambda: init(["q_proj", "qproj"]))  # as in peft, with a warning in the log
    found["no regex"] = told(lambda: init("("))
    found["regex"] = told(lambda: init(r"q_proj"))
    found["numbers"] = told(lambda: init([3]))
    found["rank"] = told(lambda: init(rank=0))
    found["rank, float"] = told(lambda: init(rank=2.0))
    found["rank_pattern"] = told(lambda: init(rank_pattern={"v_proj": 3}))
    found["rank_pattern, rank"] = told(lambda: init(rank_pattern={"q_proj": 0}))
    found["alpha"] = told(lambda: init(alpha=0))
    found["dropout"] = told(lambda: init(dropout=1.0))
    found["seed"] = told(lambda: init(seed="a"))
    found["excluded"] = told(lambda: init(exclude=["q_proj"]))
    found["exclude"] = told(lambda: init(exclude=["qproj"]))
    found["container"] = told(lambda: init(["self_attn"]))
    found["fan_in_fan_out"] = told(lambda: init(fan_in_fan_out=True))
    found["module"] = told(lambda: init(base=zoo.build("llama")))
    found["none"] = told(lambda: init([]))
    found["pattern"] = told(lambda: init(rank_pattern={"(": 3}))
    found["patterns"] = told(lambda: init(alpha_pattern=["q_proj"]))
    odd = interop.functional(Odd(), stages=lambda path, m: False)
    found["kind, all"] = told(lambda: init("all-linear", base=odd))
    for name in ("conv", "normed"):
        found[f"kind, {name}"] = told(lambda name=name: init([name], base=odd))
    found["buffers"] = told(lambda: init(["last"], base=odd, modules_to_save=["norm"]))
    plain = tree()
    found["tree, all"] = told(lambda: init("all-linear", base=plain))
    found["tree, vector"] = told(lambda: init(["norm"], base=plain))
    found["tree, whole numbers"] = told(lambda: init(["w"], base={"w": torch.ones(4, 4, dtype=torch.int64)}))
    found["tree, nothing"] = told(lambda: init(["q"], base=plain))
    found["tree, params"] = told(lambda: init(["qkv"], base=plain, params=plain))
    own = init(["qkv"], base=plain, fan_in_fan_out=True)
    found["flat"] = told(lambda: lora.adapted(sf.shard(plain, mesh, sf.ddp("shard")), own))
    found["turned"] = told(lambda: lora.adapted(plain, init(["qkv"], base=plain)["blocks"][0]))
    found["shape"] = told(lambda: lora.adapted(plain, {"blocks": [{"out": own["blocks"][0]["qkv"]}] * 3}))
    found["merge, elsewhere"] = told(lambda: lora.merge(plain, {"blocks": {"7": own["blocks"][0]}}))

    adapters = init(["embed_tokens", "v_proj"])
    found["merge, tied"] = told(lambda: lora.merge(params, adapters, model))
    found["merge, model"] = told(lambda: lora.merge(params, init()))
    found["merge, turned"] = told(lambda: lora.merge(params, init(), params))
    found["save, turned"] = told(lambda: lora.save_pretrained(folder, init(), model))
    found["load, turned"] = told(lambda: lora.load(folder, params, mesh, sf.ddp("shard")))
    found["unmerge, dora"] = told(lambda: lora.unmerge(params, init(dora=True), model))
    found["unmerge, few bits"] = told(
        lambda: lora.unmerge(sf.shard(quant.quantize(model.tree, quant.nf4()), mesh, sf.ddp("shard")), init(), model)
    )
    found["other model"] = told(lambda: model(params, adapters=own, **batch))
    found["other stage"] = told(lambda: model(params, adapters={"model.layers.0": {"mlp": 3}}, **batch))
    reads = interop.functional(Reads(), stages=lambda path, m: False, min_stage_params=2**62)
    found["read"] = told(lambda: reads(reads.tree, torch.ones(2, 8), adapters=lora.init(reads, ["1"], 2)))
    cut = interop.functional(zoo.build("llama"), min_stage_params=512, tensor=interop.LLAMA)
    found["tensor"] = told(lambda: cut(cut.tree, adapters=lora.init(cut, ["q_proj"], 2), **batch))
    shared = interop.functional(Listed(), stages=r"blocks\.\d")
    found["stages"] = told(lambda: lora.init(shared, ["one"], 2))
    found["stages, saved"] = told(lambda: lora.init(shared, ["two"], 2, modules_to_save=["one"]))
    listed, tied = (interop.functional(Listed(one), stages=lambda path, m: False) for one in (False, True))
    found["names"] = told(lambda: lora.save_pretrained(folder, listed, lora.init(listed, ["one"], 2)))
    found["tied, in a list"] = told(lambda: tied(tied.tree, torch.ones(2, 8), adapters=lora.init(tied, ["one"], 2)))
    wide = interop.functional(zoo.llama(hidden_size=64), min_stage_params=512)
    found["wide"] = told(lambda: model(params, adapters=lora.init(wide, ["q_proj"], 2), **batch))
    several = dense.drawn(lora.init(wide, ["q_proj"], 2, modules_to_save=["norm"]))
    found["merge, wide"] = told(lambda: lora.merge(params, several, model))
    saved = {"": several[""]}
    found["wide, saved"] = told(lambda: model(params, adapters=sf.shard(saved, mesh, sf.ddp("shard")), **batch))
    long = interop.functional(zoo.llama(tied=True, vocab_size=64), min_stage_params=512)
    found["long"] = told(lambda: model(params, adapters=lora.init(long, ["embed_tokens"], 2), **batch))
    stage, one = next((stage, part["self_attn.q_proj"]) for stage, part in init().items())
    for name, wrong in (
        ("row", lora.Adapter(one.a, one.b[:1], None, one.recipe)),
        ("kind", lora.Adapter(one.a, one.b, None, lora.Recipe("conv1d", 2, 8))),
        ("magnitude", lora.Adapter(one.a, one.b, torch.ones(1), one.recipe)),
    ):
        each = {stage: {"self_attn.q_proj": wrong}}
        found[f"one, {name}"] = told(lambda each=each: model(params, adapters=each, **batch))
        found[f"one, merged, {name}"] = told(lambda each=each: lora.merge(params, each, model))
    found["turned, shape"] = told(lambda: lora.merge(plain, {"head": (lora.Adapter(one.a, one.b, None, one.recipe),)}))
    heads = interop.functional(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), stages=lambda path, m: False)
    for training in (True, False):  # in both ways torch reads this weight by itself
        heads.module.train(training)
        on = lora.init(heads, ["out_proj"], 2)
        found[f"heads, {training}"] = told(lambda on=on: heads(heads.tree, torch.ones(2, 3, 8), adapters=on))
    found |= on_parameters(folder)
    meta = interop.functional(_meta(), min_stage_params=512)
    found["no values"] = told(lambda: lora.init(meta, ["q_proj"], 2, dora=True))
    found["some with dora"] = told(
        lambda: lora.save_pretrained(folder, model, {**init(dora=True), **init(["embed_tokens"])})
    )

    opt = so.adamw(1e-2)
    packed = quant.quantize({"w": torch.ones(16, 16)}, quant.nf4(), "w")
    for name, p in (("whole", packed), ("cut", sf.shard(packed, mesh, sf.full_shard("shard")))):
        grads = (
            sf.shard({"w": torch.ones(16, 16)}, mesh, sf.full_shard("shard"))
            if name == "cut"
            else {"w": torch.ones(16, 16)}
        )
        found[f"optimizer, {name}"] = told(lambda p=p, grads=grads: opt.step(p, grads, opt.init(p)))
    both, whole = packed | {"b": torch.ones(3)}, {"w": torch.ones(16, 16), "b": torch.ones(3)}
    found["optimizer, some"] = told(lambda: opt.step(both, whole, opt.init(both)))
    return found | broken(folder, model, mesh)


def on_parameters(folder: str) -> dict[str, str]:
    """Parameters by themselves, and biases, that cannot be adapted, trained or kept."""
    experts, gpt2, tied = (
        interop.functional(zoo.build(name), min_stage_params=512) for name in ("mixtral", "gpt2", "bert_mlm")
    )
    names, batch = ["gate_up_proj", "down_proj"], zoo.ZOO["mixtral"].batch()

    def init(targets: Any = (), base: Any = experts, target_parameters: Any = names, **more: Any) -> Any:
        return lora.init(base, targets, 2, target_parameters=target_parameters, **more)

    found = {
        "parameters, nothing": told(lambda: init(target_parameters=["up_proj"])),
        "parameters, regex": told(lambda: init(target_parameters="gate_up_proj")),
        "parameters, layer": told(lambda: init(["q_proj"], target_parameters=["q_proj.weight"])),
        "parameters, vector": told(lambda: init(target_parameters=["norm.weight"])),
        "parameters, root": told(lambda: init(target_parameters=["weight"], base=interop.functional(nn.Linear(2, 2)))),
        "parameters, dropout": told(lambda: init(["q_proj"], dropout=0.1)),
        "parameters, dora": told(lambda: init(dora=True)),
        "parameters, saved": told(lambda: init(modules_to_save=["mlp.experts"])),
        "parameters, tree": told(lambda: init(["w"], base={"w": torch.ones(2, 2)})),
        "bias, tree": told(lambda: init(["w"], {"w": torch.ones(2, 2)}, (), bias="all")),
        "bias, word": told(lambda: init(["c_attn"], gpt2, (), bias="some")),
        "bias, tied": told(lambda: init(["query"], tied, (), bias="all")),
    }
    some = init(["c_attn"], gpt2, (), bias="all")
    some["transformer.h.0"].pop("mlp.c_fc.bias")
    found["bias, some"] = told(lambda: lora.save_pretrained(folder, gpt2, some))
    both = init(["c_attn"], gpt2, ["wpe.weight"])
    found["parameters, conv1d"] = told(lambda: lora.save_pretrained(folder, gpt2, both))
    stage, part = next((stage, part) for stage, part in init(["q_proj"]).items() if stage.endswith("1"))
    one, layer = part["mlp.experts.gate_up_proj"], part["self_attn.q_proj"]
    for name, path, wrong in (
        ("rank", "mlp.experts.gate_up_proj", lora.Adapter(one.a, one.b, None, lora.Recipe("experts", 4, 8))),
        ("turned", "mlp.experts.gate_up_proj", lora.Adapter(one.a, one.b, None, lora.Recipe("turned_experts", 2, 8))),
        ("magnitude", "mlp.experts.gate_up_proj", lora.Adapter(one.a, one.b, torch.ones(48), one.recipe)),
        ("of a layer", "mlp.experts.gate_up_proj", layer),
        ("on a layer", "self_attn.q_proj", one),
    ):
        each = {stage: {path: wrong}}
        found[f"parameters, {name}"] = told(lambda each=each: experts(experts.tree, adapters=each, **batch))
        found[f"parameters, merged, {name}"] = told(lambda each=each: lora.merge(experts.tree, each, experts))
    return found


def _meta() -> nn.Module:
    with interop.meta():
        return zoo.llama()


def broken(folder: str, model: Any, mesh: Any) -> dict[str, str]:
    """Files that are not those of an adapter of this model."""
    good, found = Path(folder) / "good", {}
    lora.save_pretrained(good, model, lora.init(model, ["q_proj"], 2))
    from safetensors.torch import load_file, save_file

    def changed(name: str, config: Any = None, tensors: Any = None) -> None:
        path = Path(folder) / name
        if mesh.get_rank() == 0:
            shutil.copytree(good, path)
            if config is not None:
                said = json.loads((path / "adapter_config.json").read_text())
                (path / "adapter_config.json").write_text(json.dumps(said | config))
            if tensors is not None:
                save_file(tensors(load_file(path / "adapter_model.safetensors")), path / "adapter_model.safetensors")
        torch.distributed.barrier()
        found[f"load, {name}"] = said_of(path)

    def said_of(path: Path) -> str:
        return told(lambda: lora.load(path, model, mesh, sf.ddp("shard")))

    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    found["load, no folder"] = said_of(Path(folder) / "nowhere")
    changed("other kind", {"peft_type": "IA3"})
    changed("unknown", {"use_qalora": True})
    changed("bias", {"bias": "some"})
    changed("pissa", {"init_lora_weights": "pissa"})
    changed("other rank", {"r": 3})
    changed("dora", {"use_dora": True})
    changed("more targets", {"target_modules": ["q_proj", "v_proj"]})
    changed("other targets", {"target_modules": ["v_proj"]})
    changed("half", tensors=lambda x: {k: v for k, v in x.items() if k != first})
    changed("other name", tensors=lambda x: {k.replace("q_proj", "query"): v for k, v in x.items()})
    changed("other shape", tensors=lambda x: {k: v[:, :1].contiguous() if k == first else v for k, v in x.items()})
    changed("base", tensors=lambda x: x | {"base_model.model.model.embed_tokens.weight": torch.ones(40, 32)})
    found["save, to a file"] = told(lambda: lora.save_pretrained(good / "adapter_config.json", model, {}))
    adapters = lora.init(model, ["q_proj"], 2)
    found["save, below a file"] = told(
        lambda: lora.save_pretrained(good / "adapter_config.json" / "x", model, adapters)
    )
    elsewhere = good if mesh.get_rank() == 0 else good.parent / "other"
    found["save, elsewhere"] = told(lambda: lora.save_pretrained(elsewhere, model, adapters))
    if mesh.get_rank() == 0:
        (good / "adapter_model.safetensors").write_bytes(b"no tensors")
    torch.distributed.barrier()
    found["load, damaged"] = said_of(good)

    good, model = Path(folder) / "experts", interop.functional(zoo.build("mixtral"), min_stage_params=512)
    adapters = lora.init(model, ["q_proj"], 2, target_parameters=["gate_up_proj", "down_proj"])
    lora.save_pretrained(good, model, adapters)
    changed("parameters, half", tensors=lambda x: {k: v for k, v in x.items() if ".base_layer." not in k})
    changed("parameters, none", {"target_parameters": None})
    changed("parameters, other", {"target_parameters": ["down_proj"]})
    changed("parameters, no list", {"target_parameters": "down_proj"})
    changed("parameters, dropout", {"lora_dropout": 0.1})
    changed("parameters, rank", {"r": 4})
    return found


SAID: dict[str, tuple[str, ...]] = {
    "nothing": ("ValueError", "nothing matches 'qproj', 'vproj'", "q_proj"),
    "some": ("it was done",),
    "no regex": ("ValueError", "not a regular expression"),
    "regex": ("ValueError", "nothing matches 'q_proj'", "so pass ['q_proj']"),
    "module": ("TypeError", "model = interop.functional(module)"),
    "none": ("ValueError", "nothing is named"),
    "pattern": ("ValueError", "rank_pattern: '(' is not a regular expression"),
    "patterns": ("TypeError", "alpha_pattern must be a dict of patterns for the ends of paths, got ['q_proj']"),
    "kind, all": ("ValueError", "normed is a ParametrizedLinear that computes its weight", "exclude="),
    "stages": ("ValueError", "blocks.0.one is one module with blocks.0.one and blocks.1.one", "stage 'blocks.1'"),
    "stages, saved": ("ValueError", "blocks.0.one is one module with blocks.0.one and blocks.1.one"),
    "names": ("ValueError", "blocks.0.one is one module with blocks.0.one and blocks.1.one", "in peft the first alone"),
    "tied, in a list": ("ValueError", "has blocks.0.one.weight in a list too"),
    "wide": ("ValueError", "model.layers.0.self_attn.q_proj is of shape [32, 32], and its adapter for [64, 64]"),
    "merge, wide": ("ValueError", "is of shape [32", "64]", "another model"),
    "wide, saved": ("ValueError", "model.norm.weight is of shape [32], and what replaces it [64]"),
    "long": ("ValueError", "model.embed_tokens is of shape [40, 32], and its adapter for [64, 32]"),
    "one, row": ("ValueError", "q_proj is of shape [32, 32], and its adapter for [1, 32]"),
    "one, kind": ("ValueError", "q_proj is a Linear, and its adapter is for weights of kind 'conv1d'"),
    "one, magnitude": ("ValueError", "has parts of (2, 32), (32, 2), (1,)"),
    "one, merged, row": ("ValueError", "q_proj is of shape [32, 32], and its adapter for [1, 32]"),
    "one, merged, kind": ("ValueError", "q_proj is a Linear, and its adapter is for weights of kind 'conv1d'"),
    "one, merged, magnitude": ("ValueError", "has parts of (2, 32), (32, 2), (1,)"),
    "turned, shape": ("ValueError", "head.0 is of shape [11, 16], and its adapter for [32, 32]"),
    "numbers": ("TypeError", "targets must be a regular expression", "got [3]"),
    "rank": ("ValueError", "rank must be an int of at least 1, got 0"),
    "rank, float": ("ValueError", "rank must be an int of at least 1, got 2.0"),
    "rank_pattern": ("ValueError", "rank_pattern: nothing that gets an adapter matches 'v_proj'"),
    "rank_pattern, rank": ("ValueError", "rank must be an int of at least 1, got 0"),
    "alpha": ("ValueError", "alpha must be a finite number other than 0, got 0"),
    "dropout": ("ValueError", "dropout must be a probability below 1, got 1.0"),
    "seed": ("TypeError", "a seed is an int"),
    "excluded": ("ValueError", "are excluded"),
    "exclude": ("ValueError", "exclude: nothing matches 'qproj'"),
    "container": ("ValueError", "is a LlamaAttention", "Linear, Embedding"),
    "fan_in_fan_out": ("ValueError", "your own functions"),
    "kind, conv": ("ValueError", "conv is a Conv1d"),
    "kind, normed": ("ValueError", "computes its weight"),
    "buffers": ("ValueError", "norm has buffers, running_mean"),
    "tree, all": ("ValueError", "is for modules"),
    "tree, vector": ("ValueError", "blocks.0.norm has shape [16]", "matrices"),
    "tree, whole numbers": ("ValueError", "w is torch.int64", "quant.quantize"),
    "tree, nothing": ("ValueError", "nothing matches 'q'", "qkv"),
    "tree, params": ("ValueError", "params= goes with a model"),
    "flat": ("TypeError", "inside of the function that shardfn.stage wraps"),
    "turned": ("ValueError", "no qkv"),
    "shape": ("ValueError", "blocks.0.out is of shape [16, 16], and its adapter for [16, 48]"),
    "merge, elsewhere": ("ValueError", "no parameter blocks.7.qkv"),
    "merge, tied": ("ValueError", "model.embed_tokens.weight is tied to lm_head.weight", "tie_word_embeddings=False"),
    "merge, model": ("ValueError", "no parameter model.layers.0.self_attn.q_proj", "model="),
    "merge, turned": ("TypeError", "model is of type dict, not what interop.functional returns"),
    "save, turned": ("TypeError", "lora.save_pretrained: model is of type dict"),
    "load, turned": ("TypeError", "lora.load: model is of type dict"),
    "unmerge, dora": ("ValueError", "scaled by DoRA", "keep the parameters from before"),
    "unmerge, few bits": ("ValueError", "quantized"),
    "other model": ("ValueError", "a dict of its stages", "'blocks'"),
    "other stage": ("ValueError", "model.layers.0", "no parameter for 'mlp'"),
    "read": ("AttributeError", "no .tanh", "w.dense()"),
    "tensor": ("ValueError", "sharded by tensor=", "without tensor="),
    "heads, True": ("TypeError", "multi_head_attention_forward, which is not among what adapters know"),
    "heads, False": ("TypeError", "multi_head_attention_forward, which is not among what adapters know"),
    "parameters, nothing": ("ValueError", "target_parameters: nothing matches 'up_proj'", "gate_up_proj"),
    "parameters, regex": ("TypeError", "target_parameters must be a list"),
    "parameters, layer": ("ValueError", "q_proj.weight is of a layer that has an adapter"),
    "parameters, vector": ("ValueError", "norm.weight has shape [32]", "one of each expert"),
    "parameters, root": ("ValueError", "weight belongs to the whole model"),
    "parameters, dropout": ("ValueError", "dropout=0.1 is of layers", "gate_up_proj is adapted by itself"),
    "parameters, dora": ("ValueError", "dora=True is of layers", "gate_up_proj is adapted by itself"),
    "parameters, saved": ("ValueError", "gate_up_proj is of a module that is trained itself"),
    "parameters, tree": ("ValueError", "target_parameters= and bias= are for modules"),
    "parameters, conv1d": ("ValueError", "class Conv1D and of transformer.wpe.weight by itself", "peft"),
    "parameters, rank": ("ValueError", "gate_up_proj is of shape [4, 48, 32], and its adapter for [2, 48, 32]"),
    "parameters, turned": ("ValueError", "gate_up_proj is a parameter of kind 'experts'", "'turned_experts'"),
    "parameters, magnitude": ("ValueError", "has parts of (8, 32), (48, 8), (48,)"),
    "parameters, of a layer": ("ValueError", "gate_up_proj is a parameter of kind 'experts'", "'linear'"),
    "parameters, on a layer": ("ValueError", "q_proj is a Linear, and its adapter is for weights of kind 'experts'"),
    "parameters, merged, rank": ("ValueError", "is of shape [4, 48, 32], and its adapter for [2, 48, 32]"),
    "parameters, merged, turned": ("ValueError", "gate_up_proj is a parameter of kind 'experts'", "'turned_experts'"),
    "parameters, merged, magnitude": ("ValueError", "has parts of (8, 32), (48, 8), (48,)"),
    "parameters, merged, of a layer": ("ValueError", "there is no model.layers.1.mlp.experts.gate_up_proj.weight in"),
    "parameters, merged, on a layer": ("ValueError", "there is no model.layers.1.self_attn.q_proj in"),
    "bias, tree": ("ValueError", "target_parameters= and bias= are for modules"),
    "bias, word": ("ValueError", "bias must be one of 'none', 'all', 'lora_only', got 'some'"),
    "bias, tied": ("ValueError", "bias='all': cls.predictions.bias is cls.predictions.decoder.bias, too"),
    "bias, some": ("ValueError", "there are copies of", "those of adapted layers, or all"),
    "no values": ("ValueError", "has no values yet", "params="),
    "some with dora": ("ValueError", "dora=False", "dora=True", "peft has one"),
    "optimizer, whole": ("ValueError", "nothing to train: w is quantized", "lora.init"),
    "optimizer, cut": ("ValueError", "nothing to train: w is quantized", "lora.init"),
    "optimizer, some": ("ValueError", "(16, 16) at w", "Packed"),
    "load, no folder": ("CheckpointError", "adapter_config.json cannot be read"),
    "load, other kind": ("CheckpointError", "'IA3'"),
    "load, unknown": ("CheckpointError", "use_qalora=True", "not known here"),
    "load, bias": ("CheckpointError", "bias must be one of 'none', 'all', 'lora_only', got 'some'"),
    "load, pissa": ("CheckpointError", "init_lora_weights='pissa'"),
    "load, other rank": ("CheckpointError", "the rank is 3"),
    "load, dora": ("CheckpointError", "lora_magnitude_vector is missing"),
    "load, more targets": ("CheckpointError", "v_proj", "has no tensors"),
    "load, other targets": ("CheckpointError", "other modules"),
    "load, half": ("CheckpointError", "lora_A.weight is missing"),
    "load, other name": ("CheckpointError", "has no", "query", "another model"),
    "load, other shape": ("CheckpointError", "shapes [2, 1] and [32, 2]"),
    "load, base": ("CheckpointError", "its model.embed_tokens.weight of the base differs"),
    "load, parameters, half": ("CheckpointError", "experts.gate_up_proj", "which has no tensors"),
    "load, parameters, none": ("CheckpointError", "MixtralForCausalLM has no model.layers.0.mlp.experts.base_layer"),
    "load, parameters, other": ("CheckpointError", "has no model.layers.0.mlp.experts.base_layer"),
    "load, parameters, no list": ("CheckpointError", "target_parameters must be a list"),
    "load, parameters, dropout": ("CheckpointError", "dropout=0.1 is of layers"),
    "load, parameters, rank": ("CheckpointError", "gate_up_proj has", "[8, 32] and [48, 8]", "the rank is 4"),
    "save, to a file": ("ValueError", "there are no adapters"),
    "save, below a file": ("CheckpointError", "rank 0: NotADirectoryError"),
    "save, elsewhere": ("CheckpointError", "different paths"),
    "load, damaged": ("CheckpointError", "adapter_model.safetensors cannot be read"),
}


@pytest.mark.world(2, "processes")
def test_what_cannot_be_is_refused_on_every_rank(world: World, tmp_path: Path) -> None:
    for found in world.run(refused, str(tmp_path)):
        assert found.keys() == SAID.keys()
        assert {k: found[k] for k, parts in SAID.items() if not all(part in found[k] for part in parts)} == {}


def test_a_folder_has_one_adapter_or_none_whenever_writing_ends(tmp_path: Path, monkeypatch: Any) -> None:
    model = interop.functional(zoo.build("llama"), min_stage_params=512)
    old, new = (dense.drawn(lora.init(model, ["q_proj"], 2, alpha=alpha), alpha) for alpha in (8, 16))
    left, seen = [0], set()

    def counted(f: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return f(*args, **kwargs)

        return run

    for at in range(12):
        lora.save_pretrained(tmp_path, model, old)
        left[0] = at
        with monkeypatch.context() as patch:
            for owner, name in ((Path, "rename"), (Path, "unlink"), (files, "write_whole"), (files, "sync")):
                patch.setattr(owner, name, counted(getattr(owner, name)))
            try:
                lora.save_pretrained(tmp_path, model, new)
            except KeyboardInterrupt:
                seen.add("ended")
        try:
            found, _ = files._read_adapters(tmp_path, model)
        except CheckpointError as error:
            seen.add("none" if "adapter_config.json cannot be read" in str(error) else str(error))
            continue
        name = next(iter(found["model.layers.0"].values())).recipe.alpha
        assert distance(found, {8: old, 16: new}[name]) == 0
        seen.add(str(name))
    assert seen == {"ended", "none", "8", "16"}
