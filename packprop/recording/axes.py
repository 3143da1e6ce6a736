"""Where users say that the samples of what a loss takes are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from packprop.errors import BadInput

AXIS = "_packprop_sample_axis"
"""Attribute of an extended module: the axis of what the loss takes that holds the samples."""


def check_sample_axis(asked: str, declared: Any) -> None:
    """Refuse what is no axis.

    Raises:
        BadInput: A ``ValueError``.
    """
    if type(declared) is not int:
        raise BadInput(
            asked,
            f"sample_axis={declared!r}",
            "it is no axis: a whole number is declared, and it is about what the loss takes, not about the "
            "arguments of the model",
            "give the axis of the loss's input that holds the samples (1 for [t, n, c]), or leave it out for 0",
        )


def check_documents(declared: Any) -> None:
    """Refuse what does not say to which document each position belongs.

    Raises:
        BadInput: A ``ValueError``.
    """
    what = type(declared).__name__
    if isinstance(declared, Tensor):
        whole = declared.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
        if whole and 1 <= declared.dim() <= 2 and declared.numel():
            return
        what = f"of shape {list(declared.shape)} and {declared.dtype}"
    raise BadInput(
        "record(documents=...) was entered.",
        f"documents, {what}",
        "it is no tensor of whole numbers [n, t] or [n * t]",
        "give the number of the document at each position of the loss, from 0 on",
    )
