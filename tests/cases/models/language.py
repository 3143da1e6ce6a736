"""Small language models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn


class LanguageModel(nn.Module):
    """A causal language model whose embedding is also its head."""

    def __init__(self, vocabulary: int = 4, width: int = 4, length: int = 3) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.attn = nn.Linear(width, 3 * width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = self.attn(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.lm_head(x)


class LanguageModelWithLoss(LanguageModel):
    """The same, computing the shifted next-token loss itself when it is given labels."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(ids)
        if labels is None:
            return logits
        flat = logits[:, :-1].reshape(-1, logits.shape[-1])
        return F.cross_entropy(flat, labels[:, 1:].reshape(-1))
