"""Builds modules without memory for their parameters, and initializes parameters that no file has.

Source: `PreTrainedModel.initialize_weights` of transformers, for the order: inner modules first, each by the innermost
model around it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from shardfn.checkpoint.team import CheckpointError
from shardfn.compat import dynamo
from shardfn.shards.random import DrawContext, int_seed, mixed

LARGE = 2**24  # bytes from which on memory is reserved lazily
_MAP_NORESERVE = 0x4000  # of Linux; Python 3.11 has no constant for it
_DRAWS = {
    Tensor.bernoulli_, Tensor.cauchy_, Tensor.exponential_, Tensor.geometric_, Tensor.log_normal_, Tensor.normal_,
    Tensor.random_, Tensor.uniform_,
}  # fmt: skip


class _Cheap(TorchFunctionMode):
    """Skips random initialization of meta tensors, and reserves memory for large tensors only when it is written to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros) and sys.platform == "linux":
            return _unreserved(func, args, kwargs)
        if func in _DRAWS or getattr(func, "__module__", "") == "torch.nn.init":
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, Tensor) and target.is_meta:
                return target
        return func(*args, **kwargs)


def _unreserved(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """As `torch.empty` or `torch.zeros`, but large tensors are zeros in memory mapped without reserving swap space."""
    options = {key: value for key, value in kwargs.items() if value is not None}
    device = torch.device(options.pop("device", None) or torch.get_default_device())
    if device.type != "cpu" or set(options) - {"size", "dtype", "requires_grad"}:
        return func(*args, **kwargs)
    template = func(*args, **options, device="meta")
    if template.nbytes < LARGE:
        return func(*args, **kwargs)
    memory = mmap.mmap(-1, template.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    tensor = torch.frombuffer(memory, dtype=template.dtype).view(template.shape)
    return tensor.requires_grad_(template.requires_grad)


@contextlib.contextmanager
def meta() -> Iterator[None]:
    """Inside the block, modules that this thread builds have their parameters on the device `meta`.

    Any module, of torch, of `transformers` or yours, then knows shapes and dtypes, but takes neither memory nor time
    for random numbers. Buffers that `__init__` computes, such as rotary frequencies and position indices, are real,
    unlike inside `torch.device("meta")`. A parameter has memory only until it is assigned to its module, and none at
    all if it is made by `torch.empty` or `torch.zeros`, as most are.

    A module that reads the values of its parameters while it is built cannot be built here: torch raises an error.
    Buffers that are computed from parameters are on `meta` too, until `load` finds them in the files. Modules built
    after the block are as usual: for instance a new head, whose values `load(..., strict=False)` keeps.

    Example:
        ``with interop.meta(): module = transformers.LlamaForCausalLM(config)``
    """
    thread, replacements = threading.get_ident(), WeakTensorKeyDictionary()

    def without_values(module: nn.Module, name: str, p: nn.Parameter) -> nn.Parameter | None:
        plain = type(p) is nn.Parameter or type(p) is dynamo.FAKE
        if threading.get_ident() != thread or p.is_meta or not plain:
            return None  # lazy parameters, whose shapes are not known yet, are among these
        if p not in replacements:  # two names for one parameter stay one
            hollow = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
            empty = nn.Parameter(hollow, requires_grad=p.requires_grad)
            vars(empty).update({name: value for name, value in vars(p).items() if name not in vars(empty)})
            replacements[p] = empty
        return replacements[p]

    hook = register_module_parameter_registration_hook(without_values)  # type: ignore[arg-type]
    try:
        with _Cheap():
            yield
    finally:
        hook.remove()


# --- what a parameter begins with ---


def beginning(module: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Initializes one parameter, from the seed and its name alone.

    Runs the `reset_parameters` of its module and of the modules around it, and then the `_init_weights` of the models
    around it, on copies in which every other parameter is on the device meta.

    Args:
        module: a shell, which is not changed.
        name: of the parameter, in the whole module.
        shape: of the parameter.
        dtype: floating or complex.
        seed: any int.

    Returns:
        The values, on the CPU.

    Raises:
        CheckpointError: its classes have no method to initialize it, or one that needs more than this parameter.
    """
    path, _, attribute = name.rpartition(".")
    holder = module.get_submodule(path)
    if not (dtype.is_floating_point or dtype.is_complex):
        raise CheckpointError(f"{_problem(name, holder)}, which is of {dtype}: {_INSTEAD}")
    nans = torch.full(shape, math.nan, dtype=dtype, device="cpu")
    copies = _Copies({id(holder._parameters[attribute]): nn.Parameter(nans)})
    parts = path.split(".") if path else []
    around = [copies.copy_of(module.get_submodule(".".join(parts[:n]))) for n in range(len(parts), -1, -1)]
    generator = torch.Generator().manual_seed(mixed(int_seed(seed), name))
    try:
        with torch.no_grad(), DrawContext(generator, f"what {name} begins with"):
            for methods in (_resets(around), _by_models(around)):
                for initialize in methods:
                    initialize()
    except Exception as error:
        raise CheckpointError(f"{_problem(name, holder)} ({type(error).__name__}: {error}): {_INSTEAD}") from error
    values = around[0]._parameters[attribute]
    if not isinstance(values, Tensor) or values.shape != shape or values.dtype != dtype or bool(values.isnan().any()):
        raise CheckpointError(f"{_problem(name, holder)}: {_INSTEAD}")
    return values.detach()


_INSTEAD = "build it outside of interop.meta(), or give its class a reset_parameters() that sets it"


def _problem(name: str, holder: nn.Module) -> str:
    return (
        f"these files lack {name}, which neither reset_parameters() nor _init_weights() of {type(holder).__name__} and "
        f"the modules around it sets from nothing"
    )


class _Copies:
    """Copies of modules without values, but for some parameters. Each module is copied once, with own attributes."""

    def __init__(self, instead: dict[int, Tensor]) -> None:
        self.instead, self.made = instead, dict[int, Any]()

    def copy_of(self, m: Any) -> Any:
        """The copy of a module, including its submodules."""
        if id(m) not in self.made:
            duplicate = self.made[id(m)] = object.__new__(type(m))
            vars(duplicate).update(vars(m))
            for kind, copied in (("_parameters", self._empty), ("_buffers", self._empty), ("_modules", self.copy_of)):
                vars(duplicate)[kind] = {name: None if x is None else copied(x) for name, x in vars(m)[kind].items()}
        return self.made[id(m)]

    def _empty(self, x: Tensor) -> Tensor:
        if id(x) not in self.instead:
            empty: Any = torch.empty(x.shape, dtype=x.dtype, device="meta")
            replacement: Any = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
            replacement._is_hf_initialized = True  # makes transformers skip it
            self.instead[id(x)] = replacement
        return self.instead[id(x)]


def _resets(around: list[Any]) -> list[Callable[[], Any]]:
    """The `reset_parameters` methods of torch's layers, and of modules that follow their example."""
    methods = (getattr(m, name, None) for m in around for name in ("_reset_parameters", "reset_parameters"))
    return [reset for reset in methods if callable(reset)]


def _by_models(around: list[Any]) -> list[Callable[[], Any]]:
    """The calls of `_init_weights` of models, which initialize the modules inside."""
    calls: list[Callable[[], Any]] = []
    for number, m in enumerate(around):
        models = [outer for outer in around[number:] if callable(getattr(outer, "_init_weights", None))]
        if models and inspect.signature(models[0]._init_weights).parameters:
            calls.append(functools.partial(models[0]._init_weights, m))
        elif models and models[0] is m:
            calls.append(m._init_weights)
    return calls
