"""Leaves of the graph of one run of a function, which nobody else may differentiate."""

from __future__ import annotations

from torch import Tensor


def owned(x: Tensor, need: bool, stage: str, checked: bool = False) -> Tensor:
    """A leaf of the graph of one run of a stage, which nobody else may differentiate.

    Whoever tries by `backward()` gets an error from it; `checked` says that somebody looks before.
    """
    if need:
        x.requires_grad_()
        x._shardfn_stage = stage  # type: ignore[attr-defined]
        if not checked:
            x.register_post_accumulate_grad_hook(_escaped)
    return x


def owner(x: Tensor) -> str | None:
    """The stage whose graph a leaf belongs to; None if it is nobody's."""
    return getattr(x, "_shardfn_stage", None)


def escaped(stage: str) -> RuntimeError:
    """What is wrong with a loss that reaches into a stage."""
    return RuntimeError(
        f"stage {stage!r}: the loss depends on a tensor that this stage's function computed but did not return: a "
        f"hook, an attribute or a list kept it. Its gradient would be lost. Return it from the stage, "
        f"or keep y.detach().clone() of it; where numbers are read too late, SHARDFN_DEBUG=memory shows nan"
    )


def _escaped(leaf: Tensor) -> None:
    leaf.grad = None
    raise escaped(owner(leaf) or "")
