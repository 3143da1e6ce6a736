"""Extensions of one's own for single modules, as programs write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packprop.compat.custom_module.branching import SumModule
from packprop.compat.own import (
    BackpropExtension,
    FirstOrderModuleExtension,
    ModuleExtension,
    SecondOrderBackpropExtension,
)


class Gate(nn.Module):
    """A layer of a user's own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class GateGradients(FirstOrderModuleExtension):
    def __init__(self) -> None:
        super().__init__(params=["weight"])

    def weight(self, extension: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        assert bpQuantities is None
        return g_out[0] * module.input0


class LinearSquares(FirstOrderModuleExtension):
    """Sums of fourth powers: what no extension of the catalogue has."""

    def __init__(self) -> None:
        super().__init__(params=["weight", "bias"])
        self.seen: list[Any] = []

    def weight(self, extension: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        self.seen.append((module, module.input0, module.output, g_inp[0], g_out[0]))
        chosen = extension.get_subsampling() or slice(None)
        return torch.einsum("no,ni->oi", g_out[0][chosen] ** 4, module.input0[chosen] ** 4)

    def bias(self, extension: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        return (g_out[0][extension.get_subsampling() or slice(None)] ** 4).sum(0)


class Fourth(BackpropExtension):
    def __init__(self, fail_mode: str = "SILENT", subsampling: list[int] | None = None) -> None:
        self.of_linear = LinearSquares()
        super().__init__("fourth", {nn.Linear: self.of_linear}, fail_mode, subsampling)


def run(model: nn.Module, x: Tensor, y: Tensor, *extensions: Any, hook: Any = None, **options: Any) -> Tensor:
    from backpack import backpack, extend

    loss = extend(nn.CrossEntropyLoss())(extend(model)(x), y)
    with backpack(*extensions, extension_hook=hook):
        loss.backward(**options)
    return loss


def fourth_powers(model: nn.Module, x: Tensor, y: Tensor, chosen: list[int]) -> list[Tensor]:
    totals = [torch.zeros_like(p) for p in model.parameters()]
    for sample in chosen:
        loss = F.cross_entropy(model(x[sample : sample + 1]), y[sample : sample + 1]) / len(x)
        rows = torch.autograd.grad(loss, list(model.parameters()))
        totals = [total + row**4 for total, row in zip(totals, rows, strict=True)]
    return totals


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))


class Propagated(SecondOrderBackpropExtension):
    """A user's own second order: squares of GGN columns, propagated module by module from the loss."""

    def __init__(self) -> None:
        class OfLoss(ModuleExtension):
            def backpropagate(
                self, extension: Any, module: Any, g_inp: Any, g_out: Any, arrived: Any
            ) -> Tensor:
                assert arrived is None
                p = module.input0.softmax(-1)
                roots = torch.diag_embed(p.sqrt()) - torch.einsum("no,nv->nov", p, p.sqrt())
                return roots.movedim(-1, 0) / len(p) ** 0.5

        class OfLinear(ModuleExtension):
            def __init__(self) -> None:
                super().__init__(["weight", "bias"])

            def weight(self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any) -> Tensor:
                return torch.einsum("vno,ni->oi", columns**2, module.input0**2)

            def bias(self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any) -> Tensor:
                return (columns**2).sum((0, 1))

            def backpropagate(
                self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any
            ) -> Tensor:
                return columns @ module.weight

        class OfSigmoid(ModuleExtension):
            def backpropagate(
                self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any
            ) -> Tensor:
                return columns * (module.output * (1 - module.output))

        class Same(ModuleExtension):
            def backpropagate(
                self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any
            ) -> Tensor:
                return columns

        super().__init__(
            "propagated",
            {
                nn.CrossEntropyLoss: OfLoss(),
                nn.Linear: OfLinear(),
                nn.Sigmoid: OfSigmoid(),
                nn.Identity: Same(),
                SumModule: Same(),
            },
        )
