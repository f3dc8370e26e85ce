"""Autocast on the simulated device: the dtypes of CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfn as sf
from shardfn.simulated import autocast
from shardfn.testing import simulated, world
from tests.refusals import told

LOW, HIGH = torch.bfloat16, torch.float32

# Of a float32 x and a bfloat16 h: what documentation says that CUDA gives.
DTYPES: dict[str, tuple[Callable[[Tensor, Tensor], Any], torch.dtype]] = {
    "matmul": (lambda x, h: x @ x, LOW),
    "linear": (lambda x, h: nn.Linear(4, 4, device=x.device)(x), LOW),
    "convolution": (lambda x, h: F.conv1d(x[None], x[:, :, None]), LOW),
    "attention": (lambda x, h: F.scaled_dot_product_attention(x[None], x[None], x[None]), LOW),
    "a cell": (lambda x, h: nn.GRUCell(4, 4, device=x.device)(x), LOW),
    "softmax": (lambda x, h: h.softmax(-1), HIGH),
    "layer norm": (lambda x, h: F.layer_norm(h, (4,)), HIGH),
    "rms norm": (lambda x, h: F.rms_norm(h, (4,)), HIGH),
    "sum": (lambda x, h: h.sum(), HIGH),
    "sum over rows": (lambda x, h: h.sum(1), HIGH),
    "sum in a dtype": (lambda x, h: h.sum(dtype=LOW), LOW),
    "norm": (lambda x, h: torch.norm(h, dim=1), HIGH),
    "norm of all": (lambda x, h: torch.ops.aten.norm.Scalar(h), HIGH),
    "norm over rows": (lambda x, h: torch.ops.aten.norm.ScalarOpt_dim(h, 2, [1]), HIGH),
    "power": (lambda x, h: h**2, HIGH),
    "loss": (lambda x, h: F.mse_loss(h, h), HIGH),
    "cross entropy": (lambda x, h: F.cross_entropy(h, torch.zeros(4, dtype=torch.int64, device=h.device)), HIGH),
    "wide and narrow": (lambda x, h: torch.addcmul(h, x, h), HIGH),
    "narrow": (lambda x, h: torch.addcmul(h, h, h), LOW),
    "relu": (lambda x, h: h.relu(), LOW),
    "added": (lambda x, h: x + h, HIGH),
    "double": (lambda x, h: x.double() @ x.double(), torch.float64),
    "whole numbers": (lambda x, h: (x > 0).sum(), torch.int64),
}


def dtypes(values: bool) -> dict[str, torch.dtype]:
    with simulated(values=values) as device:
        x = torch.randn(4, 4).to(device.name)
        with torch.autocast(device.name, LOW):
            return {name: f(x, x.to(LOW)).dtype for name, (f, _) in DTYPES.items()}


def test_dtypes_are_those_of_cuda() -> None:
    for values in (False, True):
        [found] = world(1, "alone").run(dtypes, values)
        assert found == {name: dtype for name, (_, dtype) in DTYPES.items()}


def test_the_operations_are_those_of_cuda() -> None:
    ours = {f"aten::{n}" for n in (*autocast.LOWER, *autocast.FLOAT, *autocast.RETURNS_FLOAT, *autocast.WIDEST)}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    theirs = {name for name in names if has(name, "AutocastCUDA") and "cudnn" not in name}
    assert theirs - ours == {"aten::binary_cross_entropy"}
    assert ours <= theirs


def casts() -> tuple[list[int], set[torch.dtype], dict[str, str]]:
    with sf.plan.mode(2) as device:
        model, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4)

        def copies(**options: Any) -> int:
            device.reset_counts()
            with torch.autocast(device.name, LOW, **options):
                y = model(x) + model(x)
            y.sum().backward()
            return device.operations["aten::_to_copy"]

        counts = [copies(), copies(cache_enabled=False), copies(enabled=False)]
        return counts, {x.grad.dtype for x in model.parameters() if x.grad is not None}, {
            "cuda": told(lambda: torch.autocast("cuda", LOW)),
            "off": told(lambda: torch.autocast("cuda", LOW, enabled=False)),
            "refused": told(lambda: torch.autocast(device.name)(F.binary_cross_entropy)(x, x)),
        }  # fmt: skip


def test_a_weight_is_cast_once() -> None:
    [(counts, dtypes, refused)] = world(1, "alone").run(casts)
    # Forward: the weight and twice the input. Backward: the weight's gradient, as often as it was cast.
    assert counts == [3 + 1, 4 + 2, 0]
    assert dtypes == {HIGH}
    assert "torch.autocast('cuda') at test_simulated_autocast.py:" in refused["cuda"]
    assert "name it by mesh.device_type or device.name" in refused["cuda"]
    assert "unsafe to autocast" in refused["refused"]


def test_torch_has_its_own_autocast_after_the_block() -> None:
    [found] = world(1, "alone").run(after)
    assert found == (True, True, 0)


def after() -> tuple[bool, bool, int]:
    before = torch.autocast.__init__, torch.clear_autocast_cache
    with simulated() as device, torch.autocast(device.name, LOW):
        nn.Linear(4, 4).to(device.name)(torch.ones(4, device=device.name))
    with torch.autocast("cpu", LOW):
        narrow = (torch.ones(4, 4) @ torch.ones(4, 4)).dtype is LOW
    return (torch.autocast.__init__, torch.clear_autocast_cache) == before, narrow, len(autocast._casts)
