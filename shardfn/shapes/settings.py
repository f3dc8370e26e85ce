"""How a model is trained, and the plan of a step that does so."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from shardfn import optim
from shardfn.mesh.make import make_mesh
from shardfn.mesh.spec import P
from shardfn.optim.optimizer import Optimizer
from shardfn.plans.plan import Plan
from shardfn.plans.planning import plan, planning
from shardfn.quoting import listed, short
from shardfn.shapes import transformer
from shardfn.shapes.sizes import Shape
from shardfn.shards.placement import Placement, Tier, strategy
from shardfn.shards.sharding import shard
from shardfn.transforms.accumulate import accumulate
from shardfn.transforms.autodiff import value_and_grad
from shardfn.transforms.shard_map import shard_map

OPTIMIZERS = {
    "adamw": lambda: optim.adamw(1e-4),
    "adamw8bit": lambda: optim.adamw8bit(1e-4),
    "adafactor": lambda: optim.adafactor(1e-4),
    "lion": lambda: optim.lion(1e-4),
    "sgd": lambda: optim.sgd(1e-4),
}


@dataclass(frozen=True)
class Setting:
    """How a model is trained.

    Attributes:
        mesh: sizes of the axes, in order: `replica` and `shard` cut the batch, `tensor` matrices.
        strategy: by any of its names.
        remat: whether blocks keep their activations for backward (`"off"`), compute them again (`"on"`) or move them
            to the host (`"offload"`).
        batch: sequences that a rank processes in a step.
        micro: number of micro-batches into which these are cut.
        sequence: tokens of a sequence; 0: as many as the model allows.
        dtype: in which stages compute, and parameters are gathered.
        kept: of parameters, gradients and state.
        optimizer: by name.
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
    tiers: dict[str, Tier] = field(default_factory=dict)
    per_node: int = 8

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh.values())

    @property
    def data(self) -> tuple[str, ...]:
        """The axes that cut the batch."""
        return tuple(name for name in self.mesh if name != "tensor")

    def placement(self) -> Placement:
        """Returns the strategy's placement on this mesh.

        Raises:
            ValueError: the mesh has other axes than those with a meaning; or the strategy is not for it.
        """
        if not self.data or not set(self.mesh) <= {"replica", "shard", "tensor"}:
            raise ValueError(
                f"a mesh with axes {listed(map(repr, self.mesh))}: known models are cut over 'replica' and 'shard', "
                f"and over 'tensor' besides, such as replica=128,shard=8"
            )
        both = {"shard": "shard", "replica": "replica"}
        chosen = strategy(self.strategy, **({"shard": self.data[0]} if len(self.data) == 1 else both))
        return chosen.on(**self.tiers) if self.tiers else chosen

    def __str__(self) -> str:
        axes = ",".join(f"{name}={size}" for name, size in self.mesh.items())
        more = [f"remat={self.remat}"] if self.remat != "off" else []
        more += [f"micro={self.micro}"] if self.micro > 1 else []
        more += [f"{kind} on {tier}" for kind, tier in self.tiers.items()]
        return ", ".join([f"{self.strategy} on {axes}", f"batch={self.batch}", *more])


def planned(shape: Shape, setting: Setting, rank: int = 0) -> Plan:
    """Plans a step that trains a known model: forward, backward and update.

    Raises:
        ValueError: a dtype, an optimizer or a strategy is unknown; the batch cannot be cut; the model cannot be cut
            over the mesh; or the sequence is too long for it.
        RuntimeError: this process has ranks already.
    """
    length, kept = _length(shape, setting), dtype_of(setting.kept)
    placement, optimizer = setting.placement(), optimizer_of(setting.optimizer)
    tensor = "tensor" if setting.mesh.get("tensor", 1) > 1 else ()
    specs = transformer.SPECS if tensor else P()
    _divides(shape, setting)
    with planning(setting.ranks, rank, per_node=setting.per_node) as device:
        axes: dict[str, Any] = dict(setting.mesh)
        mesh = make_mesh(**axes)
        params = shard(transformer.tree(shape, kept), mesh, placement, specs=specs)
        state = optimizer.init(params)
        remat: Any = {"off": False, "on": True, "offload": "offload"}[setting.remat]
        dtype = dtype_of(setting.dtype)
        loss = transformer.loss_of(shape, tensor, setting.data, remat=remat, gather_dtype=dtype, input_dtype=dtype)
        step = stepping(loss, optimizer, mesh, setting)
        tokens = torch.zeros(setting.batch, length, dtype=torch.int64, device=device.name)
        return replace(plan(step, params, state, tokens, tokens.clone()), name=shape.name)


def stepping(loss: Any, optimizer: Optimizer, mesh: Any, setting: Setting) -> Any:
    """Returns a step that trains with a loss `(params, *batch)`."""

    def step(params: Any, state: Any, tokens: Tensor, targets: Tensor) -> Any:
        if setting.micro > 1:
            value, grads = accumulate(loss, (tokens, targets), micro=setting.micro)(params)
        else:
            value, grads = value_and_grad(loss)(params, tokens, targets)
        return value, *optimizer.step(params, grads, state)

    batch = P(setting.data)
    return shard_map(step, mesh=mesh, in_specs=(..., ..., batch, batch), out_specs=..., check=False)


def _length(shape: Shape, setting: Setting) -> int:
    length = setting.sequence or shape.context
    if shape.gpt and length > shape.context:
        raise ValueError(f"{shape.name} has {shape.context} places, and a sequence of {length} does not fit")
    return length


def _divides(shape: Shape, setting: Setting) -> None:
    if setting.batch < 1 or setting.micro < 1 or setting.batch % setting.micro:
        raise ValueError(f"a batch of {setting.batch} cannot be cut into {setting.micro} equal micro-batches")
    size = setting.mesh.get("tensor", 1)
    numbers = {"heads": shape.heads, "groups of heads": shape.groups, "hidden units": shape.hidden}
    for name, number in (numbers | {"tokens in its vocabulary": shape.vocabulary}).items():
        if number % size:
            raise ValueError(f"{shape.name} has {number} {name}, which tensor={size} does not divide")


def dtype_of(name: str) -> torch.dtype:
    """Returns a floating-point dtype by its name.

    Raises:
        ValueError: there is none of this name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{short(repr(name))} is no floating-point dtype; there are float32, bfloat16, float16")
    return dtype


def optimizer_of(name: str) -> Optimizer:
    """Returns an optimizer by its name.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"there is no optimizer {short(repr(name))}; there are {listed(OPTIMIZERS)}")
    made: Optimizer = OPTIMIZERS[name]()
    return made
