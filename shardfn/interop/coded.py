"""Parameters stored quantized, as by bitsandbytes: decoded, or kept as bytes."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardfn.checkpoint.team import CheckpointError
from shardfn.interop.lazy_tensors import Assembled, Computed, lazy
from shardfn.interop.tensor_plan import is_conv1d
from shardfn.quant import bitsandbytes
from shardfn.quant.formats import Format
from shardfn.quant.packed import Packed
from shardfn.quoting import listed


class DecodedOnDemand(Computed):
    """A parameter that is decoded when elements of it are needed.

    Attributes:
        format: in which it is stored.
    """

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        described = bitsandbytes.meta_parameter(name, tensors)
        super().__init__(described.shape, torch.float32, lambda: _decoded(self))
        self.format, self._name, self._tensors = described.format, name, tensors

    def packed(self) -> Packed:
        """The quantized parameter, as stored."""
        return bitsandbytes.packed(self._name, self._tensors)


@functools.lru_cache(maxsize=1)
def _decoded(x: DecodedOnDemand) -> Assembled:
    return lazy(x.packed().decoded(torch.float32), "")


def stored(tensors: Mapping[str, Tensor]) -> dict[str, Assembled]:
    """The tensors of files by name; those that together store one parameter are combined.

    Raises:
        CheckpointError: tensors do not make up a parameter.
    """
    few = bitsandbytes.quantized_names(tensors)
    inner = {name for names in few.values() for name in names}
    plain = {name: lazy(x, name) for name, x in tensors.items() if name not in inner}
    try:
        return plain | {name: DecodedOnDemand(name, {part: tensors[part] for part in names if part in tensors})
                        for name, names in few.items()}  # fmt: skip
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def upright(values: Mapping[str, Assembled], module: nn.Module) -> dict[str, Assembled]:
    """Undoes the transposition that `transformers` applies to the weight of a `Conv1D` before quantizing it."""
    turned = {f"{path}.weight" for path, m in module.named_modules() if is_conv1d(m)}
    return {
        name: _lazy_transpose(x) if name in turned and isinstance(x, DecodedOnDemand) else x
        for name, x in values.items()
    }


def _lazy_transpose(x: DecodedOnDemand) -> Computed:
    return Computed(x.shape[::-1], x.dtype, lambda: lazy(x.joined().T, ""))


def quantized_formats(values: Mapping[str, Any]) -> dict[str, Format]:
    """The formats of the parameters that files store quantized.

    Raises:
        CheckpointError: one is made of several tensors, or transposed.
    """
    few = {name: x for name, x in values.items() if isinstance(x, Computed) and x.rounded}
    if several := [name for name, x in few.items() if not isinstance(x, DecodedOnDemand)]:
        raise CheckpointError(
            f"keep_quantized: {listed(several, 4)} must each be one quantized tensor in the files, got several or one "
            f"that is transposed. Leave keep_quantized out; then each quant.Packed in model.tree stays quantized"
        )
    return {name: x.format for name, x in few.items() if isinstance(x, DecodedOnDemand)}


def refuse_twice(values: Mapping[str, Any], formats: Mapping[str, Format]) -> None:
    """Raises CheckpointError if quantized values would be quantized again."""
    wrong = []
    for name, format in formats.items():
        x = values.get(name)
        if isinstance(x, Computed) and x.rounded:
            stored_as = (
                x.format if isinstance(x, DecodedOnDemand) else "made of several that are in few bits, or transposed,"
            )
            wrong += [f"{name} is {stored_as} there, and {format} in model.tree"] if stored_as != format else []
    if wrong:
        raise CheckpointError(
            f"{listed(wrong, 4)}: rounding twice would lose more. Keep the files' format by keep_quantized=True, or "
            f"leave the parameters in model.tree in full precision to decode the files"
        )


def hint(folder: Any) -> str:
    """A message if config.json says that the parameters were quantized in a way that is not supported; else ""."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
        method = config["quant_method"]
        is_supported = method == "bitsandbytes" and not config.get("load_in_8bit")
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    kind = f"{method}, in 8 bits" if method == "bitsandbytes" else method
    return "" if is_supported else (
        f"config.json there says that they were quantised by {kind}: of numbers in few bits, those in 4 bits of "
        f"bitsandbytes are read"
    )  # fmt: skip


def settings(packed: Mapping[str, Packed], linear: Sequence[str]) -> dict[str, Any]:
    """The quantization settings for the configuration of a `transformers` model.

    Args:
        packed: the quantized parameters by name, all in one format.
        linear: names of the module's linear layers.

    Raises:
        CheckpointError: `from_pretrained` could not load some of these parameters.
    """
    layers = {name.removesuffix(".weight"): x for name, x in packed.items()}
    if odd := [name for name in packed if name.removesuffix(".weight") not in linear]:
        raise CheckpointError(
            f"{listed(odd, 4)} {'is' if len(odd) == 1 else 'are'} quantized, and no weight of a torch.nn.Linear, "
            f"the only kind that transformers quantizes. Pass dtype= to decode it"
        )
    formats = {x.format: x.dtype for x in packed.values()}
    if len(formats) > 1:
        raise CheckpointError(
            f"there are parameters in {listed(formats, separator=' and ')}, and transformers has one format "
            f"for a model. Pass dtype= to decode them"
        )
    ((format, dtype),) = formats.items()
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": format.name,
        "bnb_4bit_use_double_quant": format.double,
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": [name for name in linear if name not in layers],
    }
