"""Codes: the nearest number of a table, however it is looked up; and formats, whatever the numbers are."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardfn import quant
from shardfn.quant import codes

FORMATS = [
    quant.nf4(64), quant.nf4(64, double=True), quant.fp4(64), quant.int4(64), quant.int8(64), quant.fp8_e4m3(64),
    quant.fp8_e5m2(64),
]  # fmt: skip


@pytest.mark.parametrize("code", [codes.dynamic, codes.positive])
def test_codes_of_8_bits_are_those_of_a_search_among_all(code: codes.Code) -> None:
    table = code.decode(torch.arange(256, dtype=torch.uint8))
    assert (table.diff() > 0).all()
    bounds = codes.midpoints(table, code.keeps)
    inf = torch.tensor(torch.inf)
    near = torch.stack([bounds, bounds.nextafter(inf), bounds.nextafter(-inf)]).reshape(-1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(4000, generator=generator) * 10 ** (-9 * torch.rand(4000, generator=generator))
    x = torch.cat((near, drawn.clamp(-1, 1), table, torch.tensor([0.0, -0.0, 1e-45])))
    found = code.encode(x)
    assert found.equal(torch.bucketize(x, bounds).to(torch.uint8))
    others = table[torch.stack([(found.int() + n).clamp(0, 255) for n in (-1, 0, 1)])].double()
    off = (others - x.double()).abs()
    kept = torch.full_like(x, code.keeps, dtype=torch.bool) & (x > 0) & (x < table[1])
    assert (off[1] <= off.amin(0) + 2e-7 * x.abs())[~kept].all()  # a bound is rounded, too
    assert (found[kept] == 1).all()
    assert code.encode(x.view(2, -1)).equal(found.view(2, -1))
    assert torch.vmap(code.encode)(x.view(2, -1)).equal(found.view(2, -1))
    assert code.decode(found.view(2, -1)).equal(table[found.int()].view(2, -1))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_numbers_of_any_size_stay_within_a_step_of_their_code(format: quant.Format) -> None:
    draw = torch.Generator().manual_seed(0)
    table = codes.numbers(format.code)
    table = table[table.isfinite()].sort().values / format.code.most
    for power in (-45, -42, -39, -38, -37, -36, -35, -34, -30, 0, 30, 37):
        x = torch.randn(200, generator=draw, dtype=torch.float64) * 10.0**power
        x[64:128] = 0  # a block of zeros, as of a parameter that nobody used
        x[150:] = 0
        x = x.float()
        y = format.decode(format.encode(x), 200, torch.float32)
        assert y.isfinite().all(), power
        assert not y[64:128].any(), power
        assert not y[150:].any(), power
        if not format.double:
            largest = torch.stack([part.abs().max() for part in x.split(64)]).repeat_interleave(64)[:200]
            allowed = largest * table.diff().max() + 1e-38
            assert ((y - x).abs() <= allowed).all(), power


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_numbers_that_are_not_finite_make_their_block_such(format: quant.Format) -> None:
    for value in (torch.inf, -torch.inf, torch.nan):
        for at in (0, 100, 129):
            x = torch.randn(130, generator=torch.Generator().manual_seed(0))
            x[at] = value
            start = at // 64 * 64
            assert not format.decode(format.encode(x), 130, x.dtype)[start : start + 64].isfinite().any()
            with pytest.raises(ValueError, match="not finite"):
                quant.pack(x, format)
    for x in (torch.full((130,), 1e300, dtype=torch.float64), torch.full((130,), torch.finfo(torch.float32).max)):
        with contextlib.suppress(ValueError):  # parameters are refused, or finite when they are decoded
            assert quant.pack(x, format).decoded(torch.float64).isfinite().all()


def fresh() -> Any:
    """The module, in which nobody has used a table yet."""
    spec = importlib.util.spec_from_file_location("shardfn.quant.codes", codes.__file__)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@contextlib.contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def under(context: Callable[[], Any]) -> Callable[[Any, Tensor], Any]:
    def first(use: Any, x: Tensor) -> None:
        with context():
            use(x)

    return first


FIRST: dict[str, Callable[[Any, Tensor], Any]] = {
    "float64 by default": under(lambda: by_default(torch.float64)),
    "bfloat16 by default": under(lambda: by_default(torch.bfloat16)),
    "meta by default": under(lambda: torch.device("meta")),
    "inference": under(torch.inference_mode),
    "fake": under(lambda: FakeTensorMode(allow_non_fake_inputs=True)),
    "vmap": lambda use, x: torch.vmap(use)(x.view(10, -1)),
    "grad": lambda use, x: torch.func.grad(lambda x: (use(x) * x).sum())(x),
    "jvp": lambda use, x: torch.func.jvp(lambda x: use(x) * x, (x,), (x,)),
    "compile": lambda use, x: torch.compile(use, backend="eager", fullgraph=True)(x),
}


@pytest.mark.parametrize("first", FIRST)
def test_tables_are_the_same_whatever_runs_when_they_are_first_used(first: str) -> None:
    x = torch.randn(640, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    every = ("fp4", "dynamic", "nf4", "int4", "int8", "fp8_e4m3", "fp8_e5m2", "positive")
    for name in every[: 2 if first == "compile" else 8]:
        known, code = getattr(codes, name), getattr(fresh(), name)
        FIRST[first](lambda x, code=code: code.decode(code.encode(x)), x)
        assert torch.equal(code.encode(x), known.encode(x)), name
        decoded = code.decode(known.encode(x))
        assert decoded.dtype == torch.float32, name
        assert torch.equal(decoded, known.decode(known.encode(x))), name
        assert torch.equal(torch.vmap(code.encode)(x.view(10, -1)).view(-1), known.encode(x)), name


class LikeCuda(TorchDispatchMode):
    """Divides by a number as CUDA does: by multiplication with its reciprocal, which is rounded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], Tensor):
            return args[0] * torch.tensor(1 / args[1], dtype=args[0].dtype)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_bytes_do_not_depend_on_how_a_device_divides_by_a_number(format: quant.Format) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    with LikeCuda():
        found = format.encode(x)
    assert torch.equal(found, format.encode(x))
