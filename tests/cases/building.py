"""What cases are built from: data, layers with a head, raw parameters, tags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.cases.case import Case, Data
from tests.cases.models.wrapping import Raw, headed

# Groups that tests select by.
SMOKE = frozenset({"smoke"})
FALLBACK = frozenset({"fallback"})
FLATTENED = frozenset({"flattened"})
# Shapes of raw parameters.
W2, W3 = {"w": (2,)}, {"w": (3,)}
VW3 = {"v": (3,), "w": (3,)}
W23, W25, W34, W42, W232 = (
    {"w": (2, 3)},
    {"w": (2, 5)},
    {"w": (3, 4)},
    {"w": (4, 2)},
    {"w": (2, 3, 2)},
)
LOW_RANK = {"a": (3, 2), "b": (2, 3)}


def regression(inputs: tuple[int, ...], targets: tuple[int, ...]) -> Data:
    """Real inputs ``[N, *inputs]`` and real targets ``[N, *targets]``."""
    return lambda n: (torch.randn(n, *inputs), torch.randn(n, *targets))


def classes(inputs: tuple[int, ...], count: int, positions: tuple[int, ...] = ()) -> Data:
    """Real inputs ``[N, *inputs]`` and class labels ``[N, *positions]``."""
    return lambda n: (torch.randn(n, *inputs), torch.randint(count, (n, *positions)))


def tokens(length: tuple[int, ...], vocabulary: int, count: int, positions: tuple[int, ...] = ()) -> Data:
    """Integer inputs ``[N, *length]`` and class labels ``[N, *positions]``."""
    return lambda n: (
        torch.randint(vocabulary, (n, *length)),
        torch.randint(count, (n, *positions)),
    )


def probabilities(inputs: tuple[int, ...], positions: tuple[int, ...] = ()) -> Data:
    """Real inputs ``[N, *inputs]`` and probabilities of 3 classes ``[N, 3, *positions]``."""
    return lambda n: (
        torch.randn(n, *inputs),
        torch.randn(n, 3, *positions).softmax(1),
    )


def some_ignored(inputs: tuple[int, ...], positions: tuple[int, ...], index: int) -> Data:
    """Inputs and labels of 3 classes, some of which are ``index``, which the loss ignores."""

    def data(n: int) -> tuple[Tensor, Tensor]:
        target = torch.randint(3, (n, *positions))
        # Sample 1, where there is one, is ignored as a whole, others in part.
        if n > 1:
            target[1] = index
        if positions:
            target[0].flatten()[0] = index
        return torch.randn(n, *inputs), target

    return data


def labels(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Data:
    """Real inputs ``[N, *inputs]`` and zeros and ones ``[N, *outputs]``."""
    return lambda n: (torch.randn(n, *inputs), (torch.rand(n, *outputs) > 0.5) * 1.0)


def net(outputs: int = 3) -> Callable[[], nn.Module]:
    """Two layers, for inputs ``[N, 3]``."""
    return lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, outputs))


def maps(channels: int, kernel: int = 1) -> Callable[[], nn.Module]:
    """Two convolutions, for inputs ``[N, 1, h, w]``."""
    return lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Conv2d(2, channels, kernel))


def sequence(channels: int) -> Callable[[], nn.Module]:
    """Two convolutions over one axis, for inputs ``[N, 2, t]``."""
    return lambda: nn.Sequential(nn.Conv1d(2, 2, 2, padding=1), nn.Tanh(), nn.Conv1d(2, channels, 2))


def use(
    name: str,
    layer: Callable[[], nn.Module],
    inputs: tuple[int, ...],
    features: int,
    **options: Any,
) -> Case:
    """A case about one layer: the layer, a nonlinearity, a head, cross entropy over 3 classes."""
    return Case(
        name,
        lambda: headed(layer(), features=features),
        nn.CrossEntropyLoss,
        options.pop("data", classes(inputs, 3)),
        **options,
    )


def raw(
    name: str,
    function: Callable[..., Tensor],
    inputs: tuple[int, ...],
    features: int,
    shapes: dict[str, tuple[int, ...]],
    **options: Any,
) -> Case:
    """A case about a torch function that consumes raw parameters."""
    return use(name, lambda: Raw(function, **shapes), inputs, features, **options)
