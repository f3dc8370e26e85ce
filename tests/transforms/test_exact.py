"""Runs that have the same bits on any mesh: digests of parameters after some steps on 1, 2 and 4 ranks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint as checkpoint_of_torch
from torch import Tensor, nn

import shardfn as sf
import shardfn.optim as so
from shardfn import P, checkpoint, interop, lora, quant
from shardfn.cli import main
from shardfn.mesh import exact
from shardfn.testing import World, simulated
from shardfn.testing import world as started
from shardfn.transforms import exact as by_parts
from tests.heard import heard
from tests.models import DATA, STRATEGIES, data_mesh
from tests.reference import worst
from tests.refusals import told

ROWS, LENGTH, VOCABULARY, WIDTH, PARTS, STEPS = 16, 9, 50, 32, 8, 3
Loss = Callable[..., Any]


def digest(tree: Any) -> str:
    """A hash of all numbers of a tree of shards."""
    leaves = [x for x in optree.tree_leaves(sf.unshard(tree)) if isinstance(x, Tensor)]
    of_leaf = (x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for x in leaves)
    return hashlib.sha256(b"".join(of_leaf)).hexdigest()


# --- programs: parameters and a loss of some rows, which is (total, count) ---


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[0] ** 0.5


def net() -> Any:
    """Sizes that are no multiples of a vector's length."""
    blocks = [
        {"w": drawn(WIDTH, 45, seed=i), "b": drawn(45, seed=9 + i), "v": drawn(45, WIDTH, seed=20 + i)}
        for i in range(3)
    ]
    return {"embed": {"e": drawn(VOCABULARY, WIDTH, seed=7)}, "blocks": blocks, "head": {"h": drawn(WIDTH, 50, seed=8)}}


def block(p: Any, x: Tensor) -> Tensor:
    return F.dropout(x + F.gelu(F.layer_norm(x, (WIDTH,)) @ p["w"] + p["b"]) @ p["v"], 0.1)


def loss_with(**options: Any) -> Loss:
    stage = functools.partial(sf.stage, **options)
    embed = stage(lambda p, t: F.embedding(t, p["e"]))
    layer, head = stage(block), stage(lambda p, x: x @ p["h"])

    def loss(p: Any, t: Tensor, y: Tensor) -> Any:
        x = embed(p["embed"], t)
        for each in sf.layers(p["blocks"]):
            x = layer(each, x)
        x = layer(p["blocks"][0], x)  # once more, with the same parameters
        noise = torch.rand(x.shape, generator=sf.fold_in(3, 5, DATA))
        losses = F.cross_entropy(head(p["head"], x + 0.1 * noise).flatten(0, 1), y.flatten(), reduction="none")
        chosen = y.flatten() > 5
        return (losses * chosen).sum(), chosen.sum()

    return loss


def rows(number: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of a batch."""
    n, k = ROWS // dist.get_world_size(), dist.get_rank()
    draw = torch.Generator().manual_seed(number)
    t, y = (torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=draw) for _ in range(2))
    return t[n * k : n * (k + 1)], y[n * k : n * (k + 1)]


Program = tuple[Callable[[], Any], Loss]


def of_module(make: Callable[[], nn.Module], **options: Any) -> Program:
    def built() -> interop.Functional:
        torch.manual_seed(0)
        return interop.functional(make(), min_stage_params=256, **options)

    model = functools.cache(built)

    def loss(p: Any, t: Tensor, y: Tensor) -> Any:
        logits = model()(p, t).logits
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()

    return lambda: model().tree, loss


def causal(kind: str, **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 45, "num_hidden_layers": 2}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False, attention_dropout=0.1, **more
    )
    made: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return made


class Normed(nn.Module):
    """With batch norms, whose statistics are those of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH))] * 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, t: Tensor) -> Any:
        x = self.embed(t).mT
        for layer in self.layers:
            x = F.relu(layer(x))
        return type("Output", (), {"logits": self.head(x.mT)})


NARROW = {
    **dict.fromkeys(("gather_dtype", "input_dtype", "reduce_dtype"), torch.bfloat16),
    "output_dtype": torch.float32,
}
PROGRAMS: dict[str, Callable[[], Program]] = {
    "stages": lambda: (net, loss_with()),
    "remat": lambda: (net, loss_with(remat=True)),
    "narrow": lambda: (net, loss_with(**NARROW)),
    "kept": lambda: (net, loss_with(reshard="step", prefetch=3)),
    "offloaded": lambda: (net, loss_with(remat=sf.offload("host", recompute=True))),
    "llama": lambda: of_module(lambda: causal("Llama"), stages={"LlamaDecoderLayer": {"remat": True}}),
    "mixtral": lambda: of_module(
        lambda: causal("Mixtral", num_local_experts=4, experts_implementation="eager"), stages={"MixtralDecoderLayer"}
    ),
}

OPTIMIZERS: dict[str, Callable[[], so.Optimizer]] = {
    "adamw": lambda: so.adamw(1e-2, weight_decay=lambda path, shape: 0.1 * (len(shape) > 1)),
    "clipped": lambda: so.chain(so.clip_by_global_norm(0.5), so.ema(so.adamw(1e-2), 0.9)),
    "clipped by group": lambda: so.chain(
        so.clip_by_global_norm(0.2, by=lambda path, shape: path[0], order=1), so.sgd(0.1, momentum=0.9)
    ),
    "muon": lambda: so.masked(so.muon(0.02), lambda path, shape: len(shape) == 2, so.adamw8bit(1e-2)),
    "lamb": lambda: so.lamb(1e-2, b1=lambda path, shape: 0.8 if "w" in path else 0.9),
    "adafactor": lambda: so.adafactor(1e-2),
    "soap": lambda: so.soap(1e-2, every=2),
    "shampoo": lambda: so.shampoo(1e-2, every=2, block=16),
    "scaled": lambda: so.dynamic_loss_scale(so.skip_nonfinite(so.adamw(1e-2)), growth_interval=2),
    "narrow": lambda: so.adamw(1e-2, state_dtype=torch.bfloat16),
}


def by_other_transports(strategy: str) -> str:
    """A digest of a run whose gradients are exchanged by the backend's own all-to-all."""
    with sf.collectives.transports(data_mesh(dist.get_world_size()), reduce_scatter="exchange"):
        return trained("stages", "adamw", strategy, {}, PARTS, STEPS)


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard", "ddp"])
@pytest.mark.world(4, "processes")
def test_bits_are_the_same_by_other_transports(world: World, strategy: str) -> None:
    found = world.with_deadline(120).run(by_other_transports, strategy)
    assert set(found) == {of_one_process("stages", "adamw")}


def trained(program: str, optimizer: str, strategy: str, tiers: dict[str, Any], parts: int, steps: int) -> str:
    """A digest of parameters and losses after some steps."""
    os.environ.setdefault("SHARDFN_SCRATCH", tempfile.gettempdir())
    mesh, placement = data_mesh(dist.get_world_size()), STRATEGIES[strategy].with_exact(parts).with_tiers(**tiers)
    make, loss = PROGRAMS[program]()
    opt = OPTIMIZERS[optimizer]()
    params = sf.shard(make(), mesh, placement)
    state, values = opt.init(params), []

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P(DATA)), out_specs=(..., ..., P()))
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = sf.accumulate(loss, batch, micro="exact")(params)
        return *opt.step(params, grads, state), value

    for number in range(steps):
        torch.manual_seed(number)
        params, state, value = step(params, state, rows(number))
        values.append(value)
    return digest([params, torch.stack(values)])


@functools.cache
def of_one_process(program: str, optimizer: str, parts: int = PARTS, steps: int = STEPS) -> str:
    (found,) = started(1).with_deadline(120).run(trained, program, optimizer, "ddp", {}, parts, steps)
    return found


@pytest.mark.central
@pytest.mark.parametrize("program", PROGRAMS)
def test_bits_are_those_of_one_process(program: str) -> None:
    for n, strategy in ((1, "full_shard"), (2, "full_shard"), (4, "hybrid_shard"), (4, "zero1"), (4, "full_shard")):
        found = started(n).with_deadline(120).run(trained, program, "adamw", strategy, {}, PARTS, STEPS)
        assert set(found) == {of_one_process(program, "adamw")}, (n, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bits_are_those_of_one_process_under_every_strategy(strategy: str) -> None:
    for n in (2, 4):
        found = started(n).with_deadline(120).run(trained, "stages", "clipped", strategy, {}, PARTS, STEPS)
        assert set(found) == {of_one_process("stages", "clipped")}, n


@pytest.mark.central
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bits_are_those_of_one_process_with_every_optimizer(optimizer: str) -> None:
    for n, strategy in ((2, "zero1"), (4, "hfsdp"), (4, "full_shard")):
        found = started(n).with_deadline(120).run(trained, "stages", optimizer, strategy, {}, PARTS, STEPS)
        assert set(found) == {of_one_process("stages", optimizer)}, (n, strategy)


@pytest.mark.parametrize("tiers", [{"params": "disk"}, {"grads": "disk", "state": "disk"}], ids=str)
@pytest.mark.world(2, "processes")
def test_bits_are_the_same_on_other_tiers(world: World, tiers: dict[str, Any]) -> None:
    found = world.with_deadline(120).run(trained, "stages", "adamw", "full_shard", tiers, PARTS, STEPS)
    assert set(found) == {of_one_process("stages", "adamw")}


# --- statistics, adapters, and losses that leave parameters out ---


def with_batch_norms(strategy: str) -> str:
    """A digest after steps whose running statistics are the means of those of all parts."""
    torch.manual_seed(0)
    model = interop.functional(Normed(), min_stage_params=256)
    mesh = data_mesh(dist.get_world_size())
    params = sf.shard(model.tree, mesh, STRATEGIES[strategy].with_exact(PARTS))
    opt, buffers = so.adamw(1e-2), model.buffers
    state = opt.init(params)

    def loss(p: Any, t: Tensor, y: Tensor) -> Any:
        out, new = model(p, t, buffers=buffers)
        return (F.cross_entropy(out.logits.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()), new

    @sf.shard_map(mesh=mesh, in_specs=(..., P(DATA)), out_specs=((P(), P()), ...))
    def step(params: Any, batch: Any) -> Any:
        return sf.accumulate(loss, batch, micro="exact", has_aux=True)(params)

    values = []
    for number in range(STEPS):
        (value, parts), grads = step(params, rows(number))
        assert len(parts) == PARTS
        buffers = optree.tree_map(lambda *xs: torch.stack(xs).double().mean(0).to(xs[0].dtype), *parts)
        params, state = opt.step(params, grads, state)
        values.append(value)
    return digest([params, torch.stack(values), buffers])


@pytest.mark.central
def test_batch_norms_use_the_statistics_of_a_part() -> None:
    (alone,) = started(1).run(with_batch_norms, "ddp")
    for n, strategy in ((2, "full_shard"), (4, "hybrid_shard")):
        assert set(started(n).run(with_batch_norms, strategy)) == {alone}


def with_adapters(strategy: str) -> str:
    """A digest of adapters of a base in four bits, after steps."""
    torch.manual_seed(0)
    model = interop.functional(causal("Llama"), min_stage_params=256)
    mesh = data_mesh(dist.get_world_size())
    model.tree = quant.quantize(model.tree, quant.nf4(double=True), names=r".*_proj\.weight")
    base = sf.shard(model.tree, mesh, STRATEGIES[strategy], frozen=r".*")
    adapters = sf.shard(lora.init(model, "all-linear", rank=3), mesh, STRATEGIES["zero1"].with_exact(PARTS))
    opt = so.adamw(1e-2)
    state = opt.init(adapters)

    def loss(adapters: Any, t: Tensor, y: Tensor) -> Any:
        logits = model(base, t, adapters=adapters).logits
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()

    @sf.shard_map(mesh=mesh, in_specs=(..., P(DATA)), out_specs=(P(), ...))
    def step(adapters: Any, batch: Any) -> Any:
        return sf.accumulate(loss, batch, micro="exact")(adapters)

    for number in range(STEPS):
        torch.manual_seed(number)
        _, grads = step(adapters, rows(number))
        adapters, state = opt.step(adapters, grads, state)
    return digest(adapters)


def test_adapters_of_a_base_in_four_bits() -> None:
    (alone,) = started(1).with_deadline(120).run(with_adapters, "ddp")
    for n in (2, 4):
        assert set(started(n).with_deadline(120).run(with_adapters, "full_shard")) == {alone}


first, second = sf.stage(lambda p, x: x @ p["w"]), sf.stage(lambda p, x: torch.tanh(x @ p["w"]))


def leaving_out(strategy: str) -> str:
    """A digest of gradients of a loss that uses a stage in some parts alone, also of negative zeros."""
    mesh = data_mesh(dist.get_world_size())
    params = [{"w": drawn(WIDTH, WIDTH, seed=i)} for i in range(3)]
    params = sf.shard(params, mesh, STRATEGIES[strategy].with_exact(PARTS))

    def loss(p: Any, x: Tensor) -> Any:
        y, z = first(p[0], x), second(p[1], x)
        chosen = y if x[0, 0] > 0 else z
        return -chosen.relu().sum() if x[0, 1] > -0.1 else x.sum()

    @sf.shard_map(mesh=mesh, in_specs=(..., P(DATA)), out_specs=(P(), ...))
    def step(params: Any, x: Tensor) -> Any:
        return sf.accumulate(loss, x, micro="exact")(params)

    n, k = ROWS // dist.get_world_size(), dist.get_rank()
    return digest(list(step(params, drawn(ROWS, WIDTH, seed=3)[n * k : n * (k + 1)])))


def test_parts_whose_loss_leaves_a_stage_out() -> None:
    (alone,) = started(1).run(leaving_out, "ddp")
    for n, strategy in ((2, "full_shard"), (4, "hybrid_shard"), (4, "zero1")):
        assert set(started(n).run(leaving_out, strategy)) == {alone}, (n, strategy)


def on_three(parts: int, strategy: str) -> str:
    mesh = sf.make_mesh(data=dist.get_world_size(), device="cpu")
    placement = {"ddp": sf.ddp("data"), "full": sf.full_shard("data")}[strategy].with_exact(parts)
    params = sf.shard({"w": drawn(WIDTH, WIDTH, seed=1)}, mesh, placement)
    opt = so.chain(so.clip_by_global_norm(0.1), so.adamw(1e-2))
    state = opt.init(params)

    @sf.shard_map(mesh=mesh, in_specs=(..., P("data")), out_specs=(P(), ...))
    def step(params: Any, x: Tensor) -> Any:
        return sf.accumulate(lambda p, x: second(p, x).square().sum(), x, micro="exact")(params)

    n, k = 24 // dist.get_world_size(), dist.get_rank()
    for number in range(STEPS):
        _, grads = step(params, drawn(24, WIDTH, seed=number)[n * k : n * (k + 1)])
        params, state = opt.step(params, grads, state)
    return digest(params)


@pytest.mark.parametrize("parts", [3, 12])
def test_three_ranks_share_three_times_a_power_of_two(parts: int) -> None:
    (alone,) = started(1).run(on_three, parts, "ddp")
    assert set(started(3).run(on_three, parts, "full")) == {alone}


# --- the sum itself ---


@pytest.mark.parametrize("parts", [1, 2, 3, 6, 8, 12, 16])
def test_ranks_share_the_tree(parts: int) -> None:
    leaves = [drawn(1000, seed=i) for i in range(parts)]
    sums = []
    for ranks in exact.fitting_sizes(parts):
        over_ranks, over_parts = exact.split_bases(parts, ranks)
        total, count = exact.PartSums(over_parts), parts // ranks
        for k in exact.order(parts, ranks):
            values = [leaves[r * count + k].clone() for r in range(ranks)]
            node = torch.empty(1000) if ranks > 1 else values[0]
            if ranks > 1:
                exact.add(values, over_ranks, node)
            total.add(node)
        assert total.sum is not None
        sums.append(total.sum)
    sums.append(exact.sum_of_pieces(torch.stack(leaves), parts))
    assert all(torch.equal(x, sums[0]) for x in sums)
    if parts > 3:
        assert not torch.equal(sums[0], torch.stack(leaves).flip(0).cumsum(0)[-1])


def test_the_stack_holds_few_partial_sums() -> None:
    total = exact.PartSums(exact.split_bases(16, 1)[1])
    for _ in range(16):
        total.add(torch.ones(1))
        assert sum(len(level) for level in total.levels) <= 4
    assert total.sum is not None
    assert total.sum.item() == 16


STAGES = (
    sf.stage(lambda p, t: F.embedding(t, p["e"])),
    sf.stage(lambda p, x: torch.tanh(x @ p["w"] + p["b"]) @ p["v"]),
    sf.stage(lambda p, x: x @ p["h"]),
)


def of_rows(p: Any, t: Tensor) -> tuple[Tensor, int]:
    x = STAGES[0](p["embed"], t)
    for each in p["blocks"]:
        x = STAGES[1](each, x)
    return STAGES[2](p["head"], x).square().sum(), len(t)


def as_usual(strategy: str) -> list[float]:
    """How far value and gradient are from those of a run that is not exact, relatively."""
    mesh, results = data_mesh(dist.get_world_size()), []
    losses = {PARTS: of_rows, 0: lambda p, t: sf.psum(of_rows(p, t), DATA)}
    for parts, loss in losses.items():
        params = sf.shard(net(), mesh, STRATEGIES[strategy].with_exact(parts))
        accumulated = functools.partial(sf.accumulate, loss, micro="exact" if parts else 2)
        step = sf.shard_map(
            lambda p, t, f=accumulated: f(t)(p), mesh=mesh, in_specs=(..., P(DATA)), out_specs=(P(), ...)
        )
        value, grads = step(params, rows(1)[0])
        results.append([value, *optree.tree_leaves(sf.unshard(grads))])
    return [float((x - y).abs().max() / x.abs().max()) for x, y in zip(*results, strict=True)]


def addresses_of_parts() -> list[tuple[int, int, int, bool]]:
    """Of each part's rows: address modulo 64, offset, bytes of storage beyond them, and whether they are contiguous."""
    found = []

    def loss(p: Any, x: Tensor) -> tuple[Tensor, int]:
        beyond = x.untyped_storage().nbytes() - x.numel() * x.itemsize
        found.append((x.data_ptr() % 64, int(x.storage_offset()), beyond, x.is_contiguous()))
        return sf.stage(lambda p, x: x @ p["w"])(p, x).square().sum(), len(x)

    mesh = data_mesh(dist.get_world_size())
    params = sf.shard({"w": drawn(3, 3, seed=0)}, mesh, STRATEGIES["full_shard"].with_exact(PARTS))
    batch = torch.arange(3.0 * ROWS).reshape(3, ROWS).T.chunk(dist.get_world_size())[mesh.get_rank()]
    step = sf.shard_map(
        lambda p, x: sf.accumulate(loss, x, micro="exact")(p), mesh=mesh, in_specs=(..., P(DATA)), out_specs=...
    )
    step(params, batch)
    return found


@pytest.mark.world(2, "processes")
def test_the_rows_of_a_part_are_aligned_in_memory_of_their_own(world: World) -> None:
    """Kernels round differently at another alignment, or by what lies beside the rows; not all of them, everywhere."""
    assert world.run(addresses_of_parts) == [[(0, 0, 0, True)] * (PARTS // 2)] * 2


def with_own_noise(device: str, way: str, scoped: bool = True) -> list[float]:
    """Value and gradients where a function draws by the part's number, and runs again in backward."""
    n = dist.get_world_size() if dist.is_initialized() else 1
    mesh = sf.make_mesh(device=device, replica=1, shard=n)

    def noisy(x: Tensor) -> Tensor:
        return x * torch.full_like(x, sf.fold_in(7, 0, DATA).initial_seed() % 1000)  # which backward reads

    layer = sf.stage(lambda p, x: noisy(torch.tanh(x @ p["w"])), remat=way == "remat")
    last = sf.stage(lambda p, x: torch.tanh(x @ p["w"]))

    def loss(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = layer(p[0], x)
        x = checkpoint_of_torch.checkpoint(noisy, x, use_reentrant=False) if way == "checkpoint" else noisy(x)
        return last(p[1], x / 1e5).square().sum(), torch.ones((), device=x.device)

    params = sf.shard([{"w": drawn(8, 8, seed=i)} for i in range(2)], mesh, STRATEGIES["full_shard"].with_exact(4))
    rows = drawn(8, 8, seed=9).to(device).chunk(n)[mesh.get_rank() if n > 1 else 0]

    def step(params: Any, x: Tensor) -> Any:
        return sf.accumulate(loss, x, micro="exact")(params)

    if scoped:
        step = sf.shard_map(step, mesh=mesh, in_specs=(..., P(DATA)), out_specs=(P(), ...))
    value, grads = step(params, rows)
    return [float(x.sum()) for x in (value, *optree.tree_leaves(sf.unshard(grads)))]


def with_own_noise_on_a_device(way: str) -> list[float]:
    with simulated(1, values=True) as device:
        return with_own_noise(device.name, way)


@pytest.mark.central
@pytest.mark.parametrize("way", ["remat", "checkpoint", "kept"])
def test_what_runs_again_on_a_thread_of_autograd_knows_its_part(way: str) -> None:
    (wanted,) = started(1, "alone").run(with_own_noise, "cpu", "kept")
    (found,) = started(1, "alone").run(with_own_noise_on_a_device, way)
    assert worst(abs(x - y) / abs(y) for x, y in zip(found, wanted, strict=True)) < 1e-6


@pytest.mark.parametrize("way", ["remat", "kept"])
def test_stages_know_their_part_without_shard_map(way: str) -> None:
    (wanted,) = started(1, "alone").run(with_own_noise, "cpu", "kept")
    assert started(2, "processes").run(with_own_noise, "cpu", way, False) == [wanted] * 2


def norms_on_a_device(parts: int) -> int:
    """The operations of clipping by the norm of 40 parameters."""
    with simulated(4) as device:
        mesh = sf.make_mesh(device=device.name, shard=4)
        tree = [{f"p{i}": torch.randn(8, 8) for i in range(10)} for _ in range(4)]
        params = sf.shard(tree, mesh, sf.full_shard("shard").with_exact(parts))
        device.reset_counts()
        so.global_norm(params)
        return device.operations.total()


def test_exact_norms_take_few_more_operations() -> None:
    (usual,) = started(1, "alone").run(norms_on_a_device, 0)
    (exact,) = started(1, "alone").run(norms_on_a_device, 8)
    assert exact < usual + 10


@pytest.mark.parametrize(("deterministic", "benchmark"), [(False, False), (True, True), (True, False)])
def test_kernels_of_cuda_must_be_deterministic(
    deterministic: bool, benchmark: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    wrong = pytest.raises(RuntimeError, match=r"CUDA kernels must be deterministic: call torch\.use_deterministic")
    with contextlib.nullcontext() if deterministic and not benchmark else wrong:
        by_parts._require_deterministic_kernels(torch.device("cuda"), "loss")
    by_parts._require_deterministic_kernels(torch.device("cpu"), "loss")


def waits_of_a_step() -> list[Any]:
    with simulated(1, values=True) as device:
        mesh = sf.make_mesh(device=device.name, replica=1, shard=1)
        params = sf.shard(net(), mesh, STRATEGIES["full_shard"].with_exact(PARTS))
        batch = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device=device.name)
        step = sf.shard_map(
            lambda p, t: sf.accumulate(of_rows, t, micro="exact")(p), mesh=mesh, in_specs=(..., P(DATA)), out_specs=...
        )
        step(params, batch)
        device.reset_counts()
        step(params, batch)
        return [(one.where, one.times) for one in device.synchronizations]


def test_the_host_waits_for_no_count() -> None:
    assert started(1, "alone").run(waits_of_a_step) == [[]]


@pytest.mark.world(4, "processes")
def test_the_result_is_the_loss_and_its_gradient(world: World) -> None:
    for found in world.run(as_usual, "hybrid_shard"):
        assert worst(found) < 1e-6


def sent(strategy: str) -> tuple[int, int]:
    """Bytes of a step, and of one that sums as many micro-batches as usual, of a buffer that both pad alike."""
    mesh, found = data_mesh(dist.get_world_size()), []
    embed = sf.stage(lambda p, t: F.embedding(t, p["e"]).sum())
    for parts, micro in ((PARTS, "exact"), (0, PARTS // dist.get_world_size())):
        params = sf.shard({"p": {"e": drawn(127, 16, seed=1)}}, mesh, STRATEGIES[strategy].with_exact(parts))

        def loss(p: Any, t: Tensor, parts: int = parts) -> Any:
            return embed(p["p"], t) if parts else sf.psum(embed(p["p"], t), DATA)

        step = sf.shard_map(
            lambda p, t, micro=micro, f=loss: sf.accumulate(f, t, micro=micro, defer="nothing")(p),
            mesh=mesh, in_specs=(..., P(DATA)), out_specs=(P(), ...),
        )  # fmt: skip
        with sf.collectives.ledger() as log:
            step(params, rows(1)[0])
        found.append(log.bytes(stage="p"))
    return found[0], found[1]


@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "ddp", "hybrid_shard", "hfsdp"])
@pytest.mark.world(4, "processes")
def test_no_more_bytes_are_sent_than_by_so_many_micro_batches(world: World, strategy: str) -> None:
    for exactly, usually in world.run(sent, strategy):
        assert 0 < exactly <= usually
        assert (exactly == usually) == (strategy in ("full_shard", "zero1", "hfsdp"))


# --- errors, on every rank ---


few = sf.stage(lambda p, x: x @ p["w"], gather_format=quant.int8())


def of_first(x: Tensor) -> Loss:
    return lambda p, *rows: first(p, x).square().sum()


def norm_of(tree: Any) -> Tensor:
    return sum((x.square().sum() for x in optree.tree_leaves(tree)), torch.zeros(()))


def penalized(p: Any, loss: Tensor) -> Tensor:
    return loss + norm_of(torch.autograd.grad(loss, optree.tree_leaves(p), create_graph=True))


def second_call_of_compiled(step: Any) -> Any:
    compiled = sf.compile(step)
    return lambda *args: (compiled(*args), compiled(*args))


def wrong(case: str) -> str:
    mesh = data_mesh(dist.get_world_size())
    placement = STRATEGIES["full_shard"]
    psum = sf.stage(lambda p, x: sf.psum(x, DATA))

    def on(
        parts: int,
        loss: Any = lambda p, x: second(p, x).sum(),
        rows: int = 4,
        around: Any = lambda f: f,
        **options: Any,
    ) -> Any:
        params = sf.shard({"w": drawn(8, 8, seed=1)}, mesh, placement.with_exact(parts))
        step = sf.shard_map(
            lambda p, x: sf.accumulate(loss, x, **{"micro": "exact", **options})(p),
            mesh=mesh, in_specs=..., out_specs=...,
        )  # fmt: skip
        return around(step)(params, torch.ones(rows, 8))

    rank = dist.get_rank()
    cases: dict[str, Callable[[], Any]] = {
        "ranks": lambda: on(1),
        "rows": lambda: on(4, rows=3),
        "rows of ranks": lambda: on(4, rows=2 + 2 * rank),
        "seeds": lambda: (torch.manual_seed(rank), on(4)),
        "a sum": lambda: on(4, lambda p, x: sf.psum(second(p, x).sum(), DATA)),
        "a sum in a stage": lambda: on(4, lambda p, x: psum(p, second(p, x)).sum()),
        "a position": lambda: on(4, lambda p, x: second(p, x).sum() * sf.axis_index("shard")),
        "a size": lambda: on(4, lambda p, x: second(p, x).sum() / sf.axis_size(DATA)),
        "half a position": lambda: on(4, lambda p, x: second(p, x).sum() + sf.fold_in(1, "shard").initial_seed()),
        "usual sums": lambda: on(0),
        "usual micro-batches": lambda: on(4, lambda p, x: sf.psum(second(p, x).sum(), DATA), micro=2),
        "counts": lambda: on(4, lambda p, x: second(p, x).sum() if rank else (second(p, x).sum(), 1)),
        "numbers": lambda: on(4, lambda p, x: second(p, x).sum() + optree.tree_leaves(p)[0].sum()),
        "aux": lambda: on(4, lambda p, x: (second(p, x).sum(), "text"), has_aux=True),
    }
    more: dict[str, Callable[[], Any]] = {
        "compiled": lambda: on(4, around=second_call_of_compiled),
        "batched": lambda: on(4, around=lambda f: lambda p, x: torch.func.vmap(lambda x: f(p, x)[0])(x[None])),
        "differentiated": lambda: on(4, around=lambda f: lambda p, x: sf.grad(lambda p: f(p, x)[0])(p)),
        "a gradient": lambda: on(4, lambda p, x: second(p, x).sum() + so.global_norm(sf.grad(of_first(x))(p)).detach()),
        "a graph": lambda: on(4, lambda p, x: penalized(p, second(p, x).sum())),
        "torch's gradient": lambda: on(4, lambda p, x: second(p, x).sum() + norm_of(torch.func.grad(of_first(x))(p))),
        "outside": lambda: on(4, lambda p, x: second(p, x).sum() * torch.ones((), requires_grad=True)),
        "inside": lambda: on(4, lambda p, x: sf.accumulate(of_first(x), x, micro="exact")(p)[0]),
        "gathers": lambda: on(4, lambda p, x: few(p, x).sum()),
        "transformed": lambda: on(4, around=lambda f: lambda p, x: torch.func.grad(lambda x: f(p, x)[0])(x)),
    }
    return told((cases | more)[case])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("ranks", "with_exact(1), which fits 1 ranks, and there are 2"),
        ("rows", "must have equal parts, got 3 rows for 2 parts"),
        ("rows of ranks", "rows="),
        ("seeds", "numbers drawn from torch's state"),
        ("a sum", "psum: axis ('replica', 'shard') means nothing in an exact part"),
        ("a sum in a stage", "means nothing in an exact part"),
        ("a position", "axis_index: axis 'shard' means nothing in an exact part"),
        ("a size", "axis_size: axis ('replica', 'shard') means nothing in an exact part"),
        ("half a position", "fold_in: axis 'shard' means nothing in an exact part"),
        ("usual sums", "must be flat shards of a strategy with exact parts"),
        ("usual micro-batches", 'Write accumulate(f, batch, micro="exact")'),
        ("numbers", "reads the numbers of a shard outside of a stage"),
        ("aux", "aux must have tensors and numbers alone"),
        ("compiled", "exact sums are not supported in a compiled or captured step"),
        ("batched", "exact sums are not supported under a transform of torch.func"),
        ("differentiated", "or where something outside differentiates"),
        ("a gradient", "takes no gradients and transforms of its own"),
        ("a graph", "takes no gradients and transforms of its own"),
        ("torch's gradient", "takes no gradients and transforms of its own"),
        ("outside", "depends on a tensor that needs a gradient and is none of the parameters"),
        ("inside", "takes no gradients and transforms of its own"),
        ("gathers", "has gather_format, and parameters with with_exact"),
        ("transformed", "exact sums are not supported under a transform of torch.func"),
    ],
)
@pytest.mark.world(2, "processes")
def test_errors_are_told_on_all_ranks(world: World, case: str, message: str) -> None:
    for found in world.run(wrong, case):
        assert message in found, found


@pytest.mark.parametrize("parts", [5, -2, 9, 18])
def test_other_numbers_of_parts_are_refused(parts: int) -> None:
    with pytest.raises(ValueError, match="must be a power of two, or three times one"):
        sf.full_shard("data").with_exact(parts)


@pytest.mark.parametrize("parts", [True, 2.0, "8", None])
def test_other_types_of_parts_are_refused(parts: Any) -> None:
    with pytest.raises(TypeError, match="parts must be an integer"):
        sf.full_shard("data").with_exact(parts)


def test_quantized_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match="exact parts and a gather_format or reduce_format"):
        sf.Placement("data", reduce_format=quant.int8()).with_exact(4)
    with pytest.raises(ValueError, match="exact parts and a gather_format or reduce_format"):
        sf.Placement("data", gather_format=quant.int8()).with_exact(4)


def test_small_parameters_have_exact_parts_too() -> None:
    rule = sf.strategies.replicate_small(sf.full_shard("data").with_exact(4), below=50)
    placements = [rule("w", shape) for shape in ((7,), (70,))]
    assert [(p.exact, p.axes) for p in placements] == [(4, ()), (4, ("data",))]


# --- a run that goes on elsewhere ---


def went_on(folder: str, last: int, strategy: str, parts: int = PARTS) -> list[str]:
    """Trains from the newest checkpoint to a step, and saves; returns what was logged."""
    mesh, loss = data_mesh(dist.get_world_size()), loss_with()
    opt = so.chain(so.clip_by_global_norm(0.5), so.adamw(1e-2))
    params = sf.shard(net(), mesh, STRATEGIES[strategy].with_exact(parts))
    run = {"params": params, "state": opt.init(params), "step": 0}
    with heard() as said:
        if (path := checkpoint.latest(folder)) is not None:
            run = checkpoint.load(path, run)

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P(DATA)), out_specs=...)
    def step(params: Any, state: Any, batch: Any) -> Any:
        if not parts:
            return opt.step(params, optree.tree_map(torch.zeros_like, params), state)
        _, grads = sf.accumulate(loss, batch, micro="exact")(params)
        return opt.step(params, grads, state)

    while run["step"] < last:
        torch.manual_seed(run["step"])
        run["params"], run["state"] = step(run["params"], run["state"], rows(run["step"]))
        run["step"] += 1
    checkpoint.save(f"{folder}/{run['step']}-{dist.get_world_size()}-{parts}", run)
    return said


@pytest.mark.central
def test_a_run_that_goes_on_with_fewer_ranks_is_that_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n, last, strategy in ((4, 2, "hybrid_shard"), (2, 4, "full_shard"), (1, 6, "ddp")):
        started(n).with_deadline(120).run(went_on, str(tmp_path / "a"), last, strategy)
    started(1).with_deadline(120).run(went_on, str(tmp_path / "b"), 6, "ddp")
    started(4).with_deadline(120).run(went_on, str(tmp_path / "c"), 6, "zero1")
    found = []
    for path in ("a/6-1-8", "b/6-1-8", "c/6-4-8"):
        assert main(["checkpoint", "digest", str(tmp_path / path)]) == 0
        found.append(capsys.readouterr().out.strip())
    assert len(found[0]) == 16
    assert len(set(found)) == 1
    assert main(["checkpoint", "digest", str(tmp_path / "a/4-2-8")]) == 0
    assert capsys.readouterr().out.strip() != found[0]
    assert main(["checkpoint", "diff", str(tmp_path / "a/6-1-8"), str(tmp_path / "c/6-4-8")]) == 0


@pytest.mark.world(1, "processes")
def test_another_setting_is_said_where_a_run_goes_on(world: World, tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert world.run(went_on, folder, 1, "ddp") == [[]]
    assert world.run(went_on, folder, 2, "ddp") == [[]]
    (said,) = world.run(went_on, folder, 3, "ddp", 4)
    assert "parts was 8, and is 4" in said[0]
    (said,) = world.run(went_on, folder, 4, "ddp", 0)
    assert "it was with_exact(4), and is not exact" in said[0]
    assert world.run(went_on, folder, 5, "ddp", 0) == [[]]
