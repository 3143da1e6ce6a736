"""Extending a model and taking it back changes nothing else about it."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.recording.marks import EXTENDED, OUTPUT, marks_of
from tests.cases import BY_NAME
from tests.references.per_sample import batch, check_rows, network, rows_by_loop
from tests.references.running import ROWS, assert_near, assert_rows_of_terms, backward, extend, make_all


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


def _saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": _saved_and_loaded,
    "twice": lambda model: pickle.loads(pickle.dumps(copy.deepcopy(model))),
    "a-part": lambda model: nn.Sequential(*[copy.deepcopy(part) for part in model]),
}


@pytest.mark.parametrize("duplicate", COPIES)
def test_copies_miss_no_parameter_that_is_used_outside_of_a_call(duplicate: str) -> None:
    """The copy was never called as a whole."""
    model = packprop.extend(network())
    twin = COPIES[duplicate](model)
    x, y = batch()

    def loss() -> Tensor:
        first, middle, last = twin
        return F.cross_entropy(F.linear(middle(first(x)), last.weight, last.bias), y)

    with packprop.backpack(extensions.BatchGrad()):
        loss().backward()
    for name, expected in rows_by_loop(twin, x, y).items():
        assert_near(twin.get_parameter(name).grad_batch, expected, name)


def test_a_copy_is_extended_as_its_outermost_module() -> None:
    """Names are those in the copy, not in parts of it; restoring a copy leaves the original extended."""
    model = packprop.extend(network())
    twin = copy.deepcopy(model)
    assert twin in EXTENDED
    assert not any(part in EXTENDED for part in twin)
    model[0] = copy.deepcopy(model[0])  # a part of a module that is extended already
    assert model[0] not in EXTENDED
    packprop.restore(copy.deepcopy(model))
    packprop.restore(twin)
    assert twin not in EXTENDED
    assert model in EXTENDED


@pytest.mark.parametrize("change", ["assign", "swap", "replace", "weight_norm", "parametrize"])
def test_parameters_that_are_exchanged_after_extending(change: str) -> None:
    model, (x, y) = packprop.extend(network()), batch()
    if change == "assign":
        model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    elif change == "swap":
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.float().double()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    elif change == "replace":
        model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))
    elif change == "weight_norm":
        nn.utils.parametrizations.weight_norm(model[0])
    else:
        nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Tanh())
    check_rows(model, x, y)
    terms = F.cross_entropy(model[1:](F.linear(x, model[0].weight)), y, reduction="none") / len(x)
    loss = F.cross_entropy(model[1:](F.linear(x, model[0].weight)), y)
    assert_rows_of_terms(terms, loss, [p for p in model.parameters() if p is not model[0].bias])


def test_a_layer_added_after_extending() -> None:
    model, (x, y) = packprop.extend(network()), batch()
    model[0] = nn.Linear(3, model[0].out_features).double()
    check_rows(model, x, y)
    terms = F.cross_entropy(model(x), y, reduction="none") / len(x)
    assert_rows_of_terms(terms, F.cross_entropy(model[1:](model[0](x)), y), model.parameters())


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
    """What the loss depends on gets its values, extended or not."""
    model = network()
    packprop.extend(model[2])
    x, y = batch()
    check_rows(model, x, y)
    assert model not in EXTENDED


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


@dataclasses.dataclass(slots=True)
class Answer:
    """What a model may return."""

    logits: Tensor


class Answering(nn.Module):
    """Returns an object without a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.net(x))


def test_outputs_in_an_object_with_slots() -> None:
    model, (x, y) = packprop.extend(Answering()), batch()
    loss = F.cross_entropy(model(x).logits, y)
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    for name, expected in rows_by_loop(model.net, x, y).items():
        assert_near(model.net.get_parameter(name).grad_batch, expected, name)
    assert OUTPUT in marks_of(model(x).logits.grad_fn)


class Pair(tuple[Tensor, ...]):
    """A tuple with a constructor of its own."""

    def __new__(cls, left: Tensor, right: Tensor) -> Pair:
        return super().__new__(cls, (left, right))


class Frozen(dict[str, Tensor]):
    def __setitem__(self, key: str, value: Tensor) -> None:
        raise TypeError("frozen")


class Locked(Mapping[str, Tensor]):
    """Can be neither copied nor read as a whole."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.lock = x, threading.Lock()

    def __getitem__(self, key: str) -> Tensor:
        return self.x

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("one by one")

    def __len__(self) -> int:
        return 1


@dataclasses.dataclass(eq=False)
class Tree:
    """A node that knows its parent."""

    value: Tensor
    parent: Tree | None = None
    children: list[Tree] = dataclasses.field(default_factory=list)


def tree(x: Tensor) -> Tree:
    root = Tree(x)
    root.children.append(Tree(x, root))
    return root


def circle(x: Tensor) -> list[Any]:
    made: list[Any] = [x]
    made.append(made)
    return made


GIVEN: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple with its own constructor": (lambda x: Pair(x, x), lambda given: given[0]),
    "frozen dictionary": (lambda x: Frozen(x=x), lambda given: given["x"]),
    "mapping with a lock": (Locked, lambda given: given["x"]),
    "tree with parents": (tree, lambda given: given.children[0].value),
    "list in itself": (circle, lambda given: given[0]),
}


class Reading(nn.Module):
    def __init__(self, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.net, self.read = network(), read

    def forward(self, given: Any) -> tuple[Tensor, Any]:
        return self.net(self.read(given)), given


@pytest.mark.parametrize("name", GIVEN)
def test_containers_of_any_class(name: str) -> None:
    """The forward pass neither copies them nor fails; a budget alone is refused, by name."""
    make, read = GIVEN[name]
    model, (x, y) = packprop.extend(Reading(read)), batch()
    with packprop.backpack(extensions.BatchGrad()):
        F.cross_entropy(model(make(x))[0], y).backward()
    for key, expected in rows_by_loop(model.net, x, y).items():
        assert_near(model.net.get_parameter(key).grad_batch, expected, key)
    with (
        pytest.raises(packprop.PackpropError, match="the inputs of Reading"),
        packprop.backpack(extensions.BatchGrad(), memory="1GiB"),
    ):
        F.cross_entropy(model(make(x))[0], y).backward()


def test_no_hook_but_one_and_it_stays_one() -> None:
    """Calls leave nothing behind; restoring takes it off, of a copy, too."""
    model, (x, _) = packprop.extend(network()), batch()
    for _ in range(2):
        model(x)
        model[0](x)
        packprop.extend(model)
    assert [len(part._forward_hooks) for part in model.modules()] == [1, 0, 0, 0]
    copied = copy.deepcopy(model)
    for each in (model, copied):
        packprop.restore(each)
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in each.modules())


def test_an_encoder_layer_is_marked_as_one_model() -> None:
    """Modules that choose what they compute are marked like any other."""
    model = packprop.extend(nn.TransformerEncoderLayer(4, 1, 8, batch_first=True, dropout=0.0).double())
    x = torch.randn(3, 5, 4).double()
    out = model(x)
    assert marks_of(out.grad_fn)[OUTPUT][0][0].module() is model
    loss = packprop.extend(nn.MSELoss(reduction="sum"))(out, torch.zeros_like(out))
    assert_rows_of_terms(model(x).square(), loss, model.parameters())


class TwoParts(nn.Module):
    """A loss of a user's own that calls an extended loss, and then a loss function."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return self.first(f[:, :3], y) + F.cross_entropy(f[:, 3:], y, label_smoothing=0.2)


def test_an_extended_loss_inside_another_one_leaves_it_recorded() -> None:
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    found = []
    for prepare in (packprop.extend, lambda module: module):
        torch.manual_seed(0)
        model = packprop.extend(nn.Linear(4, 6).double())
        loss = packprop.extend(TwoParts(prepare(nn.CrossEntropyLoss(label_smoothing=0.1))))
        with packprop.backpack(extensions.DiagGGNExact()):
            loss(model(x), y).backward()
        found.append(model.weight.diag_ggn_exact)
    torch.testing.assert_close(*found)
