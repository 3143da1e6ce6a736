"""Distributed, compiled and threaded models."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import packprop
from packprop import extensions, operators
from tests.cases.models.attention import Attention, VisionTransformer
from tests.cases.models.language import LanguageModel
from tests.distributed.processes import in_processes, needs_groups
from tests.references.per_sample import batch, images, network, rows_by_loop
from tests.references.running import assert_near, rows_of_terms
from tests.selection import one_in, thorough


def under_data_parallel(rank: int, build: Callable[[], nn.Module], inner: bool) -> None:
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


def vision_transformer() -> nn.Module:
    return VisionTransformer(Attention).double()


@thorough
@needs_groups
@pytest.mark.parametrize("inner", [True, False], ids=["extended-inside", "extended-outside"])
@pytest.mark.parametrize("build", [network, vision_transformer])
def test_distributed_data_parallel(build: Callable[[], nn.Module], inner: bool) -> None:
    in_processes(under_data_parallel, 1, build, inner)


@one_in(2)
@pytest.mark.parametrize("extended", [True, False], ids=["extended", "plain"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
@pytest.mark.parametrize("by", ["traced", "scripted"])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_traced_and_scripted_models(by: str, whole: bool, extended: bool) -> None:
    """What is differentiated leaves nodes of its own, or stays right by being refused by name."""
    model, (x, y) = network().double(), batch()
    x, inner = x.double(), model if whole else model[0]
    hidden = torch.jit.trace(inner, (x,), check_trace=False) if by == "traced" else torch.jit.script(inner)
    called = hidden if whole else nn.Sequential(hidden, *model[1:])
    if extended:
        packprop.extend(called)
    terms = F.cross_entropy(model(x), y, reduction="none") / len(x)
    expected = rows_of_terms(terms, model.parameters())
    for _ in range(3):  # scripts are made anew for the third call
        loss = packprop.extend(nn.CrossEntropyLoss())(called(x), y)
        with packprop.backpack(extensions.BatchGrad()):
            loss.backward()
        for parameter, rows in zip(called.parameters(), expected, strict=True):
            assert_near(parameter.grad_batch, rows, "rows")


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

    from packprop.engine.algebra.choices import forced_algorithm
    from packprop.engine.graph.graph import ReachedUse
    from packprop.engine.graph.sweep import Watch

    found = []
    node = torch.ones(2, requires_grad=True).exp().grad_fn
    use = ReachedUse("exp", [], [torch.Size([2])], {0: (node, 0)})
    with packprop.algorithms(norms="products"):
        watch = Watch([], lambda _, given: found.append((given[0].tolist(), forced_algorithm("norms"))))
        hook = functools.partial(watch._note_arrived, use, 0, 0)
        hook((torch.full((2,), 1.0),))
        thread = threading.Thread(target=hook, args=((torch.full((2,), 2.0),),))
        thread.start()
        thread.join()
    assert found == [([[1.0, 1.0]], "products"), ([[2.0, 2.0]], "products")]


@pytest.mark.parametrize("behind", [nn.Identity(), nn.Hardtanh(-99.0, 99.0)])
def test_a_hook_on_the_output_changes_the_gradient_of_samples_but_no_curvature(behind: nn.Module) -> None:
    """The gradient is that of the user's pass; curvature is that of the function."""
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
    assert torch.allclose(found[1][1], found[0][1])


def test_second_derivatives_inside_inference_mode() -> None:
    """Where PyTorch records no graph: they were left out without an error."""
    model, (x, y) = packprop.extend(network()), batch()
    made = [extensions.DiagHessian, extensions.DiagGGNExact, extensions.BatchDiagHessian, extensions.PCHMP]
    parameter, found = model[0].weight, []
    vectors = torch.randn(2, parameter.numel()).double()
    for context in (contextlib.nullcontext, torch.inference_mode):
        loss = F.cross_entropy(model(x), y)
        with context():
            with packprop.backpack(*(make() for make in made)):
                loss.backward()
            product = parameter.pchmp(vectors.view(2, *parameter.shape))
            hessian = operators.hessian(lambda: F.cross_entropy(model(x), y), [parameter]) @ vectors.T
        values = [getattr(parameter, make.savefield) for make in made[:-1]]
        found.append([value.clone() for value in (*values, product, hessian)])
    for plain, inside in zip(*found, strict=True):
        assert_near(inside, plain, "inference", 1e-9)


def test_gradients_of_too_few_roots_are_left_to_torch() -> None:
    model, (x, y) = packprop.extend(network()), batch()
    losses = [F.cross_entropy(model(x), y), F.cross_entropy(model(x), y)]
    with (
        pytest.raises(RuntimeError, match="2 tensors and 1 gradients"),
        packprop.backpack(extensions.BatchGrad()),
    ):
        torch.autograd.backward(losses, [torch.ones(()).double()])
