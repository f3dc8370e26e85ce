"""Calls of a program next to the one that shards it: plain data parallelism's, peft's, and unread ones.

Each call that sets something has a row: those that nothing reads are `missing`, so no program passes without them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from shardfn.translate.accelerate import BACKEND, MODE
from shardfn.translate.draft import TranslationBuilder
from shardfn.translate.fsdp import OPTIMIZERS, optimizer
from shardfn.translate.schema import Section, Table, always, meant, missing, same_for, sets, yours
from shardfn.translate.values import SourceCall, SourceExpression, as_switch, dtype, shown

_ADAPTERS = missing("lora.init(model, ...): docs/how-to/train-adapters.md")
_QUANTIZED = missing("quant.quantize(model.tree, quant.nf4(), ...): docs/how-to/train-adapters-on-four-bits.md")
_FOREIGN = missing("of quantized folders, those of bitsandbytes in 4 bits can be read")
_SEED = yours("seed= of sf.run.loop and sf.run.batches, and what seeds the module's weights")


def _autocast(draft: TranslationBuilder, key: str, call: SourceCall) -> None:
    """Reads torch.autocast, whose dtype on CUDA is float16 unless it is said."""
    arguments = dict(call.arguments)
    where, enabled = arguments.get("device_type"), arguments.get("enabled", True)
    if isinstance(enabled, SourceExpression) or (where is None and "argument 1" in arguments):
        draft.open(f"{key}.enabled", enabled, "torch.autocast around the model")
    elif not as_switch(f"{key}.enabled", enabled):
        draft.row(key, call, "always", "no autocast unless it is said")
    elif isinstance(arguments.get("dtype"), SourceExpression):
        draft.open(f"{key}.dtype", arguments["dtype"], "torch.autocast around the model")
    else:
        low = dtype(f"{key}.dtype", arguments.get("dtype", "bf16" if where == "cpu" else "fp16"))
        draft.say("autocast", low, key)
        draft.row(key, call, "becomes", f"torch.autocast around the model: {low}")


_COMPILE: Table = {
    "model": always("each stage"),
    "backend": BACKEND,
    "mode": MODE,
    "fullgraph": sets("compile= of functional", compile_fullgraph=as_switch),
    "dynamic": sets("compile= of functional", compile_dynamic=lambda key, x: None if x is None else as_switch(key, x)),
    "options": missing("compile= of functional takes a dict of torch.compile's arguments", "None"),
    "disable": missing("leave compile= out", "False"),
}


def _zero1(draft: TranslationBuilder, key: str, call: SourceCall) -> None:
    """Reads ZeroRedundancyOptimizer: the optimizer of its class, with state sharded over the ranks."""
    arguments = dict(call.arguments)
    make, group = arguments.pop("optimizer_class", None), arguments.pop("process_group", None)
    for name in ("parameters_as_bucket_view", "overlap_with_ddp"):
        if name in arguments:
            draft.row(f"{key}.{name}", arguments.pop(name), "always", "the step gathers what it has updated")
    if group is not None:
        draft.row(f"{key}.process_group", group, "missing", "write the mesh: its axes are the groups")
    draft.put("cut", "zero1", key)
    draft.row(key, call, "becomes", "the strategy sf.strategies.zero1")
    name = make.text.rpartition(".")[2] if isinstance(make, SourceExpression) else ""
    if name in OPTIMIZERS:
        optimizer(draft, name, SourceCall(name, call.line, arguments))
    else:
        draft.row(f"{key}.optimizer_class", make, "open", "the program has the name optimizer for it")


# By the last parts of names, or by whole names where the last part means many things.
TABLE: Table = {
    "ZeroRedundancyOptimizer": _zero1,
    "autocast": _autocast,
    "torch.compile": Section(_COMPILE, "torch.compile", itself=sets("compile= of functional", compile=True)),
    "convert_sync_batchnorm": sets("sync_batch_norm= of functional", sync_batch_norm=True),
    "gradient_checkpointing_enable": sets("remat=True", remat="True"),
    "torch.distributed.fsdp.wrap.wrap": yours("a stage: stages= of functional says which; no number changes"),
    **same_for("seed_everything set_seed", _SEED),
    **same_for("BitsAndBytesConfig prepare_model_for_kbit_training", _QUANTIZED),
    **same_for("GPTQConfig AwqConfig HqqConfig QuantoConfig TorchAoConfig FineGrainedFP8Config EetqConfig", _FOREIGN),
    **same_for("LoraConfig get_peft_model", _ADAPTERS),
    **same_for("PromptTuningConfig PrefixTuningConfig IA3Config LoHaConfig LoKrConfig AdaLoraConfig "
               "PromptEncoderConfig",
           missing("adapters are low-rank: a module that peft has changed is taken as it is")),
    "param_groups": missing("lr=, weight_decay= and the like of the optimizer take a function of the step"),
    "AveragedModel": missing("so.ema(optimizer, ...): docs/how-to/evaluate-averaged-parameters.md"),
    "SWALR": missing("lr= of the optimizer takes a function of the step"),
    "register_hook": missing("gradients are values: change them before optimizer.step"),
    "join": missing("all ranks take as many steps: remainder= of sf.run.batches"),
}  # fmt: skip


def add_rows(
    draft: TranslationBuilder,
    calls: Iterable[SourceCall],
    used: Collection[SourceCall],
    modules: Mapping[str, str],
    known: Collection[str],
) -> None:
    """Adds the rows of the calls next to the one that shards.

    Args:
        draft: the translation.
        calls: those of the program that may set something.
        used: those that have rows.
        modules: where names are imported from; "" for those that the file defines.
        known: names that have rows elsewhere.
    """
    read_ids = {id(call) for call in used} | {id(call) for outer in used for call in _nested_calls(outer)}
    places = {(call.name, call.line) for outer in used for call in (outer, *_nested_calls(outer))}
    texts = set()
    for call in calls:
        meaning = TABLE.get(call.name)
        text = f"{call.name}({', '.join(f'{key}={shown(x)}' for key, x in call.arguments.items())})"
        if id(call) in read_ids or text in texts or call.name in known or (call.name, call.line) in places:
            continue
        texts.add(text)
        if meaning is not None:
            takes_call = isinstance(meaning, Section) or callable(meaning)
            meant(draft, call.name, call if takes_call else SourceExpression(text), meaning)
        elif modules.get(call.name) == "":
            draft.row(call.name, SourceExpression(text), "yours", "this file defines it")
        elif modules.get(call.name, "").startswith("transformers") and call.name.endswith("Config"):
            draft.row(call.name, SourceExpression(text), "yours", "of the model, which is yours")
        else:
            draft.row(
                call.name, SourceExpression(text), "missing", "not read beside what shards here: translate it by itself"
            )


_MODELS = ("model", "module", "params", "model_parameters", "parameters")


def _nested_calls(value: Any) -> Iterable[SourceCall]:
    """The calls among the arguments of a call, but those that make the model, which are not read with it."""
    inner = value.arguments if isinstance(value, SourceCall) else value
    inner = {key: x for key, x in inner.items() if key not in _MODELS} if isinstance(inner, Mapping) else inner
    inner = inner.values() if isinstance(inner, Mapping) else inner if isinstance(inner, (list, tuple)) else ()
    for item in inner:
        if isinstance(item, SourceCall):
            yield item
        yield from _nested_calls(item)
