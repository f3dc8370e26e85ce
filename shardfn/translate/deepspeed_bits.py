"""What the keys of DeepSpeed's `fp16` and `bf16` mean: what is gathered, reduced and scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardfn.translate.draft import Draft
from shardfn.translate.facts import TranslateError
from shardfn.translate.meanings import (
    Section,
    Table,
    Whole,
    always,
    apply,
    flag,
    meant,
    missing,
    sets,
)
from shardfn.translate.values import is_open, number, on, shown, whole


def sixteen_bits(draft: Draft, made: str, key: str) -> None:
    """DeepSpeed's 16 bits: a master in float32, and all that moves in the dtype of the model."""
    draft.say("gather_dtype", made, key)
    draft.say("cast_inputs", True, key)
    draft.facts.setdefault("reduce_dtype", made)
    draft.keys.setdefault("reduce_dtype", (key,))
    if made == "torch.float16":
        draft.facts.setdefault("scaled", {})
        draft.keys.setdefault("scaled", (key,))


_NOT_SCALED = {
    "hysteresis": "the scale shrinks at the first gradient that is not finite",
    "min_loss_scale": "the scale has no least value",
}
SIXTEEN: Table = {
    "enabled": sets("see below"),
    "loss_scale": Whole(lambda draft, key, value: _scale(draft, key, value)),
    "initial_scale_power": Whole(lambda draft, key, value: _scaling(draft, key, value, "scale")),
    "loss_scale_window": Whole(lambda draft, key, value: _scaling(draft, key, value, "every")),
    "hysteresis": missing(_NOT_SCALED["hysteresis"], "1"),
    "consecutive_hysteresis": always("there is no hysteresis"),
    "min_loss_scale": missing(_NOT_SCALED["min_loss_scale"], "0"),
    "auto_cast": flag(always("input_dtype= casts what stages get"), always("input_dtype= casts what stages get")),
    "fp16_master_weights_and_grads": missing("the master is the float32 shard", "False"),
    "bf16_master_weights_and_grads": missing("module.to(torch.bfloat16) has no master in float32", "False"),
    "bf16_optimizer_states": flag(
        sets("state_dtype=torch.bfloat16 of the optimizer", state_dtype="torch.bfloat16"), always("float32")
    ),
    "immediate_grad_update": always("gradients are added up as they come"),
    "check_grad_overflow": flag(
        sets("so.skip_nonfinite", skip_nonfinite=True), always("no check unless one is asked for")
    ),
    "check_overflow": flag(sets("so.skip_nonfinite", skip_nonfinite=True), always("no check unless one is asked for")),
}


def _scale(draft: Draft, key: str, value: Any) -> None:
    if is_open(value):
        meant(draft, key, value, sets("so.loss_scaled", ignored=number))
        return
    fixed = number(key, value)
    if fixed:
        draft.facts["scaled"] = {"scale": fixed, "growth": 1.0, "backoff": 1.0}
        draft.keys["scaled"] = (*draft.of("scaled"), key)
        draft.facts["fixed_scale"] = True
    draft.row(key, value, "becomes", "so.loss_scaled, " + ("with this scale always" if fixed else "whose scale adapts"))


def _scaling(draft: Draft, key: str, value: Any, argument: str) -> None:
    if is_open(value):
        draft.row(key, value, "open", f"its value is not in the file; {argument}= of so.loss_scaled")
    elif draft.get("fixed_scale"):
        draft.row(key, value, "always", "of no effect with a fixed loss_scale")
    else:
        found = whole(key, value, 0)
        draft.facts["scaled"] = {**draft.get("scaled", {}), argument: 2.0**found if argument == "scale" else found}
        draft.keys["scaled"] = (*draft.of("scaled"), key)
        draft.row(key, value, "becomes", f"{argument}= of so.loss_scaled")


def bits(made: str) -> Whole:
    """The mapping `fp16`, or that of `bf16`, by its dtype."""

    def read(draft: Draft, key: str, value: Any) -> None:
        if isinstance(value, bool):
            value = {"enabled": value}
        if not isinstance(value, Mapping):
            raise TranslateError(f"{key}: {shown(value)} is not a mapping of keys")
        enabled = value.get("enabled", False)
        if is_open(enabled):
            draft.row(f"{key}.enabled", enabled, "open", "its value is not in the file; the lines for 16 bits")
            enabled = False
        elif on(f"{key}.enabled", enabled):
            sixteen_bits(draft, made, f"{key}.enabled")
            text = f"gather_dtype=, reduce_dtype= and input_dtype= of the stages: {made}"
            draft.row(f"{key}.enabled", True, "becomes", text)
            if made == "torch.float16":
                adapting(draft, f"{key}.", value)
        rest = {
            name: one for name, one in sorted(value.items(), key=lambda i: i[0] != "loss_scale") if name != "enabled"
        }
        if not on(key, enabled):
            apply(draft, {"off": {"enabled": False, **rest}}, {"off": Section(SIXTEEN, "enabled")}, f"{key}.")
            draft.rows[:] = [_shorter(row, f"{key}.off.", f"{key}.") for row in draft.rows]
        else:
            apply(draft, rest, SIXTEEN, f"{key}.", "DeepSpeed")

    return Whole(read)


def _shorter(row: Any, old: str, new: str) -> Any:
    return replace(row, key=row.key.replace(old, new, 1))


def adapting(draft: Draft, prefix: str, value: Mapping[str, Any]) -> None:
    """Defaults that are others than those of so.loss_scaled, where the scale adapts."""
    scale = value.get("loss_scale", 0)
    if not is_open(scale) and not number(f"{prefix}loss_scale", scale):
        draft.facts["scaled"] = {"every": 1000, **draft.get("scaled", {})}
        for name, default in (("hysteresis", 2), ("min_loss_scale", 1)):
            if name not in value:
                draft.row(f"{prefix}{name}", f"{default}, the default", "missing", _NOT_SCALED[name])
