"""Losses of energies and forces, for graphs of equal and unequal sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import PackpropError
from packprop.extensions import BatchGrad

Loss = Callable[["Graphs", Tensor, Tensor], Tensor]


class Graphs(NamedTuple):
    """Atoms, the graph of each, and what is known of them."""

    positions: Tensor
    graph: Tensor
    energies: Tensor
    forces: Tensor

    def alone(self, n: int) -> Graphs:
        own = self.graph == n
        return Graphs(self.positions[own], self.graph[own] * 0, self.energies[n : n + 1], self.forces[own])

    def means(self, atoms: Tensor) -> Tensor:
        """The mean over the atoms of each graph."""
        sums = atoms.new_zeros(len(self.energies)).index_add(0, self.graph, atoms)
        return sums / self.graph.bincount()


class Potential(nn.Module):
    """Energies of graphs whose atoms meet in a mean over their graph."""

    def __init__(self, meet: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.meet = meet

    def forward(self, graphs: Graphs) -> Tensor:
        atoms = torch.tanh(self.first(graphs.positions))
        if self.meet:
            among = (graphs.graph[:, None] == graphs.graph).to(atoms)
            atoms = atoms + among @ self.second(atoms)
        atoms = self.head(torch.tanh(self.second(atoms)))
        return atoms.new_zeros(len(graphs.energies), 1).index_add(0, graphs.graph, atoms)


def each_declared(graphs: Graphs, energies: Tensor, forces: Tensor) -> Tensor:
    with packprop.record(documents=torch.arange(len(energies))):
        loss = F.mse_loss(energies, graphs.energies)
    with packprop.record(documents=graphs.graph):
        atoms = F.mse_loss(forces, graphs.forces, reduction="none").mean(1)
    return loss + graphs.means(atoms).mean()


def undeclared(graphs: Graphs, energies: Tensor, forces: Tensor) -> Tensor:
    return F.mse_loss(energies, graphs.energies) + F.mse_loss(forces, graphs.forces)


def by_hand(graphs: Graphs, energies: Tensor, forces: Tensor) -> Tensor:
    atoms = (forces - graphs.forces).square().mean(1)
    return ((energies - graphs.energies).square()[:, 0] + graphs.means(atoms)).mean()


def value(model: nn.Module, graphs: Graphs, loss: Loss) -> Tensor:
    graphs = graphs._replace(positions=graphs.positions.clone().requires_grad_())
    energies = model(graphs)
    return loss(graphs, energies, -torch.autograd.grad(energies.sum(), graphs.positions, create_graph=True)[0])


def compared(sizes: list[int], loss: Loss, meet: bool) -> None:
    torch.manual_seed(0)
    atoms = sum(sizes)
    index = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    graphs = Graphs(torch.randn(atoms, 3), index, torch.randn(len(sizes), 1), torch.randn(atoms, 3))
    graphs = Graphs(*(each.double() if each.is_floating_point() else each for each in graphs))
    model = packprop.extend(Potential(meet).double())
    with packprop.backpack(BatchGrad()):
        value(model, graphs, loss).backward()
    parameters = dict(model.named_parameters())
    for n in range(len(sizes)):
        alone = torch.autograd.grad(value(model, graphs.alone(n), by_hand) / len(sizes), [*parameters.values()])
        for parameter, expected in zip(parameters.values(), alone, strict=True):
            torch.testing.assert_close(parameter.grad_batch[n], expected)


@pytest.mark.parametrize("meet", [False, True])
@pytest.mark.parametrize("sizes", [[2, 4, 3], [2, 3, 2], [2, 4], [3, 3, 3]])
def test_graphs_whose_losses_are_declared(sizes: list[int], meet: bool) -> None:
    compared(sizes, each_declared, meet)


@pytest.mark.parametrize("meet", [False, True])
@pytest.mark.parametrize("sizes", [[2, 4, 3], [2, 3, 2], [2, 4]])
def test_graphs_of_unequal_sizes_by_hand_are_refused(sizes: list[int], meet: bool) -> None:
    with pytest.raises(PackpropError, match=r"the samples are mixed|nothing shows whose they are") as error:
        compared(sizes, by_hand, meet)
    assert "packprop.record(documents=...)" in error.value.instead


@pytest.mark.parametrize("meet", [False, True])
def test_graphs_of_equal_sizes_by_hand(meet: bool) -> None:
    compared([3, 3, 3], by_hand, meet)


def test_losses_of_different_sizes_name_the_declaration() -> None:
    with pytest.raises(PackpropError, match="different numbers of samples") as error:
        compared([2, 4, 3], undeclared, False)
    assert "packprop.record(documents=...):` around each loss" in error.value.instead
