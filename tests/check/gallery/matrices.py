"""Mistakes along an axis that cuts matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.shards.random import mixed
from tests.check.gallery.setting import (
    AS_FIXED,
    COUNT,
    GRID,
    IN,
    LABELS,
    OUT,
    ROWS,
    SEQUENCES,
    TARGETS,
    TENSOR,
    X,
    Y,
    columns_and_rows,
    graded,
    megatron,
    part,
    sgd,
    squares,
    valued,
    weights,
    wrong,
)


@wrong("output", "tensor", "result", AS_FIXED, valued(megatron, "up", "down"), GRID)
def psum_tensor_forgotten_row_parallel(shard_map, mesh):
    @shard_map(in_specs=(TENSOR, P("data"), P("data")), out_specs=P())
    def evaluate(params, x, y):
        h = torch.tanh(x @ params["up"])
        # fix: out = sf.psum(h @ params["down"], "tensor")
        out = h @ params["down"]  # here
        return sf.psum(squares(out, y), "data") / COUNT

    return evaluate(columns_and_rows(mesh), part(X, mesh, "data"), part(Y, mesh, "data"))


def deeper(p: Any) -> Tensor:
    return squares(torch.tanh(torch.tanh(X @ p["first"]) @ p["up"]) @ p["down"], Y) / COUNT


@wrong("gradient", "tensor", "params['first']", AS_FIXED, lambda: graded_of(deeper, "first"), GRID)
def pvary_forgotten_column_parallel(shard_map, mesh):
    def loss_fn(params, x, y):
        params = sf.pvary(params, "data")
        h = torch.tanh(x @ params["first"])
        # fix: h = torch.tanh(sf.pvary(h, "tensor") @ params["up"])
        h = torch.tanh(h @ params["up"])  # here
        out = sf.psum(h @ params["down"], "tensor")
        return sf.psum(squares(out, y), "data") / COUNT

    specs = {"first": P(), **TENSOR}

    @shard_map(in_specs=(specs, P("data"), P("data")), out_specs=specs)
    def gradient(params, x, y):
        return sf.grad(loss_fn)(params, x, y)

    params = columns_and_rows(mesh, **weights("first"))
    return gradient(params, part(X, mesh, "data"), part(Y, mesh, "data"))["first"]


def graded_of(loss: Callable[[Any], Tensor], name: str) -> Tensor:
    return torch.func.grad(loss)(weights("first", "up", "down"))[name]


def sequence_parallel(p: Any) -> Tensor:
    h = F.rms_norm(SEQUENCES, (IN,), p["block"]["norm"])
    return squares(torch.tanh(h @ p["block"]["up"]) @ p["block"]["narrow"], TARGETS) / TARGETS.numel()


def train_block(loss: Callable[[Any], Tensor], *names: str) -> Any:
    params = {"block": weights(*names)}
    grads, value = torch.func.grad_and_value(loss)(params)
    return sgd(params, grads), value


@wrong(
    "gradient", "tensor", "block.norm", AS_FIXED, lambda: train_block(sequence_parallel, "norm", "up", "narrow"), GRID
)
def norm_weight_unsynchronised_tp(shard_map, mesh):
    """Sequence parallelism: each rank normalizes its own places, with a weight that all ranks hold."""

    @sf.stage
    def block(p, x):
        # fix: h = F.rms_norm(x, (IN,), sf.pvary(p["norm"], "tensor"))
        h = F.rms_norm(x, (IN,), p["norm"])  # here
        h = sf.parallel.to_parallel(h, "tensor", sequence=1)
        return sf.parallel.from_parallel(torch.tanh(h @ p["up"]) @ p["narrow"], "tensor", sequence=1)

    def loss_fn(params, x, y):
        return sf.psum(squares(block(params["block"], x), y), ("data", "tensor")) / TARGETS.numel()

    @shard_map(in_specs=(..., P("data", "tensor"), P("data", "tensor")), out_specs=(..., P()))
    def step(params, x, y):
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        return sgd(params, grads), loss

    cut = sf.by_path([(r".*\.up", P(None, "tensor")), (r".*\.narrow", P("tensor")), (r".*\.norm", P())])
    params = sf.shard({"block": weights("norm", "up", "narrow")}, mesh, sf.full_shard("data"), specs=cut)
    x, y = (part(part(whole, mesh, "data"), mesh, "tensor", dim=1) for whole in (SEQUENCES, TARGETS))
    return step(params, x, y)


def dropped(p: Any) -> Tensor:
    drawn = [torch.rand(4, OUT, generator=torch.Generator().manual_seed(mixed(0, f"data={i}"))) for i in range(2)]
    return squares(torch.tanh(X @ p["up"]) @ p["down"] * (torch.cat(drawn) < 0.5), Y) / COUNT


@wrong(
    "output",
    "tensor",
    "result",
    "shardfn.fold_in(seed) without 'tensor'",
    valued(dropped, "up", "down"),
    GRID,
    says="random",
)
def dropout_differs_along_tensor(shard_map, mesh):
    @shard_map(in_specs=(TENSOR, P("data"), P("data")), out_specs=P())
    def loss_fn(params, x, y):
        out = sf.psum(torch.tanh(x @ params["up"]) @ params["down"], "tensor")
        # fix: kept = torch.rand(out.shape, generator=sf.fold_in(0, "data")) < 0.5
        kept = torch.rand(out.shape, generator=sf.fold_in(0, "data", "tensor")) < 0.5  # here
        return sf.psum(squares(out * kept, y), "data") / COUNT

    return loss_fn(columns_and_rows(mesh), part(X, mesh, "data"), part(Y, mesh, "data"))


@wrong("output", "tensor", "result", AS_FIXED, valued(lambda p: p["up"].norm(), "up"), GRID)
def norm_of_a_cut_weight(shard_map, mesh):
    """Weight normalization by this rank's columns."""

    @shard_map(in_specs=P(None, "tensor"), out_specs=P())
    def norm(up):
        # fix: return sf.psum(up.square().sum(), "tensor").sqrt()
        return up.square().sum().sqrt()  # here

    return norm(part(weights("up")["up"], mesh, "tensor", dim=1))


@wrong(
    "output",
    "tensor",
    "result",
    "shardfn.all_gather(x @ up, 'tensor', to=\"invariant\")",
    valued(lambda p: (X @ p["up"]).argmax(1), "up"),
    GRID,
)
def argmax_of_cut_logits(shard_map, mesh):
    @shard_map(in_specs=(P(None, "tensor"), P()), out_specs=P())
    def predict(up, x):
        # fix: return sf.all_gather(x @ up, "tensor", dim=1, to="invariant").argmax(1)
        return (x @ up).argmax(1)  # here

    return predict(part(weights("up")["up"], mesh, "tensor", dim=1), X)


def sampled(p: Any) -> Tensor:
    return torch.multinomial((X @ p["gate"]).softmax(1), 1, generator=torch.Generator().manual_seed(mixed(7)))


@wrong(
    "output", "tensor", "result", "shardfn.fold_in(seed) without 'tensor'", valued(sampled, "gate"), GRID, says="random"
)
def tokens_sampled_by_each_rank(shard_map, mesh):
    @shard_map(in_specs=(P(None, "tensor"), P()), out_specs=P())
    def sample(head, x):
        logits = sf.all_gather(x @ head, "tensor", dim=1, to="invariant")
        # fix: generator = sf.fold_in(7)
        generator = sf.fold_in(7, "tensor")
        return torch.multinomial(logits.softmax(1), 1, generator=generator)  # here

    return sample(part(weights("gate")["gate"], mesh, "tensor", dim=1), X)


def chosen(p: Any) -> Tensor:
    return F.cross_entropy(X @ p["up"], LABELS)


@wrong("NotImplementedError", "tensor", "", "detach()", graded(chosen, "up"), GRID)
def pmax_differentiated(shard_map, mesh):
    """A softmax over columns that nobody has whole."""
    first = 3 * mesh.get_local_rank("tensor")

    def loss_fn(params, x, labels):
        logits = x @ sf.pvary(params["up"], "data")
        # fix: top = sf.pmax(logits.detach().amax(1), "tensor")
        top = sf.pmax(logits.amax(1), "tensor")  # here
        every = sf.psum((logits - sf.pvary(top, "tensor")[:, None]).exp().sum(1), "tensor").log() + top
        own = (labels[:, None] == first + torch.arange(3)).double()
        return sf.psum((every - sf.psum((logits * own).sum(1), "tensor")).sum(), "data") / ROWS

    @shard_map(in_specs=({"up": P(None, "tensor")}, P("data"), P("data")), out_specs={"up": P(None, "tensor")})
    def gradient(params, x, labels):
        return sf.grad(loss_fn)(params, x, labels)

    params = {"up": part(weights("up")["up"], mesh, "tensor", dim=1)}
    grads = gradient(params, part(X, mesh, "data"), part(LABELS, mesh, "data"))
    whole = shard_map(
        lambda g: sf.all_gather(g, "tensor", dim=1, to="invariant"), in_specs=P(None, "tensor"), out_specs=P()
    )
    return {"up": whole(grads["up"])}


@wrong(
    "output",
    "tensor",
    "result",
    "shardfn.fold_in(seed) without 'tensor'",
    valued(dropped, "up", "down"),
    GRID,
    says="random",
)
def dropout_of_the_default_generator(shard_map, mesh):
    @shard_map(in_specs=(TENSOR, P("data"), P("data")), out_specs=P())
    def loss_fn(params, x, y):
        out = sf.psum(torch.tanh(x @ params["up"]) @ params["down"], "tensor")
        # fix: out = out * (torch.rand(out.shape, generator=sf.fold_in(0, "data")) < 0.5)
        out = F.dropout(out, 0.5)  # here
        return sf.psum(squares(out, y), "data") / COUNT

    return loss_fn(columns_and_rows(mesh), part(X, mesh, "data"), part(Y, mesh, "data"))
