"""The program that facts make: a mesh, a strategy, the model and its stages, an optimizer, the loss, a step, saving."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from shardfn.translate import rates
from shardfn.translate.draft import Draft, Name
from shardfn.translate.facts import Line

_WIDTH = 88
_ABOUT = {
    "module": "your torch.nn.Module",
    "mean": "mean(model, params, *batch) is the mean loss of this rank's rows",
    "optimizer": "such as so.adamw(1e-4)",
    "total": "total(model, params, *batch) is the sum over this rank's tokens, or rows",
    "count": "count(*batch) is how many of them there are",
}


def program(draft: Draft) -> str:
    """The text of the program; adds the names that it needs to those of the draft."""
    body = [*_mesh(draft), *_model(draft), *_optimizer(draft), *_step(draft), *_saving(draft)]
    loss = ("total", "count") if draft.get("tokens") else ("mean",)
    draft.names = {**{name: _ABOUT[name] for name in ("module", *loss)}, **draft.names}
    text = "\n".join(_text(line) for line in body)
    heads = [f"import {name}" for name in ("math", "os") if f"{name}." in text]
    also = [name for name in ("P", "checkpoint", "interop", "quant") if f"{name}." in text or f"{name}(" in text]
    imports = [
        *heads,
        *([""] if heads else []),
        "import torch",
        "",
        "import shardfn as sf",
        "import shardfn.optim as so",
    ]
    yours = [f"#   {name}: {about}" for name, about in draft.names.items()]
    return "\n".join([*imports, f"from shardfn import {', '.join(also)}", "", "# Yours:", *yours, "", text, ""])


def _text(line: Line) -> str:
    if not line.keys:
        return line.code
    said = ", ".join(line.keys)
    if "\n" not in line.code and len(line.code) + len(said) + 4 <= _WIDTH:
        return f"{line.code}  # {said}"
    indent = line.code[: len(line.code) - len(line.code.lstrip(" "))]
    comment = textwrap.wrap(said, _WIDTH - len(indent) - 2)
    return "\n".join([*(f"{indent}# {one}" for one in comment), line.code])


def axes(draft: Draft) -> tuple[str, ...]:
    """Those over which a batch is cut."""
    cut = draft.get("cut", "ddp")
    if cut == "mics":
        return ("replica", "node", "gpu")
    if cut in ("hybrid_shard", "hybrid_shard_zero2", "hpz"):
        return ("replica", "shard")
    return ("data",) if cut in ("ddp", "zero1", "zero2") else ("shard",)


def _mesh(draft: Draft) -> Iterator[Line]:
    names, tensor, ranks = axes(draft), draft.get("tensor", 1), draft.get("ranks")
    here = ranks // tensor if ranks and ranks % tensor == 0 else None
    sizes: dict[str, Any] = {}
    if names == ("replica", "node", "gpu"):
        yield Line('gpus = int(os.environ["LOCAL_WORLD_SIZE"])')
        sizes = {"replica": -1, "node": f"{draft.get('shard')} // gpus", "gpu": "gpus"}
    elif len(names) == 2:
        replica, shard = draft.get("replica"), draft.get("shard")
        if replica is None:
            replica = here // shard if here and shard and here % shard == 0 else -1
        if shard is None:
            local = 'int(os.environ["LOCAL_WORLD_SIZE"])'
            shard = local if replica == -1 else here // replica if here and here % replica == 0 else -1
        sizes = {"replica": replica, "shard": shard}
    else:
        sizes = {names[0]: here or draft.get("shard") or -1}
    if tensor > 1:
        sizes["tensor"] = tensor
    arguments = [f"{name}={size}" for name, size in sizes.items()]
    if draft.get("cpu"):
        arguments.append('device="cpu"')
    if draft.get("scratch"):
        arguments.append(f"scratch={json.dumps(draft.get('scratch'))}")
    keys = draft.of("replica", "shard", "dp_replicate", "dp_shard", "ranks", "machines", "tensor", "cpu", "scratch")
    yield Line(f"mesh = sf.make_mesh({', '.join(arguments)})", keys)
    every = ", ".join(f'"{name}"' for name in names)
    yield Line(f"DATA = ({every})" if len(names) > 1 else f"DATA = {every}")


def _strategy(draft: Draft) -> Iterator[Line]:
    cut, names = draft.get("cut", "ddp"), axes(draft)
    two = 'shard="shard", replica="replica"' if len(names) == 2 else '("gpu", "node"), replica="replica"'
    yield Line(f"strategy = sf.{cut}({two if len(names) > 1 else 'DATA'})", draft.of("cut", "dp_replicate"))
    tiers = {kind: draft.get(kind) for kind in ("params", "grads", "state") if draft.get(kind)}
    if tiers:
        said = ", ".join(f'{kind}="{tier}"' for kind, tier in tiers.items())
        yield Line(f"strategy = strategy.on({said})", draft.of(*tiers))
    if draft.get("uncut") is not None:
        yield Line(f"strategy = sf.uncut(strategy, below={draft.get('uncut')})", draft.of("uncut"))


def _model(draft: Draft) -> Iterator[Line]:
    yield from _strategy(draft)
    if draft.get("param_dtype"):
        yield Line(f"module = module.to({draft.get('param_dtype')})", draft.of("param_dtype"))
    if draft.get("buffer_dtype") is not None:
        yield Line(
            "for part in module.modules():\n"
            "    if not isinstance(part, torch.nn.modules.batchnorm._BatchNorm):\n"
            "        for buffer in part.buffers(recurse=False):\n"
            "            if buffer.is_floating_point():\n"
            f"                buffer.data = buffer.data.to({draft.get('buffer_dtype')})",
            draft.of("buffer_dtype"),
        )
    options = list(_options(draft))
    if options:
        yield Line("model = interop.functional(\n    module,")
        for code, keys in options:
            yield Line(f"    {code},", keys)
        yield Line(")")
    else:
        yield Line("model = interop.functional(module)")
    yield Line("params = model.shard(mesh, strategy)")


def _options(draft: Draft) -> Iterator[tuple[str, tuple[str, ...]]]:
    if draft.get("stages"):
        classes = ", ".join(f'"{name}"' for name in draft.get("stages"))
        yield f"stages={{{classes}}}", draft.of("stages")
    if draft.get("min_num_params"):
        yield f"min_num_params={draft.get('min_num_params')}", draft.of("min_num_params")
    if draft.get("one_unit"):
        yield "stages=lambda path, part: False, small=2**62", draft.of("one_unit")
    if draft.get("tensor", 1) > 1:
        yield 'tensor="auto"', draft.of("tensor")
    if draft.get("sync_batch_norm"):
        yield "sync_batch_norm=DATA", draft.of("sync_batch_norm")
    if draft.get("compile"):
        said = ", ".join(f'"{name}": {_code(value)}' for name, value in draft.get("compile").items())
        yield f"compile={{{said}}}", draft.of("compile")
    for name in ("remat", "prefetch", "gather_dtype", "reduce_dtype", "output_dtype", "gather", "reduce"):
        if draft.get(name) is not None:
            yield f"{name}={draft.get(name)}", draft.of(name)
    low = draft.get("gather_dtype") or draft.get("param_dtype")
    if draft.get("cast_inputs") and low:
        yield f"input_dtype={low}", draft.of("cast_inputs", "gather_dtype", "param_dtype")


def _optimizer(draft: Draft) -> Iterator[Line]:
    make = draft.get("optimizer")
    given = dict(draft.get("optimizer_params", {}))
    keys = (*draft.of("optimizer"), *draft.get("optimizer_keys", ()))
    if draft.get("schedule"):
        kind, said = draft.get("schedule")
        yield Line("\n")
        yield Line(
            "\n".join(rates.lines(kind, dict(said), given.get("lr", _lr(draft, said)))) + "\n\n", draft.of("schedule")
        )
        given["lr"] = Name("rate")
    if draft.get("decayed"):
        rule = (
            f"def decay(path, shape):  # not of biases and norms\n    return {draft.get('decayed')} * (len(shape) > 1)"
        )
        yield Line(f"\n\n{rule}\n\n", draft.of("decayed"))
    if make is None:
        about = f"{_ABOUT['optimizer']}" + ("; its learning rate is the function rate" if draft.get("schedule") else "")
        draft.name("optimizer", about)
    elif "." in make:
        yield Line(f"optimizer = so.from_torch({make}, {_arguments(given)})", keys)
    else:
        if draft.get("state_dtype"):
            given["state_dtype"] = Name(draft.get("state_dtype"))
        yield Line(f"optimizer = so.{make}({given.pop('lr')}{_more(given)})", keys + draft.of("state_dtype"))
    for name, call in (("clip", "clip_by_global_norm"), ("clip_value", "clip_by_value")):
        if draft.get(name) is not None:
            yield Line(f"optimizer = so.chain(so.{call}({draft.get(name)}), optimizer)", draft.of(name))
    if draft.get("skip_nonfinite"):
        yield Line("optimizer = so.skip_nonfinite(optimizer)", draft.of("skip_nonfinite"))
    if draft.get("scaled") is not None:
        yield Line(f"optimizer = so.loss_scaled(optimizer{_more(draft.get('scaled'))})", draft.of("scaled"))
    yield Line("state = optimizer.init(params)")


def _code(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _lr(draft: Draft, said: Any) -> Any:
    """Of a schedule without an optimizer, which is a part of its peak."""
    if dict(said).get("warmup_max_lr", 0) is None or "cos_min_ratio" in dict(said) or "alpha_f" in dict(said):
        return draft.name("lr", "the learning rate")
    return None


def _arguments(given: dict[str, Any]) -> str:
    made = []
    for name, value in given.items():
        if name == "betas" and not isinstance(value, Name):
            made += [f"b1={value[0]}", f"b2={value[1]}"]
        elif name == "betas":
            made += [f"b1={value}[0]", f"b2={value}[1]"]
        else:
            made.append(f"{name}={value if isinstance(value, Name) else _code(value)}")
    return ", ".join(made)


def _more(given: dict[str, Any]) -> str:
    return f", {_arguments(given)}" if given else ""


def _data_ranks(draft: Draft) -> str:
    return f"(mesh.size() // {draft.get('tensor')})" if draft.get("tensor", 1) > 1 else "mesh.size()"


def _step(draft: Draft) -> Iterator[Line]:
    count, ranks = draft.get("accumulate"), _data_ranks(draft)
    total, micro = draft.get("train_batch"), draft.get("micro_batch")
    if count is None and total and micro:
        keys = draft.of("train_batch", "micro_batch")
        count = f"{total} // ({micro} * {ranks})"
    elif count is not None:
        keys = draft.of("accumulate")
    many = count is not None and count != 1
    if many:
        yield Line(f"micro_batches = {count}" if count != "micro_batches" else "", keys)
    if total and micro:
        product = f"{micro} * {'micro_batches * ' if many else ''}{ranks}"
        said = '"train_batch_size is not what this mesh makes"'
        yield Line(f"if {total} != {product}:\n    raise ValueError({said})", draft.of("train_batch", "micro_batch"))
    elif total or micro:
        about = "rows of a step, on all ranks" if total else "rows of a micro-batch on one rank"
        yield Line(f"# {about}: {total or micro}", draft.of("train_batch", "micro_batch"))
    scaled = draft.get("scaled") is not None
    yield from _loss(draft, many, scaled)
    yield Line("\n\n@sf.shard_map(mesh=mesh, in_specs=..., out_specs=(P(), ...))")
    yield Line(
        f"def gradient(params, batches{', scale' * scaled}):  # batches: as many as micro_batches"
        if many
        else f"def gradient(params, batch{', scale' * scaled}):"
    )
    whole = [name for name, yes in (("tokens", draft.get("tokens")), ("scale", scaled)) if yes]
    if draft.get("tokens"):
        own = "sum(count(*batch) for batch in batches)" if many else "count(*batch)"
        yield Line(f"    tokens = {own if draft.get('tokens') == 'own' else f'sf.psum({own}, DATA)'}")
    function = "loss"
    if whole:
        function = "whole"
        yield Line(f"\n    def whole(params, *batch):\n        return loss(params, {', '.join(whole)}, *batch)\n")
    if many:
        yield Line(f"    return sf.accumulate({function}, batches)(params)")
    else:
        yield Line(f"    return sf.value_and_grad({function})(params, *batch)")
    given = "batches" if many else "batch"
    yield Line(f"\n\ndef train_step(params, state, {given}):")
    if scaled:
        yield Line(f'    value, grads = gradient(params, {given}, state["scale"])')
        yield Line('    return value / state["scale"], *optimizer.step(params, grads, state)')
    else:
        yield Line(f"    value, grads = gradient(params, {given})")
        yield Line("    return value, *optimizer.step(params, grads, state)")


def _loss(draft: Draft, many: bool, scaled: bool) -> Iterator[Line]:
    """Of a micro-batch: its part of the mean over ranks and micro-batches, or over all of their tokens."""
    tokens, divide = draft.get("tokens"), draft.get("divide")
    what = "each token counts once" if tokens == "all" else "the mean over ranks and micro-batches"
    head = f"def loss(params, {'tokens, ' * bool(tokens)}{'scale, ' * scaled}*batch):"
    yield Line(f"\n\n{head}  # {what}, as there")
    inner = f"{'total' if tokens else 'mean'}(model, params, *batch)"
    if draft.get("autocast"):
        yield Line(f"    with torch.autocast(mesh.device_type, {draft.get('autocast')}):", draft.of("autocast"))
        yield Line(f"        own = {inner}.float()")
        inner = "own"
    summed = tokens == "all" or divide or not draft.get("mean", True)
    own = f"{inner} / tokens" if tokens == "own" else inner
    reduced = f"sf.psum({own}, DATA)" if summed else f"sf.pmean({own}, DATA)"
    parts = " / tokens" * (tokens == "all") if tokens else " / micro_batches" * many
    over = f" / {divide}" if divide else ""
    yield Line(f"    return {reduced}{parts}{over}{' * scale' * scaled}", draft.of("mean", "tokens", "divide"))


def _saving(draft: Draft) -> Iterator[Line]:
    how = draft.get("save")
    if how is None:
        return
    yield Line("\n\ndef save(folder, step):")
    if how == "sharded":
        keep = f", keep={draft.get('keep')}" if draft.get("keep") else ""
        yield Line('    held = {"params": params, "state": state, "step": step}')
        yield Line(f'    checkpoint.save(f"{{folder}}/step-{{step:08}}", held{keep})', draft.of("save", "keep"))
    else:
        yield Line('    checkpoint.export(f"{folder}/step-{step:08}", params)', draft.of("save"))
