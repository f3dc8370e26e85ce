"""Kernels that encode and decode few bits, against their eager twins, bit for bit; and when they run at all."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardfn import quant
from shardfn.compat import trusted
from shardfn.quant import fused
from shardfn.quant.formats import Format
from shardfn.testing import simulated, world
from tests.interpreted import Call, changed, counted, process

FORMATS = {
    str(x): x
    for x in (
        quant.nf4(64), quant.nf4(64, double=True), quant.fp4(16), quant.int4(64), quant.int4(2), quant.int8(256),
        quant.int8(4096), quant.fp8_e4m3(128), quant.fp8_e5m2(128),
    )
}  # fmt: skip


def drawn(numel: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Numbers of many sizes; with odd seeds, any bits at all."""
    draw = torch.Generator().manual_seed(seed)
    if seed % 2:
        return torch.randint(-(2**31), 2**31, (numel,), generator=draw).int().view(torch.float32).to(dtype)
    powers = torch.randint(-20, 5, (numel // 64 + 1,), generator=draw).repeat_interleave(64)[:numel]
    return (torch.randn(numel, generator=draw) * 2.0**powers).to(dtype)


def eager(format: Format, packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return format._decoded(format.codes(packed, numel), format.scales(packed, numel), numel, dtype)


def compared(format: Format, x: Tensor) -> str:
    """How the kernels differ from their twins on these numbers."""
    numel, expected = x.shape[-1], format._encoded_in_steps(x)
    found = format.encode(x)
    if bool(eager(format, expected, numel, torch.float32).isfinite().all()):
        said = fused.difference("byte", found, expected)
    else:  # codes of nan are not the same everywhere, but what they stand for is
        said = fused.difference("number", *(eager(format, y, numel, torch.float32) for y in (found, expected)))
    decoded = format.decode(expected, numel, x.dtype)
    return said or fused.difference("number", decoded, eager(format, expected, numel, x.dtype))


def through_sizes(name: str, dtype: torch.dtype) -> tuple[list[str], set[str]]:
    from shardfn.quant import kernels

    format = FORMATS[name]
    block, found = format.block, []
    with counted(kernels, "encode", "decode") as calls:
        for numel in (1, block - 1, block, block + 1, 5 * block + 3, 6000):
            for seed in range(4):
                x = drawn(numel, seed, dtype)
                found += [f"{numel}, {seed}: {said}" for said in [compared(format, x)] if said]
    assert len(calls) >= 2 * 6 * 4, "kernels did not run"
    assert type(kernels._encode).__name__ == "InterpretedFunction"
    return found, set(calls)


@pytest.mark.parametrize("dtype", fused.DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_and_numbers_are_those_of_eager_code(interpreted: Call, name: str, dtype: torch.dtype) -> None:
    assert interpreted(through_sizes, name, dtype) == ([], {"encode", "decode"})


def in_rows(name: str) -> list[str]:
    """As a wire has them: rows of bytes with a gap between them, written from rows of a wider matrix."""
    from shardfn.quant import kernels

    format, numel = FORMATS[name], 1037
    x = torch.stack([drawn(1100, 2 * seed, torch.float32) for seed in range(3)])[:, :numel]
    with counted(kernels, "encode", "decode") as calls:
        packed = torch.zeros(3, format.nbytes(numel) + 13, dtype=torch.uint8)
        packed[:, :-13] = format.encode(x)
        decoded = format.decode(packed[:, :-13], numel, torch.bfloat16)
    assert [name for name in calls if name != "decode"][-1:] == ["encode"]
    expected = format._encoded_in_steps(x)
    return [
        fused.difference("byte", packed[:, :-13], expected),
        fused.difference("number", decoded, eager(format, expected, numel, torch.bfloat16)),
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_rows_may_have_gaps(interpreted: Call, name: str) -> None:
    assert interpreted(in_rows, name) == ["", ""]


def far_away() -> str:
    """The last row begins behind 2^31 bytes; most of them are never touched."""
    format, numel = quant.int8(64), 200
    used, row = format.nbytes(numel), 2**30 + 64
    packed = torch.empty(3 * row, dtype=torch.uint8).as_strided((3, used), (row, 1))
    packed.copy_(format._encoded_in_steps(drawn(3 * numel, 0, torch.float32).view(3, -1)))
    assert fused.fits(format.codes(packed, numel))
    decoded = format.decode(packed, numel, torch.float32)
    return fused.difference("number", decoded, eager(format, packed.clone(), numel, torch.float32))


def test_offsets_beyond_32_bits_are_right(interpreted: Call) -> None:
    assert interpreted(far_away) == ""


# --- compiled, though nothing can run ---


def compiled() -> dict[str, str]:
    """PTX and Triton's own code of the kernels for two kinds of device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from shardfn.optim import kernels as of_optim
    from shardfn.quant import kernels

    def code(kernel: Any, constants: dict[str, Any], types: dict[str, str], capability: int) -> str:
        names = kernel.arg_names
        signature = {name: types.get(name, "constexpr" if name in constants else "*fp32") for name in names}
        at = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=at)
        made = triton.compile(source, GPUTarget("cuda", capability, 32), {"enable_fp_fusion": False})
        return f"{made.asm['ttir']}\n{made.asm['ptx']}"

    texts = {}
    counts = dict.fromkeys(("numel", "x_row", "codes_row", "blocks", "n"), "i32")
    numbers = ("least", "most", "b1", "rest1", "b2", "rest2", "bias1", "bias2", "eps", "weight_decay")
    counts |= {"first": "i64", "factor": "i32", "term": "i32"}
    scalars = counts | dict.fromkeys(numbers, "fp32") | dict.fromkeys(("codes", "order", "m_codes", "v_codes"), "*u8")
    for capability in (80, 90):
        for dtype in ("fp32", "bf16"):
            types = scalars | dict.fromkeys(("x", "out", "p", "g"), f"*{dtype}")
            for bits, whole, fraction in ((4, False, 0), (8, True, 0), (8, False, 3)):
                encode = {"BLOCK": 64, "ROWS": 32, "BITS": bits, "WHOLE": whole, "FRACTION": fraction}
                decode = {"BLOCK": 64, "SIZE": 2048, "BITS": bits, "WHOLE": whole}
                key = f"{bits} {whole} {fraction} {dtype} {capability}"
                texts[f"encode {key}"] = code(kernels._encode, encode, types, capability)
                texts[f"decode {key}"] = code(kernels._decode, decode, types, capability)
            for close in (True, False):
                constants = {"CLOSE": close, "ROWS": of_optim.ROWS, "BLOCK": 256}
                texts[f"adamw {close} {dtype} {capability}"] = code(of_optim._adamw, constants, types, capability)
            constants = {"SHIFT": 16, "SIZE": of_optim.SIZE}
            texts[f"round {dtype} {capability}"] = code(
                of_optim._round, constants, types | {"out": "*bf16"}, capability
            )
    return texts


def test_kernels_compile_to_exact_arithmetic_and_64_bit_offsets(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No sum of an unrounded product, no quotient that is nearly right, no subnormal taken for zero."""
    with process(False, tmp_path_factory.mktemp("triton")) as call:
        texts = call(compiled)
    assert len(texts) == 2 * 2 * (3 * 2 + 2 + 1)
    for name, text in texts.items():
        assert "tt.func" in text, name
        assert ".entry" in text, name
        assert not re.findall(r"\bfma\.|\.ftz|\.approx|div\.full|\.local\.", text), name
        ids = re.findall(r"(%\w+) = tt\.get_program_id", text)
        assert ids, name
        for number in ids:  # widened at once, before anything is computed from it
            uses = [line for line in text.splitlines() if re.search(rf"{number}\b(?!.*= tt\.get_program_id)", line)]
            assert [line for line in uses if "extsi" not in line and "get_program_id" not in line] == [], name


# --- what goes to eager code ---


class Own(Tensor):
    pass


def matrix() -> Tensor:
    return drawn(4 * 640, 0, torch.float32).view(4, 640)


FORMAT = quant.int8(64)


def round_trip(x: Tensor, format: Format = FORMAT) -> Tensor:
    return format.decode(format.encode(x), x.shape[-1], x.dtype)


def faked() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        round_trip(mode.from_tensor(matrix()))


NEVER: dict[str, Callable[[], Any]] = {
    "float64": lambda: round_trip(matrix().double()),
    "columns": lambda: FORMAT.encode(matrix().t()),
    "every second": lambda: FORMAT.encode(matrix()[:, ::2]),
    "three dimensions": lambda: round_trip(matrix().view(2, 2, 640)),
    "empty": lambda: round_trip(matrix()[:0]),
    "no numbers": lambda: round_trip(matrix()[:, :0]),
    "a block of no power of two": lambda: round_trip(matrix(), quant.int8(96)),
    "a large block": lambda: round_trip(matrix(), quant.int8(8192)),
    "a class of its own": lambda: round_trip(matrix().as_subclass(Own)),
    "vmap": lambda: torch.vmap(round_trip)(matrix()),
    "grad": lambda: torch.func.grad(lambda x: (round_trip(x) * x).sum())(matrix()),
    "jvp": lambda: torch.func.jvp(lambda x: round_trip(x) * x, (matrix(),), (matrix(),)),
    "forward mode": lambda: in_forward_mode(),
    "compile": lambda: torch.compile(round_trip, backend="eager", fullgraph=True)(matrix()),
    "fake": faked,
}


def in_forward_mode() -> Any:
    with torch.autograd.forward_ad.dual_level():
        return round_trip(torch.autograd.forward_ad.make_dual(matrix(), matrix()))


def not_taken(name: str) -> list[str]:
    from shardfn.quant import kernels

    with counted(kernels, "encode", "decode") as calls:
        round_trip(matrix())
        assert calls[-2:] == ["encode", "decode"]
        calls.clear()
        NEVER[name]()
        return calls


@pytest.mark.parametrize("name", NEVER)
def test_what_kernels_do_not_fit_runs_eagerly(interpreted: Call, name: str) -> None:
    assert interpreted(not_taken, name) == []


def simulated_kernels() -> list[bool]:
    with pytest.MonkeyPatch.context() as patch, simulated(ranks=2) as device:
        patch.setattr(fused, "_has_triton", lambda: True)
        patch.setattr(fused, "KINDS", (torch.device(device.name).type, "cpu"))
        return [fused.fits(torch.zeros(4, device=place)) for place in (device.name, "cpu")]


def test_a_simulated_device_has_no_kernels() -> None:
    assert world(1, "alone").run(simulated_kernels) == [[False, False]]


def test_a_processor_and_a_missing_triton_take_eager_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fused.fits(matrix())
    monkeypatch.setattr(fused, "KINDS", ("cpu",))
    monkeypatch.setattr(fused, "_has_triton", lambda: True)
    assert fused.fits(matrix())
    monkeypatch.setattr(fused, "_has_triton", lambda: False)
    assert not fused.fits(matrix())


# --- the check ---


def wrong(x: Tensor, into: Tensor, *_: Any) -> Tensor:
    into.zero_()
    return x.new_ones(*x.shape[:-1], -(-x.shape[-1] // 64))


def failing(*_: Any) -> Tensor:
    raise RuntimeError("no compiler")


@pytest.mark.parametrize(
    ("kernel", "said"), [(wrong, r"byte \[0, \d+\] is \d+ instead of \d+"), (failing, "RuntimeError: no compiler")]
)
def test_a_kernel_that_fails_its_check_is_named_once_and_not_used(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, said: str
) -> None:
    for name, value in {"KINDS": ("cpu",), "_has_triton": lambda: True, "encode": kernel}.items():
        monkeypatch.setattr(fused, name, value)
    monkeypatch.setattr(trusted, "_found", {})
    x, expected = matrix(), FORMAT._encoded_in_steps(matrix())
    with pytest.warns(RuntimeWarning, match=rf"encode int8\(64\), torch.float32, on cpu, is not used: .*{said}"):
        assert FORMAT.encode(x).equal(expected)
    monkeypatch.setattr(FORMAT.__class__, "_check_encode", failing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FORMAT.encode(x).equal(expected)


CHANGES = {
    "ties go up": ("x <= bound", "x < bound", "nf4(64)"),
    "halves go up": ("+ 12582912.0", "+ 12582912.0 + 0.5 - 0.5", "int8(256)"),
    "truncated": ("(x + 12582912.0).to(tl.int32, bitcast=True)", "x.to(tl.int32)", "int4(64)"),
    "halves of floats go up": (" - 1 + ((size >> shift) & 1)", "", "fp8_e4m3(128)"),
    "subnormal floats are lost": ("size < (min_exponent << 23), subnormal", "False, subnormal", "fp8_e5m2(128)"),
    "no sign": ("| ((bits >> 24) & 128)", "", "fp8_e5m2(128)"),
    "nan is small": ("bits = tl.max(x.to", "bits = tl.max(tl.where(x == x, x, 0.0).to", "int8(256)"),
    "rounded once": (
        "rn(1.0, tl.where(top < min_magnitude, min_magnitude, top)) * code_max",
        "rn(code_max, top)",
        "int8(256)",
    ),
    "no smallest scale": (
        "tl.where(top < min_magnitude, min_magnitude, top)",
        "tl.where(top == 0, 1.0, top)",
        "int8(256)",
    ),
    "the other half first": ("upper << 4 | lower", "lower << 4 | upper", "nf4(64)"),
    "half a byte too much": ("code = tl.where(offsets < numel, code, 0)", "code = code", "nf4(64)"),
    "decoded in the other order": ("interleave(pair >> 4, pair & 15)", "interleave(pair & 15, pair >> 4)", "nf4(64)"),
    "the next scale": ("+ offsets // BLOCK", "+ (offsets + 1) // BLOCK", "int8(256)"),
    "no sign when decoded": (".to(tl.int8, bitcast=True)", "", "int8(256)"),
    "bfloat16 cut off": (", bits + 0x7FFF + ((bits >> 16) & 1),", ", bits,", "int8(256)"),
    "bfloat16 halves up": ("0x7FFF + ((bits >> 16) & 1)", "0x8000", "int8(256)"),
}


def caught(change: str, folder: str) -> list[str]:
    from shardfn.quant import kernels

    old, new, name = CHANGES[change]
    format, cpu = FORMATS[name], torch.device("cpu")
    dtypes = (torch.float32, torch.bfloat16)
    right = [check(dtype, cpu) for dtype in dtypes for check in (format._check_encode, format._check_decode)]
    assert right == [""] * 4
    fused._kernels = lambda: changed(kernels, old, new, folder)
    try:
        return [check(dtype, cpu) for dtype in dtypes for check in (format._check_encode, format._check_decode)]
    finally:
        fused._kernels = lambda: kernels


@pytest.mark.parametrize("change", CHANGES)
def test_a_kernel_that_is_slightly_wrong_fails_its_check(interpreted: Call, change: str, tmp_path: Any) -> None:
    assert any(interpreted(caught, change, str(tmp_path)))
