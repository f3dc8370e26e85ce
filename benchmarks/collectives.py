"""Eager host cost of each collective, forward and backward, compared with torch's raw functional collective.

    python -m benchmarks.collectives [--gloo 2]

A fake group sends nothing, and tensors are tiny, so the time is that of Python and the dispatcher. With `--gloo`, that
many processes exchange tensors of several sizes, forward only, compared with gloo's own collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as raw
from torch import Tensor

import shardfn as sf
from benchmarks.report import Goal, interleaved, parser, publish
from shardfn.testing import World

RANKS = 8
LIMIT = 1.3


def _newest(*names: str) -> Callable[..., Any]:
    """The function of torch with the first of these names that exists, since torch has renamed some."""
    return next(getattr(raw, name) for name in names if hasattr(raw, name))


def pairs(group: dist.ProcessGroup) -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """Each collective: ours, and the raw one that exchanges the same values."""
    gather = _newest("all_gather_single", "all_gather_tensor_autograd")
    scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor_autograd")
    exchange = _newest("all_to_all_single_autograd", "all_to_all_single")
    ring = [(i, (i + 1) % RANKS) for i in range(RANKS)]
    even = [16 // RANKS] * RANKS
    return {
        "psum": (lambda x: sf.psum(x, "a"), lambda x: raw.all_reduce(x, "sum", group)),
        "all_gather dim 0": (lambda x: sf.all_gather(x, "a"), lambda x: gather(x, 0, group)),
        "all_gather dim 1": (lambda x: sf.all_gather(x, "a", dim=1), lambda x: gather(x, 1, group)),
        "reduce_scatter dim 0": (lambda x: sf.reduce_scatter(x, "a"), lambda x: scatter(x, "sum", 0, group)),
        "reduce_scatter dim 1": (lambda x: sf.reduce_scatter(x, "a", dim=1), lambda x: scatter(x, "sum", 1, group)),
        "all_to_all": (
            lambda x: sf.all_to_all(x, "a", split_dim=0, concat_dim=0),
            lambda x: exchange(x, even, even, group),
        ),
        "ppermute": (
            lambda x: sf.ppermute(x, "a", ring),
            lambda x: raw.permute_tensor(x.flatten(), [target for _, target in ring], group).view(x.shape),
        ),
    }


def forward_backward(f: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Any]:
    """One evaluation and its gradient, including the wait for both."""
    one = torch.ones(arrived(f(x)).shape)

    def run() -> Tensor:
        value = f(x)
        arrived(value)
        return arrived(torch.autograd.grad(value, x, one)[0])

    return run


def arrived(x: Tensor) -> Tensor:
    """Waits for the result: ours is complete, but a raw collective's result is waited for at its first use."""
    return x.wait() if isinstance(x, raw.AsyncCollectiveTensor) else x


def measure(repeats: int, inner: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    mesh = sf.make_mesh(a=RANKS, device="cpu")

    @sf.shard_map(mesh=mesh, in_specs=(), out_specs=...)
    def run() -> list[dict[str, Any]]:
        x = torch.randn(16, 16, requires_grad=True)
        rows = []
        for name, (ours, theirs) in pairs(mesh.get_group("a")).items():
            both = {"ours": forward_backward(ours, x), "raw": forward_backward(theirs, x)}
            took = interleaved(both, repeats=times, inner=inner)
            us = {f"{key} us": seconds * 1e6 for key, seconds in took.items()}
            rows.append({"collective": name, **us, "ours / raw": took["ours"] / took["raw"]})
        return rows

    times = 2
    run()  # the first call is checked
    times = repeats
    return list(run())


def moved(ranks: int, repeats: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    mesh = sf.make_mesh(a=ranks, device="cpu")
    group = mesh.get_group("a")
    gather = _newest("all_gather_single", "all_gather_tensor")
    scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")
    ring = [(i, (i + 1) % ranks) for i in range(ranks)]

    def cells(x: Tensor) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
        even = [len(x) // ranks] * ranks
        return {
            "psum": (lambda: sf.psum(x, "a"), lambda: arrived(raw.all_reduce(x, "sum", group))),
            "all_gather": (lambda: sf.all_gather(x, "a"), lambda: arrived(gather(x, 0, group))),
            "reduce_scatter": (lambda: sf.reduce_scatter(x, "a"), lambda: arrived(scatter(x, "sum", 0, group))),
            "all_to_all": (
                lambda: sf.all_to_all(x, "a", split_dim=0, concat_dim=0),
                lambda: arrived(raw.all_to_all_single(x, even, even, group)),
            ),
            "ppermute": (
                lambda: sf.ppermute(x, "a", ring),
                lambda: arrived(raw.permute_tensor(x, [target for _, target in ring], group)),
            ),
        }

    @sf.shard_map(mesh=mesh, in_specs=(), out_specs=...)
    def run() -> list[dict[str, Any]]:
        rows = []
        for size in (8, 2**12, 2**16, 2**20, 2**22):
            inner = max(2, 100 // (1 + size // 2**15))
            for name, (ours, theirs) in cells(torch.randn(size)).items():
                both: dict[str, Callable[[], Any]] = {"ours": ours, "gloo's": theirs}
                took = interleaved(both, repeats=times, inner=inner)
                us = {f"{key} us": seconds * 1e6 for key, seconds in took.items()}
                ratio = took["ours"] / took["gloo's"]
                rows.append({"collective": name, "floats": size, **us, "ours / gloo's": ratio})
        return rows

    times = 2
    run()  # the first call is checked
    times = repeats
    return list(run())


def main() -> None:
    options = parser("Eager cost of each collective, forward + backward, against raw functional collectives.")
    options.add_argument("--repeats", type=int, default=31)
    options.add_argument("--gloo", type=int, metavar="RANKS", help="number of processes, which use gloo")
    args = options.parse_args()
    if args.gloo:
        found = World(args.gloo, deadline=900).run(moved, args.gloo, args.repeats)
        large = [row for row in found[0] if row["floats"] == 2**22]
        goals = [Goal(f"{row['collective']} of 4M floats: ours / gloo's", row["ours / gloo's"], LIMIT) for row in large]
        publish(f"one collective, forward, gloo, {args.gloo} processes", found[0], goals, args.json)
        return
    (rows,) = World(RANKS, kind="fake", deadline=600).run(measure, args.repeats, 100)
    goals = [Goal(f"{row['collective']}: ours / raw", row["ours / raw"], LIMIT) for row in rows]
    publish(f"one collective, forward + backward, fake group of {RANKS}", rows, goals, args.json)


if __name__ == "__main__":
    main()
