"""Recurrent layers of which a loss takes some outputs, which depend on some of the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.selection import often, one_in

OPTIONS: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (nn.LSTM, {"proj_size": 2}),
    (nn.LSTM, {"proj_size": 2, "num_layers": 2, "bidirectional": True}),
    (nn.LSTM, {"num_layers": 2}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    (nn.RNN, {"bidirectional": True}),
]
ASKED = (extensions.BatchGrad, extensions.BatchL2Grad, extensions.DiagGGNExact, extensions.KFLR)


class Taken(nn.Module):
    """A recurrent layer, and those of its outputs that are taken."""

    def __init__(self, layer: nn.Module, taken: str) -> None:
        super().__init__()
        self.inner, self.layer, self.taken = nn.Linear(3, 3), layer, taken

    def forward(self, x: Tensor) -> Tensor:
        output, state = self.layer(self.inner(x))
        states = state if isinstance(state, tuple) else (state, state)
        found = {"o": output, "h": states[0].transpose(0, 1), "c": states[1].transpose(0, 1)}
        return torch.cat([found[letter].flatten(1) for letter in self.taken], 1)


@one_in(3)
@often(lambda kind, options, steps, taken: steps == 3)
@pytest.mark.parametrize("taken", ["o", "h", "c", "oh", "hc", "ohc"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_every_choice_of_outputs(kind: Any, options: dict[str, Any], steps: int, taken: str) -> None:
    """Rows are those of one sample at a time: none where no taken output depends on the parameter."""
    model = packprop.extend(Taken(kind(3, 4, batch_first=True, **options), taken).double())
    loss, x = packprop.extend(nn.MSELoss(reduction="sum")), torch.randn(2, steps, 3).double()
    y = torch.randn_like(model(x))
    with packprop.backpack(*(make() for make in ASKED)):
        loss(model(x), y).backward()
    parameters = dict(model.named_parameters())
    rows = [
        torch.autograd.grad(
            loss(model(x[n : n + 1]), y[n : n + 1]),
            parameters.values(),
            allow_unused=True,
            materialize_grads=True,
        )
        for n in range(2)
    ]
    for place, (name, parameter) in enumerate(parameters.items()):
        if parameter.grad is None:
            assert not hasattr(parameter, "grad_batch"), name
            continue
        torch.testing.assert_close(parameter.grad_batch, torch.stack([row[place] for row in rows]), msg=name)
        if name.startswith("layer.bias"):  # the block of such a parameter is exact
            (block,) = parameter.kflr
            torch.testing.assert_close(block.diagonal(), parameter.diag_ggn_exact.flatten(), msg=name)
            weight = parameters[name.replace("bias", "weight")]
            torch.testing.assert_close(weight.kflr[0], block, msg=name)
            assert weight.kflr[1].shape == 2 * weight.shape[1:]
