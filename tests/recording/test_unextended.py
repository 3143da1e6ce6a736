"""Models and losses that nobody has extended, in whole or in part: the graph holds what a pass needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.recording.marks import EXTENDED
from packprop.engine.recording.switch import is_extended
from tests.references.oracle import Oracle, Problem
from tests.references.per_sample import batch, network
from tests.references.refusals import check, each_row, refused, untouched
from tests.references.running import (
    FIRST_ORDER,
    ROWS,
    SECOND_ORDER,
    Row,
    as_tensors,
    assert_near,
    assert_rows_of_terms,
    check_exact,
    check_sampled,
    generator,
    make_all,
    results,
    rows_of_terms,
)
from tests.selection import one_in

Forward = Callable[[nn.Module, Tensor], Tensor]


@contextmanager
def extending(model: nn.Module) -> Iterator[None]:
    yield
    packprop.extend(model)


def all_of_it(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


def part_by_part(model: nn.Module, x: Tensor) -> Tensor:
    first, middle, last = model  # type: ignore[misc]  # a Sequential is iterable
    return F.linear(middle(first(x)), last.weight, last.bias)


def half_disabled(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model[0](x)  # type: ignore[index]  # a Sequential has parts
    with packprop.disable():
        out: Tensor = model[2](model[1](hidden))  # type: ignore[index]  # as above
    return out


PASSES: dict[str, tuple[bool, Callable[[nn.Module], AbstractContextManager[Any]], Forward]] = {
    "never-extended": (False, lambda _: nullcontext(), all_of_it),
    "extended-after": (False, extending, all_of_it),
    "disabled": (True, lambda _: packprop.disable(), all_of_it),
    "disabled-in-part": (True, lambda _: nullcontext(), half_disabled),
    "outside-of-its-call": (True, lambda _: nullcontext(), part_by_part),
    "outside-and-never-extended": (False, lambda _: nullcontext(), part_by_part),
}
LOSSES: dict[str, Callable[[], Callable[[Tensor, Tensor], Tensor]]] = {
    "extended": lambda: packprop.extend(nn.CrossEntropyLoss()),
    "module": nn.CrossEntropyLoss,
    "function": lambda: F.cross_entropy,
}


def prepared(way: str, loss: str) -> tuple[Problem, Tensor]:
    """A problem, and the value of its loss after one of the forward passes."""
    extended, around, forward = PASSES[way]
    model, (x, y) = network(), batch()
    problem = Problem.of_batch(model, nn.CrossEntropyLoss(), x, y, len(x))
    if extended:
        packprop.extend(model)
    with around(model):
        out = forward(model, x)
    return problem, LOSSES[loss]()(out, y)


@one_in(3)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("way", PASSES)
@pytest.mark.filterwarnings("error")
def test_every_extension(way: str, loss: str) -> None:
    """All values, beside loops over single samples."""
    problem, value = prepared(way, loss)
    with packprop.backpack(*make_all(ROWS)):
        value.backward()
    oracle = Oracle(problem)
    for row in ROWS:
        if not row.sampled:
            check_exact(problem, oracle, row)
    check_sampled(problem, oracle)


@one_in(2)
@each_row
@pytest.mark.filterwarnings("error")
def test_each_extension_alone(row: Row) -> None:
    """Where nothing at all was extended; draws are those of a model that is."""
    problem, value = prepared("never-extended", "function")
    with packprop.backpack(row(generator())):
        value.backward()
    found = {name: as_tensors(each) for name, each in results(problem, row.attribute).items()}
    if not row.sampled:
        check_exact(problem, Oracle(problem), row)
    packprop.extend(problem.model)
    loss = packprop.extend(nn.CrossEntropyLoss())
    with packprop.backpack(row(generator())):
        loss(problem.model(problem.inputs), problem.targets).backward()
    for name, each in results(problem, row.attribute).items():
        for mine, other in zip(found[name], as_tensors(each), strict=True):
            assert_near(mine, other, name)


def test_nothing_is_left_on_a_model_that_was_never_extended() -> None:
    problem, value = prepared("never-extended", "function")
    before = [set(vars(part)) for part in problem.model.modules()]
    with packprop.backpack(extensions.BatchGrad()):
        value.backward()
    assert before == [set(vars(part)) for part in problem.model.modules()]
    assert not any(is_extended(part) or part._forward_hooks for part in problem.model.modules())
    assert problem.model not in EXTENDED


def sums_of(model: nn.Module, out: Tensor) -> Tensor:
    """Terms of a loss that is nobody's."""
    return out.square().exp().sum(1)


@pytest.mark.parametrize("row", FIRST_ORDER, ids=lambda row: row.name)
def test_gradients_need_no_loss_that_is_known(row: Row) -> None:
    """Arithmetic on an extended model's output is a loss, too."""
    model = packprop.extend(network())
    x, _ = batch()
    problem = Problem(
        model,
        None,
        x,
        None,
        len(x),
        total=lambda: sums_of(model, model(x)).mean(),
        output=lambda n: model(x[n : n + 1]),
        term=lambda f, n: sums_of(model, f).sum() / len(x),
    )
    value = problem.total()
    with packprop.backpack(row()):
        value.backward()
    check_exact(problem, Oracle(problem), row)


@pytest.mark.parametrize("row", SECOND_ORDER, ids=lambda row: row.name)
def test_curvature_needs_a_loss_that_is_known(row: Row) -> None:
    model = packprop.extend(network().float())
    x, _ = batch()
    loss = sums_of(model, model(x.float())).mean()
    check(refused(loss, row(), model=model), "loss", "extend", "record()")


def test_a_pass_to_inputs_that_no_extended_parameter_is_among() -> None:
    """Values for what was asked for, extended or not; nothing of the other model is touched."""
    model, other = packprop.extend(network()), network()
    x, y = batch()
    out = model(x) + other(x)
    rows = rows_of_terms(F.cross_entropy(out, y, reduction="none") / len(x), other.parameters())
    loss = F.cross_entropy(out, y)
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward(inputs=list(other.parameters()))
    assert all(p.grad is None and not vars(p) for p in model.parameters())
    for parameter, expected in zip(other.parameters(), rows, strict=True):
        assert_near(parameter.grad_batch, expected, "rows")
        assert_near(parameter.grad, expected.sum(0), "gradient")


@pytest.mark.filterwarnings("error")
def test_an_extended_model_that_is_held_constant() -> None:
    """A pass through it to a leaf that is no parameter, as in the other half of an adversarial step."""
    model = packprop.extend(network().requires_grad_(False))
    x, y = batch()
    shift = torch.zeros(3, requires_grad=True, dtype=torch.float64)
    terms = F.cross_entropy(model(x + shift), y, reduction="none") / len(x)
    assert_rows_of_terms(terms, F.cross_entropy(model(x + shift), y), [shift])
    assert_near(shift.grad, shift.grad_batch.sum(0), "gradient")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("extended", [True, False])
def test_a_penalty_alone(extended: bool) -> None:
    """Its backward pass is plain, and leaves what the data's pass has computed."""
    model = network()
    x, y = batch()
    rows = rows_of_terms(F.cross_entropy(model(x), y, reduction="none") / len(x), model.parameters())
    with packprop.backpack(extensions.BatchGrad()):
        if extended:
            packprop.extend(model)
        F.cross_entropy(model(x), y).backward()
        sum((p**2).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]  # sum() may be 0
    for p, expected in zip(model.parameters(), rows, strict=True):
        assert_near(p.grad_batch, expected, "rows")
        torch.testing.assert_close(p.grad, expected.sum(0) + 2 * p.detach())


def test_a_penalty_alone_whose_constants_may_hold_samples() -> None:
    """The graph does not tell them from samples."""
    model = packprop.extend(network())
    x, _ = batch()
    penalty = (model[0].weight @ x.T).square().sum()
    check(refused(penalty, extensions.BatchGrad(), model=model), "0.weight")


@pytest.mark.filterwarnings("error")
def test_a_frozen_model_whose_inputs_are_differentiated() -> None:
    model = packprop.extend(network().requires_grad_(False))
    x, y = batch()
    x.requires_grad_(True)
    with packprop.backpack(extensions.DiagGGNExact()):
        packprop.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    (expected,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    torch.testing.assert_close(x.grad, expected)


def ensemble(model: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Stacked parameters of three members, and what they make of a batch together."""
    members = [network() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(members)  # type: ignore[arg-type]  # any sequence does

    def call(own: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(model, (own, buffers), (x,))
        return out

    return parameters, torch.vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)


@pytest.mark.parametrize("extended", [True, False])
def test_an_ensemble_by_vmap(extended: bool) -> None:
    """The graph is that of one function of all members: rows ``[n, members, *p]``."""
    x, y = batch()
    parameters, outs = ensemble(packprop.extend(network()) if extended else network(), x)
    terms = torch.stack([F.cross_entropy(out, y, reduction="none") for out in outs]).sum(0) / len(x)
    root = torch.stack([F.cross_entropy(out, y) for out in outs]).sum()
    assert_rows_of_terms(terms, root, parameters.values())


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda model, x: torch.vmap(model)(x),
    "vmap of a call": lambda model, x: torch.vmap(
        lambda row: torch.func.functional_call(model, dict(model.named_parameters()), (row,))
    )(x),
    "grad of the sum": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "vmap of grad": lambda model, x: torch.vmap(torch.func.grad(lambda row: model(row).sum()))(x),
    "vmap of jacrev": lambda model, x: torch.vmap(torch.func.jacrev(model))(x).flatten(1),
    "vmap of hessian": lambda model, x: torch.vmap(torch.func.hessian(lambda row: model(row).sum()))(x).flatten(
        1
    ),
}
"""What models are called through in losses with derivatives; rows are of samples."""


@one_in(3)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("extended", [True, False])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_model_inside_a_transform(name: str, extended: bool, inside: bool) -> None:
    """Transforms leave plain nodes; they may be in the loss, or in the forward pass of the model itself."""

    class Transformed(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return TRANSFORMS[name](self.model, x)

    model, (x, _) = network(), batch()
    model[1], model[2] = nn.Tanh(), nn.Linear(4, 3, bias=False).double()
    made: nn.Module = Transformed(model)
    if extended:
        packprop.extend(made if inside else model)
    rows = made(x)
    loss = F.mse_loss(rows, torch.ones_like(rows))
    terms = F.mse_loss(rows, torch.ones_like(rows), reduction="none") / rows.numel()
    reached = [
        p
        for p in model.parameters()
        if torch.autograd.grad(loss, p, retain_graph=True, allow_unused=True)[0] is not None
    ]
    assert_rows_of_terms(terms, loss, reached)


@pytest.mark.filterwarnings("error")
def test_a_teacher_inside_a_transform() -> None:
    """What needs no gradient may run wherever it likes."""
    teacher, model = packprop.extend(network()), packprop.extend(network())
    x, _ = batch()
    with torch.no_grad():
        targets = torch.vmap(teacher)(x)
    slopes = torch.func.grad(lambda x: teacher(x).sum())(x)
    targets = targets + slopes.detach().mean()
    terms = F.mse_loss(model(x), targets, reduction="none") / targets.numel()
    assert_rows_of_terms(terms, packprop.extend(nn.MSELoss())(model(x), targets), model.parameters())


@pytest.mark.parametrize("extended", [True, False])
def test_derivatives_of_derivatives(extended: bool) -> None:
    """A loss of what ``torch.autograd.grad`` made with ``create_graph=True``, as in score matching."""
    model = network()
    model[1] = nn.Tanh()
    if extended:
        packprop.extend(model)
    x, _ = batch()
    x.requires_grad_(True)
    (slopes,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    loss = F.mse_loss(slopes, torch.ones_like(slopes), reduction="sum")
    assert_rows_of_terms((slopes - 1).square(), loss, model.parameters())


def test_a_backward_pass_outside_the_context_saves_nothing() -> None:
    model = packprop.extend(network())
    verify = untouched(model)
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    with (
        pytest.warns(packprop.PackpropWarning, match="No backward pass was seen"),
        packprop.backpack(extensions.BatchGrad()),
    ):
        pass
    loss.backward()
    verify()


@one_in(3)
@pytest.mark.parametrize(
    "penalty",
    [
        pytest.param(lambda m: sum(p.square().sum() for p in m.parameters()), id="all"),
        pytest.param(lambda m: m[0].weight.norm(), id="one"),
    ],
)
@pytest.mark.parametrize("inside", [True, False], ids=["inside-record", "outside"])
@each_row
def test_weight_decay_in_the_loss(row: Row, penalty: Any, inside: bool) -> None:
    """A term that belongs to no sample: the quantity is that of the data, and the gradient has both terms."""
    problem, _ = prepared("never-extended", "module")
    model = packprop.extend(problem.model)
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    with packprop.record() if inside else nullcontext():
        loss = loss_function(model(problem.inputs), problem.targets) + 0.1 * penalty(model)
    parameters = list(model.parameters())
    whole = torch.autograd.grad(loss, parameters, retain_graph=True)
    with packprop.backpack(row(generator())):
        loss.backward()
    for p, expected in zip(parameters, whole, strict=True):
        assert hasattr(p, row.attribute)
        torch.testing.assert_close(p.grad, expected)
    if not row.sampled:
        check_exact(problem, Oracle(problem), row)
