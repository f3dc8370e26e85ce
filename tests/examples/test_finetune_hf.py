"""A model of transformers trains alike on every mesh, and goes into files and back."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, interop
from shardfn.testing import World, world

pytest.importorskip("transformers")
from examples import finetune_hf as example
from examples.run import bytes_tokenizer
from tests.interop.zoo import losses_in_float64, norms_in_float64

pytestmark = pytest.mark.filterwarnings("ignore", "error::shardfn.check.VaryingWarning")

TINY = example.Config(batch=8, context=16, warmup=2, dtype=torch.float64)
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
GATED = {"intermediate_size": 24, "num_key_value_heads": 1}
MORE: dict[str, dict[str, Any]] = {name: SIZES if name == "gpt2" else {**SIZES, **GATED} for name in example.MODELS}
MORE["mixtral"]["experts_implementation"] = "eager"  # the others are not for float64
STEPS = 3


def text() -> Tensor:
    return torch.frombuffer(bytearray("def é(x):\n    return x + 1\n".encode() * 40), dtype=torch.uint8)


def trained(name: str, mesh: Any, strategy: str, seed: int = 0, **options: Any) -> tuple[Any, ...]:
    module, tokenizer = example.made(name, TINY.dtype, **MORE[name])
    placement = sf.strategies.from_name(strategy, shard="shard", replica="replica")
    model, params = example.sharded(module, None, mesh, placement, seed, **options)
    run = example.train(model, params, tokenizer, TINY, mesh, (text(), text().flip(0)), STEPS, seed)
    return model, tokenizer, run


def curves(replica: int, shard: int) -> dict[str, list[float]]:
    mesh, found = sf.make_mesh(device="cpu", replica=replica, shard=shard), {}
    cells: list[tuple[str, str, dict[str, Any]]] = [(name, "hybrid_shard", {}) for name in example.MODELS]
    if replica > 1:
        cells += [("llama", "zero2", {"remat": True}), ("gpt2", "ddp", {})]
    with losses_in_float64(), norms_in_float64():
        for name, strategy, options in cells:
            run = trained(name, mesh, strategy, **options)[-1]
            found[f"{name} {strategy}"] = [*run.losses, run.before, run.after]
    return found


@functools.cache
def alone() -> dict[str, list[float]]:
    return world(1).with_deadline(200).run(curves, 1, 1)[0]


@pytest.mark.parametrize("cells", [(1, 2), (2, 2)], ids=str)
def test_the_curve_does_not_depend_on_the_mesh(cells: tuple[int, int]) -> None:
    first, *others = world(cells[0] * cells[1]).with_deadline(200).run(curves, *cells)
    assert all(other == first for other in others), "an invariant loss is the same bits on every rank"
    assert {key.split()[0] for key in first} == set(example.MODELS)
    for key, losses in first.items():
        one = torch.tensor(alone()[f"{key.split()[0]} hybrid_shard"], dtype=torch.float64)
        assert one[STEPS - 1] < one[0] - 0.03, f"{key}: nothing was learnt"
        assert one[-1] < one[-2], f"{key}: nothing was learnt for held-out text"
        assert ((torch.tensor(losses, dtype=torch.float64) - one).abs() / one).max() < 1e-12, key


def of_uneven_rows() -> tuple[list[int], float, float]:
    """Numbers of tokens of each row; the loss, and the module's own on the whole batch."""
    from transformers import AutoModelForCausalLM

    mesh, data = sf.make_mesh(device="cpu", replica=2, shard=2), ("replica", "shard")
    rows = torch.full((8, 12), ord("a"), dtype=torch.long)
    for i in range(8):
        rows[i, i + 3 :] = 0xFF  # is not text, and is left out
    rows[:, 1] = torch.arange(8) + ord("a")
    batch = example.tokenized(bytes_tokenizer(), rows, 16)
    with losses_in_float64(), norms_in_float64():
        module, _ = example.made("llama", torch.float64, **MORE["llama"])
        assert all(p.is_meta for p in module.parameters())
        model, params = example.sharded(module, None, mesh, sf.hybrid_shard(shard="shard", replica="replica"))

        def loss(params: Any) -> Tensor:
            own = sf.collectives.local_slice(rows, data)
            return example.loss_fn(params, model, example.tokenized(bytes_tokenizer(), own, 16))

        cut = sf.shard_map(loss, mesh=mesh, in_specs=..., out_specs=P())(params)
        alike = AutoModelForCausalLM.from_config(model.module.config, dtype=torch.float64)
        alike.load_state_dict(model.state_dict(params))
        whole = alike(**batch).loss.item()
    return (batch["labels"] != example.IGNORED).sum(1).tolist(), cut.item(), whole


@pytest.mark.world(4)
def test_the_loss_is_the_mean_over_all_tokens_however_many_a_rank_has(world: World) -> None:
    for lengths, cut, whole in world.with_deadline(200).run(of_uneven_rows):
        assert lengths == list(range(3, 11))
        assert abs(cut - whole) < 1e-12


def through_files(folder: str) -> tuple[float, float, float]:
    """How far logits of the files are from ours; the loss at the end of one run, and at the start of the next."""
    from transformers import AutoModelForCausalLM

    mesh = sf.make_mesh(device="cpu", replica=1, shard=2)
    with losses_in_float64(), norms_in_float64():
        model, tokenizer, run = trained("llama", mesh, "hybrid_shard", gather_dtype=None)
        interop.save_pretrained(folder, model, run.params, tokenizer=tokenizer)
        tokens = torch.arange(24).view(2, 12)
        with torch.no_grad():
            ours = model(run.params, tokens).logits
            theirs = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
        module, tokenizer = example.described(Path(folder), TINY.dtype)
        assert all(p.is_meta for p in module.parameters())
        again, params = example.sharded(module, Path(folder), mesh, sf.full_shard("shard"), remat=True)
        later = example.train(again, params, tokenizer, replace(TINY, rate=0.0), mesh, (text(), text().flip(0)), 1, 0)
    return (ours - theirs).abs().max().item(), run.after, later.before


@pytest.mark.world(2)
def test_what_was_trained_is_read_by_from_pretrained_and_trained_on(world: World, tmp_path: Path) -> None:
    for off, after, before in world.with_deadline(200).run(through_files, str(tmp_path / "model")):
        assert off < 1e-12
        assert abs(after - before) < 1e-12
    assert example.write(tmp_path / "model", "def ", 5, 0).startswith("def ")


def test_a_token_of_bytes_is_a_byte() -> None:
    tokenizer, words = bytes_tokenizer(), "naïve\t# €\n"
    ids = tokenizer(words)["input_ids"]
    assert len(ids) == len(words.encode())
    assert len(tokenizer) == 258
    assert tokenizer.decode(ids) == words
