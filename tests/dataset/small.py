"""A small model and data set, and what splits into batches."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.applications.dataset.result import Result
from tests.cases import CASES, Case, map_tensors

DEFAULT = {field.name: field.default for field in fields(Case)}
SIZE = 7
EXACT = [
    extensions.BatchGrad,
    extensions.BatchL2Grad,
    extensions.SumGradSquared,
    extensions.Variance,
    extensions.DiagGGNExact,
    extensions.BatchDiagGGNExact,
]
# Options of these losses hold one entry for each sample, which splitting does not split.
WHOLE_ONLY = {"bce-weight-per-sample", "function-mse-weights", "ce-none"}
SPLIT_CASES = [
    case
    for case in CASES
    if all(getattr(case, key) is DEFAULT[key] for key in ("total", "output", "score"))
    and all(getattr(case, key) is DEFAULT[key] for key in ("take_input", "take_target"))
    and case.reductions == DEFAULT["reductions"]
    and (case.order == 2 and not case.refuses and not case.refuses_curvature)
    and ("smoke" in case.tags or case.name.startswith(("ce-", "mse-", "bce-", "function-")))
    and case.name not in WHOLE_ONLY
]


def part(tree: Any, start: int, stop: int) -> Any:
    """Samples from `start` to `stop`."""
    return map_tensors(lambda tensor: tensor[start:stop], tree)


def small(size: int = SIZE) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, (torch.randn(size, 3).double(), torch.randint(2, (size,)))


def compute(model: nn.Module, loss: Any, data: Any, *asked: Any, **options: Any) -> Result:
    return packprop.compute(model, loss, data, asked, progress=False, **options)
