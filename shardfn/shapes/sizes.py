"""The sizes of known models, from 100 million parameters to 405 billion."""

from __future__ import annotations

from dataclasses import dataclass

from shardfn.quoting import listed, short


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer.

    Attributes:
        name: of the model.
        vocabulary: number of tokens.
        width: of activations.
        layers: number of blocks.
        heads: number of heads of queries.
        groups: number of heads of keys and values, which divides `heads`.
        hidden: width inside a block's feed-forward part, or inside one expert.
        context: the longest sequence, which is the default.
        head: width of a head.
        gpt: GPT's block: biases, LayerNorm, GELU, learned positions; otherwise Llama's: RMSNorm, SwiGLU, rotary ones.
        tied: whether the table of tokens is the head's matrix, too.
        experts: number of experts in a block; 0 for none.
        chosen: experts for each token.
    """

    name: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    groups: int
    hidden: int
    context: int
    head: int
    gpt: bool = False
    tied: bool = False
    experts: int = 0
    chosen: int = 0

    @property
    def block(self) -> int:
        """Number of a block's parameters."""
        attention = self.width * self.head * (2 * self.heads + 2 * self.groups)
        if self.gpt:
            biases = 3 * self.heads * self.head + self.width + self.hidden + self.width
            return attention + 2 * self.width * self.hidden + biases + 4 * self.width
        mixed = self.experts * self.width + self.experts * 3 * self.width * self.hidden
        return attention + (mixed if self.experts else 3 * self.width * self.hidden) + 2 * self.width

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        tables = self.vocabulary * self.width * (1 if self.tied else 2) + self.gpt * self.context * self.width
        return self.layers * self.block + tables + self.width * (2 if self.gpt else 1)


def _gpt(name: str, width: int, layers: int, heads: int, context: int = 1024) -> Shape:
    return Shape(name, 50257, width, layers, heads, heads, 4 * width, context, width // heads, gpt=True, tied=True)


def _llama(
    name: str, width: int, layers: int, heads: int, groups: int, hidden: int, vocabulary: int = 128256,
    context: int = 8192, *, tied: bool = False, experts: int = 0, chosen: int = 0,
) -> Shape:  # fmt: skip
    return Shape(
        name, vocabulary, width, layers, heads, groups, hidden, context, width // heads, tied=tied, experts=experts,
        chosen=chosen,
    )  # fmt: skip


SHAPES = {
    shape.name: shape
    for shape in (
        # Radford et al. 2019 (GPT-2), table 2; Brown et al. 2020 (GPT-3), table 2.1.
        _gpt("gpt-124m", 768, 12, 12),
        _gpt("gpt-355m", 1024, 24, 16),
        _gpt("gpt-774m", 1280, 36, 20),
        _gpt("gpt-1.5b", 1600, 48, 25),
        _gpt("gpt-6.7b", 4096, 32, 32, 2048),
        _gpt("gpt-13b", 5120, 40, 40, 2048),
        _gpt("gpt-175b", 12288, 96, 96, 2048),
        # Touvron et al. 2023 (Llama 2), and its released configuration; Llama 3 (2024), table 3, and those of 3.2.
        _llama("llama-1b", 2048, 16, 32, 8, 8192, tied=True),
        _llama("llama-3b", 3072, 28, 24, 8, 8192, tied=True),
        _llama("llama-7b", 4096, 32, 32, 32, 11008, 32000, 4096),
        _llama("llama-8b", 4096, 32, 32, 8, 14336),
        _llama("llama-13b", 5120, 40, 40, 40, 13824, 32000, 4096),
        _llama("llama-70b", 8192, 80, 64, 8, 28672),
        _llama("llama-405b", 16384, 126, 128, 8, 53248),
        # Jiang et al. 2024, table 1.
        _llama("mixtral-8x7b", 4096, 32, 32, 8, 14336, 32000, 4096, experts=8, chosen=2),
    )
}


def shape(name: str) -> Shape:
    """Returns a known shape by its name, such as `"llama-8b"`.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in SHAPES:
        raise ValueError(f"there is no model {short(repr(name))}; there are {listed(SHAPES, most=len(SHAPES))}")
    return SHAPES[name]
