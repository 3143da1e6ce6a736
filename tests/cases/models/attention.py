"""Attention written in several ways, and models around it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention written by hand, with a fused query-key-value projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        qkv = self.qkv(x).reshape(n, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(n, length, width))


class FlashAttention(Attention):
    """The same through `torch.nn.functional.scaled_dot_product_attention`."""

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            part.view(n, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).contiguous().view(n, length, width))


class LibraryAttention(nn.Module):
    """`torch.nn.MultiheadAttention`, batch axis first or second."""

    def __init__(self, width: int, heads: int, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.attention = nn.MultiheadAttention(width, heads, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        if not self.batch_first:
            x = x.transpose(0, 1)
        y, _ = self.attention(x, x, x, need_weights=False)
        return y if self.batch_first else y.transpose(0, 1)


class VisionTransformer(nn.Module):
    """Patches, a class token, raw position parameters, one pre-norm block, a head."""

    def __init__(self, attention: Callable[[int, int], nn.Module], width: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, width, 2, stride=2)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 6, width))
        self.norm1 = nn.LayerNorm(width)
        self.attn = attention(width, 2)
        self.gamma = nn.Parameter(torch.ones(width))
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 5), nn.GELU(), nn.Linear(5, width))
        self.head = nn.Linear(width, 3)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image).flatten(2).transpose(1, 2)
        x = x + self.pos_embed[:, 1 : 1 + x.shape[1]]
        cls_token = self.cls_token.expand(x.shape[0], -1, -1) + self.pos_embed[:, :1]
        x = torch.cat([cls_token, x], dim=1)
        x = x + self.gamma * self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(x[:, 0])


class WindowAttention(nn.Module):
    """Attention in windows ``[N * windows, s, C]`` with a table of relative position biases."""

    def __init__(self, width: int, window: int, windows: int) -> None:
        super().__init__()
        self.windows = windows
        self.qkv = nn.Linear(width, 3 * width)
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * window - 1) ** 2, 1))
        grid = torch.cartesian_prod(torch.arange(window), torch.arange(window))
        offset = grid[:, None] - grid[None] + window - 1
        self.index = offset[..., 0] * (2 * window - 1) + offset[..., 1]
        self.mask = -1.5 * torch.eye(window * window).flip(0).expand(windows, -1, -1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 1, width).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * width**-0.5) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.index.view(-1)].view(length, length, -1)
        scores = scores + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        scores = scores.view(batch // self.windows, self.windows, 1, length, length)
        scores = scores + self.mask.to(x).unsqueeze(1).unsqueeze(0)
        scores = scores.view(-1, 1, length, length).softmax(-1)
        return (scores @ v).transpose(1, 2).reshape(batch, length, width)


class Windows(nn.Module):
    """Attention and a norm inside windows ``[N * windows, size, C]``, cyclically shifted."""

    def __init__(self, width: int = 2, window: int = 2, shift: int = 1) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm = nn.LayerNorm(width)
        self.attn = WindowAttention(width, window, windows=4)
        self.bias = nn.Parameter(torch.randn(window * window, width))
        self.head = nn.Linear(width, 3)

    def forward(self, image: Tensor) -> Tensor:
        n, height, width, channels = image.shape
        w = self.window
        x = torch.roll(image, (-self.shift, -self.shift), (1, 2))
        x = x.view(n, height // w, w, width // w, w, channels).permute(0, 1, 3, 2, 4, 5)
        windows = x.reshape(-1, w * w, channels) + self.bias
        windows = windows + self.attn(self.norm(windows))
        x = windows.view(n, height // w, width // w, w, w, channels).permute(0, 1, 3, 2, 4, 5)
        x = torch.roll(x.reshape(n, height, width, channels), (self.shift, self.shift), (1, 2))
        return self.head(x.mean((1, 2)))


class TimeFirst(nn.Module):
    """Takes ``[N, T, d]``, works on ``[T, N, d]``, returns ``[N, c]``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.bias = nn.Parameter(torch.randn(3, 1, 3))
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        time_first = x.transpose(0, 1)
        y = self.norm(torch.tanh(self.inner(time_first)) + self.bias)
        return self.head(y.mean(0))


class LearnedQueries(nn.Module):
    """Parameters that attend to the input: projected before they ever meet a sample."""

    def __init__(self, width: int = 2, queries: int = 2) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.head = nn.Linear(queries * width, 3)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(self.queries.unsqueeze(0).expand(x.shape[0], -1, -1))
        scores = q @ self.key(x).transpose(1, 2)
        return self.head((scores.softmax(-1) @ self.value(x)).flatten(1))
