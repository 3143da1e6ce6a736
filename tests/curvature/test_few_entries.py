"""Second derivatives of normalisations over very few entries, one behind another, under losses with kinks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions, operators, products
from packprop.compat import hessianfree
from packprop.errors import PackpropError
from tests.cases.models.wrapping import Apply
from tests.selection import often, one_in

FEATURES = 6


def normalisations(kind: str, entries: int) -> list[nn.Module]:
    """A normalisation of six features over groups of ``entries``."""
    groups = FEATURES // entries
    if kind == "group":
        return [nn.GroupNorm(groups, FEATURES)]
    inner = nn.LayerNorm(entries) if kind == "layer" else nn.InstanceNorm1d(groups, affine=True)
    return [nn.Unflatten(1, (groups, entries)), inner, nn.Flatten()]


KINDS = [*product(("group", "layer", "instance"), (2, 3)), ("group", 1), ("layer", 1)]


def normalised(x: Tensor, axes: int, eps: float) -> Tensor:
    """The last axes normalised by elementary operations."""
    where = tuple(range(-axes, 0))
    centred = x - x.mean(where, keepdim=True)
    return centred / (centred.square().mean(where, keepdim=True) + eps).sqrt()


def by_hand(model: nn.Module, x: Tensor) -> Tensor:
    """The model, with normalisations made of elementary operations."""
    for layer in model.children():
        if isinstance(layer, nn.GroupNorm):
            grouped = x.reshape(len(x), layer.num_groups, -1)
            x = normalised(grouped, 1, layer.eps).reshape(x.shape) * layer.weight + layer.bias
        elif isinstance(layer, nn.LayerNorm):
            x = normalised(x, 1, layer.eps) * layer.weight + layer.bias
        elif isinstance(layer, nn.InstanceNorm1d):
            x = normalised(x, 1, layer.eps) * layer.weight[:, None] + layer.bias[:, None]
        else:
            x = layer(x)
    return x


def diagonals(value: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """The diagonal of the Hessian by two backward passes, entry by entry."""
    found = []
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(value, parameters, create_graph=True), strict=True
    ):
        entries = [
            torch.autograd.grad(each, parameter, retain_graph=True, materialize_grads=True)[0].flatten()[place]
            for place, each in enumerate(gradient.flatten())
        ]
        found.append(torch.stack(entries).view_as(parameter))
    return found


def chain(*kinds: tuple[str, int]) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Normalisations with linear layers between them, and a batch."""
    layers: list[nn.Module] = [nn.Linear(4, FEATURES)]
    for kind in kinds:
        layers += [*normalisations(*kind), nn.Linear(FEATURES, FEATURES)]
    model = nn.Sequential(*layers[:-1]).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model, torch.randn(3, 4).double(), torch.randn(3, FEATURES).double()


def dirty_memory() -> None:
    """Leave numbers in memory that is free: what reads memory that nobody has written finds them."""
    freed = [torch.full((size,), 1e9, dtype=torch.float64) for size in range(1, 65) for _ in range(8)]
    del freed


LOSSES: dict[str, Callable[[], nn.Module]] = {
    "l1": nn.L1Loss,
    "l1-sum": lambda: nn.L1Loss(reduction="sum"),
    "huber": nn.HuberLoss,
    "squared": nn.MSELoss,
}


CHAINS = [
    *((first, second, "l1") for first, second in product(KINDS, KINDS)),
    *((kind, kind, name) for kind, name in product(KINDS, LOSSES) if name != "l1"),
]


@one_in(5)
@often(lambda first, second, name: first == second)
@pytest.mark.parametrize(("first", "second", "name"), CHAINS, ids=str)
def test_chains_against_elementary_operations(
    first: tuple[str, int], second: tuple[str, int], name: str
) -> None:
    """Diagonals and products are those of a normalisation that is written out."""
    model, x, target = chain(first, second)
    parameters = list(model.parameters())
    known = diagonals(LOSSES[name]()(by_hand(model, x), target), parameters)
    packprop.extend(model)
    loss = packprop.extend(LOSSES[name]())
    dirty_memory()
    with packprop.backpack(extensions.DiagHessian(), extensions.BatchDiagHessian(), extensions.HMP()):
        loss(model(x), target).backward()
    for parameter, wanted in zip(parameters, known, strict=True):
        unit = torch.eye(parameter.numel()).double().view(-1, *parameter.shape)
        dirty_memory()
        block = parameter.hmp(unit).reshape(len(unit), -1).diagonal().view_as(parameter)
        for found in (parameter.diag_h, parameter.diag_h_batch.sum(0), block):
            scale = 1e-8 * max(1.0, wanted.abs().max().item())
            torch.testing.assert_close(found, wanted, rtol=1e-7, atol=scale)


@one_in(3)
@pytest.mark.parametrize("last", ["absolute", "norm", "normalised"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_products_with_kinks_behind_a_normalisation(kind: tuple[str, int], last: str) -> None:
    """Whole Hessians, under penalties whose second derivative PyTorch gives as zeros without data."""
    model, x, target = chain(kind)
    parameters = list(model.parameters())

    def value(outputs: Tensor) -> Tensor:
        if last == "absolute":
            return (outputs - target).abs().sum()
        if last == "norm":
            return torch.linalg.vector_norm(outputs - target, 1)
        return (F.normalize(outputs, p=1.0) * target).sum()

    def columns(made: Tensor) -> Tensor:
        flat = torch.cat([g.flatten() for g in torch.autograd.grad(made, parameters, create_graph=True)])
        rows = [
            torch.autograd.grad(each, parameters, retain_graph=True, materialize_grads=True) for each in flat
        ]
        return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])

    known = columns(value(by_hand(model, x)))
    dirty_memory()
    matrix = operators.hessian(lambda: value(model(x)), parameters)
    found = matrix @ torch.eye(len(known)).double()
    scale = 1e-8 * max(1.0, known.abs().max().item())
    torch.testing.assert_close(found, known, rtol=1e-7, atol=scale)
    ones = [torch.ones_like(parameter) for parameter in parameters]
    for found_parts in (
        products.hvp(value(model(x)), parameters, ones),
        hessianfree.hessian_vector_product(value(model(x)), parameters, ones),
    ):
        flat = torch.cat([part.flatten() for part in found_parts])
        torch.testing.assert_close(flat, known.sum(1), rtol=1e-7, atol=10 * scale)


def test_group_norm_with_a_bias_alone_is_refused() -> None:
    """As every other normalisation: PyTorch's second derivative leaves out the bias, or raises."""
    model = packprop.extend(nn.Linear(4, FEATURES).double())
    bias = nn.Parameter(torch.randn(FEATURES).double())
    loss = F.group_norm(model(torch.randn(3, 4).double()), 2, None, bias).square().sum()
    with pytest.raises(PackpropError, match="bias and no weight"):
        products.hvp(loss, [bias], [torch.ones_like(bias)])


def test_zeros_without_data_confuse_pytorch() -> None:
    """If this fails, PyTorch has been mended, and ``WITHOUT_DATA`` can go."""
    x = torch.randn(2, FEATURES, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(FEATURES, dtype=torch.float64, requires_grad=True)
    made = F.layer_norm(x, (FEATURES,), weight, torch.zeros(FEATURES, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(made.square().sum(), weight, create_graph=True)
    node = torch.sgn(gradient)
    with pytest.raises(RuntimeError, match="ZeroTensors"):
        torch.autograd.grad(node.sum(), x)


@pytest.mark.parametrize("extents", [(3, 3, 3), (2, 2, 2), (3, 4, 4)])
def test_a_group_norm_of_equal_extents(extents: tuple[int, int, int]) -> None:
    """PyTorch's second derivative of it for many columns at once is wrong there, without an error."""
    samples, positions, channels = extents
    torch.manual_seed(0)
    model = Apply(
        lambda m, x: m.last(m.norm(m.table(x).permute(0, 2, 1))),
        table=nn.Embedding(5, channels),
        norm=nn.GroupNorm(1, channels),
        last=nn.Conv1d(channels, 2, 1),
    ).double()
    x, y = torch.randint(5, (samples, positions)), torch.randn(samples, 2, positions).double()
    packprop.extend(model)
    loss = packprop.extend(nn.MSELoss())
    with packprop.backpack(extensions.DiagHessian()):
        loss(model(x), y).backward()
    for name, parameter in model.named_parameters():
        (slope,) = torch.autograd.grad(loss(model(x), y), parameter, create_graph=True)
        rows = [torch.autograd.grad(g, parameter, retain_graph=True)[0].flatten() for g in slope.flatten()]
        torch.testing.assert_close(parameter.diag_h.flatten(), torch.stack(rows).diagonal(), msg=name)
