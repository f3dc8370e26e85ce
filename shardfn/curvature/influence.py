"""Influence of training rows on what a model does: products of their gradients with a preconditioned gradient.

`influence` runs the model on the rows. A `GradientStore` has their gradients, projected to few numbers each, in a
folder, and scores queries without the model. The gradient of a matrix is projected along both dimensions, so that a
row's is found from the inputs and the gradients of outputs that its tokens have, each projected. Files have the rows of
one rank and one batch.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.checkpoint import CheckpointError
from shardfn.checkpoint.disk import sync, write_whole
from shardfn.checkpoint.tensor_bytes import memory
from shardfn.collectives.agree import agree, failing_together
from shardfn.compat import process_groups
from shardfn.curvature.operators import check_batches, count_of, each_of, must_take
from shardfn.curvature.per_example import BatchArguments, Losses, checked, compare_once, kind_of, visit
from shardfn.curvature.resuming import compare, made_of
from shardfn.curvature.row_axes import cuts, refuse_cut, row_place, same_along
from shardfn.curvature.row_gradients import Used, parts, single, whole
from shardfn.curvature.row_moments import Kind, OwnedParameter, factors, largest, over_all, places, turned
from shardfn.curvature.row_uses import Key, Receiver
from shardfn.curvature.vectors import Space, draws_restored
from shardfn.forward_mode.jvp import jvp
from shardfn.local_paths import local_path
from shardfn.optim.hyperparameters import kind
from shardfn.optim.owners import OwnedBlock, on_owner, work
from shardfn.quoting import listed
from shardfn.shards.random import int_seed, mixed
from shardfn.transforms.autodiff import name_of
from shardfn.transforms.fitting import together

ABOUT = "gradients.json"
_ALONE = "the rows", "Ranks whose parameters are all plain tensors, without a mesh, have the same rows: shard them"


def influence(
    inverse: Callable[[Any], Any], queries: Sequence[Any], losses: Losses, params: Any, batches: Iterable[Any]
) -> Tensor:
    r"""Scores :math:`q^\top (F + \lambda)^{-1} g_n` of this rank's training rows for queries.

    To first order, giving row n a weight of :math:`\epsilon` more in the training objective, a mean over rows, changes
    what q is the gradient of by :math:`-\epsilon` times the score. Rows of all ranks are scored at once, a batch after
    another; each query takes one forward pass over the batches, and one solution.

    Args:
        inverse: `q -> (F + damping)^-1 q`: ``lambda q: F.solve(q, 1e-3)`` with F by `ekfac`; ``lambda q: solve(H, q,
            damping=1e-3).x`` with any operator; ``lambda q: q`` for the products of the gradients themselves.
        queries: gradients, trees like that of the parameters, such as ``grad(measure)(params)``.
        losses: of training rows, as for `per_example`.
        params: as for `per_example`.
        batches: this rank's training batches, as for `hvp`. They are read once.

    Returns:
        `[queries, rows]`, float32 or wider: of this rank's rows, batch after batch.

    Raises:
        TypeError, ValueError, RuntimeError: as `per_example` and `hvp`; a query that is no such tree.

    Sources: Koh and Liang, Understanding black-box predictions via influence functions (2017); Grosse et al., Studying
        large language model generalization with influence functions (2023).

    Example:
        ``scores = influence(lambda q: F.solve(q, 1e-3), [grad(measure)(params)], losses, params, batches)``
    """
    name = f"influence of {name_of(losses)}"
    space = Space(params, name)
    check_batches(batches, params, name)
    cut = cuts(params, name)
    count_of(queries, space, name)
    if not callable(inverse):
        raise TypeError(
            f"{name}: the first argument is a function q -> (F + damping)^-1 q, and this is {kind(inverse)}: pass "
            f"lambda q: F.solve(q, 1e-3), say"
        )
    must_take(inverse, [None], name, "a query", "Pass a function of a query alone: lambda q: F.solve(q, 1e-3), say")
    values = [x.detach() for x in space.variables.values]
    directions = []
    for query in queries:
        space.read(query, "a query", ". Queries are a list of such trees: [q] for one")
        fix = ". The first argument returns one, as F.solve or solve(...).x is"
        solved = space.read(inverse(query), "a solution", fix)
        directions.append(space.tangents(solved))
    found = []
    for batch in each_of(batches, name, losses):
        rows = checked(params, functools.partial(tuple, batch), name)[1]
        same_along(cut, params, rows.leaves, name)

        def of(values: Any, rows: BatchArguments = rows) -> Tensor:
            return rows.of(losses, space.variables.tree(values), name)

        each = [jvp(of, (values,), (direction,))[1] for direction in directions]
        found.append(torch.stack(each) if each else torch.zeros((0, rows.rows), device=rows.device))
    return torch.cat(found, 1)


# --- gradients of rows, projected and kept ---


@dataclass(frozen=True, eq=False)
class GradientStore:
    """Projected gradients of rows, in a folder.

    Attributes:
        folder: where the files are.
        rows: number of rows, of all ranks that wrote.
    """

    folder: Path
    rows: int
    _files: Sequence[tuple[str, int]] = field(repr=False)
    _sketch: Sketch = field(repr=False)

    def scores(self, queries: Sequence[Any], damping: float | None = None) -> Tensor:
        r"""Scores :math:`q^\top (F + \lambda)^{-1} g_n` of all rows for queries, all of them projected.

        The projected Fisher matrix is the mean over rows of :math:`g g^\top`, and taken as 0 between parameters. Ranks
        share the files, and read each once for all queries; at the first call with damping once more.

        Args:
            queries: as for `influence`.
            damping: :math:`\lambda`, above 0; None for the products :math:`q^\top g_n`.

        Returns:
            `[queries, rows]`, the same on all ranks, in float32 or wider: batch after batch, and within a batch rank
            after rank.

        Raises:
            ValueError: a damping that is not a finite number above 0, or differs between ranks; another kind of query.
            OSError, ValueError, CheckpointError: on all ranks, a file cannot be read, or is another one.
        """
        space = self._sketch.space
        count_of(queries, space, "scores")
        space.agree("scores", damping=damping)
        if damping is not None and not (isinstance(damping, (int, float)) and 0 < damping < math.inf):
            raise ValueError(f"scores: damping={damping!r}; it is a finite number above 0, or None")
        found = torch.zeros((len(queries), self.rows), dtype=self._sketch.dtype, device=space.like[0].device)
        if not queries:
            return found
        given = torch.stack([self._sketch.of_gradient(query) for query in queries])
        if damping is not None:
            solved = []
            for columns, gram in zip(self._sketch.columns.values(), self._grams, strict=True):
                damped = gram + damping * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
                solved.append(torch.linalg.solve(damped, given[:, columns].mT).mT)
            given = torch.cat(solved, 1)
        for start, each in self._read():
            found[:, start : start + len(each)] = given @ each.mT
        return over_all(space.params, found)

    @functools.cached_property
    def _grams(self) -> list[Tensor]:
        """The projected Fisher matrix of each parameter."""
        sketch = self._sketch
        sums = [
            torch.zeros((columns.stop - columns.start,) * 2, dtype=sketch.dtype, device=sketch.space.like[0].device)
            for columns in sketch.columns.values()
        ]
        for _, each in self._read():
            for total, columns in zip(sums, sketch.columns.values(), strict=True):
                total.addmm_(each[:, columns].mT, each[:, columns])
        return [over_all(sketch.space.params, total) / self.rows for total in sums]

    def _read(self) -> Iterable[tuple[int, Tensor]]:
        """The rows of this rank's share of the files, and the number of the first of them."""
        sketch, start = self._sketch, 0
        number, ranks = row_place(sketch.space.params)
        with failing_together([together(sketch.space.params)], "scores"):
            for i, (name, rows) in enumerate(self._files):
                if i % ranks == number and rows:
                    each = torch.from_numpy(np.load(self.folder / name))
                    if each.shape != (rows, sketch.length) or each.dtype != sketch.dtype:
                        raise CheckpointError(f"{self.folder / name} is {each.dtype}, {tuple(each.shape)}")
                    yield start, each.to(sketch.space.like[0].device)
                start += rows
        agree([], together(sketch.space.params), "scores")


def store_gradients(
    folder: str | os.PathLike[str],
    losses: Losses,
    params: Any,
    batches: Iterable[Any] | None = None,
    *,
    size: int = 16,
    seed: int = 0,
) -> GradientStore:
    r"""Writes the gradients of all training rows, projected, to a folder; what is there already is not computed again.

    The gradient of a matrix becomes :math:`P^\top G Q`, where columns of P and Q have `size` numbers for each row and
    column of the matrix: normal ones of variance `1 / size`, so that products of gradients stay the same on average, or
    the identity along a dimension of at most `size`. A vector becomes :math:`P^\top g`, and a tensor of more dimensions
    is a matrix of its first and all others. Projections depend on the seed and on paths alone.

    Args:
        folder: on a file system that all ranks share. It may have the files of an earlier call that did not end, on as
            many ranks and with the same arguments, which goes on.
        losses: as for `per_example`.
        params: as for `per_example`.
        batches: this rank's training batches, as for `hvp`, or None to read a folder that is complete, on any mesh;
            then nothing is computed, and losses are not looked at.
        size: numbers along each dimension, 1 or more: about `size^2` for a matrix, which all of a row's are kept of.
        seed: of the projections, any int.

    Returns:
        A `GradientStore`.

    Raises:
        CheckpointError: on all ranks, a folder that is of other parameters, values of them, losses, batches or
            arguments; one that is not complete, without batches.
        TypeError, ValueError, RuntimeError: as `per_example` and `hvp`.
        OSError: on all ranks, the folder cannot be written.

    Sources: Choe et al., What is your data worth to GPT? LLM-scale data valuation with influence functions (2024); Park
        et al., TRAK: attributing model behavior at scale (2023).

    Example:
        ``scores = store_gradients("runs/rows", losses, params, batches).scores([grad(measure)(params)], damping=1e-3)``
    """
    name = f"store_gradients of {name_of(losses)}"
    space, path = Space(params, name), local_path(folder, f"{name}: folder")
    space.agree(name, size=size, seed=seed, folder=str(path), batches=batches is not None)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{name}: size={size!r}; it is an integer of 1 or more")
    refuse_cut(params, name)
    check_batches(batches, params, name)
    sketch = Sketch(space, size, int_seed(seed))
    number, ranks = row_place(params)
    of = made_of(space, name, losses, batches)
    _begin(path, sketch, of, ranks, None if batches is None else len(batches), name)  # type: ignore[arg-type]
    there = _files(path)
    count = json.loads((path / ABOUT).read_bytes())["batches"]
    if batches is not None:
        lacking = torch.tensor([float((i, number) not in there) for i in range(count)], device=space.like[0].device)
        wanted = largest(params, lacking).tolist()
        with draws_restored(space.like):
            for i, batch in enumerate(each_of(batches, name, losses)):
                _write(path, sketch, losses, batch, (i, number), there, bool(wanted[i]), name)
        agree([], together(params), name)
    return _complete(path, sketch, count, name)


class Sketch:
    """How gradients are projected.

    Attributes:
        space: vectors like the gradient.
        columns: for each parameter, where its numbers are in a projected gradient.
        dtype: of projected gradients.
    """

    def __init__(self, space: Space, size: int, seed: int) -> None:
        self.space, self.size, self.seed, self.places = space, size, seed, places(space)
        self.dtype = torch.float64 if any(x.dtype == torch.float64 for x in space.like) else torch.float32
        self.columns: dict[Key, slice] = {}
        stop = 0
        for key, at in self.places.items():
            start, stop = stop, stop + math.prod(min(n, size) for n in _shape(at))
            self.columns[key] = slice(start, stop)
        self.length = stop

    def bases(self, key: Key) -> tuple[Tensor | None, Tensor | None]:
        """The projections along both dimensions of a parameter, `[n, size]`; None for the identity."""
        at = self.places[key]

        def basis(side: int, n: int) -> Tensor | None:
            if n <= self.size:
                return None
            draw = torch.Generator(device="cpu").manual_seed(mixed(self.seed, "projection", at.path, side))
            values = torch.randn((n, self.size), generator=draw, dtype=torch.float64, device="cpu")
            return (values / self.size**0.5).to(at.unit.values.device, self.dtype)

        left, right = (basis(side, n) for side, n in enumerate(_shape(at)))
        return left, right

    def of_rows(self, key: Key, numel: int, uses: Sequence[Used]) -> Tensor:
        """The projected gradients of some rows with respect to a parameter, which are the sum of these uses."""
        shape, bases = _shape(self.places[key]), self.bases(key)
        pairs = [factors(shape, use) for use in single(uses)] if len(self.places[key].shape) > 1 else [None]
        if all(pair is not None for pair in pairs):
            found = [self._of_factors(*pair, shape, bases) for pair in pairs if pair is not None]
            return torch.stack(found).sum(0).flatten(1)
        rows = [whole(numel, uses, part).to(self.dtype).view(-1, *shape) for part in parts(uses[0][0].rows, numel)]
        return torch.cat([turned(g, bases) for g in rows]).flatten(1)

    def _of_factors(
        self, kind: Kind, vectors: tuple[Tensor, Tensor], shape: tuple[int, int], bases: Sequence[Tensor | None]
    ) -> Tensor:
        x, y = vectors
        left, right = bases
        if kind == "table":  # of words
            x = F.one_hot(x, shape[0]).to(self.dtype) if left is None else left[x]
        else:
            x = x.to(self.dtype) if left is None else x.to(self.dtype) @ left
        y = y.to(self.dtype)
        return x.mT @ (y if right is None else y @ right)

    def of_gradient(self, gradient: Any) -> Tensor:
        """The projection of a tree like the gradient, on all ranks."""
        owned, plain = (torch.zeros(self.length, dtype=self.dtype, device=self.space.like[0].device) for _ in range(2))
        keys = {at.block.name: key for key, at in self.places.items()}

        def of_block(block: OwnedBlock, x: Tensor) -> Tensor:
            key = keys[block.name]
            into = plain if block.layout is None else owned
            into[self.columns[key]] = turned(x.to(self.dtype).view(_shape(self.places[key])), self.bases(key)).flatten()
            return x

        vector = [x.to(self.dtype) for x in self.space.read(gradient)]
        on_owner(self.space.moving, vector, of_block, work)
        return over_all(self.space.params, owned) + plain


def _shape(at: OwnedParameter) -> tuple[int, int]:
    """A parameter's shape as a matrix; a vector is a column."""
    first, second = (*at.matrix, 1, 1)[:2]
    return first, second


class Projected(Receiver):
    """Takes projected gradients of rows.

    Attributes:
        values: `[rows, numbers]`.
    """

    def __init__(self, sketch: Sketch, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(rows, dtype)
        self.sketch = sketch
        self.values = torch.zeros((rows, sketch.length), dtype=sketch.dtype, device=device)

    def take(self, key: Key, numel: int, rows: slice, uses: Sequence[Used]) -> None:
        """Projects the gradients of some rows."""
        if key in self.sketch.columns:  # else it has no elements
            self.values[rows, self.sketch.columns[key]] += self.sketch.of_rows(key, numel, uses)


# --- files ---


def _begin(folder: Path, sketch: Sketch, of: dict[str, float], ranks: int, batches: int | None, name: str) -> None:
    """Writes what the folder is about, or compares it."""
    space, about = sketch.space, folder / ABOUT
    told: dict[str, Any] = {
        "size": sketch.size,
        "seed": sketch.seed,
        "parameters": {at.path: list(at.shape) for at in sketch.places.values()},
        "dtype": str(sketch.dtype),
        "of": of,
    }
    ranks_of = together(space.params)
    with failing_together([ranks_of], name, (OSError, ValueError, KeyError, CheckpointError)):
        found = json.loads(about.read_bytes()) if about.exists() else None
        if found is None and batches is None:
            raise CheckpointError(f"{name}: {folder} has no gradients: pass batches to write them")
        if found is not None:
            if "of" not in found:
                raise CheckpointError(f"{name}: {folder} does not say what it was made of: remove it, or pass another")
            asked = told | ({} if batches is None else {"ranks": ranks, "batches": batches})
            if other := [key for key in asked if key != "of" and found[key] != asked[key]]:
                both = listed(f"{key}: {found[key]}, not {asked[key]}" for key in other)
                raise CheckpointError(f"{name}: {folder} was written for other arguments: {both}")
            compare(found["of"], of, f"{name}: {folder}")
    agree([f"exists: {found is not None}"], ranks_of, name)
    with failing_together([ranks_of], name, OSError):
        if found is None and row_place(space.params)[0] == 0:
            folder.mkdir(parents=True, exist_ok=True)
            content = json.dumps({**told, "ranks": ranks, "batches": batches}, indent=1)
            _publish(about, content.encode())
    agree([], ranks_of, name)


def _files(folder: Path) -> dict[tuple[int, int], tuple[str, int, str]]:
    """The name, the number of rows, and the digest of the batch, of each file, by batch and rank."""
    found = {}
    for path in sorted(folder.glob("[0-9]*-[0-9]*-[0-9]*-*.npy")):
        batch, rank, rows, digest = path.stem.split("-")
        if (int(batch), int(rank)) in found:
            raise CheckpointError(f"{folder} has two files of batch {batch} of rank {rank}: ranks had different rows")
        found[int(batch), int(rank)] = path.name, int(rows), digest
    return found


def _write(
    folder: Path,
    sketch: Sketch,
    losses: Losses,
    batch: tuple[Any, ...],
    at: tuple[int, int],
    there: Mapping[tuple[int, int], tuple[str, int, str]],
    wanted: bool,
    name: str,
) -> None:
    """Computes the rows of one batch and writes them, unless all ranks have; compares the batch if this rank has."""
    params = sketch.space.params
    given, rows = checked(params, functools.partial(tuple, batch), name)
    crc = 0
    for leaf in rows.leaves:
        is_tensor = isinstance(leaf, Tensor)
        text = f"{leaf.dtype} {tuple(leaf.shape)}" if is_tensor else repr(leaf)
        crc = zlib.crc32(memory(leaf) if is_tensor else b"", zlib.crc32(text.encode(), crc))
    digest = f"{crc:08x}"
    error = None
    if at in there and there[at][2] != digest:
        error = CheckpointError(f"{name}: batch {at[0]} of rank {at[1]} in {folder} was another one: {there[at][0]}")
    alone = [f"rows: {digest}"] if row_place(params)[1] == 1 else []  # then all ranks have the same
    agree(alone, together(params), name, mine=error, subject=_ALONE)
    if not wanted:
        return
    compare_once(losses, params, given, name)
    receiver = Projected(sketch, max(rows.rows, 1), *kind_of(params, rows))
    visit(losses, params, rows, receiver, name)
    with failing_together([together(params)], name, OSError):
        content = io.BytesIO()
        np.save(content, receiver.values[: rows.rows].cpu().numpy())
        _publish(folder / f"{at[0]:07}-{at[1]:05}-{rows.rows}-{digest}.npy", content.getvalue())


def _publish(path: Path, content: bytes) -> None:
    """Writes a file that is either there and complete or not; ranks with the same rows write the same."""
    aside = path.with_name(f".{path.name}.{process_groups.global_rank()}.writing")
    write_whole(aside, content)
    os.replace(aside, path)
    sync(path.parent)


def _complete(folder: Path, sketch: Sketch, batches: int, name: str) -> GradientStore:
    there = _files(folder)
    ranks = json.loads((folder / ABOUT).read_bytes())["ranks"]
    wanted = [(batch, rank) for batch in range(batches) for rank in range(ranks)]
    lacking = [at for at in wanted if at not in there]
    error = None
    if lacking:
        error = CheckpointError(
            f"{name}: {folder} lacks {len(lacking)} of {len(wanted)} files, such as that of batch {lacking[0][0]} of "
            f"rank {lacking[0][1]}: pass the batches, on {ranks} ranks, and it goes on"
        )
    agree([], together(sketch.space.params), name, mine=error)
    files = [there[at][:2] for at in wanted]
    return GradientStore(folder, sum(rows for _, rows in files), files, sketch)
