"""Influence of training rows on a model: products of their gradients with a preconditioned gradient.

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
from shardfn.checkpoint.tensor_bytes import as_memoryview
from shardfn.collectives.agree import agree, failing_together
from shardfn.compat import process_groups
from shardfn.curvature.operators import check_batches, count_of, each_of, must_take
from shardfn.curvature.per_example import BatchArguments, Losses, checked_batch, compare_once, dtype_and_device, visit
from shardfn.curvature.resuming import compare_fingerprints, made_of
from shardfn.curvature.row_axes import cuts, refuse_cut, row_place, same_along
from shardfn.curvature.row_gradients import Used, row_slices, single, sum_of_uses
from shardfn.curvature.row_moments import (
    Kind,
    OwnedParameter,
    factors,
    max_over_ranks,
    over_all,
    owned_parameters,
    rebased,
)
from shardfn.curvature.row_uses import Key, Receiver
from shardfn.curvature.vectors import Space, draws_restored
from shardfn.forward_mode.jvp import jvp
from shardfn.local_paths import local_path
from shardfn.optim.hyperparameters import kind
from shardfn.optim.owners import OwnedBlock, on_owner, work
from shardfn.quoting import listed
from shardfn.shards.random import int_seed, mixed
from shardfn.transforms.autodiff import name_of
from shardfn.transforms.fitting import program_ranks

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
    sharded_axes = cuts(params, name)
    count_of(queries, space, name)
    if not callable(inverse):
        raise TypeError(
            f"{name}: inverse must be a function q -> (F + damping)^-1 q, got {kind(inverse)}. Pass "
            f"lambda q: F.solve(q, 1e-3), for example"
        )
    must_take(inverse, [None], name, "a query", "Pass a function of a query alone: lambda q: F.solve(q, 1e-3)")
    values = [x.detach() for x in space.variables.values]
    directions = []
    for query in queries:
        space.read(query, "a query", ". Queries are a list of such trees: [q] for one")
        fix = ". The first argument returns one, as F.solve or solve(...).x is"
        solved = space.read(inverse(query), "a solution", fix)
        directions.append(space.tangents(solved))
    scores = []
    for batch in each_of(batches, name, losses):
        rows = checked_batch(params, functools.partial(tuple, batch), name)[1]
        same_along(sharded_axes, params, rows.leaves, name)

        def losses_at(values: Any, rows: BatchArguments = rows) -> Tensor:
            return rows.batched_losses(losses, space.variables.tree(values), name)

        products = [jvp(losses_at, (values,), (direction,))[1] for direction in directions]
        scores.append(torch.stack(products) if products else torch.zeros((0, rows.rows), device=rows.device))
    return torch.cat(scores, 1)


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
            raise ValueError(f"scores: damping must be a finite number above 0, or None, got {damping!r}")
        scores = torch.zeros((len(queries), self.rows), dtype=self._sketch.dtype, device=space.local_params[0].device)
        if not queries:
            return scores
        projected = torch.stack([self._sketch.of_gradient(query) for query in queries])
        if damping is not None:
            solved = []
            for columns, gram in zip(self._sketch.columns.values(), self._grams, strict=True):
                damped = gram + damping * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
                solved.append(torch.linalg.solve(damped, projected[:, columns].mT).mT)
            projected = torch.cat(solved, 1)
        for start, gradients in self._read():
            scores[:, start : start + len(gradients)] = projected @ gradients.mT
        return over_all(space.params, scores)

    @functools.cached_property
    def _grams(self) -> list[Tensor]:
        """The projected Fisher matrix of each parameter."""
        sketch, device = self._sketch, self._sketch.space.local_params[0].device
        sizes = [columns.stop - columns.start for columns in sketch.columns.values()]
        sums = [torch.zeros((size, size), dtype=sketch.dtype, device=device) for size in sizes]
        for _, gradients in self._read():
            for total, columns in zip(sums, sketch.columns.values(), strict=True):
                total.addmm_(gradients[:, columns].mT, gradients[:, columns])
        return [over_all(sketch.space.params, total) / self.rows for total in sums]

    def _read(self) -> Iterable[tuple[int, Tensor]]:
        """Yields the rows of this rank's share of the files, with the index of the first."""
        sketch, start = self._sketch, 0
        rank, ranks = row_place(sketch.space.params)
        with failing_together([program_ranks(sketch.space.params)], "scores"):
            for i, (name, rows) in enumerate(self._files):
                if i % ranks == rank and rows:
                    gradients = torch.from_numpy(np.load(self.folder / name))
                    if gradients.shape != (rows, sketch.length) or gradients.dtype != sketch.dtype:
                        raise CheckpointError(f"{self.folder / name} is {gradients.dtype}, {tuple(gradients.shape)}")
                    yield start, gradients.to(sketch.space.local_params[0].device)
                start += rows
        agree([], program_ranks(sketch.space.params), "scores")


def store_gradients(
    folder: str | os.PathLike[str],
    losses: Losses,
    params: Any,
    batches: Iterable[Any] | None = None,
    *,
    size: int = 16,
    seed: int = 0,
) -> GradientStore:
    r"""Writes the projected gradients of all training rows to a folder; existing files are kept.

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
        raise ValueError(f"{name}: size must be an integer of 1 or more, got {size!r}")
    refuse_cut(params, name)
    check_batches(batches, params, name)
    sketch = Sketch(space, size, int_seed(seed))
    rank, ranks = row_place(params)
    fingerprint = made_of(space, name, losses, batches)
    _open_folder(path, sketch, fingerprint, ranks, None if batches is None else len(batches), name)  # type: ignore[arg-type]
    files = _files(path)
    count = json.loads((path / ABOUT).read_bytes())["batches"]
    if batches is not None:
        missing_here = [float((i, rank) not in files) for i in range(count)]
        missing = max_over_ranks(params, torch.tensor(missing_here, device=space.local_params[0].device)).tolist()
        with draws_restored(space.local_params):
            for i, batch in enumerate(each_of(batches, name, losses)):
                _write_batch(path, sketch, losses, batch, (i, rank), files, bool(missing[i]), name)
        agree([], program_ranks(params), name)
    return _complete(path, sketch, count, name)


class Sketch:
    """Random projections of gradients.

    Attributes:
        space: vectors like the gradient.
        columns: for each parameter, where its numbers are in a projected gradient.
        dtype: of projected gradients.
    """

    def __init__(self, space: Space, size: int, seed: int) -> None:
        self.space, self.size, self.seed, self.places = space, size, seed, owned_parameters(space)
        self.dtype = torch.float64 if any(x.dtype == torch.float64 for x in space.local_params) else torch.float32
        self.columns: dict[Key, slice] = {}
        stop = 0
        for key, parameter in self.places.items():
            start, stop = stop, stop + math.prod(min(n, size) for n in _matrix_shape(parameter))
            self.columns[key] = slice(start, stop)
        self.length = stop

    def bases(self, key: Key) -> tuple[Tensor | None, Tensor | None]:
        """The projections along both dimensions of a parameter, `[n, size]`; None for the identity."""
        parameter = self.places[key]

        def basis(side: int, n: int) -> Tensor | None:
            if n <= self.size:
                return None
            generator = torch.Generator(device="cpu").manual_seed(mixed(self.seed, "projection", parameter.path, side))
            values = torch.randn((n, self.size), generator=generator, dtype=torch.float64, device="cpu")
            return (values / self.size**0.5).to(parameter.unit.values.device, self.dtype)

        left, right = (basis(side, n) for side, n in enumerate(_matrix_shape(parameter)))
        return left, right

    def of_rows(self, key: Key, numel: int, uses: Sequence[Used]) -> Tensor:
        """Returns the projected gradients of some rows with respect to a parameter, a sum of uses."""
        shape, bases = _matrix_shape(self.places[key]), self.bases(key)
        pairs = [factors(shape, use) for use in single(uses)] if len(self.places[key].shape) > 1 else [None]
        if all(pair is not None for pair in pairs):
            projected = [self._of_factors(*pair, shape, bases) for pair in pairs if pair is not None]
            return torch.stack(projected).sum(0).flatten(1)
        gradients = [sum_of_uses(numel, uses, part).to(self.dtype) for part in row_slices(uses[0][0].rows, numel)]
        return torch.cat([rebased(g.view(-1, *shape), bases) for g in gradients]).flatten(1)

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
        """Returns the projection of a tree like the gradient, on all ranks."""
        device = self.space.local_params[0].device
        owned, full = (torch.zeros(self.length, dtype=self.dtype, device=device) for _ in range(2))
        keys = {parameter.block.name: key for key, parameter in self.places.items()}

        def of_block(block: OwnedBlock, x: Tensor) -> Tensor:
            key = keys[block.name]
            out = full if block.layout is None else owned
            out[self.columns[key]] = rebased(
                x.to(self.dtype).view(_matrix_shape(self.places[key])), self.bases(key)
            ).flatten()
            return x

        vector = [x.to(self.dtype) for x in self.space.read(gradient)]
        on_owner(self.space.moving, vector, of_block, work)
        return over_all(self.space.params, owned) + full


def _matrix_shape(parameter: OwnedParameter) -> tuple[int, int]:
    """A parameter's shape as a matrix; a vector is a column."""
    first, second = (*parameter.matrix, 1, 1)[:2]
    return first, second


class Projected(Receiver):
    """A receiver that projects the gradients of rows.

    Attributes:
        values: `[rows, numbers]`.
    """

    def __init__(self, sketch: Sketch, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(rows, dtype)
        self.sketch = sketch
        self.values = torch.zeros((rows, sketch.length), dtype=sketch.dtype, device=device)

    def add_gradients(self, key: Key, numel: int, rows: slice, uses: Sequence[Used]) -> None:
        """Projects the gradients of some rows."""
        if key in self.sketch.columns:  # else it has no elements
            self.values[rows, self.sketch.columns[key]] += self.sketch.of_rows(key, numel, uses)


# --- files ---


def _open_folder(
    folder: Path, sketch: Sketch, fingerprint: dict[str, float], ranks: int, batches: int | None, name: str
) -> None:
    """Writes the settings of a new folder, or compares those of an existing one."""
    space, about_path = sketch.space, folder / ABOUT
    settings: dict[str, Any] = {
        "size": sketch.size,
        "seed": sketch.seed,
        "parameters": {parameter.path: list(parameter.shape) for parameter in sketch.places.values()},
        "dtype": str(sketch.dtype),
        "of": fingerprint,
    }
    ranks_of = program_ranks(space.params)
    with failing_together([ranks_of], name, (OSError, ValueError, KeyError, CheckpointError)):
        stored = json.loads(about_path.read_bytes()) if about_path.exists() else None
        if stored is None and batches is None:
            raise CheckpointError(f"{name}: {folder} has no gradients: pass batches to write them")
        if stored is not None:
            if "of" not in stored:
                raise CheckpointError(f"{name}: {folder} does not say what it was made of: remove it, or pass another")
            expected = settings | ({} if batches is None else {"ranks": ranks, "batches": batches})
            if different := [key for key in expected if key != "of" and stored[key] != expected[key]]:
                differences = listed(f"{key}: {stored[key]}, not {expected[key]}" for key in different)
                raise CheckpointError(f"{name}: {folder} was written for other arguments: {differences}")
            compare_fingerprints(stored["of"], fingerprint, f"{name}: {folder}")
    agree([f"exists: {stored is not None}"], ranks_of, name)
    with failing_together([ranks_of], name, OSError):
        if stored is None and row_place(space.params)[0] == 0:
            folder.mkdir(parents=True, exist_ok=True)
            content = json.dumps({**settings, "ranks": ranks, "batches": batches}, indent=1)
            _publish_file(about_path, content.encode())
    agree([], ranks_of, name)


def _files(folder: Path) -> dict[tuple[int, int], tuple[str, int, str]]:
    """Returns the name, number of rows and batch digest of each file, by batch and rank."""
    files = {}
    for path in sorted(folder.glob("[0-9]*-[0-9]*-[0-9]*-*.npy")):
        batch, rank, rows, digest = path.stem.split("-")
        if (int(batch), int(rank)) in files:
            raise CheckpointError(f"{folder} has two files of batch {batch} of rank {rank}: ranks had different rows")
        files[int(batch), int(rank)] = path.name, int(rows), digest
    return files


def _write_batch(
    folder: Path,
    sketch: Sketch,
    losses: Losses,
    batch: tuple[Any, ...],
    file_id: tuple[int, int],
    files: Mapping[tuple[int, int], tuple[str, int, str]],
    missing: bool,
    name: str,
) -> None:
    """Writes the rows of one batch, unless all ranks have them; checks a stored batch's digest."""
    params = sketch.space.params
    arguments, rows = checked_batch(params, functools.partial(tuple, batch), name)
    crc = 0
    for leaf in rows.leaves:
        is_tensor = isinstance(leaf, Tensor)
        text = f"{leaf.dtype} {tuple(leaf.shape)}" if is_tensor else repr(leaf)
        crc = zlib.crc32(as_memoryview(leaf) if is_tensor else b"", zlib.crc32(text.encode(), crc))
    digest = f"{crc:08x}"
    error = None
    if file_id in files and files[file_id][2] != digest:
        index, rank = file_id
        error = CheckpointError(
            f"{name}: batch {index} of rank {rank} in {folder} was another one: {files[file_id][0]}"
        )
    lines = [f"rows: {digest}"] if row_place(params)[1] == 1 else []  # then all ranks have the same
    agree(lines, program_ranks(params), name, own_error=error, subject=_ALONE)
    if not missing:
        return
    compare_once(losses, params, arguments, name)
    receiver = Projected(sketch, max(rows.rows, 1), *dtype_and_device(params, rows))
    visit(losses, params, rows, receiver, name)
    with failing_together([program_ranks(params)], name, OSError):
        content = io.BytesIO()
        np.save(content, receiver.values[: rows.rows].cpu().numpy())
        _publish_file(folder / f"{file_id[0]:07}-{file_id[1]:05}-{rows.rows}-{digest}.npy", content.getvalue())


def _publish_file(path: Path, content: bytes) -> None:
    """Writes a file atomically; ranks with the same rows write the same content."""
    staging_path = path.with_name(f".{path.name}.{process_groups.global_rank()}.writing")
    write_whole(staging_path, content)
    os.replace(staging_path, path)
    sync(path.parent)


def _complete(folder: Path, sketch: Sketch, batches: int, name: str) -> GradientStore:
    files = _files(folder)
    ranks = json.loads((folder / ABOUT).read_bytes())["ranks"]
    expected = [(batch, rank) for batch in range(batches) for rank in range(ranks)]
    missing = [file_id for file_id in expected if file_id not in files]
    error = None
    if missing:
        error = CheckpointError(
            f"{name}: {folder} lacks {len(missing)} of {len(expected)} files, such as that of batch {missing[0][0]} of "
            f"rank {missing[0][1]}: pass the batches, on {ranks} ranks, and it goes on"
        )
    agree([], program_ranks(sketch.space.params), name, own_error=error)
    entries = [files[file_id][:2] for file_id in expected]
    return GradientStore(folder, sum(rows for _, rows in entries), entries, sketch)
