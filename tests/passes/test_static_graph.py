"""With `static_graph=True`, gradients are exchanged in the pass of the user, from the first one on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions
from packprop.types import Extension
from tests.distributed.processes import in_processes, needs_groups
from tests.selection import thorough


class Checkpointed(nn.Module):
    """A layer is called within a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda x: torch.tanh(self.first(x)), x.mean(2), use_reentrant=False)
        return self.second(h)  # type: ignore[no-any-return]  # a module's call is Any


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32 * 128, 8), nn.Sigmoid(), nn.Linear(8, 3))


def convolutions() -> nn.Module:
    """Weights are shared so often that their gradients are summed from those of samples."""
    layers = nn.Conv1d(32, 32, 1), nn.ReLU(), nn.Conv1d(32, 64, 5), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 124, 3))


ASKED: list[Callable[[], Sequence[Extension]]] = [
    lambda: [extensions.BatchGrad()],
    lambda: [extensions.DiagGGNExact(), extensions.KFAC()],
    lambda: [extensions.SumGradSquared(), extensions.DiagHessianMC()],
]


def steps(build: Callable[[], nn.Module], asked: Sequence[Extension] | None, rank: int) -> list[Tensor]:
    """Gradients of three steps on data that differ between ranks."""
    torch.manual_seed(0)
    model = build()
    wrapped = DistributedDataParallel(model, static_graph=True)
    loss_function = nn.CrossEntropyLoss()
    if asked is not None:
        packprop.extend(wrapped)
        packprop.extend(loss_function)
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(rank + 1)
    found = []
    for _ in range(3):
        x, y = torch.randn(16, 32, 128), torch.randint(0, 3, (16,))
        optimiser.zero_grad()
        loss = loss_function(wrapped(x), y)
        before = torch.get_rng_state()
        with packprop.backpack(*(asked or ())):
            loss.backward()
        torch.set_rng_state(before)  # draws of an extension change no data
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimiser.step()
    return found


def compare(rank: int) -> None:
    for build in (mlp, convolutions, Checkpointed):
        plain = steps(build, None, rank)
        both = [torch.zeros_like(plain[0]) for _ in range(2)]
        torch.distributed.all_gather(both, plain[0])
        assert torch.equal(*both)
        for asked in ASKED[: 2 if build is Checkpointed else 3]:
            ours = steps(build, asked(), rank)
            assert len(ours) == len(plain)
            for gradient, other in zip(ours, plain, strict=True):
                torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-6)


@thorough
@needs_groups
def test_gradients_are_averaged_from_the_first_pass_on() -> None:
    in_processes(compare, 2)
