"""Optimizers of other systems, with their arguments and defaults, and learning rates as functions of the step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardfn.translate.draft import TranslationBuilder
from shardfn.translate.schema import Section, Table, always, missing, read, same_for, sets
from shardfn.translate.values import TranslateError, as_count, as_switch, number, pair, shown

_ADAM = "lr betas eps weight_decay"
TAKES = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "lion": "lr betas weight_decay",
    "lamb": "lr betas eps min_coeff max_coeff weight_decay",
    "sgd": "lr momentum weight_decay nesterov",
    "torch.optim.Adagrad": "lr lr_decay weight_decay initial_accumulator_value eps",
    "torch.optim.Adadelta": "lr rho eps weight_decay",
    "torch.optim.RMSprop": "lr alpha eps weight_decay momentum centered",
    "torch.optim.NAdam": "lr betas eps weight_decay momentum_decay decoupled_weight_decay",
    "torch.optim.RAdam": "lr betas eps weight_decay decoupled_weight_decay",
    "torch.optim.Adamax": "lr betas eps weight_decay",
}
OURS = {"min_coeff": "min_trust_ratio", "max_coeff": "max_trust_ratio"}  # arguments with other names
# Arguments that shardfn's optimizers do not have.
_OTHERS: Table = {
    "torch_adam": always("one implementation on each tier"),
    "adam_w_mode": always("whether it is so.adamw or so.adam"),
    "bias_correction": missing("it is always there", "True"),
    "eps_inside_sqrt": missing("so.lamb adds eps to the root", "False"),
    "max_grad_norm": missing("gradient_clipping, which becomes so.clip_by_global_norm", "0", "0.0"),
    "amsgrad": missing("so.from_torch(torch.optim.AdamW, amsgrad=True, ...)", "False"),
    "fp32_optimizer_states": missing("state has the dtype of the parameters' shards, float32 here", "True"),
    "dampening": missing("so.from_torch(torch.optim.SGD, dampening=...)", "0", "0.0"),
    "maximize": missing("the loss with the other sign", "False"),
    "fused": always("torch's fused kernels where there are any"),
    "foreach": always("torch's fused kernels where there are any"),
    "capturable": always("a rate may be a tensor"),
    "differentiable": missing("donate=False of the optimizer", "False"),
    "set_grad_none": always("gradients are values"),
    "amp": always("see fp16"),
}

_ANY = ["maximize", "fused", "foreach", "capturable", "differentiable"]


@dataclass(frozen=True)
class OptimizerCounterpart:
    """An optimizer of another system: its counterpart, defaults that differ there, and notes on its arguments."""

    ours: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The row's text: what it becomes."""
        return f"so.from_torch({self.ours}, ...)" if "." in self.ours else f"so.{self.ours}"


def _growth(key: str, value: Any) -> str:
    if value not in ("log", "linear"):
        raise TranslateError(f"{key}: {shown(value)} is not log or linear")
    return str(value)


_READERS: dict[str, Any] = {
    "betas": pair,
    **same_for("nesterov centered decoupled_weight_decay", as_switch),
    **same_for("total_num_steps warmup_num_steps lr_range_test_step_size", as_count),
    "warmup_type": _growth,
    "lr_range_test_staircase": as_switch,
}


def read_kind(key: str, value: Any, kind: str, example: str) -> str:
    """The type or name of an optimizer or a scheduler.

    Raises:
        TranslateError: it has none.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get(kind), str):
        raise TranslateError(f"{key}: {shown(value)} has no {kind}, such as {example}")
    return str(value[kind])


def unread(draft: TranslationBuilder, key: str, kind: str, prefix: str, settings: Mapping[str, Any]) -> None:
    """Adds the rows of an optimizer that has no counterpart, or whose name is not in the file."""
    advice = "the program has the name optimizer for yours"
    if kind.lower() == "auto":
        draft.row(key, kind, "open", f"its value is not in the file: {advice}")
    else:
        near = "; Muon of theirs scales and groups parameters otherwise than so.muon" if kind.lower() == "muon" else ""
        draft.row(key, kind, "missing", f"not there{near}: {advice}")
    for name, argument in settings.items():
        draft.row(f"{prefix}{name}", argument, "open", "an argument of that optimizer")


def arguments(
    draft: TranslationBuilder, key: str, settings: Mapping[str, Any], kind: OptimizerCounterpart
) -> dict[str, Any]:
    """Reads and returns an optimizer's arguments, completed by its defaults; adds them as a fact."""
    takes = TAKES[kind.ours].split()
    table: dict[str, Any] = {key: _OTHERS[key] for key in _ANY} if "." in kind.ours else dict(_OTHERS)
    for name in takes:
        text = f"b1= and b2= of so.{kind.ours}" if name == "betas" else f"{OURS.get(name, name)}= of the optimizer"
        fact = {f"optimizer.{name}": _READERS.get(name, number)}
        table[name] = sets(text + kind.notes.get(name, ""), name=name, about=f"of the optimizer, {name}", **fact)
    read(draft, key, settings, Section(table, kind.ours))
    facts = {name: f"optimizer.{name}" for name in (*settings, *takes) if f"optimizer.{name}" in draft.facts}
    values = {**kind.defaults, **{name: draft.get(fact) for name, fact in facts.items()}}
    if "lr" not in values:
        values["lr"] = draft.name("lr", "the learning rate")
        draft.row(f"{key}.lr", "not said", "open", "the program has the name lr for it")
    draft.put("optimizer_params", values, *draft.keys_for_facts(*facts.values()))
    return values


# --- learning rates ---

# DeepSpeed's scheduler counts its first step as -1.
_WARMUP = """\
def rate(step):
    done = step - 2
    if done < 0:
        return {warmup_min_lr}
    warmup = {warmup}
    if done < warmup:
        share = {share}
    else:
        share = {after}
    return {warmup_min_lr} + ({warmup_max_lr} - {warmup_min_lr}) * share"""
_COSINE = """\
def rate(step):
    done = step - 2
    if done < 0:
        return 0.0
    warmup = {warmup}
    if done < warmup:
        share = {share}
        return {lr} * ({warmup_min_ratio} + (1 - {warmup_min_ratio}) * share)
    progress = min(1.0, (done - warmup + 1) / max(1, {total_num_steps} - warmup))
    return {lr} * max(0.0, {cos_min_ratio} + (1 - {cos_min_ratio}) * (1 + math.cos(math.pi * progress)) / 2)"""
_RANGE = """\
def rate(step):
    done = step - 2
    return {lr_range_test_min_lr} * (1 + {lr_range_test_step_rate} * {tests})"""
_OURS = """\
schedule = {call}


def rate(step):  # theirs counts from 0
    return schedule(step - 1)"""
_TRANSFORMERS = """\
def rate(step):  # theirs counts from 0
    done = step - 1
    if done < {warmup}:
        return {lr} * done / max(1, {warmup})
    return {lr} * {after}"""
_LEFT = "({steps} - done) / max(1, {steps} - {warmup})"
_AFTER = {
    "linear": f"max(0.0, {_LEFT})",
    "cosine": f"max(0.0, (1 + math.cos(math.pi * (1 - {_LEFT}))) / 2)",
    "constant_with_warmup": "1.0",
}
_COMPOSER = {
    "cosine_with_warmup": "so.warmup_cosine({lr}, warmup={warmup}, steps={steps}, end={lr} * {alpha_f})",
    "linear_decay_with_warmup": "so.warmup_linear({lr}, warmup={warmup}, steps={steps}, end={lr} * {alpha_f})",
    "constant_with_warmup": "so.wsd({lr}, warmup={warmup}, decay=0, steps={warmup})",
}
_STEPS = {"warmup_num_steps": 1000, "warmup_type": "log"}
SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "WarmupLR": (_WARMUP, {"warmup_min_lr": 0.0, "warmup_max_lr": None, **_STEPS}),
    "WarmupDecayLR": (_WARMUP, {"total_num_steps": None, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, **_STEPS}),
    "WarmupCosineLR": (
        _COSINE, {"total_num_steps": None, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, **_STEPS}
    ),
    "LRRangeTest": (
        _RANGE,
        {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000, "lr_range_test_step_rate": 1.0,
         "lr_range_test_staircase": False},
    ),
}  # fmt: skip
LR_SCHEDULER_TYPES = {*_AFTER, "constant"}


def rate(name: str, settings: Mapping[str, Any], lr: Any) -> str:
    """The code of a schedule's function `rate(step)`, which counts from 1; `lr` is the optimizer's."""
    values = {"lr": lr, **settings}
    if name in _COMPOSER and "alpha_f" in settings:
        return _OURS.format(call=_COMPOSER[name].format(**values))
    if name in _AFTER:
        return _TRANSFORMERS.format(after=_AFTER[name].format(**values), **values)
    if "lr_range_test_step_size" in settings:
        tests = f"(done + 1) / {settings['lr_range_test_step_size']}"
        return _RANGE.format(tests=f"math.floor({tests})" if settings["lr_range_test_staircase"] else tests, **values)
    count = settings["warmup_num_steps"]
    values["warmup"] = f"max(2, {count})" if isinstance(count, str) else max(2, count)
    values["share"] = "math.log(done + 1) / math.log(warmup)" if settings["warmup_type"] == "log" else "done / warmup"
    if settings.get("warmup_max_lr", 0) is None:
        values["warmup_max_lr"] = lr
    total = settings.get("total_num_steps")
    values["after"] = "1.0" if total is None else f"max(0.0, ({total} - done) / max(1, {total} - warmup))"
    return SCHEDULERS[name][0].format(**values)


def needs_lr(settings: Mapping[str, Any]) -> bool:
    """Whether a schedule scales the optimizer's rate."""
    return settings.get("warmup_max_lr", 0) is None or "cos_min_ratio" in settings or "alpha_f" in settings


def schedule_of_deepspeed(draft: TranslationBuilder, key: str, kind: str, settings: Mapping[str, Any]) -> None:
    """Reads the type and the arguments of a DeepSpeed scheduler."""
    if kind not in SCHEDULERS:
        moves = "it moves momentum too, which is a number here"
        reason = moves if kind == "OneCycle" else "a function of the step is yours"
        draft.row(f"{key}.type", kind, "missing", f"not there: {reason}")
        for name, argument in settings.items():
            draft.row(f"{key}.params.{name}", argument, "open", "an argument of that scheduler")
        return
    draft.row(f"{key}.type", kind, "becomes", "a function of the step")
    defaults, table = SCHEDULERS[kind][1], {"last_batch_iteration": missing("a run begins at its first step", "-1")}
    for name in defaults:
        fact = {f"schedule.{name}": _READERS.get(name, number)}
        table[name] = sets("a number in that function", name=name, about=f"of {kind}", **fact)
    read(draft, f"{key}.params", settings, Section(table, kind))
    values = {name: draft.get(f"schedule.{name}", default) for name, default in defaults.items()}
    if values.get("total_num_steps", 0) is None:
        raise TranslateError(f"{key}.params: {kind} has no total_num_steps")
    draft.say("schedule", (kind, values), f"{key}.type", *(f"{key}.params.{name}" for name in settings))


def steps_of(value: Any, total: int | None = None) -> int | None:
    """A time of Composer's in batches; None if it is given in epochs, tokens or samples, or not at all."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"([0-9.]+)(ba|dur)", str(value).replace("_", "").strip())
    if match is None or (match[2] == "dur" and total is None):
        return None
    return int(float(match[1]) * (1 if match[2] == "ba" else total or 0))


def schedule_of_composer(draft: TranslationBuilder, key: str, settings: Mapping[str, Any], total: int | None) -> None:
    """Reads the mapping of a Composer scheduler; `total` is the number of steps of the run."""
    name, warmup = settings["name"], steps_of(settings.get("t_warmup", 0), total)
    steps = steps_of(settings.get("t_max", "1dur"), total)
    readable = name in _COMPOSER and warmup is not None and (steps is not None or name == "constant_with_warmup")
    readable = readable and settings.get("alpha_i", 1.0) in (1, 1.0) and not settings.get("scale_warmup", False)
    reason = f"not {'in batches' if name in _COMPOSER else 'there'}: a function of the step is yours"
    for argument, value in settings.items():
        if argument not in ("name", "t_warmup", "t_max", "alpha_f", "alpha_i", "alpha", "scale_warmup"):
            draft.row(f"{key}.{argument}", value, "unknown", "no key of a scheduler that is known here")
        else:
            text = "a function of the step" if readable else reason
            draft.row(f"{key}.{argument}", value, "becomes" if readable else "open", text)
    if readable:
        alpha = number(f"{key}.alpha_f", settings.get("alpha_f", 0.0))
        numbers = {"warmup": warmup, "steps": max(steps or 0, warmup or 0), "alpha_f": alpha}
        draft.say("schedule", (name, numbers), *(f"{key}.{argument}" for argument in settings))
