"""A decoder-only language model in the shape of GPT-2 (Radford et al. 2019).

    tokens (B, T) -> embedding + learned positions -> blocks -> norm -> logits (B, T, vocabulary)

    block:   x ---+--- norm -- attention ---(+)---+--- norm -- 4x wider, GELU ---(+)---
                  |_________________________|     |______________________________|

Between two blocks there is nothing but the residual stream x, of shape (B, T, width): that is what a cut there sends.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from pd_format.errors import UserError

__all__ = ["GPT", "gpt"]

_STD = 0.02


def gpt(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    context: int = 1024,
    vocabulary: int = 256,
    dropout: float = 0.1,
    tied: bool = False,
) -> nn.Module:
    """Build it, by default as large as GPT-2 small, but for a vocabulary of bytes.

    Args:
        layers: blocks.
        width: of the residual stream, a multiple of `heads`.
        heads: of each attention.
        context: the longest sequence, in tokens.
        vocabulary: tokens that there are, from 0.
        dropout: of embeddings, attention and what each block adds.
        tied: the head's weight is the embedding's, as in GPT-2; all layers then stay in one stage.

    Raises:
        UserError: a size is out of range.
    """
    for name, size in (
        ("layers", layers),
        ("width", width),
        ("heads", heads),
        ("context", context),
        ("vocabulary", vocabulary),
    ):
        if type(size) is not int or size < 1:
            raise UserError(f"gpt: {name} is {size!r}; expected a whole number of at least 1.")
    if width % heads:
        raise UserError(f"gpt: width {width} is no multiple of heads {heads}; every head gets an equal part of it.")
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise UserError(f"gpt: dropout is {dropout!r}; expected a number from 0 to below 1.")
    if type(tied) is not bool:
        raise UserError(f"gpt: tied is {tied!r}; expected true or false.")
    return GPT(layers, width, heads, context, vocabulary, dropout, tied)


class GPT(nn.Module):
    """See `gpt` for the arguments."""

    def __init__(
        self, layers: int, width: int, heads: int, context: int, vocabulary: int, dropout: float, tied: bool
    ) -> None:
        super().__init__()
        #: The shape of a sample and its dtype, for each input.
        self.sample_inputs = {"tokens": ((context,), "int64")}
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialise(layers)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, vocabulary) of the token after each of `tokens` (B, T); T may be shorter than the context."""
        x = self.dropout(self.embedding(tokens) + self.positions[: tokens.shape[1]])
        return cast(Tensor, self.head(self.norm(self.blocks(x))))

    def _initialise(self, layers: int) -> None:
        """As GPT-2: normal of 0.02, less for what is added to the residual stream, the more often the less."""
        nn.init.normal_(self.positions, std=_STD)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                adds = name.endswith(("attention.out", "narrow"))
                nn.init.normal_(module.weight, std=_STD / math.sqrt(2 * layers) if adds else _STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


class _Block(nn.Module):
    """What one block adds to the residual stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU(approximate="tanh")
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + cast(Tensor, self.dropout(self.narrow(self.gelu(self.widen(self.norm2(x))))))


class _Attention(nn.Module):
    """Of each token to itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.share = dropout
        self.inputs = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        # (B, T, 3 width) -> three of (B, heads, T, width / heads).
        query, key, value = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        dropped = self.share if self.training else 0.0
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
        return cast(Tensor, self.dropout(self.out(mixed.transpose(1, 2).flatten(2))))
