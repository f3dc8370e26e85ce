"""What cannot be right is refused, on every rank, with what to do instead."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardfn as sf
from shardfn.interop import functional
from shardfn.interop.refusals import disables_checkpointing
from shardfn.testing import World
from tests.interop import zoo
from tests.interop.modules import Block, Net, backward, mapped, meshed, seeded
from tests.refusals import told

# --- before a module is touched ---


class Lists(nn.Module):
    """Keeps a parameter where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 4)
        self.pair = (self.w.weight, 1)


def like_hooked() -> nn.Module:
    module = seeded(Net)
    module.blocks[1]._hf_hook = object()  # type: ignore[index, union-attr]
    return module


def checkpointing(module: Any = None, on: bool = True) -> nn.Module:
    """Its own, switched on or off, which has two names."""
    module = zoo.build("llama") if module is None else module
    name = "enable" if on else "disable"
    known = next(
        x for x in (f"activation_checkpointing_{name}", f"gradient_checkpointing_{name}") if hasattr(module, x)
    )
    getattr(module, known)()
    return module


def twice() -> nn.Module:
    return functional(seeded(Net)).module


def with_compiled_layer() -> nn.Module:
    module = seeded(Net)
    module.blocks[1].compile(backend="eager")  # type: ignore[index, union-attr]
    return module


DISABLES = f"call {disables_checkpointing(transformers.PreTrainedModel)}()"
MODULES: dict[str, tuple[Callable[[], Any], dict[str, Any], tuple[str, ...]]] = {
    "no module": (dict, {}, ("TypeError", "dict, not a torch.nn.Module")),
    "twice": (twice, {}, ("TypeError", "were taken out before", "as many sets of parameters")),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), {}, ("TypeError", "0 (LazyLinear) has no shape yet", "run the")),
    "accelerate's": (like_hooked, {}, ("TypeError", "blocks.1 (Block) has a hook", "remove_hook_from_module")),
    "checkpointing": (checkpointing, {}, ("TypeError", DISABLES.replace("call ", "Call "), "remat=True")),
    "compiled": (
        lambda: torch.compile(seeded(Net), backend="eager"),
        {"stages": "Block"},
        ("TypeError", "OptimizedModule is compiled by torch.compile", "compile=True"),
    ),
    "a compiled layer": (
        with_compiled_layer,
        {"stages": "Block"},
        ("TypeError", "blocks.1 (Block) is compiled by torch.compile"),
    ),
    "scripted": (torch.jit.ScriptModule, {}, ("TypeError", "is TorchScript", "pass the module itself")),
    "in a tuple": (Lists, {}, ("TypeError", "attribute 'pair'", "read the parameter itself")),
    "option": (Net, {"remot": True}, ("TypeError", "unknown option remot (did you mean remat=?)", "min_num_params")),
    "own option": (
        Net,
        {"min_stage_param": 3},
        ("TypeError", "unknown option min_stage_param (did you mean min_stage_params=?)"),
    ),
    "no option": (Net, {"zzz": 3}, ("TypeError", "unknown option zzz. Pass one of")),
    "loose": (Net, {"unstaged": "blocks.9"}, ("ValueError", "unstaged: nothing matches 'blocks.9'")),
    "mutable": (Net, {"mutable_buffers": "mean"}, ("ValueError", "mutable_buffers: nothing matches 'mean'")),
    "stages": (Net, {"stages": "Layer"}, ("ValueError", "nothing is or matches 'Layer'", "Block")),
    "stages, the root": (Net, {"stages": "Net"}, ("ValueError", "'Net' must match layers, got the whole module (Net)")),
    "stages, a list": (Net, {"stages": ["Block", "blocks"]}, ("ValueError", "'blocks' must match layers, got blocks")),
    "stages of a kind": (Net, {"stages": [3]}, ("TypeError", "names of classes")),
    "both": (Net, {"stages": "Block", "min_num_params": 3}, ("ValueError", "pass one")),
    "remat": (Net, {"remat": "yes"}, ("TypeError", "a list of ops, got 'yes'")),
    "prefetch": (Net, {"prefetch": -1}, ("ValueError", "prefetch must be a number of gathers, 0 or more, got -1")),
    "compile": (Net, {"compile": 3}, ("TypeError", "compile must be True, or a dict")),
    "axis": (zoo.Pictures, {"sync_batch_norm": 3}, ("TypeError", "sync_batch_norm must be one or several names")),
}


@pytest.mark.parametrize("case", MODULES)
def test_modules_that_cannot_be_taken_apart_are_left_as_they_are(case: str) -> None:
    make, options, parts = MODULES[case]
    module = make()
    before = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
    message = told(lambda: functional(module, **options))
    assert [part for part in parts if part not in message] == [], message
    if before:
        assert all(p is before[k] for k, p in module.named_parameters())


def wrapped() -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))

    ddp = nn.parallel.DistributedDataParallel(seeded(Net))
    whole: Any = fully_shard(nn.Linear(4, 4), mesh=mesh)
    return {"ddp": told(lambda: functional(ddp)), "dtensor": told(lambda: functional(whole))}


@pytest.mark.world(2, "processes")
def test_modules_that_somebody_else_shards_are_refused(world: World) -> None:
    for found in world.run(wrapped):
        assert "DistributedDataParallel shards by itself: pass the module inside it, `.module`" in found["ddp"]
        assert "is a DTensor, as after fully_shard: pass the module as it was" in found["dtensor"]


# --- while it runs ---


class Counts(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self, inside: bool, again: bool) -> None:
        super().__init__()
        self.inside, self.again, self.blocks = inside, again, nn.ModuleList([nn.Linear(4, 4)])
        (self.blocks[0] if inside else self).register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        m: Any = self.blocks[0] if self.inside else self
        if self.again:
            m.calls = m.calls + 1
        else:
            m.calls += 1
        found: Tensor = self.blocks[0](x)
        return found


class Counting(nn.Linear):
    def __init__(self, again: bool) -> None:
        super().__init__(4, 4)
        self.again = again
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            self.calls: Tensor = self.calls + 1
        else:
            self.calls += 1
        return super().forward(x)


class Keeps(nn.Module):
    """Keeps what a layer computed, and uses it after the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Kept() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        first: Any = self.blocks[0]
        found: Tensor = x + first.kept
        return found


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 4)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.w(x)
        return torch.tanh(self.kept)


class Reads(nn.Module):
    """A parent that reads its child's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.blocks[0]
        return F.linear(self.blocks[1](x), first.weight)


class Again(torch.autograd.Function):
    """Runs a function without a graph, and again in backward, as reversible networks and adjoint methods do."""

    @staticmethod
    def forward(run: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        found: Tensor = run(x)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.run, x, *parameters = inputs
        ctx.save_for_backward(x, *parameters)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.run(x), (x, *parameters), gradient)


class RunsAgain(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return Again.apply(super().forward, x, *self.parameters())


class Copies(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = copy.deepcopy(self[0])(self[0](x))
        return found


class CopiesUnseen(nn.Sequential):
    """Copies a layer where no gradient is recorded, which is the same here as in torch."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = copy.deepcopy(self[0])(x)
        return y + super().forward(x)


def _same(x: Tensor) -> Tensor:
    return x


def refused() -> dict[str, str]:
    mesh, found = meshed(), {}
    x, text = zoo.numbers(4), zoo.text()

    def made(module: nn.Module, **options: Any) -> tuple[Any, Any]:
        model = functional(module, **{"min_stage_params": 0, **options})
        return model, sf.shard(model.tree, mesh, sf.full_shard("shard"))

    def run(case: str, module: nn.Module, *args: Any, pick: Any = None, **options: Any) -> Any:
        kwargs = options.pop("kwargs", {})
        model, params = made(module, **options)

        def loss(p: Any) -> Tensor:
            found: Tensor = (pick or _same)(model(p, *args, **kwargs)).square().sum()
            return sf.pmean(found, "shard")

        for name, transform in (("grad", sf.grad), ("torch", torch.func.grad), ("backward", backward)):
            step = mapped(transform(loss), mesh)
            found[f"{case}, {name}"] = told(partial(step, params))
        return model, params

    run("batch norm", zoo.Pictures().double(), zoo.numbers(3, 6, 6))
    for again in (False, True):
        run(f"write, {again}", seeded(partial(Counts, False, again)), x)
        run(f"write inside, {again}", nn.Sequential(Counting(again)).double(), x)
    run("cache", zoo.build("llama"), kwargs={**text, "use_cache": True}, pick=lambda out: out.logits)
    run("kept", seeded(Keeps), x)
    run("read", seeded(Reads), x)
    run("in a Function", RunsAgain(nn.Linear(4, 4), nn.Linear(4, 4)).double(), x)
    run("copies", Copies(nn.Linear(4, 4)).double(), x)
    run("copies unseen", CopiesUnseen(nn.Linear(4, 4)).double(), x)

    kept: list[Tensor] = []
    module = seeded(Net)
    module.blocks[1].w.register_forward_hook(lambda m, args, out: kept.append(out))  # type: ignore[index, union-attr]
    run("hook", module, x, pick=lambda out: kept.pop())

    module = zoo.build("llama")
    model, params = made(module, min_stage_params=512)
    checkpointing(module)
    loss = mapped(sf.grad(lambda p: model(p, **text).logits.sum()), mesh)
    module.train()
    found["checkpointing"] = told(lambda: loss(params))
    checkpointing(module, on=False)
    found["checkpointing, off again"] = told(lambda: loss(params))

    model, params = made(seeded(Net))
    found["structure"] = told(lambda: model({k: v for k, v in params.items() if k != "blocks.1"}, x))
    found["other structure"] = told(lambda: model([params], x))
    found["by itself"] = told(lambda: model.module(x))
    found["a layer by itself"] = told(lambda: model.module.blocks[0](x))
    found["inside itself"] = told(lambda: model.module.blocks[0].w(x))
    found["state"] = told(lambda: model.state_dict({"w": params}))
    found["buffers"] = told(lambda: model(params, x, buffers={"mean": x}))
    found["pickled"] = told(lambda: torch.save(model.module, "/dev/null"))
    whole = {
        f"{'.'.join(filter(None, (stage, name)))}": x for stage, own in model.tree.items() for name, x in own.items()
    }
    found["a state dict"] = told(lambda: model.module.load_state_dict(whole))
    found["copied"] = told(lambda: copy.deepcopy(model.module).blocks[0].w(x))
    wider = {**model.tree, "blocks.0": {name: torch.cat([w, w]) for name, w in model.tree["blocks.0"].items()}}
    found["of other shapes"] = told(lambda: model(sf.shard(wider, mesh, sf.full_shard("shard")), x))
    late, params = made(seeded(Net))
    late.module.blocks[0] = Block().double()
    found["a later layer"] = told(lambda: late(params, x))
    late, params = made(seeded(Net))
    found["no later layer"] = told(lambda: late(params, x))
    late.module.blocks[0] = Block().double()
    found["a layer after a call"] = told(lambda: late(params, x))
    late, params = made(seeded(Net))
    late.module.blocks[1].w.compile()
    found["compiled after a call"] = told(lambda: late(params, x))
    found["the function, copied"] = told(lambda: copy.deepcopy(model))
    found["no parameters"] = told(lambda: model(x))
    found["for torch.optim"] = told(lambda: torch.optim.SGD(model.module.parameters(), 0.1).step())
    found["clipped"] = told(lambda: nn.utils.clip_grad_norm_(model.module.parameters(), 1.0))
    found["frozen later"] = told(lambda: model.module.requires_grad_(False))
    found["frozen as it was"] = told(lambda: model.module.requires_grad_(True))
    found["of the module"] = told(lambda: model.eval())
    return found


MESSAGES: dict[str, tuple[str, ...]] = {
    "batch norm": ("ValueError", "Pictures changes buffers while it trains", ": pass buffers=model.buffers"),
    "write, False": ("RuntimeError", "the module writes into its buffer calls", "mutable_buffers=['calls']"),
    "write, True": ("RuntimeError", "the module writes into its buffer calls", "mutable_buffers=['calls']"),
    "write inside, False": ("RuntimeError", "0 writes into its buffer 0.calls", "mutable_buffers=['0.calls']"),
    "write inside, True": ("RuntimeError", "0 writes into its buffer 0.calls", "mutable_buffers=['0.calls']"),
    "cache": ("TypeError", "model.layers.0 is given a DynamicCache", "use_cache=False", "torch.no_grad()"),
    "kept": ("it was done",),
    "hook": ("it was done",),
    "read": ("it was done",),
    "in a Function": (
        "RuntimeError",
        "0 is called by the forward of a torch.autograd.Function",
        "no gradient",
        "remat=True",
    ),
    "copies": ("RuntimeError", "0.weight is copied in forward", "Copy under torch.no_grad()"),
    "copies unseen": ("it was done",),
}
ONCE: dict[str, tuple[str, ...]] = {
    "checkpointing": ("TypeError", DISABLES.replace("call ", "call model.module."), "remat=True"),
    "checkpointing, off again": ("it was done",),
    "structure": ("ValueError", "Missing: 'blocks.1'"),
    "other structure": ("TypeError", "a dict of stages", "not of type list"),
    "by itself": ("RuntimeError", "call the function that `functional` returned"),
    "a layer by itself": ("RuntimeError", "blocks.0 is called by itself"),
    "inside itself": ("RuntimeError", "blocks.0.w.weight was taken out of this module", "model(params, ...)"),
    "state": ("ValueError", "not known: 'w'"),
    "buffers": ("ValueError", "mean"),
    "pickled": ("TypeError", "save the parameters, not the module"),
    "a state dict": ("RuntimeError", "load_state_dict: the parameters of this Net were taken out", "`interop.load`"),
    "copied": ("RuntimeError", "blocks.0.w.weight was taken out of this module"),
    "of other shapes": (
        "ValueError",
        "not the parameters of this Net",
        "blocks.0.unused is [6] there, and [3] in the module",
    ),
    "a later layer": (
        "RuntimeError",
        "blocks.0 got other parameters or modules after functional()",
        "before it is taken",
    ),
    "no later layer": ("it was done",),
    "a layer after a call": ("RuntimeError", "blocks.0 got other parameters or modules after functional()"),
    "compiled after a call": ("RuntimeError", "blocks.1.w was compiled by torch after functional()", "compile=True"),
    "the function, copied": ("TypeError", "cannot be copied or pickled"),
    "no parameters": ("TypeError", "a dict of stages", "not of type Tensor", "model(params, ...)"),
    "for torch.optim": ("RuntimeError", "gets no gradient here", "sf.value_and_grad"),
    "clipped": ("RuntimeError", "gets no gradient here"),
    "frozen later": ("RuntimeError", "call requires_grad_ before `functional`"),
    "frozen as it was": ("it was done",),
    "of the module": ("model.module.eval",),
}


OTHERWISE: dict[str, tuple[str, ...]] = {  # torch itself is the first to refuse, or to read
    "write, False, torch": ("RuntimeError", "mutate a captured Tensor"),
    "write inside, False, torch": ("RuntimeError", "mutate a captured Tensor"),
    "kept, torch": ("RuntimeError", "attribute", "would be lost"),
    "hook, torch": ("RuntimeError", "hook"),
    "in a Function, torch": ("RuntimeError", "0.weight is read outside of stage '0', by custom_function_call"),
}


@pytest.mark.world(2, "processes")
def test_what_would_be_lost_or_wrong_is_refused_on_every_rank(world: World) -> None:
    ways = ("grad", "torch", "backward")
    wanted = {f"{case}, {by}": parts for case, parts in MESSAGES.items() for by in ways} | ONCE | OTHERWISE
    for found in world.run(refused):
        assert found.keys() == wanted.keys()
        assert {k: found[k] for k, parts in wanted.items() if not all(part in found[k] for part in parts)} == {}


def test_a_weight_that_a_hook_makes_is_told_with_what_has_no_hook() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module = nn.Sequential(*(nn.utils.weight_norm(nn.Linear(4, 4)) for _ in range(2)))
    mesh = sf.make_mesh(device="cpu", shard=1)
    model = functional(module)
    params = model.shard(mesh, sf.full_shard("shard"))
    with pytest.raises(RuntimeError, match=r"a hook of torch.nn.utils\? torch.nn.utils.parametrizations has none"):
        model(params, torch.ones(2, 4))


def test_fake_tensors_are_named_unless_a_simulated_device_owns_them() -> None:
    with FakeTensorMode():
        module = nn.Linear(2, 3)
    text = told(lambda: functional(module))
    assert text.startswith("TypeError: functional: weight of Linear is a fake tensor, which has no values")
    assert "on the meta device" in text
    assert "quant" not in text


def step_with_whole_parameters() -> str:
    mesh, model = sf.make_mesh(shard=2, device="cpu"), functional(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    optimizer = sf.optim.sgd(0.1)

    def step(params: Any, state: Any, x: Tensor) -> Any:
        gradient = sf.grad(lambda params: sf.psum(model(params, x).square().sum(), "shard"))(params)
        return optimizer.step(params, gradient, state)[0]

    x, in_specs = torch.ones(4, 2) * (1 + mesh.get_rank()), (sf.P(), sf.P(), sf.P("shard"))
    checked = sf.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=sf.P())
    return told(lambda: checked(model.tree, optimizer.init(model.tree), x))


def test_whole_parameters_of_a_module_may_be_sharded_instead(world: World) -> None:
    text = world.run(step_with_whole_parameters)[0]
    assert "its transpose adds up the parts; or shard them, shardfn.shard(params, mesh, strategy)" in text


BF16 = torch.bfloat16
MIXED: dict[str, tuple[dict[str, Any], Tensor, tuple[str, ...]]] = {
    "rows, in a stage": (
        {"min_stage_params": 0},
        torch.ones(2, 4, dtype=torch.float64),
        ("0 (Linear) mixes dtypes", "parameters of torch.float32, arguments of torch.float64", "Cast the arguments"),
    ),
    "a device, in a stage": (
        {"min_stage_params": 0},
        torch.ones(2, 4, device="meta"),
        ("0 (Linear) mixes devices", "parameters on cpu, arguments on meta", "move the arguments there"),
    ),
    "rows, outside of stages": (
        {"gather_dtype": BF16},
        torch.ones(2, 4),
        ("Sequential mixes dtypes", "0.weight, 0.bias, of torch.bfloat16, with", "or pass input_dtype"),
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_a_mixture_of_dtypes_or_devices_is_told_with_what_to_do(case: str) -> None:
    options, rows, parts = MIXED[case]
    model = functional(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **{"stages": "1", **options})
    params = model.shard(sf.make_mesh(shard=1, device="cpu"), sf.full_shard("shard"))
    text = told(lambda: model(params, rows))
    for part in parts:
        assert part in text, text
