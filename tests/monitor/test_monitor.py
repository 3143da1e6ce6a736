"""Monitored steps bring the right numbers and change nothing; other steps are those of a plain loop."""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop.errors import BadInput, PackpropError, PackpropWarning
from packprop.monitor import QUANTITIES, JsonLines, Monitor, TensorBoard
from packprop.monitor.noise import gradient_noise

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "monitor.md"


class Net(nn.Module):
    """A convolution, a table, a temperature of its own, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(9, 4), nn.Conv1d(4, 5, 3, padding=1)
        self.head, self.warmth = nn.Linear(5, 3), nn.Parameter(torch.ones(1))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.words(ids).transpose(1, 2))).mean(2)
        return self.head(F.dropout(hidden, 0.1, self.training)) * self.warmth  # type: ignore[no-any-return]  # a module's call is Any


def built(dropout: bool = False) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Net().double().train(dropout)
    return model, torch.randint(9, (12, 6)), torch.randint(3, (12,))


def rows_of(model: Net, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Gradient of each sample's own loss, by autograd ``[n, p]``."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = [
        torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), parameters)
        for i in range(len(x))
    ]
    return {name: torch.stack([each[place].flatten() for each in found]) for place, name in enumerate(names)}


def compared(values: dict[str, Any], rows: Tensor, suffix: str = "") -> None:
    """Compare what was logged with loops over samples."""
    mean = rows.mean(0)
    noise = gradient_noise(rows.square().sum(1), float(mean @ mean), rows @ mean)
    assert noise is not None
    assert values["gradient_norm" + suffix] == pytest.approx(float(mean.norm()))
    assert values["sample_norm_median" + suffix] == pytest.approx(float(rows.norm(dim=1).quantile(0.5)))
    right = noise.scale(0.95)
    got = [values[f"noise_scale{end}{suffix}"] for end in ("", "_low", "_high")]
    assert got == pytest.approx([right.value, right.low, right.high])
    scatter = (rows - mean).square().sum(1).mean()
    assert values["signal_to_noise" + suffix] == pytest.approx(float(mean.square().sum() / scatter))


def test_numbers_are_those_of_loops_over_samples() -> None:
    model, x, y = built()
    monitor = Monitor(model, log=None, quantities=QUANTITIES, mc_samples=None)
    rows = rows_of(model, x, y)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = F.cross_entropy(model(x), y)
    parameters = list(model.parameters())
    gradient = torch.autograd.grad(loss, parameters, create_graph=True)
    along = sum((g * g.detach()).sum() for g in gradient)
    curved = torch.autograd.grad(along, parameters)
    inner = sum((a * b).sum() for a, b in zip(curved, gradient, strict=True))
    with monitor.step():
        F.cross_entropy(model(x), y).backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    values = monitor.last
    assert values is not None
    compared(values, torch.cat([*rows.values()], 1))
    compared(values, torch.cat([rows["mix.weight"], rows["mix.bias"]], 1), "/mix")
    compared(values, rows["warmth"], "/(model)")
    square = sum(g.square().sum() for g in gradient)
    assert values["sharpness"] == pytest.approx(float((inner / square).detach()))
    size = sum(w.square().sum() for w in weights.values()).sqrt()
    assert values["update_ratio"] == pytest.approx(0.5 * float(square.sqrt().detach() / size))
    other, _, _ = built()
    packprop.extend(other)
    with packprop.backpack(packprop.extensions.DiagGGNExact()), packprop.record():
        F.cross_entropy(other(x), y).backward()
    trace = sum(float(p.diag_ggn_exact.sum()) for p in other.parameters())  # type: ignore[attr-defined]  # saved by the pass
    assert values["ggn_trace"] == pytest.approx(trace)


@pytest.mark.parametrize("divided", [True, False])
def test_passes_of_a_step_are_one_batch(divided: bool) -> None:
    model, x, y = built()
    rows = torch.cat([*rows_of(model, x, y).values()], 1)
    monitor = Monitor(model, log=None, quantities=["noise_scale", "gradient_norm"])
    with monitor.step():
        for part in range(3):
            chosen = slice(4 * part, 4 * part + 4)
            (F.cross_entropy(model(x[chosen]), y[chosen]) / (3 if divided else 1)).backward()
    assert monitor.last is not None
    mean = rows.mean(0)
    noise = gradient_noise(rows.square().sum(1), float(mean @ mean))
    assert noise is not None
    assert monitor.last["noise_scale"] == pytest.approx(noise.scale(0.95).value)
    assert monitor.last["noise_scale_low"] is None
    assert monitor.last["gradient_norm"] == pytest.approx(float(mean.norm()) * (1 if divided else 3))
    assert monitor.last["samples"] == 12


def test_sharpness_of_several_passes_is_refused() -> None:
    """It needs the step's gradient in each pass: along their own ones it is another number."""
    model, x, y = built()
    monitor = Monitor(model, log=None, quantities=["sharpness"])
    with pytest.raises(PackpropError, match="a second backward pass in one step"), monitor.step():
        for chosen in (slice(0, 6), slice(6, 12)):
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
    assert monitor.last is None
    assert not any(vars(p) for p in model.parameters())
    with monitor.step(number=100):
        F.cross_entropy(model(x[:0]), y[:0], reduction="sum").backward()
        F.cross_entropy(model(x), y, reduction="sum").backward()
    along = monitor.last
    with monitor.step(number=100):
        F.cross_entropy(model(x), y, reduction="sum").backward()
    assert along == monitor.last


def test_sharpness_of_all_ranks_is_refused() -> None:
    model, _, _ = built()
    with pytest.raises(PackpropError, match="sharpness"):
        Monitor(model, log=None, quantities=["sharpness"], ranks="all")


def test_two_losses_of_the_same_samples_in_two_passes_are_refused() -> None:
    """Their samples would be counted twice, and the noise scale would be twice as large."""
    model, x, y = built()
    monitor = Monitor(model, log=None, quantities=["noise_scale"])
    with pytest.raises(PackpropError, match="add the losses up"), monitor.step():
        outputs = model(x)
        F.cross_entropy(outputs, y).backward(retain_graph=True)
        outputs.square().sum().backward()
    assert monitor.last is None
    assert not any(vars(p) for p in model.parameters())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_steps_without_samples(reduction: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As Poisson sampling makes them: nothing is logged but that, and an empty pass counts for nothing."""
    model, x, y = built()
    logged: list[dict[str, Any]] = []
    logs = ["print", lambda values, _: logged.append(values)]
    quantities = [name for name in QUANTITIES if name != "update_ratio"]
    monitor = Monitor(model, every=1, quantities=quantities, log=logs, window=1, mc_samples=None)
    before = set(vars(model.head.weight))
    for parts in ([x[:0]], [x, x[:0]], [x]):
        model.zero_grad()
        with monitor.step(identifiers=range(sum(map(len, parts)))), packprop.record():
            for part in parts:
                F.cross_entropy(model(part), y[: len(part)], reduction=reduction).backward()
        assert set(vars(model.head.weight)) == before
    nothing, beside_nothing, whole = logged
    assert nothing == {"samples": 0}
    assert beside_nothing.pop("outliers") == whole.pop("outliers") == []
    assert beside_nothing == pytest.approx(whole)
    assert "step 0: 0 samples" in capsys.readouterr().out


def test_penalties_are_no_part_of_the_gradient() -> None:
    """Whether they have a pass of their own or not."""
    for together in (True, False):
        model, x, y = built()
        rows = torch.cat([*rows_of(model, x, y).values()], 1)
        monitor = Monitor(model, log=None)
        with monitor.step():
            loss, penalty = F.cross_entropy(model(x), y), sum(p.square().sum() for p in model.parameters())
            for part in [loss + penalty] if together else [loss, penalty]:
                part.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert monitor.last is not None
        compared(monitor.last, rows)


def test_a_scaler_is_taken_out() -> None:
    found = []
    for scale in (1.0, 1024.0, torch.tensor(1024.0)):
        model, x, y = built()
        monitor = Monitor(model, log=None, quantities=QUANTITIES[:5] + QUANTITIES[6:])
        with monitor.step(loss_scale=scale):
            (scale * F.cross_entropy(model(x), y)).backward()
        assert monitor.last is not None
        assert monitor.last.pop("outliers") == []
        found.append(monitor.last)
    assert found[0] == pytest.approx(found[1])
    assert found[0] == pytest.approx(found[2])


@pytest.mark.filterwarnings("ignore:Monitor. 'update_ratio'")
def test_nothing_is_changed() -> None:
    left = []
    for every in (None, 2):
        model, x, y = built(dropout=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = Monitor(model, every=every or 1000, log=None, quantities=QUANTITIES)
        monitor._next = 0 if every else 1
        states = []
        for step in range(4):
            optimizer.zero_grad()
            with monitor.step() as current:
                assert current.monitored == (every is not None and step % 2 == 0)
                hooked = any(module._forward_hooks for module in model.modules())
                assert hooked == current.monitored
                F.cross_entropy(model(x), y).backward()
                states.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
                optimizer.step()
            assert not any(vars(p) for p in model.parameters())
            assert not any(module._forward_hooks for module in model.modules())
        left.append((states, torch.get_rng_state()))
    for one, other in zip(left[0][0], left[1][0], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert torch.equal(left[0][1], left[1][1])


def test_an_extended_model_stays_extended_and_keeps_its_values() -> None:
    model, x, y = built()
    packprop.extend(model)
    with packprop.backpack(packprop.extensions.BatchL2Grad()), packprop.record():
        F.cross_entropy(model(x), y).backward()
    kept = model.warmth.batch_l2
    monitor = Monitor(model, log=None, quantities=["noise_scale"])
    with monitor.step():
        F.cross_entropy(model(x), y).backward()
    assert model.warmth.batch_l2 is kept
    assert model._forward_hooks


def test_an_error_leaves_the_model_as_it_was() -> None:
    model, x, y = built()
    monitor = Monitor(model, log=None, quantities=["noise_scale"])
    with pytest.raises(KeyError), monitor.step():
        model(x)
        raise KeyError
    assert not any(module._forward_hooks for module in model.modules())
    assert monitor.last is None
    with monitor.step(number=100):
        F.cross_entropy(model(x), y).backward()
    assert monitor.last is not None


def test_a_failed_pass_that_was_repeated_counts_once() -> None:
    """As after a hook that raised, or too little memory, for part of the pass."""
    model, x, y = built()
    failures = [RuntimeError("once")]

    def fails_once(_: Tensor) -> None:
        if failures:
            raise failures.pop()

    model.words.weight.register_hook(fails_once)
    monitor = Monitor(model, log=None, quantities=["gradient_norm"])
    with monitor.step():
        with pytest.raises(RuntimeError, match="once"):
            F.cross_entropy(model(x), y).backward()
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
    assert monitor.last is not None
    mean = torch.cat([*rows_of(model, x, y).values()], 1).mean(0)
    assert monitor.last["gradient_norm"] == pytest.approx(float(mean.norm()))


def test_a_failed_pass_that_is_repeated_through_the_same_graph() -> None:
    model, x, y = built()
    monitor = Monitor(model, log=None, quantities=["gradient_norm"])
    with monitor.step():
        loss = F.cross_entropy(model(x), y)
        failing = model.words.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        failing.remove()
        loss.backward(retain_graph=True)
        with pytest.raises(PackpropError, match="these samples would count twice"):
            loss.backward()
    assert monitor.last is not None
    mean = torch.cat([*rows_of(model, x, y).values()], 1).mean(0)
    assert monitor.last["gradient_norm"] == pytest.approx(float(mean.norm()))


def test_quantities_from_a_generator() -> None:
    model, x, y = built()
    names: Any = (name for name in ["gradient_norm"])
    monitor = Monitor(model, log=None, quantities=names)
    with monitor.step():
        F.cross_entropy(model(x), y).backward()
    assert monitor.last is not None
    assert "gradient_norm" in monitor.last


def test_outliers_have_their_identifiers() -> None:
    model, x, y = built()
    with torch.no_grad():
        model.words.weight[8] *= 1
    monitor = Monitor(model, log=None, quantities=["outliers"])
    weights = torch.ones(12, dtype=torch.float64)
    weights[7] = 100
    names = [f"image {index}" for index in range(12)]
    with monitor.step(names):
        (weights * F.cross_entropy(model(x), y, reduction="none")).mean().backward()
    assert monitor.last is not None
    assert [each["sample"] for each in monitor.last["outliers"]] == ["image 7"]
    with pytest.raises(BadInput, match="5 identifiers"), monitor.step(range(5), number=100):
        F.cross_entropy(model(x), y).backward()
    with monitor.step(number=100):  # without identifiers it is their place
        (weights * F.cross_entropy(model(x), y, reduction="none")).mean().backward()
    assert [each["sample"] for each in monitor.last["outliers"]] == [7]


def test_identifiers_of_arrays_are_numbers_in_logs(tmp_path: Path) -> None:
    model, x, y = built()
    file = tmp_path / "run.jsonl"
    monitor = Monitor(model, every=1, log=str(file), quantities=["outliers"])
    weights = torch.ones(12, dtype=torch.float64)
    weights[7] = 100
    given: list[Any] = [np.arange(12), [*np.arange(12)], [*torch.arange(12)]]
    for identifiers in [*given, [(np.int64(1), place) for place in range(12)], [math.nan] * 12]:
        with monitor.step(identifiers):
            (weights * F.cross_entropy(model(x), y, reduction="none")).mean().backward()
    lines = map(json.loads, file.read_text().splitlines())
    assert [each["outliers"][0]["sample"] for each in lines] == [7, 7, 7, [1, 7], None]
    with pytest.raises(BadInput, match="one for each sample"):
        monitor.step(5)  # type: ignore[arg-type]  # on purpose


def test_the_window_goes_on_after_a_restart() -> None:
    model, x, y = built()
    quantities = ["noise_scale", "ggn_trace"]  # whose draws go on, too
    monitor = Monitor(model, every=1, log=None, quantities=quantities)
    traces = set()
    for _ in range(3):
        with monitor.step():
            F.cross_entropy(model(x), y).backward()
        traces.add(monitor.last["ggn_trace"])  # type: ignore[index]  # there is one
    assert len(traces) == 3
    again = Monitor(model, every=1, log=None, quantities=quantities)
    again.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    for each in (monitor, again):
        with each.step():
            F.cross_entropy(model(x), y).backward()
    assert monitor.last == again.last
    assert monitor.state_dict() == again.state_dict()
    assert again.state_dict()["next"] == 4


def one_step(log: Any) -> dict[str, Any]:
    model, x, y = built()
    monitor = Monitor(model, log=log, quantities=["noise_scale", "sample_norms", "outliers"])
    with monitor.step(number=300):
        F.cross_entropy(model(x), y).backward()
    assert monitor.last is not None
    return monitor.last


def test_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[dict[str, Any], int]] = []
    file = tmp_path / "run.jsonl"
    values = one_step([lambda found, step: seen.append((found, step)), str(file), "print", JsonLines(file)])
    assert seen == [(values, 300)]
    assert [json.loads(line) for line in file.read_text().splitlines()] == [{"step": 300, **values}] * 2
    printed = capsys.readouterr().out
    assert printed.startswith("step 300: 12 samples, noise scale ")
    assert printed.count("\n") == 1


def test_tensorboard_scalars_are_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = one_step(TensorBoard(tmp_path))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (scalar,) = events.Scalars("monitor/sample_norm_median/head")
    assert (scalar.step, scalar.value) == (300, pytest.approx(values["sample_norm_median/head"], rel=1e-5))


def test_tensorboard_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(BadInput, match=re.escape("pip install '.[tensorboard]'")):
        TensorBoard(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every=0"),
        ({"every": True}, "every=True"),
        ({"quantities": ["noise"]}, "noise_scale"),
        ({"quantities": "noise"}, "not a list"),
        ({"quantities": []}, "not a list"),
        ({"window": 0}, "window=0"),
        ({"mc_samples": -1}, "mc_samples=-1"),
        ({"mc_samples": 0}, "mc_samples=0"),
        ({"seed": 1.0}, "seed=1.0"),
        ({"seed": 2**64}, "more than 64 bits"),
        ({"confidence": 95}, "not a number between 0 and 1"),
        ({"per": "token"}, "independent"),
        ({"log": "tensorboard"}, "SummaryWriter"),
        ({"log": 3}, "type int"),
        ({"log": "no/such/folder/run.jsonl"}, "no folder"),
    ],
    ids=str,
)
def test_bad_input(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=re.escape(said)):
        Monitor(nn.Linear(2, 2), **options)


def test_bad_models() -> None:
    with pytest.raises(BadInput, match="requires gradients"):
        Monitor(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(BadInput, match="Module"):
        Monitor(3)  # type: ignore[arg-type]  # wrong on purpose


def test_steps_in_which_nothing_can_be_seen() -> None:
    model, x, y = built()
    monitor = Monitor(model, every=1, log=None, quantities=["noise_scale"])
    with pytest.warns(PackpropWarning, match="no backward pass"), monitor.step():
        model(x)
    with pytest.raises(BadInput, match="under way"), monitor.step(), monitor.step():
        pass
    with pytest.raises(BadInput, match="around it"), packprop.backpack(), monitor.step():
        pass
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.warns(PackpropWarning, match="one sample"), monitor.step():
        F.cross_entropy(model(x[:1]), y[:1]).backward()
    asked = Monitor(model, every=1, log=None)
    with pytest.warns(PackpropWarning, match="no parameter changed"), asked.step():
        F.cross_entropy(model(x), y).backward()
    assert "update_ratio" not in (asked.last or {"update_ratio": 0})
    with warnings.catch_warnings(), asked.step():
        warnings.simplefilter("error")  # it was said
        F.cross_entropy(model(x), y).backward()


def test_samples_that_are_mixed_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(PackpropError), Monitor(model, log=None).step():
        F.cross_entropy(model(torch.randn(8, 3)), torch.randint(2, (8,))).backward()
    assert not any(module._forward_hooks for module in model.modules())


def test_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, scope)
    assert capsys.readouterr().out.count("step ") >= 2


def test_lazy_modules_are_monitored_from_their_first_call_on() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    with pytest.raises(BadInput, match="no shape before"):
        Monitor(model, log=None)
    x, y = torch.randn(6, 5), torch.arange(6) % 3
    model(x)
    monitor = Monitor(model, log=None)
    with monitor.step():
        F.cross_entropy(model(x), y).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert monitor.last is not None
    assert monitor.last["samples"] == 6


def test_every_so_much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("packprop.monitor.monitor.time.monotonic", lambda: now)
    monitor = Monitor(nn.Linear(3, 2), every="30s", log=None)
    seen = []
    for later in (0.0, 10.0, 19.0, 1.0, 10.0, 60.0):
        now += later
        with monitor.step() as step:
            seen.append(step.monitored)
    assert seen == [True, False, False, True, False, True]
    for wrong in ("soon", 0, -1, True, 1.5):
        with pytest.raises(BadInput, match="neither a time nor a number"):
            Monitor(nn.Linear(3, 2), every=wrong)
    for nothing in ("0s", "0.0min"):
        with pytest.raises(BadInput, match="time of zero"):
            Monitor(nn.Linear(3, 2), every=nothing)
