"""Batches that are longer on some ranks, or have more rows there: filled up, or as they are, and exact."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.testing import World
from shardfn.testing import world as make_world
from tests.models import distance, normal, plainly
from tests.refusals import told

WORDS, D, STEPS = 11, 4, 3
CLEAR = -100


class Tokenizer:
    """What transformers' collators ask for what they fill with."""

    pad_token_id, pad_token_type_id = 3, 0


class Padding:
    """A collator as transformers' default ones: up to the longest row of those that it gets."""

    tokenizer = Tokenizer()

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        import transformers

        longest = max(len(row["input_ids"]) for row in rows)
        made = {"input_ids": 3, "labels": CLEAR, "attention_mask": 0}
        filled = {key: torch.tensor([row[key] + [value] * (longest - len(row[key])) for row in rows])
                  for key, value in made.items()}  # fmt: skip
        return transformers.BatchEncoding(filled)


def sentences(count: int = 37) -> list[dict[str, Any]]:
    """Rows of 1 to 9 tokens, some of which have no label."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for n in torch.randint(1, 10, (count,), generator=draw).tolist():
        ids = torch.randint(4, WORDS, (n,), generator=draw)
        labels = torch.where(torch.rand(n, generator=draw) < 0.3, CLEAR, ids)
        found.append({"input_ids": ids.tolist(), "labels": labels.tolist(), "attention_mask": [1] * n})
    return found


def parameters() -> Any:
    blocks = [{"w": normal(D, D, seed=k) / 2} for k in range(3)]
    return {"embed": {"e": normal(WORDS, D, seed=9)}, "blocks": blocks}


def block(p: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Each token sees those before it that are there."""
    return x + torch.tanh((x * mask[..., None]).cumsum(1) @ p["w"])


def total(wrap: Any, ps: Any, batch: Any) -> Tensor:
    """The sum of the losses of all tokens that have a label."""
    mask = batch["attention_mask"].double()
    x = wrap(lambda p, ids: p["e"][ids])(ps["embed"], batch["input_ids"])
    for p in ps["blocks"]:
        x = wrap(block)(p, x, mask)
    scores = wrap(lambda p, x: x @ p["e"].T)(ps["embed"], x)
    return torch.nn.functional.cross_entropy(
        scores.flatten(0, 1), batch["labels"].flatten(), ignore_index=CLEAR, reduction="sum"
    )


OPTIMIZER = sf.optim.sgd(0.1)


def alone(batches: list[Any], rate: float = 0.1) -> tuple[list[float], Any]:
    """The losses and parameters of one process that has all rows of each step."""
    ps, losses = parameters(), []
    for batch in batches:

        def loss(ps: Any, batch: Any = batch) -> Tensor:
            return total(plainly, ps, batch) / (batch["labels"] != CLEAR).sum()

        grads, value = torch.func.grad_and_value(loss)(ps)
        losses.append(value.item())
        ps = optree.tree_map(lambda p, g: p - rate * g, ps, grads)
    return losses, ps


def trained(mesh: Any, batches: Any, micro: Any, strategy: Any, steps: int = STEPS) -> Any:
    """The same by the loop: each rank on the rows that it has, in parts."""
    params = sf.shard(parameters(), mesh, strategy)
    axes = tuple(mesh.mesh_dim_names)[:1]
    used: list[int] = []

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def step(state: Any, batch: Any) -> Any:
        count = sf.psum((batch["labels"] != CLEAR).sum(), axes)

        def loss(params: Any, part: Any) -> Tensor:
            return sf.psum(total(sf.stage, params, part), axes) / count

        run = sf.accumulate(loss, [batch] if micro is None else batch, micro=micro)
        value, grads = run(state[0])
        used.append(run.micro)
        return OPTIMIZER.step(state[0], grads, state[1]), {"loss": value}

    state, run = sf.run.loop(step, (params, OPTIMIZER.init(params)), batches, steps=steps, report=[])
    return list(run.metrics["loss"].values()), sf.unshard(state[0]), used


def compared(sizes: dict[str, int], pad: Any, micro: Any, strategy: str, **more: Any) -> tuple[float, set[int], int]:
    """How far a run is from that of one process; in how many parts it ran; how many shapes there were on this rank."""
    mesh = sf.make_mesh(device="cpu", **sizes)
    axis = next(iter(sizes))
    how: Any = {"collate": Padding(), "remainder": "wrap", **more}
    batches = sf.run.batches(sentences(), mesh, axis, 8, 5, pad=pad, **how)
    every = sf.run.batches(sentences(), mesh, (), 8, 5, **how)
    placed = {"full_shard": sf.full_shard(axis), "ddp": sf.ddp(axis), "zero2": sf.zero2(axis)}[strategy]
    losses, params, used = trained(mesh, batches, micro, placed)
    shapes = {tuple(one["input_ids"].shape) for one in itertools.islice(batches(0), STEPS)}
    want, whole = alone(list(itertools.islice(every(0), STEPS)))
    return max(distance(params, whole), *(abs(a - b) for a, b in zip(losses, want, strict=True))), {*used}, len(shapes)


PADS: dict[str, Any] = {"ranks": "ranks", "a dict": {"input_ids": 0, "labels": -100}, "none": "none"}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("pad", "micro", "strategy"), [
    ("ranks", None, "full_shard"), ("a dict", 2, "zero2"), ("none", None, "ddp"), ("none", 3, "full_shard"),
    ("none", "auto", "full_shard"),
])  # fmt: skip
def test_each_token_counts_once(ranks: int, pad: str, micro: Any, strategy: str) -> None:
    for far, used, shapes in make_world(ranks).run(compared, {"data": ranks}, PADS[pad], micro, strategy):
        assert far < 1e-12
        assert used == {1 if micro in (None, "auto") else min(micro, 8 // ranks) if ranks == 1 else micro}
        assert shapes > 1


@pytest.mark.world(4)
def test_ranks_along_other_axes_have_the_same_lengths(world: World) -> None:
    for far, _, _ in world.run(compared, {"data": 2, "tensor": 2}, "ranks", 2, "full_shard"):
        assert far < 1e-12


ROWS = [(5, 3, 0, 1), (2, 2, 2, 2), (0, 0, 0, 1), (1, 4, 3, 0)]  # of each rank, at each step


class Uneven:
    """Ranks have other numbers of rows, one of them none."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.axes = ranks, ("data",)

    def parts(self, step: int) -> list[Any]:
        each, ends = sentences()[10 * step :], [0, *itertools.accumulate(ROWS[step])][:: 4 // self.ranks]
        return [dict(Padding()(each[a:b])) if b > a else none() for a, b in itertools.pairwise(ends)]

    def whole(self, step: int) -> Any:
        return dict(Padding()(sentences()[10 * step :][: sum(ROWS[step])]))

    def __call__(self, start: int) -> Iterator[Any]:
        for step in range(start, len(ROWS)):
            yield self.parts(step)[dist.get_rank()]


def none() -> Any:
    empty = torch.zeros(0, 3, dtype=torch.int64)
    return {"input_ids": empty, "labels": empty, "attention_mask": empty}


def uneven(ranks: int, micro: Any, strategy: str, through: bool) -> Any:
    mesh, rows = sf.make_mesh(device="cpu", data=ranks), Uneven(ranks)
    batches: Any = sf.run.check_loader(list(rows(0)), mesh, "data", pad="none") if through else rows
    placed = {"full_shard": sf.full_shard("data"), "zero1": sf.strategies.zero1("data")}[strategy]
    losses, params, used = trained(mesh, batches, micro, placed, len(ROWS))
    want, whole = alone([rows.whole(step) for step in range(len(ROWS))])
    return max(distance(params, whole), *(abs(a - b) for a, b in zip(losses, want, strict=True))), used


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize(
    ("micro", "strategy"), [(None, "zero1"), (3, "full_shard"), (6, "zero1"), ("auto", "full_shard")]
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_with_fewer_rows_than_parts_and_with_none(ranks: int, micro: Any, strategy: str, through: bool) -> None:
    for far, used in make_world(ranks).run(uneven, ranks, micro, strategy, through):
        assert far < 1e-12
        most = [sum(counts) for counts in ROWS]
        want = [1] * 4 if micro in (None, "auto") else [min(micro, n) for n in most] if ranks == 1 else [micro] * 4
        assert used == want


def memory() -> Any:
    """What fits is known by the rank with the most: each says the same at each step, whatever shapes it has."""
    mesh = sf.make_mesh(device="cpu", data=2)
    rows, used, far = [(8, 2), (2, 8), (3, 1), (1, 12), (5, 6), (12, 0)], [], []
    p = torch.ones(2, dtype=torch.float64)

    def loss(p: Tensor, x: Tensor) -> Tensor:
        if (len(x) > 4 and dist.get_rank() == 0) or (len(x) > 3 and dist.get_rank() == 1):
            raise torch.OutOfMemoryError("pretended")
        return sf.psum((p * x).sum(), "data")

    for step, counts in enumerate(rows):
        every = [normal(n, 2, seed=10 * step + k) for k, n in enumerate(counts)]
        run = sf.accumulate(loss, every[dist.get_rank()], micro="auto")
        value, grad = sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=...)(p)
        used.append(run.micro)
        whole = torch.cat(every).sum(0)
        far.append((value - whole.sum()).abs().item() + (sf_sum(mesh, grad) - whole).abs().max().item())
    return used, max(far)


def sf_sum(mesh: Any, x: Tensor) -> Tensor:
    return sf.shard_map(lambda x: sf.psum(x, "data"), mesh=mesh, in_specs=..., out_specs=...)(x)


@pytest.mark.world(2)
def test_what_fits_is_known_of_the_rank_with_the_most(world: World) -> None:
    for used, far in world.run(memory):
        assert used == [2, 4, 1, 4, 2, 4]
        assert far < 1e-12


# --- what is filled, and with what ---


def filled(batch: Any, pad: Any) -> Any:
    """What a rank's batch becomes, by a loader of one's own."""
    mesh = sf.make_mesh(device="cpu", data=-1)
    found: list[Any] = []
    wrong = told(lambda: found.extend(sf.run.check_loader([batch(dist.get_rank())], mesh, "data", pad=pad)))
    return wrong if wrong != "it was done" else found[0]


def nested(rank: int) -> Any:
    n = 2 + rank
    return {
        "anchor_input_ids": torch.full((2, n), 7), "decoder_attention_mask": torch.ones(2, n, dtype=torch.bool),
        "more": [{"labels": torch.ones(2 + rank, n, 2, dtype=torch.int64).numpy()}], "same": torch.ones(2, 2), "n": 3,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_what_differs_is_filled_at_its_ends(kind: Any) -> None:
    first, second = make_world(2, kind).run(lambda: filled(nested, {"input_ids": 9}))
    assert first["anchor_input_ids"].tolist() == [[7, 7, 9]] * 2
    assert first["decoder_attention_mask"].tolist() == [[True, True, False]] * 2
    labels = torch.as_tensor(first["more"][0]["labels"])
    assert labels.shape == (3, 3, 2)
    assert labels[:2, :2].eq(1).all()
    assert labels[2].eq(CLEAR).all()
    assert labels[:, 2].eq(CLEAR).all()
    assert (first["same"].tolist(), first["n"]) == ([[1, 1], [1, 1]], 3)
    assert second["anchor_input_ids"].tolist() == [[7] * 3] * 2


def of_one(rank: int, key: Any = "x", dtype: torch.dtype = torch.float32, rows: int = 2) -> Any:
    return {key: torch.ones(rows, 2 + rank, dtype=dtype)}


def whole_numbers(rank: int, key: str = "x") -> Any:
    return of_one(rank, key, torch.int64)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "nobody says": (of_one, None, "differ between ranks: rank 0 has ['x'] float32 [2, 2]; rank 1 has ['x'] flo"),
    "and what to say": (
        of_one,
        None,
        'pad="ranks" fills them up to the longest of all ranks, pad="none" is for a step',
    ),
    "a name nobody knows": (of_one, "ranks", "batch['x'], float32, has different sizes on other ranks, up to [2, 3]"),
    "how to name it": (of_one, {"y": 1}, "pass pad={'x': ...}, by the leaf's last key"),
    "a mask that is added": (lambda r: of_one(r, "attention_mask"), "ranks", "batch['attention_mask'], float32, has"),
    "a fraction in a whole number": (whole_numbers, {"x": 0.5}, "pad['x']=0.5 is no whole number"),
    "no tokenizer": (lambda r: whole_numbers(r, "input_ids"), "ranks", "pass pad={'input_ids': ...}"),
    "a bare tensor": (lambda r: of_one(r)["x"], "ranks", "batch, float32, has different sizes on other ranks, up to"),
    "another dtype": (lambda r: [of_one, whole_numbers][r](0), "none", "float32 2-d; rank 1 has ['x'] int64 2-d"),
    "another dimension": (lambda r: {"x": torch.ones([2] * (1 + r))}, "none", "1-d; rank 1 has ['x'] float32 2-d"),
    "other keys": (
        lambda r: of_one(r, f"x{r}"),
        "none",
        "rank 0 has ['x0'] float32 2-d; rank 1 has ['x1'] float32 2-d",
    ),
    "a word": (of_one, "longest", 'TypeError: sf.run.check_loader: pad must be "ranks", to the longest of all'),
    "words to fill with": (of_one, {"x": "0"}, "TypeError: sf.run.check_loader: pad['x']='0'; a leaf's last key has a"),
}


def all_refused() -> dict[str, str]:
    return {name: filled(batch, pad) for name, (batch, pad, _) in REFUSED.items()}


@pytest.mark.world(2)
def test_what_cannot_be_filled_is_said_on_every_rank(world: World) -> None:
    for found in world.run(all_refused):
        for name, (_, _, says) in REFUSED.items():
            assert isinstance(found[name], str), name
            assert says in found[name], (name, found[name])


def same_place() -> str:
    mesh = sf.make_mesh(device="cpu", data=1, tensor=2)
    loader = [{"x": torch.zeros(2, 2 + (n == 70) * dist.get_rank())} for n in range(72)]
    return told(lambda: list(sf.run.check_loader(loader, mesh, "data", pad="none")))


@pytest.mark.world(2)
def test_ranks_at_the_same_place_have_the_same_shapes_at_any_step(world: World) -> None:
    for said in world.run(same_place):
        assert "ranks 0 and 1 stand at the same place along data" in said
        assert "their batches of step 70 have other shapes" in said


def dims(many: int) -> list[str]:
    def batch(rank: int) -> Any:
        return [torch.ones(2, 2 + (rank if k == 0 else 0)) for k in range(many)] + [torch.ones(1 + rank)] * (many > 32)

    return [str(filled(batch, "none"))[:30], str(filled(batch, {0: 0, 33: 0}))[:60]]


@pytest.mark.world(2)
def test_only_the_first_dimensions_may_differ(world: World) -> None:
    assert all(one[1].startswith("[tensor([[") for one in world.run(dims, 30))
    assert all(
        "ValueError: sf.run.check_loader: the batches of step 0 differ"[:30] in said
        for one in world.run(dims, 40)
        for said in one
    )


def same_mappings() -> str:
    import transformers

    mesh = sf.make_mesh(device="cpu", data=-1)
    loader = [transformers.BatchEncoding({"x": torch.arange(16) + 16 * n}) for n in range(3)]
    return told(lambda: list(sf.run.check_loader(loader, mesh, "data")))


@pytest.mark.world(2)
def test_rows_in_mappings_of_transformers_are_looked_at(world: World) -> None:
    assert all("ranks 0 and 1 get the same rows" in said for said in world.run(same_mappings))
