"""The precision that sums are accumulated in, and that of results."""

from __future__ import annotations

import torch
from torch import Tensor


def precision(vectors: Tensor, products: Tensor) -> torch.dtype:
    """That of the vectors; products of whole numbers are fractions."""
    return vectors.dtype if vectors.is_floating_point() or vectors.is_complex() else products.dtype


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision that sums are accumulated in: at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
