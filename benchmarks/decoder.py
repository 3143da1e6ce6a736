"""A decoder of the usual shape: rotary-free attention, gated feed-forward layers, root mean square norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RootMeanSquareNorm(nn.Module):
    """Rows divided by their root mean square (Zhang and Sennrich 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Block(nn.Module):
    """Causal attention and a gated feed-forward layer, each behind a norm and beside a skip connection."""

    def __init__(self, width: int, heads: int, hidden: int, key_heads: int | None = None) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads or heads
        self.before_attention, self.before_hidden = RootMeanSquareNorm(width), RootMeanSquareNorm(width)
        narrow = width * self.key_heads // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(width, narrow, bias=False), nn.Linear(width, narrow, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        samples, positions, width = x.shape
        y = self.before_attention(x)
        q, k, v = (
            project(y).view(samples, positions, heads, -1).transpose(1, 2)
            for project, heads in (
                (self.query, self.heads),
                (self.key, self.key_heads),
                (self.value, self.key_heads),
            )
        )
        grouped = self.key_heads != self.heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, positions, width))
        y = self.before_hidden(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Next-token logits ``[n, classes, t]``; by default 6.7 billion parameters."""

    def __init__(
        self,
        layers: int = 32,
        width: int = 4096,
        heads: int = 32,
        hidden: int = 11008,
        words: int = 32000,
        key_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden, key_heads) for _ in range(layers))
        self.norm = RootMeanSquareNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)).mT
        return logits
