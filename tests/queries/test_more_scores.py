"""Sums over groups, influence of samples on themselves, and scores under an optimizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import packprop
from packprop import Refinement, kronecker
from packprop.errors import BadInput
from packprop.extensions import EKFAC, KFLR, BatchGrad, DiagGGNExact, Projected
from tests.queries.small import LOSS, SIZE, apart, by_row, gradients, influence, written
from tests.references.running import assert_near
from tests.selection import one_in

GROUPS = torch.tensor([0, 2, 2, 0, 1, 1, 1, 4, 0])


@one_in(2)
@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize("memory", ["500MiB", 20_000])
def test_groups_are_sums_of_products(tmp_path: Path, refine: bool, memory: Any) -> None:
    problem, _ = written(tmp_path / "store")
    data = problem[1], problem[2]
    options: dict[str, Any] = {"memory": memory} if not refine else {"memory": None}
    if refine:
        refinement = Refinement(data, progress=False, checkpoint=tmp_path / "work")
        options |= {"refine": refinement, "damping": 0.1}
    found = influence(tmp_path / "store", problem, k=SIZE, groups=GROUPS, **options)
    assert found.groups is not None
    assert found.groups.shape == (3, 5)
    expected = torch.zeros(3, 5, dtype=torch.float64).index_add_(1, GROUPS, by_row(found))
    assert_near(found.groups, expected, "sums", 1e-9)
    assert found.to_dict()["groups"] == found.groups.tolist()
    if refine:
        again = influence(tmp_path / "store", problem, k=SIZE, groups=GROUPS, **options)
        assert again.groups is not None
        assert torch.equal(again.groups, found.groups)


@pytest.mark.parametrize("wrong", [[0, 1], torch.zeros(SIZE), [True] * SIZE, torch.full((SIZE,), -1)], ids=str)
def test_groups_that_do_not_fit(tmp_path: Path, wrong: Any) -> None:
    problem, _ = written(tmp_path / "store")
    with pytest.raises(BadInput, match="the number of its group"):
        influence(tmp_path / "store", problem, groups=wrong)


@one_in(2)
@pytest.mark.parametrize("extension", [None, EKFAC(fisher="exact"), DiagGGNExact()], ids=str)
@pytest.mark.parametrize("memory", ["500MiB", 2_000])
def test_samples_on_themselves(tmp_path: Path, extension: Any, memory: Any) -> None:
    asked = [] if extension is None else [extension]
    problem, result = written(tmp_path / "store", *asked)
    rows = gradients(problem)
    options = {} if extension is None else {"curvature": apart(result[extension]), "damping": 0.1}
    found = packprop.self_influence(tmp_path / "store", memory=memory, **options)
    expected = torch.zeros(SIZE, dtype=torch.float64)
    for name, each in rows.items():
        turned = each
        if extension is not None:
            block = result[extension][name]
            dense = block.flatten().diag() if isinstance(block, torch.Tensor) else kronecker.dense(block)
            turned = torch.linalg.solve(dense + 0.1 * torch.eye(len(dense)).double(), each.mT).mT
        expected += (each * turned).sum(1)
    assert_near(found, expected, "products", 1e-6)


def test_refusals_of_samples_on_themselves(tmp_path: Path) -> None:
    _, result = written(tmp_path / "store", KFLR())
    with pytest.raises(BadInput, match="compute EKFAC"):
        packprop.self_influence(tmp_path / "store", curvature=result, damping=0.1)
    with pytest.raises(BadInput, match="no matrix to add it to"):
        packprop.self_influence(tmp_path / "store", damping=0.1)
    with pytest.raises(BadInput, match="give at least"):
        packprop.self_influence(tmp_path / "store", memory=100)
    written(tmp_path / "projected", stored=Projected(BatchGrad(), 5))
    assert packprop.self_influence(tmp_path / "projected").shape == (SIZE,)
    with pytest.raises(BadInput, match="not between their projections"):
        packprop.self_influence(tmp_path / "projected", curvature=result, damping=0.1)


def test_complex_gradients_are_refused(tmp_path: Path) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(torch.complex128) @ self.weight.mT).real

    model, data = Complex(), (torch.randn(SIZE, 4).double(), torch.randint(3, (SIZE,)))
    folder = tmp_path / "store"
    packprop.compute(model, LOSS, data, [BatchGrad()], store=folder, progress=False)
    calls: list[Any] = [
        lambda: packprop.self_influence(folder),
        lambda: packprop.influence(folder, model, LOSS, data),
        lambda: packprop.influence(data, model, LOSS, data),
        lambda: packprop.token_influence(model, LOSS, data, data),
    ]
    for call in calls:
        with pytest.raises(BadInput, match="inner products of complex rows have no order"):
            call()


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.0, 0.9)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.0, 0.9), weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.0, 0.9), amsgrad=True, weight_decay=0.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_the_gradient_times_the_inverse(name: str) -> None:
    """What the last step did to the parameters, without momentum and decay, is ``D^-1 g`` afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(6, 3).double(), torch.randint(2, (6,))
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(3):
        before = copy.deepcopy(model)
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
    found = packprop.optimizer_curvature(model, optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 5)  # it wraps the step
    assert torch.equal(packprop.optimizer_curvature(model, optimizer)["0.weight"], found["0.weight"])
    group = optimizer.param_groups[0]
    for (key, after), was in zip(model.named_parameters(), before.parameters(), strict=True):
        assert after.grad is not None
        step = was.detach() - after.detach()
        decay = group.get("weight_decay", 0)
        gradient = after.grad + (decay * was.detach() if name == "sgd" else 0)
        if name == "adamw":
            step = step - group["lr"] * decay * was.detach()
        assert_near(gradient / found[key], step, key, 1e-6)


def test_a_subclass_that_keeps_the_step() -> None:
    class Named(torch.optim.RMSprop):
        """It is made before any of its parent, whose step PyTorch then wraps once more."""

    model = nn.Linear(2, 2)
    for kind in (Named, torch.optim.RMSprop):
        optimizer = kind(model.parameters(), lr=0.5)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert packprop.optimizer_curvature(model, optimizer).keys() == {"weight", "bias"}


def test_products_foretell_a_step_of_adam(tmp_path: Path) -> None:
    """A step on one sample changes the loss of a query by the product, where rates are small."""
    problem, _ = written(tmp_path / "store")
    model, x, y = problem
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, betas=(0.0, 0.9), weight_decay=0.0)
    for _ in range(2):  # with a rate of nearly nothing: the model stays what the store knows
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
    curvature = packprop.optimizer_curvature(model, optimizer)
    found = by_row(influence(tmp_path / "store", problem, k=SIZE, curvature=curvature, damping=0))
    rows = gradients(problem)
    divisors = torch.cat([curvature[name].flatten() for name in rows])
    flat = torch.cat([*rows.values()], 1)
    assert_near(found, flat[2:5] / divisors @ flat.mT, "products", 1e-6)


def test_refusals_of_optimizers() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(BadInput, match="has made no step with it"):
        packprop.optimizer_curvature(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(BadInput, match="LBFGS"):
        packprop.optimizer_curvature(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(BadInput, match="Adam"):
        packprop.optimizer_curvature(model, "adam")  # type: ignore[arg-type]  # it is refused

    class Signed(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            pass

    with pytest.raises(BadInput, match="Signed"):
        packprop.optimizer_curvature(model, Signed(model.parameters(), lr=0.1))
    with pytest.raises(BadInput, match="parameter 'bias'"):
        packprop.optimizer_curvature(model, torch.optim.SGD([model.weight], lr=0.1))
    with pytest.raises(BadInput, match="maximize"):
        packprop.optimizer_curvature(model, torch.optim.SGD(model.parameters(), lr=0.1, maximize=True))


def test_optimizers_that_have_made_no_step() -> None:
    """Their state may be there."""
    model = nn.Linear(2, 2)
    with pytest.raises(BadInput, match="has made no step with it"):
        packprop.optimizer_curvature(model, torch.optim.Adagrad(model.parameters()))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint64], ids=str)
def test_groups_of_every_whole_number(tmp_path: Path, dtype: torch.dtype) -> None:
    problem, _ = written(tmp_path / "store")
    found = influence(tmp_path / "store", problem, groups=GROUPS.to(dtype))
    assert found.groups is not None
    assert found.groups.shape == (3, 5)
