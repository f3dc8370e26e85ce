"""Files of bitsandbytes: what the library writes is read bit for bit, and the other way round."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn import quant
from shardfn.quant import bitsandbytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((64, 128), (3, 64), (5, 7), (129,), (300, 33), (64,))


@pytest.fixture(scope="module")
def library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("bitsandbytes.functional", exc_type=ImportError)


def theirs(library: Any, x: Tensor, kind: str, block: int, double: bool) -> tuple[dict[str, Tensor], Tensor]:
    """What the library has in files, and what it decodes that to."""
    codes, state = library.quantize_4bit(x, blocksize=block, quant_type=kind, compress_statistics=double)
    files = {"w": codes, **{f"w.{key}": part for key, part in state.as_dict(packed=True).items()}}
    state.shape = torch.Size([x.numel()])  # of one row: its kernel for CPUs takes blocks to begin with each row
    return files, library.dequantize_4bit(codes, state).view(x.shape)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_files_are_read_and_written_bit_for_bit(library: Any, kind: str, double: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    for shape in SHAPES:
        for dtype in DTYPES:
            for block in (64, 256, 1024):
                x = torch.randn(shape, generator=draw).to(dtype)
                files, want = theirs(library, x, kind, block, double)
                got = bitsandbytes.packed("w", {"other.w": x, **files})
                case = (shape, dtype, block)
                assert torch.equal(got.decoded(), want), case
                assert (got.format, got.shape, got.dtype) == (quant.Format(kind, block, double), shape, dtype), case
                back = bitsandbytes.file_tensors("w", got)
                assert list(bitsandbytes.quantized_names([*back, "other.w"])) == ["w"]
                assert set(bitsandbytes.quantized_names(back)["w"]) == set(files) == set(back), case
                words = {name for name in files if "quant_state" in name}
                same = {name: _same(back[name], files[name]) for name in set(files) - words}
                assert all(same.values()), (case, same)
                for name in words:
                    assert _words(back[name]) == _words(files[name]), case
                state = library.QuantState.from_dict(
                    {k[2:]: v for k, v in back.items() if k != "w"}, torch.device("cpu")
                )
                state.shape = torch.Size([x.numel()])
                assert torch.equal(library.dequantize_4bit(back["w"], state).view(shape), want), case


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _words(x: Tensor) -> Any:
    return json.loads(bytes(x.tolist()))


def test_codes_may_be_stored_as_other_dtypes(library: Any) -> None:
    files, want = theirs(library, torch.randn(64, 64), "nf4", 64, True)
    for dtype in (torch.bfloat16, torch.float32):  # bnb_4bit_quant_storage, as for FSDP
        files["w"] = files["w"].view(torch.uint8).view(-1).view(dtype).view(-1, 1)
        assert torch.equal(bitsandbytes.packed("w", files).decoded(), want)


def written(double: bool = True, block: int = 64) -> dict[str, Tensor]:
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
    return bitsandbytes.file_tensors("w", quant.quantize({"w": x}, quant.nf4(block, double=double))["w"])


@pytest.mark.parametrize("double", [False, True])
def test_what_is_written_is_read(double: bool) -> None:
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
    packed = quant.quantize({"w": x}, quant.nf4(double=double))["w"]
    again = bitsandbytes.packed("w", bitsandbytes.file_tensors("w", packed))
    assert torch.equal(again.values, packed.values)
    assert (again.format, again.shape, again.dtype) == (packed.format, packed.shape, packed.dtype)


def changed(words: Any = None, **tensors: Any) -> Any:
    files = written()
    if words is not None:
        key = next(name for name in files if "quant_state" in name)
        files[key] = torch.tensor(list(json.dumps(_words(files[key]) | words).encode()), dtype=torch.uint8)
    for name, f in tensors.items():
        key = f"w.{name}" if name != "codes" else "w"
        files[key] = f(files[key])
        if files[key] is None:
            del files[key]
    return lambda: bitsandbytes.packed("w", files)


def packed(format: quant.Format, dtype: torch.dtype = torch.float32) -> quant.Packed:
    return quant.pack(torch.randn(8, 64).to(dtype), format)


REFUSED: dict[str, tuple[Any, str]] = {
    "blocks": (changed({"blocksize": 128}), r"20 scales, but shape \[40, 32\] in blocks of 128 needs 10"),
    "shape": (changed({"shape": [40, 64]}), "640 bytes of codes.*needs 1280"),
    "odd block": (changed({"blocksize": 63}), "w: nf4: block must be"),
    "nested blocks": (changed({"nested_blocksize": 128}), "scales in blocks of 128"),
    "nested dtype": (changed({"nested_dtype": "bfloat16"}), "scales that were bfloat16"),
    "kind": (changed({"quant_type": "int3"}), "its quant_type is 'int3'"),
    "dtype": (changed({"dtype": "int8"}), "of dtype 'int8'"),
    "table": (changed(quant_map=lambda x: x.flip(0)), "w.quant_map has different values from nf4"),
    "nested table": (changed(nested_quant_map=lambda x: x * 2), "w.nested_quant_map has different values"),
    "no table": (changed(quant_map=lambda x: None), "there is no w.quant_map"),
    "no scales": (changed(absmax=lambda x: None), "there is no w.absmax"),
    "no nested scales": (changed(nested_absmax=lambda x: None), "double scales, but the tensors are not"),
    "scales of another dtype": (changed(absmax=lambda x: x.float()), "w.absmax must have dtype torch.uint8, got torch"),
    "cut": (changed(codes=lambda x: x[:-1]), "639 bytes of codes"),
    "no words": (lambda: bitsandbytes.packed("w", {"w": torch.zeros(4)}), "got none"),
    "not words": (changed(**{"quant_state.bitsandbytes__nf4": lambda x: x[:5]}), "cannot be read"),
    "written, int8": (lambda: bitsandbytes.file_tensors("w", packed(quant.int8(64))), "int8.64., which bitsandbytes"),
    "written, blocks": (lambda: bitsandbytes.file_tensors("w", packed(quant.nf4(96))), "blocks of 32, 64"),
    "written, float64": (
        lambda: bitsandbytes.file_tensors("w", packed(quant.nf4(), torch.float64)), "was torch.float64"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_would_be_decoded_wrongly_is_refused(case: str) -> None:
    f, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        f()
