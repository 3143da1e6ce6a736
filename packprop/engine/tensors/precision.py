"""The precision of sums and of results, and results that rounding has taken out of bounds."""

from __future__ import annotations

import torch
from torch import Tensor

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}

NARROW = frozenset(_WIDER)
"""The precisions whose numbers packprop adds up in a wider one."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision of sums: at least that of float32; whole numbers stay as they are."""
    return _WIDER.get(dtype, dtype)


def is_for_storage(dtype: torch.dtype) -> bool:
    """Tell whether PyTorch keeps numbers in this precision but does not add them: eight-bit floats."""
    return dtype.is_floating_point and dtype.itemsize == 1


def widened(values: Tensor) -> Tensor:
    """Return values in the precision of sums."""
    wide = _WIDER.get(values.dtype)
    return values if wide is None else values.to(wide)


def wider_dtype(dtype: torch.dtype, device: str) -> torch.dtype | None:
    """Return a precision with twice the digits; ``None`` if the device has no such precision."""
    return torch.float64 if dtype == torch.float32 and device != "mps" else None


def widest(values: Tensor, device: torch.device) -> Tensor:
    """Return values on a device in its widest precision, for factors that are squared or inverted next."""
    dtype = accumulation_dtype(values.dtype)
    return values.to(device, wider_dtype(dtype, device.type) or dtype)


def result_dtype(vectors: Tensor, products: Tensor) -> torch.dtype:
    """Return the precision for products: of ``vectors``, or of ``products`` if vectors are whole numbers."""
    return vectors.dtype if vectors.is_floating_point() or vectors.is_complex() else products.dtype


def at_least(values: Tensor, bound: float) -> Tensor:
    """Raise values to a bound below which only rounding has taken them; the derivative at the bound is one.

    The derivative of ``clamp`` is zero there from PyTorch 2.14 on.
    """
    if not torch.is_grad_enabled():
        return values.clamp_min(bound)
    return torch.where(values < bound, bound, values)
