"""What a stage keeps of its activations elsewhere: where, and from what size on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

Where = Literal["host", "disk"]


@dataclass(frozen=True)
class Offload:
    """Activations that leave the device; see `offload`, which makes it."""

    to: Where
    above: int

    def moves(self, device_type: str) -> bool:
        """Whether anything leaves a device of this kind: a CPU's memory is the host's."""
        return self.to == "disk" or device_type != "cpu"


def offload(to: Where = "host", above: int = 2**20) -> Offload:
    """A value for `stage(remat=...)`: activations leave the device after forward, and are back in time for backward.

    They leave while the function goes on, and come back while the backward of the call after theirs computes; how many
    bytes are on their way at once is bounded. What is saved several times moves once. A stage's other arguments are
    among what leaves, so what stays of a call does not grow with its activations. Gradients are those of
    `remat=False`, bit for bit.

    Args:
        to: "host", pinned memory of the host, which changes nothing on a mesh of CPUs; "disk", this rank's own file in
            the folder of `make_mesh(scratch=...)` or of the environment's `SHARDFN_SCRATCH`.
        above: bytes; what takes less memory stays where it is.

    Raises:
        ValueError: another place, or less than no bytes.
        TypeError: `above` is not a number of bytes.

    Example:
        ``block = stage(block, remat=sf.offload("disk"))`` on ``make_mesh(shard=-1, scratch="/local/nvme")``

    Source:
        Rajbhandari et al. 2021, ZeRO-Infinity: activations that are needed again go to slower memory.
    """
    if to not in get_args(Where):
        raise ValueError(f'offload: to={to!r}; it is "host" or "disk"')
    if not isinstance(above, int) or isinstance(above, bool):
        raise TypeError(f"offload: above={above!r}; it is a number of bytes")
    if above < 0:
        raise ValueError(f"offload: above={above}; it is a number of bytes, 0 or more")
    return Offload(to, above)


def offloaded(remat: Any) -> Offload | None:
    """What of a stage's `remat` moves activations; None if nothing of it."""
    return remat if isinstance(remat, Offload) else None
