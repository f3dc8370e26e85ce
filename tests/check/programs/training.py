"""Sharded parameters: each strategy, and the options of stages and optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import P, quant
from tests.check.programs.setting import (
    DATA,
    PROGRAMS,
    ROWS,
    D,
    Made,
    On,
    Right,
    language,
    layers,
    model,
    plainly,
    right,
    tokens_of,
)
from tests.lossless import LOSSLESS
from tests.models import STRATEGIES, drawn

EACH = STRATEGIES | {"zero2": sf.zero2(DATA)}


def _training(
    on: On,
    strategy: Any,
    optimizer: Callable[[], Any],
    loss: Callable[..., Tensor] = language,
    data: Any = DATA,
    steps: int = 3,
) -> Made:
    """Some steps of training on shards, and on one process."""
    whole, tokens = layers(30), tokens_of(30)
    opt = so.chain(so.clip_by_global_norm(0.5), optimizer())

    def step(params: Any, state: Any, tokens: Tensor, data: Any = ()) -> Any:
        value, grads = sf.value_and_grad(loss)(params, tokens, data)
        norm = so.global_norm(grads)
        params, state = opt.step(params, grads, state)
        return params, state, value, norm

    def trained(step: Any, params: Any, tokens: Tensor) -> Any:
        state, told = opt.init(params), list[Tensor]()
        for _ in range(steps):
            params, state, *now = step(params, state, tokens)
            told += map(torch.clone, now)
        return params, told

    def run() -> Any:
        params, told = trained(mapped, sf.shard(whole, on.mesh, strategy), on.cut(tokens, data))
        return sf.unshard(params), told

    mapped = on(lambda p, s, t: step(p, s, t, data), (..., ..., P(data)), (..., ..., P(), P()))
    return run, trained(step, optree.tree_map(torch.clone, whole), tokens)


def _adamw() -> Any:
    return so.adamw(1e-2, weight_decay=0.1)


for _name, _strategy in EACH.items():
    PROGRAMS[f"training_by_{_name}"] = Right(
        functools.partial(_training, strategy=_strategy, optimizer=_adamw), {"replica": 2, "shard": 2}, "processes"
    )


@right("processes", shard=2)
def training_with_an_average_and_a_schedule(on: On) -> Made:
    def optimizer() -> Any:
        return so.ema(so.adamw(so.warmup_cosine(1e-2, warmup=2, steps=5)), 0.9)

    return _training(on, sf.full_shard("shard"), optimizer, data="shard")


@right("processes", shard=2)
def training_by_muon(on: On) -> Made:
    def optimizer() -> Any:
        return so.masked(so.muon(1e-2), lambda path, shape: len(shape) == 2, so.adamw(1e-2))

    return _training(on, sf.full_shard("shard"), optimizer, data="shard")


@right("processes", shard=2)
def training_with_steps_that_are_skipped(on: On) -> Made:
    return _training(on, sf.full_shard("shard"), lambda: so.skip_nonfinite(so.sgd(0.1)), data="shard")


@right("processes", shard=2)
def training_with_remat(on: On) -> Made:
    loss = functools.partial(language, remat=True)
    return _training(on, sf.full_shard("shard"), _adamw, loss, data="shard")


@right("processes", shard=2)
def training_with_activations_on_the_host(on: On) -> Made:
    loss = functools.partial(language, remat=sf.offload(to="host"))
    return _training(on, sf.full_shard("shard"), _adamw, loss, data="shard")


@right("processes", shard=2)
def training_with_state_on_the_host(on: On) -> Made:
    strategy = sf.full_shard("shard").with_tiers(params="host", grads="host", state="host")
    return _training(on, strategy, _adamw, data="shard")


@right("processes", shard=2)
def training_with_lossless_wires(on: On) -> Made:
    """Parameters and gradients as bytes, in a format that loses nothing."""
    loss = functools.partial(language, gather_format=LOSSLESS, reduce_format=LOSSLESS)
    return _training(on, sf.full_shard("shard"), _adamw, loss, data="shard")


@right("processes", shard=2)
def training_with_small_parameters_whole(on: On) -> Made:
    return _training(on, sf.strategies.replicate_small(sf.full_shard("shard"), below=10), _adamw, data="shard")


@right("processes", shard=2)
def training_with_steps_that_add_up(on: On) -> Made:
    return _training(on, sf.full_shard("shard"), lambda: so.multi_steps(so.adamw(1e-2), 2), data="shard", steps=4)


@right("processes", shard=2)
def training_with_micro_batches(on: On) -> Made:
    whole, tokens = layers(31), tokens_of(31)
    flat = sf.shard(whole, on.mesh, sf.full_shard("shard"))

    def part(params: Any, tokens: Tensor, data: Any = ()) -> Tensor:
        logits = model(params, tokens[:, :-1]).flatten(0, 1)
        total = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
        return sf.psum(total, data) / (ROWS * 4)

    def step(params: Any, tokens: Tensor) -> Any:
        return sf.accumulate(functools.partial(part, data="shard"), tokens.chunk(2))(params)

    mapped = on(step, (..., P("shard")), (P(), ...))

    def run() -> Any:
        value, gradient = mapped(flat, on.cut(tokens, "shard"))
        return value, sf.unshard(gradient)

    return run, plainly(part, whole, tokens)


@right("processes", shard=2)
def micro_batches_with_as_many_elements_as_all_ranks_have_rows(on: On) -> Made:
    """The divisor, the number of all rows, is also the number of elements of a micro-batch's output."""
    draw = drawn(33)
    rows, whole = draw(16, 4), {"w": draw(4, 4)}
    flat = sf.shard({"layer": whole}, on.mesh, sf.full_shard("shard"))
    multiplied = sf.stage(_multiplied)

    def step(params: Any, rows: Tensor) -> Any:
        return sf.accumulate(lambda p, x: multiplied(p["layer"], x).square().sum() / 16, rows.chunk(2))(params)[1]

    mapped = on(step, (..., P("shard")), ...)

    def run() -> Any:
        return sf.unshard(mapped(flat, on.cut(rows, "shard")))["layer"]

    return run, torch.func.grad(lambda p: _multiplied(p, rows).square().sum() / 16)(whole)


def _multiplied(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


@right(shard=2)
def gradients_by_backward_through_stages(on: On) -> Made:
    whole, tokens = layers(32), tokens_of(32)
    flat = sf.shard(whole, on.mesh, sf.full_shard("shard"))

    def step(params: Any, tokens: Tensor) -> Any:
        leaves = optree.tree_map(lambda x: x.clone().requires_grad_(), params)
        loss = language(leaves, tokens, "shard")
        loss.backward()
        return loss.detach(), optree.tree_map(lambda x: x.grad, leaves)

    mapped = on(step, (..., P("shard")), (P(), ...))

    def run() -> Any:
        value, gradient = mapped(flat, on.cut(tokens, "shard"))
        return value, sf.unshard(gradient)

    return run, plainly(language, whole, tokens)


@right("processes", shard=2)
def an_update_by_hand_and_a_norm(on: On) -> Made:
    whole, tokens = layers(33), tokens_of(33)
    flat = sf.shard(whole, on.mesh, sf.full_shard("shard"))

    def step(params: Any, tokens: Tensor, data: Any = ()) -> Any:
        gradient = sf.grad(language)(params, tokens, data)
        new = optree.tree_map(lambda p, g: p - 0.1 * g, params, gradient)
        return new, so.global_norm(gradient), so.vdot(gradient, params)

    mapped = on(lambda p, t: step(p, t, "shard"), (..., P("shard")), (..., P(), P()))

    def run() -> Any:
        new, *told = mapped(flat, on.cut(tokens, "shard"))
        return sf.unshard(new), *told

    return run, step(whole, tokens)


@right(shard=2)
def evaluation_without_gradients(on: On) -> Made:
    whole, tokens = layers(34), tokens_of(34)
    flat = sf.shard(whole, on.mesh, sf.full_shard("shard"))

    def evaluate(params: Any, tokens: Tensor, data: Any = ()) -> Any:
        logits = model(params, tokens[:, :-1])
        hits = (logits.argmax(-1) == tokens[:, 1:]).sum()
        return language(params, tokens, data), sf.psum(hits, data) / sf.psum(tokens[:, 1:].numel(), data)

    mapped = on(lambda p, t: evaluate(p, t, "shard"), (..., P("shard")), P())

    def run() -> Any:
        with torch.no_grad():
            first = mapped(flat, on.cut(tokens, "shard"))
        with torch.inference_mode():
            second = [x.clone() for x in mapped(flat, on.cut(tokens, "shard"))]
        return list(first), [x + 0 for x in second]

    return run, (list(evaluate(whole, tokens)),) * 2


@right(shard=2)
def frozen_parameters_and_adapters(on: On) -> Made:
    """LoRA by hand: a frozen base in one tree, and adapters, the same on all ranks, in another."""
    draw = drawn(35)
    base, x = {"w": draw(D, D)}, draw(ROWS, D)
    adapters = {"a": draw(D, 2), "b": draw(2, D)}
    layer = sf.stage(lambda base, p, x: torch.tanh(x @ base["w"] + (x @ p["a"]) @ p["b"]))

    def loss(adapters: Any, base: Any, x: Tensor, data: Any = ()) -> Tensor:
        return sf.psum(layer(base, adapters, x).square().sum(), data) / ROWS

    frozen = sf.shard(base, on.mesh, sf.full_shard("shard"), stages=[""], frozen=[".*"])
    small = sf.shard(adapters, on.mesh, sf.ddp("shard"), stages=[""])
    step = on(lambda a, b, x: sf.value_and_grad(loss)(a, b, x, "shard"), (..., ..., P("shard")), (P(), ...))

    def run() -> Any:
        value, gradient = step(small, frozen, on.cut(x, "shard"))
        return value, sf.unshard(gradient)

    return run, plainly(loss, adapters, base, x)


@right(shard=2)
def a_base_in_few_bits(on: On) -> Made:
    """Trained matrices beside a base that is kept, and travels, in four bits."""
    draw = drawn(36)
    tree = {"block": {"w": draw(16, 16), "a": draw(16, 2), "b": draw(2, 16)}}
    few = quant.quantize(tree, quant.nf4(), names=r"block\.w")
    x = draw(ROWS, 16)
    layer = sf.stage(lambda p, x: torch.tanh(x @ p["w"] + (x @ p["a"]) @ p["b"]))

    def loss(p: Any, x: Tensor, data: Any = ()) -> Tensor:
        return sf.psum(layer(p["block"], x).square().sum(), data) / ROWS

    params = sf.shard(few, on.mesh, sf.full_shard("shard"))
    step = on(lambda p, x: sf.value_and_grad(loss)(p, x, "shard"), (..., P("shard")), (P(), ...))

    def run() -> Any:
        value, gradient = step(params, on.cut(x, "shard"))
        found = sf.unshard(gradient)["block"]
        return value, {name: found[name] for name in ("a", "b")}

    decoded = quant.dequantize(few)["block"]
    value, gradient = plainly(lambda p: loss({"block": decoded | p}, x), {n: decoded[n] for n in ("a", "b")})
    return run, (value, gradient)


@right(shard=2)
def stages_that_only_some_ranks_run(on: On) -> Made:
    """An expert for rows of one kind, which one of the ranks has none of."""
    draw = drawn(37)
    whole, x = {"expert": {"w": draw(D, D)}}, draw(ROWS, D)
    x[: ROWS // 2, 0], x[ROWS // 2 :, 0] = -1, 1
    expert = sf.stage(lambda p, x: torch.tanh(x @ p["w"]), output_dtype=torch.float64)

    def loss(p: Any, x: Tensor, data: Any = ()) -> Tensor:
        wanted = x[:, 0] > 0
        y = expert(p["expert"], x[wanted]) if wanted.any() else sf.skip(expert, p["expert"], x[wanted])
        return sf.psum(y.square().sum(), data) / ROWS

    flat = sf.shard(whole, on.mesh, sf.full_shard("shard"))
    step = on(lambda p, x: sf.value_and_grad(loss)(p, x, "shard"), (..., P("shard")), (P(), ...))

    def run() -> Any:
        value, gradient = step(flat, on.cut(x, "shard"))
        return value, sf.unshard(gradient)

    return run, plainly(loss, whole, x)


@right(shard=2)
def mixed_precision_with_a_master_copy(on: On) -> Made:
    """Parameters gathered in bfloat16, sums in float32; the numbers are such that nothing is rounded."""
    w = torch.arange(12, dtype=torch.float32).view(D, 3) - 5
    x = torch.arange(ROWS * D).view(ROWS, D) % 5 - 2
    layer = sf.stage(lambda p, x: x @ p["w"], gather_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def loss(p: Any, x: Tensor, data: Any = ()) -> Tensor:
        return sf.psum(layer(p, x.to(torch.bfloat16)).float().sum(), data)

    optimizer = so.sgd(0.5)
    flat = functools.partial(sf.shard, {"w": w}, on.mesh, sf.full_shard("shard"), stages=[""])

    def step(p: Any, s: Any, x: Tensor) -> Any:
        value, gradient = sf.value_and_grad(loss)(p, x, "shard")
        return *optimizer.step(p, gradient, s), value

    mapped = on(step, (..., ..., P("shard")), (..., ..., P()))

    def run() -> Any:
        params = flat()
        params, _, value = mapped(params, optimizer.init(params), on.cut(x, "shard"))
        return value, sf.unshard(params)["w"]

    wide = x.double()
    gradient = wide.sum(0)[:, None].expand(D, 3)
    return run, ((wide @ w.double()).sum().float(), (w - 0.5 * gradient).float())


@right(shard=2)
def parameters_in_bfloat16_and_autocast(on: On) -> Made:
    w = (torch.arange(12) % 3 - 1).view(D, 3).float()
    x = (torch.arange(ROWS * D).view(ROWS, D) % 5 - 2).float()

    def loss(w: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ sf.pvary(w, "shard")
        return sf.psum(y.float().sum(), "shard")

    step = on(sf.value_and_grad(loss), (P(), P("shard")), P())
    gradient = x.sum(0)[:, None].expand(D, 3).clone()
    return lambda: step(w, on.cut(x, "shard")), ((x @ w).sum(), gradient)


@right("processes", shard=2)
def totals_of_micro_batches_in_several_forms(on: On) -> Made:
    """Means times the number of their terms, and totals and counts that are both means over ranks."""
    draw = drawn(34)
    rows, real, whole = draw(16, 4), (draw(16) > -0.5).double(), {"w": draw(4, 4)}
    flat = sf.shard({"layer": whole}, on.mesh, sf.full_shard("shard"))
    multiplied = sf.stage(_multiplied)

    def each(params: Any, x: Tensor) -> Tensor:
        return multiplied(params["layer"], x).square().sum(1)

    def mean(params: Any, x: Tensor) -> Tensor:
        return sf.pmean(each(params, x).mean(), "shard")

    forms: list[Any] = [
        lambda p, x, _: (mean(p, x) * len(x), len(x)),
        lambda p, x, _: (sf.pmean(each(p, x).mean() * len(x), "shard"), len(x)),
        lambda p, x, _: (sf.pmean(each(p, x).sum(), "shard"), len(x)),
        lambda p, x, k: (sf.pmean((each(p, x) * k).sum(), "shard"), sf.pmean(k.sum(), "shard")),
    ]

    def step(params: Any, rows: Tensor, real: Tensor) -> Any:
        batches = list(zip(rows.split(3), real.split(3), strict=True))
        return [sf.accumulate(form, batches)(params)[1] for form in forms]

    mapped = on(step, (..., P("shard"), P("shard")), ...)

    def run() -> Any:
        gradients = mapped(flat, on.cut(rows, "shard"), on.cut(real, "shard"))
        return [sf.unshard(gradient)["layer"] for gradient in gradients]

    def masked(p: Any, k: Tensor) -> Tensor:
        return (_multiplied(p, rows).square().sum(1) * k).sum() / k.sum()

    want = [torch.func.grad(masked)(whole, k) for k in (torch.ones_like(real), real)]
    return run, [want[0]] * 3 + want[1:]


@right("processes", data=2, other=2)
def flat_shards_that_pvary_gives_each_rank_of_another_axis(on: On) -> Made:
    """A gradient of the rows of all ranks, and steps of each rank's own."""
    draw = drawn(35)
    rows, whole = draw(12, 4), {"w": draw(4, 4)}
    flat = sf.shard({"layer": whole}, on.mesh, sf.full_shard("data"))
    multiplied = sf.stage(_multiplied)

    def loss(p: Any, x: Tensor, axes: Any) -> Tensor:
        return sf.pmean(multiplied(p["layer"], x).square().sum(1).mean(), axes)

    def step(params: Any, rows: Tensor) -> Any:
        both = sf.grad(lambda p: loss(sf.pvary(p, "other"), rows, ("other", "data")))(params)
        own = sf.pvary(params, "other")
        for _ in range(2):
            own = optree.tree_map(lambda p, g: p - 0.01 * g, own, sf.grad(loss)(own, rows, "data"))
        return both, sf.pmean(own, "other")

    mapped = on(step, (..., P(("other", "data"))), ...)

    def mean(p: Any, x: Tensor) -> Tensor:
        return _multiplied(p, x).square().sum(1).mean()

    owns = [whole["w"], whole["w"]]
    for k, x in enumerate(rows.chunk(2)):
        for _ in range(2):
            owns[k] = owns[k] - 0.01 * torch.func.grad(mean)({"w": owns[k]}, x)["w"]

    def run() -> Any:
        return [sf.unshard(tree)["layer"] for tree in mapped(flat, on.cut(rows, ("other", "data")))]

    return run, [torch.func.grad(mean)(whole, rows), {"w": (owns[0] + owns[1]) / 2}]
