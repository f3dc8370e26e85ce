"""Programs as others write them, planned and run: modules of Hugging Face and of torch, optimizers, transforms."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardfn as sf
import shardfn.optim as so
from shardfn import P, interop, lora, parallel
from shardfn.parallel.pipeline import Schedule
from tests.plan.planned import Sent, sent_by, sent_by_second

Program = tuple[Callable[..., Any], tuple[Any, ...]]
DATA = "shard"


def hugging_face(kind: str, head: str, **sizes: Any) -> Callable[[Any], Program]:
    """A model from a configuration, which is trained on tokens, or on pictures."""

    def made(mesh: Any) -> Program:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **sizes)
        config.use_cache = False
        module = getattr(transformers, head)(config)
        model = interop.functional(module.to(torch.bfloat16))
        return training(mesh, model, lambda params, x: model(params, **inputs(kind, x)))

    return made


def inputs(kind: str, x: Tensor) -> dict[str, Any]:
    rows = x.shape[0]
    pictures = torch.zeros(rows, 3, 16, 16, device=x.device)
    tokens = torch.ones(rows, 6, dtype=torch.int64, device=x.device)
    match kind:
        case "vit":
            return {"pixel_values": pictures, "labels": tokens[:, 0]}
        case "clip":
            return {"input_ids": tokens, "pixel_values": pictures, "return_loss": True}
        case "t5":
            return {"input_ids": tokens, "labels": tokens}
    return {"input_ids": tokens, "labels": tokens}


def layers_of(g: torch.Generator) -> dict[str, Tensor]:
    return {"w": torch.randn(8, 8, generator=g), "v": torch.randn(8, 8, generator=g)}


def pipeline(schedule: Schedule, how: str) -> Callable[[Any], Program]:
    """Parts of different layers, whose results differ in structure and dtype, and a stage that all ranks have."""

    def made(mesh: Any) -> Program:
        size = mesh["pipe"].size()

        def at(path: str, _: Any) -> Any:
            stage, number, *_ = path.split(".")
            if stage == "scale":
                return sf.ddp("pipe")
            position = {"embed": 0, "head": size - 1}.get(stage)
            return sf.full_shard(DATA).only_on(pipe=int(number) * size // 4 if position is None else position)

        tree = {
            "embed": lambda g: {"w": torch.randn(13, 8, generator=g)},
            "blocks": [layers_of] * 4,
            "head": lambda g: {"w": torch.randn(8, 13, generator=g)},
            "scale": lambda g: {"s": torch.ones(8)},
        }
        params, opt = sf.init_sharded(tree, 0, mesh, at), so.adamw(0.1)
        embed, head, scale = (
            sf.stage(f) for f in (lambda p, x: p["w"][x], lambda p, x: x @ p["w"], lambda p, x: x * p["s"])
        )
        block = sf.stage(lambda p, x: x + torch.tanh(x @ p["w"]) @ p["v"], remat=True)

        def part(params: Any, x: Any, tokens: Tensor) -> Any:
            index = sf.axis_index("pipe")
            h = x["h"].float() if index else embed(params["embed"], tokens)
            h = h if index % 2 else scale(params["scale"], h)
            for i in parallel.split_layers(4, size)[index]:
                h = block(params["blocks"][i], h)
            if index == size - 1:
                return F.cross_entropy(head(params["head"], h).flatten(0, 1), tokens.flatten())
            return {"h": h if index else h.bfloat16(), "number": torch.ones(3, dtype=torch.int64, device=h.device)}

        def loss(params: Any, tokens: Tensor) -> Tensor:
            return parallel.pipeline(part, params, tokens.chunk(3), "pipe", schedule=schedule)

        @sf.shard_map(mesh=mesh, in_specs=..., out_specs=..., check=False)
        def step(params: Any, state: Any, tokens: Tensor) -> Any:
            if how == "evaluated":
                return loss(params, tokens)
            if how == "curved":
                return torch.func.jvp(sf.grad(lambda p: loss(p, tokens)), (params,), (params,))[1]
            value, grads = sf.value_and_grad(loss)(params, tokens)
            return *opt.step(params, grads, state), value

        return step, (params, opt.init(params), torch.zeros(7, 5, dtype=torch.int64, device=mesh.device_type))

    return made


def experts(**options: Any) -> Callable[[Any], Program]:
    """A mixture of experts on the ranks of an axis."""

    def make(g: torch.Generator) -> Any:
        draw = functools.partial(torch.randn, generator=g)
        return {"router": draw(8, 4), "experts": {"up": draw(4, 8, 12), "down": draw(4, 12, 8)}}

    @sf.stage
    def mixed(p: Any, x: Tensor) -> Any:
        routing = parallel.route(x, p["router"], k=2)
        y = parallel.mixture_of_experts(expert, p["experts"], x, routing, "expert", **options)
        return x + y, parallel.balance_loss(routing, "expert")

    def expert(p: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ p["up"]) @ p["down"]

    def made(mesh: Any) -> Program:
        specs = sf.by_path([(r".*\.experts\..*", P("expert"))], strict=False)
        params = sf.init_sharded(
            {"moe": make}, 0, mesh, lambda path, _: sf.full_shard(() if ".experts." in path else "expert"), specs=specs
        )
        opt = so.adamw(0.1)

        def loss(params: Any, x: Tensor) -> Tensor:
            y, uneven = mixed(params["moe"], x)
            return sf.psum(y.square().sum(), "expert") + 0.01 * uneven

        @sf.shard_map(mesh=mesh, in_specs=..., out_specs=..., check=False)
        def step(params: Any, state: Any, x: Tensor) -> Any:
            value, grads = sf.value_and_grad(loss)(params, x)
            return *opt.step(params, grads, state), value

        return step, (params, opt.init(params), torch.zeros(2, 4, 8, device=mesh.device_type))

    return made


def training(
    mesh: Any, model: Any, run: Callable[[Any, Tensor], Any], optimizer: Any = None, clip: bool = False
) -> Program:
    """A step that trains a functional module."""
    params = model.shard(mesh, sf.full_shard(DATA))
    opt = optimizer or so.adamw(1e-3)
    opt = so.chain(so.clip_by_global_norm(1.0), opt) if clip else opt

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P(DATA)), out_specs=..., check=False)
    def step(params: Any, state: Any, x: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            out = run(params, x)
            return sf.pmean(out if isinstance(out, Tensor) else out.loss, DATA)

        value, grads = sf.value_and_grad(loss)(params)
        return *opt.step(params, grads, state), value

    return step, (params, opt.init(params), torch.zeros(4, 8, device=mesh.device_type))


class Convolutions(nn.Module):
    """Two blocks with batch norms, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2)
        )
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((-1, -2)))


def convolutions(mesh: Any) -> Program:
    model = interop.functional(Convolutions())
    params, opt = model.shard(mesh, sf.full_shard(DATA)), so.sgd(0.1, momentum=0.9)

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., ..., P(DATA)), out_specs=..., check=False)
    def step(params: Any, state: Any, buffers: Any, x: Tensor) -> Any:
        def loss(params: Any) -> Any:
            y, after = model(params, x, buffers=buffers)
            return sf.pmean(y.square().mean(), DATA), after

        (value, after), grads = sf.value_and_grad(loss, has_aux=True)(params)
        return *opt.step(params, grads, state), after, value

    return step, (params, opt.init(params), model.buffers, torch.zeros(4, 3, 8, 8, device=mesh.device_type))


class Recurrent(nn.Module):
    """Cells and a head."""

    def __init__(self, cells: type[nn.LSTM | nn.GRU] = nn.LSTM) -> None:
        super().__init__()
        self.cells, self.head = cells(8, 16, 2, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.cells(x)[0])
        return found


class Tied(nn.Module):
    """An embedding whose matrix is the head's too, dropout, and masked attention in heads of odd width."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.project, self.drop = nn.Linear(8, 24), nn.Dropout(0.1)

    def attended(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 4).transpose(1, 3).unbind(2)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.drop(out.transpose(1, 2).reshape(x.shape))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.attended(self.embed(tokens))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def of_module(make: Callable[[], nn.Module], run: Callable[[Any, Any, Tensor], Any], **more: Any) -> Any:
    def made(mesh: Any) -> Program:
        model = interop.functional(make())
        return training(mesh, model, functools.partial(run, model), **more)

    return made


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """A context for an LSTM in bfloat16, for which oneDNN needs a CPU that has instructions for it."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # `torch.backends.mkldnn.flags` also sets TF32, and warns
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def under_autocast(run: Callable[[Any, Any, Tensor], Any]) -> Callable[[Any, Any, Tensor], Any]:
    def narrow(model: Any, params: Any, x: Tensor) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16), without_onednn():
            return run(model, params, x).float()  # a power is float32 on CUDA, and as narrow as it was on the CPU

    return narrow


def on_rows(model: Any, params: Any, x: Tensor) -> Any:
    return model(params, x[:, None].expand(-1, 5, -1)).square().mean()


def on_tokens(model: Any, params: Any, x: Tensor) -> Any:
    return model(params, torch.ones(x.shape[0], 6, dtype=torch.int64, device=x.device))


def stack(mesh: Any) -> Any:
    def layer(generator: torch.Generator) -> dict[str, Tensor]:
        return {"w": torch.randn(8, 8, generator=generator), "v": torch.randn(8, 8, generator=generator)}

    return sf.init_sharded([layer] * 3, 0, mesh, sf.full_shard(DATA))


def stacked(params: Any, x: Tensor) -> Tensor:
    f = sf.stage(lambda p, x: x + torch.tanh(x @ p["w"]) @ p["v"])
    for p in sf.layers(params):
        x = f(p, x)
    return sf.pmean(x.square().mean(), DATA)


def by(optimizer: Callable[[], Any], micro: Any = 1, rows: int = 4) -> Callable[[Any], Program]:
    """A step of a stack by an optimizer."""

    def made(mesh: Any) -> Program:
        params, opt = stack(mesh), optimizer()

        @sf.shard_map(mesh=mesh, in_specs=(..., ..., P(DATA)), out_specs=..., check=False)
        def step(params: Any, state: Any, x: Tensor) -> Any:
            if micro != 1:
                _, grads = sf.accumulate(stacked, x, micro=micro)(params)
            else:
                _, grads = sf.value_and_grad(stacked)(params, x)
            return opt.step(params, grads, state)

        return step, (params, opt.init(params), torch.zeros(rows, 8, device=mesh.device_type))

    return made


def transformed(f: Callable[[Any, Tensor], Any]) -> Callable[[Any], Program]:
    """A function of a stack."""

    def made(mesh: Any) -> Program:
        step = sf.shard_map(f, mesh=mesh, in_specs=(..., P(DATA)), out_specs=..., check=False)
        return step, (stack(mesh), torch.zeros(4, 8, device=mesh.device_type))

    return made


def product_with_hessian(params: Any, x: Tensor) -> Any:
    return torch.func.jvp(sf.grad(lambda p: stacked(p, x)), (params,), (params,))[1]


def whole_hessian(params: Any, x: Tensor) -> Any:
    return sf.hessian(lambda y: stacked(params, y * x).sum())(torch.ones(8, device=x.device))


def ragged(params: Any, x: Tensor) -> Any:
    y = sf.collectives.ragged_all_to_all(stacked(params, x) * x, DATA, [2, 2])
    return sf.all_gather(y, DATA)


def tangent(params: Any, x: Tensor) -> Any:
    return torch.func.jvp(lambda p: stacked(p, x), (params,), (params,))[1]


def adapters(mesh: Any) -> Program:
    model = interop.functional(Recurrent())
    base = model.shard(mesh, sf.full_shard(DATA))
    own = sf.shard(lora.init(model, ["head"], rank=2, seed=0), mesh, sf.ddp(DATA))
    opt = so.adamw(1e-3)

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., ..., P(DATA)), out_specs=..., check=False)
    def step(own: Any, state: Any, base: Any, x: Tensor) -> Any:
        def loss(own: Any) -> Tensor:
            return sf.pmean(model(base, x[:, None], adapters=own).square().mean(), DATA)

        _, grads = sf.value_and_grad(loss)(own)
        return opt.step(own, grads, state)

    return step, (own, opt.init(own), base, torch.zeros(4, 8, device=mesh.device_type))


def checkpointed(params: Any, x: Tensor) -> Any:
    def run(params: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda y: torch.tanh(y) * y, stacked(params, x), use_reentrant=False)

    return sf.value_and_grad(run)(params, x)


SMALL: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = SMALL | {"intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
T5: dict[str, Any] = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
PICTURES: dict[str, Any] = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2,
                            "num_attention_heads": 2, "intermediate_size": 24}  # fmt: skip
TEXT = SMALL | {"intermediate_size": 24, "max_position_embeddings": 16, "eos_token_id": 1}

PROGRAMS: dict[str, Callable[[Any], Program]] = {
    "gpt2": hugging_face("gpt2", "GPT2LMHeadModel", vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16),
    "llama": hugging_face("llama", "LlamaForCausalLM", **LLAMA),
    "mistral": hugging_face("mistral", "MistralForCausalLM", **LLAMA),
    "qwen2": hugging_face("qwen2", "Qwen2ForCausalLM", **LLAMA),
    "mixtral": hugging_face("mixtral", "MixtralForCausalLM", **LLAMA, num_local_experts=2),
    "bert": hugging_face("bert", "BertForMaskedLM", **SMALL, intermediate_size=24),
    "t5": hugging_face("t5", "T5ForConditionalGeneration", **T5, decoder_start_token_id=0),
    "vit": hugging_face("vit", "ViTForImageClassification", **PICTURES),
    "clip": hugging_face("clip", "CLIPModel", text_config=TEXT, vision_config=PICTURES, projection_dim=8),
    "batch norms": convolutions,
    "an LSTM": of_module(Recurrent, on_rows),
    "tied and masked": of_module(Tied, on_tokens),
    "an LSTM under autocast": of_module(Recurrent, under_autocast(on_rows)),
    "a GRU under autocast": of_module(functools.partial(Recurrent, nn.GRU), under_autocast(on_rows)),
    "masked under autocast": of_module(Tied, under_autocast(on_tokens)),
    "clipped": of_module(Recurrent, on_rows, clip=True),
    "an optimizer of torch": by(lambda: so.from_torch(torch.optim.RMSprop, lr=0.1)),
    "another optimizer of torch": by(lambda: so.from_torch(torch.optim.NAdam, lr=0.1)),
    "muon": by(lambda: so.muon(0.1)),
    "micro-batches": by(lambda: so.adamw(0.1), micro=2),
    "micro-batches without rows": by(lambda: so.adamw(0.1), micro=3, rows=1),
    "as few micro-batches as fit": by(lambda: so.adamw(0.1), micro="auto"),
    "a product with the Hessian": transformed(product_with_hessian),
    "a Hessian": transformed(whole_hessian),
    "ragged pieces": transformed(ragged),
    "a directional derivative": transformed(tangent),
    "a checkpoint of torch": transformed(checkpointed),
    "adapters": adapters,
    "a pipeline": pipeline("1f1b", "trained"),
    "a pipeline, forward first": pipeline("gpipe", "trained"),
    "a pipeline, evaluated": pipeline("1f1b", "evaluated"),
    "a pipeline's product with the Hessian": pipeline("1f1b", "curved"),
    "experts": experts(capacity=3),
    "experts, no token too many": experts(capacity=8, overflow="error"),
}
OTHERS = {"experts without a limit": experts()}  # whose messages depend on numbers
AXES = {"a pipeline": {"pipe": 2, "shard": 1}, "experts": {"expert": 2}}  # by how names begin


def mesh_for(name: str, device: str | None = None) -> Any:
    axes = next((axes for start, axes in AXES.items() if name.startswith(start)), {"shard": 2})
    return sf.make_mesh(device=device, **axes)


@sf.debug(memory=False)
def ran(names: list[str]) -> list[list[Sent]]:
    """The collectives of the second step of each program, on CPU processes."""
    return [sent_by_second(*PROGRAMS[name](mesh_for(name, device="cpu"))) for name in names]


@sf.debug(memory=False)
def planned(names: list[str], rank: int = 0) -> list[list[Sent]]:
    """Those of their plans."""
    found = []
    for name in names:
        with sf.plan.mode(2, rank):
            step, args = PROGRAMS[name](mesh_for(name))
            found.append(sent_by(sf.plan.step(step, *args)))
            del step, args
    return found


@sf.debug(memory=False)
def assumed(name: str) -> tuple[Any, ...]:
    """What a plan takes for granted, and the bytes that it sends."""
    with sf.plan.mode(2):
        step, args = (PROGRAMS | OTHERS)[name](mesh_for(name))
        plan = sf.plan.step(step, *args)
        return plan.assumed, sorted(w.sent for w in plan.collectives if "all_to_all" in w.kind and w.stage)


@sf.debug(memory=False)
def masks(name: str) -> list[str]:
    """Where attention masks are made in the plan of a model, whose run makes none."""
    with sf.plan.mode(2):
        step, args = PROGRAMS[name](sf.make_mesh(shard=2))
        plan = sf.plan.step(step, *args)
        return [each.where for each in plan.allocations if "mask" in each.where]
