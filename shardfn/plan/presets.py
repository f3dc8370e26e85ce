"""Links and chips of common machines, with the sources of their figures.

Rates and bandwidths of chips are the vendor's peaks; `Chip.efficiency` and `Chip.reach` say which part is counted on.
"""

from __future__ import annotations

import functools
import math
from typing import TypeVar

from shardfn.plan.machines import Chip, Curve, Links
from shardfn.quoting import listed, short

T = TypeVar("T")
MEASURED = (
    "bandwidths: nccl-tests on 8 x H100 SXM with NVSwitch and 400 Gb/s of RoCE for each, on 1 to 32 nodes, as "
    "published by AutoParallel (meta-pytorch/autoparallel, cost_models/h100_nvswitch_roce_400g.py, 2026); latencies: "
    "by the formula and the constants with which NCCL chooses an algorithm (NVIDIA/nccl, src/graph/tuning.cc, 2.27)"
)

_OF_RANKS = (1, 2), (1, 4), (1, 8), *((nodes, own) for nodes in (2, 4, 8, 16, 32) for own in (1, 2, 4, 8))
# GB of the whole result a second, as nccl-tests' `algbw`, by (nodes, ranks on each), in the order of `_OF_RANKS`.
_WHOLE: dict[str, tuple[float, ...]] = {
    "all_gather": (
        544, 433, 386, 60.8, 116, 210, 323, 53.7, 102, 199, 328, 48.3, 99.1, 204, 305, 47.4, 95.3, 199, 286, 45.8, 102,
        195, 264,
    ),
    "reduce_scatter": (
        535, 438, 392, 80.3, 121, 209, 377, 57.3, 102, 197, 369, 50.4, 99.1, 197, 359, 47.2, 96.3, 204, 300, 45.7, 99.8,
        192, 301,
    ),
    "all_reduce": (
        347, 244, 212, 41.9, 88.5, 165, 193, 29.5, 54.0, 101, 188, 25.9, 50.6, 97.9, 171, 24.5, 49.1, 94.7, 130, 23.8,
        48.4, 89.6, 130,
    ),
    "all_to_all": (
        630, 447, 374, 76.8, 94.2, 93.7, 82.5, 61.1, 60.2, 57.7, 55.8, 46.0, 50.0, 49.2, 46.8, 47.3, 49.8, 45.9, 43.6,
        46.8, 48.5, 44.5, 43.1,
    ),
}  # fmt: skip
# Microseconds that the least all-to-all takes, of the same source.
_LEAST = (
    33.6, 35.4, 40.6, 53.1, 71.8, 82.2, 108, 57.0, 83.2, 94.2, 131, 64.7, 94.4, 117, 174, 112, 158, 174, 324, 188, 292,
    332, 636,
)  # fmt: skip
# NCCL's protocols: microseconds to start, for a step within a node, and for one between nodes; part of the bandwidth.
_PROTOCOLS = ((6.6, 0.6, 2.7, 0.25), (14.0, 1.9, 4.0, 0.92), (8.4, 3.4, 14.0, 1.0))
_SIZES = tuple(2.0**k for k in range(10, 36))


def _latency(operation: str, nodes: int, per_node: int, start: float, near: float, far: float) -> float:
    """Returns the microseconds of a ring; an all-reduce takes a tree if that is shorter."""
    ring = (nodes * per_node - nodes) * near + (nodes - 1) * far if nodes > 1 else (per_node - 1) * near
    if operation != "all_reduce":
        return start + ring
    return start + 2 * min(ring, (per_node - 1) * near + math.log2(nodes) * far)


def _curve(operation: str, nodes: int, per_node: int, bandwidth: float, min_latency: float) -> Curve:
    """Returns the times of the best protocol for each size; `bandwidth` is in GB that a rank sends a second."""

    def seconds(sent: float) -> float:
        if min_latency:
            return min_latency * 1e-6 + sent / (bandwidth * 1e9)
        return min(
            _latency(operation, nodes, per_node, start, near, far) * 1e-6 + sent / (part * bandwidth * 1e9)
            for start, near, far, part in _PROTOCOLS
        )

    return tuple((sent, seconds(sent)) for sent in _SIZES)


@functools.cache
def _tables(near: float, far: float) -> dict[str, dict[tuple[int, int], Curve]]:
    """Returns the tables of H100s, with bandwidths within a node and between nodes multiplied by factors."""
    curves: dict[str, dict[tuple[int, int], Curve]] = {}
    for operation, figures in _WHOLE.items():
        for (nodes, per_node), algbw, min_latency in zip(_OF_RANKS, figures, _LEAST, strict=True):
            share = (1 - 1 / (nodes * per_node)) * (2 if operation == "all_reduce" else 1)
            sent = algbw * share * (near if nodes == 1 else far)
            curve = _curve(operation, nodes, per_node, sent, min_latency if operation == "all_to_all" else 0.0)
            curves.setdefault(operation, {})[nodes, per_node] = curve
    # A gather of two ranks is a message from each to the other.
    curves["send"] = {spread: curves["all_gather"][spread] for spread in ((1, 2), (2, 1))}
    return curves


def links(name: str) -> Links:
    """Returns the links of a common machine by its name.

    Args:
        name: `"h100"`, `"h200"`, `"a100"` or `"b200"`: eight GPUs on a node.

    Raises:
        ValueError: there is none of this name.
    """
    near, far, copying, source = _preset("links", name, _LINKS)
    return Links(name, source, _tables(near, far), copying)


def chip(name: str) -> Chip:
    """Returns a common GPU by its name.

    Args:
        name: `"h100"`, `"h200"`, `"a100"` or `"b200"`.

    Raises:
        ValueError: there is none of this name.
    """
    return _preset("chip", name, CHIPS)


def _preset(kind: str, name: str, known: dict[str, T]) -> T:
    if name not in known:
        raise ValueError(
            f"{kind}: there is no {short(repr(name))}, only {listed(known)}; from a file comes "
            f"{kind.capitalize()}.load(path)"
        )
    return known[name]


_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "int8", "float32", "float64")
_HOPPER = (989.4, 989.4, 1978.9, 1978.9, 66.9, 66.9)
# Datasheets, MiB as nvidia-smi lists them, TB a second, and TFLOP a second of these dtypes, dense.
_CHIPS = {
    "a100": ("A100 datasheet (2021), SXM 80 GB", 81920, 2.039, (312, 312, 0, 624, 19.5, 19.5)),
    "h100": ("H100 datasheet (2023), SXM 80 GB", 81559, 3.35, _HOPPER),
    "h200": ("H200 datasheet (2024), SXM 141 GB", 143771, 4.8, _HOPPER),
    "b200": ("Blackwell datasheet (2025), HGX B200", 183359, 7.7, (2250, 2250, 4500, 4500, 75, 37)),
}
CHIPS = {
    name: Chip(
        name,
        f"NVIDIA {source}, dense; memory as nvidia-smi lists it",
        {dtype: rate * 1e12 for dtype, rate in zip(_DTYPES, rates, strict=True) if rate},
        terabytes * 1e12,
        mib * 2**20,
    )
    for name, (source, mib, terabytes, rates) in _CHIPS.items()
}

_PCIE = 0.8  # of the vendor's peak, an assumption
_LINKS = {
    "h100": (1.0, 1.0, _PCIE * 64e9, f"{MEASURED}; copies: {_PCIE} of the peak of PCIe 5"),
    "h200": (1.0, 1.0, _PCIE * 64e9, f"as h100, whose NVLink and network it has; {MEASURED}"),
    "a100": (
        600 / 900, 200 / 400, _PCIE * 32e9,
        "h100's, scaled by the vendor's peaks: within a node by 600 of 900 GB/s of NVLink, and between nodes by 200 of "
        f"400 Gb/s; {MEASURED}",
    ),
    "b200": (
        722 / 371, 1.0, _PCIE * 64e9,
        "h100's, scaled: within a node by 722 of 371 GB/s, what NCCL takes the NVLinks to be worth (NVIDIA/nccl issue "
        f"1807), and the same 400 Gb/s between nodes; {MEASURED}",
    ),
}  # fmt: skip
