"""Models live on as usual: copies, other contexts, graphs kept or differentiated, no leaks."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError

import packprop
from packprop import extensions
from packprop.algebra.partial import Partial
from packprop.engine.chunks import ChunkSizes
from packprop.errors import PackpropError
from tests.cases import BY_NAME
from tests.models import Attention, LanguageModel, ResNet, VisionTransformer
from tests.oracle import Oracle, Problem
from tests.running import (
    FIRST_ORDER,
    HESSIANS,
    ROWS,
    Row,
    assert_all_near,
    assert_near,
    backward,
    check_exact,
    check_sampled,
    extend,
    forward,
    generator,
    make_all,
    reference,
    results,
    right_or_refused,
    stacked,
)

each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def network() -> nn.Module:
    """Layers that pickle: no lambda."""
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)).double()


def batch(size: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3).double(), torch.randint(3, (size,))


def rows_by_loop(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Per-sample gradients of a mean cross entropy, one sample at a time."""
    parameters = dict(model.named_parameters())
    rows = []
    with packprop.disable():
        for n in range(len(x)):
            share = F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) / len(x)
            rows.append(torch.autograd.grad(share, list(parameters.values())))
    return {k: torch.stack(r) for k, r in zip(parameters, zip(*rows, strict=True), strict=True)}


def check_rows(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """One pass over an extended model gives the right rows."""
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss.backward()
    for name, expected in rows_by_loop(model, x, y).items():
        assert_near(model.get_parameter(name).grad_batch, expected, name)
        assert hasattr(model.get_parameter(name), "diag_ggn_exact")


# Extending and taking it back


def test_extend_returns_the_module_and_can_be_repeated() -> None:
    model = network()
    assert packprop.extend(model) is model
    assert packprop.extend(packprop.extend(model), use_converter=True) is model
    check_rows(model, *batch())


@pytest.mark.parametrize("name", ["resnet", "vision-transformer-library", "language-model", "lstm"])
def test_extend_changes_nothing_about_the_model(name: str) -> None:
    plain, extended = BY_NAME[name].problem(3), BY_NAME[name].problem(3)
    extend(extended)
    for before, after in (
        (plain.model.state_dict(), extended.model.state_dict()),
        (dict(plain.model.named_parameters()), dict(extended.model.named_parameters())),
    ):
        assert list(before) == list(after)
        assert all(torch.equal(before[k], after[k]) for k in before)
    assert [type(m) for m in plain.model.modules()] == [type(m) for m in extended.model.modules()]
    first, second = plain.total(), extended.total()
    assert torch.equal(first, second)
    assert type(second) is Tensor
    first.backward()
    second.backward()
    for before, after in zip(plain.model.parameters(), extended.model.parameters(), strict=True):
        assert torch.equal(before.grad, after.grad)


def test_restore_takes_it_back() -> None:
    fresh = network()
    model = packprop.extend(network())
    assert packprop.restore(model) is model
    assert packprop.restore(fresh) is fresh  # never extended
    for before, after in zip(fresh.modules(), model.modules(), strict=True):
        assert before.__dict__.keys() == after.__dict__.keys()
        assert not after._forward_hooks
        assert not after._forward_pre_hooks
    packprop.extend(model)
    check_rows(model, *batch())


def test_users_own_hooks_survive() -> None:
    model, seen = network(), []
    handle = model[0].register_forward_hook(lambda *_: seen.append("mine"))
    packprop.extend(model)
    packprop.restore(model)
    model(batch()[0])
    assert seen == ["mine"]
    handle.remove()


@pytest.mark.parametrize("duplicate", ["deepcopy", "pickle", "save", "state_dict"])
def test_copies_are_extended_and_independent(duplicate: str) -> None:
    model = packprop.extend(network())
    x, y = batch()
    check_rows(model, x, y)
    if duplicate == "deepcopy":
        twin = copy.deepcopy(model)
    elif duplicate == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    elif duplicate == "save":
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    else:
        twin = packprop.extend(network())
        twin.load_state_dict(model.state_dict())
    before = {k: p.grad_batch.clone() for k, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    check_rows(twin, x, y)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad_batch, before[name])
    packprop.restore(twin)
    check_rows(model, x, y)


def test_copies_of_loss_modules() -> None:
    loss_function = copy.deepcopy(packprop.extend(nn.CrossEntropyLoss()))
    loss_function = pickle.loads(pickle.dumps(loss_function))
    model = packprop.extend(network())
    x, y = batch()
    with packprop.backpack(extensions.DiagGGNExact()):
        loss_function(model(x), y).backward()
    assert hasattr(model[0].weight, "diag_ggn_exact")


def test_models_with_results_can_be_copied() -> None:
    problem = BY_NAME["conv2d-deep"].problem(3)
    backward(problem, *make_all(ROWS))
    copy.deepcopy(problem.model)
    problem.model.state_dict()


def test_moving_an_extended_model_to_another_precision() -> None:
    model = packprop.extend(network().float()).double()
    check_rows(model, *batch())


def test_nested_extended_models() -> None:
    inner = packprop.extend(network())
    outer = packprop.extend(nn.Sequential(nn.Linear(3, 3).double(), nn.Tanh(), inner))
    x, y = batch()
    check_rows(outer, x, y)
    check_rows(inner, x, y)
    packprop.restore(inner)
    packprop.extend(outer)
    check_rows(outer, x, y)


def test_only_a_part_extended() -> None:
    """No number for what was not recorded; the right one, or an error, for what is extended."""
    model = network()
    packprop.extend(model[2])
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    with right_or_refused("extend"):
        with packprop.backpack(extensions.BatchGrad()):
            loss.backward()
        expected = rows_by_loop(model, x, y)["2.weight"]
        assert_near(model[2].weight.grad_batch, expected, "2.weight")
    assert not hasattr(model[0].weight, "grad_batch")


def test_a_submodule_called_by_itself() -> None:
    model = packprop.extend(network())
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model[2](model[1](model[0](x))), y)
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    for name, expected in rows_by_loop(model, x, y).items():
        assert_near(model.get_parameter(name).grad_batch, expected, name)


def test_two_models_in_one_loss() -> None:
    first, second = packprop.extend(network()), packprop.extend(network())
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(second(first(x)), y)
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss.backward()
    joined = nn.Sequential(first, second)
    for name, expected in rows_by_loop(joined, x, y).items():
        assert_near(joined.get_parameter(name).grad_batch, expected, name)


# Other contexts


def test_no_grad_and_evaluation_between() -> None:
    model = packprop.extend(network())
    x, y = batch()
    with torch.no_grad():
        assert model(x).grad_fn is None
    with torch.inference_mode():
        model(x)
    check_rows(model, x, y)
    out = model(x)
    with torch.no_grad():
        model(2 * x)
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    for name, expected in rows_by_loop(model, x, y).items():
        assert_near(model.get_parameter(name).grad_batch, expected, name)


def test_disable_records_nothing() -> None:
    model = packprop.extend(network())
    x, y = batch()
    with packprop.disable():
        out = model(x)
    nodes, seen = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        assert not node.metadata
        nodes += [upstream for upstream, _ in node.next_functions]
    F.cross_entropy(out, y).backward()
    check_rows(model, x, y)


def test_disable_inside_and_outside_again() -> None:
    model = packprop.extend(network())
    with packprop.disable(), packprop.disable():
        pass
    check_rows(model, *batch())
    with pytest.raises(ZeroDivisionError), packprop.disable():
        _ = 1 / 0
    check_rows(model, *batch())


def test_inner_backpack_replaces_the_outer() -> None:
    model = packprop.extend(network())
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    x, y = batch()
    with packprop.backpack(extensions.BatchGrad()):
        with packprop.backpack(extensions.Variance()):
            loss_function(model(x), y).backward()
        assert not hasattr(model[0].weight, "grad_batch")
        assert hasattr(model[0].weight, "variance")
        loss_function(model(x), y).backward()
        assert hasattr(model[0].weight, "grad_batch")
    del model[0].weight.grad_batch
    loss_function(model(x), y).backward()
    assert not hasattr(model[0].weight, "grad_batch")


def test_forward_inside_the_context() -> None:
    """The usual way to write it: forward and backward inside `with backpack(...)`."""
    model = packprop.extend(network())
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    x, y = batch()
    with packprop.backpack(*make_all(ROWS)):
        loss_function(model(x), y).backward()
    for name, expected in rows_by_loop(model, x, y).items():
        assert_near(model.get_parameter(name).grad_batch, expected, name)


def test_autograd_grad_inside_the_context_saves_nothing_wrong() -> None:
    model = packprop.extend(network())
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    x, y = batch()
    with packprop.backpack(extensions.BatchGrad()):
        torch.autograd.grad(loss_function(model(x), y), list(model.parameters()))
    rows = rows_by_loop(model, x, y)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "grad_batch"):
            assert_near(parameter.grad_batch, rows[name], name)


def test_optimiser_steps_between() -> None:
    """Results follow the parameters as they change."""
    model = packprop.extend(network())
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        x, y = batch()
        optimiser.zero_grad()
        check_rows(model, x, y)
        optimiser.step()


def test_inputs_that_require_gradients() -> None:
    model = packprop.extend(network())
    x, y = batch()
    x.requires_grad_()
    check_rows(model, x, y)
    assert x.grad is not None
    assert not hasattr(x, "grad_batch")


def test_threads_do_not_see_each_other() -> None:
    """A forward pass in one thread is not recorded into another's; each gets its own numbers."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            source = torch.Generator().manual_seed(seed)
            model = packprop.extend(network())
            for _ in range(5):
                x = torch.randn(3, 3, generator=source).double()
                check_rows(model, x, torch.tensor([0, 1, 2]))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# Interrupts


class Failing(nn.Module):
    """Raises in its forward pass when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.error is not None:
            raise self.error
        return y


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("nested", [False, True])
def test_an_error_in_the_forward_pass_leaves_nothing_on(error: BaseException, nested: bool) -> None:
    failing = Failing().double()
    model = packprop.extend(nn.Sequential(failing, nn.Linear(3, 3).double()) if nested else failing)
    x, y = batch()
    failing.error = error
    with pytest.raises(type(error)):
        model(x)
    failing.error = None
    check_rows(model, x, y)
    assert not torch.overrides._get_current_function_mode_stack()
    outside = torch.nn.Parameter(torch.ones(3).double())
    assert not (outside * x).grad_fn.metadata


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
def test_an_error_inside_record_leaves_nothing_on(error: BaseException) -> None:
    model = packprop.extend(network())
    x, y = batch()
    with pytest.raises(type(error)), packprop.record():
        model(x)
        raise error
    assert not torch.overrides._get_current_function_mode_stack()
    check_rows(model, x, y)


def test_an_error_in_the_backward_pass_leaves_nothing_on() -> None:
    model = packprop.extend(network())
    x, y = batch()
    out = model(x)

    def fail(_: Tensor) -> None:
        raise KeyError("mine")

    out.register_hook(fail)
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
    with pytest.raises(KeyError), packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    assert not hasattr(model[0].weight, "grad_batch")
    check_rows(model, x, y)
    plain = F.cross_entropy(model(x), y)
    plain.backward()


# Graphs that are kept


@each_row
def test_two_backward_passes_through_one_graph(row: Row) -> None:
    problem = BY_NAME["resnet"].problem(3)
    loss = forward(problem)
    found = []
    for retain in (True, False):
        with packprop.backpack(row(generator())):
            loss.backward(retain_graph=retain)
        found.append(results(problem, row.attribute))
        for parameter in problem.parameters.values():
            delattr(parameter, row.attribute)
    for name in found[0]:
        for first, second in zip(*(torch.atleast_1d(f[name][0]) for f in found), strict=True):
            assert_near(second, first, name, 1e-13)
    with pytest.raises(RuntimeError), packprop.backpack(row(generator())):
        loss.backward()


def test_extensions_changed_between_passes_through_one_graph() -> None:
    problem = BY_NAME["conv2d-deep"].problem(3)
    oracle = reference("conv2d-deep", 3, "mean")
    loss = forward(problem)
    for row in ROWS:
        if not row.sampled:
            with packprop.backpack(row()):
                loss.backward(retain_graph=True)
            check_exact(problem, oracle, row)


def test_plain_backward_first_then_extensions() -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    loss = forward(problem)
    loss.backward(retain_graph=True)
    with packprop.backpack(*make_all(ROWS)):
        loss.backward()
    oracle = reference("linear-deep", 3, "mean")
    for row in ROWS:
        if not row.sampled:
            check_exact(problem, oracle, row)
    check_sampled(problem, oracle)


def test_two_losses_on_one_forward_pass() -> None:
    """Two backward passes from two losses over one kept graph: each its own numbers."""
    model, loss_function = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    x, y = batch()
    other = (y + 1) % 3
    out = model(x)
    losses = [loss_function(out, y), loss_function(out, other)]
    for loss, target, retain in zip(losses, (y, other), (True, False), strict=True):
        with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            loss.backward(retain_graph=retain)
        for name, expected in rows_by_loop(model, x, target).items():
            assert_near(model.get_parameter(name).grad_batch, expected, name)


def test_backward_twice_after_two_forward_passes() -> None:
    """Two forward passes, then each loss by itself: neither sees the other's uses."""
    model, loss_function = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    batches = [batch(3), batch(5)]
    losses = [loss_function(model(x), y) for x, y in batches]
    for loss, (x, y) in zip(losses, batches, strict=True):
        with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            loss.backward()
        for name, expected in rows_by_loop(model, x, y).items():
            assert_near(model.get_parameter(name).grad_batch, expected, name)


@pytest.mark.parametrize("names", [["3.weight"], ["0.weight", "6.bias"], ["6.weight", "6.bias"]])
@each_row
def test_backward_to_chosen_parameters(row: Row, names: list[str]) -> None:
    """``backward(inputs=...)``: only the chosen parameters get gradients and results."""
    whole, part = BY_NAME["conv2d-deep"].problem(3), BY_NAME["conv2d-deep"].problem(3)
    backward(whole, row(generator()))
    chosen = [part.parameters[name] for name in names]
    backward(part, row(generator()), inputs=chosen)
    for name, parameter in part.parameters.items():
        if name not in names:
            assert parameter.grad is None
            assert not hasattr(parameter, row.attribute), name
            continue
        assert_near(parameter.grad, whole.parameters[name].grad, name)
        expected, found = (getattr(p.parameters[name], row.attribute) for p in (whole, part))
        for a, b in zip(torch.atleast_1d(found[0]), torch.atleast_1d(expected[0]), strict=True):
            assert_near(a, b, name)


# Graphs that are differentiated

DOUBLE = [
    "linear-deep",
    "linear-3d",
    "conv2d",
    "convtranspose2d-options",
    "autoencoder",
    "layernorm-shared",
    "embedding-positions",
    "prelu-channels",
    "tied-transpose",
    "vision-transformer-hand-written",
    "bce-pos-weight",
    "ce-map-weights-ignore-smoothing",
    "own-coupled",
    "cosine-similarity",
    "gru-cell-loop",
]


def scalar_of(named: dict[str, Tensor], row: Row) -> Tensor:
    """Some nonlinear function of a quantity, the same whatever the columns of a square root."""
    if row.attribute == "sqrt_ggn_exact":
        root = stacked(named)
        named = {"": torch.einsum("vnp,vnq->npq", root, root)}
    return sum(
        (torch.cos(torch.arange(v.numel())).to(v.dtype) * (v + v.square()).flatten()).sum()
        for v in named.values()
    )


def expected_scalar(oracle: Oracle, row: Row) -> Tensor:
    if row.attribute == "sqrt_ggn_exact":
        block = oracle.ggn_batch
        weights = torch.cos(torch.arange(block.numel())).to(block.dtype)
        return (weights * (block + block.square()).flatten()).sum()
    return scalar_of(getattr(oracle, row.attribute), row)


# Third derivatives through torch's layer norm are wrong (differences say so), in the oracle as well.
THIRD_ORDER = ("vision-transformer-hand-written",)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("name", DOUBLE)
def test_gradient_of_every_quantity(name: str) -> None:
    """``create_graph=True``, then the gradient of a function of each quantity."""
    case = BY_NAME[name]
    problem, other = case.problem(2), case.problem(2)
    oracle = Oracle(other, create_graph=True)
    own = [] if name in THIRD_ORDER else HESSIANS
    rows = [row for row in [*ROWS, *own] if not row.sampled and row.attribute not in ("kflr", "ekfac_exact")]
    backward(problem, *make_all(rows), create_graph=True)
    for row in rows:
        value = scalar_of(results(problem, row.attribute), row)
        expected = expected_scalar(oracle, row)
        assert_near(value.detach(), expected.detach(), row.attribute)
        if not expected.requires_grad:
            assert not value.requires_grad or row.order == 2
            continue
        found, known = (
            torch.autograd.grad(
                scalar,
                list(each.parameters.values()),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for scalar, each in ((value, problem), (expected, other))
        )
        assert_all_near(
            dict(zip(problem.parameters, found, strict=True)),
            dict(zip(other.parameters, known, strict=True)),
            f"gradient of {row.attribute}",
            1e-9,
        )
    for parameter in problem.parameters.values():
        parameter.grad = None


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("make", [extensions.DiagHessian, extensions.DiagHessianMC])
@pytest.mark.parametrize("name", THIRD_ORDER)
def test_third_derivatives_that_are_wrong_are_refused(name: str, make: Any) -> None:
    problem = BY_NAME[name].problem(2)
    with pytest.raises(PackpropError, match="third one of it is wrong"):
        backward(problem, make(), create_graph=True)


def test_third_derivatives_through_layer_norm_are_wrong_in_torch() -> None:
    """Once this fails, `is_wrong_in_third_order` can go."""
    x, u = (torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def slope(x: Tensor, u: Tensor) -> Tensor:
        return torch.autograd.grad(F.layer_norm(x, (4,)), x, u, create_graph=True)[0]

    with pytest.raises(GradcheckError):
        torch.autograd.gradgradcheck(slope, (x, u))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradient_of_drawn_quantities() -> None:
    """With the draws fixed, a drawn quantity is a function of the parameters like any other."""
    epsilon = 1e-5
    case = BY_NAME["linear-deep"]

    def evaluate(shift: float, create_graph: bool) -> tuple[Tensor, Problem]:
        problem = case.problem(3)
        with torch.no_grad():
            for parameter in problem.parameters.values():
                parameter.add_(shift)
        rows = [row for row in ROWS if row.sampled]
        backward(problem, *make_all(rows, seed=5), create_graph=create_graph)
        total = torch.zeros((), dtype=torch.float64)
        for attribute in ("diag_ggn_mc", "sqrt_ggn_mc"):
            total = total + sum(
                (torch.cos(torch.arange(v.numel())).to(v.dtype) * v.square().flatten()).sum()
                for v in results(problem, attribute).values()
            )
        for factors in results(problem, "kfac").values():
            total = total + sum(f.square().sum() for f in factors)
        return total, problem

    value, problem = evaluate(0.0, True)
    gradients = torch.autograd.grad(value, list(problem.parameters.values()))
    slope = sum(g.sum() for g in gradients)
    numeric = (evaluate(epsilon, False)[0] - evaluate(-epsilon, False)[0]) / (2 * epsilon)
    assert_near(slope, numeric, "directional derivative", 1e-6)
    for parameter in problem.parameters.values():
        parameter.grad = None


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradient_of_variance_as_in_the_tutorial() -> None:
    model = packprop.extend(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3)).double()
    )
    loss_function = packprop.extend(nn.CrossEntropyLoss(reduction="sum"))
    x, y = torch.randn(4, 1, 4, 4).double(), torch.randint(3, (4,))
    with packprop.backpack(extensions.Variance()):
        loss_function(model(x), y).backward(retain_graph=True, create_graph=True)
    total = sum(p.variance.sum() for p in model.parameters())
    found = torch.autograd.grad(total, list(model.parameters()))
    rows = []
    with packprop.disable():
        for n in range(4):
            loss = F.cross_entropy(model(x[n : n + 1]), y[n : n + 1])
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            rows.append(torch.cat([g.flatten() for g in gradients]))
    expected = torch.autograd.grad(torch.stack(rows).var(0, correction=0).sum(), list(model.parameters()))
    for (name, parameter), a, b in zip(model.named_parameters(), found, expected, strict=True):
        assert_near(a, b, name)
        parameter.grad = None


# Memory


def living_tensors() -> int:
    """Tensors that the garbage collector can see, without running it."""
    return sum(isinstance(obj, Tensor) for obj in gc.get_objects())


@pytest.fixture
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def loops() -> list[Any]:
    models: list[tuple[str, Callable[[], nn.Module], Callable[[], Any]]] = [
        ("linear", network, batch),
        ("resnet", lambda: ResNet().double().eval(), lambda: images(3)),
    ]
    return [pytest.param(*rest, id=name) for name, *rest in models]


def images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 1, 4, 4).double(), torch.randint(3, (size,))


@pytest.mark.usefixtures("_no_garbage_collection")
@pytest.mark.parametrize("rows", [FIRST_ORDER, ROWS], ids=["first-order", "all"])
@pytest.mark.parametrize(("build", "data"), loops())
def test_a_training_loop_does_not_grow(
    build: Callable[[], nn.Module], data: Callable[[], Any], rows: list[Row]
) -> None:
    model, loss_function = packprop.extend(build()), packprop.extend(nn.CrossEntropyLoss())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    counts = []
    steps = 200 if rows is FIRST_ORDER else 40
    for step in range(steps):
        x, y = data()
        optimiser.zero_grad()
        loss = loss_function(model(x), y)
        with packprop.backpack(*(row() for row in rows)):
            loss.backward()
        optimiser.step()
        if step in (steps // 4, steps - 1):
            counts.append(living_tensors())
    assert counts[0] == counts[1]


@pytest.mark.usefixtures("_no_garbage_collection")
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("rows", [FIRST_ORDER, ROWS], ids=["first-order", "all"])
def test_a_loop_that_differentiates_again_does_not_grow(rows: list[Row]) -> None:
    """With ``create_graph`` the gradients are part of a graph that the user drops, as ever."""
    model, loss_function = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    counts = []
    steps = 200 if rows is FIRST_ORDER else 40
    for step in range(steps):
        x, y = batch()
        loss = loss_function(model(x), y)
        with packprop.backpack(*(row() for row in rows)):
            loss.backward(create_graph=True)
        total = sum(p.variance.sum() for p in model.parameters())
        torch.autograd.grad(total, list(model.parameters()))
        del total, loss
        for parameter in model.parameters():
            parameter.grad = None
            for row in rows:
                delattr(parameter, row.attribute)
        if step in (steps // 4, steps - 1):
            counts.append(living_tensors())
    assert counts[0] == counts[1]


@pytest.mark.usefixtures("_no_garbage_collection")
@pytest.mark.parametrize("mode", ["backward", "no-backward", "plain-backward", "disabled", "no-grad"])
def test_activations_die_with_the_graph(mode: str) -> None:
    """Nothing that a forward pass made is kept once the user has let go of it."""
    model, loss_function = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    x, y = batch()
    held: list[weakref.ref[Tensor]] = [weakref.ref(x)]
    handle = model[0].register_forward_hook(lambda m, a, out: held.append(weakref.ref(out)))
    if mode == "disabled":
        with packprop.disable():
            out = model(x)
    elif mode == "no-grad":
        with torch.no_grad():
            out = model(x)
    else:
        out = model(x)
    loss = loss_function(out, y)
    if mode == "backward":
        with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            loss.backward()
    elif mode == "plain-backward":
        loss.backward()
    held += [weakref.ref(out), weakref.ref(loss)]
    del x, y, out, loss
    handle.remove()
    assert [reference() is None for reference in held] == [True] * len(held)


@pytest.mark.usefixtures("_no_garbage_collection")
def test_inputs_of_layers_are_freed_by_the_backward_pass() -> None:
    """As plain autograd does: after backward, a loss that is still held keeps no activation."""
    model, loss_function = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    x, y = batch()
    hidden: list[weakref.ref[Tensor]] = []
    handle = model[1].register_forward_hook(lambda m, a, out: hidden.append(weakref.ref(out)))
    loss = loss_function(model(x), y)
    handle.remove()
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    assert hidden[0]() is None
    assert loss.grad_fn is not None


@pytest.mark.usefixtures("_no_garbage_collection")
def test_models_die_when_the_user_lets_go() -> None:
    model, loss_function = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    x, y = batch()
    with packprop.backpack(*make_all(ROWS)):
        loss_function(model(x), y).backward()
    watched = [weakref.ref(p) for p in model.parameters()] + [weakref.ref(model)]
    del model
    assert all(reference() is None for reference in watched)


# Data parallel


@pytest.fixture
def _process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("inner", [True, False], ids=["extended-inside", "extended-outside"])
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(network, id="linear"),
        pytest.param(lambda: VisionTransformer(Attention).double(), id="transformer"),
    ],
)
def test_distributed_data_parallel(build: Callable[[], nn.Module], inner: bool) -> None:
    model = build()
    if inner:
        packprop.extend(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    if not inner:
        packprop.extend(wrapped)
    x, y = batch() if isinstance(model, nn.Sequential) else images(3)
    for _ in range(2):
        loss = packprop.extend(nn.CrossEntropyLoss())(wrapped(x), y)
        with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            loss.backward()
        for name, expected in rows_by_loop(model, x, y).items():
            assert_near(model.get_parameter(name).grad_batch, expected, name)
            assert hasattr(model.get_parameter(name), "diag_ggn_exact")


def test_compiled_or_scripted_models_are_right_or_refused() -> None:
    """A traced model hides its torch functions: right rows, or an error that says so."""
    x, y = batch()
    model = packprop.extend(torch.jit.trace(network(), (x,), check_trace=False))
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    with right_or_refused("torch functions", "trace", "recorded"):
        with packprop.backpack(extensions.BatchGrad()):
            loss.backward()
        for name, expected in rows_by_loop(model, x, y).items():
            assert_near(dict(model.named_parameters())[name].grad_batch, expected, name)


def test_language_model_trained_and_measured() -> None:
    """Tied embedding and head through several steps of a usual training loop."""
    model = packprop.extend(LanguageModel().double())
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        ids = torch.randint(4, (3, 3))
        target = torch.randint(4, (3, 3))
        optimiser.zero_grad()
        loss = loss_function(model(ids).view(-1, 4), target.view(-1))
        with packprop.backpack(extensions.BatchGrad(), extensions.Variance()):
            loss.backward()
        for parameter in model.parameters():
            assert parameter.grad_batch.shape == (3, *parameter.shape)
            assert_near(parameter.grad_batch.sum(0), parameter.grad, "rows")
        optimiser.step()


def test_the_same_extension_twice_is_one() -> None:
    model = packprop.extend(nn.Linear(3, 2))
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    asked = extensions.BatchGrad()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    with packprop.backpack(asked, asked):
        loss.backward()
    torch.testing.assert_close(model.weight.grad_batch.sum(0), model.weight.grad)


def test_hooks_in_another_thread_see_what_is_chosen_in_this_one() -> None:
    """Autograd runs nodes on accelerators in threads of its own, where context variables are not set."""
    import threading

    from packprop.algebra.algorithms import forced
    from packprop.graph.sweep import Watch

    found = []
    with packprop.algorithms(norms="products"):
        watch = Watch([], lambda *_: None)
        hook = watch._in_context(lambda value: found.append((value, forced("norms"))))
        hook(1)
        thread = threading.Thread(target=hook, args=(2,))
        thread.start()
        thread.join()
    assert found == [(1, "products"), (2, "products")]


# Results of the step before


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3))


def one_step(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    loss = packprop.extend(nn.CrossEntropyLoss())(packprop.extend(model)(x), y)
    with packprop.backpack(extensions.BatchGrad(), **options):
        loss.backward()
    found: Tensor = model[0].weight.grad_batch
    return found


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that one chunk brings whole are the chunk's own."""
    monkeypatch.setattr(packprop.context, "default_chunk_sizes", lambda device: ChunkSizes(2**12, 2**12))


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda t: t,
    "a list": lambda t: [t],
    "a view": lambda t: t[1:],
    "detached": lambda t: t.detach(),
    "an array": lambda t: t.numpy(),
    "its storage": lambda t: t.untyped_storage(),
    "a graph": lambda t: (t * torch.ones((), requires_grad=True)).sum(),
    "dlpack": lambda t: torch.utils.dlpack.to_dlpack(t),
    "weakly": weakref.ref,
    "shared memory": lambda t: t.share_memory_() is None,
}


@pytest.mark.usefixtures("small_bites")
def test_results_that_nobody_holds_are_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    model, taken = wide(), []
    allocated = Partial._allocated

    def noted(self: Any, like: Tensor, shape: Any) -> Tensor:
        there = None if self._spare is None else self._spare.data_ptr()
        made = allocated(self, like, shape)
        taken.append(made.data_ptr() == there)
        return made

    monkeypatch.setattr(Partial, "_allocated", noted)
    x, y = torch.randn(8, 30), torch.randint(3, (8,))
    place = one_step(model, x, y).data_ptr()
    assert not any(taken)
    assert one_step(model, 2 * x, y).data_ptr() == place
    assert sum(taken) == 2  # both weights; a chunk brings those of biases whole
    torch.testing.assert_close(one_step(model, 2 * x, y), one_step(wide(), 2 * x, y))
    kept = one_step(model, x, y)
    assert kept._base is None
    before = kept.clone()
    assert one_step(model, x, y).data_ptr() != place
    torch.testing.assert_close(kept, before, rtol=0, atol=0)


@pytest.mark.usefixtures("small_bites")
@pytest.mark.parametrize("how", HOLDS)
def test_results_that_somebody_holds_stay_as_they_are(how: str) -> None:
    model = wide()
    x, y = torch.randn(8, 30), torch.randint(3, (8,))
    held = HOLDS[how](one_step(model, x, y))
    place = model[0].weight.grad_batch.data_ptr()
    before = model[0].weight.grad_batch.clone()
    found = one_step(model, 2 * x, y).data_ptr()
    if how == "weakly":  # it is gone, and not another one
        assert held() is None
        return
    assert found != place
    if how == "itself":
        torch.testing.assert_close(held, before, rtol=0, atol=0)
    elif how == "an array":
        torch.testing.assert_close(torch.from_numpy(held), before, rtol=0, atol=0)
    elif how == "a graph":
        held.backward()  # PyTorch refuses if what it saved was changed


@pytest.mark.usefixtures("small_bites")
def test_a_pass_that_is_refused_leaves_the_results_of_the_one_before() -> None:
    model = wide()
    x, y = torch.randn(8, 30), torch.randint(3, (8,))
    place = one_step(model, x, y).data_ptr()
    loss = (model(x) ** 2).sum()
    with pytest.raises(PackpropError), packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss.backward()
    assert model[0].weight.grad_batch.data_ptr() == place


FOREIGN: dict[str, Callable[[Tensor], Any]] = {
    "an array's": lambda t: torch.from_numpy(t.numpy().copy()),
    "sparse": lambda t: t.to_sparse(),
    "another precision": lambda t: t.double(),
    "a number": lambda t: 3,
}


@pytest.mark.parametrize("how", FOREIGN)
def test_what_a_user_has_put_in_the_place_of_a_result_is_not_written_over(how: str) -> None:
    model = wide()
    x, y = torch.randn(8, 30), torch.randint(3, (8,))
    mine = model[0].weight.grad_batch = FOREIGN[how](one_step(model, x, y))
    array = mine.numpy() if how == "an array's" else None
    before = None if array is None else array.copy()
    del mine
    torch.testing.assert_close(one_step(model, 2 * x, y), one_step(wide(), 2 * x, y))
    if array is not None:
        assert (array == before).all()


def test_a_refusal_comes_before_any_value() -> None:
    model = wide()
    x, y = torch.randn(8, 30), torch.randint(3, (8,))
    place = one_step(model, x, y).data_ptr()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    asked = extensions.DiagHessian(), extensions.BatchJacobian(outputs=[99]), extensions.BatchGrad()
    with pytest.raises(packprop.BadInput), packprop.backpack(*asked):
        loss.backward()
    assert model[0].weight.grad_batch.data_ptr() == place


@pytest.mark.usefixtures("small_bites")
def test_results_of_another_batch_size_do_not_fit() -> None:
    model = wide()
    x, y = torch.randn(8, 30), torch.randint(3, (8,))
    one_step(model, x, y)
    found = one_step(model, x[:5], y[:5])
    torch.testing.assert_close(found, one_step(wide(), x[:5], y[:5]))


@pytest.mark.parametrize("behind", [nn.Identity(), nn.Hardtanh(-99.0, 99.0)])
def test_a_hook_on_the_output_changes_what_arrives_right_behind_it_as_anywhere(behind: nn.Module) -> None:
    model = packprop.extend(nn.Sequential(nn.Linear(4, 3), behind))
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    found = []
    for factor in (1.0, 3.0):
        out = model(x)
        out.register_hook(lambda gradient, factor=factor: factor * gradient)
        loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
        with packprop.backpack(extensions.DiagGGNExact(), extensions.BatchGrad()):
            loss.backward()
        found.append((model[0].weight.grad_batch, model[0].weight.diag_ggn_exact))
    assert torch.allclose(found[1][0], 3 * found[0][0])
    assert torch.allclose(found[1][1], 9 * found[0][1])
