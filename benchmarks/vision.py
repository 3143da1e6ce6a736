"""Models of timm, with random weights."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn


def load_timm() -> Any:
    """Import timm.

    It imports torchvision, whose compiled part fits one build of torch alone and is not loaded with any other.
    timm's models need none of it; but two of its operators must be declared, or torchvision cannot be imported.
    """
    try:
        return importlib.import_module("timm")
    except RuntimeError:
        for operator in ("nms", "qnms"):
            schema = "(Tensor boxes, Tensor scores, float threshold) -> Tensor"
            torch.library.define(f"torchvision::{operator}", schema)
        return importlib.import_module("timm")


def vision_model(name: str, **options: Any) -> nn.Module:
    """A model of timm for ten classes."""
    model: nn.Module = load_timm().create_model(name, pretrained=False, num_classes=10, **options)
    return model
