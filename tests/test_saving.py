"""Checkpointing and offloading stay what they are: the same numbers, and the memory that they save."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import packprop
from benchmarks.checkpointing import EXTENSIONS, Size, Step
from packprop import extensions
from packprop.algebra import cells
from packprop.engine import chunks
from packprop.errors import PackpropError
from packprop.recording import regions
from packprop.recording.marks import USE, RecordedUse, marks_of
from tests.references.running import ROWS, Row, as_tensors, generator

Wrap = Callable[[Callable[..., Any], Tensor], Any]


def plain(function: Callable[..., Any], x: Tensor) -> Any:
    return function(x)


def offloaded(function: Callable[..., Any], x: Tensor) -> Any:
    with save_on_cpu():
        return function(x)


def copied(function: Callable[..., Any], x: Tensor) -> Any:
    """What offloading from a GPU does: what is saved is another tensor, in another place."""
    with saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
        return function(x)


def nested(function: Callable[..., Any], x: Tensor) -> Any:
    again = partial(checkpoint, use_reentrant=False)
    return again(partial(again, function), x)


def twice(function: Callable[..., Any], x: Tensor) -> Any:
    """Two regions, each inside one that does something before and after."""
    again = partial(checkpoint, use_reentrant=False)
    return again(lambda x: again(function, torch.sin(x)) * 1.5, again(lambda x: again(function, x) + 1.0, x))


def offloaded_checkpoint(function: Callable[..., Any], x: Tensor) -> Any:
    with save_on_cpu():
        return checkpoint(function, x, use_reentrant=False)


def checkpointed_offload(function: Callable[..., Any], x: Tensor) -> Any:
    return checkpoint(lambda x: offloaded(function, torch.tanh(x)), x, use_reentrant=False)


def reentrant(function: Callable[..., Any], x: Tensor) -> Any:
    return checkpoint(function, x, use_reentrant=True)


def reentrant_twice(function: Callable[..., Any], x: Tensor) -> Any:
    """One inside the other, and one beside it that shares its parameters."""
    return reentrant(lambda x: reentrant(function, torch.sin(x)) * 1.5, reentrant(function, x) + 1.0)


def reentrant_inside(function: Callable[..., Any], x: Tensor) -> Any:
    return checkpoint(lambda x: reentrant(function, torch.tanh(x)) + x, x, use_reentrant=False)


def reentrant_around(function: Callable[..., Any], x: Tensor) -> Any:
    return reentrant(lambda x: checkpoint(function, torch.tanh(x), use_reentrant=False) + x, x)


def reentrant_under_save_on_cpu(function: Callable[..., Any], x: Tensor) -> Any:
    with save_on_cpu():
        return reentrant(function, x)


WAYS: dict[str, Wrap] = {
    "reentrant": reentrant,
    "reentrant twice": reentrant_twice,
    "reentrant in checkpoint": reentrant_inside,
    "checkpoint in reentrant": reentrant_around,
    "reentrant under save_on_cpu": reentrant_under_save_on_cpu,
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "without early stop": partial(checkpoint, use_reentrant=False, early_stop=False),
    "save_on_cpu": offloaded,
    "copied": copied,
    "nested": nested,
    "twice": twice,
    "checkpoint under save_on_cpu": offloaded_checkpoint,
    "save_on_cpu in checkpoint": checkpointed_offload,
}
# The same function without anything saved elsewhere
REFERENCE: dict[str, Wrap] = {
    "reentrant twice": lambda function, x: function(torch.sin(function(x) + 1.0)) * 1.5,
    "reentrant in checkpoint": lambda function, x: function(torch.tanh(x)) + x,
    "checkpoint in reentrant": lambda function, x: function(torch.tanh(x)) + x,
    "twice": lambda function, x: function(torch.sin(function(x) + 1.0)) * 1.5,
    "save_on_cpu in checkpoint": lambda function, x: function(torch.tanh(x)),
}


class Net(nn.Module):
    """Layers of every kind of rule, and the fallback, each in a block that is wrapped."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.wrap = wrap
        self.first = nn.Linear(6, 8)
        self.mix = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 8))
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.scale = nn.Parameter(torch.randn(8))
        self.shift = nn.Parameter(torch.randn(8))
        self.other = nn.Parameter(torch.randn(8))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.last = nn.Linear(8, 3)

    def spread(self, x: Tensor) -> Tensor:
        return self.conv(x.unsqueeze(-2)).mean(-2)

    def loose(self, x: Tensor) -> Tensor:
        """Parameters used outside of any module, and by functions that have no rule."""
        x = F.dropout(x, 0.25)
        bias = self.shift.expand(2, 8)[0]
        x = x * self.scale + bias
        return torch.atan2(x, 2.0 + self.other.square())

    def own(self, x: Tensor) -> Tensor:
        return F.linear(torch.sin(x), self.mix[0].weight)  # tied to a layer in another block

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (self.mix, self.spread, self.loose, self.own, self.normed):
            x = self.wrap(block, x)
        return self.last(x)


def run(wrap: Wrap, asked: list[Row], **options: Any) -> dict[str, Any]:
    """Everything that was asked for, by parameter and attribute, and the gradient."""
    torch.manual_seed(0)
    model = packprop.extend(Net(wrap).double())
    loss = packprop.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randint(3, (4,))
    torch.manual_seed(1)
    value = loss(model(x), y)
    with packprop.backpack(*(row(generator()) for row in asked)):
        value.backward(**options)
    parameters = dict(model.named_parameters())
    attributes = [*(row.attribute for row in asked), "grad"]
    return {(n, name): getattr(p, name) for n, p in parameters.items() for name in attributes}


def assert_equal(found: dict[Any, Any], expected: dict[Any, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        for mine, other in zip(as_tensors(found[key]), as_tensors(value), strict=True):
            assert torch.allclose(mine, other, rtol=1e-12, atol=1e-14), key


@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_the_same(way: str) -> None:
    assert_equal(run(WAYS[way], ROWS), run(REFERENCE.get(way, plain), ROWS))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("way", ["checkpoint", "reentrant", "save_on_cpu"])
def test_each_extension_alone(way: str, row: Row) -> None:
    assert_equal(run(WAYS[way], [row]), run(plain, [row]))


SMALL = Size(samples=256, width=128, blocks=6, layers=4)


@pytest.mark.parametrize("way", ["checkpoint", "reentrant checkpoint"])
@pytest.mark.parametrize("extension", EXTENSIONS)
def test_the_peak_is_that_of_checkpointing(way: str, extension: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 10 % above plain training with checkpointing plus the results, in tracked bytes."""
    # chunks as small beside this network as the default ones beside a large one
    monkeypatch.setattr(chunks, "SCRATCH", 2**16 if extension == "Variance" else 2**19)
    monkeypatch.setattr(cells, "IN_CACHE", 2**12)
    base, mine = Step(way, None, SMALL).bytes(), Step(way, extension, SMALL).bytes()
    assert mine.peak < 1.1 * (base.peak + mine.results)
    assert mine.kept < 1.01 * base.kept
    held = Step("plain", None, SMALL).bytes()
    assert held.kept > 1.1 * base.peak  # so that the bound tells


def uses_of(loss: Tensor) -> Iterator[Any]:
    stack, seen = [loss.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield from (use for use, *_ in marks_of(node).get(USE, ()))
        stack += [upstream for upstream, _ in node.next_functions]


def test_nothing_is_held_and_nothing_is_left() -> None:
    """Inside a checkpoint a use holds no input; after the pass nothing of it is alive, without a collection."""
    seen: list[weakref.ref[Tensor]] = []

    def block(x: Tensor) -> Tensor:
        x = torch.sin(x)
        seen.append(weakref.ref(x))
        return model(x)

    model = packprop.extend(nn.Linear(5, 5))
    gc.collect()
    gc.disable()
    try:
        loss = packprop.extend(nn.MSELoss())(
            checkpoint(block, torch.randn(3, 5, requires_grad=True), use_reentrant=False), torch.randn(3, 5)
        )
        assert [reference() for reference in seen] == [None]
        assert [use.source is not None for use in uses_of(loss)] == [True]
        with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            loss.backward()
        assert len(seen) > 1
        del loss
        assert [reference() for reference in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_no_hooks_no_cost() -> None:
    """Where no hooks are in force uses hold their inputs, and nothing is run again."""
    model = packprop.extend(nn.Linear(5, 5))
    loss = model(torch.randn(3, 5)).sum()
    assert [use.source for use in uses_of(loss)] == [None]


def test_plain_training_sees_no_difference() -> None:
    """A checkpoint in an extended model saves and computes as often as in one that is not extended."""

    def train(extended: bool) -> tuple[int, list[Tensor]]:
        torch.manual_seed(0)
        model = Net(WAYS["checkpoint"])
        calls: list[int] = []
        model.mix.register_forward_pre_hook(lambda *_: calls.append(1))
        if extended:
            packprop.extend(model)
        model(torch.randn(4, 6)).sum().backward()
        return len(calls), [p.grad for p in model.parameters() if p.grad is not None]

    (calls, expected), (again, found) = train(False), train(True)
    assert calls == again == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["checkpoint", "reentrant", "save_on_cpu"])
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
    """A clear error, whatever is saved: never a number of the wrong function."""
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

    model = packprop.extend(Fickle())
    loss = packprop.extend(nn.MSELoss())(model(torch.randn(3, 4)), torch.randn(3, 4))
    asked = packprop.backpack(extensions.BatchGrad())
    with pytest.raises(PackpropError, match="ran its function again"), asked:
        loss.backward()


@contextmanager
def unlike() -> Iterator[None]:
    """A checkpoint of which the parts that are relied on cannot be found."""
    before = regions.frame_of
    regions.frame_of = lambda hooks: (None, False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        regions.frame_of = before  # type: ignore[attr-defined]


def test_a_checkpoint_of_another_make_is_right_all_the_same() -> None:
    expected = run(plain, ROWS)
    with unlike():
        assert_equal(run(WAYS["checkpoint"], ROWS), expected)


def test_in_place_changes_are_noticed() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            with save_on_cpu():
                x = torch.sin(x)
                y = F.linear(x, self.weight)
                x.add_(1.0)
            return y

    model = packprop.extend(Changes())
    loss = packprop.extend(nn.CrossEntropyLoss())(model(torch.randn(2, 4)), torch.tensor([0, 1]))
    with pytest.raises(PackpropError, match="changed in place"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()


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


# Reentrant checkpoints: what cannot be is refused


def test_an_input_that_is_data() -> None:
    """The first block of a model, whose input must require a gradient."""

    def go(wrap: Wrap) -> dict[str, Any]:
        torch.manual_seed(0)
        model = packprop.extend(nn.Linear(5, 3).double())
        x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
        with packprop.record(x):
            out = wrap(lambda x: torch.tanh(model(x)), x)
        loss = packprop.extend(nn.CrossEntropyLoss())(out, torch.tensor([0, 1, 2, 0]))
        with packprop.backpack(*(row(generator()) for row in ROWS)):
            loss.backward()
        assert x.grad is not None
        found = {(n, r.attribute): getattr(p, r.attribute) for n, p in model.named_parameters() for r in ROWS}
        return found | {"x": x.grad}

    assert_equal(go(WAYS["reentrant"]), go(plain))


def test_several_inputs_and_outputs() -> None:
    """With a tensor that needs no gradient, something that is no tensor, and an output that is not used."""

    class Pair(nn.Module):
        def __init__(self, wrap: Callable[..., Any]) -> None:
            super().__init__()
            self.wrap = wrap
            self.first, self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def block(self, x: Tensor, power: int, mask: Tensor) -> tuple[Tensor, int, Tensor, Tensor]:
            return torch.tanh(self.a(x)) * mask, power, self.b(x) ** power, self.a(x)

        def forward(self, x: Tensor) -> Tensor:
            one, power, two, _ = self.wrap(self.block, self.first(x), 2, x[:, :4].abs())
            return one * power + two

    def go(wrap: Callable[..., Any]) -> dict[str, Any]:
        torch.manual_seed(0)
        model = packprop.extend(Pair(wrap).double())
        x, y = torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, 3, 1])
        with packprop.backpack(*(row(generator()) for row in ROWS)):
            packprop.extend(nn.CrossEntropyLoss())(model(x), y).backward()
        return {(n, r.attribute): getattr(p, r.attribute) for n, p in model.named_parameters() for r in ROWS}

    assert_equal(go(partial(checkpoint, use_reentrant=True)), go(lambda function, *inputs: function(*inputs)))


def refusal(model: nn.Module, x: Tensor, *asked: Any, **options: Any) -> str:
    loss = packprop.extend(nn.CrossEntropyLoss())(packprop.extend(model)(x), torch.zeros(len(x)).long())
    with pytest.raises(PackpropError) as caught, packprop.backpack(*asked):
        loss.backward(**options)
    assert "use_reentrant=False" in str(caught.value)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_differentiating_a_reentrant_checkpoint_twice_is_refused() -> None:
    model = Net(WAYS["reentrant"])
    message = refusal(model, torch.randn(3, 6), extensions.Variance(), create_graph=True)
    assert "create_graph=True" in message
    assert not any(hasattr(p, "variance") for p in model.parameters())


def test_a_parameter_as_an_argument_is_refused() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(5, 4), nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(F.linear, self.first(x), self.weight, use_reentrant=True)

    assert "arguments" in refusal(Given(), torch.randn(3, 5), extensions.BatchGrad())


def test_a_loss_in_a_reentrant_checkpoint_is_refused() -> None:
    layer = packprop.extend(nn.Linear(5, 3))
    x = torch.randn(4, 5, requires_grad=True)
    with packprop.record(x):
        loss = checkpoint(lambda x: F.cross_entropy(layer(x), torch.zeros(4).long()), x, use_reentrant=True)
    with pytest.raises(PackpropError, match="a loss in it"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()


def test_the_node_gets_its_own_backward_pass_back() -> None:
    model = packprop.extend(Net(WAYS["reentrant"]).eval())
    loss = packprop.extend(nn.CrossEntropyLoss())(model(torch.randn(3, 6)), torch.tensor([0, 1, 2]))
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss.backward(retain_graph=True)
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    loss.backward()
    assert_equal({n: p.grad for n, p in model.named_parameters()}, found)


@pytest.mark.parametrize("way", ["checkpoint", "nested", "reentrant", "reentrant twice", "save_on_cpu"])
def test_a_training_loop_does_not_grow(way: str) -> None:
    """Without garbage collection: nothing of a pass refers to itself."""

    def living() -> int:
        return sum(isinstance(obj, (Tensor, RecordedUse)) for obj in gc.get_objects())

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
