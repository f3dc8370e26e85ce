"""What DeepSpeed's optimizers and schedules of the learning rate are called here, and their defaults there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardfn.translate.draft import Draft
from shardfn.translate.facts import TranslateError
from shardfn.translate.meanings import (
    Meaning,
    always,
    meant,
    missing,
)
from shardfn.translate.values import is_open, number, on, pair, shown, whole

_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("adam", _ADAM),
    "adamw": ("adamw", _ADAM),
    "lion": ("lion", {"betas": (0.9, 0.99), "weight_decay": 0.0}),
    "sgd": ("sgd", {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False}),
    "adagrad": ("torch.optim.Adagrad", {}),
    "adadelta": ("torch.optim.Adadelta", {}),
    "rmsprop": ("torch.optim.RMSprop", {}),
    "nadam": ("torch.optim.NAdam", {}),
    "radam": ("torch.optim.RAdam", {}),
    "adamax": ("torch.optim.Adamax", {}),
}
_OF_TORCH = {
    "torch.optim.Adagrad": "lr_decay weight_decay initial_accumulator_value eps",
    "torch.optim.Adadelta": "rho eps weight_decay",
    "torch.optim.RMSprop": "alpha eps weight_decay momentum centered",
    "torch.optim.NAdam": "betas eps weight_decay momentum_decay decoupled_weight_decay",
    "torch.optim.RAdam": "betas eps weight_decay decoupled_weight_decay",
    "torch.optim.Adamax": "betas eps weight_decay",
}
_NEUTRAL: dict[str, Meaning] = {
    "torch_adam": always("one implementation on each tier"),
    "adam_w_mode": always("whether it is so.adamw or so.adam"),
    "bias_correction": missing("it is always there", "True"),
    "amsgrad": missing("so.from_torch(torch.optim.AdamW, amsgrad=True, ...)", "False"),
    "fp32_optimizer_states": missing("state has the dtype of the parameters' shards, float32 here", "True"),
    "dampening": missing("so.from_torch(torch.optim.SGD, dampening=...)", "0", "0.0"),
    "maximize": missing("the loss with the other sign", "False"),
    "fused": always("torch's fused kernels where there are any"),
    "foreach": always("torch's fused kernels where there are any"),
    "set_grad_none": always("gradients are values"),
    "amp": always("see fp16"),
}


def optimizer(draft: Draft, key: str, value: Any) -> None:
    """The mapping `optimizer`: its type and arguments."""
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise TranslateError(f"{key}: {shown(value)} has no type, such as AdamW")
    for name, one in value.items():
        if name not in ("type", "params"):
            text = "one implementation" if name == "legacy_fusion" else "no key of an optimizer that is known here"
            draft.row(f"{key}.{name}", one, "always" if name == "legacy_fusion" else "unknown", text)
    kind, given = value["type"].lower(), value.get("params") or {}
    if not isinstance(given, Mapping):
        raise TranslateError(f"{key}.params: {shown(given)} is not a mapping of keys")
    if kind == "auto" or kind not in OPTIMIZERS:
        near = "; Muon of theirs scales and groups parameters otherwise than so.muon" if kind == "muon" else ""
        said = "the program has the name optimizer for yours"
        if kind == "auto":
            draft.row(f"{key}.type", value["type"], "open", f"its value is not in the file: {said}")
        else:
            draft.row(f"{key}.type", value["type"], "missing", f"not there{near}: {said}")
        for name, one in given.items():
            draft.row(f"{key}.params.{name}", one, "open", "an argument of that optimizer")
        return
    make, defaults = OPTIMIZERS[kind]
    if kind == "adam" and on(f"{key}.params.adam_w_mode", given.get("adam_w_mode", True)):
        make = "adamw"
        draft.row(f"{key}.type", value["type"], "becomes", "so.adamw: adam_w_mode is on unless it is said")
    else:
        draft.row(
            f"{key}.type", value["type"], "becomes", f"so.{make}" if "." not in make else f"so.from_torch({make}, ...)"
        )
    draft.say("optimizer", make, f"{key}.type")
    found = dict(defaults)
    if on(f"{key}.params.torch_adam", given.get("torch_adam", False)) and make == "adamw":
        found["weight_decay"] = 0.01
    for name, one in given.items():
        where = f"{key}.params.{name}"
        if name in _NEUTRAL and "." not in make:
            meant(draft, where, one, _NEUTRAL[name])
        elif name == "lr" or name in defaults or name in _OF_TORCH.get(make, "").split():
            found[name] = _argument(draft, where, name, one, make)
            draft.facts["optimizer_keys"] = (*draft.get("optimizer_keys", ()), where)
        else:
            draft.row(where, one, "unknown", f"no argument of so.{make}")
    if "lr" not in found:
        found["lr"] = draft.name("lr", "the learning rate")
        draft.row(f"{key}.params.lr", "not said", "open", "the program has the name lr for it")
    draft.facts["optimizer_params"] = found


def _argument(draft: Draft, key: str, name: str, value: Any, make: str) -> Any:
    if is_open(value):
        draft.row(key, value, "open", f"its value is not in the file: the program has the name {name} for it")
        return draft.name(name, f"of the optimizer, {name}")
    draft.row(key, value, "becomes", {"betas": "b1= and b2= of so." + make}.get(name, f"{name}= of the optimizer"))
    if name == "betas":
        return pair(key, value)
    return value if isinstance(value, bool) or ("." in make and not isinstance(value, str)) else number(key, value)


SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {
        "total_num_steps": None,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupCosineLR": {
        "total_num_steps": None,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
}


def scheduler(draft: Draft, key: str, value: Any) -> None:
    """The mapping `scheduler`: its type and arguments."""
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise TranslateError(f"{key}: {shown(value)} has no type, such as WarmupLR")
    kind, given = value["type"], value.get("params") or {}
    for name, one in value.items():
        if name not in ("type", "params"):
            draft.row(f"{key}.{name}", one, "unknown", "no key of a scheduler that is known here")
    if not isinstance(given, Mapping):
        raise TranslateError(f"{key}.params: {shown(given)} is not a mapping of keys")
    if kind not in SCHEDULES:
        why = (
            "it moves momentum too, which is a number here" if kind == "OneCycle" else "a function of the step is yours"
        )
        draft.row(f"{key}.type", kind, "missing", f"not there: {why}")
        for name, one in given.items():
            draft.row(f"{key}.params.{name}", one, "open", "an argument of that scheduler")
        return
    found = dict(SCHEDULES[kind])
    draft.row(f"{key}.type", kind, "becomes", "a function of the step")
    for name, one in given.items():
        where = f"{key}.params.{name}"
        if name == "last_batch_iteration" and one == -1:
            draft.row(where, one, "always", "a run begins at its first step")
        elif name not in found:
            draft.row(where, one, "unknown", f"no argument of {kind}")
        elif is_open(one):
            found[name] = draft.name(name, f"of {kind}")
            draft.row(where, one, "open", f"its value is not in the file: the program has the name {name} for it")
        else:
            found[name] = _rated(where, name, one)
            draft.row(where, one, "becomes", "a number in that function")
    for name, one in found.items():
        if one is None and name == "total_num_steps":
            raise TranslateError(f"{key}.params: {kind} has no total_num_steps")
    draft.say("schedule", (kind, tuple(found.items())), f"{key}.type", *(f"{key}.params.{name}" for name in given))


def _rated(key: str, name: str, value: Any) -> Any:
    if name == "warmup_type":
        if value not in ("log", "linear"):
            raise TranslateError(f"{key}: {shown(value)} is not log or linear")
        return value
    if name == "lr_range_test_staircase":
        return on(key, value)
    return whole(key, value) if name.endswith(("_steps", "_size")) else number(key, value)
