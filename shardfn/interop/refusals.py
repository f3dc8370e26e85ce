"""Errors for modules that cannot be taken apart, and for what a module must not do while it is called.

A module is refused if it would go on using values that training no longer updates.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import optree
import torch
from torch import Tensor, nn

from shardfn.collectives.agree import agree
from shardfn.compat import autograd, dispatch, dynamo, functorch
from shardfn.compat.autograd import storage_of
from shardfn.interop import output_capturing
from shardfn.interop.placeholder import ModulePart, Placeholder, Slot, given_as_it_is, left_in
from shardfn.interop.pytrees import is_cache
from shardfn.mesh.scope import mesh_of
from shardfn.mesh.spec import is_dtensor, joined
from shardfn.quoting import listed
from shardfn.shards.layout import flat_shards
from shardfn.stages.written import keeps_numbers

OF_TORCH = ("_parameters", "_buffers", "_modules")


def aliases(module: nn.Module, known: Mapping[int, Tensor]) -> Iterator[tuple[Any, Any, int]]:
    """Yields where else modules keep parameters, as recurrent ones do: a list or dict, the key in it, the id of one.

    Raises:
        TypeError: a parameter is kept where it cannot be replaced.
    """
    for path, m in module.named_modules():
        for attribute, value in vars(m).items():
            if attribute in OF_TORCH:
                continue
            nested = [] if isinstance(value, (list, dict)) else [value]
            for key, item in value.items() if isinstance(value, dict) else enumerate(() if nested else value):
                if not isinstance(item, Tensor):
                    nested.append(item)
                elif known.get(id(item)) is item:
                    yield value, key, id(item)
            if any(known.get(id(x)) is x for x in tensors_in(*nested)):
                raise TypeError(
                    f"functional: {path or 'the module'} keeps a parameter in its attribute {attribute!r}, where it "
                    f"would stay when others are used: let its forward read the parameter itself"
                )


_MOST = 10_000  # objects that `tensors_in` visits


def tensors_in(*values: Any, objects: bool = False) -> Iterator[Tensor]:
    """Yields tensors reachable from values through containers, dataclasses and functions, but not through modules.

    Args:
        values: anything.
        objects: whether to follow attributes of objects of any class.
    """
    pending, visited = list(values), set[int]()
    while pending and len(visited) < _MOST:
        value = pending.pop()
        if id(value) in visited or isinstance(value, _PLAIN):
            continue
        visited.add(id(value))
        if isinstance(value, Tensor):
            yield value
        else:
            pending += _held_by(value, objects)


_PLAIN = (str, bytes, int, float, complex, type(None), type, types.ModuleType, torch.dtype, torch.device, nn.Module)


def _held_by(value: Any, objects: bool) -> Sequence[Any]:
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [x for x in value]  # noqa: C416 - `list` asks for a length, which a subclass may refuse
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, types.FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell != types.CellType()]  # an empty cell has no contents
        return [*(cell.cell_contents for cell in cells), *(value.__defaults__ or ())]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if objects or isinstance(value, types.SimpleNamespace) or dataclasses.is_dataclass(value):
        return list(getattr(value, "__dict__", {}).values())
    return ()


def refuse_shared_memory(module: nn.Module, named: Sequence[tuple[str, Tensor]]) -> None:
    """Raises ValueError if a parameter shares memory with another parameter, or with another tensor of a module.

    In the tree each would be a separate tensor, and shared numbers would diverge.
    """
    owners: dict[int, list[tuple[str, Tensor]]] = {}
    parameters = {id(p): name for name, p in reversed(named)}
    for name, p in named:
        if parameters[id(p)] == name and p.layout is torch.strided:
            owners.setdefault(storage_of(p), []).append((name, p))
    candidates = list(module.named_buffers())
    for path, m in module.named_modules():
        attrs = {attr: x for attr, x in vars(m).items() if attr not in OF_TORCH}
        candidates += [(joined(path, attr), t) for attr, x in attrs.items() for t in tensors_in(x) if t.grad_fn is None]
    for name, x in candidates:
        if x.layout is torch.strided and id(x) not in parameters and storage_of(x) in owners:
            owners[storage_of(x)].append((name, x))
    for sharing in owners.values():
        for i, (name, x) in enumerate(sharing):
            other = next((other for other, y in sharing[:i] if _overlap(x, y)), None)
            if other is not None:
                raise ValueError(
                    f"functional: {other} and {name} are two tensors of shapes {tuple(dict(sharing)[other].shape)} and "
                    f"{tuple(x.shape)} that share memory, but would get different values. Make them one "
                    f"parameter and take the view in forward, or clone() one"
                )


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of the same storage have an element in common."""
    if not x.numel() or not y.numel():
        return False
    (low, high), (start, stop) = _extent(x), _extent(y)
    if high <= start or stop <= low:
        return False
    if x.dtype != y.dtype:
        return True
    begin, width = min(low, start), x.element_size()
    occupied = torch.zeros((max(high, stop) - begin) // width, dtype=torch.bool, device="cpu")
    occupied.as_strided(x.shape, x.stride(), (low - begin) // width).fill_(True)
    return bool(occupied.as_strided(y.shape, y.stride(), (start - begin) // width).any())


def _extent(x: Tensor) -> tuple[int, int]:
    """The first byte in the storage, and the end."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    first = x.storage_offset()
    return int(first) * x.element_size(), int(first + last + 1) * x.element_size()


def disables_checkpointing(module: object) -> str:
    """The name of the `transformers` method that disables its checkpointing, which depends on the version."""
    newer = "activation_checkpointing_disable"
    return newer if hasattr(module, newer) else "gradient_checkpointing_disable"


def refuse_taken(module: nn.Module) -> None:
    """Raises TypeError for a module that cannot be taken apart."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"functional: the module is of type {type(module).__name__}, not a torch.nn.Module")
    for path, m in module.named_modules():
        where = f"{path} ({type(m).__name__})" if path else type(m).__name__
        for name, p in m._parameters.items():
            if p is not None:
                _refuse_parameter(p, name, where)
        _refuse_module(m, where, module)


def _is_plain(kind: type) -> bool:
    """Whether a parameter class computes as `nn.Parameter` does, or is of bitsandbytes, which is handled elsewhere."""
    ordinary = nn.Parameter.__torch_function__
    return issubclass(kind, nn.Parameter) and (
        getattr(kind, "__torch_function__", ordinary) is ordinary or kind.__module__.startswith("bitsandbytes.")
    )


def _refuse_parameter(p: Tensor, name: str, where: str) -> None:
    if isinstance(p, Placeholder):
        raise TypeError(
            f"functional: the parameters of {where} were taken out before: one shell serves as many sets of "
            f"parameters as you like, so use what `functional` returned then"
        )
    if is_dtensor(p):
        raise TypeError(
            f"functional: {name} of {where} is a DTensor, as after fully_shard: pass the module as it was "
            f"before, and let shardfn.shard cut the parameters"
        )
    if isinstance(p, nn.parameter.UninitializedParameter):
        raise TypeError(
            f"functional: {name} of {where} has no shape yet: run the module once, so that lazy modules know "
            f"their inputs"
        )
    if dispatch.fake(p) and not dispatch.ordinary(p):
        raise TypeError(
            f"functional: {name} of {where} is a fake tensor, which has no values and belongs to its fake-tensor mode: "
            f"build the module on the meta device (with torch.device('meta')), or outside the mode"
        )
    if not (_is_plain(type(p)) or dispatch.ordinary(p)):
        raise TypeError(
            f"functional: {name} of {where} is of class {type(p).__name__}, which has custom operations; stages "
            f"compute with plain tensors. Pass the module with plain parameters, and quantize them by shardfn.quant"
        )
    if p._backward_hooks or p._post_accumulate_grad_hooks:
        raise TypeError(
            f"functional: {name} of {where} has a hook on its gradient (register_hook or "
            f"register_post_accumulate_grad_hook), which would never run. Remove it, and apply it to the gradients "
            f"that shardfn.grad returns"
        )


def _refuse_module(m: nn.Module, where: str, module: nn.Module) -> None:
    if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and (m.sparse or m.max_norm is not None):
        raise TypeError(
            f"functional: {where} has {'sparse=True' if m.sparse else 'max_norm'}, by which "
            f"{'its gradient is sparse' if m.sparse else 'its forward writes into its weight'}: set it to "
            f"{'False' if m.sparse else 'None'}, since stages have dense gradients and change no parameters"
        )
    if isinstance(m, torch.jit.ScriptModule):
        raise TypeError(f"functional: {where} is TorchScript, whose parts cannot be replaced: pass the module itself")
    if dynamo.is_compiled(m):
        raise TypeError(
            f"functional: {where} is compiled by torch.compile, with its parameters inside: pass the module as it "
            f"was before, and compile=True, which compiles each stage"
        )
    if type(m).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
        raise TypeError(f"functional: {where} shards by itself: pass the module inside it, `.module`")
    if hasattr(m, "_hf_hook"):
        raise TypeError(
            f"functional: {where} has a hook of accelerate's, which moves parameters: call "
            f"accelerate.hooks.remove_hook_from_module(module, recurse=True), or load it without device_map="
        )
    if getattr(m, "gradient_checkpointing", False) is True:
        raise TypeError(
            f"functional: {where} has its own gradient checkpointing on, inside which a stage cannot run. "
            f"Call {disables_checkpointing(module)}(), and pass remat=True here"
        )


# --- while it is called ---


def refuse_again(path: str) -> None:
    """Raises RuntimeError if the module's own checkpointing runs a stage in backward."""
    if autograd.inside_backward():
        raise RuntimeError(
            f"{path} runs again in backward, outside of a call of the model, as torch.utils.checkpoint does: leave the "
            f"checkpointing out of the module, and pass remat=True to functional"
        )


def refuse_router_loss(module: nn.Module, out: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError if a model adds its router's loss to a sum over tokens, of which each part would add it."""
    count, loss = kwargs.get("num_items_in_batch"), getattr(out, "loss", None)
    if count is not None and loss is not None and isinstance(getattr(out, "aux_loss", None), Tensor):
        raise ValueError(
            f"{type(module).__name__}: num_items_in_batch must come without output_router_logits, got both: each rank "
            f"and micro-batch would add the whole router loss. Leave labels out, and add parallel.balance_loss"
        )


def refuse_written(part: ModulePart, leaves: Sequence[Any], current: tuple[Sequence[Any], int], form: int) -> None:
    """Raises RuntimeError if a module has written into a list, dict or dataclass among its arguments."""
    if current[1] != form or any(a is not b for a, b in zip(leaves, current[0], strict=True)):
        raise RuntimeError(
            f"{part.path} ({type(part.module).__name__}) writes into a list, dict or dataclass among its arguments, "
            f"which would be lost: a stage gets a copy. Return it from forward, or choose stages= that include its "
            f"maker"
        )


def refuse_deleted(part: ModulePart, error: KeyError) -> NoReturn:
    """Raises RuntimeError for a module of which a parameter was deleted in forward."""
    raise RuntimeError(
        f"{part.path} ({type(part.module).__name__}) has lost its parameter {error} in forward. Call it with different "
        f"values by torch.func.functional_call(module, values, args)"
    ) from error


def refuse_written_outside(copies: Iterable[Mapping[str, Tensor]]) -> None:
    """Raises RuntimeError if the module has written into a copy of a stage's parameters, which starts at version 0."""
    for name, x in ((name, x) for values in copies for name, x in values.items()):
        if not x.is_inference() and x._version:
            raise RuntimeError(
                f"the module writes into its parameter {name}, which would be lost: outside of its stage it is a copy. "
                f"Compute a new tensor in forward, and change parameters outside of the model"
            )


def refuse_rebound(part: ModulePart, pairs: Sequence[tuple[Slot, Any]]) -> None:
    """Raises RuntimeError if a module has replaced a parameter by a tensor with different values."""
    for slot, value in pairs:
        current = left_in(part, slot)
        if current is not value and not keeps_numbers(current, value):
            raise RuntimeError(
                f"{part.path} ({type(part.module).__name__}) replaces its parameter {joined(part.path, slot.key)}, "
                f"which would be lost: during a call it is a copy. Compute a new tensor in forward, and change "
                f"parameters outside of the model"
            )


def refuse_mixed(error: RuntimeError, part: ModulePart, groups: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raises TypeError instead of torch's error if a stage mixes dtypes or devices.

    Args:
        error: torch's.
        part: the stage.
        groups: what it is given: trees of tensors.
        options: of the stage.
    """
    tensors = {name: [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)] for name, tree in groups.items()}
    dtypes = {name: {str(x.dtype) for x in some if x.is_floating_point()} for name, some in tensors.items()}
    devices = {name: {str(x.device) for x in some} for name, some in tensors.items()}
    casts = ", ".join(f"{name}={options.get(name)}" for name in ("gather_dtype", "input_dtype"))
    advice = {
        "dtype": f"with {casts}. Cast the arguments, or pass input_dtype; parameters have the dtype gather_dtype, and "
        f"buffers keep theirs: cast these, or the module, before functional",
        "device": "and parameters are on the device of their mesh: move the arguments there",
    }
    for kind, kinds in (("dtype", dtypes), ("device", devices)):
        if kind in str(error) and len(set().union(*kinds.values())) > 1:
            joint = "of" if kind == "dtype" else "on"
            mixture = ", ".join(f"{name} {joint} {' and '.join(sorted(some))}" for name, some in kinds.items() if some)
            raise TypeError(
                f"{part.path} ({type(part.module).__name__}) mixes {kind}s ({error}): it has {mixture}, {advice[kind]}"
            ) from error


def refuse_mixed_loose(
    error: RuntimeError, module: nn.Module, loose: Mapping[str, Tensor], options: Mapping[str, Any]
) -> None:
    """Raises TypeError instead of torch's error if parameters outside of stages meet another dtype."""
    if loose and "dtype" in str(error):
        dtypes = sorted({str(x.dtype) for x in loose.values()})
        casts = ", ".join(f"{name}={dtype}" for name, dtype in options.items())
        raise TypeError(
            f"{type(module).__name__} mixes dtypes ({error}) outside of its stages, where it has {listed(loose, 3)}, "
            f"of {' and '.join(dtypes)}, with {casts}. Cast the arguments, or pass input_dtype, which casts those of "
            f"the module that holds these parameters"
        ) from error


def refuse_caches(part: ModulePart, leaves: Sequence[Any]) -> None:
    """Raises TypeError if a stage is given a cache."""
    for x in leaves:
        if is_cache(x):
            raise TypeError(
                f"{part.path} is given a {type(x).__name__}, into which it would write activations while gradients are "
                f"recorded: pass use_cache=False to the model (or set it in its config), or generate under "
                f"torch.no_grad()"
            )


def refuse_inside_function(part: ModulePart, outermost: types.CodeType, read: str | None = None) -> None:
    """Raises RuntimeError if a stage that computes no graph is called, or read, by the forward of a custom Function.

    What a Function is given of the module, such as `*self.parameters()`, are placeholders, which get no gradient.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        if functorch.is_forward(frame.f_code):
            raise RuntimeError(
                given_as_it_is(read)
                if read
                else f"{part.path} is called by the forward of a torch.autograd.Function or a checkpoint in the "
                f"module: its parameters would get no gradient. Leave the Function out, and pass remat=True to "
                f"functional to save memory"
            )
        frame = frame.f_back  # type: ignore[assignment]


def refuse_hooks(part: ModulePart) -> None:
    """Raises RuntimeError for a forward hook inside a stage under torch.func: what it keeps would lose its gradient."""
    for path, m in part.module.named_modules():
        hooks = (*m._forward_hooks.values(), *m._forward_pre_hooks.values()) if path else ()  # a stage's run outside
        for hook in hooks:
            if not getattr(hook, "__module__", "").startswith((output_capturing.HOOKS, "torch.")):
                raise RuntimeError(
                    f"{part.path}.{path} has a forward hook, {getattr(hook, '__qualname__', hook)}, inside a stage: "
                    f"under torch.func values that it keeps would silently lose their gradients. Move it to the "
                    f"stage's module {part.path}, remove it, or use shardfn.grad"
                )


def refuse_kept(part: ModulePart, arguments: Sequence[Any]) -> None:
    """Raises RuntimeError for computed tensors kept in attributes or argument objects, for the same reason."""
    for path, m in part.module.named_modules():
        for name, value in vars(m).items():
            if name in (*OF_TORCH, *_NOT_KEPT) or not any(map(_computed, tensors_in(value, objects=True))):
                continue
            if f"{name}_g" in m._parameters or f"{name}_orig" in m._parameters:
                continue  # recomputed before each forward, as by weight_norm or spectral_norm
            raise RuntimeError(
                f"{joined(part.path, path)} keeps a tensor that it computed in its attribute {name!r}: under "
                f"torch.func its gradient would be lost, silently. Let forward return it, or keep x.detach()"
            )
    for x in arguments:
        if not isinstance(x, Tensor) and any(map(_computed, tensors_in(x, objects=True))):
            raise RuntimeError(
                f"{part.path} is given a {type(x).__name__} and keeps computed tensors in it: under torch.func their "
                f"gradient would be lost, silently. Pass tensors in tuples, dicts or dataclasses, and return the "
                f"results"
            )


_NOT_KEPT = ("forward", "_flat_weights")


def _computed(x: Tensor) -> bool:
    return x.requires_grad and (not x.is_leaf or functorch.wrapped(x))


def refuse_checkpointing(model: nn.Module, modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Raises TypeError if a model of `transformers` checkpoints activations by itself."""
    for path, m in modules:
        if getattr(m, "gradient_checkpointing", False) is True and m.training:
            raise TypeError(
                f"{path or type(m).__name__} checkpoints activations by itself, inside which a stage cannot run: call "
                f"model.module.{disables_checkpointing(model)}(), and pass remat=True to functional"
            )


def drawn_layers(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """The attributes, of modules and configurations, by which `transformers` skips layers at random in training."""
    configs = [getattr(m, "config", None) for m in model.modules()]
    mappings = [*map(vars, model.modules()), *(getattr(c, "__dict__", c) for c in configs)]  # some configs are dicts
    owners: dict[int, dict[str, Any]] = {id(attrs): attrs for attrs in mappings if isinstance(attrs, dict)}
    return [(attrs, name) for attrs in owners.values() for name in attrs if str(name).endswith("layerdrop")]


def refuse_apart(model: nn.Module, layerdrops: Sequence[tuple[dict[str, Any], str]], params: Any) -> None:
    """Raises ValueError on every rank if layers are skipped at random and ranks would draw different numbers."""
    settings = ((name, attrs[name]) for attrs, name in layerdrops)
    setting = next((f"{name}={value}" for name, value in settings if isinstance(value, float) and value > 0), "")
    if not (setting and model.training):
        return
    flats = flat_shards(params)
    if not flats or any(x.layout.placement.only_at for x in flats):
        return
    state = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).hexdigest()
    agree(
        [f"a state {state}"],
        mesh_of(flats[0].layout.grid, "the model"),
        type(model).__name__,
        subject=(
            f"torch's random numbers, by which it leaves layers out while it trains ({setting}),",
            f"All ranks leave out the same layers: call torch.manual_seed with the same number on every rank before "
            f"the call, or set {setting.partition('=')[0]} to 0.0 in the model and its configuration",
        ),
    )
