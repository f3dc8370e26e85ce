"""Parameters in few bits, in stages: what a function and its derivatives give is what the decoded parameters give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

import shardfn as sf
from shardfn import P, quant
from shardfn.quant import formats
from shardfn.quant.packed import pack
from shardfn.shards.layout import is_flat
from shardfn.testing import World
from tests.models import ENGINES, distance, mesh_of
from tests.reference import worst

WIDTH, RANK, ROWS = 32, 3, 8
FORMATS = [quant.nf4(), quant.nf4(double=True), quant.fp8_e4m3(64)]
STRATEGIES = {
    "full_shard": sf.full_shard("shard"),
    "shard_grad_op": sf.strategies.shard_grad_op("shard"),
    "zero1": sf.strategies.zero1("shard"),
    "ddp": sf.ddp("shard"),
}


def tree(format: quant.Format) -> tuple[Any, Any]:
    """A model with packed matrices and adapters, and the same with decoded ones."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64) / WIDTH**0.5

    whole = {
        "blocks": [
            {"w": normal(WIDTH, WIDTH), "v": normal(WIDTH, WIDTH), "a": normal(RANK, WIDTH), "b": normal(WIDTH, RANK)}
            for _ in range(3)
        ],
        "head": normal(WIDTH, 5),
    }
    packed = quant.quantize(whole, format, [r"blocks\.\d\.[wv]", "head"])
    return packed, quant.dequantize(packed)


def block(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, p["w"]) + F.linear(F.linear(x, p["a"]), p["b"])) @ p["v"]


def head(p: Tensor, x: Tensor) -> Tensor:
    return (x @ p).square().sum()


def loss_of(block: Any, head: Any) -> Any:
    def loss(params: Any, x: Tensor) -> Tensor:
        for p in params["blocks"]:
            x = block(p, x)
        found: Tensor = head(params["head"], x)
        return found

    return loss


def by_name(grads: Any) -> list[Tensor]:
    return [p[name] for p in grads["blocks"] for name in ("a", "b")]


def gathered(grads: Any) -> list[Tensor]:
    """The same of shards, of which there may be the adapters' alone."""
    flats = [flat for flat in optree.tree_leaves(grads, is_leaf=is_flat) if flat.layout.trainable]
    return [sf.unshard(flat)[name] for flat in flats for name in ("a", "b")]


def rows(mesh: Any) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x.chunk(mesh.size())[mesh.get_rank()]


def trained(strategy: str) -> dict[Any, float]:
    """How far the loss and the adapters' gradients are from those of the decoded model."""
    mesh, found = mesh_of(shard=-1), {}
    for format in FORMATS:
        packed, decoded = tree(format)
        x, mine = rows(mesh)
        want = loss_of(block, head)(decoded, x), by_name(torch.func.grad(loss_of(block, head))(decoded, x))
        params = sf.shard(packed, mesh, STRATEGIES[strategy])
        for options in ({}, {"remat": True}, {"reshard": False}, {"gather_dtype": torch.float64}):
            loss = loss_of(sf.stage(block, **options), sf.stage(head, **options))
            step = sf.shard_map(
                lambda params, x, loss=loss: sf.psum(loss(params, x), "shard"),
                mesh=mesh,
                in_specs=(..., P("shard")),
                out_specs=P(),
            )
            few, rest = sf.shards.partition(params, r"blocks\.\d+\.[ab]")
            for engine in ENGINES:
                ours = functools.partial(
                    lambda step, rest, x, few: step(sf.shards.combine(few, rest), x), step, rest, mine
                )
                value, grads = engine(ours, sf.shards.flatten_by_path(few))
                off = distance([value, gathered(grads)], [*want])
                found[str(format), engine.__name__, *options] = off
            value, grads = sf.value_and_grad(step)(params, mine)
            found[str(format), *options] = distance([value, gathered(grads)], [*want])
    return found


@pytest.mark.world(2, "processes")
@pytest.mark.parametrize("strategy", [*STRATEGIES])
def test_gradients_are_those_of_the_decoded_parameters(world: World, strategy: str) -> None:
    for found in world.run(trained, strategy):
        assert {what: off for what, off in found.items() if not off < 1e-12} == {}


def kept(folder: str) -> dict[str, float]:
    """How far gradients are off if what autograd saves of decoded matrices leaves, or a policy keeps what ops made."""
    mesh, found = sf.make_mesh(shard=-1, device="cpu", scratch=folder), {}
    packed, decoded = tree(FORMATS[0])
    x, mine = rows(mesh)
    want = by_name(torch.func.grad(loss_of(block, head))(decoded, x))
    few, rest = sf.shards.partition(sf.shard(packed, mesh, sf.full_shard("shard")), r"blocks\.\d+\.[ab]")
    disk: dict[str, Any] = {"remat": sf.offload("disk", 0)}
    for name, options in {
        "disk": disk,
        "disk, kept for the step": disk | {"reshard": "step"},
        "disk, kept": disk | {"reshard": False},
        "writes": {"remat": [torch.ops.aten.copy_.default]},
        "all": {"remat": lambda *_, **__: CheckpointPolicy.MUST_SAVE},
    }.items():
        loss = loss_of(sf.stage(block, **options), sf.stage(head, **options))
        grads = sf.grad(lambda few, loss=loss: loss(sf.shards.combine(few, rest), mine))(sf.shards.flatten_by_path(few))
        found[name] = distance(gathered(grads), want)
    return found


@pytest.mark.world(2, "processes")
def test_what_is_saved_of_decoded_matrices_may_leave_or_stay(world: World, tmp_path: Any) -> None:
    for found in world.run(kept, str(tmp_path)):
        assert worst([*found.values()]) < 1e-12, found


def transformed() -> dict[str, float]:
    mesh = mesh_of(shard=-1)
    packed, decoded = tree(quant.nf4(double=True))
    x, _ = rows(mesh)
    params = sf.shard(packed, mesh, sf.full_shard("shard"))
    chosen, rest = sf.shards.partition(params, r"blocks\.\d+\.[ab]")
    few = sf.shards.flatten_by_path(chosen)
    plain = loss_of(block, head)
    staged = loss_of(sf.stage(block), sf.stage(head))
    n, found = mesh.size(), {}

    def of_adapters(loss: Any, whole: Any) -> Any:
        return lambda adapters, x: loss(
            {**whole, "blocks": [{**p, **a} for p, a in zip(whole["blocks"], adapters, strict=True)]}, x
        )

    own = [{"a": p["a"], "b": p["b"]} for p in decoded["blocks"]]
    reference = of_adapters(plain, decoded)

    def sharded(few: Any, x: Tensor) -> Tensor:
        return staged(sf.shards.combine(few, rest), x) / n

    hvp = torch.func.jvp(lambda few: torch.func.grad(sharded)(few, x), (few,), (few,))[1]
    want = torch.func.jvp(lambda own: torch.func.grad(reference)(own, x), (own,), (own,))[1]
    found["hvp"] = distance(gathered(hvp), [p[name] for p in want for name in ("a", "b")])
    per_row = torch.func.vmap(torch.func.grad(sharded), (None, 0))(few, x)
    one = torch.func.vmap(torch.func.grad(reference), (None, 0))(own, x)
    squares = torch.stack([part.square().flatten(1).sum(1) for part in optree.tree_leaves(per_row)]).sum(0)
    torch.distributed.all_reduce(squares)
    want = torch.stack([part.square().flatten(1).sum(1) for part in optree.tree_leaves(one)]).sum(0)
    found["per sample"] = distance(squares, want)
    return found


@pytest.mark.world(2, "processes")
def test_transforms_go_through_decoding(world: World) -> None:
    for found in world.run(transformed):
        assert {what: off for what, off in found.items() if not off < 1e-12} == {}, found


def whole() -> dict[str, float]:
    """Parameters in few bits that are not cut: alone, and beside others that are."""
    mesh = mesh_of(shard=-1)
    packed, decoded = tree(quant.nf4())
    x, _ = rows(mesh)
    plain = loss_of(block, head)
    want = plain(decoded, x)
    own = sf.shard([{"a": p["a"], "b": p["b"]} for p in packed["blocks"]], mesh, sf.full_shard("shard"))
    both = sf.stage(lambda cut, rest, x: block({**cut, **rest}, x))

    def mixed(own: Any, x: Tensor) -> Tensor:
        for cut, rest in zip(own, packed["blocks"], strict=True):
            x = both(cut, {"w": rest["w"], "v": rest["v"]}, x)
        found: Tensor = sf.stage(head)(packed["head"], x)
        return found

    grads = torch.func.grad(lambda own, x: mixed(own, x) / mesh.size())(own, x)
    stages = loss_of(sf.stage(block), sf.stage(head))
    return {
        "alone": distance(stages(packed, x), want),
        "alone, compiled": distance(torch.compile(stages, backend="eager")(packed, x), want),
        "beside others": distance(mixed(own, x), want),
        "gradients": distance(
            [p[name] for p in sf.unshard(grads) for name in ("a", "b")], by_name(torch.func.grad(plain)(decoded, x))
        ),
        "written to": float(_is_refused(lambda p, rest: rest.update(w=p["a"]), own[0], packed["blocks"][0])),
    }


def _is_refused(f: Any, *args: Any) -> bool:
    with pytest.raises(RuntimeError, match="writes into a list or a dict"):
        sf.stage(f)(*args)
    return False


@pytest.mark.world(2, "processes")
def test_a_stage_decodes_what_is_not_cut_too(world: World) -> None:
    for found in world.run(whole):
        assert {what: off for what, off in found.items() if not off < 1e-12} == {}, found


@pytest.mark.parametrize("format", [*FORMATS, quant.int4(6), quant.fp4(64, double=True), quant.nf4(2048)], ids=str)
@pytest.mark.parametrize("numel", [2048, 2049, 3 * 256 + 2048, 5000])
def test_parts_are_decoded_as_the_whole(format: quant.Format, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "STEP", 256)
    packed = pack(torch.randn(numel, generator=torch.Generator().manual_seed(0)), format)
    for dtype in (torch.float64, torch.bfloat16):
        assert torch.equal(packed.decoded(dtype, torch.empty(numel, dtype=dtype)), packed.decoded(dtype))


def taken(**options: Any) -> tuple[list[int], int]:
    """Bytes for gathered and decoded parameters in each of three steps, and what they may be."""
    mesh, found = mesh_of(shard=-1), []
    params = sf.shard(tree(FORMATS[0])[0], mesh, sf.full_shard("shard"))
    few, rest = sf.shards.partition(params, r"blocks\.\d+\.[ab]")
    loss, mine = loss_of(sf.stage(block, **options), sf.stage(head, **options)), rows(mesh)[1]
    for _ in range(3):
        with sf.collectives.ledger() as log:
            sf.grad(lambda few: loss(sf.shards.combine(few, rest), mine))(sf.shards.flatten_by_path(few))
        found.append(log.gathered)
    of_one = max(sum(flat.layout.padded * flat.layout.dtype.itemsize for flat in p.values()) for p in params["blocks"])
    return found, 2 * (of_one + 2 * 512) + 2 * WIDTH * WIDTH * 8


@pytest.mark.world(2, "processes")
@pytest.mark.parametrize("remat", [False, True])
def test_decoded_matrices_take_the_memory_of_one_stage(world: World, remat: bool) -> None:
    for sizes, most in world.run(taken, remat=remat):
        assert 2 * WIDTH * WIDTH * 8 < sizes[1] == sizes[2] <= most


def scaled(tree: Any) -> Any:
    return optree.tree_map(lambda x: x * 0.9, tree)


WHOLE = {"w": torch.linspace(-1, 1, 2048, dtype=torch.float64).view(32, 64), "n": torch.arange(2048).view(32, 64)}
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a name": (lambda: quant.quantize(WHOLE, "nf4"), TypeError, "format must be a format, such as .*, got 'nf4'"),  # type: ignore[arg-type]
    "a function": (lambda: quant.quantize(WHOLE, quant.nf4), TypeError, "got the function nf4: call it"),  # type: ignore[arg-type]
    "a stage's": (lambda: sf.stage(block, gather_format=quant.nf4), TypeError, "got the function nf4: call it"),  # type: ignore[call-overload]
    "no names": (lambda: quant.quantize(WHOLE, quant.nf4(), []), ValueError, "an empty list chooses none"),
    "none": (lambda: quant.quantize(WHOLE, quant.nf4(), lambda *_: False), ValueError, "<lambda> chooses none"),
    "whole numbers": (lambda: quant.dequantize(WHOLE, torch.int8), TypeError, "dtype must be a floating"),
    "int8 with double scales": (lambda: formats.format_of("int8", 256, True), ValueError, "int8: double=True is for"),
    "fp8 with double scales": (lambda: formats.format_of("fp8_e5m2", 64, True), ValueError, "fp8_e5m2: double=True is"),
    "computed": (
        lambda: quant.dequantize(scaled(quant.quantize(WHOLE, quant.nf4()))),
        TypeError,
        r"Packed.nf4.64., .32, 64., float64. has torch.float32 in place of its bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_change_nothing_or_give_other_numbers_is_refused(case: str) -> None:
    f, kind, said = REFUSED[case]
    with pytest.raises(kind, match=said):
        f()


def refused() -> None:
    """Each of these has no answer in few bits, or none that is asked for."""
    matrix, mesh = torch.ones(16, 16), sf.make_mesh(shard=1, device="cpu")
    parts = sf.shard({"w": matrix}, mesh, sf.full_shard("shard"))
    few = quant.quantize({"w": matrix}, quant.nf4())
    own = torch.distributed.tensor.distribute_tensor(matrix, mesh)
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (parts, None, TypeError, "w is a FlatShard, one rank's part: quantize parameters before they are cut"),
        ({"a": matrix, "b": parts}, ".*", TypeError, "b.w is a FlatShard"),
        ({"w": own}, None, TypeError, "w is a DTensor"),
        ({"w": torch.ones(256)}, None, ValueError, "no tensor with two or more dimensions and at least 64"),
        ({"w": torch.ones(7, 9)}, None, ValueError, "at least 64"),
        (torch.nn.Linear(16, 16), None, ValueError, "such as model.tree"),
        (few, None, ValueError, "choose different"),
        ({"w": matrix}, "v", ValueError, "no parameter matches 'v'"),
        ({"w": matrix, "v": torch.ones(7, 9)}, ".*", ValueError, "v has shape .7, 9., 63 numbers, fewer than the 64"),
        ({"w": matrix.long()}, "w", TypeError, "w: nf4.* is for floating-point numbers, not for torch.int64"),
        ({"w": matrix / 0}, "w", ValueError, "w: it has numbers that are not finite"),
        (few, "w", TypeError, "w is already quantized"),
        ({"w": 3.0}, "w", TypeError, "w is of type float"),
    ]
    for given, names, kind, said in cases:
        with pytest.raises(kind, match=said):
            quant.quantize(given, quant.nf4(), names)
    for given in (sf.shard(few, mesh, sf.full_shard("shard")), {"w": own}):
        with pytest.raises(TypeError, match="one rank's part: decode whole parameters, which unshard makes"):
            quant.dequantize(given)


@pytest.mark.world(1)
def test_what_cannot_be_in_few_bits_is_named(world: World) -> None:
    world.run(refused)


def stored(folder: str) -> list[Any]:
    """What comes of bytes that are saved and read again: as they were, or as if they were others."""
    mesh = mesh_of(shard=-1)
    whole = {"m": {"w": rows(mesh)[0], "b": torch.ones(3)}}
    path, found = f"{folder}/sharded", []

    def tree(x: Tensor, format: quant.Format) -> Any:
        return quant.quantize({"m": {**whole["m"], "w": x}}, format, "m.w")

    packed = tree(whole["m"]["w"], quant.nf4())
    sf.checkpoint.save(path, sf.shard(packed, mesh, sf.full_shard("shard")))
    sf.checkpoint.save(f"{folder}/whole", packed)
    zeros = torch.zeros_like(whole["m"]["w"])
    for here in (path, f"{folder}/whole"):
        like = sf.shard(tree(zeros, quant.nf4()), mesh, sf.strategies.zero1("shard"))
        found += [sf.unshard(sf.checkpoint.load(here, like)), sf.checkpoint.load(here, tree(zeros, quant.nf4()))]
    for x, format in ((zeros, quant.int4(64)), (zeros, quant.fp4()), (zeros.view(2, -1), quant.nf4())):
        for like in (tree(x, format), sf.shard(tree(x, format), mesh, sf.full_shard("shard"))):
            with pytest.raises(sf.checkpoint.CheckpointError) as error:
                sf.checkpoint.load(path, like)
            assert f"m.w is nf4(64) of [8, 32] there, {format} of {list(x.shape)} in the tree" in str(error.value)
    for params in (packed, sf.shard(packed, mesh, sf.full_shard("shard"))):
        sf.checkpoint.export_hf(f"{folder}/out", params, dtype=torch.float64, names=[("m.w", "w.t", "T")])
        there = load_file(f"{folder}/out/model.safetensors")
        assert sorted(there) == ["m.b", "w.t"]
        assert torch.equal(there["w.t"].mT, packed["m"]["w"].decoded(torch.float64))
        torch.distributed.barrier()
        with pytest.raises(sf.checkpoint.CheckpointError, match=r"m\.w is quantized, such as by nf4.* Pass dtype="):
            sf.checkpoint.export_hf(f"{folder}/out", params)
    return [torch.equal(one["m"]["w"].decoded(), packed["m"]["w"].decoded()) for one in found]


@pytest.mark.world(2, "processes")
def test_bytes_of_one_format_or_shape_are_not_read_as_those_of_another(world: World, tmp_path: Any) -> None:
    assert world.run(stored, str(tmp_path)) == [[True] * 4] * 2


def ruled() -> dict[str, Any]:
    """What rules are told of a parameter in few bits, and what one says that would cut its bytes."""
    mesh, found = mesh_of(shard=-1), {}
    few = quant.quantize({"blocks": [{"w": torch.ones(16, 8), "b": torch.ones(8)}]}, quant.nf4(), r".*w")

    def told(rule: str, answer: Any) -> Any:
        def chosen(path: str, shape: Any) -> Any:
            found[rule, path] = shape
            return answer(shape)

        return chosen

    full = sf.full_shard("shard")
    rules = {"frozen": told("frozen", lambda _: False), "specs": told("specs", lambda _: P())}
    sf.shard(few, mesh, told("strategy", lambda _: full), stages=told("stages", lambda shape: bool(shape)), **rules)
    for specs in (P("tensor"), sf.by_path([(r".*w", P(None, "tensor")), (r".*b", P())])):
        with pytest.raises(ValueError, match=r"blocks.0.w is quantized.*split the bytes.*give it P\(\)"):
            sf.shard(few, mesh_of(tensor=-1), sf.ddp(()), specs=specs)
    return {" ".join(key): shape for key, shape in found.items() if key[1].endswith("w")}


@pytest.mark.world(2, "processes")
def test_rules_are_told_the_shape_of_the_parameter_and_cannot_cut_its_bytes(world: World) -> None:
    for found in world.run(ruled):
        assert found == {f"{rule} blocks.0.w": (16, 8) for rule in ("stages", "strategy", "frozen", "specs")}
