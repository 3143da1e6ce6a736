"""A function, a rule for it and an extension, in under ten lines each; small models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import packprop
from packprop.engine.functions.building import scaled
from packprop.types import GRADIENT, Extension, Row
from tests.references.tensors import R, p


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        open_ = weight.sigmoid()
        return gradient * open_, (gradient * x * open_ * (1 - open_)).sum_to_size(weight.shape)


def gates(n: int) -> tuple[Tensor, ...]:
    return R(n, 4), p(4)


def write_a_use() -> None:
    @packprop.register_use(Gate)
    def rule(call):
        x, weight = call.saved(0), call.saved(1)
        return scaled(call, lambda: x() * weight().sigmoid() * (1 - weight().sigmoid()))


def write_an_extension() -> Extension:
    class MeanAbsolute(Extension):
        savefield = "mean_absolute"
        rows = (Row(GRADIENT, lambda structure: structure.rows.abs().sum((0, 1))),)

        def finish(self, values, samples):
            return values[0] / samples

    return MeanAbsolute()


def classifier() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    return model, nn.CrossEntropyLoss(), R(3, 3), torch.tensor([0, 2, 1])


def absolute(structure: Any) -> Tensor:
    return structure.rows.abs().sum((0, 1))


def made(statistic: Callable[..., Any], finish: Any = None, **options: Any) -> Extension:
    """An extension of one row."""
    seed = options.pop("seed", GRADIENT)
    body = {"savefield": "made", "rows": (Row(seed, statistic, **options),)}
    if finish is not None:
        body["finish"] = finish
    kind = type("Made", (Extension,), body)
    return kind()  # type: ignore[no-any-return]  # of a class made here
