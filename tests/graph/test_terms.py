"""Terms of the loss that no sample enters: what belongs to no sample, and what is still refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions
from packprop.applications.reports.coverage import coverage
from packprop.errors import PackpropError
from tests.references.per_sample import batch, network, rows_by_loop
from tests.references.refusals import check, refused
from tests.references.running import assert_near, assert_rows_of_terms
from tests.selection import one_in


def masked(m: nn.Module) -> Tensor:
    """Off-diagonal entries of a Gram matrix."""
    gram = m[0].weight @ m[0].weight.T
    off: Tensor = gram[~torch.eye(4, dtype=torch.bool)].square().sum()
    return off


def orthogonality(m: nn.Module) -> Tensor:
    return (m[0].weight.T @ m[0].weight - torch.eye(3).double()).square().sum()


def power_iteration(m: nn.Module) -> Tensor:
    with torch.no_grad():
        v = F.normalize(m[0].weight.T @ torch.ones(4).double(), dim=0)
        u = F.normalize(m[0].weight @ v, dim=0)
    return torch.dot(u, torch.mv(m[0].weight, v))


def with_buffer(m: nn.Module) -> Tensor:
    return ((m[0].weight - m[0].anchor) ** 2).sum() + (m[0].weight.T @ m[0].laplacian @ m[0].weight).trace()


FISHER, OLD = torch.rand(4, 3).double(), torch.randn(4, 3).double()


TERMS: dict[str, Callable[[Any], Tensor]] = {
    "squares": lambda m: sum((p**2).sum() for p in m.parameters()),
    "norm": lambda m: torch.linalg.norm(m[0].weight),
    "l1": lambda m: sum(p.abs().sum() for p in m.parameters()),
    "group lasso": lambda m: m[0].weight.norm(dim=1).sum(),
    "one vector": lambda m: nn.utils.parameters_to_vector(m.parameters()).norm(),
    "spectral": lambda m: torch.linalg.matrix_norm(m[0].weight, 2),
    "power iteration": power_iteration,
    "orthogonality": orthogonality,
    "off-diagonal": masked,
    "entropy": lambda m: -(m[2].weight.softmax(1) * m[2].weight.log_softmax(1)).sum(),
    "entropy with epsilon": lambda m: -(m[2].bias.softmax(0) * (m[2].bias.softmax(0) + 1e-8).log()).sum(),
    "divergence": lambda m: F.kl_div(m[2].weight.log_softmax(1), torch.full((3, 4), 0.25).double()),
    "prior": lambda m: -torch.distributions.Normal(0.0, 2.0).log_prob(m[0].bias).sum(),
    "buffers": with_buffer,
    "elastic": lambda m: (FISHER * (m[0].weight - OLD) ** 2).sum(),
    "in a checkpoint": lambda m: checkpoint(
        lambda weight: (FISHER * (weight - OLD) ** 2).sum(), m[0].weight, use_reentrant=False
    ),
    "towards zero": lambda m: F.mse_loss(m[0].weight, torch.zeros(4, 3).double()),
    "normalised": lambda m: F.normalize(m[0].weight).sum(0).square().sum(),
    "determinant": lambda m: torch.linalg.slogdet(m[0].weight.T @ m[0].weight)[1],
    "smooth l1": lambda m: F.smooth_l1_loss(m[2].weight ** 2, m[2].weight.detach()),
}


def penalised_network() -> Any:
    model = network()
    model[0].register_buffer("anchor", torch.randn(4, 3).double())
    model[0].register_buffer("laplacian", torch.eye(4).double() + 1)
    return packprop.extend(model)


def each_quantity(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name} {field}": getattr(p, field).clone()
        for name, p in model.named_parameters()
        for field in ("grad_batch", "diag_ggn_exact", "batch_l2", "kflr")
        if isinstance(getattr(p, field, None), Tensor)
    }


ASKED = (extensions.BatchGrad, extensions.DiagGGNExact, extensions.BatchL2Grad)


def check_term(
    model: Any, make: Callable[[Any, Tensor, Tensor], Tensor], term: Callable[[Any], Tensor]
) -> None:
    """Quantities are those of the data term, and the gradient is that of both."""
    x, y = batch(5)
    with packprop.backpack(*(each() for each in ASKED)):
        packprop.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    expected = each_quantity(model)
    model.zero_grad()
    with packprop.backpack(*(each() for each in ASKED)):
        make(model, x, y).backward()
    found = each_quantity(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_near(found[name], value, name)
    rows = rows_by_loop(model, x, y)
    penalties = torch.autograd.grad(term(model), list(model.parameters()), allow_unused=True)
    for (name, p), penalty in zip(model.named_parameters(), penalties, strict=True):
        assert_near(p.grad_batch, rows[name], name)
        assert_near(p.grad, rows[name].sum(0) + (0 if penalty is None else 0.1 * penalty), name)


@one_in(3)
@pytest.mark.parametrize("inside", [True, False], ids=["inside-record", "outside"])
@pytest.mark.parametrize("term", TERMS.values(), ids=TERMS.keys())
def test_a_term_that_no_sample_enters(term: Callable[[Any], Tensor], inside: bool) -> None:
    """It belongs to no sample: rows are those of the data term, and `.grad` has both."""

    def make(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y) if not inside else None
        if loss is not None:
            return loss + 0.1 * term(model)
        with packprop.record():
            return F.cross_entropy(model(x), y) + 0.1 * term(model)

    check_term(penalised_network(), make, term)


def decay(model: Any) -> Tensor:
    return sum((p**2).sum() for p in model.parameters())  # type: ignore[return-value]  # sum() may be 0


WAYS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "before": lambda m, x, y: 0.1 * decay(m) + packprop.extend(nn.CrossEntropyLoss())(m(x), y),
    "one by one": lambda m, x, y: sum(
        (0.1 * (p**2).sum() for p in m.parameters()), packprop.extend(nn.CrossEntropyLoss())(m(x), y)
    ),
    "stacked": lambda m, x, y: torch.stack(
        [packprop.extend(nn.CrossEntropyLoss())(m(x), y), 0.1 * decay(m)]
    ).sum(),
    "scaled": lambda m, x, y: 2 * (0.5 * packprop.extend(nn.CrossEntropyLoss())(m(x), y) + 0.05 * decay(m)),
    "weighted losses": lambda m, x, y: (
        packprop.extend(nn.CrossEntropyLoss(reduction="none"))(m(x), y) + 0.1 * decay(m)
    ).mean(),
}


@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS.keys())
def test_every_way_to_add_it(make: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    check_term(penalised_network(), make, decay)


def test_without_a_recorded_loss() -> None:
    """Scalars that are added tell the two apart; gradients need no recorded loss."""
    model = penalised_network()
    x, y = batch()
    with packprop.backpack(extensions.BatchGrad()):
        (F.cross_entropy(model(x), y) + 0.1 * decay(model)).backward()
    for name, rows in rows_by_loop(model, x, y).items():
        p = model.get_parameter(name)
        assert_near(p.grad_batch, rows, name)
        assert_near(p.grad, rows.sum(0) + 0.2 * p.detach(), name)


def share(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss in arithmetic of one's own, a number."""
    return -model(x).log_softmax(1).gather(1, y[:, None]).mean()


ADDED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "behind": lambda m, x, y: share(m, x, y) + 0.1 * decay(m),
    "before, scaled": lambda m, x, y: 2 * (0.05 * decay(m) - (-share(m, x, y) / 2)),
    "stacked": lambda m, x, y: torch.stack([share(m, x, y), 0.1 * decay(m)]).sum(),
    "with an axis": lambda m, x, y: (share(m, x, y)[None] + 0.1 * decay(m)).squeeze(),
    "elastic net": lambda m, x, y: share(m, x, y) + 0.1 * decay(m) + 0.0 * m[0].weight.abs().sum(),
}


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        (name, n) for name in ADDED for n in (1, 3) if (name, n) != ("with an axis", 1)
    ],  # its axis would be a row
)
def test_a_loss_in_arithmetic_of_ones_own(name: str, samples: int) -> None:
    """Behind the output of the model a sum of numbers is no function that parameters and samples meet in."""
    model, (x, y) = penalised_network(), batch(samples)
    for _ in range(2):
        model.zero_grad()
        with packprop.backpack(extensions.BatchGrad()):
            ADDED[name](model, x, y).backward()
        for key, rows in rows_by_loop(model, x, y).items():
            p = model.get_parameter(key)
            assert_near(p.grad_batch, rows, key)
            assert_near(p.grad, rows.sum(0) + 0.2 * p.detach(), key)


@pytest.mark.parametrize(
    "make",
    [
        lambda m, x, y: (share(m, x, y) + decay(m)).log(),
        lambda m, x, y: share(m, x, y) + (x @ m[0].weight.T).square().sum(),
        lambda m, x, y: (
            share(m, x, y) + (torch.stack([m[0].bias] * len(x)) - x.sum(1)[:, None]).square().mean()
        ),
        lambda m, x, y: share(m, x, y) * m[0].bias[:1].exp(),
        lambda m, x, y: (torch.stack([share(m, x, y), m(x).square().mean()]) * m[0].bias[:2].exp()).sum(),
        lambda m, x, y: torch.stack([share(m, x, y), decay(m)]).prod(),
        lambda m, x, y: torch.stack([row.sum() + m[0].bias[0] for row in m(x)]) @ x[:, 0],
        lambda m, x, y: sum(row.sum() + m[0].bias[0] for row in m(x)),
        lambda m, x, y: torch.cat([m(x).flatten(), m[0].weight.flatten()]).square().sum(),
    ],
)
@pytest.mark.parametrize("samples", [2, 3])
def test_what_is_no_such_sum(make: Callable[[Any, Tensor, Tensor], Tensor], samples: int) -> None:
    model, (x, y) = penalised_network(), batch(samples)
    said = "nothing tells of which samples"
    with pytest.raises(PackpropError, match=said), packprop.backpack(extensions.BatchGrad()):
        make(model, x, y).backward()


class Penalised(nn.Module):
    """A model whose forward pass returns its own penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), decay(self.body)


def test_a_penalty_that_the_model_computes() -> None:
    model = packprop.extend(Penalised())
    x, y = batch()
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        out, penalty = model(x)
        (packprop.extend(nn.CrossEntropyLoss())(out, y) + 0.1 * penalty).backward()
    for name, rows in rows_by_loop(model.body, x, y).items():
        p = model.body.get_parameter(name)
        assert_near(p.grad_batch, rows, name)
        assert_near(p.grad, rows.sum(0) + 0.2 * p.detach(), name)
    assert coverage(model, (x, None)).complete


def test_a_penalty_by_an_extended_loss_module() -> None:
    """A parameter that is handed to an extended loss stays a parameter."""

    def make(model: Any, x: Tensor, y: Tensor) -> Tensor:
        towards = packprop.extend(nn.MSELoss())
        first = towards(model[0].weight, torch.zeros(4, 3).double())
        second = towards(model[2].weight ** 2, torch.ones(3, 4).double())
        return packprop.extend(nn.CrossEntropyLoss())(model(x), y) + 0.1 * (first + second)

    def term(model: Any) -> Tensor:
        first = F.mse_loss(model[0].weight, torch.zeros(4, 3).double())
        return first + F.mse_loss(model[2].weight ** 2, torch.ones(3, 4).double())

    check_term(penalised_network(), make, term)


def test_two_roots() -> None:
    """A penalty that is a root of its own."""
    model = penalised_network()
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        torch.autograd.backward([loss, decay(model)])
    for name, rows in rows_by_loop(model, x, y).items():
        p = model.get_parameter(name)
        assert_near(p.grad_batch, rows, name)
        assert_near(p.grad, rows.sum(0) + 2 * p.detach(), name)


def test_chosen_inputs() -> None:
    model = penalised_network()
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y) + decay(model)
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward(inputs=[model[0].weight])
    rows = rows_by_loop(model, x, y)["0.weight"]
    assert_near(model[0].weight.grad_batch, rows, "rows")
    assert_near(model[0].weight.grad, rows.sum(0) + 2 * model[0].weight.detach(), "gradient")
    assert not hasattr(model[2].weight, "grad_batch")


def test_tied_and_computed_parameters() -> None:
    """First-order cotangents are read at uses, where the term does not come by."""
    torch.manual_seed(0)
    inner = nn.Linear(3, 3).double()
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(inner), nn.Tanh(), inner)
    packprop.extend(model)
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    with packprop.backpack(extensions.BatchGrad()):
        (loss + 0.1 * (inner.weight**2).sum() + 0.1 * decay(model)).backward()
    rows = rows_by_loop(model, x, y)
    term = (inner.weight**2).sum() + decay(model)
    parameters = dict(model.named_parameters())
    for (name, p), penalty in zip(
        parameters.items(), torch.autograd.grad(term, list(parameters.values())), strict=True
    ):
        assert_near(p.grad_batch, rows[name], name)
        assert_near(p.grad, rows[name].sum(0) + 0.1 * penalty, name)


def test_gradients_that_are_summed_from_rows() -> None:
    """Where the user's pass leaves a weight out, its gradient still has both terms."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2)
    model = packprop.extend(nn.Sequential(*layers).double())
    x, y = torch.randn(32, 1, 38, 38).double(), torch.randint(2, (32,))
    with packprop.backpack(extensions.BatchGrad()):
        (packprop.extend(nn.CrossEntropyLoss())(model(x), y) + decay(model)).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    with packprop.disable():
        expected = torch.autograd.grad(F.cross_entropy(model(x), y) + decay(model), list(model.parameters()))
    for (name, value), right in zip(found.items(), expected, strict=True):
        assert_near(value, right, name)


@pytest.mark.parametrize("memory", [None, "100MiB"])
def test_under_create_graph_and_a_budget(memory: Any) -> None:
    model = penalised_network()
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y) + decay(model)
    with packprop.backpack(extensions.BatchGrad(), memory=memory):
        loss.backward(create_graph=memory is None)
    for name, rows in rows_by_loop(model, x, y).items():
        assert_near(model.get_parameter(name).grad_batch.detach(), rows, name)


def samples_meet(m: Any, x: Tensor, y: Tensor) -> dict[str, Callable[[], Tensor]]:
    weight = m[0].weight
    return {
        "matmul": lambda: (x @ weight.T).square().mean(),
        "linear": lambda: F.linear(x, weight, m[0].bias).square().mean(),
        "a bias beside a frozen weight": lambda: F.linear(x, weight.detach(), m[0].bias).square().mean(),
        "broadcast": lambda: (x[:, None] * weight).square().mean(),
        "expanded": lambda: (weight[0].expand(len(x), 3) - x).square().mean(),
        "expanded, behind a function": lambda: (weight[0].expand(len(x), 3).exp() - x.exp()).square().mean(),
        "repeated": lambda: (weight[0].repeat(len(x), 1) * x).mean(),
        "looked up": lambda: m[2].weight[y].square().mean(),
        "embedded": lambda: F.embedding(y, m[2].weight).square().mean(),
        "sample by sample": lambda: sum(torch.mv(weight, each).square().sum() for each in x),  # type: ignore[dict-item,return-value]  # sum() may be 0
        "times the loss": lambda: F.cross_entropy(m(x), y) * weight.square().sum(),
        "concatenated": lambda: torch.cat([weight, x]).logsumexp(0).sum(),
        "distances": lambda: torch.cdist(weight, x).mean(),
        "linear regression": lambda: (x @ weight[0] - y).square().mean(),
        "times and again": lambda: (x @ weight.T).square().mean() * m[2].weight.norm(),
        "unknown": lambda: torch.einsum("ni,oi,no->", x, weight, m[0](x).detach()),
        "functions of samples, one by one": lambda: sum((weight[0] @ each.tanh() - 1) ** 2 for each in x),  # type: ignore[dict-item,return-value]  # sum() may be 0
        "scaled, one by one": lambda: sum((2 * weight[0] * each.tanh()).sum().square() for each in x),  # type: ignore[dict-item,return-value]  # sum() may be 0
        "selected, one by one": lambda: sum(weight[0][each.tanh() > 0].exp().sum() for each in x),  # type: ignore[dict-item,return-value]  # sum() may be 0
        "added to rows": lambda: m[2].weight.index_add(0, y, x.tanh() @ weight.T.detach()).square().sum(),
        "scattered": lambda: weight.scatter_add(0, y[:, None].expand(len(y), 3), x).square().sum(),
        "written over": lambda: weight.cumsum(0).slice_scatter(x[:2], 0, 1, 3).sin().prod(0).sum(),
    }


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded-loss", "own-loss"])
@pytest.mark.parametrize("name", samples_meet(network(), *batch()).keys())
def test_a_parameter_that_meets_samples_is_still_refused(name: str, recorded: bool) -> None:
    model = penalised_network()
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y) if recorded else F.cross_entropy(model(x), y)
    error = refused(loss + samples_meet(model, x, y)[name](), extensions.BatchGrad(), model=model)
    check(error, "bias" if name.startswith("a bias") else "weight")


def masked_in_place(slots: Tensor, x: Tensor, _: Tensor) -> Tensor:
    slots[:, 0].masked_fill_(x[:, :1] > 0, 0.0)
    return slots


WRITTEN: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_put": lambda slots, x, place: slots.transpose(0, 1).index_put((place[:1],), x[None]).transpose(0, 1),
    "index_copy": lambda slots, x, place: slots.index_copy(1, place[:1], x[:, None]),
    "scatter": lambda slots, x, place: slots.scatter(1, place[:, None, None].expand(5, 1, 3), x[:, None]),
    "through a view": masked_in_place,
}
"""Functions of tokens ``[5, 2, 3]``, data ``[5, 3]`` and a buffer of ones, whose nodes do not save the data."""


@pytest.mark.parametrize("name", WRITTEN)
def test_data_that_no_node_has_saved(name: str) -> None:
    """Outputs that seem to be made of parameters and constants alone are those of samples."""

    class Slots(nn.Module):
        place: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.token, self.body = nn.Parameter(torch.randn(1, 1, 3).double()), network()
            self.register_buffer("place", torch.ones(5, dtype=torch.int64))

        def forward(self, x: Tensor) -> Any:
            slots = WRITTEN[name](self.token.repeat(5, 2, 1), x, self.place)
            return self.body(x), self.body(slots).mean(1)

    model = packprop.extend(Slots())
    x, y = batch(5)
    out, other = model(x)
    terms = F.cross_entropy(out, y, reduction="none") + other.square().sum(1)
    zeros = torch.zeros_like(other)
    loss = F.cross_entropy(out, y, reduction="sum") + F.mse_loss(other, zeros, reduction="sum")
    assert_rows_of_terms(terms, loss, model.body.parameters())


class OwnDot(torch.autograd.Function):
    """An inner product with data."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return w @ x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0], None


@pytest.mark.parametrize("extended", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["loss in the model", "loss behind it"])
@pytest.mark.parametrize("name", ["dot", "own function"])
def test_numbers_of_parameters_and_data(name: str, inside: bool, extended: bool) -> None:
    """A loop over samples makes numbers, and the graph does not show whose they are."""

    class Numbers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.head = nn.Parameter(torch.randn(3).double()), network()

        def forward(self, x: Tensor) -> Any:
            product: Any = OwnDot.apply if name == "own function" else torch.dot
            numbers = torch.stack([product(self.w, row.tanh()) for row in x])
            return self.head(x * self.w), numbers.square().mean() if inside else numbers

    model = packprop.extend(Numbers()) if extended else Numbers()
    x, y = batch(5)
    out, other = model(x)
    term = other if inside else F.mse_loss(other, torch.ones(5).double())
    error = refused(F.cross_entropy(out, y) + term, extensions.BatchGrad(), model=model)
    check(error, "'w'" if extended else "")


@pytest.mark.parametrize("name", ["another call", "expanded", "within"])
def test_further_losses_of_the_same_samples(name: str) -> None:
    """Rows of a loss that PyTorch has a function for are those of samples, whatever it takes."""
    model = network()
    x, y = batch()
    taken = {
        "another call": lambda: model(2 * x),
        "expanded": lambda: model[0].weight[0].expand(len(x), 3),
        "within": lambda: model(x) + model[2].bias,
    }[name]()
    other = torch.ones_like(taken)
    terms = F.cross_entropy(model(x), y, reduction="none") / len(y)
    terms = terms + (taken - other).square().sum(1) / taken.numel()
    assert_rows_of_terms(terms, F.cross_entropy(model(x), y) + F.mse_loss(taken, other), model.parameters())


def test_memory_of_a_dead_input() -> None:
    """What comes to lie where an input lay is no data."""
    memory = np.random.default_rng(0).standard_normal((4, 3))

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.layer = nn.Parameter(torch.zeros(3).double()), nn.Linear(3, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.layer(x + self.shift))

    model = packprop.extend(Shifted())
    out = model(torch.from_numpy(memory))
    mask = torch.from_numpy(memory)
    loss = F.cross_entropy(out, torch.arange(4)) + (mask * model.layer.weight).square().sum()
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    assert_near(model.shift.grad_batch.sum(0), model.shift.grad, "rows")


AFTER: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "product": lambda m, loss: loss * decay(m),
    "product of terms": lambda m, loss: loss * decay(m) + decay(m),
    "root": lambda m, loss: (loss + decay(m)).sqrt(),
    "square": lambda m, loss: (loss + decay(m)) ** 2,
    "log": lambda m, loss: torch.log(loss + m[0].weight.norm()),
    "largest": lambda m, loss: torch.maximum(loss, decay(m)),
    "largest of both": lambda m, loss: torch.stack([loss, decay(m)]).max(),
    "learned weight": lambda m, loss: loss * m[2].bias[0].exp() + m[2].bias[0],
}


@pytest.mark.parametrize("inside", [True, False], ids=["inside-record", "outside"])
@pytest.mark.parametrize("make", AFTER.values(), ids=AFTER.keys())
def test_what_is_no_sum_is_refused(make: Callable[[Any, Tensor], Tensor], inside: bool) -> None:
    model = penalised_network()
    x, y = batch()
    if inside:
        with packprop.record():
            loss = make(model, F.cross_entropy(model(x), y))
    else:
        loss = make(model, packprop.extend(nn.CrossEntropyLoss())(model(x), y))
    check(refused(loss, extensions.BatchGrad(), model=model), "parameter")


class Shared(nn.Module):
    """A layer whose weight is a product of two parameters; it may return a term of that product as well."""

    weight: Tensor

    def __init__(self, term: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(shape).double()) for shape in ((3, 2), (2, 3)))
        self.term = term

    def forward(self, x: Tensor) -> Any:
        self.weight = self.a @ self.b
        out = F.linear(x, self.weight).tanh()
        return out if self.term is None else (out, self.term(self.weight, x))


OF_WEIGHT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squares": lambda weight, x: weight.square().sum(),
    "recorded": lambda weight, x: F.mse_loss(weight, torch.zeros(3, 3).double()),
    "scaled": lambda weight, x: 2 * F.mse_loss(weight, torch.zeros(3, 3).double()),
    "loss of classes": lambda weight, x: F.cross_entropy(weight, torch.arange(3)),
    "matmul": lambda weight, x: (x @ weight.T).square().mean(),
    "broadcast": lambda weight, x: (weight.sum(0) * x).square().mean(),
}


@pytest.mark.parametrize("samples", [3, 5])
@pytest.mark.parametrize("inside", [True, False], ids=["in the model", "behind it"])
@pytest.mark.parametrize("name", OF_WEIGHT)
def test_a_term_of_a_weight_that_a_layer_takes_as_well(name: str, inside: bool, samples: int) -> None:
    """In the model, packprop sees that the input and the weight meet, and takes rows of the whole loss."""
    model = packprop.extend(Shared(OF_WEIGHT[name]) if inside else Shared())
    x, y = batch(samples)
    out, term = model(x) if inside else (model(x), OF_WEIGHT[name](model.weight, x))
    loss = F.cross_entropy(out, y) + 0.1 * term
    if name == "loss of classes" or (name in ("matmul", "broadcast") and not inside):
        check(refused(loss, extensions.BatchGrad(), model=model), "outside of every known loss")
        return
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward(retain_graph=True)
    for p in model.parameters():
        (penalty,) = torch.autograd.grad(0.1 * term, p, retain_graph=True)
        of_samples = p.grad if name in ("matmul", "broadcast") else p.grad - penalty
        assert_near(of_samples, p.grad_batch.sum(0), "rows")


@pytest.mark.parametrize("name", ["product", "root"])
def test_what_is_no_sum_of_a_loss_and_such_a_term(name: str) -> None:
    model = packprop.extend(Shared())
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    term = model.weight.square().sum()
    value = loss * term if name == "product" else (loss + term).sqrt()
    check(refused(value, extensions.BatchGrad(), model=model), "loss")
