"""Matrices, vocabularies and sequences that are cut, and what goes between them."""

from __future__ import annotations

from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import P, parallel
from tests.check.programs.setting import ROWS, D, Made, On, folded, plainly, right, tokens_of
from tests.models import drawn, tensors


@right(tensor=2)
def megatron_mlp_by_hand(on: On) -> Made:
    up, down, x = tensors(40, (D, 6), (6, D), (ROWS, D))

    def mlp(up: Tensor, down: Tensor, x: Tensor, t: Any = ()) -> Tensor:
        return sf.psum(F.gelu(sf.pvary(x, t) @ up) @ down, t)

    def loss(up: Tensor, down: Tensor, x: Tensor, t: Any = ()) -> Tensor:
        return (mlp(up, down, x, t) - x).square().sum()

    specs = (P(None, "tensor"), P("tensor"), P())
    step = on(lambda *args: sf.value_and_grad(loss, (0, 1, 2))(*args, "tensor"), specs, (P(), specs))
    value, (a, b, c) = plainly(loss, up, down, x, argnums=(0, 1, 2))
    wanted = value, (on.cut(a, None, "tensor"), on.cut(b, "tensor"), c)
    return lambda: step(on.cut(up, None, "tensor"), on.cut(down, "tensor"), x), wanted


@right(tensor=2)
def attention_by_hand_with_heads_on_each_rank(on: On) -> Made:
    qkv, out, x = tensors(41, (3, D, D), (D, D), (2, 5, D))

    def attended(qkv: Tensor, out: Tensor, x: Tensor, t: Any = ()) -> Tensor:
        heads = 4 // sf.axis_size(t)
        h = torch.einsum("btd,ide->ibte", sf.pvary(x, t), qkv)
        q, k, v = h.unflatten(-1, (heads, -1)).transpose(2, 3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return sf.psum(mixed @ out, t)

    def loss(qkv: Tensor, out: Tensor, x: Tensor, t: Any = ()) -> Tensor:
        return attended(qkv, out, x, t).square().sum()

    specs = (P(None, None, "tensor"), P("tensor"), P())
    step = on(lambda *args: sf.value_and_grad(loss, (0, 1))(*args, "tensor"), specs, (P(), specs[:2]))
    value, (a, b) = plainly(loss, qkv, out, x, argnums=(0, 1))
    wanted = value, (on.cut(a, None, None, "tensor"), on.cut(b, "tensor"))
    return lambda: step(on.cut(qkv, None, None, "tensor"), on.cut(out, "tensor"), x), wanted


@right(tensor=2)
def columns_gathered_for_the_next_layer(on: On) -> Made:
    """Each rank makes its columns; all get all of them; the gradient goes back to each."""
    w, x = tensors(42, (D, 6), (ROWS, D))

    def layer(w: Tensor, x: Tensor, t: Any = ()) -> Tensor:
        return sf.all_gather(torch.tanh(sf.pvary(x, t) @ w), t, dim=1, to="invariant")

    def loss(w: Tensor, x: Tensor, t: Any = ()) -> Tensor:
        return layer(w, x, t).logsumexp(1).sum()

    step = on(
        lambda w, x: (layer(w, x, "tensor"), sf.grad(loss, (0, 1))(w, x, "tensor")),
        (P(None, "tensor"), P()),
        (P(), (P(None, "tensor"), P())),
    )
    a, b = plainly(loss, w, x, argnums=(0, 1))[1]
    return lambda: step(on.cut(w, None, "tensor"), x), (layer(w, x), (on.cut(a, None, "tensor"), b))


def _cut_model(params: Any, tokens: Tensor, t: Any = (), data: Any = (), sequence: int | None = None) -> Tensor:
    """The language model of `layers` with a hidden layer, over tensor ranks."""
    x = sf.stage(_cut_embed)(params["embed"], tokens[:, :-1], t, sequence)
    for p in sf.layers(params["blocks"]):
        x = sf.stage(_cut_block)(p, x, t, sequence)
    return sf.psum(sf.stage(_cut_head)(params["head"], x, tokens[:, 1:], t, sequence), data) / (ROWS * 4)


def _cut_embed(p: Any, tokens: Tensor, t: Any, sequence: int | None) -> Tensor:
    return parallel.embedding(tokens, p["table"], t, sequence=sequence)


def _cut_block(p: Any, x: Tensor, t: Any, sequence: int | None) -> Tensor:
    norm = p["norm"] if sequence is None else sf.pvary(p["norm"], t)
    h = parallel.to_parallel(F.rms_norm(x, (D,), norm, 1e-5), t, sequence=sequence)
    return x + parallel.from_parallel(torch.tanh(h @ p["up"]) @ p["down"], t, sequence=sequence)


def _cut_head(p: Any, x: Tensor, targets: Tensor, t: Any, sequence: int | None) -> Tensor:
    return parallel.cross_entropy(x, p["out"], targets, t, sequence=sequence).sum()


CUT = sf.by_path([(r".*\.up|head\.out", P(None, "tensor")), (r".*\.(down|table)", P("tensor")), (r".*\.norm", P())])


def _cut_training(on: On, sequence: int | None = None, strategy: Any = None) -> Made:
    draw = drawn(43)
    blocks = [{"norm": 1 + draw(D), "up": draw(D, 6), "down": draw(6, D)} for _ in range(2)]
    whole, tokens = {"embed": {"table": draw(12, D)}, "blocks": blocks, "head": {"out": draw(D, 12)}}, tokens_of(43)
    opt = so.adamw(1e-2)

    def step(params: Any, state: Any, tokens: Tensor, *axes: Any) -> Any:
        value, grads = sf.value_and_grad(_cut_model)(params, tokens, *axes, sequence=sequence)
        norm = so.global_norm(grads)
        return *opt.step(params, grads, state), value, norm

    def trained(step: Any, params: Any, tokens: Tensor) -> Any:
        state, told = opt.init(params), []
        for _ in range(2):
            params, state, *now = step(params, state, tokens)
            told += now
        return params, told

    def run() -> Any:
        flat = sf.shard(whole, on.mesh, strategy or sf.full_shard("shard"), specs=CUT)
        params, told = trained(mapped, flat, on.cut(tokens, "shard"))
        return sf.unshard(params), told

    specs = (..., ..., P("shard")), (..., ..., P(), P())
    mapped = on(lambda p, s, t: step(p, s, t, "tensor", "shard"), *specs)
    return run, trained(step, optree.tree_map(torch.clone, whole), tokens)


@right("processes", shard=2, tensor=2)
def fsdp_and_tensor_parallel(on: On) -> Made:
    return _cut_training(on)


@right("processes", shard=2, tensor=2)
def fsdp_and_sequence_parallel(on: On) -> Made:
    return _cut_training(on, sequence=1)


@right("processes", shard=2, tensor=2)
def ddp_and_tensor_parallel(on: On) -> Made:
    return _cut_training(on, strategy=sf.ddp("shard"))


@right(tensor=2)
def norms_of_vectors_that_are_cut(on: On) -> Made:
    w, x = tensors(44, (D,), (ROWS, D))

    def loss(w: Tensor, x: Tensor, t: Any = ()) -> Tensor:
        return sf.psum(parallel.rms_norm(x, w, t, eps=1e-5).square().exp().sum(), t)

    step = on(
        lambda w, x: sf.value_and_grad(loss, (0, 1))(w, x, "tensor"),
        (P("tensor"), P(None, "tensor")),
        (P(), (P("tensor"), P(None, "tensor"))),
    )
    value, (a, b) = plainly(loss, w, x, argnums=(0, 1))
    wanted = value, (on.cut(a, "tensor"), on.cut(b, None, "tensor"))
    return lambda: step(on.cut(w, "tensor"), on.cut(x, None, "tensor")), wanted


@right(tensor=2)
def a_stable_softmax_over_columns_that_are_cut(on: On) -> Made:
    x = 5 * drawn(45)(ROWS, 6)

    def softmax(x: Tensor, t: Any = ()) -> Tensor:
        top = sf.pmax(x.detach().amax(1, keepdim=True), t)
        e = (x - top).exp()
        return e / sf.pvary(sf.psum(e.sum(1, keepdim=True), t), t)

    def loss(x: Tensor, t: Any = ()) -> Tensor:
        return sf.psum(softmax(x, t).square().sum(), t)

    step = on(lambda x: (softmax(x, "tensor"), sf.grad(loss)(x, "tensor")), P(None, "tensor"), P(None, "tensor"))
    wanted = x.softmax(1), plainly(lambda x: x.softmax(1).square().sum(), x)[1]
    return lambda: step(on.cut(x, None, "tensor")), on.cut(wanted, None, "tensor")


@right(tensor=2)
def cross_entropy_over_a_vocabulary_that_is_cut_by_hand(on: On) -> Made:
    draw = drawn(46)
    w, x, y = draw(D, 6), draw(ROWS, D), torch.arange(ROWS) % 6

    def loss(w: Tensor, x: Tensor, y: Tensor, t: Any = ()) -> Tensor:
        logits = sf.pvary(x, t) @ w
        top = sf.pmax(logits.detach().amax(1), t)
        total = sf.psum((logits - top[:, None]).exp().sum(1), t)
        own = y - sf.axis_index(t) * logits.shape[1]
        here = (own >= 0) & (own < logits.shape[1])
        picked = logits.gather(1, own.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        return (total.log() + top - sf.psum(picked.where(here, 0), t)).mean()

    step = on(
        lambda *args: sf.value_and_grad(loss, (0, 1))(*args, "tensor"),
        (P(None, "tensor"), P(), P()),
        (P(), (P(None, "tensor"), P())),
    )
    value, (a, b) = plainly(lambda w, x: F.cross_entropy(x @ w, y), w, x, argnums=(0, 1))
    return lambda: step(on.cut(w, None, "tensor"), x, y), (value, (on.cut(a, None, "tensor"), b))


@right(tensor=2)
def an_embedding_by_hand_and_tied_logits(on: On) -> Made:
    draw = drawn(47)
    table, tokens = draw(12, D), torch.arange(ROWS) * 5 % 12

    def loss(table: Tensor, tokens: Tensor, t: Any = ()) -> Tensor:
        own = tokens - sf.axis_index(t) * len(table)
        here = (own >= 0) & (own < len(table))
        rows = table[own.clamp(0, len(table) - 1)] * here[:, None]
        x = torch.tanh(sf.psum(rows, t))
        logits = sf.all_gather(sf.pvary(x, t) @ table.T, t, dim=1, to="invariant")
        return F.cross_entropy(logits, (tokens + 1) % 12)

    step = on(lambda *args: sf.value_and_grad(loss)(*args, "tensor"), (P("tensor"), P()), (P(), P("tensor")))
    value, gradient = plainly(loss, table, tokens)
    return lambda: step(on.cut(table, "tensor"), tokens), (value, on.cut(gradient, "tensor"))


@right(row=2, column=2)
def a_product_of_matrices_cut_over_two_axes(on: On) -> Made:
    a, b = tensors(48, (D, 6), (6, 8))

    def product(a: Tensor, b: Tensor) -> Tensor:
        return sf.reduce_scatter(a @ sf.pvary(b, "row"), "column", dim=1)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return sf.psum(product(a, b).square().sum(), ("row", "column"))

    specs = P("row", "column"), P("column")
    step = on(lambda a, b: (product(a, b), sf.grad(loss, (0, 1))(a, b)), specs, (P("row", "column"), specs))
    one, other = plainly(lambda a, b: (a @ b).square().sum(), a, b, argnums=(0, 1))[1]
    wanted = on.cut(a @ b, "row", "column"), (on.cut(one, "row", "column"), on.cut(other, "column"))
    return lambda: step(on.cut(a, "row", "column"), on.cut(b, "column")), wanted


@right("processes", data=2, tensor=2)
def dropout_that_agrees_along_tensor_and_differs_along_data(on: On) -> Made:
    """Twice: by a generator for it, and by torch's own, seeded so."""
    up, down, x = tensors(49, (D, 6), (6, D), (ROWS, D))

    def noise(place: Any, like: Tensor) -> Tensor:
        return (torch.rand(like.shape, generator=sf.fold_in(7, 3, place), dtype=like.dtype) > 0.5) * 2.0

    def loss(up: Tensor, down: Tensor, x: Tensor, place: Any = "data", t: Any = "tensor", data: Any = "data") -> Tensor:
        h = sf.pvary(x * noise(place, x), t)
        y = sf.psum(torch.tanh(h @ sf.pvary(up, data)) @ sf.pvary(down, data), t)
        torch.manual_seed(sf.axis_index(data))
        return sf.psum(F.dropout(y, 0.5).square().sum(), data) / ROWS

    def wanted(up: Tensor, down: Tensor, x: Tensor) -> Tensor:
        each = []
        for i, rows in enumerate(x.chunk(2)):
            keep = (torch.rand(rows.shape, generator=folded(7, 3, i), dtype=rows.dtype) > 0.5) * 2.0
            y = torch.tanh((rows * keep) @ up) @ down
            torch.manual_seed(i)
            each.append(F.dropout(y, 0.5).square().sum())
        return torch.stack(each).sum() / ROWS

    specs = (P(None, "tensor"), P("tensor"), P("data"))
    step = on(sf.value_and_grad(loss, (0, 1)), specs, (P(), specs[:2]))
    value, (a, b) = sf.value_and_grad(wanted, (0, 1))(up, down, x)
    expected = value, (on.cut(a, None, "tensor"), on.cut(b, "tensor"))
    return lambda: step(on.cut(up, None, "tensor"), on.cut(down, "tensor"), on.cut(x, "data")), expected
