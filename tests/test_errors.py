"""Bad input: an error in four parts that names what, where, why and what to do; nothing changed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.cases.models.wrapping import Apply, Raw
from tests.references.mixing import MIXING
from tests.references.running import FIRST_ORDER, ROWS, SECOND_ORDER, Row, as_tensors, assert_near

each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3), torch.randint(2, (size,))


def check(error: BaseException, *parts: str) -> None:
    """Four parts, none empty, all in the text, and the words that this error owes its reader."""
    assert isinstance(error, PackpropError)
    text = str(error)
    for part in (error.asked, error.where, error.why, error.instead):
        assert part.strip()
        assert part in text
    for part in parts:
        assert part.lower() in text.lower(), f"{part!r} is not in:\n{text}"


def untouched(model: nn.Module) -> Callable[[], None]:
    """Remember a model; the returned function checks that nothing of the user's has changed."""
    state = copy.deepcopy(model.state_dict())
    training = [m.training for m in model.modules()]
    attributes = [set(vars(p)) for p in model.parameters()]

    def verify() -> None:
        after = model.state_dict()
        assert list(state) == list(after)
        assert all(torch.equal(state[k], after[k]) for k in state)
        assert training == [m.training for m in model.modules()]
        assert attributes == [set(vars(p)) for p in model.parameters()]
        assert not torch.overrides._get_current_function_mode_stack()

    return verify


def refused(loss: Tensor, *asked: Any, model: nn.Module) -> PackpropError:
    """Run the backward pass, which must fail and leave no result behind."""
    verify = untouched(model)
    with pytest.raises(PackpropError) as caught, packprop.backpack(*asked):
        loss.backward()
    verify()
    return caught.value


# Arguments


@each_row
def test_a_class_instead_of_an_extension(row: Row) -> None:
    with pytest.raises(ValueError, match=row.name) as caught:
        packprop.backpack(row.make)
    check(caught.value, row.name, f"{row.name}()")


@pytest.mark.parametrize(
    "wrong",
    ["BatchGrad", None, 3, nn.Linear(1, 1), object()],
    ids=lambda value: type(value).__name__,
)
def test_something_that_is_no_extension(wrong: Any) -> None:
    with pytest.raises(ValueError, match="extension") as caught:
        packprop.backpack(extensions.BatchGrad(), wrong)
    check(caught.value, type(wrong).__name__)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (nn.Linear, "Linear"),
        (nn.CrossEntropyLoss, "CrossEntropyLoss()"),
        (F.cross_entropy, "record"),
        ("model", "str"),
        (None, "NoneType"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_extending_what_is_no_module(wrong: Any, word: str) -> None:
    with pytest.raises(ValueError, match="extend") as caught:
        packprop.extend(wrong)
    check(caught.value, word)


@pytest.mark.parametrize("draws", [0, -1, 1.5, "3", None], ids=repr)
@pytest.mark.parametrize("row", [r for r in ROWS if r.sampled], ids=lambda row: row.name)
def test_numbers_of_draws_that_are_none(row: Row, draws: Any) -> None:
    with pytest.raises(ValueError, match="mc_samples") as caught:
        row.make(mc_samples=draws)
    check(caught.value, row.name)


@pytest.mark.parametrize("kept", [[4], [-5], [0, 17]], ids=str)
@pytest.mark.parametrize("row", [r for r in ROWS if r.subsampling], ids=lambda row: row.name)
def test_subsampling_of_samples_that_are_not_there(row: Row, kept: list[int]) -> None:
    model = packprop.extend(network())
    x, y = batch(4)
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    error = refused(loss, row.make(subsampling=kept), model=model)
    check(error, "subsampling", "4")


@pytest.mark.parametrize("kept", ["01", 3, [0.5], [[0]], [True], []], ids=repr)
@pytest.mark.parametrize("row", [r for r in ROWS if r.subsampling], ids=lambda row: row.name)
def test_subsampling_that_is_no_list_of_integers(row: Row, kept: Any) -> None:
    with pytest.raises(ValueError, match="subsampling") as caught:
        row.make(subsampling=kept)
    check(caught.value, row.name)


def test_an_unknown_approximation() -> None:
    with pytest.raises(ValueError, match="approximation") as caught:
        extensions.KFAC(approximation="everything")
    check(caught.value, "everything", "expand", "reduce", "mixed")


@pytest.mark.parametrize("hook", ["print", 3], ids=repr)
def test_a_hook_that_cannot_be_called(hook: Any) -> None:
    with pytest.raises(ValueError, match="extension_hook") as caught:
        packprop.backpack(extensions.BatchGrad(), extension_hook=hook)
    check(caught.value)


# Passes that were not recorded


@each_row
def test_a_model_that_was_never_extended(row: Row) -> None:
    model = network()
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    check(refused(loss, row(), model=model), "extend(")


@each_row
def test_a_model_that_was_extended_after_its_forward_pass(row: Row) -> None:
    model = network()
    x, y = batch()
    out = model(x)
    packprop.extend(model)
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
    check(refused(loss, row(), model=model), "extend(")


@each_row
def test_a_forward_pass_under_disable(row: Row) -> None:
    model = packprop.extend(network())
    x, y = batch()
    with packprop.disable():
        out = model(x)
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
    check(refused(loss, row(), model=model), "disable()")


def test_a_part_of_the_forward_pass_under_disable() -> None:
    model = packprop.extend(network())
    x, y = batch()
    hidden = model[0](x)
    with packprop.disable():
        out = model[2](model[1](hidden))
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
    check(refused(loss, extensions.BatchGrad(), model=model), "disable()")


@pytest.mark.parametrize("row", SECOND_ORDER, ids=lambda row: row.name)
def test_a_loss_that_was_not_recorded(row: Row) -> None:
    """Curvature needs the loss; gradients do not."""
    model = packprop.extend(network())
    x, y = batch()
    check(refused(F.cross_entropy(model(x), y), row(), model=model), "loss", "extend", "record()")


@pytest.mark.parametrize("row", SECOND_ORDER, ids=lambda row: row.name)
def test_a_loss_module_that_was_not_extended(row: Row) -> None:
    model = packprop.extend(network())
    x, y = batch()
    error = refused(nn.CrossEntropyLoss()(model(x), y), row(), model=model)
    check(error, "loss", "extend", "record()")


@pytest.mark.parametrize("row", FIRST_ORDER, ids=lambda row: row.name)
def test_gradients_need_no_recorded_loss(row: Row) -> None:
    model = packprop.extend(network())
    x, y = batch()
    with packprop.backpack(row()):
        F.cross_entropy(model(x), y).backward()
    assert all(hasattr(p, row.attribute) for p in model.parameters())


def test_a_backward_pass_outside_the_context_saves_nothing() -> None:
    model = packprop.extend(network())
    verify = untouched(model)
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    with packprop.backpack(extensions.BatchGrad()):
        pass
    loss.backward()
    verify()


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
    """A term that belongs to no sample: rows could not sum to the gradient any more."""
    model = packprop.extend(network())
    x, y = batch()
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    if inside:
        with packprop.record():
            loss = loss_function(model(x), y) + 0.1 * penalty(model)
    else:
        loss = loss_function(model(x), y) + 0.1 * penalty(model)
    check(refused(loss, row(), model=model), "0.weight")


def test_a_use_outside_of_the_forward_pass() -> None:
    model = packprop.extend(network())
    x, y = batch()
    out = F.linear(model[1](model[0](x)), model[2].weight)
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
    check(refused(loss, extensions.BatchGrad(), model=model), "record()", "weight")


# Samples


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize(
    ("layer", "word"),
    [
        pytest.param(lambda: nn.BatchNorm1d(4), "BatchNorm1d", id="batch-norm"),
        pytest.param(lambda: nn.BatchNorm1d(4, track_running_stats=False), "BatchNorm1d", id="no-statistics"),
    ],
)
def test_batch_norm_in_training_mode(row: Row, layer: Callable[[], nn.Module], word: str) -> None:
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), layer(), nn.Linear(4, 2)).train())
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    with pytest.raises(PackpropError) as caught, packprop.backpack(row()):
        loss.backward()
    check(caught.value, word, "'1'", "eval()")
    assert not any(hasattr(p, row.attribute) for p in model.parameters())


@pytest.mark.parametrize("mix", MIXING)
def test_samples_mixed_after_the_last_parameter(mix: Callable[[Tensor], Tensor]) -> None:
    """Four samples, four outputs: the axis of the outputs must not be taken for the samples'."""
    model = packprop.extend(Apply(lambda m, x: mix(torch.tanh(m.first(x))), first=nn.Linear(3, 4)))
    loss = packprop.extend(nn.MSELoss())(model(torch.randn(4, 3)), torch.randn(4, 4))
    check(refused(loss, extensions.BatchGrad(), model=model), "sample", "first")


@each_row
def test_a_loss_over_another_batch_axis(row: Row) -> None:
    """The loss sees one sample where the model saw four."""
    model = packprop.extend(network())
    x, _ = batch()
    out = model(x).mean(0, keepdim=True)
    loss = packprop.extend(nn.CrossEntropyLoss())(out, torch.tensor([1]))
    check(refused(loss, row(), model=model), "sample")


@each_row
def test_targets_that_broadcast(row: Row) -> None:
    """``[N, 1]`` against ``[N]`` compares every sample with every target."""
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    x, _ = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about the same thing
        loss = packprop.extend(nn.MSELoss())(model(x), torch.randn(4))
    if row.order == 2:
        check(refused(loss, row(), model=model), "[4, 1]", "[4]")
    else:  # each row of outputs still has a gradient of its own
        with packprop.backpack(row()):
            loss.backward()
        assert all(hasattr(p, row.attribute) for p in model.parameters())


@each_row
def test_inputs_that_disagree_on_the_number_of_samples(row: Row) -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            return (self.left(x)[:, None] * self.right(z)[None]).flatten(0, 1)

    model = packprop.extend(Pairs())
    out = model(torch.randn(2, 3), torch.randn(3, 3))
    loss = packprop.extend(nn.MSELoss())(out, torch.zeros(6, 2))
    check(refused(loss, row(), model=model), "sample")


@each_row
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_empty_batch(row: Row, reduction: str) -> None:
    model = packprop.extend(network())
    loss_function = packprop.extend(nn.MSELoss(reduction=reduction))
    loss = loss_function(model(torch.zeros(0, 3)), torch.zeros(0, 2))
    check(refused(loss, row(), model=model), "empty")


@each_row
def test_a_loss_that_is_no_scalar(row: Row) -> None:
    model = packprop.extend(network())
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss(reduction="none"))(model(x), y)
    with pytest.raises(RuntimeError, match="scalar"), packprop.backpack(row()):
        loss.backward()  # torch's own error
    assert not any(hasattr(p, row.attribute) for p in model.parameters())


@pytest.mark.parametrize("row", SECOND_ORDER, ids=lambda row: row.name)
def test_a_loss_that_is_subtracted(row: Row) -> None:
    """A loss that counts negatively curves the wrong way: it has no real square root."""
    model = packprop.extend(network())
    x, y = batch()
    loss = -packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    check(refused(loss, row(), model=model), "negative")


@pytest.mark.parametrize("row", SECOND_ORDER, ids=lambda row: row.name)
def test_a_loss_that_is_bent_afterwards(row: Row) -> None:
    """``exp(loss)`` is not the loss scaled: its curvature has another term, between samples too."""
    model = packprop.extend(network())
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y).exp()
    check(refused(loss, row(), model=model), "loss")


@pytest.mark.parametrize("row", FIRST_ORDER, ids=lambda row: row.name)
def test_a_subtracted_loss_has_gradients(row: Row) -> None:
    model = packprop.extend(network())
    x, y = batch()
    with packprop.backpack(row()):
        (-packprop.extend(nn.CrossEntropyLoss())(model(x), y)).backward()
    assert all(hasattr(p, row.attribute) for p in model.parameters())


# Options of layers that no per-sample quantity goes with


def embedded(layer: nn.Module, *more: Tensor) -> tuple[nn.Module, Tensor]:
    model = packprop.extend(Raw(lambda m, ids: m.layer(ids, *more).flatten(1)))
    model.layer = layer
    packprop.extend(model)
    ids = torch.tensor([[0, 1], [2, 1], [0, 0]])
    out = model(ids)
    return model, packprop.extend(nn.MSELoss())(out, torch.zeros_like(out))


@each_row
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag], ids=lambda kind: kind.__name__)
def test_max_norm_is_refused(row: Row, kind: type[nn.Module]) -> None:
    """It rewrites the weight in place during the forward pass, by which samples share rows."""
    model, loss = embedded(kind(4, 2, max_norm=0.5))
    check(refused(loss, row(), model=model), "max_norm", "layer.weight")


@each_row
def test_scale_grad_by_freq_is_refused(row: Row) -> None:
    """It divides by how often an index stands in the whole batch."""
    model, loss = embedded(nn.Embedding(4, 2, scale_grad_by_freq=True))
    check(refused(loss, row(), model=model), "scale_grad_by_freq", "layer.weight")


@each_row
def test_sparse_gradients_are_right(row: Row) -> None:
    model, loss = embedded(nn.Embedding(4, 2, sparse=True))
    dense, dense_loss = embedded(nn.Embedding(4, 2))
    dense.load_state_dict(model.state_dict())
    dense_loss = packprop.extend(nn.MSELoss())(
        out := dense(torch.tensor([[0, 1], [2, 1], [0, 0]])), torch.zeros_like(out)
    )
    source = torch.Generator()
    for each in (loss, dense_loss):
        with packprop.backpack(row(source.manual_seed(0))):
            each.backward()
    assert model.layer.weight.grad.is_sparse
    for name in ("layer.weight",):
        found, expected = (getattr(m.get_parameter(name), row.attribute) for m in (model, dense))
        for a, b in zip(torch.atleast_1d(found[0]), torch.atleast_1d(expected[0]), strict=True):
            assert_near(a, b, name, 1e-5)


@each_row
def test_an_input_changed_in_place_after_its_use(row: Row) -> None:
    """Autograd itself refuses where the weight is trained; never a number from changed inputs."""

    def change(m: nn.Module, x: Tensor) -> Tensor:
        x = x * 1.0
        y = F.linear(x, m.get_parameter("w"))
        x.add_(1.0)
        return y

    model = packprop.extend(Raw(change, w=(2, 3)))
    loss = packprop.extend(nn.MSELoss())(model(torch.randn(4, 3)), torch.zeros(4, 2))
    with pytest.raises(RuntimeError), packprop.backpack(row()):
        loss.backward()
    assert not hasattr(model.w, row.attribute)


# Numbers that are none


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_signals_that_are_not_finite(bad: float, reduction: str) -> None:
    """Computed, with one warning that names the first parameter."""
    model = packprop.extend(network())
    x, y = batch()
    x[1, 0] = bad
    loss = packprop.extend(nn.CrossEntropyLoss(reduction=reduction))(model(x), y)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with packprop.backpack(extensions.BatchGrad(), extensions.Variance()):
            loss.backward()
    ours = [w for w in caught if issubclass(w.category, packprop.errors.PackpropWarning)]
    assert len(ours) == 1
    text = str(ours[0].message)
    assert "weight" in text or "bias" in text
    assert "nan" in text.lower() or "finite" in text.lower()
    assert not model[0].weight.grad_batch[1].isfinite().all()
    others = torch.tensor([0, 2, 3])
    if reduction == "sum":  # one sample's poison is in its own row alone
        for parameter in model.parameters():
            assert parameter.grad_batch[others].isfinite().all()


def test_finite_signals_warn_about_nothing() -> None:
    model = packprop.extend(network())
    x, y = batch()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with packprop.backpack(*(row() for row in ROWS)):
            loss.backward()


# After any error


def test_an_error_is_followed_by_a_good_pass() -> None:
    model = packprop.extend(network())
    loss_function = packprop.extend(nn.CrossEntropyLoss())
    x, y = batch()
    refused(F.cross_entropy(model(x), y), extensions.DiagGGNExact(), model=model)
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss_function(model(x), y).backward()
    for parameter in model.parameters():
        assert_near(parameter.grad_batch.sum(0), parameter.grad, "rows", 1e-5)


def test_results_of_an_earlier_pass_do_not_outlive_an_error() -> None:
    """A refused pass leaves the results of the last good one as they are."""
    model = packprop.extend(network())
    x, y = batch()
    with packprop.backpack(extensions.DiagGGNExact()):
        packprop.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    before = {k: p.diag_ggn_exact.clone() for k, p in model.named_parameters()}
    with pytest.raises(PackpropError), packprop.backpack(extensions.DiagGGNExact()):
        F.cross_entropy(model(2 * x), y).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.diag_ggn_exact, before[name])


def test_errors_pickle() -> None:
    """They cross process borders, in data loaders and test runners."""
    import pickle

    with pytest.raises(PackpropError) as caught:
        packprop.extend(nn.Linear)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value)
    assert str(again) == str(caught.value)


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(lambda: nn.Embedding(20_000, 1), id="table"),
        pytest.param(lambda: Raw(lambda m, ids: ids[:, :1] * m.w, w=(20_000,)), id="raw"),
    ],
)
def test_a_kronecker_factor_that_no_memory_holds(layer: Callable[[], nn.Module]) -> None:
    model = packprop.extend(nn.Sequential(layer(), nn.Flatten()))
    out = model(torch.tensor([[0, 1], [2, 3]]))
    loss = packprop.extend(nn.MSELoss())(out, torch.zeros_like(out))
    check(refused(loss, extensions.KFAC(), model=model), "20000", "gib")


@each_row
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "infinite"])
def test_every_extension_warns_once_of_signals_that_are_not_finite(row: Row, bad: float) -> None:
    """They are computed, and one warning names the first parameter that they were seen at."""
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    x, y = batch()
    x[0, 0] = bad
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x) * x[:, :1], y)
    asked = row(torch.Generator())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with packprop.backpack(asked):
            loss.backward()
    own = [str(w.message) for w in caught if issubclass(w.category, packprop.PackpropWarning)]
    assert len(own) == 1
    assert "'2.weight'" in own[0]
    values = [t for p in model.parameters() for t in as_tensors(getattr(p, row.attribute))]
    assert not all(t.isfinite().all() for t in values)
