"""Quantities over a whole data set: what `compute` gives is what one big batch would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import packprop
from packprop import BadInput, PackpropError, extensions
from packprop.dataset.batches import Batches
from packprop.dataset.result import Result
from packprop.recording.switch import is_extended
from tests.cases import CASES, Case, map_tensors
from tests.references.oracle import Oracle
from tests.references.running import assert_all_near, assert_near

DEFAULT = {field.name: field.default for field in fields(Case)}
SIZE = 7
EXACT = [
    extensions.BatchGrad,
    extensions.BatchL2Grad,
    extensions.SumGradSquared,
    extensions.Variance,
    extensions.DiagGGNExact,
    extensions.BatchDiagGGNExact,
]
# Options of these losses hold one entry for each sample, which splitting does not split.
WHOLE_ONLY = {"bce-weight-per-sample", "function-mse-weights", "ce-none"}
SPLIT_CASES = [
    case
    for case in CASES
    if all(getattr(case, key) is DEFAULT[key] for key in ("total", "output", "score"))
    and all(getattr(case, key) is DEFAULT[key] for key in ("take_input", "take_target"))
    and case.reductions == DEFAULT["reductions"]
    and (case.order == 2 and not case.refuses and not case.refuses_curvature)
    and ("smoke" in case.tags or case.name.startswith(("ce-", "mse-", "bce-", "function-")))
    and case.name not in WHOLE_ONLY
]


def part(tree: Any, start: int, stop: int) -> Any:
    """Samples from `start` to `stop`."""
    return map_tensors(lambda tensor: tensor[start:stop], tree)


def small(size: int = SIZE) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, (torch.randn(size, 3).double(), torch.randint(2, (size,)))


def compute(model: nn.Module, loss: Any, data: Any, *asked: Any, **options: Any) -> Result:
    return packprop.compute(model, loss, data, asked, progress=False, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", SPLIT_CASES, ids=lambda case: case.name)
def test_batches_of_any_size_are_one_loss(case: Case, reduction: str) -> None:
    problem = case.problem(SIZE, reduction)
    oracle = Oracle(problem)
    cuts = [(0, 3), (3, 4), (4, SIZE)]
    data = [(part(problem.inputs, *cut), part(problem.targets, *cut)) for cut in cuts]
    asked = [make() for make in EXACT]
    found = compute(problem.model, problem.loss, data, *asked)
    assert (found.samples, found.reduction) == (SIZE, reduction)
    assert found.loss == pytest.approx(problem.total().item(), rel=1e-12)
    for extension in asked:
        expected = getattr(oracle, extension.savefield)
        assert_all_near(found[extension], expected, extension.savefield)


def test_there_are_cases_of_every_loss() -> None:
    names = " ".join(case.name for case in SPLIT_CASES)
    assert all(loss in names for loss in ("ce-", "mse-", "bce-", "ignore", "smoothing", "weight"))
    assert len(SPLIT_CASES) > 20


@pytest.mark.parametrize("cuts", [[7], [2, 5], [1] * 7], ids=str)
def test_kronecker_factors_over_batches(cuts: list[int]) -> None:
    """Without draws: the B of expectations cannot be seen, but A, and the scale of B, can."""
    model, (x, y) = small()
    data = list(zip(x.split(cuts), y.split(cuts), strict=True))
    source = torch.Generator().manual_seed(0)
    kfac = extensions.KFAC(mc_samples=500, generator=source)
    found = compute(model, nn.CrossEntropyLoss(), data, kfac, extensions.DiagGGNExact())
    cotangents, inputs = found[kfac]["0.weight"]
    assert_near(inputs, x.T @ x / len(x), "A")
    exact = found["diag_ggn_exact"]["0.bias"]
    assert cotangents.diagonal().sum().item() == pytest.approx(exact.sum().item(), rel=0.1)


def test_a_factor_on_the_loss_scales_everything() -> None:
    model, (x, y) = small()
    asked = [make() for make in EXACT]
    loss = nn.CrossEntropyLoss()
    once = compute(model, loss, (x, y), *asked, batch_size=3)
    thrice = compute(model, lambda f, t: 3 * loss(f, t), (x, y), *asked, batch_size=3)
    assert thrice.loss == pytest.approx(3 * once.loss)
    powers = {"batch_l2": 2, "sum_grad_squared": 2, "variance": 2}
    for savefield, by_name in once.items():
        scaled = {k: v * 3.0 ** powers.get(savefield, 1) for k, v in by_name.items()}
        assert_all_near(thrice[savefield], scaled, savefield)


@pytest.mark.parametrize("loss", [nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_without_a_rule_for_curvature(loss: type[nn.Module], reduction: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Sigmoid()).double()
    x, y = torch.randn(SIZE, 3).double(), torch.rand(SIZE, 2).double()
    asked = [extensions.BatchGrad(), extensions.Variance()]
    expected = compute(model, loss(reduction=reduction), [(x, y)], *asked)
    found = compute(model, loss(reduction=reduction), (x, y), *asked, batch_size=3)
    for savefield in expected:
        assert_all_near(found[savefield], expected[savefield], savefield)


@pytest.mark.filterwarnings("error")
def test_a_batch_without_terms_counts_for_nothing() -> None:
    """Its own mean is 0/0; that of the data set is not."""
    model, (x, y) = small()
    y[3:5] = -100
    asked = [make() for make in EXACT]
    expected = compute(model, nn.CrossEntropyLoss(), [(x, y)], *asked)
    parts = [(x[:3], y[:3]), (x[3:5], y[3:5]), (x[5:], y[5:])]
    found = compute(model, nn.CrossEntropyLoss(), parts, *asked)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    for savefield in expected:
        assert_all_near(found[savefield], expected[savefield], savefield)
    nothing = compute(model, nn.CrossEntropyLoss(), parts[1:2], extensions.BatchGrad())
    assert torch.tensor(nothing.loss).isnan()
    assert nothing["grad_batch"]["0.weight"].isnan().all()


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """A data set that hands out one sample at a time."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "pair": lambda x, y: (x, y),
    "pair in a list": lambda x, y: [x, y],
    "TensorDataset": TensorDataset,
    "Dataset": Pairs,
    "DataLoader": lambda x, y: DataLoader(Pairs(x, y), batch_size=3),
    "list of lists": lambda x, y: [[x[:2], y[:2]], [x[2:], y[2:]]],
    "generator": lambda x, y: ((x[i : i + 1], y[i : i + 1]) for i in range(len(x))),
    "keywords": lambda x, y: [({"input": x}, y)],
    "arguments": lambda x, y: [((x,), y)],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same(form: str) -> None:
    model, (x, y) = small()
    asked = [make() for make in EXACT]
    expected = compute(model, nn.CrossEntropyLoss(), [(x, y)], *asked)
    found = compute(model, nn.CrossEntropyLoss(), FORMS[form](x, y), *asked)
    for savefield in expected:
        assert_all_near(found[savefield], expected[savefield], savefield)


@pytest.mark.parametrize(("given", "counts"), [(None, [128, 72]), (90, [90, 90, 20])])
@pytest.mark.parametrize("form", [TensorDataset, Pairs, lambda x, y: (x, y)])
def test_batch_size(form: Any, given: int | None, counts: list[int]) -> None:
    batches = Batches("asked", form(torch.randn(200, 3), torch.zeros(200)), given)
    assert [len(x) for x, _ in batches] == counts


def test_nothing_of_the_users_is_changed() -> None:
    model, (x, y) = small()
    loss = nn.CrossEntropyLoss()
    loss(model(x), y).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    attributes = {name: set(vars(p)) for name, p in model.named_parameters()}
    packprop.extend(model[2])
    compute(model, loss, (x, y), extensions.BatchGrad(), batch_size=2)
    assert [is_extended(module) for module in model] == [False, False, True]
    assert not is_extended(model)
    assert not is_extended(loss)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, before[name])
        assert set(vars(parameter)) == attributes[name]


def test_an_error_leaves_the_model_as_it_was() -> None:
    model, (x, y) = small()
    with pytest.raises(BadInput):
        compute(model, nn.CrossEntropyLoss(), [(x, y), (x[:, :2], y)], extensions.BatchGrad())
    assert not any(is_extended(module) for module in model.modules())


def test_saved_and_loaded(tmp_path: Path) -> None:
    model, (x, y) = small()
    asked = [extensions.BatchGrad(), extensions.KFAC()]
    found = compute(model, nn.CrossEntropyLoss(reduction="sum"), (x, y), *asked)
    found.save(tmp_path / "result.safetensors")
    again = Result.load(tmp_path / "result.safetensors")
    assert (again.samples, again.loss, again.reduction) == (SIZE, found.loss, "sum")
    assert list(again) == list(found)
    assert_all_near(again["grad_batch"], found["grad_batch"], "grad_batch")
    for name, factors in found["kfac"].items():
        assert isinstance(again["kfac"][name], list)
        for saved, factor in zip(again["kfac"][name], factors, strict=True):
            assert torch.equal(saved, factor)


def test_no_progress_bar_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    model, (x, y) = small()
    packprop.compute(model, nn.CrossEntropyLoss(), (x, y), [extensions.BatchGrad()], progress=True)
    assert capfd.readouterr() == ("", "")


class Sometimes(nn.Module):
    """Uses one of its layers only where the first input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        out = self.always(x)
        return out + self.sometimes(x) if x[0, 0] > 0 else out


@pytest.mark.parametrize("first", [1.0, -1.0])
def test_a_parameter_that_some_batches_do_not_use(first: float) -> None:
    """Sums are right all the same; rows that cannot be put in order are refused."""
    model, (x, y) = Sometimes(), (torch.randn(4, 3).double(), torch.randint(2, (4,)))
    x[0, 0], x[2, 0] = first, -first
    data = [(x[:2], y[:2]), (x[2:], y[2:])]
    used = data[0] if first > 0 else data[1]
    exact = extensions.DiagGGNExact()
    found = compute(model, nn.CrossEntropyLoss(), data, exact)[exact]["sometimes.weight"]
    alone = compute(model, nn.CrossEntropyLoss(), [used], exact)[exact]["sometimes.weight"]
    assert_near(found, alone / 2, "half the samples")
    for extension in (extensions.BatchGrad(), extensions.Variance(), extensions.BatchL2Grad()):
        with pytest.raises(PackpropError, match="sometimes") as error:
            compute(model, nn.CrossEntropyLoss(), data, extension)
        assert "for 2 of the first 4 samples" in error.value.why


def none_then_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none").mean()


def two_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) + F.multi_margin_loss(outputs, targets)


def legacy_flag(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, size_average=False)


@pytest.mark.parametrize("loss", [none_then_mean, two_losses, legacy_flag])
def test_losses_whose_divisor_is_not_known(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, data = small()
    with pytest.raises(PackpropError, match="what it is divided by is not known"):
        compute(model, loss, data, extensions.BatchGrad(), batch_size=3)


def test_a_loss_that_changes_its_reduction() -> None:
    model, (x, y) = small()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        reduction = "mean" if len(outputs) == 3 else "sum"
        return F.cross_entropy(outputs, targets, reduction=reduction)

    with pytest.raises(PackpropError, match="reduces by mean, then by sum"):
        compute(model, loss, [(x[:3], y[:3]), (x[3:], y[3:])], extensions.BatchGrad())


def broken() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.zeros(2, 3).double(), torch.zeros(2, dtype=torch.long)
    raise OSError("the disk is gone")


ZEROS, CLASSES = torch.zeros(2, 3).double(), torch.zeros(2, dtype=torch.long)
BAD_DATA: list[tuple[Any, str, str]] = [
    ([], "data", "it held no batch"),
    (3, "data int", "neither a data set nor can it be iterated over"),
    ((ZEROS, torch.zeros(3)), "[2, 3] float64 and [3] float32", "not a pair whose first axes"),
    ((ZEROS, CLASSES, CLASSES), "tensors [2, 3] float64", "not a pair whose first axes"),
    ("text", "batch 1 of the data, str", "not a pair (inputs, targets)"),
    ([{"x": ZEROS}], "batch 1 of the data, dict of tensors [2, 3]", "not a pair (inputs, targets)"),
    ([(ZEROS, CLASSES, 1)], "batch 1 of the data, tuple", "not a pair (inputs, targets)"),
    ([(1, CLASSES)], "batch 1 of the data", "with tensors as inputs"),
    ([(ZEROS, CLASSES), None], "batch 2 of the data, NoneType", "not a pair (inputs, targets)"),
    ([(ZEROS[:, :2], CLASSES)], "batch 1 of the data, inputs [2, 2] float64", "RuntimeError: mat1"),
    (
        [(ZEROS, CLASSES), (ZEROS, CLASSES + 5)],
        "batch 2 of the data, inputs [2, 3] float64, targets [2] int64",
        "IndexError: Target 5 is out of bounds",
    ),
    (broken(), "the data, after 1 batches", "OSError: the disk is gone (" + __file__),
]


@pytest.mark.parametrize(("data", "where", "why"), BAD_DATA)
def test_bad_data_are_described(data: Any, where: str, why: str) -> None:
    with pytest.raises(BadInput) as error:
        compute(small()[0], nn.CrossEntropyLoss(), data, extensions.BatchGrad())
    assert where in error.value.where
    assert why in error.value.why
    assert error.value.instead


def test_batch_size_for_data_that_come_in_batches() -> None:
    model, (x, y) = small()
    with pytest.raises(BadInput, match="these data come in batches already"):
        compute(model, nn.CrossEntropyLoss(), [(x, y)], extensions.BatchGrad(), batch_size=3)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ([extensions.BatchDotGrad()], "relates samples of one batch"),
        ([extensions.BatchGrad(subsampling=[0])], "relates samples of one batch"),
        ([extensions.BatchGrad], "it is a class, not an instance"),
        (
            [extensions.DiagGGNMC(), extensions.DiagGGNMC(mc_samples=3)],
            "another one that is saved as 'diag_ggn_mc'",
        ),
    ],
)
def test_extensions_that_are_refused(asked: list[Any], why: str) -> None:
    model, data = small()
    with pytest.raises(BadInput) as error:
        compute(model, nn.CrossEntropyLoss(), data, *asked)
    assert why in error.value.why
