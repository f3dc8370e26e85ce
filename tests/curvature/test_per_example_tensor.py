"""Norms of single examples' gradients where an axis cuts the parameters, against vmap of grad on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import P, interop, parallel
from shardfn import curvature as sc
from shardfn.curvature import ekfac, influence
from shardfn.curvature.per_example import dp_grads, noise_scale, per_example
from shardfn.testing import world as shared_world
from tests.curvature.test_per_example import PRIVATE, alone, norms_of, off
from tests.models import distance, normal, plainly
from tests.reference import worst
from tests.refusals import told

WORDS, T, D, H = 12, 4, 8, 2
Program = Callable[..., Tensor]
SHAPES = {
    "q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "up": (D, 12), "ub": (12,), "down": (12, D), "db": (D,),
    "n": (D,), "nb": (D,), "gain": (12,), "odd": (D, D),
}  # fmt: skip
SPECS = sf.by_path(
    [(r".*\.(q|k|v|up)|head\.w", P(None, "tensor")), (r".*\.(o|down|ub|gain)|.*\.e", P("tensor")), (r".*", P())]
)


def whole() -> Any:
    each = [{name: normal(*shape, seed=50 * i + k) for k, (name, shape) in enumerate(SHAPES.items())} for i in range(2)]
    embed = {"e": normal(WORDS, D, seed=991), "p": normal(T, D, seed=990)}
    return {"embed": embed, "layers": each, "head": {"w": normal(D, WORDS, seed=992), "n": normal(D, seed=993)}}


def tokens(rank: int, rows: int = 3) -> Tensor:
    return torch.randint(0, WORDS, (rows, T + 1), generator=torch.Generator().manual_seed(rank))


# --- layers, by what is special about them ---


def heads(x: Tensor, n: int) -> Tensor:
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def block(p: Any, x: Tensor, t: Any) -> Tensor:
    h = parallel.to_parallel(F.layer_norm(x, (D,), p["n"], p["nb"]), t)
    q, k, v = (heads(h @ p[name], H // sf.axis_size(t)) for name in "qkv")
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + parallel.from_parallel(y @ p["o"], t)
    h = torch.tanh(parallel.to_parallel(x, t) @ p["up"] + p["ub"])
    return x + parallel.from_parallel(h @ p["down"], t) + p["db"]


def by_linear(p: Any, x: Tensor, t: Any) -> Tensor:
    h = torch.tanh(F.linear(parallel.to_parallel(x, t), p["up"].T, p["ub"])) * p["gain"]
    y = parallel.from_parallel(torch.einsum("btf,fd->btd", h, p["down"]), t)
    return x + F.linear(y, p["odd"], p["db"])


def sequences(p: Any, x: Tensor, t: Any) -> Tensor:
    """Activations between layers are cut along the sequence, and so what an uncut norm meets."""
    x = sf.collectives.local_slice(x, t, dim=1)
    n, shift = sf.pvary(p["n"], t), sf.pvary(p["db"], t)
    h = parallel.to_parallel(F.rms_norm(x, (D,), n), t, sequence=1)
    x = x + parallel.from_parallel(torch.tanh(h @ p["up"]) @ p["down"], t, sequence=1) + shift
    return sf.all_gather(x, t, dim=1, to="invariant")


def cut_norms(p: Any, x: Tensor, t: Any) -> Tensor:
    h = parallel.rms_norm(parallel.to_parallel(x, t) @ p["up"], p["gain"], t)
    return x + parallel.from_parallel(h @ p["down"], t)


def cut_here(p: Any, x: Tensor, t: Any) -> Tensor:
    """A weight that no axis cuts is cut by the program."""
    own = sf.collectives.local_slice(p["odd"], t, dim=1)
    return x + sf.all_gather(torch.tanh(parallel.to_parallel(x, t) @ own), t, dim=-1, to="invariant")


def gathered(p: Any, x: Tensor, t: Any) -> Tensor:
    """A weight that an axis cuts is made whole by the program."""
    w = sf.all_gather(p["q"], t, dim=1, to="invariant")
    return x + torch.tanh(x @ w) @ w.T


def computed(p: Any, x: Tensor, t: Any) -> Tensor:
    """A weight norm, over what all ranks have of a matrix."""
    squares = sf.psum(p["down"].square().sum(0), t)
    w = p["down"] / sf.pvary(squares.sqrt(), t)
    h = parallel.to_parallel(x, t) @ p["up"]
    return x + parallel.from_parallel(torch.tanh(h) @ w, t)


def moved(p: Any, x: Tensor, t: Any) -> Tensor:
    """Columns change ranks, of the weight and of what is computed."""
    w = sf.all_to_all(p["up"], t, split_dim=0, concat_dim=1)  # [d / size, 12]
    x_here = sf.collectives.local_slice(x, t, dim=2)
    h = sf.reduce_scatter(x_here @ w, t, dim=2)
    return x + parallel.from_parallel(torch.tanh(h) @ p["down"], t)


def several(p: Any, x: Tensor, t: Any) -> Tensor:
    for _ in range(2):
        h = parallel.to_parallel(x, t)
        x = torch.tanh(x + parallel.from_parallel((h @ p["up"]) @ p["down"], t))
        x = x + parallel.from_parallel(torch.tanh(h @ p["down"].T) @ p["down"], t)
    return x


def deciding(p: Any, x: Tensor, t: Any) -> Tensor:
    rows = [block(p, row[None], t)[0] if row.sum() > 0 else row @ p["odd"] for row in x]
    return torch.stack(rows)


LAYERS = {f.__name__: f for f in (
    block, by_linear, sequences, cut_norms, cut_here, gathered, computed, moved, several, deciding,
)}  # fmt: skip


def losses_of(stage: Any, layer: Any, t: Any = (), tied: bool = False, **options: Any) -> Program:
    def embed(p: Any, tokens: Tensor) -> Tensor:
        return parallel.embedding(tokens, p["e"], t) + p["p"]

    def head(p: Any, x: Tensor, targets: Tensor) -> Tensor:
        return parallel.cross_entropy(F.rms_norm(x, (D,), p["n"]), p["w"], targets, t).sum(1)

    def tied_head(p: Any, x: Tensor, targets: Tensor) -> Tensor:
        return parallel.cross_entropy(x, p["e"].T, targets, t).sum(1)

    def losses(params: Any, tokens: Tensor) -> Tensor:
        x = stage(embed)(params["embed"], tokens[:, :-1])
        f = stage(lambda p, x: layer(p, x, t), **options)
        for p in sf.layers(params["layers"]):
            x = f(p, x)
        if tied:
            return stage(tied_head)(params["embed"], x, tokens[:, 1:])
        return stage(head)(params["head"], x, tokens[:, 1:])

    return losses


def meshes(world: int) -> list[dict[str, int]]:
    return [{"shard": 1, "tensor": 2}] if world == 2 else [{"shard": 2, "tensor": 2}]


def differences(name: str, tied: bool, checked: bool, counts: list[int], micro: int, options: Any) -> list[float]:
    """How far all that there is of rows is from one process."""
    (sizes,) = meshes(dist.get_world_size())
    mesh = sf.make_mesh(device="cpu", **sizes)
    params = sf.shard(whole(), mesh, sf.full_shard("shard"), specs=SPECS)
    direction = optree.tree_map(lambda x: x.cos(), whole())
    parted = sf.shard(direction, mesh, sf.full_shard("shard"), specs=SPECS)
    reference = losses_of(plainly, LAYERS[name], (), tied)
    losses = losses_of(sf.stage, LAYERS[name], "tensor", tied, **options)
    place = mesh.get_local_rank("shard")
    rows = [tokens(k, counts[k % len(counts)]) for k in range(sizes["shard"])]
    each = alone(reference, whole(), torch.cat(rows))
    split = [len(x) for x in rows]
    norms = norms_of(each)
    limit = float(norms.median())
    weights = (limit / norms).clamp(max=1)
    clipped = optree.tree_map(lambda g: torch.einsum("r,r...->...", weights, g), each)
    products = [(g * d).flatten(1).sum(1) for g, d in zip(*map(optree.tree_leaves, (each, direction)), strict=True)]

    def found(params: Any, x: Tensor) -> Any:
        rows = per_example(losses, params, x, micro=micro)
        return rows.values, rows.norms, rows.clipped(limit), rows.dots(parted)

    mapped = sf.shard_map(found, mesh=mesh, in_specs=(..., ...), out_specs=..., check=checked)
    result = []
    for _ in range(2):  # the first call compares
        values, own, summed, dots = mapped(params, rows[place])
        result += [
            off(own, norms.split(split)[place]),
            off(values, reference(whole(), torch.cat(rows)).split(split)[place]),
            distance(sf.unshard(summed), clipped, floor=1.0),
            off(dots, torch.stack(products).sum(0).split(split)[place]),
        ]
        sf.shards.assert_replicated(summed)
    return result


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_rows_of_cut_parameters(name: str, ranks: int) -> None:
    for tied in (False, True):
        options = {"remat": True} if tied else {}
        for found in shared_world(ranks).run(differences, name, tied, name == "block", [3], 1, options):
            assert worst(found) < 1e-12, (tied, found)


def test_numbers_of_rows_and_parts() -> None:
    for counts, micro in (([5, 2], 1), ([3, 0], 1), ([4, 3], 3), ([1, 0], 2)):
        for found in shared_world(4).run(differences, "block", True, False, counts, micro, {}):
            assert worst(found) < 1e-12, (counts, micro, found)


# --- what follows from the norms ---


def private(sizes: dict[str, int], noise: float) -> Any:
    mesh = sf.make_mesh(device="cpu", **sizes)
    params = sf.shard(whole(), mesh, sf.full_shard("shard"), specs=SPECS)
    losses = losses_of(sf.stage, block, "tensor")
    options: dict[str, Any] = {"max_grad_norm": 0.5, "noise_multiplier": noise, "expected_batch_size": 10.0, "seed": 3}

    def step(params: Any, x: Tensor) -> Any:
        mask = torch.arange(len(x)) % 3 > 0
        got = [dp_grads(losses, params, x, mask=mask, step=7, micro=micro, **options) for micro in (1, 2)]
        rows = per_example(losses, params, x)
        mean = optree.tree_map(lambda g: g / 12, rows.weighted(torch.ones(len(x))))
        return *got, noise_scale(rows.norms, mean)

    mapped = sf.shard_map(step, mesh=mesh, in_specs=(..., P("shard")), out_specs=..., check=False)
    own = tokens(0, 12).chunk(sizes["shard"])[mesh.get_local_rank("shard")]
    *got, scale = mapped(params, own)
    return [sf.unshard(g) for g in got], float(scale)


def test_private_gradients_are_those_of_one_process() -> None:
    losses, x = losses_of(plainly, block), tokens(0, 12)
    for noise in (0.0, 1.1):
        options = PRIVATE | {"noise_multiplier": noise}
        for ranks, sizes in ((2, {"shard": 1, "tensor": 2}), (4, {"shard": 2, "tensor": 2})):
            n = 12 // sizes["shard"]
            mask = torch.cat([torch.arange(n) % 3 > 0] * sizes["shard"])
            wanted = dp_grads(losses, whole(), x, mask=mask, **options)
            rows = per_example(losses, whole(), x)
            mean = optree.tree_map(lambda g: g / 12, rows.weighted(torch.ones(12)))
            scale = float(noise_scale(rows.norms, mean))
            for got, own in shared_world(ranks).run(private, sizes, noise):
                assert worst([distance(g, wanted, floor=1.0) for g in got]) < 1e-12
                assert abs(own / scale - 1) < 1e-10


def estimated() -> float:
    """A trace by random vectors."""
    mesh = sf.make_mesh(device="cpu", shard=2, tensor=2)
    params = sf.shard(whole(), mesh, sf.full_shard("shard"), specs=SPECS)
    losses, own = losses_of(sf.stage, block, "tensor"), tokens(0, 6).chunk(2)[mesh.get_local_rank("shard")]

    def trace(params: Any) -> float:
        return sc.trace(sc.hvp(lambda p: sf.psum(losses(p, own).sum(), "shard"), params), 4, sketch=1).value

    return sf.shard_map(trace, mesh=mesh, in_specs=..., out_specs=..., check=False)(params)


def test_random_vectors_are_the_same_however_parameters_are_cut() -> None:
    losses = losses_of(plainly, block)
    want = sc.trace(sc.hvp(lambda p: losses(p, tokens(0, 6)).sum(), whole()), 4, sketch=1).value
    assert worst([abs(got / want - 1) for got in shared_world(4).run(estimated)]) < 1e-10


def scored() -> Tensor:
    mesh = sf.make_mesh(device="cpu", shard=2, tensor=2)
    params, query = (
        sf.shard(x, mesh, sf.full_shard("shard"), specs=SPECS)
        for x in (whole(), optree.tree_map(lambda x: x.cos(), whole()))
    )
    losses = losses_of(sf.stage, block, "tensor")

    def scores(params: Any, query: Any, x: Tensor) -> Tensor:
        return influence(lambda q: q, [query], losses, params, [(x,)])

    own = tokens(0, 6).chunk(2)[mesh.get_local_rank("shard")]
    return sf.shard_map(scores, mesh=mesh, in_specs=(..., ..., P("shard")), out_specs=..., check=False)(
        params, query, own
    )


def test_scores_of_rows() -> None:
    each = alone(losses_of(plainly, block), whole(), tokens(0, 6))
    pairs = zip(optree.tree_leaves(each), optree.tree_leaves(whole()), strict=True)
    want = torch.stack([(g * x.cos()).flatten(1).sum(1) for g, x in pairs]).sum(0)[None].chunk(2, 1)
    found = shared_world(4).run(scored)
    assert worst([off(got, want[rank // 2]) for rank, got in enumerate(found)]) < 1e-12


# --- modules ---


def of_a_module(kind: str) -> list[float]:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        module: Any = GPT2LMHeadModel(
            GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=WORDS, n_positions=T, attn_pdrop=0.0, embd_pdrop=0.0,
                       resid_pdrop=0.0)
        )  # fmt: skip
    else:
        module = LlamaForCausalLM(
            LlamaConfig(hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=T,
                        tie_word_embeddings=kind == "tied llama")
        )  # fmt: skip
    module = module.double().eval()
    whole = copy.deepcopy(module)
    mesh = sf.make_mesh(device="cpu", shard=dist.get_world_size() // 2, tensor=2)
    model = interop.functional(module, min_stage_params=0, tensor="auto" if kind == "llama" else
                               interop.GPT2 if kind == "gpt2" else interop.LLAMA)  # fmt: skip
    params = model.shard(mesh, sf.full_shard("shard"))
    place = mesh.get_local_rank("shard")
    x = tokens(place, 3)[:, :T]

    def losses(params: Any, x: Tensor) -> Tensor:
        logits = model(params, input_ids=x, use_cache=False).logits
        each = F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="none")
        return each.view(len(x), -1).sum(1)

    want = []
    for row in x:
        whole.zero_grad()
        logits = whole(input_ids=row[None], use_cache=False).logits
        F.cross_entropy(logits[0, :-1], row[1:], reduction="sum").backward()
        want.append(sum(p.grad.square().sum() for p in whole.parameters() if p.grad is not None).sqrt())
    mapped = sf.shard_map(
        lambda p, x: per_example(losses, p, x).norms, mesh=mesh, in_specs=(..., P("shard")), out_specs=..., check=False
    )
    return [off(mapped(params, x), torch.stack(want)) for _ in range(2)]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "tied llama"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_modules(kind: str, ranks: int) -> None:
    assert worst([x for found in shared_world(ranks).run(of_a_module, kind) for x in found]) < 1e-6


# --- errors ---


def wrong_calls() -> dict[str, str]:
    mesh = sf.make_mesh(device="cpu", shard=2, tensor=2)
    here = mesh.get_local_rank("tensor")
    params = sf.shard(whole(), mesh, sf.full_shard("shard"), specs=SPECS)
    wide, narrow = sf.full_shard(("shard", "tensor")), sf.full_shard("shard")
    of_queries = sf.by_path([(r"layers.*\.q", P("tensor"))], strict=False)
    both = sf.shard(whole(), mesh, lambda path, shape: wide if "head" in path else narrow, specs=of_queries)
    losses = losses_of(sf.stage, block, "tensor")
    x = tokens(mesh.get_local_rank("shard"))
    of_rank = x.roll(here, 0)

    def unvaried(p: Any, x: Tensor, t: Any) -> Tensor:
        return x + parallel.from_parallel(torch.tanh((x * p["n"]) @ p["up"]) @ p["down"], t)

    def unfinished(params: Any, x: Tensor) -> Tensor:
        return losses(params, x) * (1 + sf.axis_index("tensor"))

    options: dict[str, Any] = {
        "max_grad_norm": 1.0,
        "noise_multiplier": 0.0,
        "expected_batch_size": 1.0,
        "seed": 0,
        "step": 0,
    }
    programs: dict[str, Callable[[], Any]] = {
        "other rows": lambda: per_example(losses, params, of_rank),
        "fewer rows": lambda: per_example(losses, params, x[here:]),
        "other mask": lambda: dp_grads(losses, params, x, mask=torch.arange(3) != here, **options),
        "other losses": lambda: per_example(unfinished, params, x),
        "no pvary": lambda: per_example(losses_of(sf.stage, unvaried, "tensor"), params, x),
        "data too": lambda: per_example(losses, both, x),
        "factors": lambda: ekfac(losses, params, [(x,)]),
        "scores": lambda: influence(lambda q: q, [params], losses, params, [(of_rank,)]),
    }
    run = sf.shard_map(mesh=mesh, in_specs=(), out_specs=..., check=False)
    return {name: told(run(program)) for name, program in programs.items()}


def test_errors() -> None:
    for found in shared_world(4).run(wrong_calls):
        for name in ("other rows", "other mask", "scores"):
            assert "the rows differ between ranks" in found[name], found
            assert "cut batches over other axes" in found[name], found
        assert "(2, 5)" in found["fewer rows"]
        assert "ranks have other losses of the same rows" in found["other losses"]
        assert "write pvary where such a parameter" in found["no pvary"]
        assert "'layers.0.q' is sharded over tensor by specs=, and a strategy has tensor too" in found["data too"]
        assert "along which ranks have parts of each row's gradient" in found["factors"]
        assert max(map(len, found.values())) < 2000
