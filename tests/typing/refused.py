"""Mistakes that `mypy --strict` must find in a user's program.

Each `type: ignore` names the mistake that is expected on its line. Where mypy does not find it, the comment is
unused, which is an error under `--strict`: so `make lint` fails if a mistake is no longer found. Never run.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import packprop
from packprop import backpack, extend, extensions


def names_that_do_not_exist() -> None:
    print(packprop.bakpack)  # type: ignore[attr-defined]
    print(extensions.BatchGradient)  # type: ignore[attr-defined]
    from packprop import extended  # type: ignore[attr-defined]

    print(extended)


def arguments_of_other_types(model: nn.Linear, x: Tensor, loss: Tensor) -> None:
    backpack("BatchGrad")  # type: ignore[arg-type]
    backpack(extensions.BatchGrad)  # type: ignore[arg-type]
    backpack(extensions.BatchGrad(), memory=[1])  # type: ignore[arg-type]
    backpack(extensions.BatchGrad(), extension_hook=lambda: None)  # type: ignore[arg-type, misc]
    extend(x)  # type: ignore[type-var]
    extensions.KFAC(mc_samples="two")  # type: ignore[arg-type]
    extensions.KFAC(samples=2)  # type: ignore[call-arg]
    packprop.compute(model, nn.MSELoss(), (x, x))  # type: ignore[call-arg]
    packprop.plan(model, nn.MSELoss(), (x, x), extensions.BatchGrad)  # type: ignore[arg-type]
    extend(model, nn.MSELoss())  # type: ignore[arg-type]
    packprop.kronecker.inverse([torch.eye(2)], damping="none")  # type: ignore[call-overload]


def results_of_other_types(model: nn.Linear, x: Tensor) -> None:
    wrong: nn.Conv2d = extend(model)  # type: ignore[assignment]
    text: str = packprop.plan(model, nn.MSELoss(), (x, x), [])  # type: ignore[assignment]
    print(wrong, text)
