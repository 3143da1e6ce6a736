"""Ways to keep less of a forward pass: checkpoints, offloading, copies, and a network to try them on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import packprop
from tests.references.running import Row, as_tensors, generator
from tests.versions import HAS_EARLY_STOP

Wrap = Callable[[Callable[..., Any], Tensor], Any]


def plain(function: Callable[..., Any], x: Tensor) -> Any:
    return function(x)


def offloaded(function: Callable[..., Any], x: Tensor) -> Any:
    with save_on_cpu():
        return function(x)


def copied(function: Callable[..., Any], x: Tensor) -> Any:
    """What offloading from a GPU does: what is saved is another tensor, in another place."""
    with saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
        return function(x)


def nested(function: Callable[..., Any], x: Tensor) -> Any:
    again = partial(checkpoint, use_reentrant=False)
    return again(partial(again, function), x)


def twice(function: Callable[..., Any], x: Tensor) -> Any:
    """Two regions, each inside one that does something before and after."""
    again = partial(checkpoint, use_reentrant=False)
    return again(lambda x: again(function, torch.sin(x)) * 1.5, again(lambda x: again(function, x) + 1.0, x))


def offloaded_checkpoint(function: Callable[..., Any], x: Tensor) -> Any:
    with save_on_cpu():
        return checkpoint(function, x, use_reentrant=False)


def checkpointed_offload(function: Callable[..., Any], x: Tensor) -> Any:
    return checkpoint(lambda x: offloaded(function, torch.tanh(x)), x, use_reentrant=False)


WAYS: dict[str, Wrap] = {
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "save_on_cpu": offloaded,
    "copied": copied,
    "nested": nested,
    "twice": twice,
    "checkpoint under save_on_cpu": offloaded_checkpoint,
    "save_on_cpu in checkpoint": checkpointed_offload,
}
if HAS_EARLY_STOP:
    WAYS["without early stop"] = partial(checkpoint, use_reentrant=False, early_stop=False)
# The same function without anything saved elsewhere
REFERENCE: dict[str, Wrap] = {
    "twice": lambda function, x: function(torch.sin(function(x) + 1.0)) * 1.5,
    "save_on_cpu in checkpoint": lambda function, x: function(torch.tanh(x)),
}


class Net(nn.Module):
    """Layers of every kind of rule, and the fallback, each in a block that is wrapped."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.wrap = wrap
        self.first = nn.Linear(6, 8)
        self.mix = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 8))
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.scale = nn.Parameter(torch.randn(8))
        self.shift = nn.Parameter(torch.randn(8))
        self.other = nn.Parameter(torch.randn(8))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.last = nn.Linear(8, 3)

    def spread(self, x: Tensor) -> Tensor:
        return self.conv(x.unsqueeze(-2)).mean(-2)

    def loose(self, x: Tensor) -> Tensor:
        """Parameters used outside of any module, and by functions that have no rule."""
        x = F.dropout(x, 0.25)
        bias = self.shift.expand(2, 8)[0]
        x = x * self.scale + bias
        return torch.atan2(x, 2.0 + self.other.square())

    def own(self, x: Tensor) -> Tensor:
        return F.linear(torch.sin(x), self.mix[0].weight)  # tied to a layer in another block

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (self.mix, self.spread, self.loose, self.own, self.normed):
            x = self.wrap(block, x)
        return self.last(x)


def run(wrap: Wrap, asked: list[Row], **options: Any) -> dict[str, Any]:
    """Everything that was asked for, by parameter and attribute, and the gradient."""
    torch.manual_seed(0)
    model = packprop.extend(Net(wrap).double())
    loss = packprop.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randint(3, (4,))
    torch.manual_seed(1)
    value = loss(model(x), y)
    with packprop.backpack(*(row(generator()) for row in asked)):
        value.backward(**options)
    parameters = dict(model.named_parameters())
    attributes = [*(row.attribute for row in asked), "grad"]
    return {(n, name): getattr(p, name) for n, p in parameters.items() for name in attributes}


def assert_equal(found: dict[Any, Any], expected: dict[Any, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        for mine, other in zip(as_tensors(found[key]), as_tensors(value), strict=True):
            assert torch.allclose(mine, other, rtol=1e-12, atol=1e-14), key
