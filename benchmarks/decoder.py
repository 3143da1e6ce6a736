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

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_hidden = RootMeanSquareNorm(width), RootMeanSquareNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        samples, positions, width = x.shape
        y = self.before_attention(x)
        q, k, v = (
            project(y).view(samples, positions, self.heads, -1).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, positions, width))
        y = self.before_hidden(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Next-token logits ``[n, classes, t]``; by default 6.7 billion parameters."""

    def __init__(
        self, layers: int = 32, width: int = 4096, heads: int = 32, hidden: int = 11008, words: int = 32000
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = RootMeanSquareNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)).mT
        return logits
