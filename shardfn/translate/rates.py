"""Learning rates of other systems, as functions of the step that give the same numbers."""

from __future__ import annotations

from typing import Any


def lines(kind: str, given: dict[str, Any], lr: Any) -> list[str]:
    """The code of `rate(step)`, which counts from 1; DeepSpeed's first step has its scheduler's -1."""
    if kind in _OTHERS:
        return _OTHERS[kind](given, lr)
    body = {"WarmupLR": _warmup, "WarmupDecayLR": _warmup, "WarmupCosineLR": _cosine, "LRRangeTest": _range}[kind](
        given, lr
    )
    return ["def rate(step):", *(f"    {line}" for line in ["done = step - 2", *body])]


def _share(given: dict[str, Any]) -> list[str]:
    count = given["warmup_num_steps"]
    warmup = f"max(2, {count})" if isinstance(count, str) else str(max(2, count))
    share = "math.log(done + 1) / math.log(warmup)" if given["warmup_type"] == "log" else "done / warmup"
    return [f"warmup = {warmup}", "if done < warmup:", f"    share = {share}"]


def _warmup(given: dict[str, Any], lr: Any) -> list[str]:
    low, high = given["warmup_min_lr"], given["warmup_max_lr"]
    high = lr if high is None else high
    after = "1.0"
    if "total_num_steps" in given:
        total = given["total_num_steps"]
        after = f"max(0.0, ({total} - done) / max(1, {total} - warmup))"
    return [
        "if done < 0:",
        f"    return {low}",
        *_share(given),
        "else:",
        f"    share = {after}",
        f"return {low} + ({high} - {low}) * share",
    ]


def _cosine(given: dict[str, Any], lr: Any) -> list[str]:
    low, end, total = given["warmup_min_ratio"], given["cos_min_ratio"], given["total_num_steps"]
    return [
        "if done < 0:",
        "    return 0.0",
        *_share(given),
        f"    return {lr} * ({low} + (1 - {low}) * share)",
        f"progress = min(1.0, (done - warmup + 1) / max(1, {total} - warmup))",
        f"return {lr} * max(0.0, {end} + (1 - {end}) * (1 + math.cos(math.pi * progress)) / 2)",
    ]


def _range(given: dict[str, Any], lr: Any) -> list[str]:
    low, size = given["lr_range_test_min_lr"], given["lr_range_test_step_size"]
    tests = f"math.floor((done + 1) / {size})" if given["lr_range_test_staircase"] else f"(done + 1) / {size}"
    return [f"return {low} * (1 + {given['lr_range_test_step_rate']} * {tests})"]


def _composer(given: dict[str, Any], lr: Any) -> list[str]:
    arguments = f"{lr}, warmup={given['warmup']}, steps={given['steps']}"
    calls = {
        "cosine_with_warmup": f"so.warmup_cosine({arguments}, end={lr} * {given['alpha_f']})",
        "linear_decay_with_warmup": f"so.linear({arguments}, end={lr} * {given['alpha_f']})",
        "constant_with_warmup": f"so.wsd({lr}, warmup={given['warmup']}, decay=0, steps={given['warmup']})",
    }
    return [
        f"schedule = {calls[given['name']]}",
        "",
        "",
        "def rate(step):  # theirs counts from 0",
        "    return schedule(step - 1)",
    ]


def _transformers(given: dict[str, Any], lr: Any) -> list[str]:
    warmup, total = given["warmup"], given["steps"]
    share = f"({total} - done) / max(1, {total} - {warmup})"
    after = {
        "linear": f"max(0.0, {share})",
        "cosine": f"max(0.0, (1 + math.cos(math.pi * (1 - {share}))) / 2)",
        "constant_with_warmup": "1.0",
    }[given["name"]]
    return [
        "def rate(step):  # theirs counts from 0",
        "    done = step - 1",
        f"    if done < {warmup}:",
        f"        return {lr} * done / max(1, {warmup})",
        f"    return {lr} * {after}",
    ]


_OTHERS = {"composer": _composer, "transformers": _transformers}
