"""What of a module is where: which stage has which parameters and buffers, under which names, and who else reads them.

Found once; then the module is a shell: its parameters are placeholders, in whose places the values of a call are put
while it runs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfn.interop.boundaries import Boundaries, boundaries
from shardfn.interop.placeholder import Place, Placeholder, placeholder
from shardfn.interop.refused import aliases, refuse_shared_memory, refuse_taken
from shardfn.mesh.selectors import Chosen
from shardfn.quoting import listed

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
        buffers: of the stage, and for what is loose of the whole module; keys are whole names.
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
        same: every name that the module has for a buffer -> the one that the places of it have as their key.
        parts: by path.
        loose: what no stage has.
        place: of the placeholders.
    """

    tree: dict[str, Any]
    names: dict[str, str]
    frozen: tuple[str, ...]
    buffers: dict[str, Tensor]
    same: dict[str, str]
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
    refuse: Callable[[Mapping[str, nn.Module]], None],
) -> Anatomy:
    """Takes a module's parameters out of it; before that, `refuse` may object to the stages that were chosen.

    Raises:
        TypeError: a module whose parameters are elsewhere already, or of which somebody else took charge.
        ValueError: patterns that match nothing.
    """
    refuse_taken(module)
    named = list(module.named_parameters(remove_duplicate=False))
    known = {id(p): p for _, p in named}
    refuse_shared_memory(module, named)
    canonical = _canonical(module, named)
    if unused := loose.unused([*[name for name, _ in named], *canonical.values()]):
        raise ValueError(f"functional: loose: nothing matches {listed(sorted(unused))}")

    def is_loose(name: str) -> bool:
        return loose(name, ()) or loose(canonical[name], ())

    chosen = boundaries(module, stages, min_num_params, small, is_loose)
    refuse(chosen)
    _keep_as_they_are(module)
    parts = {path: Part(path, m) for path, m in chosen.items()}
    rest = Part(LOOSE, module)
    there = dict(module.named_modules(remove_duplicate=False))
    part_of, add = _by_name(there, parts, rest), _Once()
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
    slots = _slots(module, set(known))
    elsewhere: dict[int, list[tuple[Any, Any]]] = {}
    for holder, at, number in aliases(module, known):
        elsewhere.setdefault(number, []).append((holder, at))
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
        for one in dict.fromkeys((part.path, LOOSE) if is_loose(name) else (part.path,)):
            target = parts.get(one, rest)
            for holder, at in (slots[name], *elsewhere.get(id(p), ())):
                add(target.own if alone else target.shared, Slot(holder, at, short))
        if not p.requires_grad:
            frozen[re.escape(key)] = None
    buffers = dict(module.named_buffers(remove_duplicate=False))
    first = {id(b): name for name, b in reversed(buffers.items())}
    same = {name: first[id(b)] for name, b in buffers.items()}
    for name, key in same.items():
        parent, _, attribute = name.rpartition(".")
        for part in (part_of(name), rest):
            add(part.buffers, Slot(there[parent]._buffers, attribute, key))
    for part in (*parts.values(), rest):
        for holder, at, _ in (*part.own, *part.shared):
            holder[at] = stand_ins.get(id(holder[at]), holder[at])
    if stand_ins:
        module.register_load_state_dict_pre_hook(_refuse_values)
    tree = {key: value for key, value in tree.items() if not isinstance(value, dict) or value}
    return Anatomy(tree, canonical, tuple(frozen), buffers, same, parts, rest, place)


def _refuse_values(module: nn.Module, *_: Any) -> None:
    """Raises RuntimeError where a state dict is loaded into what has no parameters any more."""
    raise RuntimeError(
        f"load_state_dict: the parameters of this {type(module).__name__} were taken out of it. Load them into the "
        f"module before `functional`, or load their files by `interop.load`, which gives a tree of them"
    )


def _keep_as_they_are(module: nn.Module) -> None:
    """Layers of bitsandbytes reorder their weight for the CPU at the first call, and remember that they did."""
    for m in module.modules():
        if getattr(m, "support_avx512bf16_for_cpu", False):
            m.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def _by_name(there: Mapping[str, nn.Module], parts: Mapping[str, Part], rest: Part) -> Callable[[str], Part]:
    """The stage that a name goes through; a module may have several names."""
    of_module = {id(part.module): part for part in parts.values()}

    def part_of(name: str) -> Part:
        words = name.split(".")
        paths = (".".join(words[:n]) for n in range(1, len(words)))
        return next((of_module[id(there[path])] for path in paths if id(there[path]) in of_module), rest)

    return part_of


class _Once:
    """Adds a place once, by however many names it is reached."""

    def __init__(self) -> None:
        self.listed: set[tuple[int, int, Any]] = set()

    def __call__(self, slots: list[Slot], slot: Slot) -> None:
        if (where := (id(slots), id(slot.holder), slot.at)) not in self.listed:
            self.listed.add(where)
            slots.append(slot)


@contextlib.contextmanager
def placed(slots: Sequence[Slot], values: Sequence[Any]) -> Iterator[None]:
    """Values in their places, while the block runs, with what somebody said of the parameters in attributes."""
    before = [holder[at] for holder, at, _ in slots]
    for (holder, at, _), value, there in zip(slots, values, before, strict=True):
        if type(there) is Placeholder and there.said:
            vars(value).update(there.said)
        holder[at] = value
    try:
        yield
    finally:
        for (holder, at, _), value in zip(slots, before, strict=True):
            holder[at] = value


def left_in(part: Part, slot: Slot) -> Any:
    """What is in the place of a parameter after the module ran.

    A parametrisation that forward registers and removes, as peft's of experts, puts a plain tensor among the buffers
    afterwards, where nobody would replace it: it leaves them here.
    """
    if not isinstance(slot.holder, dict) or slot.at in slot.holder:
        return slot.holder[slot.at]
    owner = next((m for m in part.module.modules() if m._parameters is slot.holder), None)
    return None if owner is None else owner._buffers.pop(slot.at, None)


def _slots(module: nn.Module, known: set[int]) -> dict[str, tuple[Any, str]]:
    """Where each parameter is, by name."""
    found = {}
    for path, m in module.named_modules(remove_duplicate=False):
        for attribute, p in m._parameters.items():
            if p is not None and id(p) in known:
                found[f"{path}.{attribute}" if path else attribute] = (m._parameters, attribute)
    return found


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
