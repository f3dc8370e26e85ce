"""The state of Adam and AdamW as torch's optimizers have it: by the parameters' names, and back.

Torch keeps `exp_avg`, `exp_avg_sq` and `step` for each parameter, and its numbers in groups of parameters; here there
is one tree of means, one of squares, and one count. What is on disk is torch's in both directions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardfn.checkpoint.boxes import Ints, whole
from shardfn.checkpoint.contents import Contents, Value, parameters
from shardfn.checkpoint.disk import Flaw, opened, unpickled
from shardfn.checkpoint.loading import filled
from shardfn.checkpoint.manifest import Source
from shardfn.checkpoint.matching import Asked, Name, Rule, renamed
from shardfn.checkpoint.reading import Reader
from shardfn.checkpoint.saving import finish
from shardfn.checkpoint.team import CheckpointError, on_each_rank
from shardfn.mesh import waiting
from shardfn.mesh.spec import joined
from shardfn.quoting import listed, short_errors

SLOTS = {"mean": "exp_avg", "square": "exp_avg_sq"}
NUMBERS: dict[str, tuple[str, int | None]] = {  # ours, and torch's, of which it may be one of two
    "lr": ("lr", None), "b1": ("betas", 0), "b2": ("betas", 1), "eps": ("eps", None),
    "weight_decay": ("weight_decay", None),
}  # fmt: skip
Make = type[torch.optim.Adam] | type[torch.optim.AdamW]
Group = dict[str, Any]


@short_errors
def torch_optimizer(state: Any, make: Make = torch.optim.AdamW, **numbers: Any) -> dict[str, Any]:
    """The state of `adam` or `adamw` as torch's optimizers have it, for `save`.

    Args:
        state: of `shardfn.optim.adam` or `adamw`; where these are the last of a `chain`, `state[-1]`. It is not copied.
        make: the class of torch's that goes on with it: `torch.optim.AdamW`, or `Adam` for `adam`.
        **numbers: `lr`, `b1`, `b2`, `eps` and `weight_decay`, where the optimizer has a function in a number's place:
            the same function, or a number.

    Returns:
        A tree for `save`, with torch's names: `{"state": {name: {"step": ..., "exp_avg": ..., "exp_avg_sq": ...}},
        "param_groups": [...]}`, as `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` has it.

    Raises:
        TypeError: another optimizer's state, or class.
        ValueError: a number that is neither in the state nor passed.

    Example:
        ``save(path, {"model": params, "optim": torch_optimizer(state)})``, which FSDP2 loads; for Accelerate's
        `load_state`, ``save(folder / "pytorch_model_fsdp_0", {"model": params})`` and
        ``save(folder / "optimizer_0", {"optimizer": torch_optimizer(state)})``
    """
    _check(state, make)
    unknown = sorted(set(numbers) - set(NUMBERS))
    if unknown:
        raise TypeError(f"torch_optimizer: unknown numbers {listed(unknown)}; there are {listed(NUMBERS)}")
    given = {**state["numbers"], **numbers}
    moments: dict[str, dict[str, Any]] = {}
    groups: dict[tuple[float, ...], list[str]] = {}
    for name, _, shape in parameters(state["mean"]):
        moments[name] = {"step": torch.tensor(float(state["step"]))}
        groups.setdefault(tuple(_number(given, one, state["step"], name, shape) for one in NUMBERS), []).append(name)
    for slot, theirs in SLOTS.items():
        for name, leaf, _ in parameters(state[slot]):
            moments[name][theirs] = leaf
    return {"state": moments, "param_groups": [_group(make, key, names) for key, names in groups.items()]}


@waiting.during("sf.checkpoint.load_torch_optimizer")
@short_errors
def load_torch_optimizer(
    path: str | os.PathLike[str],
    state: Any,
    *,
    part: str = "",
    names: Iterable[Rule] = (),
    make: Make = torch.optim.AdamW,
    donate: bool = True,
) -> Any:
    """Reads the state of torch's Adam or AdamW into that of `adam` or `adamw`, on all ranks together.

    It takes what FSDP2 and torchtitan save by `get_optimizer_state_dict`, flattened or not; Accelerate's folder
    `optimizer_0`; and files of whole optimizer states by parameters' names, such as Accelerate's `optimizer.bin`. Each
    rank reads the parts of the moments that it holds, converted to the dtypes of `state`.

    Args:
        path: of a checkpoint or a file, as for `load`.
        state: what `init` of the optimizer made; its moments are overwritten.
        part: where `state` and `param_groups` are: `"optim"`, or `"optimizer"` for Accelerate's folder.
        names: rules from our names of parameters to those there, as for `load`.
        make: what it is the state of, `torch.optim.AdamW` or `Adam`.
        donate: write into `state`'s tensors. If not, they stay as they are, and are copied.

    Returns:
        The state, with torch's moments and count of steps; and with its numbers, where `state` has numbers. Where the
        optimizer has functions in their place, these go on.

    Raises:
        CheckpointError: what is missing, extra or of another shape; parameters with different numbers of steps; groups
            that differ in a number of which `state` has one; options that our optimizers do not have. The same
            on every rank, and before anything is overwritten.
        TypeError: another optimizer's state, or class.

    Example:
        ``state = load_torch_optimizer("out/optimizer_0", adamw(3e-4).init(params), part="optimizer")``
    """
    finish()

    def checked() -> list[Rule]:
        _check(state, make)
        return list(names)

    rules = on_each_rank(checked)

    def called(held: Contents) -> dict[str, Name]:
        found = {}
        for name, (theirs, swap) in _theirs(state, rules).items():
            for slot, kept in SLOTS.items():
                ours = joined(slot, name)
                found[ours if ours in held.tensors else slot] = Name(joined("state", theirs, kept), swap)
        return found

    def numbers(reader: Reader) -> dict[str, Any]:
        every = [theirs for theirs, _ in _theirs(state, rules).values()]
        count = _steps(reader, part, every)
        return {"step": count, "numbers": _numbers(state["numbers"], _groups(reader, part, every), make)}

    ignore = [r"param_groups\..*", r"state\..*\.step"]
    asked = Asked(part, called, True, ignore, converts=True, advice=_NO_STATE)
    what = f"load_torch_optimizer {path}"
    moments, more = filled(what, path, {slot: state[slot] for slot in SLOTS}, asked, donate, numbers)
    return {**state, **more, **moments}


_NO_STATE = (
    ". Torch has no state of parameters that never had a gradient, and does not change them: where that is why it is "
    "missing, freeze them here, too (frozen= of shard)"
)


def _check(state: Any, make: Any) -> None:
    if make not in (torch.optim.Adam, torch.optim.AdamW):
        raise TypeError(f"of torch's optimizers it knows torch.optim.AdamW and torch.optim.Adam, not {make!r}")
    if not isinstance(state, dict) or set(state) != {"step", "numbers", *SLOTS}:
        has = f"a dict of {listed(state)}" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise TypeError(
            f"this takes the state of shardfn.optim.adam or adamw, not {has}; where one of them is the last of a "
            f"chain, its state is state[-1]"
        )


def _theirs(state: Any, rules: list[Rule]) -> dict[str, Name]:
    """What each of our parameters is called there."""
    return renamed([name for name, *_ in parameters(state["mean"])], rules)


# --- to torch ---


def _number(given: dict[str, Any], name: str, step: int, path: str, shape: Ints) -> float:
    """A number of a parameter's group."""
    if name not in given:
        raise ValueError(
            f"torch_optimizer: {name} is a function of this optimizer, and not in its state: pass {name}= as to the "
            f"optimizer, or the number that goes to torch"
        )
    value = given[name]
    if callable(value):
        value = value(max(step, 1)) if name == "lr" else value(path, shape)
    return float(value)


def _group(make: Make, key: tuple[float, ...], names: list[str]) -> Group:
    """A group as torch has it, of the same numbers."""
    lr, b1, b2, eps, weight_decay = key
    made = make([torch.zeros(1)], lr=lr, betas=(b1, b2), eps=eps, weight_decay=weight_decay)
    group = {**made.param_groups[0], "params": names}
    return {name: value if type(value) in (bool, int, float) else Value(value) for name, value in group.items()}


# --- from torch ---


def _steps(reader: Reader, part: str, theirs: list[str]) -> int:
    """How many steps were made, the same for all parameters."""
    source, found, missing = reader.source, {}, []
    for name in theirs:
        full = joined(part, "state", name, "step")
        if full in source.tensors or full in source.numbers:
            found[name] = float(_value(reader, full))
        else:
            missing.append(full)
    if missing:
        raise CheckpointError(f"missing in the checkpoint: {listed(missing)}")
    counts = sorted(set(found.values()))
    if len(counts) > 1:
        some = [next(name for name in found if found[name] == count) for count in counts[:2]]
        raise CheckpointError(
            f"its parameters have made different numbers of steps, {some[0]} {counts[0]:g} and {some[1]} "
            f"{counts[1]:g}, and a state here has one count for all"
        )
    return int(counts[0]) if counts else 0


def _groups(reader: Reader, part: str, theirs: list[str]) -> dict[str, Group]:
    """The group of each of these parameters, in whichever of torch's two layouts."""
    prefix = joined(part, "param_groups") + "."
    source = reader.source
    every = [*source.numbers, *source.tensors, *source.others]
    found = {name.removeprefix(prefix): name for name in every if name.startswith(prefix)}
    numbered = any(re.fullmatch(r"\d+\.params(\.\d+)?", name) for name in found)
    groups: dict[str, Group] = {}
    if numbered:
        for name, full in found.items():
            number, _, rest = name.partition(".")
            groups.setdefault(number, {})[rest] = full
        by_name = {str(one): group for group in groups.values() for one in _listed(reader, group, "params")}
    else:
        by_name = {
            one: {name.removeprefix(f"{one}."): full for name, full in found.items() if name.startswith(f"{one}.")}
            for one in theirs
        }
    wrong = [one for one in theirs if not by_name.get(one)]
    if wrong:
        raise CheckpointError(f"no group of {prefix[:-1]} in the checkpoint has {listed(wrong)}")
    read: dict[int, Group] = {}
    for one in theirs:
        group = by_name[one]
        if id(group) not in read:
            keys = dict.fromkeys(name.partition(".")[0] for name in group if not name.startswith("params"))
            read[id(group)] = {
                key: _value(reader, group[key]) if key in group else _listed(reader, group, key) for key in keys
            }
    return {one: read[id(by_name[one])] for one in theirs}


def _listed(reader: Reader, group: Group, key: str) -> list[Any]:
    """What is a list there, in one entry or each of it in its own."""
    if key in group:
        return list(_value(reader, group[key]))
    numbers = sorted(int(name.rpartition(".")[2]) for name in group if re.fullmatch(rf"{key}\.\d+", name))
    return [_value(reader, group[f"{key}.{number}"]) for number in numbers]


def _value(reader: Reader, name: str) -> Any:
    """A number, or something small that is not one."""
    source = reader.source
    if name in source.numbers:
        return source.numbers[name]
    if name in source.tensors:
        return reader.read(name, whole(source.tensors[name].shape)).tolist()
    if not isinstance(source, Source):
        return None
    file, offset, length = source.places[name]
    with opened(source.folder / file) as descriptor:
        try:
            return unpickled(descriptor, offset, length)
        except Flaw as error:
            raise CheckpointError(f"{source.folder / file}: {name}: {error}") from error


def _numbers(ours: dict[str, Any], groups: dict[str, Group], make: Make) -> dict[str, Any]:
    """Our numbers as they are there; options that ours do not have are refused."""
    for name, group in groups.items():
        if "amsgrad" not in group:  # as others have the same moments
            raise CheckpointError(f"the group of {name} is neither of torch.optim.Adam nor of AdamW: it has no amsgrad")
        wrong = next((option for option in ("amsgrad", "maximize") if group.get(option)), None)
        if wrong:
            raise CheckpointError(f"the group of {name} has {wrong}=True, which shardfn.optim has not")
        decoupled = group.get("decoupled_weight_decay")
        if decoupled is not None and group.get("weight_decay") and decoupled is not (make is torch.optim.AdamW):
            theirs, here = ("AdamW", "adamw") if decoupled else ("Adam", "adam")
            raise CheckpointError(
                f"the group of {name} is torch.optim.{theirs}'s: go on with shardfn.optim.{here}, and pass "
                f"make=torch.optim.{theirs}"
            )
    return {key: _ours(key, value, groups) for key, value in ours.items()}


def _ours(key: str, value: Any, groups: dict[str, Group]) -> Any:
    """One of our numbers, which all parameters have there."""
    theirs, at = NUMBERS[key]
    found: dict[Any, str] = {}
    for name, group in groups.items():
        if theirs not in group:
            raise CheckpointError(f"the group of {name} has no {theirs}")
        found.setdefault(group[theirs] if at is None else group[theirs][at], name)
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise CheckpointError(
            f"{key} is {one} for {first} and {other} for {second}, and this state has one for all: make the optimizer "
            f"with a function, {key}=lambda path, shape: ..."
        )
    number = next(iter(found), value)
    return torch.full_like(value, number) if isinstance(value, Tensor) else number
