"""Checkpoints inside of everything else: several passes, `record`, in-place changes, losses."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import packprop
from packprop import extensions
from packprop.engine.graph.graph import ReachedUse
from packprop.errors import PackpropError
from tests.recording.saving import WAYS, Net, Wrap, assert_equal, plain
from tests.references.running import ROWS, as_tensors, assert_rows_of_terms, generator
from tests.selection import often, one_in, thorough
from tests.versions import needs_recent


@pytest.mark.parametrize("way", ["checkpoint", "save_on_cpu"])
def test_retained_graphs_and_a_second_pass(way: str) -> None:
    torch.manual_seed(0)
    model = packprop.extend(Net(WAYS[way]).eval())
    loss = packprop.extend(nn.CrossEntropyLoss())(model(torch.randn(4, 6)), torch.randint(3, (4,)))
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward(retain_graph=True)
    first = {n: p.grad_batch for n, p in model.named_parameters()}
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss.backward()
    assert_equal({n: p.grad_batch for n, p in model.named_parameters()}, first)
    with pytest.raises(PackpropError, match="retain_graph=True"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()


def test_some_parameters_only() -> None:
    def only(wrap: Wrap) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = packprop.extend(Net(wrap).double().eval())
        x, y = torch.randn(4, 6).double(), torch.randint(3, (4,))
        loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
        with packprop.backpack(extensions.DiagGGNExact()):
            loss.backward(inputs=[model.conv.weight, model.other])
        assert not hasattr(model.first.weight, "diag_ggn_exact")
        return {"conv": model.conv.weight.diag_ggn_exact, "other": model.other.diag_ggn_exact}

    assert_equal(only(WAYS["checkpoint"]), only(plain))


def test_a_checkpoint_around_everything() -> None:
    """Recording begins inside the region, once for each module that is called there."""

    def whole(wrap: Wrap) -> dict[str, Tensor]:
        torch.manual_seed(0)
        body, head = packprop.extend(nn.Linear(5, 4)).double(), packprop.extend(nn.Linear(4, 3)).double()
        x = torch.randn(6, 5, dtype=torch.float64)
        out = wrap(lambda x: head(torch.tanh(body(torch.sin(x * 2)))) + head(body(x)), x)
        loss = packprop.extend(nn.CrossEntropyLoss())(out, torch.tensor([0, 1, 2, 0, 1, 2]))
        with packprop.backpack(extensions.BatchGrad(), extensions.BatchL2Grad()):
            loss.backward()
        return {f"{m}{n}": p.grad_batch for m in (body, head) for n, p in m.named_parameters()}

    assert_equal(whole(WAYS["checkpoint"]), whole(plain))


def test_inside_record() -> None:
    """Recording is on around a checkpoint, and still on while it runs again in the backward pass."""

    def go(wrap: Wrap) -> dict[str, Tensor]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
        x, y = torch.randn(4, 5, dtype=torch.float64), torch.randint(3, (4,))
        with packprop.record(x):
            loss = F.cross_entropy(wrap(lambda x: F.linear(torch.sin(x), weight.tanh()), x), y)
            with packprop.backpack(extensions.BatchGrad(), extensions.KFAC(generator=generator())):
                loss.backward()
        return {"grad_batch": weight.grad_batch, "kfac": weight.kfac[0]}

    assert_equal(go(WAYS["checkpoint"]), go(plain))


def test_in_sequence() -> None:
    def go(segments: int | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(5, 5), nn.Tanh())]
        model = packprop.extend(nn.Sequential(*layers).double())
        x, y = torch.randn(3, 5, dtype=torch.float64), torch.randint(5, (3,))
        out = model(x) if segments is None else checkpoint_sequential(model, segments, x, use_reentrant=False)
        loss = packprop.extend(nn.CrossEntropyLoss())(out, y)
        with packprop.backpack(extensions.DiagGGNExact(), extensions.Variance()):
            loss.backward()
        return {n: torch.stack([p.diag_ggn_exact, p.variance]) for n, p in model.named_parameters()}

    expected = go(None)
    for segments in (1, 2, 4):
        assert_equal(go(segments), expected)


def test_a_function_that_does_not_do_the_same_again() -> None:
    """Another layer of the same shape: values are those of the graph, as autograd's gradients are."""
    calls: list[int] = []

    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            def block(x: Tensor) -> Tensor:
                calls.append(1)
                return self.a(x) if len(calls) % 2 else self.b(x)

            return checkpoint(block, x, use_reentrant=False)

    model = packprop.extend(Fickle().double())
    x, y = torch.randn(3, 4).double(), torch.randn(3, 4).double()
    out = model(x)
    terms = F.mse_loss(out, y, reduction="none") / y.numel()
    assert_rows_of_terms(terms, packprop.extend(nn.MSELoss())(out, y), model.a.parameters())
    assert not vars(model.b.weight)


def test_in_place_changes() -> None:
    """Of what a hook has copied, they do not matter."""

    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            with saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
                x = torch.sin(x)
                y = F.linear(x, self.weight)
                x.add_(1.0)
            return y

    model, x = packprop.extend(Changes().double()), torch.randn(2, 4).double()
    targets = torch.tensor([0, 1])
    terms = F.cross_entropy(F.linear(torch.sin(x), model.weight), targets, reduction="none") / 2
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), targets)
    assert_rows_of_terms(terms, loss, model.parameters())


@one_in(9)
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("way", ["checkpoint", "nested", "save_on_cpu", "copied"])
def test_values_are_differentiable(way: str) -> None:
    """The gradient of a function of each extension's value is that without checkpointing."""

    def slopes(wrap: Wrap) -> dict[str, list[Tensor]]:
        torch.manual_seed(0)
        model = packprop.extend(Net(wrap).double())
        x, y = torch.randn(3, 6, dtype=torch.float64), torch.randint(3, (3,))
        torch.manual_seed(1)
        loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
        with packprop.backpack(*(row(generator()) for row in ROWS)):
            loss.backward(create_graph=True)
        found: dict[str, list[Tensor]] = {}
        parameters = list(model.parameters())
        for row in ROWS:
            values = [v for p in parameters for v in as_tensors(getattr(p, row.attribute))]
            total = sum(
                (torch.cos(torch.arange(v.numel()).double()) * v.square().flatten()).sum() for v in values
            )
            found[row.attribute] = list(
                torch.autograd.grad(
                    total, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
                )
            )
        for parameter in parameters:
            parameter.grad = None
            for row in ROWS:
                delattr(parameter, row.attribute)
        return found

    found, expected = slopes(WAYS[way]), slopes(plain)
    for attribute, values in expected.items():
        assert any(bool(value.abs().max() > 0) for value in values), attribute
        for mine, other in zip(found[attribute], values, strict=True):
            assert torch.allclose(mine, other, rtol=1e-9, atol=1e-12), attribute


def test_a_loss_inside_a_checkpoint() -> None:
    def go(wrap: Callable[..., Any]) -> dict[str, Any]:
        torch.manual_seed(0)
        model, y = packprop.extend(nn.Linear(5, 3).double()), torch.tensor([0, 1, 2, 0])
        with packprop.record():
            out = model(torch.randn(4, 5, dtype=torch.float64))
            loss = wrap(lambda f: 2.0 * F.cross_entropy(torch.tanh(f), y), out)
        with packprop.backpack(*(row(generator()) for row in ROWS)):
            loss.backward()
        return {(n, r.attribute): getattr(p, r.attribute) for n, p in model.named_parameters() for r in ROWS}

    assert_equal(go(WAYS["checkpoint"]), go(plain))


@needs_recent
def test_selective_checkpointing_is_refused() -> None:
    """PyTorch allows one pass through it, and finding the samples takes two more."""
    contexts = pytest.importorskip("torch.utils.checkpoint").create_selective_checkpoint_contexts
    saved = partial(contexts, [torch.ops.aten.addmm.default])
    torch.manual_seed(0)
    model = Net(partial(checkpoint, use_reentrant=False, context_fn=saved)).eval()
    packprop.extend(model)
    loss = packprop.extend(nn.CrossEntropyLoss())(model(torch.randn(4, 6)), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(PackpropError, match="selective"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()


class Block(nn.Module):
    """Positions get biases: of a table, as those of the block before, or of zeros that require gradients."""

    def __init__(self, table: bool) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(4, 4), nn.Embedding(5, 4) if table else None

    def forward(self, h: Tensor, biases: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.table is not None:
            biases = self.table(torch.arange(5))[None]
        elif biases is None:
            biases = torch.zeros(1, 5, 4, dtype=h.dtype)
            biases.requires_grad = self.training
        return torch.tanh(self.inner(h) + biases), biases


class Encoder(nn.Module):
    """Two blocks that share biases, and one with zeros of its own, as T5 does where it is checkpointed."""

    def __init__(self, wrap: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.blocks, self.wrap = nn.ModuleList(map(Block, [True, False, False])), wrap

    def forward(self, x: Tensor) -> Tensor:
        h, biases = self.first(x)[:, None].expand(-1, 5, -1), None
        for place, block in enumerate(self.blocks):
            h, biases = self.wrap(block, h, None if place == 2 else biases)
        return self.last(h.mean(1))


def test_biases_that_a_checkpoint_makes_itself() -> None:
    """A leaf that is made anew in each run is nobody's parameter."""

    def go(wrap: Callable[..., Any]) -> dict[Any, Any]:
        torch.manual_seed(0)
        model = packprop.extend(Encoder(wrap).double())
        loss = packprop.extend(nn.CrossEntropyLoss())
        root = loss(model(torch.randn(4, 3).double()), torch.tensor([0, 1, 1, 0]))
        with packprop.backpack(*(row(generator()) for row in ROWS)):
            root.backward()
        return {(n, r.attribute): getattr(p, r.attribute) for n, p in model.named_parameters() for r in ROWS}

    assert_equal(go(partial(checkpoint, use_reentrant=False)), go(lambda block, *given: block(*given)))


@thorough
@pytest.mark.usefixtures("_new_objects_only")
@often(lambda way: way == "checkpoint")
@pytest.mark.parametrize("way", ["checkpoint", "nested", "save_on_cpu"])
def test_a_training_loop_does_not_grow(way: str) -> None:
    """The garbage collector is off, so reference cycles in what a pass leaves behind would be seen."""

    def living() -> int:
        return sum(isinstance(obj, (Tensor, ReachedUse)) for obj in gc.get_objects())

    torch.manual_seed(0)
    model, loss = packprop.extend(Net(WAYS[way])), packprop.extend(nn.CrossEntropyLoss())
    gc.collect()
    gc.disable()
    try:
        counts = []
        for step in range(8):
            value = loss(model(torch.randn(4, 6)), torch.randint(3, (4,)))
            with packprop.backpack(*(row() for row in ROWS)):
                value.backward()
            if step in (3, 7):
                counts.append(living())
        assert counts[0] == counts[1]
    finally:
        gc.enable()
