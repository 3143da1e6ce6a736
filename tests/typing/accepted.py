"""A user's program: `mypy --strict` accepts it, knows the type of each value, and it runs."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import packprop
from packprop import BadInput, Plan, Profile, Result, backpack, extend, extensions, kronecker, restore


class Network(nn.Module):
    """A model with a method of its own, which is still known after `extend`."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs ``[n, 3]``."""
        return self.scores(self.hidden(x).tanh())

    def scores(self, hidden: Tensor) -> Tensor:
        """The outputs for hidden values ``[n, 8]``."""
        scores: Tensor = self.head(hidden)
        return scores


def a_step(x: Tensor, y: Tensor) -> list[Tensor]:
    """Values of one backward pass, read by a hook and from the parameters."""
    model = assert_type(extend(Network()), Network)
    loss = assert_type(extend(nn.CrossEntropyLoss()), nn.CrossEntropyLoss)
    seen: list[str] = []

    def hook(module: nn.Module) -> None:
        seen.append(type(module).__name__)

    with backpack(extensions.BatchGrad(), extensions.KFAC(mc_samples=2), extension_hook=hook, memory="1GiB"):
        loss(model(x), y).backward()
    assert seen
    assert_type(restore(model), Network)
    assert_type(kronecker.trace([torch.eye(2), torch.eye(3)]), Tensor)
    # torch says of attributes of modules and tensors only that they are `Any`, or `Tensor`
    return [getattr(parameter, extensions.BatchGrad.savefield) for parameter in model.parameters()]


def a_data_set(x: Tensor, y: Tensor, folder: Path) -> dict[str, object]:
    """Values over a data set, saved and read again."""
    extension = extensions.DiagGGNExact()
    result = packprop.compute(Network(), nn.CrossEntropyLoss(), (x, y), [extension], progress=False)
    assert_type(result, Result)
    assert_type(result.samples, int)
    result.save(folder / "result.safetensors")
    loaded = assert_type(Result.load(folder / "result.safetensors"), Result)
    return {**loaded[extension]}


def a_plan(x: Tensor, y: Tensor) -> Plan:
    """What a step takes; a budget that is too small is an error with a reason."""
    try:
        packprop.plan(Network(), nn.CrossEntropyLoss(), (x, y), [extensions.BatchGrad()], memory=1)
    except BadInput as error:
        assert_type(str(error), str)
    return packprop.plan(Network(), nn.CrossEntropyLoss(), (x, y), [extensions.BatchGrad()])


def a_profile(x: Tensor, y: Tensor) -> Profile:
    """The table, layer by layer."""
    return packprop.profile(Network(), nn.CrossEntropyLoss(), (x, y))


def a_penalty(x: Tensor) -> Tensor:
    """A branch whose gradient is taken at once; as a decorator it keeps the function's signature."""

    @packprop.eager_backward
    def penalty(hidden: Tensor, weight: float) -> Tensor:
        return weight * hidden.square().sum()

    return assert_type(penalty(x, 0.5), Tensor) + packprop.eager_backward(lambda t: t.square().sum(), x)
