"""Second moments of what meets each matrix: of its inputs, of gradients of its outputs, and of its own gradient.

They are what pruning, quantising and merging layers need. Each is summed over ranks while the stage runs, and kept by
the rank that owns the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardfn.collectives.agree import agree
from shardfn.curvature.kronecker import gather
from shardfn.curvature.labels import Drawn
from shardfn.curvature.operators import check_batches
from shardfn.curvature.per_example import Losses
from shardfn.curvature.row_moments import Kind, Sums, places
from shardfn.curvature.vectors import Space
from shardfn.optim.norms import wide
from shardfn.optim.owners import Block, as_owner, on_owner, remembered, work
from shardfn.transforms.autodiff import name_of
from shardfn.transforms.fitting import together

INPUTS: dict[Kind, int] = {"linear": 1, "product": 0}  # the dimension of a matrix along which its inputs are


@dataclass(frozen=True, eq=False)
class Grams:
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

        def of_block(block: Block, x: Tensor) -> Tensor:
            if block.name not in self.inputs:
                return x
            flip = INPUTS[self.kinds[block.name]] == 0
            weight, gram = x.view(block.whole[0], -1), as_owner(self.inputs[block.name])
            given = weight.mT if flip else weight
            try:
                new = f(block.path, given, gram)
                if new.shape != given.shape:
                    raise ValueError(f"grams: {name_of(f)} returned {tuple(new.shape)} for {block.path}")
            except Exception as error:  # others wait for this rank
                errors.append(error)
                return x
            return (new.mT if flip else new).reshape(x.shape)

        space = self._space
        values = on_owner(space.moving, [x.to(wide(x)) for x in space.like], of_block, work)
        agree([], together(space.params), space.name, mine=next(iter(errors), None))
        return space.variables.tree(space.tangents(values))


def grams(
    losses: Losses | Drawn, params: Any, batches: Iterable[Any], *, outputs: bool = False, fisher: bool = False
) -> Grams:
    r"""The second moments of the inputs of each matrix, over all tokens of all rows of all ranks.

    Batches are read once, and each takes a forward and a backward pass. A rank holds the moments of the matrices that
    it owns, and while a stage runs those of this stage.

    Args:
        losses: as for `per_example`, or `Drawn`.
        params: as for `per_example`.
        batches: this rank's batches, as for `hvp`.
        outputs: whether to also find second moments of the gradients of outputs.
        fisher: whether to also find the diagonal of the mean over rows of :math:`g g^\top`: the empirical Fisher
            matrix, or with `Drawn` the Fisher matrix.

    Returns:
        `Grams`.

    Raises:
        TypeError, ValueError, RuntimeError: as `per_example` and `hvp`.

    Sources: Hassibi and Stork, Second order derivatives for network pruning: optimal brain surgeon (1992); Frantar and
        Alistarh, SparseGPT (2023); Kirkpatrick et al., Overcoming catastrophic forgetting in neural networks (2017).

    Example:
        ``pruned = grams(losses, params, batches).replaced(lambda path, weight, gram: prune(weight, gram))``
    """
    name = f"grams of {name_of(losses.model if isinstance(losses, Drawn) else losses)}"
    space = Space(params, name)
    space.agree(
        "grams", outputs=bool(outputs), fisher=bool(fisher), labels=losses.seed if isinstance(losses, Drawn) else None
    )
    check_batches(batches, params, name)
    wanted = {kind: (0, 1) if outputs else (dim,) for kind, dim in INPUTS.items()}
    each = places(space)
    sums = Sums(space, wanted, [key for key, at in each.items() if len(at.shape) > 1], list(each) if fisher else ())
    gather(sums, losses, batches, name, strict=False)
    found: dict[int, dict[str, Any]] = {0: {}, 1: {}}
    kinds, tokens, rest = {}, {}, []
    for key in sums.matrices:
        at, total = sums.places[key], sums.totals[key]
        if total.other or total.kind not in INPUTS:
            rest.append(at.path)
            continue
        kinds[at.path], tokens[at.path] = total.kind, total.tokens
        for dim in wanted[total.kind]:
            n = at.matrix[dim]
            kept = remembered(at.unit, at.block, at.owner, (n, n))
            if at.mine:
                as_owner(kept).copy_(total.moments[dim]).div_(total.tokens)
            found[int(dim != INPUTS[total.kind])][at.path] = kept
    diagonal = None
    if fisher:
        squares = {sums.places[key].block.name: total.squares for key, total in sums.totals.items()}
        scaled = on_owner(space.moving, space.zeros(), lambda block, x: squares[block.name].reshape(x.shape), work)  # type: ignore[union-attr]
        diagonal = space.written([x / sums.rows for x in scaled])
    return Grams(found[0], found[1], diagonal, kinds, tokens, sums.rows, tuple(rest), space)
