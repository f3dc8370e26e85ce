"""What a step makes the host wait for, on a pretended accelerator.

Every case is built once and called twice; what is counted is the second call. In a steady step the host waits for
nothing, but where a number must be known to go on: `WAITS` says where, and for how many.
"""

from __future__ import annotations

import functools
import importlib
import threading
import traceback
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import parallel
from shardfn.collectives import into_buffers
from shardfn.compat import attention, process_groups
from shardfn.testing import World, simulated, world
from tests.models import DATA, STRATEGIES
from tests.selected import selected_values
from tests.transforms.steps import block

RANKS, WIDTH = 8, 16
Step = Callable[[], Any]

STAGES: dict[str, dict[str, Any]] = {
    "kept activations": {},
    "remat": {"remat": True},
    "offload": {"remat": sf.offload(above=0)},
    "reshard": {"reshard": True},
    "no reshard": {"reshard": False},
}
MORE: dict[str, dict[str, Any]] = {
    "policy": {"remat": [torch.ops.aten.mm.default]},
    "no prefetch": {"prefetch": 0},
    "far prefetch": {"prefetch": 2},
    "narrow": {"gather_dtype": torch.bfloat16, "input_dtype": torch.bfloat16, "output_dtype": torch.float32},
}
HALF = lambda path, shape: len(shape) > 1  # noqa: E731
OPTIMIZERS: dict[str, Callable[[], so.Optimizer]] = {
    "sgd": lambda: so.sgd(1e-3),
    "momentum": lambda: so.sgd(1e-3, momentum=0.9),
    "adam": lambda: so.adam(1e-3),
    "adamw": lambda: so.adamw(1e-3),
    "adamw, scheduled": lambda: so.adamw(so.warmup_cosine(1e-3, warmup=1, steps=9)),
    "adamw, decay by rule": lambda: so.adamw(1e-3, weight_decay=lambda path, shape: 0.1 if len(shape) > 1 else 0.0),
    "adamw, pure": lambda: so.adamw(1e-3, donate=False),
    "lion": lambda: so.lion(1e-3),
    "adafactor": lambda: so.adafactor(1e-3),
    "lamb": lambda: so.lamb(1e-3),
    "from_torch": lambda: so.from_torch(torch.optim.AdamW, lr=1e-3),
    "from_torch, all on the device": lambda: so.from_torch(
        torch.optim.AdamW, lr=torch.full((), 1e-3, device="sim"), capturable=True
    ),
    "soap": lambda: so.soap(1e-3, every=1),
    "muon": lambda: so.masked(so.muon(1e-3), HALF, so.adamw(1e-3)),
    "muon, pure": lambda: so.masked(so.muon(1e-3, donate=False), HALF, so.adamw(1e-3)),
    "clipped": lambda: so.chain(so.clip_by_global_norm(1.0), so.adamw(1e-3)),
    "clipped, pure": lambda: so.chain(so.clip_by_global_norm(1.0, donate=False), so.adamw(1e-3)),
    "clamped": lambda: so.chain(so.clip_by_value(1.0), so.adamw(1e-3)),
    "adamw8bit": lambda: so.adamw8bit(1e-3),
    "adamw, bfloat16 state": lambda: so.adamw(1e-3, state_dtype=torch.bfloat16),
    "ema": lambda: so.ema(so.adamw(1e-3), 0.9),
    "accumulate": lambda: so.multi_steps(so.adamw(1e-3), 2),
    "shard_state": lambda: so.shard_state(so.adamw(1e-3), "replica"),
    "skip_nonfinite": lambda: so.skip_nonfinite(so.adamw(1e-3)),
    "dynamic_loss_scale": lambda: so.dynamic_loss_scale(so.adamw(1e-3)),
}

WAITS: dict[str, int] = {
    # whether to skip is decided on the host, for all parameters at once
    "optimizer, skip_nonfinite": 1,
    "optimizer, dynamic_loss_scale": 1,
    "norms as numbers": 1,
    "a loss that is printed": 1,
    "staging": 1,
    # torch compares a rate that is a tensor with 0, where each step makes an optimizer
    "optimizer, from_torch, all on the device": 1,
    # whether a basis follows its factor, or begins anew: for both factors of the one matrix that this rank works on
    "optimizer, soap": 1,
    # of the program's own
    "a gradient in the middle": 1,
    # how many tokens travel where: one table of counts
    "mixture, dropless": 1,
    "mixture, refusing": 1,
}


# --- the programs ---


def layer() -> dict[str, Tensor]:
    made = {"up": torch.randn(WIDTH, 2 * WIDTH), "b": torch.randn(2 * WIDTH), "down": torch.randn(2 * WIDTH, WIDTH)}
    return {name: x.to("sim") for name, x in made.items()}


def losing(staged: Any) -> Any:
    def loss(params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params["blocks"]):
            x = staged(p, x)
        return x.square().sum()

    return loss


def drawn(*shape: int, **options: Any) -> Tensor:
    return torch.randn(shape, device="sim", **options)


def mapped(mesh: Any, f: Callable[..., Any], *args: Any) -> Step:
    run = sf.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)
    return lambda: run(*args)


@functools.cache
def sharded(mesh: Any, strategy: Any, layers: int = 2) -> Any:
    return sf.shard({"blocks": [layer() for _ in range(layers)]}, mesh, strategy)


def training(mesh: Any, strategy: Any, **options: Any) -> Step:
    vg = sf.value_and_grad(losing(sf.stage(block, **options)))
    return mapped(mesh, vg, sharded(mesh, strategy), drawn(8, WIDTH))


def stopping_early(mesh: Any) -> Step:
    """A gradient of a value in the middle; activations of the layers before it come back, and nobody takes them."""
    shards, x = sharded(mesh, STRATEGIES["full_shard"], layers=4), drawn(64, WIDTH)
    stage = sf.stage(block, remat=sf.offload(above=0))

    def step() -> None:
        values = [x.clone().requires_grad_()]
        for p in shards["blocks"]:
            values.append(stage(p, values[-1]))
        torch.get_device_module("sim").synchronize()  # they have left
        torch.autograd.grad(values[-1].square().sum(), values[2])
        values.clear()
        for _ in range(40):
            drawn(64, WIDTH).square()

    return step


def psum_in_a_stage(mesh: Any, **options: Any) -> Step:
    def crossed(p: Any, x: Tensor) -> Tensor:
        h = torch.tanh(sf.pvary(x, "shard") @ p["up"] + sf.pvary(p["b"], "shard"))
        return x + sf.psum(h @ p["down"], "shard")

    vg = sf.value_and_grad(losing(sf.stage(crossed, **options)))
    return mapped(mesh, vg, sharded(mesh, sf.full_shard("replica")), drawn(8, WIDTH))


def dropping(mesh: Any, remat: bool) -> Step:
    def dropped(p: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(block(p, x), 0.1)

    vg = sf.value_and_grad(losing(sf.stage(dropped, remat=remat)))
    return mapped(mesh, vg, sharded(mesh, STRATEGIES["full_shard"]), drawn(8, WIDTH))


def tied(mesh: Any) -> Step:
    staged = sf.stage(block)

    def loss(params: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            x = staged(params["blocks"][0], x)
        return x.square().sum()

    return mapped(mesh, sf.value_and_grad(loss), sharded(mesh, STRATEGIES["full_shard"]), drawn(8, WIDTH))


def backward_by_the_user(mesh: Any) -> Step:
    params, x = optree.tree_map(torch.clone, sharded(mesh, STRATEGIES["full_shard"])), drawn(8, WIDTH)
    loss = losing(sf.stage(block))
    leaves = [p.values.requires_grad_() for p in params["blocks"]]

    def step() -> None:
        loss(params, x).backward()
        for leaf in leaves:
            leaf.grad = None

    return mapped(mesh, step)


def transformed(mesh: Any, how: str) -> Step:
    params, x = sharded(mesh, sf.full_shard("shard"), 1), drawn(8, WIDTH)
    loss = losing(sf.stage(block))

    def hvp(params: Any, x: Tensor) -> Any:
        return torch.func.jvp(lambda q: sf.grad(loss)(q, x), (params,), (params,))[1]

    def reverse(params: Any, x: Tensor) -> Any:
        return sf.grad(lambda q: sum(g.values.sum() for g in sf.grad(loss)(q, x)["blocks"]))(params)

    ways = {"hvp": hvp, "reverse over reverse": reverse, "func.grad": torch.func.grad(loss)}
    return mapped(mesh, ways[how], params, x)


def accumulating(mesh: Any, defer: Any) -> Step:
    loss, x = losing(sf.stage(block)), drawn(8, WIDTH)
    run = lambda params: sf.accumulate(loss, [x[:4], x[4:]], defer=defer)(params)  # noqa: E731
    return mapped(mesh, run, sharded(mesh, STRATEGIES["hybrid_shard"]))


def optimizing(mesh: Any, name: str, strategy: str = "hybrid_shard") -> Step:
    params = sharded(mesh, STRATEGIES[strategy])
    if name == "shard_state":
        params = sharded(mesh, STRATEGIES["hybrid_shard"])
    opt, vg = OPTIMIZERS[name](), sf.value_and_grad(losing(sf.stage(block)))
    now = SimpleNamespace(params=params, state=opt.init(params))
    run = sf.shard_map(vg, mesh=mesh, in_specs=..., out_specs=...)
    x = drawn(8, WIDTH)

    def step() -> None:
        _, grads = run(now.params, x)
        now.params, now.state = opt.step(now.params, grads, now.state)

    return step


def attending(mesh: Any, way: str, fused: bool = False, **options: Any) -> Step:
    heads = RANKS if way == "ulysses" else 4
    q, k, v = (drawn(2, heads, 8, 16, dtype=torch.bfloat16 if fused else torch.float32) for _ in range(3))
    ways: dict[str, Any] = {
        "ring": (partial(parallel.ring_attention, balanced=True), ["shard"]),
        "ulysses": (parallel.ulysses_attention, ["shard"]),
        "alone": (parallel.attention, []),
    }
    f, axis = ways[way]
    step = mapped(mesh, sf.grad(lambda *xs: f(*xs, *axis, **options).float().sum(), (0, 1, 2)), q, k, v)
    if not fused:
        return step

    def with_kernel() -> Any:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(attention, "_kernel", lambda *_: attention.FLASH)
            return step()

    return with_kernel


def attending_twice(mesh: Any) -> Step:
    """A Hessian times a vector, of attention in a ring; and the places that a rank has."""
    q = drawn(2, 4, 8, 16)

    def loss(q: Tensor) -> Tensor:
        own = parallel.positions(32, "shard", balanced=True, device=q.device)
        return (parallel.ring_attention(q, q, q, "shard", balanced=True) * own[:, None]).sum()

    return mapped(mesh, lambda q: torch.func.jvp(sf.grad(loss), (q,), (q,))[1], q)


def mixing(mesh: Any, **options: Any) -> Step:
    experts = 4
    x, gate, e = drawn(1, experts, WIDTH), drawn(WIDTH, experts), drawn(experts // 4, WIDTH, WIDTH)

    def loss(e: Tensor, gate: Tensor) -> Tensor:
        routing = parallel.route(x, gate, 1)
        out = parallel.mixture_of_experts(lambda p, x: x @ p, e, x, routing, "shard", **options)
        return out.sum() + parallel.balance_loss(routing, DATA) + parallel.router_loss(routing, DATA)

    step = mapped(mesh, sf.grad(loss, (0, 1)), e, gate)
    return step if options.get("overflow") != "error" else lambda: refused(step)


def refused(step: Step) -> None:
    with pytest.raises(ValueError, match="1 choices of tokens are beyond the capacity"):  # what is read is always 1
        step()


def language(mesh: Any) -> Step:
    """A vocabulary that is cut: embedding, a norm of cut vectors, cross-entropy."""
    tokens = torch.randint(0, 32, (2, 8), device="sim")
    table, weight, out = drawn(8, WIDTH), drawn(WIDTH // 4), drawn(WIDTH, 8)

    def loss(table: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        x = parallel.embedding(tokens, table, "shard")
        x = parallel.to_parallel(x, "shard")
        x = sf.all_gather(parallel.rms_norm(x[..., : WIDTH // 4], weight, "shard"), "shard", dim=2, to="invariant")
        return parallel.cross_entropy(x, out, tokens, "shard", chunk=4).sum()

    return mapped(mesh, sf.grad(loss, (0, 1, 2)), table, weight, out)


def counted(mesh: Any) -> Step:
    """A loss divided by a number of the host's."""
    return mapped(mesh, lambda x: sf.psum(x.sum(), DATA) / sf.psum(128, DATA), drawn(4))


def norms_as_numbers(mesh: Any) -> Step:
    params = sharded(mesh, STRATEGIES["hybrid_shard"])
    return lambda: so.norms(params)


def one_norm(mesh: Any) -> Step:
    params = sharded(mesh, STRATEGIES["hybrid_shard"])
    return lambda: so.global_norm(params)


def printed(mesh: Any) -> Step:
    step = training(mesh, STRATEGIES["full_shard"])
    return lambda: step()[0].item()


def unsharded(mesh: Any) -> Step:
    params = sharded(mesh, STRATEGIES["hybrid_shard"])
    return lambda: sf.unshard(params)


def staging(mesh: Any) -> Step:
    """What a save in the background copies before it returns."""
    contents: Any = importlib.import_module("shardfn.checkpoint.contents")
    writing: Any = importlib.import_module("shardfn.checkpoint.writing")
    params = sharded(mesh, STRATEGIES["hybrid_shard"])
    state = {"params": params, "optimizer": so.adamw(1e-3).init(params), "scale": drawn(3)}
    return lambda: writing.snapshot_of([one.values for one in contents.contents(state, shared=True).boxes])


def cases() -> dict[str, Callable[[Any], Step]]:
    found: dict[str, Callable[[Any], Step]] = {}
    for name, strategy in STRATEGIES.items():
        for kind, options in (STAGES | (MORE if name in ("full_shard", "hybrid_shard") else {})).items():
            found[f"{name}, {kind}"] = partial(training, strategy=strategy, **options)
    for kind in ("kept activations", "remat", "offload"):
        found[f"psum in a stage, {kind}"] = partial(psum_in_a_stage, **STAGES[kind])
    for remat in (False, True):
        found[f"dropout, remat={remat}"] = partial(dropping, remat=remat)
    for how in ("hvp", "reverse over reverse", "func.grad"):
        found[how] = partial(transformed, how=how)
    for defer in ("nothing", "replicas", "all"):
        found[f"accumulate, {defer}"] = partial(accumulating, defer=defer)
    for name in OPTIMIZERS:
        found[f"optimizer, {name}"] = partial(optimizing, name=name)
    for name in ("zero1", "hfsdp"):
        found[f"optimizer on {name}"] = partial(optimizing, name="clipped", strategy=name)
    for way in ("ring", "ulysses", "alone"):
        for fused in (False, True):
            found[f"attention, {way}, fused={fused}"] = partial(attending, way=way, fused=fused)
    found["attention, ring, in order"] = partial(attending, way="ring", balanced=False)
    found["attention, ring, not causal"] = partial(attending, way="ring", mask=parallel.Mask(causal=False))
    found["attention, ring, hvp"] = attending_twice
    found["mixture, capacity"] = partial(mixing, capacity=8)
    found["mixture, refusing"] = partial(mixing, capacity=8, overflow="error")
    found["mixture, dropless"] = mixing
    plain = {"a parameter used twice": tied, "backward by the user": backward_by_the_user, "vocabulary": language}
    plain |= {"a sum of a number": counted, "norms as numbers": norms_as_numbers, "a global norm": one_norm}
    plain |= {"a gradient in the middle": stopping_early}
    plain |= {"a loss that is printed": printed, "unshard": unsharded, "staging": staging}
    return found | plain


# --- running them ---


def observed(names: list[str], backend: str) -> dict[str, Any]:
    """Of each case: what its third call waited for, its races, and how it failed."""
    found: dict[str, Any] = {}
    with simulated(RANKS, backend=backend) as device:
        mesh = sf.make_mesh(replica=2, shard=4, device=device.name)
        for name in names:
            try:
                step = cases()[name](mesh)
                for _ in range(2):
                    device.reset_counts()
                    step()
                found[name] = device.synchronizations, device.races, None
            except Exception:
                found[name] = [], [], traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def steady(request: pytest.FixtureRequest) -> dict[str, Any]:
    names = [name for name in selected_values(request, "name") if name in cases()]
    return world(1, "alone").with_deadline(240).run(observed, names, "simulated")[0]


@pytest.mark.parametrize("name", cases())
def test_a_steady_step_waits_only_where_a_number_must_be_known(steady: dict[str, Any], name: str) -> None:
    waits, races, failure = steady[name]
    assert failure is None, failure
    assert races == []
    assert sum(one.times for one in waits) == WAITS.get(name, 0), waits


FEW = ["full_shard, kept activations", "hybrid_shard, remat", "zero1, kept activations", "accumulate, everything"]


@pytest.mark.parametrize("backend", ["fake", "cpu:fake,sim:fake", "cpu:simulated,sim:fake"])
def test_process_groups_may_be_told_by_device(backend: str) -> None:
    for waits, races, failure in world(1, "alone").run(observed, FEW, backend)[0].values():
        assert (waits, races, failure) == ([], [], None)


# --- the device itself ---

KINDS: list[tuple[str, Callable[[Tensor], Any], list[tuple[str, int]]]] = [
    ("a number", lambda x: x.sum().item(), [("item", 1)]),
    ("a decision", lambda x: bool((x > 1).any()), [("item", 1)]),
    ("a list", lambda x: x.tolist(), [("copy sim->cpu", 1)]),
    ("to the host", lambda x: x.cpu(), [("copy sim->cpu", 1)]),
    ("to pageable memory", lambda x: torch.empty(4).copy_(x, non_blocking=True), [("copy sim->cpu", 1)]),
    ("to pinned memory", lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True), []),
    ("to memory that is pinned then", lambda x: torch.ones(4).pin_memory().copy_(x, non_blocking=True), []),
    ("to the host, later", lambda x: x.to("cpu", non_blocking=True), []),
    ("from the host", lambda x: torch.ones(4).to(x.device), [("copy cpu->sim", 1)]),
    ("from the host into", lambda x: x.copy_(torch.ones(4)), [("copy cpu->sim", 1)]),
    ("from the host, later", lambda x: torch.ones(4).to(x.device, non_blocking=True), [("copy cpu->sim", 1)]),
    ("from pinned memory, later", lambda x: torch.ones(4).pin_memory().to(x.device, non_blocking=True), []),
    ("a constant", lambda x: torch.tensor([1.0, 2.0], device="sim"), [("copy cpu->sim", 1)]),
    ("a constant that is filled in", lambda x: torch.full((2,), 1.0, device="sim"), []),
    ("comparing", lambda x: torch.equal(x, x), [("equal", 1)]),
    ("places", lambda x: x.nonzero(), [("nonzero", 1)]),
    ("a mask", lambda x: x[x > 1], [("mask as index", 1)]),
    ("a mask, written", lambda x: x.index_put_((x > 1,), x), [("mask as index", 1)]),
    ("a mask, filled", lambda x: x.masked_fill(x > 1, 0.0), []),
    ("indices of the host", lambda x: x[torch.tensor([0, 1])], [("copy cpu->sim", 1)]),
    ("counting", lambda x: torch.bincount(x.long(), minlength=4), [("bincount", 1)]),
    ("repeating", lambda x: x.repeat_interleave(x.long()), [("repeat_interleave", 1)]),
    ("repeating evenly", lambda x: x.repeat_interleave(2), []),
    ("a number of the host", lambda x: x * torch.tensor(2.0), []),
    ("a stream", lambda x: torch.get_device_module("sim").current_stream().synchronize(), [("synchronize", 1)]),
    ("lending to a stream", lambda x: x.record_stream(torch.get_device_module("sim").Stream()), []),
    ("a collective on the host", lambda x: torch.distributed.all_reduce(torch.ones(2)), [("cpu collective", 1)]),
    ("a collective", lambda x: torch.distributed.all_reduce(x), []),
]


def counted_kinds() -> list[Any]:
    found = []
    with simulated(2) as device:
        for _, f, _ in KINDS:
            x = torch.ones(4, device=device.name)
            device.reset_counts()
            f(x)
            found.append(device.synchronizations)
    return found


def test_what_the_host_waits_for_is_told_with_its_line() -> None:
    for (name, _, wanted), found in zip(KINDS, world(1, "alone").run(counted_kinds)[0], strict=True):
        assert [(one.kind, one.times) for one in found] == wanted, name
        assert all(one.where.startswith("test_simulated.py:") for one in found), (name, found)


def behavior() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with simulated(2, 1) as device:
        found["rank"] = torch.distributed.get_rank(), torch.distributed.get_world_size()
        x = torch.ones(4, device=device.name, requires_grad=True)
        ran: list[int] = []
        y = (x * 2).sum()
        y.register_hook(lambda _: ran.append(threading.get_ident()))
        y.backward()
        found["another thread"] = ran != [threading.get_ident()]
        arrived = torch.empty(4, pin_memory=True).copy_(x.detach(), non_blocking=True)
        _ = arrived + 1
        found["races"] = [race.split(" at ")[0] for race in device.races]
        device.reset_counts()
        arrived = torch.empty(4, pin_memory=True).copy_(x.detach(), non_blocking=True)
        back = arrived.to(device.name, non_blocking=True)
        torch.get_device_module(device.name).synchronize()
        found["sum"], found["no races"] = (arrived + 1).tolist(), device.races
        with pytest.raises(NotImplementedError, match=r"_unique2.* at test_simulated.py:\d+: .*depends on numbers"):
            torch.unique(back)
        with pytest.raises(RuntimeError, match=r"there is one already: backend .*, rank 1 of 2"), simulated():
            pass
    found["after"] = torch.distributed.is_initialized(), torch.accelerator.is_available()
    with simulated(backend="fake"):
        found["again"] = torch.distributed.get_world_size()
    return found


def test_a_pretended_device_behaves_like_one() -> None:
    assert world(1, "alone").run(behavior)[0] == {
        "rank": (1, 2),
        "another thread": True,
        "races": ["aten::add.Tensor"],
        "sum": [2, 2, 2, 2],
        "no races": [],
        "after": (False, False),
        "again": 1,
    }


def generators() -> list[dict[str, int]]:
    found = []
    makers = {"a": lambda g: {"w": torch.randn(4, 4, generator=g), "b": torch.rand(4), "c": torch.rand(4).to("sim")}}
    with simulated(RANKS) as device:
        mesh = sf.make_mesh(shard=RANKS, device=device.name)
        for make in (
            lambda: sf.init(makers, 0),
            lambda: sf.init({"a": lambda g: torch.rand(4, device="sim")}, 0),
            lambda: sf.init_sharded(makers, 0, mesh, sf.full_shard("shard")),
        ):
            device.reset_counts()
            make()
            found.append(dict(device.generators))
    return found


def test_initialisation_touches_no_generator_of_the_device() -> None:
    assert world(1, "alone").run(generators)[0] == [{}, {}, {}]


def copies_of_gradients() -> list[tuple[int, int, int]]:
    """Of each call that copies gradients: the numbers of tensors and of dtypes, and how many differ in strides."""
    found = []
    copy = torch._foreach_copy_

    def copied(into: list[Tensor], those: list[Tensor]) -> None:
        kinds = {(a.dtype, b.dtype) for a, b in zip(into, those, strict=True)}
        found.append((len(into), len(kinds), sum(a.stride() != b.stride() for a, b in zip(into, those, strict=True))))
        copy(into, those)

    with simulated(RANKS) as device, pytest.MonkeyPatch.context() as monkeypatch:
        mesh = sf.make_mesh(replica=2, shard=4, device=device.name)
        params, x = sharded(mesh, STRATEGIES["full_shard"], 1), drawn(8, WIDTH)
        params["blocks"] = params["blocks"][:1]

        def turned(p: Any, x: Tensor) -> Tensor:
            return x + torch.tanh(x @ p["up"] + p["b"]) @ p["down"].mT.contiguous().mT

        narrow = {"gather_dtype": torch.bfloat16, "input_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        each: list[dict[str, Any]] = [{}, narrow]
        for options in each:
            step = mapped(mesh, sf.grad(losing(sf.stage(turned, **options))), params, x)
            step()
            monkeypatch.setattr(torch, "_foreach_copy_", copied)
            step()
            monkeypatch.undo()
    return found


def test_gradients_are_copied_by_lists_of_one_dtype_and_order() -> None:
    narrow = [(2, 1, 0), (1, 1, 1), (1, 1, 0)]  # alike, of another order, and the marks, of another dtype
    assert world(1, "alone").run(copies_of_gradients)[0] == [(3, 1, 0), (1, 1, 1), *narrow]


def unordered() -> dict[str, list[str]]:
    """Of each case, the operations that add in the order in which threads of a GPU happen to come."""
    cases: dict[str, Any] = {"capacity": {"capacity": 8}, "dropless": {}}
    found = {}
    with simulated(RANKS) as device:
        mesh = sf.make_mesh(replica=2, shard=4, device=device.name)
        steps = {name: mixing(mesh, **options) for name, options in cases.items()} | {"vocabulary": language(mesh)}
        for name, step in steps.items():
            step()
            device.reset_counts()
            step()
            kinds = ("scatter_add", "index_add", "scatter_reduce", "index_reduce")
            found[name] = [op for op in device.operations if any(kind in op for kind in kinds)]
    return found


def test_experts_and_vocabularies_add_in_an_order_of_their_own() -> None:
    assert world(1, "alone").run(unordered)[0] == {"capacity": [], "dropless": [], "vocabulary": []}


def test_processes_may_be_alone() -> None:
    assert world(1, "alone").run(torch.distributed.is_initialized) == [False]
    assert world(1, "alone").run(sf.make_mesh, data=1, device="cpu")[0].ndim == 1
    assert world(1, "alone").run(torch.distributed.is_initialized) == [False]  # whatever the call before has left


def launched(make: Callable[[], so.Optimizer], parameters: int) -> int:
    """Operations of a steady step on the device."""
    with simulated(2) as device:
        mesh = sf.make_mesh(shard=2, device=device.name)
        params = sf.shard([{f"w{i}": torch.ones(8) for i in range(parameters)}], mesh, sf.full_shard("shard"))
        optimizer = make()
        state, grads = optimizer.init(params), optree.tree_map(torch.ones_like, params)
        for _ in range(2):
            device.reset_counts()
            params, state = optimizer.step(params, grads, state)
        return sum(device.operations.values())


def test_lamb_launches_as_much_for_many_parameters_as_for_few() -> None:
    def make() -> so.Optimizer:
        return so.lamb(1e-3, weight_decay=lambda path, shape: 0.1 * path.endswith("1"))

    few, many = (world(1, "alone").run(launched, make, n)[0] for n in (12, 24))
    assert few == many


def on_gloo() -> list[Any]:
    """How stages communicate if gloo moves a device's tensors, and what is refused then."""
    with simulated(4) as device, pytest.MonkeyPatch.context() as patch:
        mesh = sf.make_mesh(shard=4, device=device.name)
        patch.setattr(process_groups, "backend_of", lambda group, device: "gloo")
        found: list[Any] = [into_buffers.communicator_of(mesh, ("shard",)).chosen]
        with pytest.raises(ValueError, match=r'gloo with tensors on sim.* Pass all_gather="native"'):
            sf.collectives.transports(mesh, all_gather="direct").__enter__()
        run = sf.shard_map(in_specs=..., out_specs=..., mesh=mesh)(
            lambda x: parallel.pipeline(lambda w, x, b: x, x, [x], "shard")
        )
        with pytest.raises(RuntimeError, match="gloo sends no tensors on sim from rank to rank: use NCCL"):
            run(torch.ones(2, device=device.name))
        return found


def test_gloo_is_given_no_memory_of_a_device_to_send() -> None:
    native = {"all_gather": "native", "reduce_scatter": "native", "all_reduce": "native"}
    assert world(1, "alone").run(on_gloo)[0] == [native]


MISUSES: dict[str, tuple[dict[str, Any], str]] = {
    "no such rank": ({"ranks": 2, "rank": 2}, "ranks are numbered from 0"),
    "no rank": ({"ranks": 0}, "ranks are numbered from 0"),
    "no device": ({"count": 0}, "1 device or more"),
    "a path for a store": ({"store": "a path"}, "got str. All ranks pass"),
    "an unknown backend": ({"backend": "nobody's"}, "nobody's"),
}


def misused() -> dict[str, str]:
    told = {}
    for name, (options, _) in MISUSES.items():
        try:
            with simulated(**options):
                told[name] = "nothing"
        except Exception as error:
            told[name] = str(error)
        with simulated(values=True) as device:  # the process can go on
            assert torch.full((2,), 3.0, device=device.name).sum().item() == 6
    return told


@pytest.mark.world(1, "alone")
def test_a_wrong_argument_is_told_and_the_next_simulation_runs(world: World) -> None:
    (told,) = world.run(misused)
    assert {name for name, (_, part) in MISUSES.items() if part not in told[name]} == set()
