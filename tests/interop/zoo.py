"""Small random modules of many families: each with a batch, and a loss that is a sum over rows, with its count."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, LENGTH, VOCABULARY, CLASSES = 8, 7, 40, 5
Batch = dict[str, Any]
Loss = Callable[[Any, Batch], tuple[Tensor, Tensor]]


@dataclass
class Case:
    """Of the zoo.

    Attributes:
        make: the module; its parameters are drawn anew each time, after a seed.
        batch: the whole batch, keyword arguments.
        loss: of the module's output and the batch: a sum over rows or tokens, and their number.
        options: of `functional`.
        samples: whether torch's own `vmap(grad)` goes through the module.
        forward_mode: whether its ops have tangents.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Loss
    options: dict[str, Any] = field(default_factory=dict)
    samples: bool = True
    forward_mode: bool = True


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, length), generator=generator(seed))


def text() -> Batch:
    """Rows of different lengths."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    for i in range(ROWS):
        mask[i, LENGTH - i % 3 :] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


def numbers(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=generator(3), dtype=torch.float64)


def next_tokens(out: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    logits, wanted = out.logits[:, :-1], batch["input_ids"][:, 1:]
    counted = batch["attention_mask"][:, 1:].to(logits.dtype)
    each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    return (each * counted.flatten()).sum(), counted.sum()


def labeled(out: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    logits, wanted = out.logits, batch["labels"]
    if logits.ndim > wanted.ndim + 1:
        raise ValueError("logits and labels do not fit")
    total = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), wanted.flatten(), reduction="sum")
    return total, torch.tensor(float(wanted.numel()), dtype=logits.dtype)


def embedded(out: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    counted = batch["attention_mask"].to(out.last_hidden_state.dtype)[..., None]
    return (out.last_hidden_state * counted).square().sum(), counted.sum()


def squared(out: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    found = out if isinstance(out, Tensor) else out.image_embeds
    return found.square().sum(), torch.tensor(float(len(found)), dtype=found.dtype)


def _transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    return transformers


_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "attn_implementation": "eager"}
_TEXT = {"vocab_size": VOCABULARY, **_SMALL}


def made(name: str, kind: str, **config: Any) -> Any:
    """A model of `transformers`."""
    tr = _transformers()
    return getattr(tr, f"{name}{kind}")(getattr(tr, f"{name}Config")(**config))


def llama(tied: bool = False, **more: Any) -> nn.Module:
    own = {"num_hidden_layers": 3, "num_key_value_heads": 2, "tie_word_embeddings": tied, "use_cache": False}
    return made("Llama", "ForCausalLM", **(_TEXT | more), **own)


def gpt2(dropout: float = 0.0) -> nn.Module:
    return made(
        "GPT2", "LMHeadModel",
        vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=3, n_head=4, attn_implementation="eager",
        use_cache=False, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def bert(kind: str = "Model", dropout: float = 0.0) -> nn.Module:
    return made(
        "Bert", kind, **_TEXT, num_hidden_layers=3, max_position_embeddings=16, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip


def albert() -> nn.Module:
    return made(
        "Albert", "Model", **_TEXT, num_hidden_layers=4, max_position_embeddings=16, hidden_dropout_prob=0.0,
        embedding_size=16, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def t5() -> nn.Module:
    return made(
        "T5", "ForConditionalGeneration",
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, feed_forward_proj="gated-gelu", use_cache=False, attn_implementation="eager",
        decoder_start_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip


def vit() -> nn.Module:
    return made(
        "ViT", "ForImageClassification", **_SMALL, num_hidden_layers=3, image_size=8, patch_size=4, num_labels=CLASSES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def mixtral() -> nn.Module:
    return made(
        "Mixtral", "ForCausalLM", **{**_TEXT, "intermediate_size": 24}, num_hidden_layers=2, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, use_cache=False, experts_implementation="eager",
    )  # fmt: skip


def clip() -> nn.Module:
    """Two towers, a parameter of the root, and the embeddings of both in the loss."""
    sizes = {**_SMALL, "num_hidden_layers": 2}
    return made(
        "CLIP", "Model",
        text_config={"vocab_size": VOCABULARY, **sizes, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config={**sizes, "image_size": 8, "patch_size": 4}, projection_dim=16, attn_implementation="eager",
    )  # fmt: skip


class Joint(nn.Module):
    """Parameters of the root, and a parent that reads its child's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.tokens = nn.Parameter(torch.randn(1, 8) * 0.1)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.head.weight.tanh(), self.head.bias) * self.scale.exp()


class Pictures(nn.Module):
    """A convolutional network with batch norms."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU())
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm(8), nn.Tanh()) for _ in range(2)]
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        found: Tensor = self.head(x.mean((-1, -2)))
        return found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(4, 4, batch_first=True) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for one in self.layers:
            x = one(x)[0]
        return x


class WeightNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        normed = torch.nn.utils.parametrizations.weight_norm
        self.blocks = nn.ModuleList([normed(nn.Linear(6, 6)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Encoder(nn.Module):
    """Of torch's own transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # of the others torch has no tangents
            for one in self.layers:
                x = one(x)
        return x


def _translated() -> Batch:
    return {**text(), "labels": tokens(5, seed=2)}


def _seen() -> Batch:
    return {"pixel_values": numbers(3, 8, 8), "labels": torch.arange(ROWS) % CLASSES}


def _both() -> Batch:
    return {**text(), "pixel_values": numbers(3, 8, 8)}


def _x(*shape: int) -> Callable[[], Batch]:
    return lambda: {"x": numbers(*shape)}


ZOO: dict[str, Case] = {
    "llama": Case(llama, text, next_tokens),
    "llama_tied": Case(lambda: llama(True), text, next_tokens),
    "gpt2": Case(gpt2, text, next_tokens),
    "bert": Case(bert, text, embedded, samples=False),
    "bert_mlm": Case(lambda: bert("ForMaskedLM"), text, next_tokens, samples=False),
    "albert": Case(albert, text, embedded, samples=False),
    "t5": Case(t5, _translated, labeled, samples=False),
    "vit": Case(vit, _seen, labeled),
    "mixtral": Case(mixtral, text, next_tokens, samples=False),
    "clip": Case(clip, _both, squared),
    "joint": Case(Joint, _x(8), squared, {"unstaged": r"head\..*"}),
    "pictures": Case(lambda: Pictures(lambda n: nn.GroupNorm(2, n)), _x(3, 6, 6), squared),
    "recurrent": Case(Recurrent, _x(3, 4), squared, samples=False),
    "weight_norm": Case(WeightNormed, _x(6), squared, forward_mode=False),
    "encoder": Case(Encoder, _x(3, 8), squared),
}


def build(name: str, **arguments: Any) -> nn.Module:
    """A module in float64, the same wherever and whenever it is built."""
    torch.manual_seed(0)
    with norms_in_float64():
        return ZOO[name].make(**arguments).double()


@contextmanager
def losses_in_float64() -> Iterator[None]:
    """Those of transformers add up in float32 whatever comes in."""
    from transformers.loss import loss_utils

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Tensor:
        total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return total / ((labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch)

    before = loss_utils.LOSS_MAPPING["ForCausalLM"]
    loss_utils.LOSS_MAPPING["ForCausalLM"] = loss
    try:
        yield
    finally:
        loss_utils.LOSS_MAPPING["ForCausalLM"] = before


@contextmanager
def norms_in_float64() -> Iterator[None]:
    """Some norms of `transformers`, and a router, compute in float32 whatever comes in; to compare, they must not.

    They stay so in this process, since modules run after the block: whoever compares enters it on all processes.
    """
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.mistral.modeling_mistral import MistralRMSNorm
    from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm, MixtralTopKRouter
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    def forward(self: Any, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    def routed(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x.reshape(-1, self.hidden_dim), self.weight)
        best, chosen = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        return logits, best / best.sum(-1, keepdim=True), chosen

    for kind in (GptOssRMSNorm, LlamaRMSNorm, MistralRMSNorm, MixtralRMSNorm, Qwen2RMSNorm, T5LayerNorm):
        kind.forward = forward  # type: ignore[method-assign]
    MixtralTopKRouter.forward = routed  # type: ignore[method-assign]
    yield
