"""Writes the program that facts describe: mesh, strategy, model and stages, optimizer, step, and loop."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from shardfn.translate import optimizers
from shardfn.translate.draft import TranslationBuilder, UndefinedName
from shardfn.translate.values import strategy_path

_WIDTH = 88
_ABOUT = {
    "module": "your torch.nn.Module",
    "mean": "mean(model, params, *batch) is the mean loss of this rank's rows",
    "total": "total(model, params, *batch) is the sum over this rank's tokens, or rows",
    "count": "count(*batch) is how many of them there are",
    "optimizer": "such as so.adamw(1e-4)",
    "rows": "what is read: a data set, or a tree of tensors",
    "batches": "as sf.run.batches(rows, mesh, DATA, 64, seed=0) makes them",
    "steps": "of the whole run",
    "folder": "where checkpoints go",
}
_HYBRID, _LOCAL = ("hybrid_shard", "hybrid_shard_zero2", "hpz"), 'int(os.environ["LOCAL_WORLD_SIZE"])'
_CAST = """\
for part in module.modules():
    if not isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
        for buffer in part.buffers(recurse=False):
            if buffer.is_floating_point():
                buffer.data = buffer.data.to({dtype})"""
_STEP = """\


def step(held, batch):
    batch = batch if isinstance(batch, tuple) else (batch,)
    value, grads = gradient(held["params"], batch{scale})
    metrics = {{"loss": value{unscaled}}}
    params, state = optimizer.step(held["params"], grads, held["state"])
    return {{"params": params, "state": state}}, metrics

"""
# One or more lines of the program, and the facts that they come from.
_Line = tuple[str, tuple[str, ...]]


def program(draft: TranslationBuilder) -> str:
    """The text of the program; adds the names that it needs to those of the draft."""
    loss = ("total", "count") if draft.get("tokens") else ("mean",)
    draft.names = {**{name: _ABOUT[name] for name in ("module", *loss)}, **draft.names}
    parts = (_mesh_lines, _strategy_lines, _model_lines, _optimizer_lines, _loss_lines, _step_lines, _loop_lines)
    text = "\n".join(_text(code, draft.keys_for_facts(*facts)) for part in parts for code, facts in part(draft))
    heads = [f"import {name}" for name in ("math", "os") if f"{name}." in text]
    also = [name for name in ("P", "checkpoint", "interop", "quant") if f"{name}." in text or f"{name}(" in text]
    heads += [""] if heads else []
    imports = [*heads, "import torch", "", "import shardfn as sf"] + ["import shardfn.optim as so"] * ("so." in text)
    yours = [f"#   {name}: {about}" for name, about in draft.names.items()]
    return "\n".join([*imports, f"from shardfn import {', '.join(also)}", "", "# Yours:", *yours, "", text, ""])


def _text(code: str, keys: tuple[str, ...]) -> str:
    """Lines with the keys that they come from, as a comment behind or above them."""
    keys_text = ", ".join(keys)
    if not keys:
        return code
    if "\n" not in code and len(code) + len(keys_text) + 4 <= _WIDTH:
        return f"{code}  # {keys_text}"
    indent = code[: len(code) - len(code.lstrip(" "))]
    comment = textwrap.wrap(keys_text, _WIDTH - len(indent) - 2)
    return "\n".join([*(f"{indent}# {row}" for row in comment), code])


def _axes(cut: str) -> tuple[str, ...]:
    """The axes that shard a batch."""
    if cut == "mics":
        return ("replica", "node", "gpu")
    if cut in _HYBRID:
        return ("replica", "shard")
    return ("data",) if cut in ("ddp", "zero1", "zero2") else ("shard",)


def _mesh_lines(draft: TranslationBuilder) -> Iterator[_Line]:
    names, tensor, ranks = _axes(draft.get("cut")), draft.get("tensor", 1), draft.get("ranks")
    data_ranks = ranks // tensor if ranks and ranks % tensor == 0 else None
    replica, shard = draft.get("replica"), draft.get("shard")
    if len(names) == 3:
        yield f"gpus = {_LOCAL}", ()
        sizes: dict[str, Any] = {"replica": -1, "node": f"{shard} // gpus", "gpu": "gpus"}
    elif len(names) == 2:
        if replica is None:
            replica = data_ranks // shard if data_ranks and shard and data_ranks % shard == 0 else -1
        if shard is None:
            divides = data_ranks and data_ranks % replica == 0
            shard = _LOCAL if replica == -1 else data_ranks // replica if divides else -1
        sizes = {"replica": replica, "shard": shard}
    else:
        sizes = {names[0]: data_ranks or shard or -1}
    arguments = [f"{name}={size}" for name, size in sizes.items()]
    arguments += [f"tensor={tensor}"] if tensor > 1 else []
    arguments += ['device="cpu"'] if draft.get("cpu") else []
    arguments += [f"scratch={json.dumps(draft.get('scratch'))}"] if draft.get("scratch") else []
    facts = "replica shard dp_replicate dp_shard ranks machines tensor cpu scratch"
    yield f"mesh = sf.make_mesh({', '.join(arguments)})", tuple(facts.split())
    quoted = ", ".join(f'"{name}"' for name in names)
    yield f"DATA = ({quoted})" if len(names) > 1 else f"DATA = {quoted}", ()


def _strategy_lines(draft: TranslationBuilder) -> Iterator[_Line]:
    cut = draft.get("cut")
    axes = {2: 'shard="shard", replica="replica"', 3: '("gpu", "node"), replica="replica"'}
    yield f"strategy = {strategy_path(cut)}({axes.get(len(_axes(cut)), 'DATA')})", ("cut", "dp_replicate")
    tiers = [kind for kind in ("params", "grads", "state") if draft.get(kind)]
    if tiers:
        offloads = ", ".join(f'{kind}="{draft.get(kind)}"' for kind in tiers)
        yield f"strategy = strategy.with_tiers({offloads})", tuple(tiers)
    if draft.get("uncut") is not None:
        yield f"strategy = sf.strategies.replicate_small(strategy, below={draft.get('uncut')})", ("uncut",)


def _model_lines(draft: TranslationBuilder) -> Iterator[_Line]:
    if draft.get("param_dtype"):
        yield f"module = module.to({draft.get('param_dtype')})", ("param_dtype",)
    if draft.get("buffer_dtype") is not None:
        yield _CAST.format(dtype=draft.get("buffer_dtype")), ("buffer_dtype",)
    options = list(_options(draft))
    if options:
        yield "model = interop.functional(\n    module,", ()
        yield from ((f"    {code},", facts) for code, facts in options)
        yield ")", ()
    else:
        yield "model = interop.functional(module)", ()
    yield "params = model.shard(mesh, strategy)", ()


def _options(draft: TranslationBuilder) -> Iterator[_Line]:
    get = draft.get
    classes = ", ".join(f'"{name}"' for name in get("stages", ()))
    compile_options = {name: get(f"compile_{name}") for name in ("backend", "mode", "fullgraph", "dynamic")}
    compiled = ", ".join(f'"{name}": {_code(value)}' for name, value in compile_options.items() if value is not None)
    options = {
        "stages": f"stages={{{classes}}}",
        "min_num_params": f"min_num_params={get('min_num_params')}",
        "one_unit": "stages=lambda path, part: False, min_stage_params=2**62",
        "tensor": 'tensor="auto"',
        "sync_batch_norm": "sync_batch_norm=DATA",
    }
    if compiled or get("compile"):
        facts = ("compile", *(f"compile_{name}" for name in compile_options))
        yield f"compile={{{compiled}}}" if compiled else "compile=True", facts
    for name in ("remat", "prefetch", "gather_dtype", "reduce_dtype", "output_dtype", "gather_format", "reduce_format"):
        options[name] = f"{name}={get(name)}"
    off = {"tensor": 1}
    yield from ((code, (fact,)) for fact, code in options.items() if get(fact) not in (None, off.get(fact)))
    low = get("gather_dtype") or get("param_dtype")
    if get("cast_inputs") and low:
        yield f"input_dtype={low}", ("cast_inputs", "gather_dtype", "param_dtype")


def _optimizer_lines(draft: TranslationBuilder) -> Iterator[_Line]:
    make, scheduled = draft.get("optimizer"), draft.get("schedule")
    hyperparameters = dict(draft.get("optimizer_params", {}))
    if scheduled:
        if "lr" not in hyperparameters and optimizers.needs_lr(scheduled[1]):
            hyperparameters["lr"] = draft.name("lr", "the learning rate")
        yield "\n", ()
        name, numbers = scheduled
        yield optimizers.rate(name, numbers, hyperparameters.get("lr")) + "\n\n", ("schedule",)
        hyperparameters["lr"] = UndefinedName("rate")
    if draft.get("decayed"):
        decay = f"    return {draft.get('decayed')} * (len(shape) > 1)"
        if not scheduled:
            yield "\n", ()
        yield f"def decay(path, shape):  # not of biases and norms\n{decay}\n\n", ("decayed",)
    if make is None:
        rate = "; its learning rate is the function rate" if scheduled else ""
        draft.name("optimizer", f"{_ABOUT['optimizer']}{rate}")
    elif "." in make:
        yield f"optimizer = so.from_torch({make}{_more(hyperparameters)})", ("optimizer", "optimizer_params")
    else:
        state = {"state_dtype": UndefinedName(draft.get("state_dtype"))} if draft.get("state_dtype") else {}
        line = f"optimizer = so.{make}({hyperparameters.pop('lr')}{_more({**hyperparameters, **state})})"
        yield line, ("optimizer", "optimizer_params", "state_dtype")
    for fact, call in (("clip", "clip_by_global_norm"), ("clip_value", "clip_by_value")):
        if draft.get(fact) is not None:
            order = draft.get("clip_order") if fact == "clip" else None
            more = {None: "", 1: ", order=1"}.get(order, ", order=float('inf')")
            yield f"optimizer = so.chain(so.{call}({draft.get(fact)}{more}), optimizer)", (fact, "clip_order")
    if draft.get("skip_nonfinite"):
        yield "optimizer = so.skip_nonfinite(optimizer)", ("skip_nonfinite",)
    if draft.get("scaled"):
        fixed = {"scale": draft.get("fixed"), "growth_factor": 1.0, "backoff_factor": 1.0}
        adapts = {name: draft.get(name) for name in ("growth_interval", "scale") if draft.get(name) is not None}
        numbers = _more(fixed if draft.get("fixed") else adapts)
        yield f"optimizer = so.dynamic_loss_scale(optimizer{numbers})", ("scaled", "fixed", "growth_interval", "scale")
    yield "state = optimizer.init(params)", ()


def _code(value: Any) -> str:
    if isinstance(value, UndefinedName):
        return value
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _more(settings: dict[str, Any]) -> str:
    """Further arguments of a call, each after a comma."""
    arguments: dict[str, str] = {}
    for name, value in settings.items():
        if name == "betas":
            is_name = isinstance(value, UndefinedName)
            arguments |= {f"b{i + 1}": f"{value}[{i}]" if is_name else _code(value[i]) for i in (0, 1)}
        else:
            arguments[optimizers.OURS.get(name, name)] = _code(value)
    return "".join(f", {name}={code}" for name, code in arguments.items())


def _ranks_code(draft: TranslationBuilder) -> str:
    """Code for the number of ranks that have different rows."""
    return f"(mesh.size() // {draft.get('tensor')})" if draft.get("tensor", 1) > 1 else "mesh.size()"


def _many(draft: TranslationBuilder) -> bool:
    """Whether a step has several micro-batches."""
    count = draft.get("accumulate")
    return bool(draft.get("train_batch") and draft.get("micro_batch")) if count is None else count != 1


def _loss_lines(draft: TranslationBuilder) -> Iterator[_Line]:
    """The loss of a micro-batch: its part of the mean over ranks and micro-batches, or over all their tokens."""
    count, total, micro = draft.get("accumulate"), draft.get("train_batch"), draft.get("micro_batch")
    product = f"{micro} * {'micro_batches * ' if _many(draft) else ''}{_ranks_code(draft)}"
    if count is None and _many(draft):
        yield f"micro_batches = {total} // ({micro} * {_ranks_code(draft)})", ("train_batch", "micro_batch")
    elif _many(draft) and count != "micro_batches":
        yield f"micro_batches = {count}", ("accumulate",)
    if total and micro:
        key_name = next((key.rpartition(".")[2] for key in draft.keys_for_facts("train_batch")), "train_batch_size")
        error = f'raise ValueError("{key_name} is not what this mesh makes")'
        yield f"if {total} != {product}:\n    {error}", ("train_batch", "micro_batch")
    tokens, scaled, autocast = draft.get("tokens"), bool(draft.get("scaled")), draft.get("autocast")
    comment = "each token counts once" if tokens == "all" else "the mean over ranks and micro-batches"
    extra = "".join(f"{name}, " for name, is_used in (("tokens", tokens), ("scale", scaled)) if is_used)
    yield f"\n\ndef loss(params, {extra}*batch):  # {comment}, as there", ()
    local_loss = f"{'total' if tokens else 'mean'}(model, params, *batch)" + (".float()" if autocast or scaled else "")
    if autocast:
        yield f"    with torch.autocast(mesh.device_type, {autocast}):", ("autocast",)
        yield f"        own = {local_loss}", ()
        local_loss = "own"
    summed = tokens == "all" or draft.get("divide") or not draft.get("mean", True)
    local_loss = f"{local_loss} / tokens" if tokens == "own" else local_loss
    parts = " / tokens" if tokens == "all" else " / micro_batches" if _many(draft) and not tokens else ""
    parts += f" / {draft.get('divide')}" if draft.get("divide") else ""
    reduced = f"sf.{'psum' if summed else 'pmean'}({local_loss}, DATA){parts}{' * scale' if scaled else ''}"
    yield f"    return {reduced}", ("mean", "tokens", "divide")


def _step_lines(draft: TranslationBuilder) -> Iterator[_Line]:
    tokens, scaled = draft.get("tokens"), bool(draft.get("scaled"))
    extra_names = [name for name, is_used in (("tokens", tokens), ("scale", scaled)) if is_used]
    yield "\n\n@sf.shard_map(mesh=mesh, in_specs=..., out_specs=(P(), ...))", ()
    yield f"def gradient(params, batch{', scale' if scaled else ''}):", ()
    if tokens:
        yield f"    tokens = {'count(*batch)' if tokens == 'own' else 'sf.psum(count(*batch), DATA)'}", ()
    if extra_names:
        yield f"\n    def whole(params, *batch):\n        return loss(params, {', '.join(extra_names)}, *batch)\n", ()
    function = "whole" if extra_names else "loss"
    if _many(draft):
        yield f"    return sf.accumulate({function}, batch, micro=micro_batches)(params)", ()
    else:
        yield f"    return sf.value_and_grad({function})(params, *batch)", ()
    scale, unscaled = (', held["state"]["scale"]', ' / held["state"]["scale"]') if scaled else ("", "")
    yield _STEP.format(scale=scale, unscaled=unscaled), ()


def _loop_lines(draft: TranslationBuilder) -> Iterator[_Line]:
    total, micro, save, seed = (draft.get(fact) for fact in ("train_batch", "micro_batch", "save", "seed"))
    if total or micro:
        draft.name("rows", _ABOUT["rows"])
        size = total or f"{micro} * {'micro_batches * ' if _many(draft) else ''}{_ranks_code(draft)}"
        line = f"batches = sf.run.batches(rows, mesh, DATA, {size}, seed={seed or 0})"
        yield line, ("train_batch", "micro_batch", "seed")
    else:
        draft.name("batches", _ABOUT["batches"])
    steps = draft.get("steps") or draft.name("steps", _ABOUT["steps"])
    arguments = [f"steps={steps}"] + ([f"seed={seed}"] if seed else [])
    if save == "sharded":
        folder = draft.name("folder", _ABOUT["folder"])
        arguments += [f"save={folder}", *([f"keep_last={draft.get('keep')}"] if draft.get("keep") else [])]
    yield 'held = {"params": params, "state": state}', ()
    facts = ("steps", "seed", *(("save", "keep") if save == "sharded" else ()))
    yield f"held, run = sf.run.loop(step, held, batches, {', '.join(arguments)})", facts
    if save == "full":
        draft.name("folder", _ABOUT["folder"])
        yield 'checkpoint.export_hf(f"{folder}/whole", held["params"])', ("save",)
