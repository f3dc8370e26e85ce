"""The options of `stage`, and checks of their values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from shardfn.quant.formats import Format, check_format
from shardfn.tiers.activations import Offload, offload

Remat = bool | Literal["offload"] | Offload | Callable[..., Any] | Sequence[Any]


@dataclass(frozen=True)
class Options:
    """The arguments of `stage`."""

    remat: Any = False
    reshard: bool | Literal["step"] | None = None
    prefetch: int = 1
    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    gather_format: Format | None = None
    reduce_format: Format | None = None
    input_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None

    @functools.cached_property
    def recomputes(self) -> bool:
        """Whether backward runs the function again."""
        return self.remat.recompute if isinstance(self.remat, Offload) else self.remat is not False

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of shards with this dtype are summed."""
        return self.reduce_dtype if self.reduce_dtype and dtype.is_floating_point else dtype

    def checked(self) -> Options:
        """The same options, checked, with `remat` as a bool, an `Offload`, or a function that returns contexts.

        Raises:
            ValueError, TypeError: an option has a value that it cannot have.
        """
        remat = offload() if isinstance(self.remat, str) and self.remat == "offload" else self.remat
        if remat is offload:
            raise TypeError(
                "stage: remat=offload is the function that makes a value: remat=offload(), or offload('disk')"
            )
        if isinstance(remat, (list, tuple)) and any(isinstance(op, bool) for op in remat):
            raise TypeError(
                f"stage: remat must be one value, or a list of operations whose results are kept, got {remat!r}. For "
                f"layers in turn make a stage for each, or pass functional(module, stages={{pattern: dict(remat=...)}})"
            )
        if callable(remat) or (isinstance(remat, (list, tuple)) and remat):  # each call makes its contexts from it
            policy = remat if callable(remat) else list(remat)
            remat = functools.partial(create_selective_checkpoint_contexts, policy)
        elif not isinstance(remat, (bool, Offload)):
            raise TypeError(
                f'stage: remat must be True, False, offload(...), "offload", a policy or a list of ops, got {remat!r}'
            )
        if not isinstance(self.prefetch, int) or isinstance(self.prefetch, bool) or self.prefetch < 0:
            raise ValueError(f"stage: prefetch must be a number of gathers, 0 or more, got {self.prefetch!r}")
        if self.reshard not in (None, True, False, "step"):
            raise ValueError(
                f'stage: reshard must be True, False, "step", or None for the strategy\'s value, got {self.reshard!r}'
            )
        for name in ("gather_format", "reduce_format"):
            check_format(getattr(self, name), f"stage: {name}")
        for name in ("gather_dtype", "reduce_dtype", "input_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"stage: {name} must be a floating-point torch.dtype or None, got {dtype!r}")
            if dtype is not None and dtype.itemsize == 1:
                other = "scale and cast inside the stage's function"
                if name in ("gather_dtype", "reduce_dtype"):
                    other = f"{name.removesuffix('dtype')}format=shardfn.quant.fp8_e4m3()"
                raise ValueError(
                    f"stage: {name}={dtype}: numbers of 8 bits need a scale, without which they are off by a tenth or "
                    f"overflow: use torch.bfloat16, or {other}"
                )
        return replace(self, remat=remat)
