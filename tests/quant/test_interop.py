"""Modules whose parameters are kept in few bits, from the file on."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import shardfn as sf
from shardfn import checkpoint, interop, quant
from shardfn.quant import bitsandbytes
from shardfn.testing import World
from tests.interop import zoo
from tests.models import data_mesh, distance, mesh_of
from tests.reference import worst

NAMES = r"model\.layers\.\d+\..*_proj\.weight"


def loaded(folder: Path, double: bool) -> dict[str, float]:
    """How far what was encoded while it was read is from what was encoded whole, and what it computes."""
    mesh, found = data_mesh(dist.get_world_size()), {}
    module: Any = zoo.build("llama_tied")
    if dist.get_rank() == 0:
        module.save_pretrained(folder)
    dist.barrier()
    with interop.meta():
        shell = type(module)(module.config).double()
    model, whole = interop.functional(shell), interop.functional(zoo.build("llama_tied"))
    format = quant.nf4(double=double)
    model.tree = quant.quantize(model.tree, format, NAMES)
    want = quant.quantize(whole.tree, format, NAMES)
    tokens = torch.arange(12).view(2, 6)
    for source in (None, 0):
        params = interop.load(folder, model, mesh, sf.full_shard("shard"), src_rank=source)
        got = sf.unshard(params)
        found[f"bytes, {source}"] = distance(got, want)
        logits = model(params, input_ids=tokens).logits
        decoded = sf.shard(quant.dequantize(want), mesh, sf.full_shard("shard"))
        found[f"logits, {source}"] = distance(logits, whole(decoded, input_ids=tokens).logits)
    return found


@pytest.mark.world(2, "processes")
@pytest.mark.parametrize("double", [False, True])
def test_parameters_are_encoded_as_they_are_read(world: World, tmp_path: Path, double: bool) -> None:
    for found in world.run(loaded, tmp_path, double):
        assert {what: off for what, off in found.items() if not off < 1e-12} == {}


FORMATS = {"single": quant.nf4(), "double": quant.nf4(double=True), "fp4": quant.fp4(128)}


def there_and_back(folder: Path) -> dict[str, Any]:
    """Differences, as numbers, and messages, of parameters that were written in few bits and read again."""
    mesh, strategy, found = data_mesh(dist.get_world_size()), sf.full_shard("shard"), dict[str, Any]()
    for case, format in FORMATS.items():
        model = interop.functional(zoo.build("llama_tied").float())
        want = quant.quantize(model.tree, format, NAMES)
        decoded, here = quant.dequantize(want), folder / case
        params = sf.shard(want, mesh, strategy)
        interop.save_pretrained(here, model, params)
        interop.save_pretrained(here / "decoded", model, params, dtype=torch.float32)
        interop.save_pretrained(here / "whole", model, want)
        for source in (None, 0):
            got = interop.load(here, model, mesh, strategy, src_rank=source, keep_quantized=True)
            found[f"{case}, as stored, {source}"] = distance(sf.unshard(got), want)
            got = interop.load(here, model, mesh, strategy, src_rank=source)
            found[f"{case}, decoded, {source}"] = distance(sf.unshard(got), decoded)
        got = interop.load(here / "decoded", model, mesh, strategy, keep_quantized=True)
        found[f"{case}, written decoded"] = distance(sf.unshard(got), decoded)
        model.tree = want
        got = interop.load(here / "whole", model, mesh, strategy)
        found[f"{case}, a tree that has it"] = distance(sf.unshard(got), want)
        model.tree = quant.quantize(decoded, quant.nf4(96), NAMES)
        found[f"{case}, other blocks"] = refused(interop.load, here, model, mesh, strategy)
        model.tree = decoded
        for what, odd in {
            "blocks that they have not": quant.quantize(decoded, quant.int8(64), NAMES),
            "not a linear layer": quant.quantize(decoded, format),
        }.items():
            params = sf.shard(odd, mesh, strategy)
            found[f"{case}, {what}"] = refused(interop.save_pretrained, here, model, params)
    return found


def refused(f: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(checkpoint.CheckpointError) as caught:
        f(*args, **kwargs)
    return str(caught.value)


SAID = {
    "other blocks": "is {0} there, and nf4(96) in model.tree",
    "blocks that they have not": "is kept in int8(64), which bitsandbytes does not have",
    "not a linear layer": "model.embed_tokens.weight is quantized, and no weight of a torch.nn.Linear",
}


@pytest.mark.world(2, "processes")
def test_what_is_written_in_few_bits_is_read(world: World, tmp_path: Path) -> None:
    for found in world.run(there_and_back, tmp_path):
        assert {what: off for what, off in found.items() if not isinstance(off, str) and off != 0} == {}
        for what, said in ((what, said) for what, said in found.items() if isinstance(said, str)):
            case, _, which = what.partition(", ")
            assert SAID[which].format(FORMATS[case]) in said, what
        assert len(found) == len(FORMATS) * 9


def experts(folder: Path) -> None:
    """A folder in which the matrices of each expert are in few bits, and the module has them all in one parameter."""
    module: Any = zoo.build("mixtral").float()
    module.save_pretrained(folder)
    file = folder / "model.safetensors"
    there = load_file(file)
    chosen = [name for name, x in there.items() if ".experts." in name and x.ndim == 2]
    assert chosen
    for name in chosen:
        x = there.pop(name)
        there |= bitsandbytes.file_tensors(name, quant.pack(x, quant.nf4(32)))
    save_file(there, file, {"format": "pt"})


def made_of_several(folder: Path) -> dict[str, Any]:
    mesh, strategy = data_mesh(dist.get_world_size()), sf.full_shard("shard")
    model = interop.functional(zoo.build("mixtral").float())
    whole, inner = optree.tree_map(torch.clone, model.tree), r".*\.experts\..*"
    got = sf.unshard(interop.load(folder, model, mesh, strategy))
    off = distance(got, whole)
    as_stored = refused(interop.load, folder, model, mesh, strategy, keep_quantized=True)
    model.tree = quant.quantize(whole, quant.nf4(32), inner)
    twice = refused(interop.load, folder, model, mesh, strategy)
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    model.tree = {key: part for key, part in whole.items() if "layers.0" not in key}
    return {
        "off": off,
        "as stored": as_stored,
        "twice": twice,
        "by others": refused(interop.load, folder, model, mesh, strategy),
    }


@pytest.mark.world(2, "processes")
def test_parameters_made_of_several_are_decoded_and_not_kept(world: World, tmp_path: Path) -> None:
    experts(tmp_path)
    for found in world.run(made_of_several, tmp_path):
        assert 1e-4 < found["off"] < 0.2
        assert "must each be one quantized tensor in the files, got several" in found["as stored"]
        assert "made of several that are in few bits, or transposed, there, and nf4(32) in model.tree" in found["twice"]
        assert "they were quantised by gptq" in found["by others"]


@pytest.mark.world(1, "threads")
def test_weights_that_transformers_transposes_are_turned_back(world: World) -> None:
    world.run(transposed)


def transposed() -> None:
    """GPT-2, whose `c_proj` of attention is square, so that its shape does not tell."""
    model = interop.functional(zoo.build("gpt2").float())
    stored, want, linear = dict[str, Any](), dict[str, Any](), r".*\.c_(attn|fc|proj)\.weight"
    for name, x in model.state_dict(model.tree).items():
        packed = quant.pack(x.T.contiguous(), quant.nf4(32)) if re.fullmatch(linear, name) else None
        stored |= bitsandbytes.file_tensors(name, packed) if packed else {name: x}
        want[name] = packed.decoded().T if packed else x
    mesh = mesh_of(shard=-1)
    got = model.state_dict(interop.load(stored, model, mesh, sf.full_shard("shard")))
    assert {name: torch.equal(got[name], x) for name, x in want.items()} == dict.fromkeys(want, True)
    said = refused(interop.load, stored, model, mesh, sf.full_shard("shard"), keep_quantized=True)
    assert "c_attn.weight" in said
    assert "one that is transposed" in said
    model.tree = quant.quantize(model.tree, quant.nf4(32), linear)
    assert "transposed, there, and nf4(32) in" in refused(interop.load, stored, model, mesh, sf.full_shard("shard"))


def with_transformers(folder: Path) -> dict[str, float]:
    """Differences from what bitsandbytes makes of a model, and of what is written here."""
    library = importlib.import_module("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    found, mesh = dict[str, float](), data_mesh(dist.get_world_size())
    few = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    module: Any = zoo.build("llama").float()
    if dist.get_rank() == 0:
        module.save_pretrained(folder / "full")
        theirs = AutoModelForCausalLM.from_pretrained(folder / "full", quantization_config=few, dtype=torch.float32)
        theirs.save_pretrained(folder / "theirs")
    dist.barrier()
    with interop.meta():
        shell = type(module)(module.config).float()
    model = interop.functional(shell)
    params = interop.load(folder / "theirs", model, mesh, sf.full_shard("shard"), keep_quantized=True)
    interop.save_pretrained(folder / "ours", model, params)
    want = quant.dequantize(sf.unshard(params))
    for case in ("theirs", "ours"):
        there: Any = AutoModelForCausalLM.from_pretrained(folder / case)
        got = {}
        for name, m in there.named_modules():
            if isinstance(m, library.nn.Linear4bit):
                state, shape = m.weight.quant_state, m.weight.quant_state.shape
                state.shape = torch.Size([shape.numel()])  # its kernel for CPUs takes blocks to begin with each row
                got[f"{name}.weight"] = library.functional.dequantize_4bit(m.weight, state).view(shape)
        layers = {key: part for key, part in want.items() if "layers" in key}
        ours = {f"{key}.{name}": x for key, part in layers.items() for name, x in part.items() if x.ndim > 1}
        found[case] = distance(got, ours)
    return found


@pytest.mark.world(2, "processes")
def test_transformers_and_bitsandbytes_read_and_write_the_same(world: World, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    for found in world.run(with_transformers, tmp_path):
        assert found == {"theirs": 0, "ours": 0}


def called_in_4_bits(folder: Path) -> list[float]:
    """How far each call of a model is from `transformers`' own, whose layers decode their weight at each call."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    mesh = data_mesh(dist.get_world_size())
    few = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    if dist.get_rank() == 0:
        module: Any = zoo.build("llama").float()
        module.save_pretrained(folder)
    dist.barrier()
    models: list[Any] = [
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=few, dtype=torch.float32) for _ in range(2)
    ]
    theirs, ours = models
    for m in theirs.modules():
        if hasattr(m, "support_avx512bf16_for_cpu"):
            m.support_avx512bf16_for_cpu = False
    model = interop.functional(ours)
    params = sf.shard(model.tree, mesh, sf.full_shard("shard"), frozen=model.frozen)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        want = theirs.eval()(input_ids=tokens).logits
        return [distance(model(params, input_ids=tokens).logits, want) for _ in range(3)]


@pytest.mark.world(2, "processes")
def test_layers_of_bitsandbytes_compute_the_same_at_every_call(world: World, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    for found in world.run(called_in_4_bits, tmp_path):
        assert worst(found) < 1e-6


def other_formats_on_ranks() -> dict[str, str]:
    mesh, found = data_mesh(dist.get_world_size()), {}
    model = interop.functional(torch.nn.Linear(64, 32, bias=False))
    stored = {"weight": torch.randn(32, 64, generator=torch.Generator().manual_seed(0))}
    model.tree = quant.quantize(model.tree, quant.fp4() if dist.get_rank() else quant.nf4())
    for source in (None, 0):
        with pytest.raises(Exception, match="in few bits") as caught:
            interop.load(stored, model, mesh, sf.full_shard("shard"), src_rank=source)
        found[f"{source}"] = str(caught.value)
    return found


@pytest.mark.world(2, "processes")
def test_ranks_that_would_keep_other_formats_are_told(world: World) -> None:
    for found in world.run(other_formats_on_ranks):
        assert [source for source, said in found.items() if "weight in fp4(64) of [32, 64]" not in said] == []
