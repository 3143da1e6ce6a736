"""Recording beside other contexts: `no_grad`, `disable`, nested ones, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import packprop
from packprop import extensions
from packprop.engine.recording.marks import marks_of, nodes_above
from tests.references.per_sample import batch, check_rows, network, rows_by_loop
from tests.references.running import ROWS, assert_near, make_all
from tests.versions import needs_recent


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
    assert not any(marks_of(node) for node in nodes_above([out.grad_fn]))
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


def test_modes_of_the_user_see_the_calls_of_the_user_alone() -> None:
    """A torch-function mode sees no attribute that packprop reads: each would cost a call of its function."""
    seen: list[str] = []

    class Noting(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    model, loss = network(), nn.CrossEntropyLoss()
    x, y = batch()
    with Noting():
        loss(model(x), y)
    plain = [*seen]
    packprop.extend(model)
    packprop.extend(loss)
    seen.clear()
    with Noting(), packprop.backpack(extensions.BatchL2Grad()):
        out = loss(model(x), y)
        assert seen == plain
        out.backward()


def test_backpack_is_no_mode() -> None:
    """PyTorch's functions ask for modes, and take more time under them."""
    with packprop.backpack(extensions.BatchGrad()):
        assert not torch.overrides.has_torch_function((torch.ones(1),))
        F.cross_entropy(network()(batch()[0]), batch()[1]).backward()


def test_a_function_that_is_older_than_packprop() -> None:
    """A name that was imported before packprop leads to PyTorch's function, and past the context."""
    model, (x, y) = network(), batch()
    older = torch.autograd.backward.__wrapped__
    with (
        pytest.warns(packprop.PackpropWarning, match="No backward pass was seen"),
        packprop.backpack(extensions.BatchGrad()),
    ):
        older(F.cross_entropy(model(x), y))
    assert model[0].weight.grad is not None
    assert not hasattr(model[0].weight, "grad_batch")


class Tagged(torch.Tensor):
    """Notes the functions that it is given to."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


# older versions of PyTorch do not show the second call to classes
@pytest.mark.parametrize("call", [Tensor.backward, pytest.param(torch.autograd.backward, marks=needs_recent)])
def test_tensors_of_other_classes(call: Callable[[Tensor], None]) -> None:
    """Their class sees the call, as it does without packprop, and nothing of what packprop does."""
    model, (x, y) = network(), batch()
    loss = F.cross_entropy(model(x.as_subclass(Tagged)), y)
    Tagged.seen.clear()
    with packprop.backpack(extensions.BatchGrad()):
        call(loss)
    assert "backward" in Tagged.seen
    for name, expected in rows_by_loop(model, x, y).items():
        assert_near(model.get_parameter(name).grad_batch, expected, name)
        assert type(model.get_parameter(name).grad_batch) is Tensor


def test_edges_are_no_roots() -> None:
    """The values of these are not known, so the pass is a plain one."""
    model, (x, y) = network(), batch()
    edge = torch.autograd.graph.get_gradient_edge(F.cross_entropy(model(x), y))
    with (
        pytest.warns(packprop.PackpropWarning, match="No backward pass was seen"),
        packprop.backpack(extensions.BatchGrad()),
    ):
        torch.autograd.backward([edge], [torch.ones(()).double()])
    assert model[0].weight.grad is not None
    assert not hasattr(model[0].weight, "grad_batch")


def test_backward_inside_of_a_pass() -> None:
    """A pass that a hook runs is a plain one, and the context takes the next one over."""
    models, (x, y) = [network(), network()], batch()

    def hook(_: Tensor) -> None:
        with torch.enable_grad():
            F.cross_entropy(models[1](x), y).backward()

    handle = models[0][0].weight.register_hook(hook)
    with packprop.backpack(extensions.BatchGrad()):
        F.cross_entropy(models[0](x), y).backward()
        assert models[1][0].weight.grad is not None
        assert not hasattr(models[1][0].weight, "grad_batch")
        handle.remove()
        F.cross_entropy(models[1](x), y).backward()
    assert hasattr(models[1][0].weight, "grad_batch")


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
