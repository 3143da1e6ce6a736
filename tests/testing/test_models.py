"""`check_model`: right models pass, wrong rules and statistics are seen in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.algebra import cells
from packprop.engine.algebra.structures import Outer
from packprop.engine.functions.building import affine
from packprop.engine.functions.entry import Entry
from packprop.engine.functions.losses.description import Loss, Root
from packprop.engine.functions.losses.roots import bernoulli_root
from packprop.engine.functions.node_calls import NodeCall
from packprop.testing import CheckFailed, check_extension, check_model
from tests.cases import BY_NAME
from tests.references.tensors import R
from tests.selection import one_in
from tests.testing.registered import classifier, write_an_extension


@one_in(3)
@pytest.mark.parametrize(
    "name",
    [
        "conv2d-deep",
        "vision-transformer-hand-written",
        "tied-transpose",
        "weight-norm",
        "lstm",
        "add-scalar",
        "weight-norm-hook",
        "pruned",
    ],
)
def test_models(name: str) -> None:
    problem = BY_NAME[name].problem(3)
    problem.total()  # what a hook has left on the module does not matter
    report = check_model(problem.model, problem.loss, problem.inputs, problem.targets)
    trained = len(problem.parameters)
    expected = ["BatchGrad", "Variance", "DiagGGNExact", "SqrtGGNExact"]
    assert [report.laws[law] for law in expected] == [trained] * 4
    assert report.error < 1e-10
    assert any("draws" in note for note in report.notes)


class TimeFirst(nn.Module):
    """Samples on the second axis of the input, behind positions in the flattened output."""

    def __init__(self, interacts: bool) -> None:
        super().__init__()
        self.inner, self.unused, self.interacts = nn.Linear(2, 3), nn.Linear(2, 3), interacts

    def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
        hidden = self.inner(x + shift)
        if self.interacts:
            hidden = hidden * hidden.mean(0)
        return hidden.flatten(0, 1)


def scaled_sum(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f, y.flatten(), reduction="sum") / 7


def test_models_with_arguments_functions_and_other_axes() -> None:
    size = 3
    inputs, targets = {"x": R(4, size, 2), "shift": R(2)}, torch.randint(3, (4, size))
    model = packprop.extend(TimeFirst(interacts=True), sample_axis=1)
    report = check_model(model, scaled_sum, inputs, targets, axis=1)
    assert report.laws["SqrtGGNExact"] == 2
    assert {"unused: unused.weight", "unused: unused.bias"} <= set(report.notes)


def test_samples_that_are_taken_for_something_else_are_caught() -> None:
    """If positions are as independent as samples, the leading axis is taken for the samples."""
    inputs, targets = {"x": R(4, 3, 2), "shift": R(2)}, torch.randint(3, (4, 3))
    with pytest.raises(CheckFailed, match="takes them for 4 samples"):
        check_model(TimeFirst(interacts=False), scaled_sum, inputs, targets, axis=1)


def test_a_loss_without_useful_curvature_is_noted() -> None:
    model, _, x, _ = classifier()
    report = check_model(model, nn.L1Loss(), x, R(3, 3))
    assert "BatchGrad" in report.laws
    assert "DiagGGNExact" not in report.laws
    assert any("no GGN" in note for note in report.notes)
    with pytest.raises(packprop.PackpropError, match="Hessian of l1_loss is zero"):
        check_model(model, nn.L1Loss(), x, R(3, 3), [extensions.DiagGGNExact()])


def test_chosen_extensions_and_those_without_a_loop() -> None:
    chosen = [extensions.BatchGrad(subsampling=[2, 0]), extensions.KFAC(), write_an_extension()]
    report = check_model(*classifier(), chosen)
    assert report.laws["BatchGrad"] == 4
    assert report.laws["chunks of samples"] > 0
    assert {note.split(":")[0] for note in report.notes} == {"KFAC", "MeanAbsolute"}
    with pytest.raises(packprop.BadInput):
        check_model(*classifier(), [extensions.BatchGrad])  # type: ignore[list-item]  # wrong on purpose


def test_a_shared_tensor_with_as_many_rows_as_samples() -> None:
    """It cannot be told from one that holds samples, so the error says what to give."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            scores: Tensor = self.head(x * mask.sum(0))
            return scores

    x, mask, y = torch.rand(4, 4), torch.rand(4, 4).tril(), torch.tensor([0, 1, 2, 1])
    given = Masked(), nn.CrossEntropyLoss(), (x, mask), y
    with pytest.raises(CheckFailed, match=r"as many rows.*singles"):
        check_model(*given)
    check_model(*given, singles=[(row[None], mask) for row in x])


def wrong_product(call: NodeCall) -> Entry | None:
    x = call.saved("mat1")
    return affine(call, lambda: 2 * x(), transposed=True) if call.place == 2 else None


def wrong_cell(structure: Outer) -> Tensor:
    assert structure.cotangent is not None
    return structure.fold(structure.cotangent.sum((0, 1, 2))[..., None] * structure.x.sum((0, 1))[:, None])


def wrong_draw(outputs: Tensor, scale: Tensor) -> Root:
    right = bernoulli_root(outputs, scale)
    return Root(right.columns, right.position, lambda m, source: 1.4 * right.draw(m, source))


def wrong_columns(outputs: Tensor, scale: Tensor) -> Root:
    right = bernoulli_root(outputs, scale)
    return Root(right.columns, lambda t, a, b: 1.4 * right.position(t, a, b), right.draw)


def test_a_wrong_rule_is_seen_in_a_model() -> None:
    packprop.register_use("Addmm")(wrong_product)
    with pytest.raises(CheckFailed, match="BatchGrad was compared") as caught:
        check_model(*classifier())
    assert "weight'" in caught.value.where
    assert caught.value.error == pytest.approx(1)


def test_a_wrong_statistic_is_seen_in_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cells.FAST_CELLS["sum_sq"], Outer, wrong_cell)
    with pytest.raises(CheckFailed, match="SumGradSquared was compared"):
        check_model(*classifier())


@pytest.mark.parametrize(
    ("root", "text"), [(wrong_columns, "DiagGGNExact was compared"), (wrong_draw, "draws was compared")]
)
def test_a_wrong_loss_is_seen_in_a_model(root: Callable[..., Root], text: str) -> None:
    model, _, x, _ = classifier()

    @packprop.register_loss(F.binary_cross_entropy_with_logits)
    def rule(input, target, *args, **kwargs):
        return Loss(None, 1.0, input.numel(), root)

    with pytest.raises(CheckFailed, match=text) as caught:
        check_model(model, nn.BCEWithLogitsLoss(), x, torch.rand(3, 3))
    assert caught.value.error == pytest.approx(0.96, abs=0.1)


@pytest.mark.parametrize("root", [None, bernoulli_root])
def test_a_wrong_divisor_is_seen_in_a_model(root: Callable[..., Root] | None) -> None:
    """Without a root nothing in one batch needs the divisor."""
    model, _, x, _ = classifier()

    @packprop.register_loss(F.binary_cross_entropy_with_logits)
    def rule(input, target, *args, **kwargs):
        return Loss(None, 1.0, 1.0, root)

    with pytest.raises(CheckFailed) as caught:
        check_model(model, nn.BCEWithLogitsLoss(), x, torch.rand(3, 3))
    assert root is not None or "batches of a data set" in str(caught.value)
    assert root is not None or "divisor" in caught.value.instead


def test_a_model_that_mixes_or_draws() -> None:
    _, loss, x, y = classifier()
    with pytest.raises(packprop.PackpropError, match="BatchNorm1d"):
        check_model(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), loss, x, y)
    with pytest.raises(CheckFailed, match="random numbers are drawn"):
        check_model(nn.Sequential(nn.Dropout(), nn.Linear(3, 3)), loss, x, y)


def test_losses_that_are_no_number_and_inputs_without_samples() -> None:
    model, _, x, y = classifier()
    with pytest.raises(packprop.PackpropError):
        check_model(model, nn.CrossEntropyLoss(reduction="none"), x, y)
    with pytest.raises(packprop.BadInput, match="no tensor with samples"):
        check_model(model, nn.MSELoss(), torch.tensor(1.0), y)


def test_nothing_of_the_users_is_changed() -> None:
    model, loss, x, y = classifier()
    model.train()
    packprop.extend(model[0])
    model[0].weight.grad = torch.ones(4, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, hooks = torch.get_rng_state(), len(model._forward_hooks)
    check_model(model, loss, x, y)
    check_extension(extensions.BatchGrad(), on=(model, loss, x, y))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    assert (model[0].weight.dtype, x.dtype) == (torch.float32, torch.float32)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad.sum() == 12
    assert model[1].training
    assert len(model._forward_hooks) == hooks == 0
    assert not any(hasattr(parameter, "grad_batch") for parameter in model.parameters())


def test_parameters_that_a_loss_reaches_stay_as_they_are() -> None:
    """They are the user's own: only the model and a loss module are copied."""
    head = nn.Linear(2, 2).double()
    check_model(
        nn.Linear(3, 2),
        lambda outputs, targets: F.mse_loss(head(outputs), targets),
        torch.randn(4, 3),
        torch.randn(4, 2),
        extensions.BatchGrad(),
    )
    assert head.weight.grad is None
    assert not vars(head.weight)
