"""Second moments of the inputs and gradients of each matrix, on the rank that owns it.

`ekfac` makes of them the Fisher matrix in a Kronecker-factored eigenbasis, which can be inverted: each parameter is a
block of its own, whose owner decomposes its factors, and a product moves a vector there and back, as Muon does with
gradients. `second_moments` hands them out: of inputs, of gradients of outputs, and of a matrix's own gradient. They are
what pruning, quantizing and merging layers need. Each is summed over ranks while the stage runs.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardfn import checkpoint
from shardfn.collectives.agree import agree
from shardfn.curvature.labels import SampledLabels, batch_functions
from shardfn.curvature.operators import Operator, check_batches, each_of
from shardfn.curvature.per_example import Losses, checked_batch, compare_once, dtype_and_device, visit
from shardfn.curvature.resuming import begun, compare_fingerprints, made_of
from shardfn.curvature.row_axes import refuse_cut
from shardfn.curvature.row_moments import KINDS, Kind, OwnedParameter, Sums, Total, owned_parameters, rebased
from shardfn.curvature.row_uses import Key
from shardfn.curvature.vectors import Space, Vector, draws_restored
from shardfn.local_paths import local_path
from shardfn.optim.norms import wide
from shardfn.optim.owners import OwnedBlock, as_owner, eigh, on_owner, remembered, work
from shardfn.quoting import listed
from shardfn.transforms.autodiff import name_of
from shardfn.transforms.fitting import program_ranks

SIDES = ("left", "right")
KEPT: dict[str, tuple[str, ...]] = {"linear": SIDES, "product": SIDES, "table": ("right",)}  # bases, by kind


class Kronecker(Operator):
    r"""The mean over rows of :math:`g g^\top` in the basis of EK-FAC: an operator, which can be inverted.

    Attributes:
        kinds: by path, how a parameter is used: `"linear"` for a matrix `[outputs, inputs]`, `"product"` for one
            `[inputs, outputs]`, `"table"` for an embedding, and `"diagonal"`.
        rows: number of rows of the mean.
        state: a tree of flat shards, each on the rank that owns the parameter: by path, its eigenvectors as columns
            (`left`, of its first dimension, and `right`) and `values`, of the parameter's shape as a matrix.
    """

    def __init__(self, params: Any, kinds: Mapping[str, str], rows: float, state: Any, name: str) -> None:
        super().__init__(lambda v: self._through(v, lambda x, values: x * values), params, name)
        self.kinds, self.rows, self.state = kinds, rows, state

    def solve(self, v: Any, damping: float) -> Any:
        r""":math:`(F + \lambda)^{-1} v`.

        Args:
            v: a tree like the gradient or the parameters.
            damping: :math:`\lambda`, above 0.

        Returns:
            A tree like the gradient, in float32 or wider.

        Raises:
            ValueError: a damping that is not a finite number above 0, or differs between ranks; a tree of another kind.
        """
        self.space.agree("solve", damping=damping)
        if not isinstance(damping, (int, float)) or not 0 < damping < math.inf:
            raise ValueError(f"solve: damping must be a finite number above 0, got {damping!r}")
        return self._through(v, lambda x, values: x / (values + damping))

    def _through(self, v: Any, scaled: Callable[[Tensor, Tensor], Tensor]) -> Any:
        def of_block(block: OwnedBlock, x: Tensor) -> Tensor:
            block_state = as_owner(self.state[block.name])
            left, right = block_state.get("left"), block_state.get("right")
            y = x.to(block_state["values"].dtype).view(block_state["values"].shape)
            y = scaled(rebased(y, (left, right)), block_state["values"])
            product = rebased(y, [None if basis is None else basis.mT for basis in (left, right)])
            return product.reshape(x.shape)

        vector: Vector = [x.to(wide(x)) for x in self.space.read(v)]
        return self.space.written(on_owner(self.space.moving, vector, of_block, work))


def ekfac(
    losses: Losses | SampledLabels,
    params: Any,
    batches: Iterable[Any] | None,
    *,
    corrected: bool = True,
    diagonal: Collection[str] = (),
    folder: str | os.PathLike[str] | None = None,
) -> Kronecker:
    r"""An approximation of the Fisher matrix that can be inverted: EK-FAC, or K-FAC.

    The matrix is the mean over all rows of all ranks of :math:`g g^\top`, with g the gradient of a row's loss. Between
    parameters it is taken as 0; biases are parameters of their own. For a matrix in products, with inputs :math:`a` and
    gradients :math:`d` of outputs, the basis is that of the eigenvectors of :math:`\sum a a^\top` and :math:`\sum d
    d^\top`, over all rows, tokens and uses. For an embedding, the first of them is diagonal. The kernel
    of a convolution is a matrix `[outputs, inputs * kernel]`, whose inputs are patches. For parameters of one
    dimension, and those in `diagonal`, it is the identity. In this basis, EK-FAC has the mean of squares of rows'
    gradients, from a second pass over the batches. K-FAC has products of eigenvalues: of the mean over tokens of
    :math:`a a^\top`, and of the sum over tokens and mean over rows of :math:`d d^\top`.

    A rank holds the factors of the parameters that it owns, and while a stage runs those of this stage. They are
    summed over ranks after each batch.

    Args:
        losses: as for `per_example`; the labels in the batch give the *empirical* Fisher matrix. `SampledLabels` draws
            labels.
        params: as for `per_example`. They must not be overwritten meanwhile.
        batches: this rank's batches, as for `hvp`, which are read twice; or None to read a folder without comparing
            losses.
        corrected: whether values are those of EK-FAC.
        diagonal: paths of matrices whose basis is the identity.
        folder: a checkpoint, which is written if it is not there and read if it is, on any mesh. Then values of the
            parameters are compared with those that it was made with, and losses and gradients of the first batch,
            whose rows may be sharded over ranks in another way.

    Returns:
        A `Kronecker`.

    Raises:
        ValueError: on all ranks, a matrix that is not used whole, by products or by lookups, or that is used by both,
            such as a tied embedding; kernels of convolutions in groups. All of them may be in `diagonal`.
        TypeError, ValueError, RuntimeError: as `per_example` and `hvp`.
        CheckpointError: the folder is of other parameters, values of them, losses or arguments.

    Sources: Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate curvature (2015); George
        et al., Fast approximate natural gradient descent in a Kronecker-factored eigenbasis (2018); for tokens,
        Eschenhagen et al., Kronecker-factored approximate curvature for modern neural network architectures (2023);
        for convolutions, Grosse and Martens, A Kronecker-factored approximate Fisher matrix for convolution layers
        (2016).

    Example:
        ``step = ekfac(losses, params, batches).solve(gradient, damping=1e-3)``
    """
    name = f"ekfac of {name_of(losses.model if isinstance(losses, SampledLabels) else losses)}"
    space, path = Space(params, name), None if folder is None else local_path(folder, f"{name}: folder")
    parameters = owned_parameters(space)
    exists, labels = begun(path), f"drawn with seed {losses.seed}" if isinstance(losses, SampledLabels) else "given"
    settings: dict[str, Any] = {
        "corrected": bool(corrected), "diagonal": ", ".join(sorted(diagonal)), "labels": labels
    }  # fmt: skip
    error = _wrong(diagonal, parameters, name)
    if batches is None and not exists:
        error = error or ValueError(
            f"{name}: pass batches, as there is {f'nothing in {path}' if path else 'no folder'}"
        )
    extra = {"folder": path and str(path), "exists": exists, "batches": batches is not None}
    lines = [f"{key}: {value!r}" for key, value in {**settings, **extra}.items()]
    agree(lines, program_ranks(params), name, own_error=error)
    check_batches(batches, params, name)
    fingerprint = {} if path is None else made_of(space, name, losses, batches)
    if exists:
        assert path is not None, "it exists"
        return _read_factors(space, parameters, path, settings, fingerprint, name)
    assert batches is not None, "it was checked"
    fisher = _fitted(space, parameters, losses, batches, name, settings["corrected"], set(diagonal))
    if path is not None:
        contents: dict[str, Any] = {"asked": settings, "of": fingerprint}
        contents |= {"kinds": fisher.kinds, "rows": fisher.rows, "state": fisher.state}
        checkpoint.save(path, contents)
    return fisher


def _fitted(
    space: Space,
    parameters: dict[Key, OwnedParameter],
    losses: Losses | SampledLabels,
    batches: Iterable[Any],
    name: str,
    corrected: bool,
    diagonal: Collection[str],
) -> Kronecker:
    matrices = [
        key for key, parameter in parameters.items() if len(parameter.shape) > 1 and parameter.path not in diagonal
    ]
    factors = Sums(space, dict.fromkeys(KINDS, (0, 1)), matrices, [key for key in parameters if key not in matrices])
    gather(factors, losses, batches, name)
    kinds = {parameter.path: factors.totals[key].kind or "diagonal" for key, parameter in parameters.items()}
    state = _zeros(parameters, kinds)
    used = [key for key in matrices if factors.totals[key].kind is not None]
    for key, parameter in parameters.items():
        if parameter.is_owner:
            _decompose(as_owner(state[parameter.block.name]), factors.totals[key], factors.rows)
    if corrected:
        bases = {key: functools.partial(_bases, parameters[key], state, kinds) for key in used}
        squares = Sums(space, {}, (), used, bases)
        gather(squares, losses, batches, name)
        for key in used:
            if parameters[key].is_owner:
                values, sum_squares = as_owner(state[parameters[key].block.name])["values"], squares.totals[key].squares
                assert sum_squares is not None, "it was asked for"
                torch.div(sum_squares, squares.rows, out=values)
    return Kronecker(space.params, kinds, factors.rows, state, name)


def gather(
    sums: Sums, losses: Losses | SampledLabels, batches: Iterable[Any], name: str, *, strict: bool = True
) -> None:
    """Adds the rows of all batches to sums; compares the first batch as `per_example` does.

    Raises:
        ValueError: there are matrices without factors, if `strict`; no rows.
    """
    params = sums.params
    refuse_cut(params, name)
    call = losses.losses if isinstance(losses, SampledLabels) else losses
    with draws_restored(sums.space.local_params) as before:
        for index, batch in enumerate(each_of(batches, name, *batch_functions(losses))):
            arguments, rows = checked_batch(params, functools.partial(_labelled, losses, params, batch, index), name)
            if not index:
                compare_once(call, params, arguments, name)
                before.restore()  # each pass draws the same numbers
            visit(call, params, rows, sums.receiver(rows.rows, *dtype_and_device(params, rows)), name)
            unsupported = sums.refused()
            if strict and unsupported:
                raise ValueError(
                    f"{name}: the use of {listed(unsupported)} has no Kronecker factors: a matrix is used whole, by "
                    f"products or by lookups, but not by both, and not in parts. Freeze it, or pass its path in "
                    f"diagonal="
                )
    if not sums.rows:
        raise ValueError(f"{name}: no rank has rows")


def _labelled(losses: Losses | SampledLabels, params: Any, batch: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return losses.labeled(params, batch, index) if isinstance(losses, SampledLabels) else batch


def _wrong(diagonal: Collection[str], parameters: dict[Key, OwnedParameter], name: str) -> Exception | None:
    if isinstance(diagonal, str):
        return TypeError(f"{name}: diagonal={diagonal!r}; it is a collection of paths, [{diagonal!r}] for one")
    paths = {parameter.path for parameter in parameters.values()}
    unknown = sorted(set(diagonal) - paths)
    if unknown:
        return ValueError(f"{name}: no parameter is called {listed(unknown)}; there are {listed(sorted(paths))}")
    return None


# --- stored state ---


def _zeros(parameters: dict[Key, OwnedParameter], kinds: Mapping[str, str]) -> dict[str, Any]:
    def zeros(parameter: OwnedParameter) -> Any:
        shapes = _factor_shapes(parameter, kinds[parameter.path]) | {"values": parameter.matrix}
        return remembered(parameter.unit, parameter.block, parameter.owner, shapes)

    return {parameter.block.name: zeros(parameter) for parameter in parameters.values()}


def _factor_shapes(parameter: OwnedParameter, kind: str) -> dict[str, tuple[int, ...]]:
    return {side: (parameter.matrix[i],) * 2 for i, side in enumerate(SIDES) if side in KEPT.get(kind, ())}


def _read_factors(
    space: Space,
    parameters: dict[Key, OwnedParameter],
    folder: Path,
    settings: dict[str, Any],
    fingerprint: dict[str, float],
    name: str,
) -> Kronecker:
    kinds = {parameter.path: "" for parameter in parameters.values()}
    template = {"asked": settings, "of": fingerprint, "kinds": kinds, "rows": 0.0}
    stored = checkpoint.load(folder, template, ignore=r"state\..*")
    if stored["asked"] != settings:
        raise checkpoint.CheckpointError(
            f"ekfac: {folder} is of a call with {stored['asked']}; this call has {settings}"
        )
    compare_fingerprints(stored["of"], fingerprint, f"ekfac: {folder}")
    loaded = checkpoint.load(folder, stored | {"state": _zeros(parameters, stored["kinds"])})
    return Kronecker(space.params, loaded["kinds"], loaded["rows"], loaded["state"], name)


def _decompose(block_state: dict[str, Tensor], total: Total, rows: float) -> None:
    """Writes the eigenvectors and eigenvalues of a matrix's factors; or squares, where it has none."""
    values = [torch.zeros_like(block_state["values"])] if total.squares is None else [total.squares]
    if total.kind is not None:
        values = [total.moments.pop(i) for i in range(len(SIDES))]
        for i, side in enumerate(SIDES):
            if side in block_state:
                eigenvalues, vectors = eigh(values[i])
                block_state[side].copy_(vectors)
                values[i] = eigenvalues.clamp(min=0)
        values = [torch.outer(*values) / total.tokens]
    block_state["values"].copy_(values[0] / rows)


def _bases(parameter: OwnedParameter, state: dict[str, Any], kinds: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns the eigenvectors of a matrix's factors on its owner, and zeros on other ranks."""
    shapes, template = _factor_shapes(parameter, kinds[parameter.path]), parameter.unit.values
    if parameter.is_owner:
        block_state = as_owner(state[parameter.block.name])
        return {side: block_state[side] for side in shapes}
    return {side: template.new_zeros(shape, dtype=wide(template)) for side, shape in shapes.items()}


# --- second moments ---

INPUTS: dict[Kind, int] = {"linear": 1, "product": 0}  # the dimension of a matrix along which its inputs are


@dataclass(frozen=True, eq=False)
class SecondMoments:
    r"""Second moments, over all rows of all ranks.

    Attributes:
        inputs: by path of each matrix in products or convolutions, the mean of :math:`a a^\top` over the vectors
            :math:`a` that it met, `[inputs, inputs]`: flat shards, whole on the rank that owns the matrix; `sf.unshard`
            gives them on all. Those of a convolution are patches.
        outputs: the same of gradients of rows' losses with respect to its outputs, `[outputs, outputs]`; empty unless
            asked for.
        fisher: the mean over rows of squares of the elements of their gradients: a tree like the gradient; None unless
            asked for.
        kinds: by path, whether a matrix is `"linear"`, `[outputs, inputs]`, or in a `"product"`, `[inputs, outputs]`.
        tokens: by path, how many vectors a matrix met.
        rows: the number of rows.
        left_out: paths of the other parameters of two or more dimensions: those that no product uses, and those that
            are used in parts, both as they are and transposed, or in other ways too.
    """

    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    fisher: Any
    kinds: Mapping[str, Kind]
    tokens: Mapping[str, float]
    rows: float
    left_out: tuple[str, ...]
    _space: Space = field(repr=False)

    def replaced(self, f: Callable[[str, Tensor, Tensor], Tensor]) -> Any:
        """The parameters, with another matrix in place of each that has a second moment of inputs.

        The rank that owns a matrix computes it, and returns it to those that hold it.

        Args:
            f: `(path, weight, gram) -> weight`, with a weight `[outputs, inputs]` and a gram `[inputs, inputs]`.

        Returns:
            A tree like the parameters; those without such a moment have the same numbers.

        Raises:
            ValueError: f returns another shape.
            Exception: what f raises, on its rank, and a ValueError on others.
        """
        errors: list[Exception] = []

        def of_block(block: OwnedBlock, x: Tensor) -> Tensor:
            if block.name not in self.inputs:
                return x
            flip = INPUTS[self.kinds[block.name]] == 0
            matrix, gram = x.view(block.whole[0], -1), as_owner(self.inputs[block.name])
            weight = matrix.mT if flip else matrix
            try:
                new = f(block.path, weight, gram)
                if new.shape != weight.shape:
                    raise ValueError(f"second_moments: {name_of(f)} returned {tuple(new.shape)} for {block.path}")
            except Exception as error:  # others wait for this rank
                errors.append(error)
                return x
            return (new.mT if flip else new).reshape(x.shape)

        space = self._space
        values = on_owner(space.moving, [x.to(wide(x)) for x in space.local_params], of_block, work)
        agree([], program_ranks(space.params), space.name, own_error=next(iter(errors), None))
        return space.variables.tree(space.tangents(values))


def second_moments(
    losses: Losses | SampledLabels, params: Any, batches: Iterable[Any], *, outputs: bool = False, fisher: bool = False
) -> SecondMoments:
    r"""The second moments of the inputs of each matrix, over all tokens of all rows of all ranks.

    Batches are read once, and each takes a forward and a backward pass. A rank holds the moments of the matrices that
    it owns, and while a stage runs those of this stage.

    Args:
        losses: as for `per_example`, or `SampledLabels`.
        params: as for `per_example`.
        batches: this rank's batches, as for `hvp`.
        outputs: whether to also find second moments of the gradients of outputs.
        fisher: whether to also find the diagonal of the mean over rows of :math:`g g^\top`: the empirical Fisher
            matrix, or with `SampledLabels` the Fisher matrix.

    Returns:
        `SecondMoments`.

    Raises:
        TypeError, ValueError, RuntimeError: as `per_example` and `hvp`.

    Sources: Hassibi and Stork, Second order derivatives for network pruning: optimal brain surgeon (1992); Frantar and
        Alistarh, SparseGPT (2023); Kirkpatrick et al., Overcoming catastrophic forgetting in neural networks (2017).

    Example:
        ``pruned = second_moments(losses, params, batches).replaced(lambda path, weight, gram: prune(weight, gram))``
    """
    name = f"second_moments of {name_of(losses.model if isinstance(losses, SampledLabels) else losses)}"
    space = Space(params, name)
    labels = losses.seed if isinstance(losses, SampledLabels) else None
    space.agree("second_moments", outputs=bool(outputs), fisher=bool(fisher), labels=labels)
    check_batches(batches, params, name)
    dims = {kind: (0, 1) if outputs else (dim,) for kind, dim in INPUTS.items()}
    parameters = owned_parameters(space)
    matrices = [key for key, parameter in parameters.items() if len(parameter.shape) > 1]
    sums = Sums(space, dims, matrices, list(parameters) if fisher else ())
    gather(sums, losses, batches, name, strict=False)
    moments: dict[int, dict[str, Any]] = {0: {}, 1: {}}
    kinds, tokens, left_out = {}, {}, []
    for key in sums.matrices:
        parameter, total = sums.places[key], sums.totals[key]
        if total.other or total.kind not in INPUTS:
            left_out.append(parameter.path)
            continue
        kinds[parameter.path], tokens[parameter.path] = total.kind, total.tokens
        for dim in dims[total.kind]:
            n = parameter.matrix[dim]
            moment = remembered(parameter.unit, parameter.block, parameter.owner, (n, n))
            if parameter.is_owner:
                as_owner(moment).copy_(total.moments[dim]).div_(total.tokens)
            moments[int(dim != INPUTS[total.kind])][parameter.path] = moment
    diagonal = None
    if fisher:
        squares = {sums.places[key].block.name: total.squares for key, total in sums.totals.items()}
        scaled = on_owner(space.moving, space.zeros(), lambda block, x: squares[block.name].reshape(x.shape), work)  # type: ignore[union-attr]
        diagonal = space.written([x / sums.rows for x in scaled])
    return SecondMoments(moments[0], moments[1], diagonal, kinds, tokens, sums.rows, tuple(left_out), space)
