"""Averages over samples, layer by layer: HBP and KFRA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import BadInput, PackpropError
from tests.cases import BY_NAME, ONE_OF_EACH, Case
from tests.compat.module_extensions import Gate
from tests.curvature.dense import NUMERATORS
from tests.references.running import assert_near, backward, results
from tests.selection import one_in

LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "dense": lambda: [nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)],
    "images": lambda: [
        *(nn.Conv2d(1, 2, 2, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.BatchNorm2d(2), nn.Flatten()),
        nn.Linear(8, 3),
    ],
    "scaled": lambda: [nn.Linear(4, 5), nn.Sigmoid(), Gate(5), nn.Tanh(), nn.Linear(5, 3)],
}
SHAPES = {"dense": (4,), "images": (1, 4, 4), "scaled": (4,)}


def averaged(layers: list[nn.Module], x: Tensor, y: Tensor, curvature: str, jacobians: bool) -> dict[int, Any]:
    """Factors of every layer with a weight: one sample and one layer at a time, by Jacobians."""
    values = [x]
    for layer in layers:
        values.append(layer(values[-1]))
    loss = nn.functional.cross_entropy(values[-1], y)
    samples = range(len(x))

    def term(f: Tensor, n: int) -> Tensor:
        return nn.functional.cross_entropy(f[None], y[n : n + 1]) / len(x)

    matrix = sum(torch.autograd.functional.hessian(lambda f, n=n: term(f, n), values[-1][n]) for n in samples)
    factors: dict[int, Any] = {}
    for place in reversed(range(len(layers))):
        layer, before, after = layers[place], values[place], values[place + 1]
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            outputs = layer.weight.shape[0]
            spread = torch.eye(outputs, dtype=x.dtype).repeat_interleave(after[0].numel() // outputs, 1)
            columns = before if before.dim() == 2 else nn.functional.unfold(before, 2, padding=1).mT
            columns = columns.reshape(len(x), -1, columns.shape[-1])
            second = torch.einsum("nsi,nsj->ij", columns, columns) / len(x)
            mean = columns.sum((0, 1)) / len(x)
            factors[place] = spread @ matrix @ spread.T, torch.outer(mean, mean) if jacobians else second
        elif isinstance(layer, Gate):
            factors[place] = (matrix * (before.T @ before) / len(x),)
        slopes = [
            torch.autograd.functional.jacobian(lambda z, layer=layer: layer(z[None])[0], before[n]).reshape(
                after[n].numel(), before[n].numel()
            )
            for n in samples
        ]
        diagonal = isinstance(layer, (nn.Sigmoid, nn.Tanh, nn.ReLU))
        if jacobians and diagonal:
            mean = torch.stack(slopes).mean(0)
            matrix = mean.T @ matrix @ mean
        else:
            matrix = sum(slope.T @ matrix @ slope for slope in slopes) / len(x)
        if curvature != "ggn" and isinstance(layer, (nn.Sigmoid, nn.Tanh)):
            (arriving,) = torch.autograd.grad(loss, after, retain_graph=True)
            entry = before.detach().requires_grad_()
            (first,) = torch.autograd.grad(layer(entry).sum(), entry, create_graph=True)
            r = (torch.autograd.grad(first.sum(), entry)[0] * arriving).sum(0).flatten()
            r = {"hessian": r, "pch-abs": r.abs(), "pch-clip": r.clamp(min=0)}[curvature]
            matrix = matrix + r.diag()
    return factors


NO_CHAIN = (
    *("logaddexp", "solve", "vision-transformer-library", "rnn", "rnn-relu", "gru", "lstm"),
    *("rnn-cell-loop", "rnn-relu-cell-loop", "lstm-cell-loop", "gru-cell-loop"),
    *("weight-norm", "tied-transpose", "module-twice"),
    *("experts-grouped", "two-losses-one-output"),
    "distillation",
    "divide",  # by 2 + w, which is not affine in w; a parameter that is divided is, see NUMERATORS
)


@one_in(3)
@pytest.mark.parametrize("jacobians", [False, True], ids=["products averaged", "Jacobians averaged"])
@pytest.mark.parametrize("curvature", ["ggn", "hessian", "pch-abs", "pch-clip"])
@pytest.mark.parametrize("name", LAYERS)
def test_averages_layer_by_layer(name: str, curvature: Any, jacobians: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*LAYERS[name]()).double().eval()
    x, y = torch.randn(5, *SHAPES[name], dtype=torch.float64), torch.tensor([0, 2, 1, 1, 0])
    known = averaged(list(model), x, y, curvature, jacobians)
    model[3].requires_grad_(False)
    packprop.extend(model)
    strategy = "E(J^T) E(H) E(J)" if jacobians else "E[J^T E(H) J]"
    asked = [extensions.HBP(curvature, "sum", "average", strategy, savefield="averaged"), extensions.KFRA()]
    with packprop.backpack(*asked):
        packprop.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    assert len(known) > 1
    for place, factors in known.items():
        found = model[place].weight.averaged
        for factor, expected in zip(found, factors, strict=True):
            assert_near(factor, expected, f"layer {place}")
        if hasattr(model[place], "bias"):
            assert_near(model[place].bias.averaged[0], factors[0], f"bias of layer {place}")
        if curvature == "ggn" and not jacobians:
            assert all(map(torch.equal, model[place].weight.kfra, found))


AVERAGED = [
    case
    for case in [*(BY_NAME[name] for name in ("linear-deep", "conv2d-deep", *NUMERATORS)), *ONE_OF_EACH]
    if case.name not in NO_CHAIN and not case.refuses_curvature and case.order == 2
]


@one_in(3)
@pytest.mark.covers("KFRA", "HBP")
@pytest.mark.parametrize("case", AVERAGED, ids=lambda case: case.name)
def test_one_sample_leaves_nothing_to_average(case: Case) -> None:
    """KFLR is compared with the oracle, the averages above with Jacobians."""
    problem = case.problem(1)
    asked = [
        *(extensions.KFRA(), extensions.KFLR(), extensions.HBP()),
        extensions.HBP("ggn", "exact", "sqrt", savefield="root"),
    ]
    backward(problem, *asked, record=case.record)
    for name, exact in results(problem, "kflr").items():
        for attribute in ("kfra", "hbp", "root"):
            for factor, expected in zip(results(problem, attribute)[name], exact, strict=True):
                assert_near(factor, expected, f"{attribute} of {name}")


@one_in(2)
@pytest.mark.parametrize(
    ("name", "where"),
    [
        *(
            (name, "not by an affine")
            for name in NO_CHAIN
            if name not in ("distillation", "two-losses-one-output")
        ),
        ("bce-of-softmax", "SoftmaxBackward0"),
        ("distillation", "2 losses"),
        ("resnet", "AddBackward0"),
        ("two-losses-one-output", "2 losses"),
        ("frozen-norm-inside", "NativeLayerNormBackward0"),
    ],
)
def test_averages_are_refused_where_paths_meet(name: str, where: str) -> None:
    problem = BY_NAME[name].problem(3)
    with pytest.raises(PackpropError, match="KFLR") as caught:
        backward(problem, extensions.KFRA())
    assert where in str(caught.value)


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(BadInput, match="'average'"):
        extensions.HBP("hessian", "exact", "sqrt")
    with pytest.raises(BadInput, match="'ggn', 'hessian', 'pch-abs', 'pch-clip'"):
        extensions.HBP("pch")


def test_derivatives_of_averages() -> None:
    """The curvature of a nonlinearity holds the gradient behind it, which depends on the parameters as well."""
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 3)
    model, loss = packprop.extend(nn.Sequential(*layers).double()), packprop.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])

    def value(create_graph: bool = False) -> Tensor:
        with packprop.backpack(extensions.HBP("hessian", "exact", "average")):
            loss(model(x), y).backward(create_graph=create_graph)
        B: Tensor = model[0].weight.hbp[0]
        return B.square().sum()

    weight = model[4].weight
    (slope,) = torch.autograd.grad(value(create_graph=True), weight)
    direction, step = torch.randn_like(weight), 1e-5
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * step * direction
        sides.append(value())
        with torch.no_grad():
            weight -= sign * step * direction
    assert_near((slope * direction).sum(), (sides[0] - sides[1]) / (2 * step), "slope", tolerance=1e-6)
