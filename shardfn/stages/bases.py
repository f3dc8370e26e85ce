"""A basis of tangents that each rank made for its own shard, as `torch.func.jacfwd` does: nobody's columns come out."""

from __future__ import annotations

import torch
from torch import Tensor

from shardfn.collectives import functional
from shardfn.collectives.ledger import unscheduled
from shardfn.compat import functorch
from shardfn.shards.layout import Layout


def refuse_bases(values: Tensor, layout: Layout) -> None:
    """Raises RuntimeError where a shard's tangents are a basis on each rank at once.

    Of tangents of the whole parameters, a unit vector is one on a single rank, and zero on the others.
    """
    for tangents in functorch.tangents(values) if functorch.batching() else ():
        if tangents.ndim != 2:
            continue
        with functorch.outside_transforms(), unscheduled(), torch.no_grad():
            units = (tangents.count_nonzero(-1) == 1) & (tangents.sum(-1) == 1)
            places = tangents[units].argmax(-1)
            units &= len(places) > 1 and len(places.unique()) == len(places)
            ranks = functional.psum(units.to(torch.float32), layout.placement.axes)
            together = bool((ranks == layout.size).any() and ((ranks == layout.size) | (ranks == 0)).all())
        if together:
            raise RuntimeError(
                f"{layout.stage!r} is cut over {' x '.join(layout.placement.axes)}, and its tangents are a basis of "
                f"{len(tangents)} unit vectors on each of these {layout.size} ranks at once, as torch.func.jacfwd and "
                f"torch.func.hessian make them: what comes out are sums of {layout.size} columns. Use shardfn.jacfwd, "
                f"shardfn.jacrev or shardfn.hessian"
            )
