"""Meanings of other systems' precisions: which dtype is gathered, reduced, computed in and scaled."""

from __future__ import annotations

from typing import Any

from shardfn.translate.draft import TranslationBuilder
from shardfn.translate.schema import By, Section, Table, always, flag, missing, same_for, sets
from shardfn.translate.values import as_count, dtype, is_open, natural, positive

_FACTS = {
    "fsdp1": ("gather_dtype", "reduce_dtype", "buffer_dtype"),
    "fsdp2": ("gather_dtype", "reduce_dtype", "output_dtype"),
}


def of_stages(draft: TranslationBuilder, low_dtype: str, key: str, kind: str) -> str:
    """Adds what a strategy of a kind, "fsdp1", "fsdp2" or "deepspeed", moves in 16 bits; returns the row's text."""
    if kind == "deepspeed":  # float32 master weights; everything moved has the model's dtype
        draft.say("gather_dtype", low_dtype, key)
        if "reduce_dtype" not in draft.facts:
            draft.say("reduce_dtype", low_dtype, key)
        if low_dtype == "torch.float16" and "scaled" not in draft.facts:
            draft.say("scaled", True, key)
    for fact in _FACTS.get(kind, ()):
        draft.say(fact, low_dtype, key)
    draft.say("cast_inputs", True, key)
    scaled = ", and so.dynamic_loss_scale" if kind == "deepspeed" and low_dtype == "torch.float16" else ""
    return f"gather_dtype=, reduce_dtype= and input_dtype= of the stages{scaled}"


def of_autocast(draft: TranslationBuilder, low_dtype: str, key: str) -> str:
    """Adds autocast to 16 bits; returns the row's text."""
    draft.say("autocast", low_dtype, key)
    if low_dtype != "torch.float16":
        return "torch.autocast around the model"
    draft.say("scaled", True, key)
    return "torch.autocast around the model, and so.dynamic_loss_scale, whose defaults are those of GradScaler"


_NOT_SCALED = {
    "hysteresis": (missing("the scale shrinks at the first gradient that is not finite", "1"), 2),
    "min_loss_scale": (missing("the scale has no least value", "0"), 1),
}
ADAPTING: Table = {
    "loss_scale": sets(
        "so.dynamic_loss_scale, with this scale always", off="so.dynamic_loss_scale, whose scale adapts", fixed=positive
    ),
    "initial_scale_power": sets(
        "scale= of so.dynamic_loss_scale", scale=lambda key, value: 2.0 ** as_count(key, value, 0)
    ),
    "loss_scale_window": sets("growth_interval= of so.dynamic_loss_scale", growth_interval=natural),
}
SCALING: Table = {**ADAPTING, **{name: meaning for name, (meaning, _) in _NOT_SCALED.items()}}


def where_adapting(draft: TranslationBuilder, prefix: str, settings: dict[str, Any]) -> None:
    """Takes out the keys that have no effect with a fixed scale."""
    scale = settings.get("loss_scale", 0)
    for name in ("initial_scale_power", "loss_scale_window"):
        if name in settings and not is_open(scale) and positive(f"{prefix}loss_scale", scale):
            draft.row(f"{prefix}{name}", settings.pop(name), "always", "of no effect with a fixed loss_scale")


def defaults(draft: TranslationBuilder, prefix: str, settings: dict[str, Any]) -> None:
    """If the scale adapts, adds DeepSpeed's defaults that differ from those of so.dynamic_loss_scale."""
    if draft.get("scaled") is None or draft.get("fixed") or is_open(settings.get("loss_scale")):
        return
    draft.facts.setdefault("growth_interval", 1000)
    for name, (meaning, default) in _NOT_SCALED.items():
        if name not in settings:
            draft.row(f"{prefix}{name}", f"{default}, the default", "missing", meaning.text)


_CHECKED = flag(sets("so.skip_nonfinite", skip_nonfinite=True), always("no check unless one is asked for"))
SIXTEEN: Table = {
    **SCALING,
    "enabled": sets("the lines for 16 bits"),
    "consecutive_hysteresis": always("there is no hysteresis"),
    "auto_cast": flag(always("input_dtype= casts what stages get"), always("input_dtype= casts what stages get")),
    "fp16_master_weights_and_grads": missing("the master is the float32 shard", "False"),
    "bf16_master_weights_and_grads": missing("module.to(torch.bfloat16) has no master in float32", "False"),
    "bf16_optimizer_states": flag(
        sets("state_dtype=torch.bfloat16 of the optimizer", state_dtype="torch.bfloat16"), always("float32")
    ),
    "immediate_grad_update": always("gradients are added up as they come"),
    "check_grad_overflow": _CHECKED,
    "check_overflow": _CHECKED,
}


def bits(low_dtype: str) -> Section:
    """DeepSpeed's section `fp16` or `bf16`, by its dtype."""

    def enabled(draft: TranslationBuilder, key: str, value: Any) -> None:
        draft.row(key, value, "becomes", f"{of_stages(draft, low_dtype, key, 'deepspeed')}: {low_dtype}")

    after = defaults if low_dtype == "torch.float16" else None
    table: Table = {**SIXTEEN, "enabled": enabled}
    return Section(table, "DeepSpeed", "enabled", first="enabled", before=where_adapting, after=after)


AUTOCAST = Section(
    {
        "enabled": sets("torch.autocast around the model"),
        "dtype": sets("torch.autocast around the model", autocast=dtype),
        "lower_precision_safe_modules": missing("torch.autocast is around the whole model", "None", "[]"),
    },
    "torch_autocast",
    "enabled",
    after=lambda draft, prefix, _: draft.say("autocast", draft.get("autocast", "torch.bfloat16"), f"{prefix}enabled"),
)
ACCUMULATED = By(
    {
        **same_for("fp32 float32 none", always("gradients are added up in the dtype of the shards")),
        **same_for("bf16 fp16 bfloat16 float16", missing("gradients are added up in the dtype of the shards, float32")),
    }
)
REDUCED = sets("reduce_dtype= of the stages", off="the default", reduce_dtype=dtype)

# `MixedPrecision(...)`, `MixedPrecisionPolicy(...)`, or a dict of their arguments.
_CASTS = flag(always("input_dtype= of the stages"), always("no input_dtype="))
POLICY: Table = {
    "param_dtype": sets("gather_dtype= of the stages, and reduce_dtype= unless it is said", gather_dtype=dtype),
    "reduce_dtype": REDUCED,
    "output_dtype": sets("output_dtype= of the stages: each layer's result", output_dtype=dtype),
    "buffer_dtype": sets("a cast of the buffers, other than those of batch norms", buffer_dtype=dtype),
    "keep_low_precision_grads": missing("a gradient has the dtype of its shard", "False"),
    "cast_forward_inputs": flag(
        always("input_dtype= of the stages"),
        always("no input_dtype=, unless FSDP1 casts the arguments of the whole model"),
    ),
    "cast_root_forward_inputs": _CASTS,
    "_module_classes_to_ignore": missing("batch norms keep their statistics in their own dtype; others are cast"),
}


def _policy(switch: str) -> Section:
    """The section of a policy; `switch` is the argument that says whether the model's inputs are cast."""

    def after(draft: TranslationBuilder, prefix: str, settings: dict[str, Any]) -> None:
        if draft.get("gather_dtype") and not draft.get("reduce_dtype"):
            draft.say("reduce_dtype", draft.get("gather_dtype"), f"{prefix}param_dtype")
        if "param_dtype" in settings:
            cast = "cast_root_forward_inputs" if "buffer_dtype" in settings else switch
            draft.put("cast_inputs", settings.get(cast, True) is not False)

    return Section(POLICY, "MixedPrecision", after=after)


POLICIES = By(
    {
        "none": always("the default: all in the dtype of the parameters"),
        "MixedPrecision()": _policy("cast_root_forward_inputs"),
    },
    _policy("cast_forward_inputs"),
)
