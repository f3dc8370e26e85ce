"""Models of transformers over rows sharded over an axis, against the model on whole rows in one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import P, lora
from shardfn.compiled import regions
from shardfn.interop import functional
from shardfn.testing import World
from tests.reference import worst
from tests.refusals import told

tr = pytest.importorskip("transformers")

VOCABULARY, LENGTH, ROWS = 64, 32, 2
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "attention_dropout": 0.0,
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, **SLIDING}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}),
    "gpt_oss": ("GptOss", {"head_dim": 8, "sliding_window": 7, "num_local_experts": 4, **SLIDING}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, **EXPERTS, "first_k_dense_replace": 1, "num_key_value_heads": 4}),
    "bert": ("Bert", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
}


@contextlib.contextmanager
def float64_kept() -> Iterator[None]:
    """Leaves float64 alone where models ask for float32, in backward too, so that differences of rounding are seen."""
    own_float, own_to, own_type, own_softmax = Tensor.float, Tensor.to, Tensor.type, F.softmax

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kept = x.dtype == torch.float64 and torch.float32 in (*args, *kwargs.values())
        return x if kept else own_to(x, *args, **kwargs)

    def softmax(x: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
        return own_softmax(x, dim, _stacklevel, None if x.dtype == torch.float64 else dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else own_float(x))
        patch.setattr(Tensor, "to", to)
        patch.setattr(Tensor, "type", lambda x, *to: x if x.dtype == torch.float64 and to else own_type(x, *to))
        patch.setattr(F, "softmax", softmax)
        yield


def made(kind: str, head: str = "", **options: Any) -> Any:
    name = {"Gemma3": "Gemma3Text", "Llama4": "Llama4Text"}.get(kind, kind)
    config = getattr(tr, f"{name}Config")(**{**TEXT, **options})
    auto = tr.AutoModelForMaskedLM if kind == "Bert" else tr.AutoModelForCausalLM
    build = getattr(tr, head)._from_config if head else auto.from_config
    module = build(config, attn_implementation="eager", experts_implementation="eager").double()
    draw = torch.Generator().manual_seed(0)  # ranks are threads, which share torch's own random numbers
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=draw, dtype=p.dtype) * (0.3 if p.ndim == 1 else 0.1))
    return module


def build(name: str) -> Any:
    kind, options = MODELS[name]
    return made(kind, **options)


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Ranks in threads must not import models at the same time."""
    for name in MODELS:
        build(name)


def tokens(length: int = LENGTH, rows: int = ROWS) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def packed(*lengths: int) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def batches(name: str) -> dict[str, dict[str, Tensor]]:
    """Whole rows, as a model on one process takes them."""
    ids = tokens()
    # A document across three of four ranks, and two that meet where pieces do.
    places = torch.stack([torch.cat([torch.arange(n) for n in ns]) for ns in ((3, 26, 3), (8, 8, 16))])
    padding = torch.ones_like(ids)
    padding[0, :13] = 0
    found: dict[str, dict[str, Tensor]] = {
        "left padding": {"input_ids": ids, "attention_mask": padding},
        "unequal pieces": {"input_ids": ids[:, :27]},
    }
    if name == "bert":
        return {k: {**b, "labels": b["input_ids"].masked_fill(b["input_ids"] % 3 > 0, -100)} for k, b in found.items()}
    return {**found, "packed": {"input_ids": ids, "position_ids": places}}


def targets(name: str, batch: dict[str, Tensor]) -> Tensor:
    """Labels of whole rows, by the definition."""
    if name == "bert":
        return batch["labels"].masked_fill(batch.get("attention_mask", batch["labels"].new_ones(())) == 0, -100)
    ids = batch["input_ids"]
    labels = torch.full_like(ids, -100)
    for row in range(len(ids)):
        for at in range(ids.shape[1] - 1):
            begins = "position_ids" in batch and batch["position_ids"][row, at + 1] == 0
            real = "attention_mask" not in batch or batch["attention_mask"][row, at]
            if real and not begins:
                labels[row, at] = ids[row, at + 1]
    return labels


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def off(got: Any, want: Any) -> float:
    scale = max(float(w.abs().max()) for w in want.values())
    return worst(float((got[k] - w).abs().max()) / scale for k, w in want.items())


def alone(module: Any, batch: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and gradients of a module on whole rows."""
    given: dict[str, Any] = {k: x for k, x in batch.items() if k != "labels"}
    if "position_ids" in batch and type(module).__name__ == "GptOssForCausalLM":
        given["attention_mask"] = masks_of(module.config, batch["position_ids"])
    loss = summed(module(**given, use_cache=False).logits, labels) / (labels != -100).sum()
    params = dict(module.named_parameters())
    return loss.detach(), dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))


def masks_of(config: Any, places: Tensor) -> dict[str, Tensor]:
    """The masks of packed documents, by the definition, as gpt-oss by itself does not make them."""
    documents = (places == 0).cumsum(1)
    at = torch.arange(places.shape[1])
    seen = (documents[:, :, None] == documents[:, None]) & (at[:, None] >= at)
    near = seen & (at[:, None] - at < config.sliding_window)
    low = torch.finfo(torch.float64).min
    kinds = {"full_attention": seen, "sliding_attention": near}
    return {kind: torch.zeros(1, dtype=torch.float64).where(x[:, None], low) for kind, x in kinds.items()}


AXES = ("data", "context")


def stepped(lm: Any, mesh: Any, params: Any, batch: dict[str, Tensor], check: bool) -> tuple[Tensor, Any]:
    """The loss and gradients of the model on rows sharded over `context`."""

    @sf.shard_map(mesh=mesh, in_specs=(..., P("data")), out_specs=(P(), ...), inputs="global", check=check)
    @sf.value_and_grad
    def step(params: Any, batch: dict[str, Tensor]) -> Tensor:
        inputs, labels = lm.cut(batch)
        total = summed(lm(params, **inputs).logits, labels)
        return sf.psum(total, AXES) / sf.psum((labels != -100).sum(), AXES)

    return step(params, batch)


def differences(
    name: str, way: Any, sizes: dict[str, int], check: bool = False, only: tuple[str, ...] = (), **options: Any
) -> dict[str, float]:
    mesh = sf.make_mesh(**sizes, device="cpu")
    reference = build(name)
    lm = functional(copy.deepcopy(reference), context="context", context_attention=way, min_stage_params=512, **options)
    params = lm.shard(mesh, sf.full_shard(AXES))
    found = {}
    for case, batch in batches(name).items():
        if only and case not in only:
            continue
        labels = targets(name, batch)
        loss, grads = alone(reference, batch, labels)
        got, got_grads = stepped(lm, mesh, params, {**batch, "labels": labels} if name == "bert" else batch, check)
        found[case] = worst([abs(float(got - loss)), off(lm.state_dict(got_grads), grads)])
    return found


@pytest.mark.central
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.world(4, "threads")
def test_a_model_in_a_ring_of_four_is_the_model_on_whole_rows(world: World, name: str) -> None:
    with float64_kept():
        for found in world.with_deadline(150).run(differences, name, "ring", {"data": 1, "context": 4}, remat=True):
            assert len(found) == len(batches(name))
            assert not {case: error for case, error in found.items() if not error < 1e-12}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.world(4, "threads")
def test_a_model_with_its_own_casts_is_the_model_on_whole_rows(world: World, name: str) -> None:
    """Norms, softmaxes and losses in float32, as shipped: numbers differ by its rounding."""
    only = ("left padding",) if name == "bert" else ("packed",)
    for found in world.with_deadline(150).run(differences, name, "ring", {"data": 1, "context": 4}, only=only):
        assert len(found) == 1
        assert not {case: error for case, error in found.items() if not error < 1e-6}


MESHES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "data 2, context 2": ("ring", {"data": 2, "context": 2}, {}),
    "context 4, more ranks than heads of keys": ("ulysses", {"data": 1, "context": 4}, {}),
    "context 2, tensor 2": ("ring", {"data": 1, "context": 2, "tensor": 2}, {"tensor": "auto"}),
    "exchanged heads, tensor 2": ("ulysses", {"data": 1, "context": 2, "tensor": 2}, {"tensor": "auto", "remat": True}),
    "no context": ("ring", {"data": 2, "context": 1, "tensor": 2}, {"tensor": "auto"}),
}


@pytest.mark.parametrize("case", MESHES)
@pytest.mark.world(4, "threads")
def test_contexts_go_with_data_and_tensors(world: World, case: str) -> None:
    way, sizes, options = MESHES[case]
    with float64_kept():
        for found in world.with_deadline(150).run(differences, "llama", way, sizes, check=True, **options):
            assert not {case: error for case, error in found.items() if not error < 1e-12}


def differences_in_float64(*args: Any, **options: Any) -> dict[str, float]:
    with float64_kept():
        return differences(*args, **options)


IN_PROCESSES = {
    **{case: MESHES[case] for case in ("data 2, context 2", "context 2, tensor 2")},
    "compiled layers": ("ring", {"data": 2, "context": 2}, {"compile": {"backend": "aot_eager"}, "only": ("packed",)}),
}


@pytest.mark.parametrize("case", IN_PROCESSES)
@pytest.mark.world(4, "processes")
def test_contexts_go_with_data_and_tensors_in_processes(world: World, case: str) -> None:
    way, sizes, options = IN_PROCESSES[case]
    for found in world.with_deadline(150).run(differences_in_float64, "llama", way, sizes, remat=True, **options):
        assert not {case: error for case, error in found.items() if not error < 1e-12}


VOCABULARY_ONLY = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
TABLES = {"llama": "auto", "mistral": "auto", "deepseek_v3": "auto", "gpt_oss": VOCABULARY_ONLY}  # which ships none


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("way", ["ring", "ulysses"])
@pytest.mark.world(4, "threads")
def test_experts_go_with_contexts_and_tensors(world: World, name: str, way: str) -> None:
    sizes, options = {"data": 1, "context": 2, "tensor": 2}, {"tensor": TABLES[name], "only": ("packed",)}
    with float64_kept():
        for found in world.with_deadline(150).run(differences, name, way, sizes, check=True, **options):
            assert found["packed"] < 1e-12


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.world(8, "threads")
def test_data_context_and_tensor_on_eight_ranks(world: World, name: str) -> None:
    sizes = {"data": 2, "context": 2, "tensor": 2}
    only = () if name == "llama" else ("packed",)
    options = {"tensor": TABLES[name], "remat": True, "only": only}
    with float64_kept():
        for found in world.with_deadline(150).run(differences, name, "ring", sizes, **options):
            assert not {case: error for case, error in found.items() if not error < 1e-12}


def sent_by_windows() -> list[tuple[list[int], int]]:
    """For windows of one piece and more, this rank's positions and how often it sends keys in a forward pass."""
    mesh, found = sf.make_mesh(context=4, device="cpu"), []
    for window in (9, 10):
        lm = functional(made("Mistral", sliding_window=window), context="context", min_stage_params=512)
        params = lm.shard(mesh, sf.full_shard("context"))

        def run(params: Any, ids: Tensor, lm: Any = lm) -> tuple[Tensor, int]:
            inputs, _ = lm.cut({"input_ids": ids})
            with torch.no_grad():
                lm(params, **inputs)  # which also checks the model
                with sf.collectives.ledger() as log:
                    lm(params, **inputs)
            return inputs["position_ids"][0], log.count(op="ppermute")

        mapped = sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=..., check=False)
        places, count = mapped(params, tokens())
        found.append((places.tolist(), count))
    return found


@pytest.mark.world(4, "threads")
def test_rows_are_in_order_if_all_layers_have_a_window_that_reaches_one_rank(world: World) -> None:
    for rank, found in enumerate(world.run(sent_by_windows)):
        in_order, balanced = list(range(8 * rank, 8 * rank + 8)), [*range(4 * rank, 4 * rank + 4)]
        assert found == [(in_order, 2), ([*balanced, *(31 - i for i in reversed(balanced))], 6)]


COMPILED = {
    "ring, documents": ("llama", "ring", "documents"),
    "ring, positions": ("llama", "ring", "position_ids"),
    "exchanged heads, padding": ("mistral", "ulysses", "attention_mask"),
}


def compiled(name: str, way: Any, given: str) -> float:
    """How far losses of a compiled step, whose rows differ from call to call, are from those of the step."""
    mesh, losses = sf.make_mesh(context=2, device="cpu"), []
    at = torch.arange(LENGTH).expand(ROWS, -1)

    def batch(i: int) -> dict[str, Tensor]:
        first = 5 + i
        made = {
            "documents": (at >= torch.tensor([[first], [20 - i]])).long(),
            "position_ids": at - at.where(at < first, first).where(at >= first, 0),
            "attention_mask": (at >= first).long(),
        }
        return {"input_ids": (tokens() + i) % VOCABULARY, given: made[given]}

    with float64_kept(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions.Region, "function", lambda region: lambda xs: region.graph(*xs))  # without inductor
        for compiles in (False, True):
            lm = functional(build(name), context="context", context_attention=way, min_stage_params=512)
            params, opt = lm.shard(mesh, sf.full_shard("context")), so.sgd(0.5)
            state = opt.init(params)

            @sf.shard_map(mesh=mesh, in_specs=..., out_specs=..., check=False)
            def step(params: Any, state: Any, batch: Any, lm: Any = lm, opt: Any = opt) -> Any:
                inputs, labels = lm.cut(batch)

                def loss(params: Any) -> Tensor:
                    total = summed(lm(params, **inputs).logits, labels)
                    return sf.psum(total, "context") / sf.psum((labels != -100).sum(), "context")

                value, grads = sf.value_and_grad(loss)(params)
                return *opt.step(params, grads, state), value

            run = sf.compile(step) if compiles else step
            for i in range(5):
                params, state, value = run(params, state, batch(i))
                losses.append(float(value))
    return worst(abs(a - b) for a, b in zip(losses[:5], losses[5:], strict=True))


@pytest.mark.parametrize("case", COMPILED)
@pytest.mark.world(2, "processes")
def test_a_compiled_step_has_the_losses_of_the_step(world: World, case: str) -> None:
    for off in world.with_deadline(150).run(compiled, *COMPILED[case]):
        assert off < 1e-12


# --- what is not supported ---


UNFIT: dict[str, tuple[Any, type[Exception], str]] = {
    "images": (
        lambda: tr.ViTForImageClassification(tr.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, image_size=8, patch_size=4)), TypeError, "takes no position_ids",
    ),
    "speech": (
        lambda: tr.WhisperForConditionalGeneration(tr.WhisperConfig(vocab_size=64, d_model=16, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)), TypeError, "takes no position_ids",
    ),
    "a recurrence": (lambda: made("Mamba", state_size=4), TypeError, "takes no position_ids"),
    "no transformers": (lambda: torch.nn.Linear(2, 2), TypeError, "Call parallel.ring_attention in its forward"),
}  # fmt: skip


UNFIT["counts of mask tokens"] = (
    lambda: tr.EsmForMaskedLM(tr.EsmConfig(**TEXT, mask_token_id=1)), TypeError, "by the number of mask tokens",
)  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_models_that_count_positions_themselves_are_refused_unchanged(case: str) -> None:
    make, kind, message = UNFIT[case]
    module = make()
    with pytest.raises(kind) as caught:
        functional(module, context="context")
    assert message in str(caught.value)
    functional(module)


LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
MIXING: dict[str, tuple[Any, str]] = {
    "chunks": (
        lambda: made("Llama4", attention_chunk_size=8, num_local_experts=2, head_dim=8, intermediate_size_mlp=48),
        "chunked_overlay",
    ),
    "all see all": (
        lambda: made("Gemma3", head_dim=8, sliding_window=6, use_bidirectional_attention=True, **SLIDING), "or_mask",
    ),
    "convolutions": (
        lambda: made("Lfm2", layer_types=["conv", "full_attention"], conv_L_cache=3), "mixes positions",
    ),
    "linear attention": (
        lambda: made("Qwen3Next", layer_types=["linear_attention", "full_attention"], head_dim=8, **LINEAR),
        "mixes positions",
    ),
    "a pooled head": (
        lambda: made("Llama", "LlamaForSequenceClassification"), "which is not by token, such as a pooled one",
    ),
    "a pooler": (lambda: made("Bert", "BertModel", **MODELS["bert"][1]), "which is not by token"),
    "a mask that the model edits": (lambda: made("Doge"), "computes with its mask by itself"),
    "dropout": (lambda: made("Llama", attention_dropout=0.5).train(), "dropout must be 0 with context="),
}  # fmt: skip


def mixing(make: Any) -> str:
    mesh = sf.make_mesh(context=2, device="cpu")
    lm = functional(make(), context="context", min_stage_params=512)
    params = lm.shard(mesh, sf.full_shard("context"))

    def run(params: Any, batch: Any) -> Any:
        with torch.no_grad():
            return lm(params, **lm.cut(batch)[0])[0]

    return told(lambda: sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=...)(params, {"input_ids": tokens()}))


@pytest.mark.parametrize("case", MIXING)
@pytest.mark.world(2, "threads")
def test_what_the_description_does_not_reproduce_is_refused_on_the_first_call(world: World, case: str) -> None:
    make, message = MIXING[case]
    for said in world.run(mixing, make):
        assert message in said


# --- what was silently wrong elsewhere ---


def packed_losses() -> dict[str, float]:
    """What goes wrong if ranks look at their own pieces, of rows with documents and labels of their own."""
    mesh = sf.make_mesh(context=4, device="cpu")
    reference, batch = build("llama"), batches("llama")["packed"]
    labels = batch["input_ids"].clone()
    labels[0, 4:24] = -100  # a prompt in the middle, which is another share of each rank's tokens
    labels[batch["position_ids"] == 0] = -100
    want = reference(**batch, labels=labels, use_cache=False).loss
    lm = functional(copy.deepcopy(reference), context="context", min_stage_params=512)
    params = lm.shard(mesh, sf.full_shard("context"))

    def run(params: Any, batch: Any, labels: Any) -> Any:
        inputs, own = lm.cut({**batch, "labels": labels})
        logits = lm(params, **inputs).logits
        total, count = summed(logits, own), (own != -100).sum()
        changed, _ = lm.cut({**batch, "input_ids": batch["input_ids"].where(batch["position_ids"] < 0, 1)})
        others = inputs["attention_mask"].flatten(1)[:, sf.parallel.positions(LENGTH, "context", balanced=True)] != 2
        mixed = {**inputs, "input_ids": inputs["input_ids"].where(others, changed["input_ids"])}
        moved = (lm(params, **mixed).logits - logits).abs().amax(-1)
        return {
            "loss": sf.psum(total, "context") / sf.psum(count, "context"),
            "mean of means": sf.pmean(total / count.clamp(min=1), "context"),
            "seen by others": sf.pmax((moved * others).amax(), "context"),
            "seen": sf.pmax((moved * ~others).amax(), "context"),
        }

    with torch.no_grad():
        found = sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=..., check=False)(params, batch, labels)
    return {"wanted": float(want.detach()), **{k: float(x) for k, x in found.items()}}


@pytest.mark.world(4, "threads")
def test_packed_documents_and_their_loss_are_those_of_whole_rows(world: World) -> None:
    with float64_kept():
        for found in world.with_deadline(100).run(packed_losses):
            assert abs(found["loss"] - found["wanted"]) < 1e-12
            assert abs(found["mean of means"] - found["wanted"]) > 1e-3  # the published one
            assert found["seen by others"] == 0
            assert found["seen"] > 1e-3


def adapted() -> dict[str, float]:
    mesh = sf.make_mesh(context=4, device="cpu")
    batch = batches("llama")["packed"]
    labels = targets("llama", batch)
    found = []
    for context in ("context", None):
        lm = functional(build("llama"), context=context, min_stage_params=512)
        adapters = lora.init(lm, "all-linear", rank=2, alpha=4, dropout=0.0, seed=0)
        moved = torch.utils._pytree.tree_map(lambda x: x + 0.1, adapters)
        if context is None:
            whole: Any = {**batch, "use_cache": False}
            value, grads = sf.value_and_grad(
                lambda a, lm=lm, whole=whole: summed(lm(lm.tree, adapters=a, **whole).logits, labels)
            )(moved)
        else:
            params = lm.shard(mesh, sf.full_shard("context"))

            def run(a: Any, params: Any, batch: Any, lm: Any = lm) -> Any:
                inputs, own = lm.cut(batch)
                return sf.psum(summed(lm(params, adapters=a, **inputs).logits, own), "context")

            step = sf.shard_map(sf.value_and_grad(run), mesh=mesh, in_specs=..., out_specs=...)
            value, grads = step(sf.shard(moved, mesh, sf.ddp("context")), params, batch)
            grads = sf.unshard(grads)
        found.append((float(value), torch.utils._pytree.tree_leaves(grads)))
    (value, got), (want_value, want) = found
    assert len(got) == len(want) > 0
    apart = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True)]
    return {"loss": abs(value / want_value - 1), "gradient": worst(apart)}


@pytest.mark.world(4, "threads")
def test_adapters_get_the_gradient_of_whole_rows(world: World) -> None:
    with float64_kept():
        for found in world.with_deadline(100).run(adapted):
            assert worst(list(found.values())) < 1e-12, found


# --- arguments ---


def calls() -> dict[str, str]:
    mesh = sf.make_mesh(context=2, device="cpu")
    lm = functional(build("llama"), context="context", min_stage_params=512)
    params, ids = lm.shard(mesh, sf.full_shard("context")), tokens()
    other = functional(build("llama"), context="sequence", min_stage_params=512)

    def said(run: Any) -> str:
        return told(lambda: sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=...)(params, ids))

    def with_inputs(**more: Any) -> Any:
        return lambda params, ids: lm(params, **{**lm.cut({"input_ids": ids})[0], **more}).logits

    return {
        "labels": said(with_inputs(labels=ids)),
        "cache": said(with_inputs(use_cache=True)),
        "last logits": said(with_inputs(logits_to_keep=1)),
        "attentions": said(with_inputs(output_attentions=True)),
        "no positions": said(with_inputs(position_ids=None)),
        "a dense mask": said(with_inputs(attention_mask=torch.ones(2, 1, 16, 32))),
        "no cut": said(lambda params, ids: lm(params, input_ids=ids.chunk(2, 1)[sf.axis_index("context")]).logits),
        "generate": said(lambda params, ids: lm(params, ids, method="generate")),
        "another axis": said(lambda params, ids: other(params, **other.cut({"input_ids": ids})[0]).logits),
    }


CALLS = {
    "labels": "TypeError: LlamaForCausalLM: with rows sharded over 'context', labels= is not supported",
    "cache": "caches are not supported",
    "last logits": "logits_to_keep is not supported",
    "attentions": "does not support output_attentions",
    "no positions": "attention_mask and position_ids must be those of whole rows",
    "a dense mask": "attention_mask and position_ids must be those of whole rows",
    "no cut": "Write inputs, labels = model.cut(batch), then model(params, **inputs)",
    "generate": "method='generate' is not supported",
    "another axis": "LlamaForCausalLM: context must be an axis of the mesh, got 'sequence', and the mesh has context",
}


@pytest.mark.world(2, "threads")
def test_calls_that_would_look_at_pieces_are_refused_with_the_way_out(world: World) -> None:
    for said in world.run(calls):
        assert {case: said[case] for case, message in CALLS.items() if message not in said[case]} == {}


def test_arguments_are_made_from_whole_rows() -> None:
    lm = functional(build("llama"), context="context", min_stage_params=512)
    ids = tokens(8)
    documents = torch.stack([packed(3, 5), packed(8)])
    inputs, labels = lm.cut({"input_ids": ids, "documents": documents, "attention_mask": torch.ones_like(ids)})
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [*range(8)]]
    assert inputs["attention_mask"].flatten(1).tolist() == [[1, 1, 1, 2, 2, 2, 2, 2], [1] * 8]
    assert labels is not None
    assert labels[0].tolist() == [*ids[0, 1:3].tolist(), -100, *ids[0, 4:].tolist(), -100]
    assert labels[1].tolist() == [*ids[1, 1:].tolist(), -100]
    own = ids.masked_fill(ids % 2 > 0, -100)
    assert torch.equal(lm.cut({"input_ids": ids, "labels": own})[1], F.pad(own[:, 1:], (0, 1), value=-100))
    with pytest.raises(TypeError, match="batch has 'pixel_values'"):
        lm.cut({"input_ids": ids, "pixel_values": ids})
    with pytest.raises(ValueError, match=r"labels must be \[2, 8\]"):
        lm.cut({"input_ids": ids, "labels": ids[:, :4]})
    padded = torch.ones_like(ids)
    padded[0, 0] = 0
    with pytest.raises(ValueError, match="must not jump between tokens of rows with padding"):
        lm.cut({"input_ids": ids, "position_ids": inputs["position_ids"], "attention_mask": padded})
    with pytest.raises(TypeError, match="must have a context axis"):
        functional(build("llama"), min_stage_params=512).cut({"input_ids": ids})


def test_a_model_without_a_mesh_is_the_model_with_its_own_masks_and_others_keep_theirs() -> None:
    reference = build("mistral")
    other = type(reference)(reference.config).double()
    other.load_state_dict(reference.state_dict())
    lm = functional(reference, context="context", min_stage_params=512)
    assert other.config._attn_implementation == "eager"
    with float64_kept(), torch.no_grad():
        for batch in batches("mistral").values():
            want = other(**batch, use_cache=False).logits
            seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])) != 0
            for given in (batch, lm.cut(batch)[0]):
                assert (lm(lm.tree, **{**given, "use_cache": False}).logits - want)[seen].abs().max() < 1e-12


# --- what cut makes is what the module makes by itself ---


def padded_rows() -> dict[str, Tensor]:
    real = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    real[0, :13] = 0
    return {"input_ids": tokens().where(real != 0, 0), "attention_mask": real}


SMALL_GPT2: dict[str, Any] = {
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "attn_pdrop": 0.0,
    "vocab_size": VOCABULARY,
}
NUMBERED: dict[str, tuple[Any, list[int]]] = {
    "Roberta": (lambda: made("Roberta", "RobertaForMaskedLM", **MODELS["bert"][1]), [*[0] * 13, *range(1, 20)]),
    "OPT": (lambda: made("OPT", ffn_dim=48, word_embed_proj_dim=32), [*[-1] * 13, *range(19)]),
    "BioGpt": (lambda: made("BioGpt"), [*range(32)]),
    "GPT2": (lambda: made("GPT2", **SMALL_GPT2), [*range(32)]),
    "GraniteMoe": (lambda: made("GraniteMoe", num_local_experts=2, num_experts_per_tok=1), [*range(32)]),
}


@pytest.mark.parametrize("name", NUMBERED)
def test_positions_and_masks_are_those_that_the_module_makes(name: str) -> None:
    make, places = NUMBERED[name]
    module, batch = make().eval(), padded_rows()
    lm = functional(copy.deepcopy(module), context="context", min_stage_params=512)
    inputs, _ = lm.cut(batch)
    assert inputs["position_ids"][0].tolist() == places
    with float64_kept(), torch.no_grad():
        want, got = module(**batch).logits, lm(lm.tree, **inputs).logits
        assert (want - got)[batch["attention_mask"] != 0].abs().max() < 1e-12


def test_positions_restart_with_documents_where_the_module_counts_from_its_padding() -> None:
    lm = functional(NUMBERED["Roberta"][0](), context="context", min_stage_params=512)
    inputs, _ = lm.cut({"input_ids": tokens(8, 1), "documents": packed(3, 5)[None]})
    assert inputs["position_ids"].tolist() == [[1, 2, 3, 1, 2, 3, 4, 5]]


def other_numbering() -> str:
    mesh = sf.make_mesh(context=2, device="cpu")
    lm = functional(NUMBERED["Roberta"][0](), context="context", min_stage_params=512)
    context: Any = lm._context
    context.numbering = type(context.numbering)()
    params = lm.shard(mesh, sf.full_shard("context"))

    def run(params: Any, ids: Any) -> Any:
        with torch.no_grad():
            return lm(params, **lm.cut({"input_ids": ids})[0]).logits

    return told(lambda: sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=...)(params, tokens()))


@pytest.mark.world(2, "threads")
def test_a_model_that_numbers_tokens_by_an_unknown_rule_is_refused_on_the_first_call(world: World) -> None:
    for said in world.run(other_numbering):
        assert "RobertaForMaskedLM: gives other outputs for a row with padding than with the arguments of cut" in said


@pytest.mark.parametrize("head", ["GPT2LMHeadModel", "BertLMHeadModel", "GPT2DoubleHeadsModel", "BertForPreTraining"])
def test_labels_are_shifted_where_the_loss_of_the_module_shifts_them(head: str) -> None:
    kind = head[:4].title() if head[0] == "B" else "GPT2"
    module = made(kind, head, **(SMALL_GPT2 if kind == "GPT2" else {"is_decoder": head == "BertLMHeadModel"})).eval()
    lm, ids = functional(copy.deepcopy(module), context="context", min_stage_params=512), tokens()
    if head not in ("GPT2LMHeadModel", "BertLMHeadModel"):
        assert lm.cut({"input_ids": ids})[1] is None
        with pytest.raises(TypeError, match=f"labels must be left out for {head}"):
            lm.cut({"input_ids": ids, "labels": ids})
        return
    with float64_kept(), torch.no_grad():
        want = module(input_ids=ids, labels=ids)
        for batch in ({"input_ids": ids}, {"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": ids.clone()}):
            labels = lm.cut(batch)[1]
            assert abs(summed(want.logits, labels) / (labels != -100).sum() - want.loss) < 1e-12


def test_documents_positions_and_masks_are_checked() -> None:
    lm = functional(build("llama"), context="context", min_stage_params=512)
    ids, documents = tokens(8), torch.stack([packed(3, 5), packed(8)])
    want = lm.cut({"input_ids": ids, "documents": documents})
    for dtype in (torch.uint8, torch.int8, torch.int16):
        given = torch.full_like(documents, torch.iinfo(dtype).max).where(documents == 1, torch.iinfo(dtype).min)
        inputs, labels = lm.cut({"input_ids": ids, "documents": given.to(dtype), "labels": ids.clone()})
        assert torch.equal(inputs["attention_mask"], want[0]["attention_mask"])
        assert torch.equal(labels, want[1])
    places = torch.arange(8)[None]
    assert lm.cut({"input_ids": ids, "position_ids": places})[0]["position_ids"].tolist() == [[*range(8)]] * 2
    for dtype in (torch.bool, torch.float32):
        with pytest.raises(TypeError, match="documents must be ids of an integer dtype"):
            lm.cut({"input_ids": ids, "documents": documents.to(dtype)})
    returning = torch.stack([torch.tensor([0, 0, 1, 1, 0, 0, 2, 2]), packed(8)])
    with pytest.raises(ValueError, match="an id that returns after another"):
        lm.cut({"input_ids": ids, "documents": returning})
    padding = torch.stack([torch.tensor([1, 1, 0, 0, 1, 1, 0, 0]), torch.ones(8)])
    lm.cut({"input_ids": ids, "documents": returning - 2 * (returning > 1).long(), "attention_mask": 1 - padding})
    with pytest.raises(ValueError, match="attention_mask must be 0 at padding and 1 elsewhere, got 2"):
        lm.cut({"input_ids": ids, "attention_mask": documents + 1})


def test_losses_of_routers_are_refused_with_the_arguments_of_cut() -> None:
    lm = functional(
        made("Mixtral", num_local_experts=2, num_experts_per_tok=1, output_router_logits=True), context="context"
    )
    inputs, _ = lm.cut({"input_ids": tokens()})
    with pytest.raises(TypeError, match="output_router_logits=True is not supported"):
        lm(lm.tree, **inputs)
    with torch.no_grad():
        lm(lm.tree, **inputs, output_router_logits=False)


DYNAMIC: dict[str, Any] = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}


def wrong_rows() -> list[str]:
    mesh = sf.make_mesh(context=2, device="cpu")
    short = functional(made("Llama", max_position_embeddings=24, **DYNAMIC), context="context", min_stage_params=512)
    lm = functional(build("llama"), context="context", min_stage_params=512)

    def said(lm: Any, spec: Any, batch: Any) -> str:
        run = sf.shard_map(
            lambda b: lm.cut(b)[1], mesh=mesh, in_specs=spec, out_specs=..., inputs="global", check=False
        )
        return told(lambda: run(batch))

    run = sf.shard_map(short.cut, mesh=mesh, in_specs=P(), out_specs=..., check=False)
    run({"input_ids": tokens(24)})
    run({"input_ids": tokens(32), "documents": packed(8, 24).expand(2, -1)})
    return [
        said(lm, P("context"), {"input_ids": tokens()}),
        said(lm, P(None, "context"), {"input_ids": tokens()}),
        said(short, P(), {"input_ids": tokens(32)}),
    ]


@pytest.mark.world(2, "threads")
def test_rows_that_ranks_do_not_share_and_rows_that_stretch_frequencies_are_refused(world: World) -> None:
    for by_row, by_token, stretched in world.run(wrong_rows):
        assert "cut: the rows differ between ranks" in by_row
        assert "Shard the batch over data axes only" in by_token
        assert "rows must have at most 24 positions, got 32" in stretched
