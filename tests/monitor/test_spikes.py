"""A step whose loss leaves its range is looked at by sample and token; nothing is changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import BadInput, PackpropError
from packprop.examples import SmallTransformer, token_cross_entropy
from packprop.extensions import BatchL2Grad
from packprop.monitor import Spike
from packprop.monitor.spikes import FEWEST, Range


def test_the_range() -> None:
    known = Range(reach=6.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        assert known.left_by(2.0 + 0.1 * float(torch.randn((), generator=generator))) is None
    assert known.left_by(2.3) is None
    for far in (3.0, math.inf, -math.inf, math.nan):
        assert known.left_by(far) == pytest.approx(2.0, abs=0.1)
    assert known.left_by(1.0) is None  # falling is no spike
    assert not any(value > 2.9 for value in known.values)


def test_the_first_steps_make_no_spike() -> None:
    known = Range(reach=6.0)
    assert math.isnan(known.left_by(math.nan) or 0.0)  # but for one that is not finite
    assert [known.left_by(value) for value in (5.0, 1.0, 9.0)] == [None] * 3
    assert known.left_by(math.nan) == 5.0
    assert FEWEST > 3


def stream(steps: int, planted: set[int]) -> list[tuple[Tensor, Tensor, int]]:
    """Windows of a regular text, in batches of 8; in some steps one sample is noise: tokens, targets, which."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(steps):
        starts = torch.randint(6, (8, 1), generator=generator)
        text = (starts + torch.arange(17)) % 6
        bad = int(torch.randint(8, (), generator=generator))
        if step in planted:
            text[bad] = torch.randint(6, 20, (17,), generator=generator)
        found.append((text[:, :-1], text[:, 1:], bad))
    return found


def test_planted_documents_are_found() -> None:
    """Recall at 1 of documents of noise in a stream of text: all ten come first in their steps."""
    torch.manual_seed(0)
    model = SmallTransformer(20, width=16, heads=2, length=16).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    planted = {*range(60, 120, 6)}
    spikes: list[Spike] = []
    decoded: list[Any] = []

    def decode(identifier: Any) -> list[str]:
        decoded.append(identifier)
        step, place = identifier
        return [f"<{token}>" for token in batches[step][1][place].tolist()]

    batches = stream(120, planted)
    monitor = packprop.Monitor(model, every=10_000, log=None, on_spike=spikes.append, decode=decode)
    for step, (tokens, targets, _) in enumerate(batches):

        def run(tokens: Tensor = tokens, targets: Tensor = targets) -> Tensor:
            return token_cross_entropy(model(tokens), targets)

        optimizer.zero_grad()
        with monitor.step(number=step):
            loss = run()
            loss.backward()
        state = torch.get_rng_state()
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        monitor.check(loss, run, identifiers=[(step, place) for place in range(8)])
        assert torch.equal(torch.get_rng_state(), state)
        after = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, before, after))
        if step not in planted:  # noise is looked at, not learned
            optimizer.step()
    assert {spike.step for spike in spikes} == planted
    first = [spike.samples[0] for spike in spikes]
    assert [each.sample for each in first] == [(step, batches[step][2]) for step in sorted(planted)]
    for spike in spikes:
        top = spike.samples[0]
        assert top.times is not None
        assert top.times > 3
        assert len(top.tokens) == 5
        assert all(token.text is not None and token.text in str(spike) for token in top.tokens)
        assert not any(each.tokens for each in spike.samples[1:])
    assert not any(name.startswith("_spike") for p in model.parameters() for name in vars(p))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_classifier_has_samples_and_no_tokens() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3))
    x, y = torch.randn(12, 4), torch.randint(3, (12,))
    monitor = packprop.Monitor(model, log=None)
    for _ in range(12):
        assert monitor.check(1.0, lambda: F.cross_entropy(model(x), y)) is None
    x[5] *= 100
    y[5] = model.eval()(x[5]).argmin()
    spike = monitor.check(F.cross_entropy(model(x), y), lambda: F.cross_entropy(model(x), y))
    assert spike is not None
    assert (spike.what, spike.samples[0].sample, spike.samples[0].tokens) == ("loss", 5, ())
    assert all(p.grad is None for p in model.parameters())
    assert "5: gradient" in str(spike)


class WithTemperature(nn.Module):
    """A head that is not monitored, with a learned temperature and statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature = nn.Linear(8, 3), nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.temperature * self.layer(x)  # type: ignore[no-any-return]  # a module's call is Any


def test_nothing_changes_beside_the_monitored_model_either() -> None:
    """Gradients, buffers and values of other passes, of whatever the loss is made of; no hook runs."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv1d(1, 2, 1), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())
    encoder.append(nn.Linear(8, 8))
    head, inputs = WithTemperature(), torch.randn(16, 1, 4, requires_grad=True)
    y = torch.randint(3, (16,))
    monitor = packprop.Monitor(encoder, log=None)
    leaves: list[Tensor] = [*encoder.parameters(), *head.parameters(), inputs]
    calls: list[Tensor] = []
    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(calls.append)
        leaf.register_hook(lambda _: calls.append(inputs))
    head.layer.register_full_backward_hook(lambda *_: calls.append(inputs))

    def run() -> Tensor:
        return F.cross_entropy(head(encoder(inputs)), y)

    with packprop.backpack(BatchL2Grad()), packprop.record():
        run().backward()
    for _ in range(12):
        monitor.check(1.0, run)
    buffers = {id(each): each.clone() for model in (encoder, head) for each in model.buffers()}
    kept = [(leaf.grad, leaf.grad.clone(), dict(vars(leaf))) for leaf in leaves if leaf.grad is not None]
    calls.clear()
    assert monitor.check(1e6, run) is not None
    assert not calls
    for leaf, (gradient, value, attributes) in zip(leaves, kept, strict=True):
        assert leaf.grad is gradient
        assert torch.equal(gradient, value)
        assert vars(leaf).keys() == attributes.keys()
    after = {id(each): each for model in (encoder, head) for each in model.buffers()}
    assert after.keys() == buffers.keys()
    assert all(torch.equal(after[key], buffer) for key, buffer in buffers.items())


class Parallel(nn.parallel.DistributedDataParallel):
    """Stands for one in a process group: notes what it would exchange in each call."""

    def __init__(self, module: nn.Module, mixed_precision: Any = None) -> None:
        nn.Module.__init__(self)
        self.module, self.mixed_precision = module, mixed_precision
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.reducer: Any = object()
        self.noted: list[tuple[bool, bool, Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.noted.append((self.require_backward_grad_sync, self.require_forward_param_sync, self.reducer))
        self.require_forward_param_sync = self.require_backward_grad_sync
        return self.module(x)  # type: ignore[no-any-return]  # a module's call is Any


def test_parallel_modules_exchange_nothing() -> None:
    """Of whatever the loss is made of, monitored or not; several ranks are tried in tests/distributed."""
    model, x = nn.Linear(2, 1), torch.randn(4, 2)
    parallel, head = Parallel(model), Parallel(nn.Linear(1, 1))
    reducers = [parallel.reducer, head.reducer]
    monitor = packprop.Monitor(model, log=None)
    for loss in [1.0] * 12 + [9.0]:
        monitor.check(loss, lambda: head(parallel(x)).square().mean())
    for module, reducer in zip((parallel, head), reducers, strict=True):
        assert [each[:2] for each in module.noted] == [(False, False)] * len(module.noted) != []
        assert all(each[2] is not reducer and not each[2]._rebuild_buckets() for each in module.noted)
        assert module.require_backward_grad_sync
        assert module.require_forward_param_sync
        assert module.reducer is reducer
    with pytest.raises(PackpropError, match="mixed_precision"):
        monitor.check(9.0, lambda: Parallel(model, mixed_precision="bfloat16")(x).square().mean())


@pytest.mark.parametrize(
    ("again", "why"),
    [
        (lambda loss: loss.backward(), r"backward\(\) inside again"),
        (lambda loss: loss.item(), "not a loss with a graph"),
        (lambda loss: loss.detach(), "not a loss with a graph"),
        (lambda loss: nn.Linear(2, 1)(torch.ones(3, 2)).mean(), "known|depends on none"),
    ],
)
def test_again_returns_the_loss(again: Callable[[Tensor], Any], why: str) -> None:
    model, x = nn.Linear(2, 1), torch.randn(4, 2)
    monitor = packprop.Monitor(model, log=None)
    model(x).square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    for _ in range(12):
        monitor.check(1.0, lambda: model(x).square().mean())

    def run() -> Any:
        model.zero_grad()
        return again(model(x).square().mean())

    with pytest.raises(PackpropError, match=why):
        monitor.check(9.0, run)
    assert all(p.grad is before for p, before in zip(model.parameters(), gradients, strict=True))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_norms_have_a_range_of_their_own() -> None:
    model = nn.Linear(2, 1)
    x = torch.randn(4, 2)
    monitor = packprop.Monitor(model, log=None)
    for _ in range(12):
        assert monitor.check(1.0, lambda: model(x).square().mean(), norm=torch.tensor(2.0)) is None
    spike = monitor.check(1.0, lambda: model(x).square().mean(), norm=50.0)
    assert spike is not None
    assert (spike.what, spike.value, spike.usual) == ("norm", 50.0, 2.0)
    again = packprop.Monitor(model, log=None)
    again.load_state_dict(monitor.state_dict())
    assert again.check(9.0, lambda: model(x).square().mean()) is not None
    state = again.state_dict()
    for _ in range(12):
        again.check(500.0, lambda: model(x).square().mean())
    again.load_state_dict(state)  # instead of what it saw since
    assert again.state_dict() == state
    again.load_state_dict({"next": 0, "window": {}})  # of an earlier packprop
    assert again.state_dict()["ranges"] == {"loss": [], "norm": []}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"on_spike": "print"}, "cannot be called"),
        ({"decode": 3}, "cannot be called"),
        ({"reach": 0}, "not a positive number"),
    ],
)
def test_bad_input(options: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        packprop.Monitor(nn.Linear(2, 1), log=None, **options)


def test_identifiers_are_as_many_as_samples() -> None:
    model, x = nn.Linear(2, 1), torch.randn(4, 2)
    monitor = packprop.Monitor(model, log=None)
    for _ in range(12):
        monitor.check(1.0, lambda: model(x).square().mean())
    with pytest.raises(BadInput, match="the batch has 4 samples"):
        monitor.check(9.0, lambda: model(x).square().mean(), identifiers=[1, 2])


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array, lambda names: iter(np.array(names))])
def test_identifiers_may_be_arrays(kind: Callable[[Any], Any]) -> None:
    model, x = nn.Linear(2, 1), torch.randn(4, 2)
    monitor = packprop.Monitor(model, log=None, decode=lambda name: f"text {name!r}")
    for _ in range(12):
        monitor.check(1.0, lambda: model(x).square().mean())
    spike = monitor.check(9.0, lambda: model(x).square().mean(), kind([10, 11, 12, 13]))
    assert spike is not None
    names = [each.sample for each in spike.samples]
    assert sorted(names) == [10, 11, 12, 13]
    assert {type(name) for name in names} == {int}
    assert spike.samples[0].text == f"text {names[0]}"
    for bad in (3, "abcd"):
        with pytest.raises(BadInput, match="one for each sample"):  # without waiting for a spike
            monitor.check(1.0, lambda: model(x).square().mean(), bad)  # type: ignore[arg-type]  # on purpose


def test_an_idle_step_runs_nothing() -> None:
    def never() -> Tensor:
        raise AssertionError

    monitor = packprop.Monitor(nn.Linear(2, 1), log=None, on_spike=print)
    for value in range(30):
        assert monitor.check(1.0 + 0.01 * (value % 3), never) is None


def test_without_steps_checks_are_counted() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x, y = torch.randn(4, 3), torch.randint(2, (4,))
    monitor = packprop.Monitor(model, every=1000, log=None)

    def check(factor: float, of: packprop.Monitor = monitor) -> Any:
        loss = factor * F.cross_entropy(model(x), y)
        return of.check(loss, lambda: factor * F.cross_entropy(model(x), y))

    assert [check(1.0) for _ in range(12)] == [None] * 12
    spike = check(100.0)
    assert spike is not None
    assert spike.step == 12
    other = packprop.Monitor(model, every=1000, log=None)
    other.load_state_dict(monitor.state_dict())
    again = check(100.0, other)
    assert again is not None
    assert again.step == 13
    with monitor.step():
        F.cross_entropy(model(x), y).backward()
    last = check(100.0)
    assert last is not None
    assert last.step == 0


def test_a_batch_in_which_all_samples_are_nan() -> None:
    model, x, y = nn.Linear(3, 2), torch.full((4, 3), torch.nan), torch.tensor([0, 1, 1, 0])
    found = packprop.Monitor(model, log=None).check(math.nan, lambda: F.cross_entropy(model(x), y))
    assert found is not None
    assert [each.times for each in found.samples] == [None] * 4
    assert "times the median" not in str(found)
