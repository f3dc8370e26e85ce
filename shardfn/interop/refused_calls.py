"""What a module must not do while it is called, and what is said when it does."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor, nn

from shardfn.collectives.agree import agree
from shardfn.compat import autograd, functorch
from shardfn.interop import recorders
from shardfn.interop.anatomy import Part, Slot, left_in
from shardfn.interop.refused import OF_TORCH, disables_checkpointing, tensors_in
from shardfn.interop.structures import is_cache
from shardfn.mesh.scope import mesh_of
from shardfn.mesh.spec import joined
from shardfn.shards.layout import is_flat
from shardfn.stages.returned import keeps_numbers


def refuse_again(path: str) -> None:
    """Raises RuntimeError where checkpointing of the module's own runs a stage in backward."""
    if autograd.inside_backward():
        raise RuntimeError(
            f"{path} runs again in backward, outside of a call of the model, as torch.utils.checkpoint does: leave the "
            f"checkpointing out of the module, and pass remat=True to functional"
        )


def refuse_written(part: Part, leaves: Sequence[Any], now: tuple[Sequence[Any], int], form: int) -> None:
    """Raises RuntimeError if a module wrote into a list, dict or dataclass that it was given."""
    if now[1] != form or any(a is not b for a, b in zip(leaves, now[0], strict=True)):
        raise RuntimeError(
            f"{part.path} ({type(part.module).__name__}) writes into a list, dict or dataclass among its arguments. A "
            f"stage gets a copy, since it may run again in backward, and what it writes would be lost: let its forward "
            f"return it, or choose stages= so that whoever made it and whoever writes into it are in one stage"
        )


def refuse_rebound(part: Part, there: Sequence[tuple[Slot, Any]]) -> None:
    """Raises RuntimeError if a module put another parameter into the place of one, unless it has the same numbers."""
    for slot, value in there:
        now = left_in(part, slot)
        if now is not value and not keeps_numbers(now, value):
            raise RuntimeError(
                f"{part.path} ({type(part.module).__name__}) puts something else in the place of its parameter "
                f"{joined(part.path, slot.key)}, which would be lost: what is there during a call is lent. Let forward "
                f"compute with a new tensor, and change parameters outside of the model, by an optimizer or in the tree"
            )


def refuse_caches(part: Part, leaves: Sequence[Any]) -> None:
    """Raises TypeError where a stage is given a cache."""
    for x in leaves:
        if is_cache(x):
            raise TypeError(
                f"{part.path} is given a {type(x).__name__}, into which it would write activations while gradients are "
                f"recorded: pass use_cache=False to the model (or set it in its config), or generate under "
                f"torch.no_grad()"
            )


def refuse_hooks(part: Part) -> None:
    """Under torch.func's own transforms nobody sees what a hook kept; `sf.grad` and backward() look for it."""
    for path, m in part.module.named_modules():
        hooks = (*m._forward_hooks.values(), *m._forward_pre_hooks.values()) if path else ()  # a stage's run outside
        for hook in hooks:
            if not getattr(hook, "__module__", "").startswith((recorders.HOOKS, "torch.")):
                raise RuntimeError(
                    f"{part.path}.{path} has a forward hook, {getattr(hook, '__qualname__', hook)}, inside a stage: "
                    f"under torch.func what it keeps would have no gradient, silently. Put it on the stage's module "
                    f"{part.path}, remove it, or use shardfn.grad, which raises an error if what it kept is used"
                )


def refuse_kept(part: Part, given: Sequence[Any]) -> None:
    """Likewise for attributes, and for objects that it was given."""
    for path, m in part.module.named_modules():
        for name, held in vars(m).items():
            if name in (*OF_TORCH, *_NOT_KEPT) or not any(map(_computed, tensors_in(held, objects=True))):
                continue
            if f"{name}_g" in m._parameters or f"{name}_orig" in m._parameters:
                continue  # a weight that is computed before each forward
            raise RuntimeError(
                f"{joined(part.path, path)} keeps a tensor that it computed in its attribute {name!r}: under "
                f"torch.func its gradient would be lost, silently. Let forward return it, or keep x.detach()"
            )
    for x in given:
        if not isinstance(x, Tensor) and any(map(_computed, tensors_in(x, objects=True))):
            raise RuntimeError(
                f"{part.path} is given a {type(x).__name__}, in which there are tensors with a gradient when it has "
                f"run: under torch.func the gradient of what a stage keeps in an object would be lost, silently. Pass "
                f"tensors, in tuples, dicts or dataclasses, and return them"
            )


_NOT_KEPT = ("forward", "_flat_weights")


def _computed(x: Tensor) -> bool:
    return x.requires_grad and (not x.is_leaf or functorch.wrapped(x))


def refuse_checkpointing(model: nn.Module, modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Raises TypeError where a model of `transformers` checkpoints by itself."""
    for path, m in modules:
        if getattr(m, "gradient_checkpointing", False) is True and m.training:
            raise TypeError(
                f"{path or type(m).__name__} checkpoints activations by itself, inside which a stage cannot run: call "
                f"model.module.{disables_checkpointing(model)}(), and pass remat=True to functional"
            )


def drawn_layers(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where a model of `transformers` says how often it leaves layers out in training: modules, configurations."""
    owners = {
        id(one): one for m in model.modules() for one in (vars(m), vars(getattr(m, "config", None) or nn.Module()))
    }
    return [(one, name) for one in owners.values() for name in one if str(name).endswith("layerdrop")]


def refuse_apart(model: nn.Module, drawn: Sequence[tuple[dict[str, Any], str]], params: Any) -> None:
    """Raises ValueError on every rank where layers are left out by numbers that ranks would draw differently."""
    said = next((f"{name}={own[name]}" for own, name in drawn if isinstance(own[name], float) and own[name] > 0), "")
    if not (said and model.training):
        return
    flats = [x for x in optree.tree_leaves(params, is_leaf=is_flat) if is_flat(x)]
    if not flats or torch.compiler.is_compiling() or any(x.layout.placement.only_at for x in flats):
        return
    state = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).hexdigest()
    agree(
        [f"a state {state}"],
        mesh_of(flats[0].layout.grid, "the model"),
        type(model).__name__,
        subject=(
            f"torch's random numbers, by which it leaves layers out while it trains ({said}),",
            f"All ranks leave out the same layers: call torch.manual_seed with the same number on every rank before "
            f"the call, or set {said.partition('=')[0]} to 0.0 in the model and its configuration",
        ),
    )
