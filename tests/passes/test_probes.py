"""Probe rows: gradients and values are those of passes over each group alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.passes.probes import require_alone
from packprop.errors import BadInput, PackpropError, PackpropWarning
from packprop.extensions import BatchDotGrad, BatchGrad, BatchL2Grad, Projected, Variance
from tests.cases import Case, map_tensors
from tests.dataset.small import SPLIT_CASES
from tests.references.running import as_tensors, assert_all_near, assert_near
from tests.selection import one_in

EXACT = [
    extensions.BatchGrad,
    extensions.BatchL2Grad,
    extensions.SumGradSquared,
    extensions.Variance,
    extensions.BatchDotGrad,
    extensions.DiagGGNExact,
    extensions.BatchDiagGGNExact,
    extensions.SqrtGGNExact,
    extensions.KFLR,
    lambda: extensions.EKFAC(fisher="exact"),
    lambda: extensions.KFAC(fisher="empirical"),
    extensions.BatchJacobian,
    lambda: Projected(BatchGrad(), 6, kind="kronecker"),
]


class Language(nn.Module):
    """Tokens under a head that is tied to its table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.dense = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = self.norm(x + self.dense(x.cumsum(1)).tanh())
        out: Tensor = F.linear(x, self.table.weight)
        return out


def perceptron(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def labels(n: int) -> Tensor:
    return torch.arange(n) % 3


def ignored(n: int) -> Tensor:
    targets = torch.arange(5 * n).reshape(n, 5) % 7
    targets[0, 2:] = -100
    targets[3] = -100
    return targets


def by_token(loss: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda f, y: loss(f.flatten(0, 1), y.flatten())


N = 6
CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "cross-entropy": (perceptron, lambda: torch.randn(N, 4), lambda: labels(N), nn.CrossEntropyLoss),
    "sum": (
        perceptron,
        lambda: torch.randn(N, 4),
        lambda: labels(N),
        lambda: nn.CrossEntropyLoss(reduction="sum"),
    ),
    "weights": (
        perceptron,
        lambda: torch.randn(N, 4),
        lambda: labels(N),
        lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double(), label_smoothing=0.1),
    ),
    "as-many-classes-as-samples": (
        lambda: perceptron(N),
        lambda: torch.randn(N, 4),
        lambda: torch.arange(N),
        lambda: nn.CrossEntropyLoss(weight=torch.arange(1.0, N + 1).double()),
    ),
    "probabilities": (
        perceptron,
        lambda: torch.randn(N, 4),
        lambda: torch.rand(N, 3).softmax(1).double(),
        nn.CrossEntropyLoss,
    ),
    "squares": (convolution, lambda: torch.randn(N, 2, 3, 3), lambda: torch.randn(N, 3).double(), nn.MSELoss),
    "binary": (
        perceptron,
        lambda: torch.randn(N, 4),
        lambda: (torch.rand(N, 3) > 0.5).double(),
        lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0]).double()),
    ),
    "tokens": (
        Language,
        lambda: torch.arange(5 * N).reshape(N, 5) % 7,
        lambda: ignored(N),
        nn.CrossEntropyLoss,
    ),
}


def made(name: str) -> tuple[nn.Module, Tensor, Tensor, Any]:
    torch.manual_seed(0)
    model, inputs, targets, loss = CASES[name]
    made_model = packprop.extend(model().double())
    x, y, function = inputs(), targets(), packprop.extend(loss())
    x = x.double() if x.is_floating_point() else x
    return made_model, x, y, by_token(function) if name == "tokens" else function


def passed(
    model: nn.Module, x: Tensor, y: Tensor, loss: Any, asked: list[Any], **options: Any
) -> dict[str, dict[str, Any]]:
    """What one pass leaves on each parameter."""
    model.zero_grad()
    value = loss(model(x), y)
    with packprop.backpack(*asked, **options):
        value.backward()
    found: dict[str, dict[str, Any]] = {"grad": {}}
    for name, parameter in model.named_parameters():
        found["grad"][name] = parameter.grad
        for attribute in [*vars(parameter)]:
            found.setdefault(attribute, {})[name] = vars(parameter).pop(attribute)
    return found


def assert_alike(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert found.keys() == expected.keys(), what
    pieces = {name: as_tensors(value) for name, value in expected.items()}
    for place in range(max(map(len, pieces.values()))):
        assert_all_near(
            {name: as_tensors(found[name])[place] for name in pieces if len(pieces[name]) > place},
            {name: piece[place] for name, piece in pieces.items() if len(piece) > place},
            what,
            1e-9,
        )


@one_in(3)
@pytest.mark.parametrize("probes", [[4, 1], [5]], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_each_group_is_as_if_alone(name: str, probes: list[int]) -> None:
    model, x, y, loss = made(name)
    training = [index for index in range(N) if index not in probes]
    asked = [make() for make in EXACT]
    # eigenvectors may turn in null spaces: corrected eigenvalues are looked at by their sum
    found = passed(model, x, y, loss, asked, probes=probes)
    alone = passed(model, x[training], y[training], loss, asked)
    others = passed(model, x[probes], y[probes], loss, asked)
    for attribute, expected in alone.items():
        if attribute != "ekfac":
            assert_alike(found[attribute], expected, attribute)
    for attribute, expected in others.items():
        if attribute not in ("grad", "batch_dot", "ekfac"):
            assert_alike(found[f"{attribute}_probes"], expected, f"{attribute} of probes")
    for parameter, rows in alone["grad_batch"].items():
        products = torch.einsum("np,mp->nm", rows.flatten(1), others["grad_batch"][parameter].flatten(1))
        assert_near(found["batch_dot_probes"][parameter], products, f"products of {parameter}", 1e-9)
        for suffix, group in (("", alone), ("_probes", others)):
            values = found[f"ekfac{suffix}"][parameter].values
            assert_near(values.sum(), group["ekfac"][parameter].values.sum(), "trace", 1e-8)


@one_in(3)
@pytest.mark.parametrize("per", ["all", "module", "parameter"])
@pytest.mark.parametrize("name", CASES)
def test_training_rows_are_clipped_as_if_alone(name: str, per: Any) -> None:
    model, x, y, loss = made(name)
    training, found = [0, 2, 3, 5], []
    with packprop.clipped_gradients(max_norm=float("inf"), per=per) as alone:
        loss(model(x[training]), y[training]).backward()
    bound = 1.01 * torch.cat([*alone.layer_norms.values()] or [alone.norms]).median()
    for chosen, probes in ((range(N), [4, 1]), (training, None)):
        model.zero_grad()
        given, wanted = x[[*chosen]], y[[*chosen]]
        with packprop.clipped_gradients(BatchL2Grad(), max_norm=bound, per=per, probes=probes) as clipped:
            loss(model(given), wanted).backward()
        found.append((clipped, {name: (p.grad, p.batch_l2) for name, p in model.named_parameters()}))
    (clipped, gradients), (alone, expected) = found
    assert 0 < alone.fraction < 1
    assert_near(clipped.norms, alone.norms, "norms", 1e-9)
    assert_near(clipped.fraction, alone.fraction, "fraction")
    if per != "all":
        assert_alike(clipped.layer_norms, alone.layer_norms, "norms of layers")
    for place, what in enumerate(("grad", "values beside")):
        ours, theirs = ({key: pair[place] for key, pair in each.items()} for each in (gradients, expected))
        assert_alike(ours, theirs, what)


def test_clipping_knows_nothing_of_probes() -> None:
    """Not even of those that are not finite; a mean of one's own keeps its scale."""
    model, x, y, _ = made("cross-entropy")
    found = []
    for bad in (1.0, float("nan")):
        model.zero_grad()
        with packprop.record():
            losses = F.cross_entropy(model(torch.cat([x[:4], bad * x[4:]])), y, reduction="none")
        with packprop.clipped_gradients(max_norm=1.2, reduction="mean", probes=[4, 5]) as clipped:
            losses.mean().backward()
        found.append([clipped.norms, *(p.grad for p in model.parameters())])
    model.zero_grad()
    with packprop.clipped_gradients(max_norm=1.2) as alone:
        packprop.extend(nn.CrossEntropyLoss())(model(x[:4]), y[:4]).backward()
    assert 0 < alone.fraction < 1
    for values in found:
        assert_near(values[0], alone.norms, "norms")
        for gradient, parameter in zip(values[1:], model.parameters(), strict=True):
            assert parameter.grad is not None
            assert_near(gradient, 4 / 6 * parameter.grad, "grad")


@one_in(3)
@pytest.mark.parametrize("case", SPLIT_CASES, ids=lambda case: case.name)
def test_every_structure_and_loss(case: Case) -> None:
    problem = case.problem(5, "mean")
    model, probes, training = packprop.extend(problem.model), [4, 1], [0, 2, 3]

    @packprop.record()
    def loss(output: Any, targets: Any) -> Tensor:
        value: Tensor = problem.loss(output, targets)
        return value

    def chosen(samples: list[int], **options: Any) -> dict[str, dict[str, Any]]:
        x, y = (map_tensors(lambda tensor: tensor[samples], each) for each in (problem.inputs, problem.targets))
        return passed(model, x, y, loss, [BatchGrad(), Variance()], **options)

    if case.name == "bce-map-pos-weight":  # a weight that samples may be broadcast against
        with pytest.raises(PackpropError, match="would be divided by"):
            chosen(list(range(5)), probes=probes)
        return
    found, alone, others = chosen(list(range(5)), probes=probes), chosen(training), chosen(probes)
    assert_alike(found["grad"], alone["grad"], "grad")
    for attribute in ("grad_batch", "variance"):
        assert_alike(found[attribute], alone[attribute], attribute)
        assert_alike(found[f"{attribute}_probes"], others[attribute], f"{attribute} of probes")


def test_sampled_curvature_is_that_of_the_group() -> None:
    """In expectation; the draws of training rows and probes are one."""
    model, x, y, loss = made("cross-entropy")
    source = torch.Generator().manual_seed(0)
    asked = [extensions.DiagGGNMC(4000, generator=source), extensions.DiagGGNExact()]
    found = passed(model, x, y, loss, asked, probes=[0, 3])
    for suffix in ("", "_probes"):
        for name, exact in found[f"diag_ggn_exact{suffix}"].items():
            assert_near(found[f"diag_ggn_mc{suffix}"][name].sum(), exact.sum(), name, 0.1)


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_gradients_accumulate_and_penalties_stay(scale: float) -> None:
    model, x, y, loss = made("cross-entropy")

    def total(inputs: Tensor, targets: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return scale * (2 * loss(model(inputs), targets)) + penalty

    for _ in range(2):
        value = total(x, y)
        with packprop.backpack(BatchGrad(), probes=[0, 2], loss_scale=scale):
            value.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    rows = {name: p.grad_batch for name, p in model.named_parameters()}
    model.zero_grad()
    training = [1, 3, 4, 5]
    for _ in range(2):
        value = total(x[training], y[training])
        with packprop.backpack(BatchGrad(), loss_scale=scale):
            value.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_near(found[name], parameter.grad, name)
        assert_near(rows[name], parameter.grad_batch, name)


@pytest.mark.parametrize(
    "probes", [[4, 1], torch.tensor([4, 1]), [-2, 1], [False, True, False, False, True, False]], ids=str
)
def test_indices_and_masks(probes: Any) -> None:
    model, x, y, loss = made("cross-entropy")
    found = passed(model, x, y, loss, [BatchL2Grad()], probes=probes)["batch_l2_probes"]
    order = [1, 4] if isinstance(probes, list) and isinstance(probes[0], bool) else [4, 1]
    expected = passed(model, x[order], y[order], loss, [BatchL2Grad()])["batch_l2"]
    assert_alike(found, expected, "norms")


def test_a_plain_gradient_without_probes() -> None:
    """No extension is needed."""
    model, x, y, loss = made("squares")
    found = passed(model, x, y, loss, [], probes=range(2, 5))
    expected = passed(model, x[[0, 1, 5]], y[[0, 1, 5]], loss, [])
    assert_alike(found["grad"], expected["grad"], "grad")


def test_a_context_that_saw_no_pass_says_so() -> None:
    """As where another context inside of it took the pass over."""
    model, x, y, loss = made("cross-entropy")
    value = loss(model(x), y)
    with (
        pytest.warns(PackpropWarning, match=r"seen inside `with backpack"),
        packprop.backpack(probes=[0]),
        packprop.clipped_gradients(max_norm=1.0),
    ):
        value.backward()


def test_ones_own_reduction_keeps_its_scale() -> None:
    model, x, y, _ = made("cross-entropy")
    with packprop.record():
        losses = F.cross_entropy(model(x), y, reduction="none")
    with packprop.backpack(BatchGrad(), probes=[4, 5]):
        (losses[:4].mean() + losses[4:].mean()).backward()
    found = {name: (p.grad, p.grad_batch, p.grad_batch_probes) for name, p in model.named_parameters()}
    loss = packprop.extend(nn.CrossEntropyLoss())
    alone = passed(model, x[:4], y[:4], loss, [BatchGrad()])
    others = passed(model, x[4:], y[4:], loss, [BatchGrad()])
    for name, (gradient, rows, probes) in found.items():
        assert_near(gradient, alone["grad"][name], name)
        assert_near(rows, alone["grad_batch"][name], name)
        assert_near(probes, others["grad_batch"][name], name)


def test_hooks_on_parameters_see_training_rows() -> None:
    model, x, y, loss = made("cross-entropy")
    seen: list[Tensor] = []
    handle = model[0].weight.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
    found = passed(model, x, y, loss, [Variance()], probes=[0])["grad"]["0.weight"]
    handle.remove()
    expected = passed(model, x[1:], y[1:], loss, [])["grad"]["0.weight"]
    assert_near(seen[0], expected, "seen")
    assert_near(found, 2 * expected, "grad")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision(dtype: torch.dtype) -> None:
    model, x, y, loss = made("cross-entropy")
    exact = passed(model, x.to(dtype).double(), y, loss, [BatchL2Grad()], probes=[1, 2])
    low = passed(model.to(dtype), x.to(dtype), y, loss, [BatchL2Grad()], probes=[1, 2])
    for name, gradient in low["grad"].items():
        assert gradient.dtype == dtype
        assert_near(gradient, exact["grad"][name].to(dtype), name, 20 * torch.finfo(dtype).eps)
        assert low["batch_l2_probes"][name].dtype == torch.float32


@pytest.mark.parametrize(
    ("probes", "words"),
    [
        ([], "no indices"),
        ([6], "no indices"),
        ([1, 1], "no indices"),
        ([1, -5], "no indices"),
        ([0.5], "no indices"),
        ([True, False], "no indices"),
        (["a"], "no indices"),
        ([[1]], "no indices"),
        (range(6), "all of the 6 samples"),
    ],
    ids=str,
)
def test_probes_that_are_not_there(probes: Any, words: str) -> None:
    model, x, y, loss = made("cross-entropy")
    with pytest.raises(BadInput, match=words):
        passed(model, x, y, loss, [BatchGrad()], probes=probes)
    assert model[0].weight.grad is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: BatchGrad(subsampling=[0]),
        lambda: BatchGrad(per="token"),
        extensions.HMP,
        extensions.DiagHessian,
        extensions.DiagHessianMC,
        extensions.KFRA,
    ],
)
def test_values_that_probes_cannot_be_left_out_of(make: Any) -> None:
    model, x, y, loss = made("cross-entropy")
    with pytest.raises(PackpropError, match=f"extension {make().name}"):
        passed(model, x, y, loss, [make()], probes=[0])
    assert model[0].weight.grad is None


def test_passes_that_probes_cannot_be_left_out_of() -> None:
    model, x, y, loss = made("cross-entropy")
    with pytest.raises(BadInput, match="plans are made for passes without probes"):
        packprop.backpack(BatchGrad(), memory="1GiB", probes=[0])
    with pytest.raises(BadInput, match="merged without probes"):
        require_alone([0], has_budget=False, joins_ranks=True)
    refused: list[tuple[Callable[[], Tensor], dict[str, Any], str]] = [
        (lambda: loss(model(x), y), {"create_graph": True}, "create_graph"),
        (lambda: loss(model(x), y), {"inputs": [model[0].weight]}, "inputs"),
        (lambda: (model(x) ** 2).mean(), {}, "a loss that is not one of torch"),
        (lambda: loss(model(x), y) + loss(model(x), y), {}, "2 losses that are means"),
        (lambda: loss(model(x.clone().requires_grad_()), y), {}, "requires a gradient"),
    ]
    for make, options, words in refused:
        value = make()
        with pytest.raises(PackpropError, match=words), packprop.backpack(BatchGrad(), probes=[0]):
            value.backward(**options)
        assert all(p.grad is None and not hasattr(p, "grad_batch") for p in model.parameters()), words
    value = loss(model(x), y)
    handle = model[1].register_full_backward_hook(lambda *_: None)
    value = loss(model(x), y)
    with pytest.raises(PackpropError, match="hook"), packprop.backpack(BatchGrad(), probes=[0]):
        value.backward()
    handle.remove()
    mixing = packprop.extend(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double())
    value = loss(mixing(x), y)
    with pytest.raises(PackpropError, match="BatchNorm"), packprop.backpack(probes=[0]):
        value.backward()


def test_products_of_training_samples_with_probes_say_who_helps() -> None:
    """A step along one sample's gradient changes the probes' loss by minus their product, to first order."""
    model, x, y, loss = made("cross-entropy")
    probes, training = [4, 5], [0, 1, 2, 3]
    found = passed(model, x, y, loss, [BatchDotGrad(), BatchGrad()], probes=probes)
    helps = sum(products.sum(1) for products in found["batch_dot_probes"].values())
    assert isinstance(helps, Tensor)
    before = loss(model(x[probes]), y[probes]).item()
    for place in range(len(training)):
        for name, parameter in model.named_parameters():
            parameter.data.sub_(1e-6 * found["grad_batch"][name][place])
        change = (loss(model(x[probes]), y[probes]).item() - before) / 1e-6
        for name, parameter in model.named_parameters():
            parameter.data.add_(1e-6 * found["grad_batch"][name][place])
        assert change == pytest.approx(-helps[place].item(), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("probes", [[1], torch.tensor([1]), torch.tensor([False, True, False]), range(1, 2)])
def test_a_default_device_moves_no_probes(probes: Any) -> None:
    """``torch.set_default_device`` belongs to the user's program."""
    torch.manual_seed(0)
    model, loss = packprop.extend(nn.Linear(3, 2)), packprop.extend(nn.CrossEntropyLoss())
    with packprop.backpack(extensions.BatchL2Grad(), probes=probes):
        value = loss(model(torch.randn(3, 3)), torch.tensor([0, 1, 1]))
        with torch.device("meta"):
            value.backward()
    assert all(p.batch_l2.device.type == "cpu" and len(p.batch_l2) == 2 for p in model.parameters())
