"""Quantization: low-bit formats, and quantized parameters.

It may import `mesh` and what is below.
"""

from shardfn.quant.formats import Format, fp4, fp8_e4m3, fp8_e5m2, int4, int8, nf4
from shardfn.quant.packed import Packed, dequantize, pack, quantize

__all__ = ["Format", "Packed", "dequantize", "fp4", "fp8_e4m3", "fp8_e5m2", "int4", "int8", "nf4", "pack", "quantize"]
