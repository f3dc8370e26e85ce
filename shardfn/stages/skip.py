"""Taking part in a stage without computing it, on ranks that have nothing for it to do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.compat import dynamo
from shardfn.stages.stage import Made, made


def skip(stage: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tensor:
    """Takes part in other ranks' call of a stage without computing: in its gather, and with zeros in its gradient.

    All ranks call the same stages in the same order. A rank that has no use for one, such as a layer of an image
    encoder when its batch has no images, skips it at the place where other ranks call it.

    Args:
        stage: what `shardfn.stage` returned; or, inside a call of what `interop.functional` returned, a module that is
            one of its stages, whose parameters that call has.
        *args: the parameters, at the same places among the arguments as in a call. Of other tensors the values are not
            used, only whether they need a gradient: pass on the zero from the layer before, as a call would get that
            layer's result. Where the parameters are frozen, backward comes here only for such a tensor.
        **kwargs: the same for arguments that are passed by name.

    Returns:
        A zero: 0-d, in bfloat16 or the stage's `output_dtype`, with a derivative of zero in all arguments. Use the last
        one as the others use the result, or add it to the loss: by it this rank's backward comes to the stages that it
        skipped. Only `value_and_grad`, `grad` and `accumulate` find them without it, where no other transform runs
        around them; a derivative of a derivative needs it used as the result is.

    Raises:
        TypeError: something other than a stage.
        torch._dynamo.exc.UserError: under `torch.compile`, where all ranks run one graph.

    Example:
        ``run = block if has_images else partial(sf.skip, block)``, then
        ``for p in sf.layers(params["images"]): x = run(p, x)``
    """
    if torch.compiler.is_compiling():
        with dynamo.one_graph():
            dynamo.refuse_in_graph(
                "skip: under torch.compile all ranks run the same graph, so none can skip a stage: compile the "
                "function inside the stage, shardfn.stage(torch.compile(f)), and call skip outside"
            )
    own = getattr(getattr(stage, "forward", None), "_shardfn_skip", None)
    if own is not None:
        zero: Tensor = own(*args, **kwargs)
        return zero
    what: Made | None = getattr(stage, "_shardfn_made", None)
    if what is None or getattr(stage, "__wrapped__", None) is not what.function:
        raise TypeError(
            f"skip: {getattr(stage, '__name__', stage)!r} is not a stage, but a {type(stage).__name__}: pass what "
            f"shardfn.stage returned, and then the parameters"
        )
    if what.skipping is None:
        what.skipping = made(what.name, _zero(what.function), what.options, computes=False)
    result: Tensor = what.skipping(*args, **kwargs)
    return result


def _zero(function: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of a function, as which it is known: zero, with derivatives of zero in all arguments."""

    @functools.wraps(function)
    def zero(*args: Any, **kwargs: Any) -> Tensor:
        total = torch.zeros((), dtype=torch.bfloat16)  # no loss becomes wider when it is added
        for x in optree.tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
                nothing = (x if x.ndim else x.view(1))[..., :0]  # a product with 0 would be nan for inf
                total = total + nothing.sum().real
        # Not linear, so that derivatives of derivatives come here, too, on all ranks or on none.
        return torch.expm1(total).to(torch.bfloat16)

    return zero
