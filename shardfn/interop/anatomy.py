"""What of a module is where: which stage has which parameters and buffers, under which names, and who else reads them.

Found once; then the module is a shell: its parameters are placeholders, in whose places the values of a call are put
while it runs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfn.compat import dynamo
from shardfn.interop.boundaries import Boundaries, boundaries
from shardfn.interop.placeholder import Place, Placeholder, placeholder
from shardfn.mesh.spec import is_dtensor
from shardfn.mesh.which import Chosen

LOOSE = ""
"""Key of the parameters that no stage has: gathered once a call."""


class Slot(NamedTuple):
    """A place of the module that holds a parameter or a buffer.

    Attributes:
        holder: a dict of the module's, or a list.
        at: its key there.
        key: of the value, in what a call is given.
    """

    holder: Any
    at: Any
    key: str


@dataclass
class Part:
    """A stage's, or what is loose.

    Attributes:
        path: of the module; "" for what is loose.
        module: that is the stage.
        own: places of parameters that it alone has; keys are names without the path.
        shared: of those that others read, too; keys are whole names.
        buffers: likewise.
    """

    path: str
    module: nn.Module
    own: list[Slot] = field(default_factory=list)
    shared: list[Slot] = field(default_factory=list)
    buffers: list[Slot] = field(default_factory=list)

    def shared_keys(self) -> tuple[str, ...]:
        """Names of what others read, too, each once."""
        return tuple(dict.fromkeys(slot.key for slot in self.shared))


@dataclass
class Anatomy:
    """Of a module that is a shell now.

    Attributes:
        tree: stage path -> names -> values; what several stages read stands under its whole name alone.
        names: every name that the module has for a parameter, aliases too -> the one in the tree.
        frozen: patterns for the parameters that need no gradient.
        buffers: by whole name.
        parts: by path.
        loose: what no stage has.
        place: of the placeholders.
    """

    tree: dict[str, Any]
    names: dict[str, str]
    frozen: tuple[str, ...]
    buffers: dict[str, Tensor]
    parts: dict[str, Part]
    loose: Part
    place: Place


def taken_apart(
    module: nn.Module,
    stages: Boundaries | None,
    min_num_params: int | None,
    small: int,
    loose: Chosen,
    gather_dtype: torch.dtype | None,
) -> Anatomy:
    """Takes a module's parameters out of it.

    Raises:
        TypeError: a module whose parameters are elsewhere already, or of which somebody else took charge.
        ValueError: patterns that match nothing.
    """
    _refuse(module)
    named = list(module.named_parameters(remove_duplicate=False))
    canonical = _canonical(module, named)
    if unused := loose.unused([*[name for name, _ in named], *canonical.values()]):
        raise ValueError(f"functional: loose: nothing matches {', '.join(sorted(unused))}")

    def is_loose(name: str) -> bool:
        return loose(name, ()) or loose(canonical[name], ())

    chosen = boundaries(module, stages, min_num_params, small, is_loose)
    _refuse_compiled(module, chosen)
    parts = {path: Part(path, m) for path, m in chosen.items()}
    rest = Part(LOOSE, module)

    def part_of(name: str) -> Part:
        return next((part for path, part in parts.items() if name.startswith(path + ".")), rest)

    readers: dict[int, dict[str, None]] = {}
    for name, p in named:
        readers.setdefault(id(p), {})[part_of(name).path] = None
        if is_loose(name):
            readers[id(p)][LOOSE] = None
    tree: dict[str, Any] = {path: {} for path in (*parts, LOOSE)}
    frozen: dict[str, None] = {}
    stand_ins: dict[int, Placeholder] = {}
    devices = {p.device for _, p in named if not p.is_meta}
    place = Place(devices.pop() if len(devices) == 1 else torch.device("cpu"), gather_dtype)
    slots = _slots(module, {id(p) for _, p in named})
    for name, p in named:
        key, homes = canonical[name], list(readers[id(p)])
        alone = len(homes) == 1
        part = part_of(name)
        owner = homes[0] if alone else key
        short = key.removeprefix(f"{owner}.") if alone and owner else key
        if alone:
            tree[owner][short] = p.detach()
        else:
            tree.setdefault(key, p.detach())
        if id(p) not in stand_ins:
            stand_ins[id(p)] = placeholder(p, key, owner if alone else LOOSE if LOOSE in homes else homes[0], place)
        where = Slot(*slots[name], short)
        for one in dict.fromkeys((part.path, LOOSE) if is_loose(name) else (part.path,)):
            target = parts.get(one, rest)
            (target.own if alone else target.shared).append(where)
        if not p.requires_grad:
            frozen[re.escape(key)] = None
    for holder, at, number in _aliases(module, {id(p): p for _, p in named}):
        name = next(name for name, p in named if id(p) == number)
        for part in (*parts.values(), rest):
            for listed in (part.own, part.shared):
                home, key = slots[name]
                known = next((slot for slot in listed if slot.holder is home and slot.at == key), None)
                if known is not None:
                    listed.append(Slot(holder, at, known.key))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    for name in buffers:
        parent, _, attribute = name.rpartition(".")
        part_of(name).buffers.append(Slot(module.get_submodule(parent)._buffers, attribute, name))
    for part in (*parts.values(), rest):
        for holder, at, _ in (*part.own, *part.shared):
            holder[at] = stand_ins.get(id(holder[at]), holder[at])
    tree = {key: value for key, value in tree.items() if not isinstance(value, dict) or value}
    return Anatomy(tree, canonical, tuple(frozen), buffers, parts, rest, place)


@contextlib.contextmanager
def placed(slots: Sequence[Slot], values: Sequence[Any]) -> Iterator[None]:
    """Values in their places, while the block runs."""
    before = [holder[at] for holder, at, _ in slots]
    for (holder, at, _), value in zip(slots, values, strict=True):
        holder[at] = value
    try:
        yield
    finally:
        for (holder, at, _), value in zip(slots, before, strict=True):
            holder[at] = value


def _slots(module: nn.Module, known: set[int]) -> dict[str, tuple[Any, str]]:
    """Where each parameter is, by name."""
    found = {}
    for path, m in module.named_modules(remove_duplicate=False):
        for attribute, p in m._parameters.items():
            if p is not None and id(p) in known:
                found[f"{path}.{attribute}" if path else attribute] = (m._parameters, attribute)
    return found


def _aliases(module: nn.Module, known: dict[int, Tensor]) -> Iterator[tuple[Any, Any, int]]:
    """Where else modules keep their parameters: in a list or dict of their own, as recurrent ones do."""
    for path, m in module.named_modules():
        for attribute, held in vars(m).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            if isinstance(held, (list, dict)):
                for at, one in enumerate(held) if isinstance(held, list) else held.items():
                    if isinstance(one, Tensor) and known.get(id(one)) is one:
                        yield held, at, id(one)
            elif any(
                isinstance(one, Tensor) and known.get(id(one)) is one
                for one in (held if isinstance(held, tuple) else [held])
            ):
                raise TypeError(
                    f"functional: {path or 'the module'} keeps a parameter in its attribute {attribute!r}, where it "
                    f"would stay when others are used: let its forward read the parameter itself"
                )


def canonical_names(module: nn.Module) -> dict[str, str]:
    """For each name of a parameter, aliases too, the one that stands in the tree."""
    return _canonical(module, list(module.named_parameters(remove_duplicate=False)))


def _canonical(module: nn.Module, named: Sequence[tuple[str, Tensor]]) -> dict[str, str]:
    """For each name the one that stands in the tree: where parameters are tied, the one that the model's class says."""
    first: dict[int, str] = {}
    by_name = dict(named)
    for name, p in named:
        first.setdefault(id(p), name)
    for path, m in module.named_modules():
        tied = getattr(m, "all_tied_weights_keys", None) or getattr(m, "_tied_weights_keys", None)
        for alias, source in tied.items() if isinstance(tied, dict) else ():
            here, there = (f"{path}.{one}" if path else one for one in (alias, source))
            if here in by_name and by_name.get(there) is by_name[here]:
                first[id(by_name[here])] = there
    return {name: first[id(p)] for name, p in named}


def _refuse(module: nn.Module) -> None:
    """Raises for a module that cannot be taken apart, and says why."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"functional: the module is of type {type(module).__name__}, not a torch.nn.Module")
    for path, m in module.named_modules():
        where = f"{path} ({type(m).__name__})" if path else type(m).__name__
        for name, p in m._parameters.items():
            if isinstance(p, Placeholder):
                raise TypeError(
                    f"functional: the parameters of {where} were taken out before: one shell serves as many sets of "
                    f"parameters as you like, so use what `functional` returned then"
                )
            if p is not None and is_dtensor(p):
                raise TypeError(
                    f"functional: {name} of {where} is a DTensor, as after fully_shard: pass the module as it was "
                    f"before, and let shardfn.shard cut the parameters"
                )
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise TypeError(
                    f"functional: {name} of {where} has no shape yet: run the module once, so that lazy modules know "
                    f"their inputs"
                )
        if isinstance(m, torch.jit.ScriptModule):
            raise TypeError(f"functional: {where} is a ScriptModule: pass the module that it was made from")
        if type(m).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
            raise TypeError(f"functional: {where} shards by itself: pass the module inside it, `.module`")
        if hasattr(m, "_hf_hook"):
            raise TypeError(
                f"functional: {where} has a hook of accelerate's, which moves parameters: call "
                f"accelerate.hooks.remove_hook_from_module(module, recurse=True), or load it without device_map="
            )
        if getattr(m, "gradient_checkpointing", False) is True:
            raise TypeError(
                f"functional: {where} has gradient checkpointing of its own switched on, inside which a stage cannot "
                f"run: call {disables_checkpointing(module)}(), and pass remat=True here"
            )


def disables_checkpointing(module: object) -> str:
    """The method of a model of `transformers` that switches its own checkpointing off; versions have two names."""
    newer = "activation_checkpointing_disable"
    return newer if hasattr(module, newer) else "gradient_checkpointing_disable"


def _refuse_compiled(module: nn.Module, stages: Mapping[str, nn.Module]) -> None:
    """Raises TypeError if torch.compile is to trace a stage, with its collectives; inside a stage it may be."""
    for path, m in module.named_modules():
        if not dynamo.is_compiled(m):
            continue
        held = next((stage for stage in stages if f"{stage}.".startswith(f"{path}." if path else "")), None)
        if held is not None:
            where = f"{path} ({type(m).__name__})" if path else type(m).__name__
            raise TypeError(
                f"functional: {where} is compiled, and the stage {held!r} cannot run inside: pass the module that "
                f"torch.compile was given, and compile=True or a dict of its arguments here, for the forward of each "
                f"stage"
            )
