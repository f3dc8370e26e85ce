"""Converts the state of Adam and AdamW to that of torch's optimizers, by parameter names, and back.

Torch keeps `exp_avg`, `exp_avg_sq` and `step` for each parameter, and hyperparameters in groups of parameters; shardfn
keeps one tree of means, one of squares, one step count, and how many of the steps a parameter has missed. Files have
torch's form in both directions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardfn.checkpoint.contents import Contents, Value, parameters
from shardfn.checkpoint.disk import Flaw, open_readonly, unpickled
from shardfn.checkpoint.loading import load_into
from shardfn.checkpoint.manifest import TensorSource
from shardfn.checkpoint.matching import LoadRequest, Rule, StoredName, renamed
from shardfn.checkpoint.reading import BoxReader
from shardfn.checkpoint.saving import wait_for_saves
from shardfn.checkpoint.team import CheckpointError, on_each_rank
from shardfn.mesh import waiting
from shardfn.mesh.spec import joined
from shardfn.quoting import listed
from shardfn.shards.boxes import Ints, full_box
from shardfn.shards.pieces import spread, units
from shardfn.tracebacks import api_boundary

SLOTS = {"mean": "exp_avg", "square": "exp_avg_sq"}
NUMBERS: dict[str, tuple[str, int | None]] = {  # our name -> torch's name, and the index where torch has a pair
    "lr": ("lr", None), "b1": ("betas", 0), "b2": ("betas", 1), "eps": ("eps", None),
    "weight_decay": ("weight_decay", None),
}  # fmt: skip
Make = type[torch.optim.Adam] | type[torch.optim.AdamW]
Group = dict[str, Any]


@api_boundary
def torch_optimizer(state: Any, make: Make = torch.optim.AdamW, **numbers: Any) -> dict[str, Any]:
    """The state of `adam` or `adamw` in the form of torch's optimizers, for `save`.

    Args:
        state: of `shardfn.optim.adam` or `adamw`; if these are the last of a `chain`, `state[-1]`. It is not copied.
        make: the torch class that is to continue with it: `torch.optim.AdamW`, or `Adam` for `adam`.
        **numbers: `lr`, `b1`, `b2`, `eps` and `weight_decay`, for those that the optimizer was given as a function: the
            same function, or a number.

    Returns:
        A tree for `save`, with torch's names: `{"state": {name: {"step": ..., "exp_avg": ..., "exp_avg_sq": ...}},
        "param_groups": [...]}`, as `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` returns it.

    Raises:
        TypeError: the state is another optimizer's, the class is not supported, or `numbers` has an unknown name.
        ValueError: a number is neither in the state nor passed.

    Example:
        ``save(path, {"model": params, "optim": torch_optimizer(state)})``, which FSDP2 loads; for Accelerate's
        `load_state`, ``save(folder / "pytorch_model_fsdp_0", {"model": params})`` and
        ``save(folder / "optimizer_0", {"optimizer": torch_optimizer(state)})``
    """
    _check_conversion(state, make)
    unknown = sorted(set(numbers) - set(NUMBERS))
    if unknown:
        raise TypeError(f"torch_optimizer: unknown numbers {listed(unknown)}; there are {listed(NUMBERS)}")
    hyperparameters = {**state["numbers"], **numbers}
    moments: dict[str, dict[str, Any]] = {}
    groups: dict[tuple[float, ...], list[str]] = {}
    paths = _paths(state)
    for name, _, shape in parameters(state["mean"]):
        count = float(state["step"] - state["missed"].get(paths[name], 0))
        moments[name] = {"step": torch.tensor(count, device="cpu")}
        key = tuple(_hyperparameter(hyperparameters, n, state["step"], name, shape) for n in NUMBERS)
        groups.setdefault(key, []).append(name)
    for slot, torch_slot in SLOTS.items():
        for name, leaf, _ in parameters(state[slot]):
            moments[name][torch_slot] = leaf
    return {"state": moments, "param_groups": [_group(make, key, names) for key, names in groups.items()]}


@waiting.during("sf.checkpoint.load_torch_optimizer")
@api_boundary
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

    It reads what FSDP2 and torchtitan save by `get_optimizer_state_dict`, flattened or not; Accelerate's folder
    `optimizer_0`; and files of whole optimizer states by parameter names, such as Accelerate's `optimizer.bin`. Each
    rank reads the parts of the moments that it holds, converted to the dtypes of `state`.

    Args:
        path: of a checkpoint or a file, as for `load`.
        state: as returned by the optimizer's `init`; its moments are overwritten.
        part: where `state` and `param_groups` are: `"optim"`, or `"optimizer"` for Accelerate's folder.
        names: rules from our parameter names to those in the files, as for `load`.
        make: the class whose state it is, `torch.optim.AdamW` or `Adam`.
        donate: write into `state`'s tensors. If not, they are copied and stay unchanged.

    Returns:
        The state, with torch's moments and step counts; and with torch's numbers, for those that `state` has. Where the
        optimizer has functions instead, these stay in use; the learning rate's gets the largest of the step counts.

    Raises:
        CheckpointError: entries are missing, extra or of another shape; groups differ in a number of which `state` has
            only one; options are set that our optimizers lack. The same on every rank, and before anything is
            overwritten.
        TypeError: the state is another optimizer's, or the class is not supported.

    Example:
        ``state = load_torch_optimizer("out/optimizer_0", adamw(3e-4).init(params), part="optimizer")``
    """
    wait_for_saves()

    def checked() -> list[Rule]:
        _check_conversion(state, make)
        return list(names)

    rules = on_each_rank(checked)

    def naming(flat_tree: Contents) -> dict[str, StoredName]:
        result = {}
        for name, (torch_name, swap) in _torch_names(state, rules).items():
            for slot, torch_slot in SLOTS.items():
                full = joined(slot, name)
                stored = StoredName(joined("state", torch_name, torch_slot), swap)
                result[full if full in flat_tree.tensors else slot] = stored
        return result

    def numbers(reader: BoxReader) -> dict[str, Any]:
        names, paths = _torch_names(state, rules), _paths(state)
        torch_names = [torch_name for torch_name, _ in names.values()]
        steps = _step_counts(reader, part, torch_names)
        count = max(steps.values(), default=0)
        missed = {paths[name]: late for name, (torch_name, _) in names.items() if (late := count - steps[torch_name])}
        hyperparameters = _our_hyperparameters(state["numbers"], _groups(reader, part, torch_names), make)
        return {"step": count, "missed": missed, "numbers": hyperparameters}

    ignore = [r"param_groups\..*", r"state\..*\.step"]
    request = LoadRequest(part, naming, True, ignore, converts=True, advice=_NO_STATE)
    task = f"load_torch_optimizer {path}"
    moments, other_entries = load_into(task, path, {slot: state[slot] for slot in SLOTS}, request, donate, numbers)
    return {**state, **other_entries, **moments}


_NO_STATE = (
    ". Torch has no state of parameters that never had a gradient, and does not change them: where that is why it is "
    "missing, freeze them here, too (frozen= of shard)"
)


def _check_conversion(state: Any, make: Any) -> None:
    if make not in (torch.optim.Adam, torch.optim.AdamW):
        raise TypeError(f"make must be torch.optim.AdamW or torch.optim.Adam, got {make!r}")
    if not isinstance(state, dict) or set(state) != {"step", "numbers", "missed", *SLOTS}:
        has = f"a dict of {listed(state)}" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise TypeError(
            f"this takes the state of shardfn.optim.adam or adamw, not {has}; where one of them is the last of a "
            f"chain, its state is state[-1]"
        )


def _torch_names(state: Any, rules: list[Rule]) -> dict[str, StoredName]:
    """The name of each of our parameters in the files."""
    return renamed([name for name, *_ in parameters(state["mean"])], rules)


def _paths(state: Any) -> dict[str, str]:
    """The path by which the state counts a parameter's steps, for each of our names."""
    trained = [unit for unit in units(state["mean"]).each if unit.values is not None]
    paths = [path for unit in trained for _, path, _ in spread(unit)]
    return dict(zip((name for name, *_ in parameters(state["mean"])), paths, strict=True))


# --- to torch ---


def _hyperparameter(hyperparameters: dict[str, Any], name: str, step: int, path: str, shape: Ints) -> float:
    """A hyperparameter of the group of parameter `path`."""
    if name not in hyperparameters:
        raise ValueError(
            f"torch_optimizer: {name} is a function of this optimizer, and not in its state: pass {name}= as to the "
            f"optimizer, or the number that goes to torch"
        )
    value = hyperparameters[name]
    if callable(value):
        value = value(max(step, 1)) if name == "lr" else value(path, shape)
    return float(value)


def _group(make: Make, key: tuple[float, ...], names: list[str]) -> Group:
    """A group with these hyperparameters in torch's form."""
    lr, b1, b2, eps, weight_decay = key
    optimizer = make([torch.zeros(1, device="cpu")], lr=lr, betas=(b1, b2), eps=eps, weight_decay=weight_decay)
    group = {**optimizer.param_groups[0], "params": names}
    return {name: value if type(value) in (bool, int, float) else Value(value) for name, value in group.items()}


# --- from torch ---


def _step_counts(reader: BoxReader, part: str, torch_names: list[str]) -> dict[str, int]:
    """Each parameter's count of steps."""
    entries = {name: joined(part, "state", name, "step") for name in torch_names}
    available = reader.source.tensors.keys() | reader.source.numbers.keys()
    if missing := [entry for entry in entries.values() if entry not in available]:
        raise CheckpointError(f"missing in the checkpoint: {listed(missing)}")
    return {name: int(_value(reader, entry)) for name, entry in entries.items()}


def _groups(reader: BoxReader, part: str, torch_names: list[str]) -> dict[str, Group]:
    """The group of each of these parameters, from either of torch's two layouts."""
    prefix = joined(part, "param_groups") + "."
    source = reader.source
    entries = [*source.numbers, *source.tensors, *source.others]
    in_groups = {name.removeprefix(prefix): name for name in entries if name.startswith(prefix)}
    numbered = any(re.fullmatch(r"\d+\.params(\.\d+)?", name) for name in in_groups)
    groups: dict[str, Group] = {}
    if numbered:
        for name, full in in_groups.items():
            number, _, rest = name.partition(".")
            groups.setdefault(number, {})[rest] = full
        by_name = {str(param): group for group in groups.values() for param in _read_list(reader, group, "params")}
    else:
        by_name = {
            param: {
                name.removeprefix(f"{param}."): full for name, full in in_groups.items() if name.startswith(f"{param}.")
            }
            for param in torch_names
        }
    without = [param for param in torch_names if not by_name.get(param)]
    if without:
        raise CheckpointError(f"no group of {prefix[:-1]} in the checkpoint has {listed(without)}")
    read: dict[int, Group] = {}
    for param in torch_names:
        group = by_name[param]
        if id(group) not in read:
            keys = dict.fromkeys(name.partition(".")[0] for name in group if not name.startswith("params"))
            read[id(group)] = {
                key: _value(reader, group[key]) if key in group else _read_list(reader, group, key) for key in keys
            }
    return {param: read[id(by_name[param])] for param in torch_names}


def _read_list(reader: BoxReader, group: Group, key: str) -> list[Any]:
    """A list, which is stored as one entry or as an entry for each item."""
    if key in group:
        return list(_value(reader, group[key]))
    numbers = sorted(int(name.rpartition(".")[2]) for name in group if re.fullmatch(rf"{key}\.\d+", name))
    return [_value(reader, group[f"{key}.{number}"]) for number in numbers]


def _value(reader: BoxReader, name: str) -> Any:
    """A number, or another small value."""
    source = reader.source
    if name in source.numbers:
        return source.numbers[name]
    if name in source.tensors:
        return reader.read(name, full_box(source.tensors[name].shape)).tolist()
    if not isinstance(source, TensorSource):
        return None
    file, offset, length = source.places[name]
    with open_readonly(source.folder / file) as descriptor:
        try:
            return unpickled(descriptor, offset, length)
        except Flaw as error:
            raise CheckpointError(f"{source.folder / file}: {name}: {error}") from error


def _our_hyperparameters(hyperparameters: dict[str, Any], groups: dict[str, Group], make: Make) -> dict[str, Any]:
    """Our hyperparameters with the values of torch's groups; raises for options that ours lack."""
    for name, group in groups.items():
        if "amsgrad" not in group:  # other optimizers may have the same moments
            raise CheckpointError(f"the group of {name} is neither of torch.optim.Adam nor of AdamW: it has no amsgrad")
        wrong = next((option for option in ("amsgrad", "maximize") if group.get(option)), None)
        if wrong:
            raise CheckpointError(f"the group of {name} has {wrong}=True, which shardfn.optim does not have")
        decoupled = group.get("decoupled_weight_decay")
        if decoupled is not None and group.get("weight_decay") and decoupled is not (make is torch.optim.AdamW):
            torch_class, ours_name = ("AdamW", "adamw") if decoupled else ("Adam", "adam")
            raise CheckpointError(
                f"the group of {name} is torch.optim.{torch_class}'s: go on with shardfn.optim.{ours_name}, and pass "
                f"make=torch.optim.{torch_class}"
            )
    return {key: _common_hyperparameter(key, value, groups) for key, value in hyperparameters.items()}


def _common_hyperparameter(key: str, value: Any, groups: dict[str, Group]) -> Any:
    """The value of one hyperparameter, which must be the same in all groups."""
    torch_key, index = NUMBERS[key]
    values: dict[Any, str] = {}
    for name, group in groups.items():
        if torch_key not in group:
            raise CheckpointError(f"the group of {name} has no {torch_key}")
        values.setdefault(group[torch_key] if index is None else group[torch_key][index], name)
    if len(values) > 1:
        (a, first), (b, second), *_ = values.items()
        raise CheckpointError(
            f"{key} is {a} for {first} and {b} for {second}, and this state has one for all: make the optimizer "
            f"with a function, {key}=lambda path, shape: ..."
        )
    number = next(iter(values), value)
    return torch.full_like(value, number) if isinstance(value, Tensor) else number
