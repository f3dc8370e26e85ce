"""Adapters on modules: derivatives are those of the module with the sums in it, on one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import P, interop, lora, quant
from shardfn.mesh.spec import dotted
from shardfn.shards.layout import is_flat
from shardfn.testing import World
from tests.heard import heard
from tests.interop import zoo
from tests.lora import dense
from tests.models import DATA, STRATEGIES, data_mesh, distance, mesh_of, sharded_trees
from tests.reference import worst

Kind = dict[str, Any]
CASES: dict[str, tuple[str, Any, Kind]] = {
    "linear": ("llama", "all-linear", {}),
    "tied": ("llama_tied", ["embed_tokens", "v_proj"], {"rslora": True}),
    "tied, the other": ("llama_tied", ["lm_head", "v_proj"], {"dora": True}),
    "conv1d": ("gpt2", ["c_attn", "wte", "mlp.c_proj"], {"dora": True}),
    "saved": ("gpt2", r".*\.c_fc", {"modules_to_save": ["ln_f", "1.ln_1"], "rank_pattern": {"h.1.mlp.c_fc": 5}}),
    "shared": ("albert", ["query", "embedding_hidden_mapping_in"], {"dora": True, "alpha_pattern": {"query": 3}}),
    "dora": ("gpt2", ["c_attn", "mlp.c_proj"], {"dora": True}),
    "torch": ("encoder", ["linear1", "linear2"], {}),
    "encoder": ("t5", ["q", "wo"], {"exclude": ["0.layer.0.SelfAttention.q"]}),
    "experts": ("mixtral", ["q_proj"], {"target_parameters": ["gate.weight", "gate_up_proj", "experts.down_proj"]}),
    "biases": ("gpt2", ["c_attn"], {"bias": "all", "modules_to_save": ["1.ln_1"]}),
}


class Case:
    """A module with adapters, and the same on one process."""

    def __init__(self, name: str, few_bits: bool, **options: Any) -> None:
        self.name, targets, more = CASES[name]
        self.module = zoo.build(self.name)
        self.batch = zoo.ZOO[self.name].batch()
        self.model = interop.functional(zoo.build(self.name), **{"min_stage_params": 512, **options})
        self.module.eval(), self.model.module.eval()
        self.tree = self.model.tree
        if few_bits:
            self.tree = quant.quantize(self.tree, quant.nf4(double=True))
        self.whole = dict(_named(quant.dequantize(self.tree)))
        self.adapters = dense.drawn(lora.init(self.model, targets, 3, alpha=4, params=self.tree, **more))

    def reference(self, adapters: Any, batch: zoo.Batch) -> Tensor:
        return dense.loss(self.name, self.module, self.whole, self.model, adapters, batch)

    def loss(self, adapters: Any, params: Any, batch: zoo.Batch) -> Tensor:
        """Of this rank's rows, averaged over all."""
        total, count = zoo.ZOO[self.name].loss(self.model(params, adapters=adapters, **batch), batch)
        return sf.psum(total, DATA) / sf.psum(count, DATA)

    def rows(self) -> zoo.Batch:
        return {k: x.chunk(dist.get_world_size())[dist.get_rank()] for k, x in self.batch.items()}


def _named(tree: Any) -> Iterator[tuple[str, Tensor]]:
    for accessor, x in zip(*optree.tree_flatten_with_accessor(tree)[:2], strict=True):
        yield dotted(accessor), x


def first_derivatives(name: str, strategy: str, own: str, few_bits: bool, options: Kind) -> float:
    case = Case(name, few_bits, **options)
    mesh = data_mesh(dist.get_world_size())
    params = sf.shard(case.tree, mesh, STRATEGIES[strategy], frozen=case.model.frozen)
    adapters = sf.shard(case.adapters, mesh, STRATEGIES[own])
    want, value = torch.func.grad_and_value(case.reference)(case.adapters, case.batch)
    step = sf.shard_map(sf.value_and_grad(case.loss), mesh=mesh, in_specs=(..., ..., P(DATA)), out_specs=(P(), ...))
    worst = 0.0
    for _ in range(2):  # the second knows the order of the stages
        found, grads = step(adapters, params, case.rows())
        worst = max(worst, distance([found, sf.unshard(grads)], [value, want], floor=1e-3))
    return worst


@pytest.mark.world(2, "processes")
def test_gradients_are_those_of_the_sums(world: World) -> None:
    for i, name in enumerate(CASES):
        few_bits = i % 2 == 0
        found = world.run(first_derivatives, name, "full_shard", "ddp", few_bits, {"remat": few_bits})
        assert worst(found) < 1e-11, name


@pytest.mark.world(4, "processes")
def test_gradients_are_the_same_under_every_strategy(world: World) -> None:
    for strategy in ("zero1", "shard_grad_op", "hybrid_shard", "hfsdp", "hpz"):
        own = "full_shard" if strategy == "hybrid_shard" else "ddp"
        assert worst(world.run(first_derivatives, "conv1d", strategy, own, strategy == "hpz", {})) < 1e-11, strategy


def further_derivatives(name: str) -> dict[str, float]:
    """By torch's own transforms, of adapters alone, on a base in few bits."""
    case = Case(name, few_bits=True)
    n = dist.get_world_size()
    mesh = data_mesh(n)
    params = sf.shard(case.tree, mesh, STRATEGIES["full_shard"])
    adapters, tangent = (
        sf.shard(one, mesh, STRATEGIES["ddp"]) for one in (case.adapters, dense.drawn(case.adapters, 3))
    )

    def mapped(f: Any) -> Any:
        return sf.shard_map(f, mesh=mesh, in_specs=(..., P(DATA)), out_specs=...)(adapters, case.rows())

    def hvp(grad: Any, loss: Any, at: Any, along: Any) -> Any:
        return torch.func.jvp(grad(loss), (at,), (along,))[1]

    found = {}
    got = mapped(lambda a, batch: hvp(sf.grad, lambda a: case.loss(a, params, batch), a, tangent))
    want = hvp(torch.func.grad, lambda a: case.reference(a, case.batch), case.adapters, sf.unshard(tangent))
    found["jvp of grad"] = distance(sf.unshard(got), want, floor=1e-3)

    got = mapped(lambda a, batch: torch.func.grad(lambda a: case.loss(a, params, batch))(a))
    want = torch.func.grad(case.reference)(case.adapters, case.batch)
    found["grad"] = distance(sf.unshard(got), want, floor=1e-3)

    def one(loss: Any) -> Any:
        return lambda a, row: loss(a, {k: x[None] for k, x in row.items()})

    def alone(a: Any, row: zoo.Batch) -> Tensor:
        return zoo.ZOO[case.name].loss(case.model(params, adapters=a, **row), row)[0]

    def alone_there(a: Any, row: zoo.Batch) -> Tensor:
        return case.reference(a, row) * zoo.ZOO[case.name].loss(case.module(**row), row)[1]

    got = mapped(lambda a, batch: torch.func.vmap(sf.grad(one(alone)), in_dims=(None, 0))(a, batch))
    want = torch.func.vmap(torch.func.grad(one(alone_there)), in_dims=(None, 0))(case.adapters, case.batch)
    together = optree.tree_map(lambda x: torch.stack(x.chunk(n)).sum(0), want)  # adapters are summed over the ranks
    per = [sf.unshard(optree.tree_map(lambda x, i=i: x[i], got)) for i in range(zoo.ROWS // n)]
    found["vmap of grad"] = distance(optree.tree_map(lambda *x: torch.stack(x), *per), together, floor=1e-3)

    several = [case.adapters, dense.drawn(case.adapters, 5)]
    stacked = optree.tree_map(lambda *x: torch.stack(x), *(sf.shard(one, mesh, STRATEGIES["ddp"]) for one in several))
    ensemble = sf.shard_map(
        lambda a, batch: torch.func.vmap(lambda a: case.loss(a, params, batch))(a),
        mesh=mesh, in_specs=(..., P(DATA)), out_specs=P(),
    )  # fmt: skip
    values = ensemble(stacked, case.rows())
    found["vmap over adapters"] = distance(list(values), [case.reference(one, case.batch) for one in several])
    return found


@pytest.mark.world(2, "processes")
def test_further_derivatives_are_those_of_the_sums(world: World) -> None:
    for case in ("linear", "dora"):
        for found in world.run(further_derivatives, case):
            assert {name: x for name, x in found.items() if not x < 1e-11} == {}, case


def trained(name: str, own: str) -> float:
    """Five steps of AdamW, the state of which is of adapters alone, and adapters are chosen by call."""
    case = Case(name, few_bits=True)
    mesh, params = sharded_trees("full_shard", case.tree)
    adapters, other = (sf.shard(one, mesh, STRATEGIES[own]) for one in (case.adapters, dense.drawn(case.adapters, 5)))
    before = sf.unshard(params), sf.unshard(other)
    opt = so.adamw(1e-2, weight_decay=0.1)
    state = opt.init(adapters)
    whole, worst = sf.unshard(adapters), 0.0
    theirs, plain = opt.init(whole), whole

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., ..., P(DATA)), out_specs=(..., ..., P()))
    def step(adapters: Any, state: Any, params: Any, batch: zoo.Batch) -> Any:
        value, grads = sf.value_and_grad(case.loss)(adapters, params, batch)
        return *opt.step(adapters, grads, state), value

    for _ in range(5):
        adapters, state, value = step(adapters, state, params, case.rows())
        grads, wanted = torch.func.grad_and_value(case.reference)(plain, case.batch)
        plain, theirs = opt.step(plain, grads, theirs)
        worst = max(worst, distance(value, wanted))
    same = optree.tree_map(torch.equal, (sf.unshard(params), sf.unshard(other)), before)
    assert all(optree.tree_leaves(same))
    evaluate = sf.shard_map(case.loss, mesh=mesh, in_specs=(..., ..., P(DATA)), out_specs=P())
    first, second = (evaluate(one, params, case.rows()) for one in (other, adapters))
    assert distance(first, case.reference(sf.unshard(other), case.batch)) < 1e-12
    return max(worst, distance(second, case.reference(plain, case.batch)), distance(sf.unshard(adapters), plain))


@pytest.mark.world(2, "processes")
def test_training_changes_the_adapters_that_are_given_and_nothing_else(world: World) -> None:
    assert worst(world.run(trained, "conv1d", "zero1")) < 1e-9
    assert worst(world.run(trained, "linear", "ddp")) < 1e-9


def merged(name: str, few_bits: bool, strategy: str, folder: str) -> list[float]:
    case = Case(name, few_bits)
    mesh = data_mesh(dist.get_world_size())
    params = sf.shard(case.tree, mesh, STRATEGIES[strategy], frozen=case.model.frozen)
    adapters = sf.shard(case.adapters, mesh, STRATEGIES["full_shard"])
    made = lora.merge(params, adapters, case.model)
    evaluate = sf.shard_map(lambda p, batch: case.loss({}, p, batch), mesh=mesh, in_specs=(..., P(DATA)), out_specs=P())
    found = [distance(evaluate(made, case.rows()), case.reference(case.adapters, case.batch))]
    whole = case.model.state_dict(made)
    found.append(distance(whole, dense.weights(case.whole, case.model.names, case.adapters)))
    found.append(distance(lora.merge(quant.dequantize(case.tree), case.adapters, case.model), sf.unshard(made)))
    path = f"{folder}/{name}"
    interop.save_pretrained(path, case.model, made)
    kind: Any = type(case.module)
    again = kind.from_pretrained(path, config=case.module.config).double().eval()
    total, count = zoo.ZOO[case.name].loss(again(**case.batch), case.batch)
    found.append(distance(total / count, case.reference(case.adapters, case.batch)))
    if name in ("linear", "experts"):
        back = case.model.state_dict(lora.unmerge(made, adapters, case.model))
        found.append(distance(back, {alias: case.whole[key] for alias, key in case.model.names.items()}))
    return found


@pytest.mark.world(2, "processes")
def test_merged_parameters_need_no_adapters(world: World, tmp_path: Path) -> None:
    for name, few_bits, strategy in (
        ("linear", False, "full_shard"),
        ("linear", True, "full_shard"),
        ("dora", True, "full_shard"),
        ("saved", False, "hpz"),
        ("experts", True, "full_shard"),
        ("biases", True, "full_shard"),
    ):
        for found in world.run(merged, name, few_bits, strategy, str(tmp_path)):
            assert worst(found) < 1e-12, name


def merged_aloud() -> list[str]:
    """What the log says on this rank while parameters in few bits are merged, sharded and whole."""
    case = Case("linear", few_bits=True)
    params = sf.shard(case.tree, data_mesh(dist.get_world_size()), STRATEGIES["full_shard"])
    with heard() as said:
        lora.merge(params, case.adapters, case.model)
        lora.merge(quant.dequantize(case.tree), case.adapters, case.model)
    return said


@pytest.mark.world(2, "processes")
def test_one_rank_says_that_merged_parameters_have_all_bits(world: World) -> None:
    first, second = world.run(merged_aloud)
    assert [("few bits" in line) for line in first] == [True]
    assert second == []


def behavior() -> dict[str, Any]:
    """Compiled, generating, dropping out and computed again; and what travels."""
    mesh, found = mesh_of(replica=1, shard=-1), dict[str, Any]()
    plain = Case("linear", few_bits=True)
    want, value = torch.func.grad_and_value(plain.reference)(plain.adapters, plain.batch)

    def step(case: Case, adapters: Any, params: Any) -> Any:
        run = sf.value_and_grad(case.loss)
        mapped = sf.shard_map(run, mesh=mesh, in_specs=(..., ..., P(DATA)), out_specs=(P(), ...))
        value, grads = mapped(adapters, params, case.rows())
        return value, sf.unshard(grads)

    compiled = Case("linear", few_bits=True, compile={"backend": "aot_eager"})
    params = sf.shard(plain.tree, mesh, sf.full_shard(DATA))
    adapters = sf.shard(plain.adapters, mesh, sf.ddp(DATA))
    for _ in range(2):
        found["compiled"] = distance(step(compiled, adapters, params), (value, want), floor=1e-3)

    step(plain, adapters, params)
    with sf.collectives.ledger() as log:
        step(plain, adapters, params)
    held = sum(x.layout.padded * x.layout.dtype.itemsize for x in optree.tree_leaves(adapters, is_leaf=is_flat))
    moved = [one for one in log.records if one.bytes > 64]
    found["gathered"] = {str(one.dtype) for one in moved if one.op == "all_gather"}
    reduced = [one for one in moved if one.op in ("all_reduce", "reduce_scatter")]
    found["reduced"] = sum(one.bytes for one in reduced) <= 2 * held

    made = plain.model(
        params, plain.batch["input_ids"], adapters=adapters, method="generate", max_new_tokens=3, do_sample=False
    )
    summed = dense.weights(plain.whole, plain.model.names, plain.adapters)
    theirs: Any = zoo.build("llama")
    theirs.load_state_dict(summed, strict=False)
    alone = theirs.eval().generate(plain.batch["input_ids"], max_new_tokens=3, do_sample=False)
    found["generated"] = torch.equal(made, alone)

    drops = []
    for remat in (False, True):
        case = Case("linear", few_bits=True, remat=remat)
        case.model.module.train()
        dropping = optree.tree_map(
            lambda x: lora.Adapter(x.a, x.b, None, replace(x.recipe, dropout=0.3)),
            case.adapters, is_leaf=lambda x: isinstance(x, lora.Adapter),
        )  # fmt: skip
        shards = sf.shard(dropping, mesh, sf.ddp(DATA))
        torch.manual_seed(1 + mesh.get_rank())
        drops.append(step(case, shards, params))
        case.model.module.eval()
        found[f"eval, remat={remat}"] = distance(step(case, shards, params)[0], value)

    found["dropout computed again"] = distance(*drops)
    found["dropout"] = distance(drops[0][0], value) > 1e-6
    return found


@pytest.mark.world(2, "processes")
def test_adapted_models_compile_generate_and_drop_out(world: World) -> None:
    for found in world.run(behavior):
        assert found.pop("gathered") == {"torch.uint8", "torch.float64"}  # norms, and what is short, are as they were
        assert all(found.pop(name) for name in ("reduced", "generated", "dropout"))
        assert worst(found.values()) < 1e-11, found
