"""Training settings for models of known shapes or configuration files, and the plans of their steps."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shardfn import interop, lora, optim, quant
from shardfn.collectives.functional import psum
from shardfn.mesh.make import make_mesh
from shardfn.mesh.spec import P
from shardfn.optim.optimizer import Optimizer
from shardfn.plan import planning
from shardfn.plan.plan import StepPlan
from shardfn.quoting import listed, short
from shardfn.shapes import transformer
from shardfn.shapes.sizes import Shape
from shardfn.shards.placement import Placement, Tier, ddp, from_name
from shardfn.shards.sharding import shard
from shardfn.transforms.accumulate import accumulate
from shardfn.transforms.autodiff import value_and_grad
from shardfn.transforms.shard_map import shard_map

_BASES = {"nf4": lambda: quant.nf4(double=True), "int8": quant.int8}
Built = tuple[Any, Any, Callable[..., Tensor]]
OPTIMIZERS = ("adamw", "adamw8bit", "adafactor", "lion", "sgd")


@dataclass(frozen=True)
class Setting:
    """The settings of a training step: mesh, strategy, batch, dtypes and optimizer.

    Attributes:
        mesh: sizes of the axes, in order: the batch is sharded over `replica` and `shard`, matrices over `tensor`.
        strategy: by any of its names.
        remat: whether blocks keep their activations for backward (`"off"`), recompute them (`"on"`) or move them to the
            host (`"offload"`).
        batch: sequences that a rank processes in a step.
        micro: number of micro-batches into which these are split.
        sequence: tokens of a sequence; 0: as many as the model allows.
        dtype: in which stages compute, and parameters are gathered.
        kept: of parameters, gradients and state.
        optimizer: by name.
        lora: rank of the adapters that are trained on all linear layers, in place of the parameters; 0: none.
        base: the format of the layers' matrices beneath adapters: `"full"`, `"nf4"` or `"int8"`.
        tiers: where parameters, gradients and state are kept, of those that are not on the device.
        per_node: ranks on a node.
    """

    mesh: dict[str, int]
    strategy: str = "full_shard"
    remat: Literal["off", "on", "offload"] = "off"
    batch: int = 1
    micro: int = 1
    sequence: int = 0
    dtype: str = "bfloat16"
    kept: str = "float32"
    optimizer: str = "adamw"
    lora: int = 0
    base: Literal["full", "nf4", "int8"] = "full"
    tiers: dict[str, Tier] = field(default_factory=dict)
    per_node: int = 8

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh.values())

    @property
    def data(self) -> tuple[str, ...]:
        """The axes that shard the batch."""
        return tuple(name for name in self.mesh if name != "tensor")

    def placement(self) -> Placement:
        """Returns the strategy's placement on this mesh.

        Raises:
            ValueError: the mesh has other axes than those with a meaning; or the strategy is not for it.
        """
        if not self.data or not set(self.mesh) <= {"replica", "shard", "tensor"}:
            raise ValueError(
                f"a mesh with axes {listed(map(repr, self.mesh))}: known models are sharded over 'replica' and "
                f"'shard', and also over 'tensor', such as replica=128,shard=8"
            )
        both = {"shard": "shard", "replica": "replica"}
        chosen = from_name(self.strategy, **({"shard": self.data[0]} if len(self.data) == 1 else both))
        return chosen.with_tiers(**self.tiers) if self.tiers else chosen

    def __str__(self) -> str:
        axes = ",".join(f"{name}={size}" for name, size in self.mesh.items())
        more = [f"remat={self.remat}"] if self.remat != "off" else []
        more += [f"micro={self.micro}"] if self.micro > 1 else []
        more += [f"adapters of rank {self.lora} on {self.base}"] if self.lora else []
        more += [f"{kind} on {tier}" for kind, tier in self.tiers.items()]
        return ", ".join([f"{self.strategy} on {axes}", f"batch={self.batch}", *more])


def plan_shape(shape: Shape, setting: Setting, rank: int = 0) -> StepPlan:
    """Plans a step that trains a known model: forward, backward and update.

    Raises:
        ValueError: a dtype, an optimizer or a strategy is unknown; the batch cannot be cut; the model cannot be cut
            over the mesh; or the sequence is too long for it.
        RuntimeError: this process has ranks already.
    """
    length, kept, size = setting.sequence or shape.context, dtype_of(setting.kept), setting.mesh.get("tensor", 1)
    if setting.lora or setting.base != "full":
        raise ValueError(f"{shape.name} is planned without adapters: pass a config.json to plan LoRA")
    if shape.gpt and length > shape.context:
        raise ValueError(f"{shape.name} has {shape.context} places, and a sequence of {length} does not fit")
    numbers = {"heads": shape.heads, "groups of heads": shape.groups, "hidden units": shape.hidden}
    for name, number in (numbers | {"tokens in its vocabulary": shape.vocabulary}).items():
        if number % size:
            raise ValueError(f"{shape.name} has {number} {name}, which tensor={size} does not divide")
    tensor = "tensor" if size > 1 else ()

    def build(mesh: Any, placement: Placement, **options: Any) -> Built:
        specs = transformer.SPECS if tensor else P()
        params = shard(transformer.tree(shape, kept), mesh, placement, specs=specs)
        loss = transformer.loss_of(shape, tensor, setting.data, **options)
        return params, (), lambda params, _, *batch: loss(params, *batch)

    return _plan_model(shape.name, length, setting, rank, build)


def planned_config(path: Path, setting: Setting, rank: int = 0) -> StepPlan:
    """Plans a step that trains the causal language model of a Hugging Face configuration, as its module computes it.

    Args:
        path: of the file, or of the folder with its `config.json`.
        setting: how it is trained.
        rank: whose plan it is.

    Raises:
        OSError, ValueError: there is no such configuration; or as `plan_shape`.
        ModuleNotFoundError: transformers is missing.
    """
    if find_spec("transformers") is None:
        raise ModuleNotFoundError(
            "plans of a configuration need transformers: pip install transformers", name="transformers"
        )
    file = path / "config.json" if path.is_dir() else path
    try:
        told = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(told, dict) or "model_type" not in told:
        raise ValueError(f"{file} has no model_type: it is not a Hugging Face model configuration")
    import transformers

    config = transformers.AutoConfig.from_pretrained(file.parent if file.name == "config.json" else file)
    length = setting.sequence or int(getattr(config, "max_position_embeddings", 2048))
    if setting.mesh.get("tensor", 1) > 1:
        raise ValueError(f"{file}: modules are planned without the axis 'tensor': leave it out of the mesh")
    if setting.base != "full" and not setting.lora:
        raise ValueError(f"a base in {setting.base} is frozen: pass the rank of the adapters that are trained, lora=")
    config.use_cache = False
    with interop.meta():
        module: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype_of(setting.kept))
    count = setting.batch * length * setting.ranks

    def build(mesh: Any, placement: Placement, **options: Any) -> Built:
        model = interop.functional(module, **options)
        if setting.base != "full":
            output = module.get_output_embeddings()
            layers = [n for n, m in module.named_modules() if isinstance(m, torch.nn.Linear) and m is not output]
            names = "|".join(re.escape(f"{name}.weight") for name in layers)
            model.tree = quant.quantize(model.tree, _BASES[setting.base](), names=names)
        params = model.shard(mesh, placement)

        def loss(trained: Any, frozen: Any, tokens: Tensor, targets: Tensor) -> Tensor:
            adapted = {"adapters": trained} if setting.lora else {}
            tree = frozen if setting.lora else trained
            out = model(tree, input_ids=tokens, labels=targets, num_items_in_batch=count, use_cache=False, **adapted)
            total: Tensor = psum(out.loss, setting.data)
            return total

        if not setting.lora:
            return params, (), loss
        adapters = lora.init(model, "all-linear", rank=setting.lora)
        return shard(adapters, mesh, ddp(setting.data)), params, loss

    name = short(getattr(config, "_name_or_path", "") or str(path), 60)
    return _plan_model(name, length, setting, rank, build)


def _plan_model(name: str, length: int, setting: Setting, rank: int, build: Callable[..., Any]) -> StepPlan:
    """Plans a step of a model, of which `build` makes the trained tree, the frozen tree and the loss."""
    placement, dtype = setting.placement(), dtype_of(setting.dtype)
    if setting.optimizer not in OPTIMIZERS:
        raise ValueError(f"there is no optimizer {short(repr(setting.optimizer))}; there are {listed(OPTIMIZERS)}")
    if setting.batch < 1 or setting.micro < 1 or setting.batch % setting.micro:
        raise ValueError(f"a batch of {setting.batch} cannot be split into {setting.micro} equal micro-batches")
    optimizer: Optimizer = getattr(optim, setting.optimizer)(1e-4)
    remat = {"off": False, "on": True, "offload": "offload"}[setting.remat]
    with planning.mode(setting.ranks, rank, per_node=setting.per_node) as device:
        axes: dict[str, Any] = dict(setting.mesh)
        mesh = make_mesh(**axes)
        params, frozen, loss = build(mesh, placement, remat=remat, gather_dtype=dtype, input_dtype=dtype)
        state, batch = optimizer.init(params), P(setting.data)

        @shard_map(mesh=mesh, in_specs=(..., ..., ..., batch, batch), out_specs=..., check=False)
        def step(params: Any, state: Any, frozen: Any, tokens: Tensor, targets: Tensor) -> Any:
            def part(params: Any, tokens: Tensor, targets: Tensor) -> Tensor:
                return loss(params, frozen, tokens, targets)

            if setting.micro > 1:
                value, grads = accumulate(part, (tokens, targets), micro=setting.micro)(params)
            else:
                value, grads = value_and_grad(part)(params, tokens, targets)
            return value, *optimizer.step(params, grads, state)

        tokens = torch.zeros(setting.batch, length, dtype=torch.int64, device=device.name)
        return replace(planning.step(step, params, state, frozen, tokens, tokens.clone()), name=name)


def dtype_of(name: str) -> torch.dtype:
    """Returns a floating-point dtype by its name.

    Raises:
        ValueError: there is none of this name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{short(repr(name))} must be float32, bfloat16 or float16")
    return dtype
