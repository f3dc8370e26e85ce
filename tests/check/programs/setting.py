"""Programs, the mesh that they run on, and the small models that many of them train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optree
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value

import shardfn as sf
from shardfn.mesh.grid import as_names
from shardfn.shards.random import mixed
from tests.models import drawn

DATA = ("replica", "shard")
D, ROWS = 4, 8

Kind = Literal["threads", "processes"]
Made = tuple[Callable[[], Any], Any]


class On:
    """A mesh, and `shard_map` on it, as a program is tried."""

    def __init__(self, check: bool, sizes: dict[str, int], folder: Path) -> None:
        self.mesh = sf.make_mesh(device="cpu", scratch=folder / "scratch", **sizes)
        self.check, self._folder, self._folders = check, folder, 0

    def __call__(self, f: Any, in_specs: Any, out_specs: Any, **options: Any) -> Any:
        given: dict[str, Any] = {"mesh": self.mesh, "check": self.check} | options
        return sf.shard_map(f, in_specs=in_specs, out_specs=out_specs, **given)

    def cut(self, x: Any, *axes: Any) -> Any:
        """This rank's piece of whole tensors, cut as `P(*axes)` says."""
        return optree.tree_map(lambda leaf: self._piece(leaf, axes), x)

    def _piece(self, x: Tensor, axes: tuple[Any, ...]) -> Tensor:
        for dim, names in enumerate(axes):
            for name in as_names(names or ()):
                x = x.chunk(self.size(name), dim)[self.index(name)]
        return x.clone()

    def folder(self) -> Path:
        """A new one, that all ranks see."""
        self._folders += 1
        return self._folder / f"{self.check}-{self._folders}"

    def size(self, name: str) -> int:
        return self.mesh[name].size()

    def index(self, name: str) -> int:
        return self.mesh.get_local_rank(name)


@dataclass(frozen=True)
class Right:
    """A program, and the ranks that it runs on.

    Attributes:
        make: what to run, and what it gives.
        sizes: of the mesh's axes.
        kind: of the ranks; forward mode, norms, torch's own generators and compilers need processes.
        tolerance: relative to the largest number of each tensor.
    """

    make: Callable[[On], Made]
    sizes: dict[str, int]
    kind: Kind = "threads"
    tolerance: float = 1e-12


PROGRAMS: dict[str, Right] = {}


def right(kind: Kind = "threads", tolerance: float = 1e-12, **sizes: int) -> Callable[[Any], Any]:
    """Puts a program among the others, by its name."""

    def put(make: Callable[[On], Made]) -> Callable[[On], Made]:
        PROGRAMS[make.__name__] = Right(make, sizes, kind, tolerance)
        return make

    return put


def plainly(f: Callable[..., Tensor], *args: Any, argnums: Any = 0) -> Any:
    """Value and gradient on one process."""
    gradient, value = grad_and_value(f, argnums=argnums)(*args)
    return value, gradient


def folded(seed: int, step: int, place: int) -> torch.Generator:
    """What `fold_in(seed, step, "data")` is at one place."""
    return torch.Generator().manual_seed(mixed(seed, step, f"data={place}"))


# --- models ---


def layers(seed: int, depth: int = 2) -> dict[str, Any]:
    draw = drawn(seed)
    blocks = [{"norm": torch.ones(D, dtype=torch.float64), "w": draw(D, D), "b": draw(D)} for _ in range(depth)]
    return {"embed": {"table": draw(11, D)}, "blocks": blocks, "head": {"out": draw(D, 11)}}


def embed(p: Any, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, p["table"])


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(F.rms_norm(x, (D,), p["norm"], 1e-5) @ p["w"] + p["b"])


def head(p: Any, x: Tensor) -> Tensor:
    return x @ p["out"]


def model(params: Any, tokens: Tensor, **options: Any) -> Tensor:
    x = sf.stage(embed)(params["embed"], tokens)
    layer = sf.stage(block, **options)
    for p in sf.layers(params["blocks"]):
        x = layer(p, x)
    return sf.stage(head)(params["head"], x)


def tokens_of(seed: int, length: int = 5) -> Tensor:
    return torch.randint(11, (ROWS, length), generator=torch.Generator().manual_seed(seed))


def language(params: Any, tokens: Tensor, data: Any = (), **options: Any) -> Tensor:
    logits = model(params, tokens[:, :-1], **options).flatten(0, 1)
    total = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
    return sf.psum(total, data) / sf.psum(tokens[:, 1:].numel(), data)


def mlp(params: Any, x: Tensor, data: Any = ()) -> Tensor:
    """A loss of parameters that are the same on all ranks."""
    p = sf.pvary(params, data)
    return sf.psum((torch.tanh(x @ p["w"]) @ p["v"]).square().sum(), data) / ROWS


def mlp_setting(seed: int) -> tuple[Any, Any, Tensor]:
    draw = drawn(seed)
    return {"w": draw(3, D), "v": draw(D, 2)}, {"w": draw(3, D), "v": draw(D, 2)}, draw(ROWS, 3)
