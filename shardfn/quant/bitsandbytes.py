"""Quantized parameters in files as bitsandbytes writes them: several tensors each, one of which is JSON as bytes.

weight                                  codes, two a byte
weight.absmax                           scales, float32, one a block; or their codes, uint8
weight.quant_map                        the values of the 16 codes, float32
weight.nested_absmax                    scales of the scales, float32, one for 256
weight.nested_quant_map                 the values of their 256 codes, float32
weight.quant_state.bitsandbytes__nf4    JSON as bytes: shape, dtype, block size, mean of the scales
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardfn.quant import codes
from shardfn.quant.formats import NESTED, Format, format_of
from shardfn.quant.packed import Packed
from shardfn.quoting import listed

STATE = "quant_state.bitsandbytes__"
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_DIGITS = 24  # at most, of a float in JSON
_TABLES = {"nf4": codes.nf4, "fp4": codes.fp4}
_STATED = {"quant_type", "blocksize", "dtype", "shape"}
_NESTED = {"nested_blocksize", "nested_dtype", "nested_offset"}


def quantized_names(names: Iterable[str]) -> dict[str, list[str]]:
    """The quantized parameters in files.

    Args:
        names: the names of all tensors in the files.

    Returns:
        `{parameter: names of its tensors}`; first its codes, whose name is the parameter's own.
    """
    keys = set(names)
    parameters = sorted(name[: name.index("." + STATE)] for name in keys if "." + STATE in name)
    return {
        name: [
            name,
            *sorted(key for key in keys if _suffix(key, name) in PARTS or _suffix(key, name).startswith(STATE)),
        ]
        for name in parameters
    }


def meta_parameter(name: str, tensors: Mapping[str, Tensor]) -> Packed:
    """A parameter in files, without its bytes, which are on the meta device.

    Args:
        name: the parameter's name.
        tensors: tensors by name: those that `found` lists, and perhaps others.

    Returns:
        The parameter, in `nf4` or `fp4`.

    Raises:
        ValueError: a tensor is missing or has another size; its blocks, codes or JSON fit no format here.
    """
    state = _state(name, tensors)
    format = _format(name, state)
    shape, dtype = tuple(state["shape"]), getattr(torch, str(state["dtype"]), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{name} was of dtype {state['dtype']!r}, which is not one of floating-point numbers")
    numel = math.prod(shape)
    _same_table(name, "quant_map", tensors, _TABLES[format.name])
    values = _tensor(name, "", tensors)
    _check_size(name, "codes", values.numel() * values.element_size(), -(-numel // 2), state)
    absmax = _tensor(name, "absmax", tensors, torch.uint8 if format.double else torch.float32)
    n = format.blocks(numel)
    _check_size(name, "scales", absmax.numel(), n, state)
    if format.double:
        _same_table(name, "nested_quant_map", tensors, codes.dynamic)
        nested = _tensor(name, "nested_absmax", tensors, torch.float32)
        _check_size(name, "scales of the scales", nested.numel(), -(-n // NESTED), state)
    return Packed(torch.empty(format.nbytes(numel), dtype=torch.uint8, device="meta"), format, shape, dtype)


def packed(name: str, tensors: Mapping[str, Tensor]) -> Packed:
    """A parameter from its tensors in files, bit for bit, on the device of its codes.

    Raises:
        ValueError: as `meta_parameter`.
    """
    parameter, code_bytes = meta_parameter(name, tensors), _bytes(tensors[name])
    scales = [_bytes(tensors[f"{name}.absmax"])]
    if parameter.format.double:
        mean = torch.tensor([_state(name, tensors)["nested_offset"]], dtype=torch.float32, device="cpu")
        scales = [_bytes(tensors[f"{name}.nested_absmax"]), _bytes(mean), *scales]
    parameter.values = torch.cat((*(x.to(code_bytes.device) for x in scales), code_bytes))
    return parameter


def _contiguous_copy(x: Tensor) -> Tensor:
    """A contiguous copy, which safetensors needs."""
    return x.clone(memory_format=torch.contiguous_format)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def file_tensors(name: str, parameter: Packed) -> dict[str, Tensor]:
    """The tensors that bitsandbytes keeps of a parameter in files: the inverse of `packed`.

    Args:
        name: the parameter's name.
        parameter: in `nf4` or `fp4`; if it is on the meta device, only shapes and dtypes of the result count.

    Raises:
        ValueError: bitsandbytes does not have its format, block size or dtype.
    """
    format, numel, values = parameter.format, parameter.numel, parameter.values
    if format.name not in _TABLES or format.block & (format.block - 1) or not 32 <= format.block <= 4096:
        raise ValueError(
            f"{name} is kept in {format}, which bitsandbytes does not have: it has nf4 and fp4 in blocks of 32, 64, "
            f"128, ... or 4096"
        )
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name} was {parameter.dtype}; bitsandbytes takes float32, bfloat16 and float16")
    stated: dict[str, Any] = {
        "quant_type": format.name,
        "blocksize": format.block,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "shape": list(parameter.shape),
    }
    parts = {
        name: format.codes(values, numel).clone().view(-1, 1),
        f"{name}.quant_map": _contiguous_copy(codes.numbers(_TABLES[format.name])),
    }
    if format.double:
        n = format.blocks(numel)
        groups = -(-n // NESTED)
        numbers = values[: 4 * groups + 4].clone().view(torch.float32)
        parts[f"{name}.absmax"] = values[4 * groups + 4 : 4 * groups + 4 + n].clone()
        parts[f"{name}.nested_absmax"] = numbers[:groups].clone()
        parts[f"{name}.nested_quant_map"] = _contiguous_copy(codes.numbers(codes.dynamic))
        stated |= {
            "nested_blocksize": NESTED,
            "nested_dtype": "float32",
            "nested_offset": 0.0 if values.is_meta else float(numbers[groups]),
        }
    else:
        parts[f"{name}.absmax"] = format.scales(values, numel).clone()
    length = len(json.dumps({**stated, "nested_offset": 0.0})) + _DIGITS  # a fixed length, whatever the mean
    words = torch.tensor(list(json.dumps(stated).ljust(length).encode()), dtype=torch.uint8, device="cpu")
    return parts | {f"{name}.{STATE}{format.name}": words}


def _suffix(key: str, name: str) -> str:
    return key[len(name) + 1 :] if key.startswith(name + ".") else ""


def _state(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The JSON of a parameter, checked to be complete, with `double` added."""
    keys = [key for key in tensors if _suffix(key, name).startswith(STATE)]
    if len(keys) != 1:
        count = f"{len(keys)} of them" if keys else "none"
        raise ValueError(f"{name} needs one tensor {name}.{STATE}..., which describes it, got {count}")
    try:
        state = json.loads(bytes(tensors[keys[0]].tolist()))
        lacking = (_STATED | (_NESTED if f"{name}.nested_absmax" in tensors else set())) - set(state)
        problem = f"it does not say {listed(sorted(lacking))}" if lacking else ""
        kind = state.get("quant_type")
        if not problem and kind != keys[0].rpartition("__")[2]:
            problem = f"its quant_type is {kind!r}"
        if not problem and not all(type(n) is int and n > 0 for n in state["shape"] or [None]):
            problem = f"the shape is {state['shape']!r}"
        if not problem and type(state.get("nested_offset", 0.0)) not in (int, float):
            problem = f"the scales' mean is {state['nested_offset']!r}"
    except (ValueError, TypeError, AttributeError) as error:
        state, problem = {}, f"{type(error).__name__}: {error}"
    if problem:
        raise ValueError(f"{keys[0]} cannot be read: {problem}")
    double = f"{name}.nested_absmax" in tensors
    if double != ("nested_blocksize" in state):
        raise ValueError(f"{name}: {keys[0]} is of {'single' if double else 'double'} scales, but the tensors are not")
    return {**state, "double": double}


def _format(name: str, state: Mapping[str, Any]) -> Format:
    if state["quant_type"] not in _TABLES:
        raise ValueError(f"{name} is kept in {state['quant_type']!r}; of bitsandbytes' formats there are nf4 and fp4")
    if state["double"] and state["nested_blocksize"] != NESTED:
        raise ValueError(
            f"{name} has scales in blocks of {state['nested_blocksize']}; formats here have them in blocks of {NESTED}"
        )
    if state["double"] and state["nested_dtype"] != "float32":
        raise ValueError(f"{name} has scales that were {state['nested_dtype']}; formats here have them in float32")
    try:
        return format_of(state["quant_type"], state["blocksize"], state["double"])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _tensor(name: str, part: str, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
    key = f"{name}.{part}" if part else name
    if key not in tensors:
        raise ValueError(f"there is no {key}, which {name} needs")
    x = tensors[key]
    if dtype is not None and x.dtype != dtype:
        raise ValueError(f"{key} must have dtype {dtype}, got {x.dtype}")
    return x


def _check_size(name: str, item: str, got: int, want: int, state: Mapping[str, Any]) -> None:
    if got != want:
        raise ValueError(
            f"{name} has {got} {'bytes of codes' if item == 'codes' else item}, but shape {state['shape']} in blocks "
            f"of {state['blocksize']} needs {want}: it is truncated, or was quantized with different blocks"
        )


def _same_table(name: str, part: str, tensors: Mapping[str, Tensor], code: codes.Code) -> None:
    """Raises ValueError if codes stand for different values than here."""
    table = _tensor(name, part, tensors)
    expected = codes.numbers(code).to(table.device)
    if table.shape != expected.shape or not torch.equal(table.float(), expected):
        raise ValueError(f"{name}.{part} has different values from {code.name} here: it would be decoded wrongly")
