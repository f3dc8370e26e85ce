"""The run around a step: batches, checkpoints, disks, models of Hugging Face, adapters."""

from __future__ import annotations

from typing import Any

import optree
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import P, interop, lora
from shardfn import checkpoint as files
from tests.check.programs.setting import ROWS, D, Made, On, language, layers, right, tokens_of
from tests.models import drawn


@right("processes", shard=2)
def a_run_with_batches_and_checkpoints(on: On) -> Made:
    whole, data = {"blocks": [{"w": drawn(140)(D, D)}]}, drawn(141)(16, D)
    layer, opt = sf.stage(lambda p, x: torch.tanh(x @ p["w"])), so.adamw(1e-2)

    def step(state: Any, rows: Tensor, data: Any = ()) -> Any:
        def loss(params: Any) -> Tensor:
            return sf.psum(layer(params["blocks"][0], rows).square().sum(), data) / ROWS

        value, gradient = sf.value_and_grad(loss)(state["params"])
        params, moments = opt.step(state["params"], gradient, state["moments"])
        return {"params": params, "moments": moments}, {"loss": value}

    mapped = on(lambda state, rows: step(state, rows, "shard"), (..., P("shard")), (..., P()))

    def run() -> Any:
        batches = sf.run.batches(data, on.mesh, "shard", ROWS, seed=3)
        folder = on.folder()
        for end in (2, 4):  # it goes on from a checkpoint
            params = sf.shard(whole, on.mesh, sf.full_shard("shard"))
            state = {"params": params, "moments": opt.init(params)}
            state, _ = sf.run.loop(mapped, state, batches, steps=end, save=folder, report=[])
        return sf.unshard(state["params"])

    alone = sf.run.batches(data, sf.make_mesh(device="cpu", one=2), (), ROWS, seed=3)
    params = optree.tree_map(torch.clone, whole)
    state = {"params": params, "moments": opt.init(params)}
    for rows, _ in zip(alone, range(4), strict=False):
        state, _ = step(state, rows)
    return run, state["params"]


@right("processes", shard=2)
def parameters_on_disk(on: On) -> Made:
    """And checkpoints by hand, between calls."""
    whole, tokens = layers(142), tokens_of(142)
    opt = so.adamw(1e-2)

    def step(params: Any, state: Any, tokens: Tensor, data: Any = ()) -> Any:
        value, grads = sf.value_and_grad(language)(params, tokens, data)
        return *opt.step(params, grads, state), value

    mapped = on(lambda p, s, t: step(p, s, t, "shard"), (..., ..., P("shard")), (..., ..., P()))

    def run() -> Any:
        folder, own = on.folder(), on.cut(tokens, "shard")
        params = sf.shard(whole, on.mesh, sf.full_shard("shard").with_tiers(params="disk", grads="disk", state="disk"))
        params, state, first = mapped(params, opt.init(params), own)
        files.save(folder / "step", {"params": params, "state": state})
        params, state, _ = mapped(params, state, own)
        both = files.load(folder / "step", {"params": params, "state": state})
        params, state, second = mapped(both["params"], both["state"], own)
        return sf.unshard(params), first, second

    params = optree.tree_map(torch.clone, whole)
    params, state, first = step(params, opt.init(params), tokens)
    params, state, second = step(params, state, tokens)
    return run, (params, first, second)


def _gpt() -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {  # of which GPT2Config declares some
        "vocab_size": 24, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1, "use_cache": False,
        "attn_implementation": "eager",
    }  # fmt: skip
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options)).double()


def _hugging_face(on: On, **options: Any) -> Made:
    tokens = torch.randint(24, (ROWS, 8), generator=torch.Generator().manual_seed(1))
    model = interop.functional(_gpt(), min_stage_params=64, **options)

    def loss(params: Any, tokens: Tensor, data: Any = ()) -> Tensor:
        logits = model(params, input_ids=tokens).logits[:, :-1].flatten(0, 1)
        total = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
        return sf.psum(total, data) / sf.psum(tokens[:, 1:].numel(), data)

    placing: dict[str, Any] = {"specs": model.specs} if "tensor" in options else {}
    params = sf.shard(model.tree, on.mesh, sf.full_shard("shard"), **placing)
    step = on(lambda p, t: sf.value_and_grad(loss)(p, t, "shard"), (..., P("shard")), (P(), ...))

    def run() -> Any:
        value, gradient = step(params, on.cut(tokens, "shard"))
        return value, model.state_dict(gradient)

    alone = _gpt()
    logits = alone(input_ids=tokens).logits[:, :-1]
    value = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    value.backward()
    named = {name: p.grad for name, p in alone.named_parameters()}
    return run, (value.detach(), named | {"lm_head.weight": named["transformer.wte.weight"]})


@right("processes", shard=2)
def a_model_of_hugging_face(on: On) -> Made:
    return _hugging_face(on)


@right("processes", shard=2, tensor=2)
def a_model_of_hugging_face_over_tensor_ranks(on: On) -> Made:
    return _hugging_face(on, tensor=interop.GPT2)


@right("processes", shard=2)
def adapters_of_a_module(on: On) -> Made:
    """LoRA by `sf.lora`: adapters whole on each rank, the base cut and frozen."""
    x = drawn(143)(ROWS, 3)
    model = interop.functional(
        torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()
    )
    tree = optree.tree_map(lambda p: torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape), model.tree)
    whole = lora.init(model, "all-linear", rank=2, alpha=4, dropout=0.0, seed=0)
    whole = optree.tree_map(lambda p: torch.linspace(-0.5, 1, p.numel(), dtype=p.dtype).view(p.shape), whole)
    base = sf.shard(tree, on.mesh, sf.full_shard("shard"))
    adapters = sf.shard(whole, on.mesh, sf.ddp("shard"))

    def loss(adapters: Any, base: Any, x: Tensor, data: Any = ()) -> Tensor:
        return sf.psum(model(base, x, adapters=adapters).square().sum(), data) / ROWS

    step = on(lambda a, b, x: sf.value_and_grad(loss)(a, b, x, "shard"), (..., ..., P("shard")), (P(), ...))

    def run() -> Any:
        value, gradient = step(adapters, base, on.cut(x, "shard"))
        return value, optree.tree_leaves(sf.unshard(gradient))

    value, gradient = sf.value_and_grad(loss)(whole, tree, x)
    return run, (value, optree.tree_leaves(gradient))
