"""Passes that a kept walk serves give what ordinary passes give, whatever changes between them."""

from __future__ import annotations

import copy
import gc
import linecache
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions
from packprop.engine import user_pass
from packprop.engine.algebra.monoid import Monoid
from packprop.engine.algebra.one_by_one import evaluate_together
from packprop.engine.algebra.statistics import sum_sq
from packprop.engine.functions.entry import plain_options
from packprop.engine.functions.registry import RULES, current
from packprop.engine.graph.kept_walk import PLAIN, KeptWalk, outline
from packprop.engine.graph.sweep import Watch
from packprop.engine.passes.direct import DirectPass
from packprop.types import GRADIENT, Extension, Row
from tests.references.running import assert_near
from tests.selection import one_in

FIRST = 3
"""The pass that is direct, if passes of one structure follow each other."""


class Served:
    """Counts the passes that kept walks have served, and the direct ones among them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept = self.direct = 0
        bind, run = KeptWalk.bind, DirectPass.run

        def bound(walk: Any, *given: Any) -> Any:
            graph = bind(walk, *given)
            self.kept += graph is not None
            return graph

        def ran(direct: Any, *given: Any) -> bool:
            was_direct = run(direct, *given)
            self.direct += was_direct
            return was_direct

        monkeypatch.setattr(KeptWalk, "bind", bound)
        monkeypatch.setattr(DirectPass, "run", ran)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


class Net(nn.Module):
    """A small network with switches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.register_buffer("mask", torch.randn(5, 4))
        self.alpha, self.before, self.recomputed, self.sparse = 1.0, False, False, False

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x * 2.0
        x = x.to_sparse() if self.sparse else x
        h = torch.addmm(self.first.bias, x, self.first.weight.T, alpha=self.alpha).tanh()
        h = checkpoint(self.norm, h, use_reentrant=False) if self.recomputed else self.norm(h)
        out: Tensor = self.last(h)
        return out


def data(seed: int, samples: int = 5) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, generator=made).double(), torch.randint(3, (samples,), generator=made)


class Run:
    """Passes through one model, each with new data, and the same through a copy without kept walks.

    Args:
        asked: Makes the extensions.
    """

    def __init__(self, asked: Callable[[], list[Extension]], model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model: Any = packprop.extend((Net() if model is None else model).double())
        self.loss = packprop.extend(nn.CrossEntropyLoss())
        self.asked, self.number = asked, 0

    def step(self, samples: int = 5, x: Tensor | None = None, **options: Any) -> dict[str, Any]:
        """Return the values of a pass, and the gradients."""
        self.number += 1
        given, y = data(self.number, samples)
        given = given if x is None else x
        self.model.zero_grad()
        with packprop.backpack(*self.asked(), **options):
            self.loss(self.model(given.to(self.dtype)), y).backward()
        fields = [each.savefield for each in self.asked()]
        found = {
            f"{name}.{field}": getattr(parameter, field)
            for name, parameter in self.model.named_parameters()
            for field in [*fields, "grad"]
            if hasattr(parameter, field) and getattr(parameter, field) is not None
        }
        return {key: value.clone() if isinstance(value, Tensor) else value for key, value in found.items()}

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def check(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        """Compare a pass with an ordinary one over the same data."""
        before = self.number
        found = self.step(**options)
        with monkeypatch.context() as patch:
            patch.setattr(user_pass, "_may_repeat", lambda *given: False)
            self.number = before
            expected = self.step(**options)
        compare(found, expected)


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        pairs = zip(found[key], value, strict=True) if isinstance(value, list) else [(found[key], value)]
        for one, other in pairs:
            assert_near(one, other, key, 1e-10 if one.dtype == torch.float64 else 1e-4)


def first_order() -> list[Extension]:
    return [extensions.BatchL2Grad(), extensions.SumGradSquared(), extensions.Variance()]


ASKED: dict[str, Callable[[], list[Extension]]] = {
    "norms": lambda: [extensions.BatchL2Grad()],
    "rows": lambda: [extensions.BatchGrad()],
    "rows and norms": lambda: [extensions.BatchGrad(), extensions.BatchL2Grad()],
    "first order": first_order,
    "inner products": lambda: [extensions.BatchDotGrad()],
    "some samples": lambda: [extensions.BatchGrad(subsampling=[1, 3])],
    "exact GGN": lambda: [extensions.DiagGGNExact()],
    "factors": lambda: [extensions.KFLR()],
    "Hessian": lambda: [extensions.DiagHessian()],
    "Hessians of samples": lambda: [extensions.BatchDiagHessian(), extensions.DiagGGNExact()],
    "with gradients": lambda: [extensions.DiagGGNExact(), extensions.BatchL2Grad()],
    "sampled factors": lambda: [extensions.KFAC(generator=drawn_anew())],
    "roots": lambda: [extensions.SqrtGGNMC(mc_samples=3, generator=drawn_anew()), extensions.SqrtGGNExact()],
    "all at once": lambda: [
        *(extensions.BatchGrad(), extensions.KFLR(), extensions.Variance(), extensions.BatchDiagGGNExact()),
        *(extensions.DiagGGNMC(mc_samples=2, generator=drawn_anew()), extensions.KFAC(generator=DRAWS)),
    ],
}
NOT_DIRECT = ("some samples", "Hessian", "Hessians of samples")
DRAWS = torch.Generator()


def drawn_anew() -> torch.Generator:
    """Return the same generator each time, which begins anew."""
    return DRAWS.manual_seed(0)


@pytest.mark.parametrize("name", ASKED)
def test_values_of_later_passes(name: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(ASKED[name])
    for _ in range(FIRST):
        run.check(monkeypatch)
    assert served.kept == FIRST - 1
    assert served.direct == (name not in NOT_DIRECT)


@pytest.mark.parametrize("make", [extensions.KFRA, lambda: extensions.HBP(curv_type="hessian")])
def test_averaged_factors_of_later_passes(
    make: Callable[[], Extension], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(
        lambda: [make(), extensions.BatchL2Grad()], nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    )
    for _ in range(FIRST):
        run.check(monkeypatch)
    assert served.kept == FIRST - 1
    assert not served.direct


def test_extensions_may_change_from_pass_to_pass(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of squares is one statistic of gradients and of columns of the GGN alike."""
    run = Run(first_order)
    order = [*ASKED, "exact GGN", "norms", "exact GGN", "some samples", "rows", "some samples"]
    for name in [*order, *order]:
        run.asked = ASKED[name]
        run.check(monkeypatch)
    assert served.direct > 2


def in_half_precision(run: Run) -> None:
    run.model.to(torch.float32)


def without_first_bias(run: Run) -> None:
    run.model.get_parameter("first.bias").requires_grad_(False)


def with_new_weight(run: Run) -> None:
    run.model.last.weight = nn.Parameter(torch.randn(3, 6).double())


def with_hook_on_output(run: Run) -> None:
    run.model.norm.register_forward_hook(lambda m, a, out: out.register_hook(lambda g: g * 2) and None)


def with_hook_on_node(run: Run) -> None:
    run.model.first.register_forward_hook(lambda m, a, out: None)

    def doubled(module: nn.Module, given: Any, out: Tensor) -> None:
        assert out.grad_fn is not None
        out.grad_fn.register_prehook(lambda gradients: tuple(2 * each for each in gradients))

    run.model.last.register_forward_hook(doubled)


def with_full_backward_hook(run: Run) -> None:
    run.model.norm.register_full_backward_hook(lambda m, given, out: (3 * given[0],))


def switched(name: str, value: Any) -> Callable[[Run], None]:
    return lambda run: setattr(run.model, name, value)


def summed(run: Run) -> None:
    run.loss.reduction = "sum"


def another_loss(run: Run) -> None:
    run.loss = packprop.extend(nn.CrossEntropyLoss(label_smoothing=0.1))


def plain_loss(run: Run) -> None:
    run.loss = nn.CrossEntropyLoss()


CHANGES: dict[str, Callable[[Run], None]] = {
    "nothing": lambda run: None,
    "the factor of a product": switched("alpha", 0.5),
    "arithmetic on the inputs": switched("before", True),
    "a checkpoint": switched("recomputed", True),
    "a sparse input": switched("sparse", True),
    "single precision": in_half_precision,
    "a frozen bias": without_first_bias,
    "a new parameter": with_new_weight,
    "a hook on a tensor": with_hook_on_output,
    "a hook on a node": with_hook_on_node,
    "a backward hook of a module": with_full_backward_hook,
    "the reduction": summed,
    "label smoothing": another_loss,
    "a loss without a mark": plain_loss,
}


@one_in(2)
@pytest.mark.parametrize("asked", ["norms", "rows", "exact GGN", "Hessian"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_passes(
    change: str, asked: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change == "a sparse input" and asked in ("exact GGN", "Hessian"):
        pytest.skip("PyTorch does not differentiate a sparse product in many columns")
    run = Run(ASKED[asked])
    for _ in range(FIRST):
        run.step()
    assert served.kept
    CHANGES[change](run)
    for _ in range(FIRST + 1):
        run.check(monkeypatch)


def with_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.model.recomputed = True


def with_another_rule(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RULES["Addmm"]
    monkeypatch.setitem(RULES, "Addmm", rule._replace(entry_of=lambda call: rule.entry_of(call)))


def with_an_equal_rule(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "Addmm", RULES["Addmm"]._replace())


def without_any_rule(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "ignored", True)


@pytest.mark.parametrize("change", [with_checkpoint, with_another_rule, with_an_equal_rule, without_any_rule])
def test_a_walk_does_not_hold_where_what_the_key_does_not_tell_has_changed(
    change: Callable[[Run, pytest.MonkeyPatch], None], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(ASKED["norms"])
    for _ in range(FIRST):
        run.step()
    before = served.kept
    assert before
    change(run, monkeypatch)
    run.check(monkeypatch)
    assert served.kept == before


def test_hooks_on_parameters_stay_quiet_in_sweeps(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run once in each pass, in that of the user."""
    run = Run(ASKED["Hessian"])
    for _ in range(FIRST):
        run.step()
    before, calls = served.kept, []
    run.model.first.weight.register_hook(calls.append)
    run.step()
    assert served.kept == before + 1
    assert len(calls) == 1


class _Scaled(torch.autograd.Function):
    """A function of the user's own that keeps its parameter as ``variable``, as PyTorch's leaves do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.variable = weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, (gradient * x).sum(0)


def test_a_function_of_the_user_is_no_leaf_whatever_it_keeps() -> None:
    weight = nn.Parameter(torch.ones(3))
    loss: Tensor = _Scaled.apply(torch.randn(4, 3), weight).square().sum()  # type: ignore[no-untyped-call]  # torch's own
    assert outline([loss]) is None
    assert outline([(torch.randn(4, 3) * weight).square().sum()]) is not None


def test_the_key_holds_plain_numbers_as_they_are() -> None:
    for value in (3, True, "none", None, (), (1, 2), (1, None, "x", False)):
        assert type(value) in PLAIN or (type(value) is tuple and PLAIN.issuperset(map(type, value)))
        assert plain_options(value) == value
        assert type(plain_options(value)) is type(value)
    for value in (0.5, [1, 2], (1, 0.5), ((1,), 2), torch.Size([1])):
        assert type(value) not in PLAIN
        assert type(value) is not tuple or not PLAIN.issuperset(map(type, value))


@pytest.mark.parametrize("asked", ["norms", "exact GGN"])
def test_other_shapes_and_options(asked: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(ASKED[asked])
    for _ in range(FIRST):
        run.step()
    for options in ({"samples": 3}, {"samples": 1}, {"loss_scale": 4.0}, {"memory": "20MiB"}, {"debug": True}):
        run.check(monkeypatch, **options)
        run.check(monkeypatch)
    assert served.kept > FIRST


def test_an_input_that_is_a_buffer_of_the_model(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a constant is data is asked in each pass: the sweeps decide on a buffer."""
    run = Run(ASKED["norms"])
    for _ in range(FIRST):
        run.step()
    before = served.kept
    run.check(monkeypatch, x=run.model.get_buffer("mask"))
    run.check(monkeypatch)
    assert served.kept == before
    run.check(monkeypatch)
    assert served.kept == before + 1


def test_a_pass_that_fails_leaves_the_walk_for_the_next(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(ASKED["norms"])
    for _ in range(FIRST):
        run.step()
    handle = run.model.get_parameter("first.weight").register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.step()
    handle.remove()
    before = served.direct
    run.check(monkeypatch)
    assert served.direct == before + 1


def test_columns_of_a_pass_that_fails_are_not_those_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were made for a direct pass, and do not fit into one sweep; the ordinary pass has no memory."""
    run, given = Run(ASKED["exact GGN"]), data(9)
    for _ in range(FIRST):
        run.step()

    def found() -> Tensor:
        run.loss(run.model(given[0]), given[1]).backward()
        return run.model.last.weight.diag_ggn_exact.clone()  # type: ignore[no-any-return]  # a module's attribute

    def failing(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    with packprop.backpack(*run.asked()):
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr("packprop.engine.passes.direct.are_one_sweep", lambda *_: False)
            patch.setattr("packprop.engine.passes.backward_pass.BackwardPass.run", failing)
            run.loss(run.model(data(8)[0].double()), data(8)[1]).backward()
        after = found()
    with packprop.backpack(*run.asked()):
        assert_near(after, found(), "diagonal")


BOUNDS: dict[str, dict[str, Any]] = {
    "one bound": {"max_norm": 0.05},
    "a bound for each module": {"max_norm": {"first": 0.01, "norm": 0.02, "last": 0.03}, "per": "module"},
    "a scale": {"max_norm": 0.05, "loss_scale": 4.0},
}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("beside", [False, True])
def test_clipped_passes_between_others(
    name: str, beside: bool, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have a walk in common with other passes, which stay direct."""
    run = Run(lambda: [extensions.BatchL2Grad()])
    asked = [extensions.Variance()] if beside else []

    def clipped(number: int) -> dict[str, Any]:
        x, y = data(number)
        run.model.zero_grad()
        loss = run.loss(run.model(x), y)
        with packprop.clipped_gradients(*asked, **BOUNDS[name]) as clipping:
            loss.backward()
        found = {f"{key}.grad": p.grad.clone() for key, p in run.model.named_parameters()}
        found |= {f"{key}.variance": p.variance.clone() for key, p in run.model.named_parameters() if beside}
        return found | {"norms": clipping.norms}

    for number in range(6):
        found, kept = clipped(number), served.kept
        with monkeypatch.context() as patch:
            patch.setattr(user_pass, "_may_repeat", lambda *given: False)
            expected = clipped(number)
        compare(found, expected)
        run.check(monkeypatch)
    assert kept >= 8
    assert served.direct >= 2


@pytest.mark.parametrize("refused", [1, 2, 5, 8])
def test_out_of_memory_in_a_clipped_pass(refused: int, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third pass of a structure takes all samples at once, and chunks where the memory does not suffice."""
    run = Run(lambda: [])

    def clipped() -> dict[str, Any]:
        x, y = data(1)
        run.model.zero_grad()
        with packprop.clipped_gradients(max_norm=0.05) as clipping:
            run.loss(run.model(x), y).backward()
        return {key: p.grad.clone() for key, p in run.model.named_parameters()} | {"norms": clipping.norms}

    expected, *_ = [clipped() for _ in range(3)]
    calls = []

    def failing(structure: Any, statistics: Any) -> Any:
        calls.append(1)
        if len(calls) == refused:
            raise torch.OutOfMemoryError("no memory is left")
        return evaluate_together(structure, statistics)

    monkeypatch.setattr("packprop.engine.passes.accumulator.evaluate_together", failing)
    compare(clipped(), expected)
    assert len(calls) >= 8  # norms of six parameters, and sums of those whose gradients are not kept


def test_a_second_pass_through_one_graph() -> None:
    run = Run(ASKED["norms"])
    for _ in range(FIRST):
        run.step()
    x, y = data(7)
    loss = run.loss(run.model(x), y)
    with packprop.backpack(extensions.BatchL2Grad()):
        loss.backward(retain_graph=True)
    first = run.model.get_parameter("last.weight").batch_l2.clone()
    with packprop.backpack(extensions.BatchL2Grad()):
        loss.backward()
    assert_near(run.model.get_parameter("last.weight").batch_l2, first, "second pass")
    with packprop.backpack(extensions.BatchL2Grad()), pytest.raises(packprop.errors.FreedGraph):
        loss.backward()


def test_a_pass_inside_of_another() -> None:
    """The walk serves one pass at a time; the inner one walks by itself."""
    run = Run(ASKED["norms"])
    for _ in range(FIRST):
        run.step()
    inner = Run(ASKED["norms"], run.model)
    seen: list[dict[str, Any]] = []

    def again(gradient: Tensor) -> None:
        if not seen:
            seen.append({})
            x, y = data(11)
            packprop.extend(nn.CrossEntropyLoss())
            with torch.enable_grad(), packprop.backpack(extensions.SumGradSquared()):
                inner.loss(run.model(x), y).backward()

    run.model.get_parameter("last.weight").register_hook(again)
    found = run.step()
    run.number -= 1
    expected = run.step()
    key = "first.weight.batch_l2"
    assert_near(found[key], expected[key], key)
    assert hasattr(run.model.get_parameter("first.weight"), "sum_grad_squared")


def test_passes_in_threads() -> None:
    run = Run(ASKED["norms"])
    expected = {}
    for _ in range(FIRST):
        expected = run.step()
    runs = [Run(ASKED["norms"]) for _ in range(2)]
    found: list[dict[str, Any]] = [{}, {}]

    def work(place: int) -> None:
        for _ in range(FIRST):
            found[place] = runs[place].step()

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        compare(each, expected)


@pytest.fixture
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage_collection")
def test_a_kept_walk_keeps_no_graph_and_no_model(served: Served) -> None:
    run = Run(ASKED["norms"])
    made: list[weakref.ref[Tensor]] = []
    run.model.norm.register_forward_hook(lambda m, a, out: made.append(weakref.ref(out)))
    for _ in range(FIRST):
        run.step()
    assert served.direct
    assert all(reference() is None for reference in made)
    old = weakref.ref(run.model.last.weight)
    with_new_weight(run)
    for _ in range(FIRST):
        run.step()
    assert old() is None
    held = [weakref.ref(parameter) for parameter in run.model.parameters()]
    del run
    assert all(reference() is None for reference in held)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("first order", 2),  # there are six leaves, and one sweep
        *((name, call) for name in ("factors", "all at once") for call in (2, 8, 12)),
    ],
)
def test_out_of_memory_at_one_leaf(
    name: str, call: int, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statistics of this leaf are taken in chunks; those of all others stay."""
    run = Run(ASKED[name])
    for _ in range(FIRST):
        run.step()
    whole, refused = evaluate_together, [0]

    def failing(structure: Any, statistics: Any) -> Any:
        refused[0] += 1
        if refused[0] == call:
            raise torch.OutOfMemoryError("no memory is left")
        return whole(structure, statistics)

    with monkeypatch.context() as patch:
        patch.setattr("packprop.engine.passes.direct.evaluate_together", failing)
        found = run.step()
    assert refused[0] >= call
    run.number -= 1
    compare(found, run.step())


def test_a_use_that_the_pass_does_not_reach_has_zeros(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(first_order)
    for _ in range(FIRST):
        run.step()
    finish = Watch._finish

    def missing(watch: Any, use: Any) -> None:
        watch._pending.pop(use) if use.name == "layer_norm" else finish(watch, use)

    with monkeypatch.context() as patch:
        patch.setattr(Watch, "_finish", missing)
        found = run.step()
    assert served.direct == 2
    assert found["norm.weight.batch_l2"].tolist() == [0.0] * 5
    assert not found["norm.bias.variance"].any()
    assert found["last.weight.batch_l2"].all()


def test_columns_that_do_not_reach_a_use_are_zeros_there(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(ASKED["with gradients"])
    for _ in range(FIRST):
        run.step()
    finish, visits = Watch._finish, [0]

    def missing(watch: Any, use: Any) -> None:
        visits[0] += use.name == "layer_norm"
        watch._pending.pop(use) if use.name == "layer_norm" and visits[0] == 1 else finish(watch, use)

    with monkeypatch.context() as patch:
        patch.setattr(Watch, "_finish", missing)
        found = run.step()
    assert served.direct == 2
    assert not found["norm.weight.diag_ggn_exact"].any()
    assert found["norm.weight.batch_l2"].all()
    assert found["first.weight.diag_ggn_exact"].any()


def test_a_walk_that_never_holds_is_not_made_again_and_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, made = Run(ASKED["norms"]), list[None]()
    make = KeptWalk.__init__
    monkeypatch.setattr(KeptWalk, "__init__", lambda *given: (made.append(None), make(*given))[1])
    for number in range(20):
        run.model.alpha = 1.0 + number / 10
        run.check(monkeypatch)
    assert 1 < len(made) < 10


def test_values_that_are_not_finite_are_told(served: Served) -> None:
    run = Run(ASKED["norms"])
    for _ in range(FIRST):
        run.step()
    x, _ = data(1)
    x[2, 1] = torch.nan
    with pytest.warns(packprop.errors.PackpropWarning, match="NaN or infinite"):
        run.step(x=x)
    assert served.direct == 2


def test_extension_hooks_and_saved_values_of_many_passes(served: Served) -> None:
    run, seen = Run(ASKED["norms"]), list[str]()
    for _ in range(FIRST):
        seen.clear()
        run.step(extension_hook=lambda module: seen.append(type(module).__name__))
    assert seen == ["Linear", "LayerNorm", "Linear"]
    assert served.direct


def test_functional_losses_and_embeddings(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of positions that all samples share is read through the nodes of each pass."""
    torch.manual_seed(0)

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places, self.head = nn.Embedding(9, 6), nn.Embedding(5, 6), nn.Linear(6, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            where = self.places(torch.arange(tokens.shape[1]))
            out: Tensor = self.head((self.words(tokens) + where * 0.5).tanh())
            return out

    model: Any = packprop.extend(Tokens().double())

    def step(seed: int) -> dict[str, Tensor]:
        made = torch.Generator().manual_seed(seed)
        tokens = torch.randint(9, (3, 5), generator=made)
        targets = torch.randint(4, (3, 5), generator=made)
        with packprop.backpack(extensions.BatchGrad()):
            F.cross_entropy(model(tokens).mT, targets).backward()
        return {name: parameter.grad_batch.clone() for name, parameter in model.named_parameters()}

    for seed in range(FIRST + 1):
        found = step(seed)
        with monkeypatch.context() as patch:
            patch.setattr(user_pass, "_may_repeat", lambda *given: False)
            expected = step(seed)
        compare(found, expected)
    assert served.direct


class OfTheBatch(Extension):
    """A sum of squares for which the batch is one sample."""

    savefield = "of_the_batch"
    of_batch = True
    rows = (Row(GRADIENT, sum_sq),)


def whole_batch() -> list[Extension]:
    return [OfTheBatch()]


def test_a_quantity_of_the_whole_batch_between_those_of_samples(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the batch as one sample: neither keeps it a walk for the others, nor do they keep one for it."""
    run = Run(ASKED["norms"])
    for asked in [ASKED["norms"], whole_batch, whole_batch, ASKED["norms"], ASKED["norms"], whole_batch]:
        run.asked = asked
        run.check(monkeypatch)
    assert served.kept


class Turned(nn.Module):
    """A network with a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.view_as_real(x.to(torch.complex128) @ self.turn).flatten(1))
        return out


def test_what_a_pass_refuses_later_passes_refuse(served: Served) -> None:
    """A pass that fails says nothing about later ones."""
    model = Turned().double()
    run = Run(ASKED["rows"], model)
    for _ in range(FIRST):
        run.step()
    assert served.direct
    run.asked = ASKED["norms"]
    for _ in range(3):
        with pytest.raises(packprop.errors.PackpropError, match="complex"):
            run.step()


def test_results_of_monoids(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A monoid turns the last partial result into the value, also if it is the only one."""
    norm = Monoid("NORM", lambda a, b: a + b, torch.sqrt)

    class Norm(Extension):
        savefield = "norm_of_all"
        rows = (Row(GRADIENT, sum_sq, over_n=norm),)

    run = Run(lambda: [Norm()])
    for _ in range(FIRST):
        run.check(monkeypatch)
    assert served.direct


def test_statistics_that_are_new_in_each_pass(served: Served) -> None:
    """What passes note about them does not pile up."""
    made: list[weakref.ref[Any]] = []

    class Fresh(Extension):
        savefield = "fresh"

        @property
        def rows(self) -> tuple[Row, ...]:
            def statistic(structure: Any) -> Any:
                return sum_sq(structure)

            made.append(weakref.ref(statistic))
            return (Row(GRADIENT, statistic),)

    run = Run(lambda: [Fresh()])
    for _ in range(30):
        run.step()
    gc.collect()
    alive = sum(reference() is not None for reference in made)
    assert served.kept > 20
    assert alive < 20


def test_a_model_that_a_hook_on_its_parameter_refers_to() -> None:
    """A kept walk holds parameters: it must not keep alive what their hooks refer to."""

    def gone() -> weakref.ref[nn.Module]:
        run = Run(ASKED["norms"])
        model = run.model
        model.last.weight.register_hook(lambda gradient: gradient * len(model.__dict__) ** 0)
        for _ in range(FIRST):
            run.step()
        return weakref.ref(model)

    reference = gone()
    gc.collect()
    assert reference() is None


class Interruption:
    """Interrupts some line of the functions that take hold of a walk."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: Any, event: str, given: Any) -> Any:
        return self._count if frame.f_code.co_name in ("_ran_again", "bind", "_bound") else None

    def _count(self, frame: Any, event: str, given: Any) -> Any:
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        self.left -= event == "line" and "release(" not in source  # that no `finally` protects
        if self.left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._count


def test_an_interrupt_at_any_line(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves no walk that serves no pass any more."""
    run = Run(ASKED["norms"])
    for _ in range(FIRST):
        run.step()
    for line in range(1000):
        interruption, tracing = Interruption(line), sys.gettrace()
        loss = run.loss(run.model(data(line)[0]), data(line)[1])
        try:
            with packprop.backpack(extensions.BatchL2Grad()):
                sys.settrace(interruption)
                loss.backward()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracing)
        del loss
        run.check(monkeypatch)
        before = served.kept
        run.check(monkeypatch)
        assert served.kept == before + 1, line
        if interruption.left >= 0:
            break
    assert line > 50


def test_a_copy_keeps_no_walk_of_its_original(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(ASKED["norms"])
    for _ in range(FIRST):
        run.step()
    for copied in (copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))):
        run.model, before = copied, served.kept
        run.check(monkeypatch)
        assert served.kept == before
        run.check(monkeypatch)
        run.check(monkeypatch)
        assert served.kept > before


class TestMonitor:
    """A monitor extends the model in each step that it looks at, and restores it afterwards."""

    @staticmethod
    def steps(monitor: packprop.Monitor, model: nn.Module, count: int) -> list[Any]:
        values, optimizer = list[Any](), torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(1)
        for _ in range(count):
            x, y = torch.randn(6, 5), torch.randint(3, (6,))
            with monitor.step():
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            values.append(monitor.last)
        return values

    @staticmethod
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))

    def test_keeps_walks_between_its_steps(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        kept_model, walked_model = self.model(), self.model()
        kept = self.steps(packprop.Monitor(kept_model, every=1, log=None), kept_model, 6)
        assert served.kept >= 3
        assert not vars(kept_model).get("_packprop_handles")
        monkeypatch.setattr(user_pass, "_may_repeat", lambda *_: False)
        walked = self.steps(packprop.Monitor(walked_model, every=1, log=None), walked_model, 6)
        assert_near(torch.tensor(_numbers(kept)), torch.tensor(_numbers(walked)), "values", 1e-5)

    def test_copies_begin_without_walks(self, served: Served) -> None:
        model = self.model()
        monitor = packprop.Monitor(model, every=1, log=None)
        self.steps(monitor, model, 5)
        assert monitor._walks
        assert not copy.deepcopy(monitor._walks)
        assert not pickle.loads(pickle.dumps(monitor._walks))

    def test_frees_the_model(self) -> None:
        model = self.model()
        monitor = packprop.Monitor(model, every=1, log=None)
        self.steps(monitor, model, 5)
        gone = weakref.ref(model)
        del model, monitor
        gc.collect()
        assert gone() is None


def _numbers(values: Any) -> list[float]:
    """Return all numbers in nested values."""
    if isinstance(values, dict):
        return _numbers([*values.values()])
    if isinstance(values, list):
        return [number for each in values for number in _numbers(each)]
    return [float(values)] if isinstance(values, (int, float)) else []
