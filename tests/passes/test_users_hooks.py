"""Hooks of the user's own run in the user's own pass, as without packprop, and in no other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions
from packprop.types import Extension
from tests.selection import one_in, thorough

EXTENSIONS = [
    extensions.BatchGrad(),
    extensions.Variance(),
    extensions.DiagGGNExact(),
    extensions.DiagGGNMC(),
    extensions.DiagHessian(),
    extensions.DiagHessianMC(),
    extensions.KFAC(),
    extensions.KFRA(),
    extensions.EKFAC(),
    extensions.HMP(),
    extensions.PCHMP(),
]


class Log:
    """What hooks have seen."""

    def __init__(self, change: Callable[[Tensor], Tensor] | None = None) -> None:
        self.seen: list[tuple[str, list[Tensor | None]]] = []
        self.change = change

    def note(self, name: str, *gradients: Any) -> None:
        flat = [g for given in gradients for g in (given if isinstance(given, tuple) else (given,))]
        self.seen.append((name, [None if gradient is None else gradient.clone() for gradient in flat]))

    def on_tensor(self, name: str) -> Callable[[Tensor], Tensor | None]:
        def hook(gradient: Tensor) -> Tensor | None:
            self.note(name, gradient)
            return None if self.change is None else self.change(gradient)

        return hook

    def on_module(self, name: str) -> Callable[[Any, Any, Any], Any]:
        def hook(_: Any, inputs: Any, outputs: Any) -> Any:
            self.note(name, inputs, outputs)
            if self.change is None or inputs[0] is None:
                return None
            return tuple(None if gradient is None else self.change(gradient) for gradient in inputs)

        return hook

    def before_module(self, name: str) -> Callable[[Any, Any], None]:
        return lambda _, outputs: self.note(name, outputs)


class Net(nn.Module):
    """Tensors in the middle have hooks and keep their gradients, if there is a log."""

    def __init__(self, log: Log | None) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3)
        self.log = log
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        a = self.act(h)
        if self.log is not None:
            h.retain_grad()
            a.register_hook(self.log.on_tensor("a"))
            (2 * h).register_hook(self.log.on_tensor("dead end"))
            self.kept = [h]
        return self.second(a)


def build(log: Log | None, modules: bool = True) -> Net:
    torch.manual_seed(0)
    model = Net(log).double()
    if modules and log is not None:
        model.first.register_full_backward_hook(log.on_module("first"))
        model.act.register_full_backward_hook(log.on_module("act"))
        model.act.register_full_backward_pre_hook(log.before_module("before act"))
        model.second.register_full_backward_hook(log.on_module("second"))
    return model


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(6, 4).double(), torch.randint(0, 3, (6,))


def run(model: Net, asked: Sequence[Extension] | None, wrap: Any = None, **options: Any) -> list[Tensor | None]:
    """One pass; the gradients that are kept at tensors of the model, its output, its loss, and parameters."""
    x, y = data()
    loss_function = nn.CrossEntropyLoss()
    if asked is not None:
        packprop.extend(model), packprop.extend(loss_function)
    out = model(x) if wrap is None else wrap(model, x)
    loss = loss_function(out, y)
    if model.log is not None:
        out.retain_grad()
        out.register_hook(model.log.on_tensor("out"))
        loss.retain_grad()
        model.second.weight.register_hook(model.log.on_tensor("weight"))
    with packprop.backpack(*(asked or ())):
        loss.backward(**options)
    if asked:
        assert all(hasattr(p, each.savefield) for each in asked for p in model.parameters())
    kept = [*model.kept, out, loss] if model.log is not None else []
    return [tensor.grad for tensor in [*kept, *model.parameters()]]


def assert_same_log(log: Log, expected: Log) -> None:
    assert [name for name, _ in log.seen] == [name for name, _ in expected.seen]
    for (name, gradients), (_, others) in zip(log.seen, expected.seen, strict=True):
        for gradient, other in zip(gradients, others, strict=True):
            assert (gradient is None) == (other is None), name
            if gradient is not None and other is not None:
                torch.testing.assert_close(gradient, other, msg=lambda text, name=name: f"{name}: {text}")


@one_in(2)
@pytest.mark.parametrize("retain", [False, True], ids=["freed", "kept"])
@pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda extension: extension.name)
def test_hooks_see_what_they_see_without_packprop(extension: Extension, retain: bool) -> None:
    """Values of kept gradients, calls of hooks and what they are called with."""
    plain, log = Log(), Log()
    expected = run(build(plain), None, retain_graph=retain)
    found = run(build(log), [extension], retain_graph=retain)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other)
    assert_same_log(log, plain)


def test_columns_one_by_one_and_all_at_once() -> None:
    """With inputs kept elsewhere, columns come one by one; otherwise all at once."""
    results = []
    for one_by_one in (False, True):
        with torch.autograd.graph.save_on_cpu() if one_by_one else torch.enable_grad():
            plain, log = Log(), Log()
            expected, model = run(build(plain), None), build(log)
            found = run(model, [extensions.DiagGGNExact(), extensions.BatchGrad()])
        assert all(map(torch.allclose, found, expected))
        assert_same_log(log, plain)
        assert str(found[0])  # what a vectorised sweep leaves cannot be printed
        results.append(model.first.weight.diag_ggn_exact)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "extension", [extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.DiagHessian()]
)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_under_create_graph(extension: Extension) -> None:
    plain, log = Log(), Log()
    expected = run(build(plain), None, create_graph=True)
    found = run(build(log), [extension], create_graph=True)
    assert all(map(torch.allclose, found, expected))
    assert_same_log(log, plain)


@pytest.mark.parametrize("modules", [False, True], ids=["tensors", "modules"])
@pytest.mark.parametrize("extension", [extensions.BatchGrad(), extensions.DiagGGNExact()])
def test_in_checkpoints(extension: Extension, modules: bool) -> None:
    def wrap(model: Net, x: Tensor) -> Tensor:
        return checkpoint(model, x.requires_grad_(), use_reentrant=False)  # type: ignore[no-any-return]  # torch's own

    plain, log = Log(), Log()
    expected, found = run(build(plain, modules), None, wrap), run(build(log, modules), [extension], wrap)
    assert all(map(torch.allclose, found[2:], expected[2:]))  # a checkpoint makes its own tensors anew
    assert_same_log(log, plain)


def clip(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


@pytest.mark.parametrize("modules", [False, True], ids=["tensors", "modules"])
def test_hooks_that_clip(modules: bool) -> None:
    """They act on the gradient, of which single samples have their shares; curvature is the function's."""
    asked = [extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.DiagHessian()]
    plain, log, quiet = Log(clip), Log(clip), build(None)
    expected = run(build(plain, modules), None)
    model = build(log, modules)
    found = run(model, asked)
    unchanged = run(quiet, asked)
    assert all(map(torch.allclose, found, expected))
    assert_same_log(log, plain)
    assert not torch.allclose(found[-4], unchanged[0])
    for name, parameter in model.named_parameters():
        own = quiet.get_parameter(name)
        if name != "second.weight":  # its own hook acts on the sum
            torch.testing.assert_close(parameter.grad_batch.sum(0), parameter.grad)
        torch.testing.assert_close(parameter.diag_ggn_exact, own.diag_ggn_exact)
        torch.testing.assert_close(parameter.diag_h, own.diag_h)


def test_a_clip_is_refused_where_samples_are_swept_apart() -> None:
    """With ``inputs=`` the samples' gradients come from a pass of their own, which no hook sees."""
    for change, error in ((None, None), (clip, packprop.PackpropError)):
        model = build(Log(change))
        wanted = [model.first.weight]
        if error is None:
            run_restricted(model, wanted)
            torch.testing.assert_close(model.first.weight.grad_batch.sum(0), model.first.weight.grad)
        else:
            with pytest.raises(error, match="changed the gradient"):
                run_restricted(model, wanted)


def run_restricted(model: Net, inputs: Sequence[Tensor]) -> None:
    x, y = data()
    loss = packprop.extend(nn.CrossEntropyLoss())(packprop.extend(model)(x), y)
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward(inputs=inputs)


def test_large_shared_weights_do_not_keep_hooks_from_running() -> None:
    """Their gradients are summed from those of samples otherwise, and left out of the user's pass."""
    found = []
    for asked in ([], [extensions.BatchGrad()]):
        torch.manual_seed(0)
        seen: list[Tensor] = []
        layers = nn.Conv1d(32, 32, 1), nn.ReLU(), nn.Conv1d(32, 64, 5), nn.ReLU()
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 124, 3))
        packprop.extend(model)
        x, y = torch.randn(16, 32, 128), torch.randint(0, 3, (16,))
        h = model[2](model[1](model[0](x)))
        h.register_hook(seen.append)
        model[3].register_full_backward_hook(lambda _m, inputs, _o, seen=seen: seen.append(inputs[0]))
        loss = packprop.extend(nn.CrossEntropyLoss())(model[3:](h), y)
        with packprop.backpack(*asked):
            loss.backward()
        found.append([*seen, model[2].weight.grad])
    assert len(found[0]) == len(found[1]) == 3
    for gradient, other in zip(*found, strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("extension", [extensions.BatchGrad(), extensions.DiagHessian()])
def test_a_hook_on_an_output_that_leads_nowhere(extension: Extension) -> None:
    """Of a cell's outputs the memory is not used any more, but the state is computed from it."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTMCell(4, 5), nn.Linear(5, 3)
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            state, memory = self.cell(x)
            memory.register_hook(self.seen.append)
            return self.head(state)  # type: ignore[no-any-return]  # a module's call is Any

    found = []
    for asked in ([], [extension]):
        torch.manual_seed(0)
        model, (x, y) = packprop.extend(Cell()), data()
        loss = packprop.extend(nn.CrossEntropyLoss())(model(x.float()), y)
        with packprop.backpack(*asked):
            loss.backward()
        found.append(model.seen)
    assert len(found[0]) == len(found[1]) == 1
    torch.testing.assert_close(found[0], found[1])


def test_hooks_registered_after_the_forward_pass() -> None:
    """On a tensor that was kept, on one between the model and the loss, inside ``backpack`` and outside."""
    kept: list[list[Tensor]] = []
    for asked in ([], [extensions.BatchGrad(), extensions.DiagGGNExact()]):
        model, (x, y) = packprop.extend(build(None)), data()
        inner: list[Tensor] = []
        model.act.register_forward_hook(lambda _m, _i, out, inner=inner: inner.append(out))
        seen: list[Tensor] = []
        with packprop.backpack(*asked):
            out = model(x)
            between = out.clone()
            between.register_hook(seen.append)
            scaled = between * 2
            scaled.retain_grad()
            inner[0].retain_grad()
            inner[0].register_hook(seen.append)
            packprop.extend(nn.CrossEntropyLoss())(scaled, y).backward()
        assert inner[0].grad is not None
        assert scaled.grad is not None
        kept.append([*seen, inner[0].grad, scaled.grad])
    assert len(kept[0]) == len(kept[1]) == 4
    assert all(map(torch.allclose, *kept))


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("every", [False, True], ids=["one", "every module"])
def test_hooks_of_the_older_kind(every: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.modules.module, "_global_is_full_backward_hook", None)
    logs = []
    for asked in (None, [extensions.BatchGrad(), extensions.DiagGGNExact()]):
        log, model = Log(), build(None)
        hook = log.on_module("old")
        everywhere = nn.modules.module.register_module_backward_hook
        handle = everywhere(hook) if every else model.first.register_backward_hook(hook)
        try:
            run(model, asked)
        finally:
            handle.remove()
        logs.append(log)
    assert logs[0].seen
    assert_same_log(logs[1], logs[0])


def test_global_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.modules.module, "_global_is_full_backward_hook", None)
    logs = []
    for asked in (None, [extensions.BatchGrad(), extensions.DiagGGNExact()]):
        log, model = Log(), build(None)
        handle = nn.modules.module.register_module_full_backward_hook(log.on_module("any"))
        try:
            run(model, asked)
        finally:
            handle.remove()
        logs.append(log)
    assert len(logs[0].seen) == 5
    assert_same_log(logs[1], logs[0])


def test_all_is_put_back_after_an_error() -> None:
    """An error in the middle of an internal pass leaves hooks and kept gradients as they were."""

    class Failing(Extension):
        savefield = "failing"
        rows = (packprop.extensions.Row(packprop.types.EXACT, lambda structure: 1 / 0),)

    log = Log()
    model, (x, y) = packprop.extend(build(log)), data()
    out = model(x)
    handle = out.register_hook(log.on_tensor("out"))
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
    with pytest.raises(ZeroDivisionError), packprop.backpack(Failing()):
        loss.backward(retain_graph=True)
    assert not log.seen
    assert model.kept[0].grad is None
    loss.backward()
    assert [name for name, _ in log.seen] == ["out", "second", "a", "before act", "act", "first"]
    assert model.kept[0].grad is not None
    handle.remove()


def test_a_hook_that_is_removed_meanwhile_is_gone() -> None:
    seen: list[Tensor] = []
    model, (x, y) = packprop.extend(build(None)), data()
    out = model(x)
    handles = [out.register_hook(seen.append) for _ in range(2)]
    loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
    with packprop.backpack(extensions.DiagGGNExact(), extension_hook=lambda _: handles[0].remove()):
        loss.backward(retain_graph=True)
    before = len(seen)
    loss.backward()
    assert (before, len(seen)) == (1, 2)


def test_gradients_kept_from_earlier_passes_are_added_to() -> None:
    """``retain_grad`` adds up over passes: what was there before is not lost."""
    grads = []
    for asked in ([], [extensions.DiagGGNExact()]):
        model, (x, y) = packprop.extend(build(Log())), data()
        loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
        for _ in range(2):
            with packprop.backpack(*asked):
                loss.backward(retain_graph=True)
        grads.append(model.kept[0].grad)
    assert grads[0] is not None
    torch.testing.assert_close(grads[1], grads[0])


def test_products_run_no_hooks() -> None:
    """Products kept on parameters, whole products and operators."""
    log = Log(clip)
    model, (x, y) = packprop.extend(build(log)), data()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    with packprop.backpack(extensions.HMP(), extensions.GGNMP()):
        loss.backward(retain_graph=True)
    calls, kept = len(log.seen), model.kept[0].grad
    weight = model.first.weight
    vector = torch.randn_like(weight)
    products = [weight.hmp(vector), *packprop.products.hvp(loss, [weight], [vector]), weight.ggnmp(vector)]
    matrix = packprop.operators.hessian(loss, [weight])
    products.append((matrix @ vector.flatten()).view_as(weight))
    assert len(log.seen) == calls
    assert model.kept[0].grad is kept
    quiet = build(None)
    plain = nn.CrossEntropyLoss()(quiet(x), y)
    (gradient,) = torch.autograd.grad(plain, quiet.first.weight, create_graph=True)
    (expected,) = torch.autograd.grad(gradient, quiet.first.weight, vector)
    for product in (products[0], products[1], products[3]):
        torch.testing.assert_close(product, expected)


@pytest.mark.parametrize("extension", [extensions.KFRA(), extensions.PCHMP(), extensions.DiagHessian()])
def test_full_backward_hooks_hide_no_chain_of_layers(extension: Extension) -> None:
    """The nodes of such hooks are identities, not nonlinearities of an unknown kind."""
    results = []
    for log in (None, Log()):
        model = build(log)
        run(model, [extension])
        value = getattr(model.first.weight, extension.savefield)
        results.append(value(torch.ones_like(model.first.weight)) if callable(value) else value)
    torch.testing.assert_close(*results)


def test_computed_weights() -> None:
    """Hooks on what a weight is computed from, and on the weight."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.ones(3, 1))
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight * self.scale
            weight.register_hook(self.seen.append)
            return x @ weight.mT

    found = []
    for asked in ([], [extensions.BatchGrad(), extensions.DiagGGNExact()]):
        torch.manual_seed(0)
        model, (x, y) = packprop.extend(Scaled()), data()
        loss = packprop.extend(nn.CrossEntropyLoss())(model(x.float()), y)
        with packprop.backpack(*asked):
            loss.backward()
        found.append([*model.seen, model.weight.grad, model.scale.grad])
    assert len(found[0]) == len(found[1]) == 3
    assert all(map(torch.allclose, *found))


def hooked_nodes(place: str, when: str, change: Callable[[Tensor], Tensor] | None) -> tuple[Net, Log]:
    """A model in which each pass leaves a hook on the node of a layer, or on one that leads to a weight."""
    log, model = Log(change), build(None)

    def changed(gradients: Sequence[Tensor | None]) -> Any:
        log.note(place, *gradients)
        return change and tuple(None if each is None else change(each) for each in gradients)

    def add(_module: Any, _inputs: Any, out: Tensor) -> None:
        node: Any = out.grad_fn
        if place == "weight":
            node = node.next_functions[2][0]
        if when == "before":
            node.register_prehook(changed)
        else:
            node.register_hook(lambda gradients, _: changed(gradients))

    model.get_submodule("second" if place == "weight" else place).register_forward_hook(add)
    return model, log


@pytest.mark.parametrize("change", [None, clip], ids=["unchanged", "changed"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", ["act", "second", "weight"])
def test_hooks_on_nodes(place: str, when: str, change: Callable[[Tensor], Tensor] | None) -> None:
    """They run once; what acts on sums over samples alone is refused for quantities of single samples."""
    quiet, (plain, expected_log) = build(None), hooked_nodes(place, when, change)
    expected, (model, log) = run(plain, None), hooked_nodes(place, when, change)
    curvature = [extensions.DiagGGNExact(), extensions.DiagHessian(), extensions.KFRA()]
    run(quiet, curvature)
    found = run(model, curvature)
    torch.testing.assert_close(found, expected)
    assert_same_log(log, expected_log)
    for parameter, own in zip(model.parameters(), quiet.parameters(), strict=True):
        for name in ("diag_ggn_exact", "diag_h", "kfra"):
            torch.testing.assert_close(getattr(parameter, name), getattr(own, name))
    again, log = hooked_nodes(place, when, change)
    if change is not None and (place == "weight" or (place, when) == ("second", "after")):
        with pytest.raises(packprop.PackpropError, match="summed over samples"):
            run(again, [extensions.BatchGrad()])
    else:
        torch.testing.assert_close(run(again, [extensions.BatchGrad(), extensions.DiagGGNExact()]), expected)
        assert_same_log(log, expected_log)
        for parameter in again.parameters():
            torch.testing.assert_close(parameter.grad_batch.sum(0), parameter.grad)


def test_hooks_that_change_a_computed_weight() -> None:
    """They are given the sum over samples: the gradients of samples would not add up to ``.grad``."""
    weight, (x, y) = nn.Parameter(torch.randn(3, 4)), data()
    for asked, refused in (([extensions.DiagGGNExact()], False), ([extensions.BatchGrad()], True)):
        scaled = weight * 2
        scaled.register_hook(clip)
        loss = F.cross_entropy(x.float() @ scaled.mT, y)
        with packprop.backpack(*asked):
            if not refused:
                loss.backward()
                continue
            with pytest.raises(packprop.PackpropError, match="summed over samples"):
                loss.backward()


UNEXTENDED = """
import torch
from packprop import backpack, extensions

torch.manual_seed(0)
x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
first, second = torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)
for hooked in (False, True):
    seen = []
    h = first(x).tanh()
    if hooked:
        h.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
        h.retain_grad()
    with backpack(extensions.DiagGGNExact()):
        torch.nn.functional.cross_entropy(second(h), y).backward()
    if hooked:
        assert len(seen) == 1 and torch.equal(h.grad, 2 * seen[0])
        torch.testing.assert_close(first.weight.diag_ggn_exact, before)
    before = first.weight.diag_ggn_exact
"""


@thorough
def test_hooks_of_models_that_were_never_extended() -> None:
    """In a process of its own: nothing was extended there."""
    subprocess.run([sys.executable, "-c", UNEXTENDED], check=True, timeout=120)
