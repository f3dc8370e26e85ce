"""Parameters in few bits as bitsandbytes keeps them in files: several tensors, and a few words in JSON, for each.

weight                                  codes, two a byte
weight.absmax                           scales, float32, one a block; or their codes, uint8
weight.quant_map                        the numbers of the 16 codes, float32
weight.nested_absmax                    scales of the scales, float32, one for 256
weight.nested_quant_map                 the numbers of their 256 codes, float32
weight.quant_state.bitsandbytes__nf4    JSON as bytes: shape, dtype, blocks, the scales' mean
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
_FORMATS = ("nf4", "fp4")
_DIGITS = 24  # that a number has at most
_TABLES = {"nf4": codes.nf4, "fp4": codes.fp4}
_STATED = {"quant_type", "blocksize", "dtype", "shape"}
_NESTED = {"nested_blocksize", "nested_dtype", "nested_offset"}


def found(names: Iterable[str]) -> dict[str, list[str]]:
    """Which parameters files have in few bits.

    Args:
        names: of all tensors in the files.

    Returns:
        `{parameter: names of its tensors}`, its codes first, which have its own name.
    """
    there = set(names)
    parameters = sorted(name[: name.index("." + STATE)] for name in there if "." + STATE in name)
    return {
        name: [name, *sorted(one for one in there if _part(one, name) in PARTS or _part(one, name).startswith(STATE))]
        for name in parameters
    }


def described(name: str, tensors: Mapping[str, Tensor]) -> Packed:
    """What the tensors that files have of a parameter make, without its bytes, which are on the device meta.

    Args:
        name: of the parameter.
        tensors: by name, those that `found` lists, and perhaps others.

    Returns:
        It, in `nf4` or `fp4`.

    Raises:
        ValueError: a tensor that is missing, or of another size; blocks, codes or words that no format here has.
    """
    said = _said(name, tensors)
    format = _format(name, said)
    shape, dtype = tuple(said["shape"]), _dtype(name, said["dtype"])
    numel = math.prod(shape)
    _same_table(name, "quant_map", tensors, _TABLES[format.name])
    values = _tensor(name, "", tensors)
    _check_size(name, "codes", values.numel() * values.element_size(), -(-numel // 2), said)
    absmax, n = _tensor(name, "absmax", tensors), format.blocks(numel)
    _check_size(name, "scales", absmax.numel(), n, said)
    if not format.double:
        _of(name, "absmax", absmax, torch.float32)
    else:
        _of(name, "absmax", absmax, torch.uint8)
        _same_table(name, "nested_quant_map", tensors, codes.dynamic)
        nested = _of(name, "nested_absmax", _tensor(name, "nested_absmax", tensors), torch.float32)
        _check_size(name, "scales of the scales", nested.numel(), -(-n // NESTED), said)
    return Packed(torch.empty(format.nbytes(numel), dtype=torch.uint8, device="meta"), format, shape, dtype)


def packed(name: str, tensors: Mapping[str, Tensor]) -> Packed:
    """A parameter from the tensors that files have of it, bit for bit, on the device of its codes.

    Raises:
        ValueError: as `described`.
    """
    made, content = described(name, tensors), _bytes(tensors[name])
    scales = [_bytes(tensors[f"{name}.absmax"])]
    if made.format.double:
        mean = torch.tensor([_said(name, tensors)["nested_offset"]], dtype=torch.float32)
        scales = [_bytes(tensors[f"{name}.nested_absmax"]), _bytes(mean), *scales]
    made.values = torch.cat((*(x.to(content.device) for x in scales), content))
    return made


def _own(x: Tensor) -> Tensor:
    """A copy, without which no file of safetensors is written."""
    return x.clone(memory_format=torch.contiguous_format)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def tensors(name: str, parameter: Packed) -> dict[str, Tensor]:
    """The tensors that bitsandbytes has of a parameter in files: the inverse of `packed`.

    Args:
        name: of the parameter.
        parameter: in `nf4` or `fp4`; of one on the device meta these are the shapes and dtypes.

    Raises:
        ValueError: another format, or blocks that bitsandbytes does not have; a dtype that it does not take.
    """
    format, numel, values = parameter.format, parameter.numel, parameter.values
    if format.name not in _FORMATS or format.block & (format.block - 1) or not 32 <= format.block <= 4096:
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
    made = {
        name: format.codes(values, numel).clone().view(-1, 1),
        f"{name}.quant_map": _own(codes.numbers(_TABLES[format.name])),
    }
    if format.double:
        n = format.blocks(numel)
        few = -(-n // NESTED)
        numbers = values[: 4 * few + 4].clone().view(torch.float32)
        made[f"{name}.absmax"] = values[4 * few + 4 : 4 * few + 4 + n].clone()
        made[f"{name}.nested_absmax"] = numbers[:few].clone()
        made[f"{name}.nested_quant_map"] = _own(codes.numbers(codes.dynamic))
        stated |= {
            "nested_blocksize": NESTED,
            "nested_dtype": "float32",
            "nested_offset": 0.0 if values.is_meta else float(numbers[few]),
        }
    else:
        made[f"{name}.absmax"] = format.scales(values, numel).clone()
    length = len(json.dumps({**stated, "nested_offset": 0.0})) + _DIGITS  # the same for whatever mean
    words = torch.tensor(list(json.dumps(stated).ljust(length).encode()), dtype=torch.uint8)
    return made | {f"{name}.{STATE}{format.name}": words}


def _part(one: str, name: str) -> str:
    return one[len(name) + 1 :] if one.startswith(name + ".") else ""


def _said(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The words of a parameter, all of which are there."""
    keys = [one for one in tensors if _part(one, name).startswith(STATE)]
    if len(keys) != 1:
        there = f"{len(keys)} of them" if keys else "none"
        raise ValueError(f"{name} needs one tensor {name}.{STATE}..., which says what it is; there is {there}")
    try:
        said = json.loads(bytes(tensors[keys[0]].tolist()))
        lacking = (_STATED | (_NESTED if f"{name}.nested_absmax" in tensors else set())) - set(said)
        problem = f"it does not say {listed(sorted(lacking))}" if lacking else ""
        kind = said.get("quant_type")
        if not problem and kind != keys[0].rpartition("__")[2]:
            problem = f"it speaks of {kind!r}"
        if not problem and not all(type(n) is int and n > 0 for n in said["shape"] or [None]):
            problem = f"the shape is {said['shape']!r}"
        if not problem and type(said.get("nested_offset", 0.0)) not in (int, float):
            problem = f"the scales' mean is {said['nested_offset']!r}"
    except (ValueError, TypeError, AttributeError) as error:
        said, problem = {}, f"{type(error).__name__}: {error}"
    if problem:
        raise ValueError(f"{keys[0]} cannot be read: {problem}")
    double = f"{name}.nested_absmax" in tensors
    if double != ("nested_blocksize" in said):
        raise ValueError(f"{name}: {keys[0]} speaks of {'single' if double else 'double'} scales, the tensors do not")
    return {**said, "double": double}


def _format(name: str, said: Mapping[str, Any]) -> Format:
    if said["quant_type"] not in _FORMATS:
        raise ValueError(f"{name} is kept in {said['quant_type']!r}; of bitsandbytes' formats there are nf4 and fp4")
    if said["double"] and said["nested_blocksize"] != NESTED:
        raise ValueError(
            f"{name} has scales in blocks of {said['nested_blocksize']}; formats here have them in blocks of {NESTED}"
        )
    if said["double"] and said["nested_dtype"] != "float32":
        raise ValueError(f"{name} has scales that were {said['nested_dtype']}; formats here have them in float32")
    try:
        return format_of(said["quant_type"], said["blocksize"], said["double"])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _dtype(name: str, said: str) -> torch.dtype:
    found = getattr(torch, str(said), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{name} was of dtype {said!r}, which is not one of floating-point numbers")
    return found


def _tensor(name: str, part: str, tensors: Mapping[str, Tensor]) -> Tensor:
    key = f"{name}.{part}" if part else name
    if key not in tensors:
        raise ValueError(f"there is no {key}, which {name} needs")
    return tensors[key]


def _of(name: str, part: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype != dtype:
        raise ValueError(f"{name}.{part} is {x.dtype}, not {dtype}")
    return x


def _check_size(name: str, what: str, got: int, want: int, said: Mapping[str, Any]) -> None:
    if got != want:
        raise ValueError(
            f"{name} has {got} {'bytes of codes' if what == 'codes' else what}, but shape {said['shape']} in blocks of "
            f"{said['blocksize']} needs {want}: it is cut, or was quantised with other blocks"
        )


def _same_table(name: str, part: str, tensors: Mapping[str, Tensor], code: codes.Code) -> None:
    """Raises ValueError if the numbers that codes stand for are others."""
    there = _tensor(name, part, tensors)
    ours = codes.numbers(code).to(there.device)
    if there.shape != ours.shape or not torch.equal(there.float(), ours):
        raise ValueError(f"{name}.{part} has other numbers than {code.name} has here: it would be decoded wrongly")
