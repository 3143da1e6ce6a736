"""The checks that users run on their own registrations and models: right ones pass, wrong ones are caught."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

import packprop
from packprop import extensions
from packprop.algebra import cells
from packprop.algebra.monoid import CAT
from packprop.algebra.structures import Dense, Outer
from packprop.dataset import state
from packprop.engine import saving
from packprop.functions.building import affine, rowwise, scaled, select_samples
from packprop.functions.entry import Entry
from packprop.functions.losses.description import LOSSES, Loss, Root
from packprop.functions.losses.roots import bernoulli_root
from packprop.functions.registry import RULES
from packprop.testing import CheckFailed, Report, check_extension, check_model, check_use
from packprop.types import EXACT, GRADIENT, INPUTS, Extension, Row
from tests.cases import BY_NAME
from tests.running import generator

ROOT = Path(__file__).resolve().parents[1]
R = torch.randn


def p(*shape: int) -> nn.Parameter:
    return nn.Parameter(R(*shape) + 0.3)


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    """Whatever a test registers is forgotten after it."""
    rules, losses = dict(RULES), dict(LOSSES)
    yield
    for table, before in ((RULES, rules), (LOSSES, losses)):
        table.clear()
        table.update(before)


# In under ten lines


@wrap_torch_function(lambda x, weight: (x, weight))
def gate(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.sigmoid()


def gates(n: int) -> tuple[Tensor, ...]:
    return R(n, 4), p(4)


def write_a_use() -> None:
    @packprop.register_use(gate)
    def rule(call, x, weight):
        return [scaled(call, weight, lambda: x * weight.sigmoid() * (1 - weight.sigmoid()))]


def write_an_extension() -> Extension:
    class MeanAbsolute(Extension):
        savefield = "mean_absolute"
        rows = (Row(GRADIENT, lambda structure: structure.rows.abs().sum((0, 1))),)

        def finish(self, values, samples):
            return values[0] / samples

    return MeanAbsolute()


def test_a_use_of_ones_own() -> None:
    assert len(inspect.getsource(write_a_use).splitlines()) < 10
    write_a_use()
    report = check_use(gate, gates)
    assert report.structures == {"weight": "Scale"}
    assert report.error < 1e-13
    assert {"one sample at a time", "the fallback", "in a model that calls it twice"} <= set(report.laws)


def test_an_extension_of_ones_own() -> None:
    assert len(inspect.getsource(write_an_extension).splitlines()) < 10
    report = check_extension(write_an_extension(), lambda rows: rows[0].abs().mean(0))
    assert report.error < 1e-13
    laws = {"chunks of samples", "columns at once", "overwritten", "scales with the loss", "reference"}
    assert laws | {"batches of a data set", "differentiable"} <= set(report.laws)


@pytest.mark.parametrize("page", ["docs/guide/extending.md", "docs/guide/memory.md", "CONTRIBUTING.md"])
def test_what_the_pages_show_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    assert len(blocks) >= 3


# Every rule that is registered


EXAMPLES: list[tuple[Callable[..., Any], Callable[[int], Any]]] = [
    (F.linear, lambda n: (R(n, 3), p(4, 3), p(4))),
    (F.linear, lambda n: {"input": R(2, n, 3), "weight": p(4, 3)}),
    (torch.matmul, lambda n: (R(n, 2, 3), p(3, 4))),
    (torch.matmul, lambda n: (p(4, 3), R(n, 3, 2))),
    (torch.mm, lambda n: (p(4, 3), R(3, n))),
    (torch.bmm, lambda n: (R(2, n, 3), p(2, 3, 4))),
    (Tensor.__matmul__, lambda n: (R(n, 3), p(3, 4))),
    (torch.addmm, lambda n: {"input": p(4), "mat1": R(n, 3), "mat2": p(3, 4), "beta": 0.5}),
    (torch.einsum, lambda n: ("nhd,hde->nhe", R(n, 2, 3), p(2, 3, 4))),
    (torch.einsum, lambda n: ("oi,tni->tno", p(4, 3), R(2, n, 3))),
    (F.bilinear, lambda n: (R(n, 5, 2), R(n, 5, 3), p(4, 2, 3), p(4))),
    (F.conv1d, lambda n: (R(n, 4, 7), p(6, 2, 3), p(6), 2, 1, 2, 2)),
    (F.conv2d, lambda n: {"input": R(n, 2, 5, 4), "weight": p(3, 2, 3, 3), "padding": "same"}),
    (F.conv3d, lambda n: (R(n, 2, 3, 4, 3), p(3, 2, 2, 2, 2), p(3))),
    (F.conv_transpose1d, lambda n: (R(n, 4, 5), p(4, 3, 3), p(6), 2, 1, 1, 2, 2)),
    (F.conv_transpose2d, lambda n: (R(n, 2, 3, 3), p(2, 3, 2, 2), p(3), 2)),
    (F.embedding, lambda n: (torch.randint(5, (n, 3)), p(5, 2), -1)),
    (F.embedding, lambda n: {"input": torch.randint(5, (n,)), "weight": p(5, 2), "sparse": True}),
    (F.embedding_bag, lambda n: {"input": torch.randint(5, (n, 3)), "weight": p(5, 2), "mode": "sum"}),
    (torch.add, lambda n: {"input": p(2, 3), "other": R(n, 2, 3), "alpha": 2}),
    (Tensor.__radd__, lambda n: (R(n, 3), p(3))),
    (torch.sub, lambda n: (R(n, 2, 3), p(2, 1))),
    (torch.mul, lambda n: (R(2, n, 3), p(2, 1, 3))),
    (F.prelu, lambda n: (R(n, 3, 2), p(3))),
    (F.batch_norm, lambda n: (R(n, 3, 2), R(3), R(3).abs() + 1, p(3), p(3))),
    (F.layer_norm, lambda n: (R(n, 2, 3), (3,), p(3), p(3))),
    (F.rms_norm, lambda n: (R(n, 2, 3), (3,), p(3))),
    (F.group_norm, lambda n: (R(n, 4, 3), 2, p(4), p(4))),
    (F.instance_norm, lambda n: {"input": R(n, 3, 4), "weight": p(3), "bias": p(3)}),
]
FALLBACKS: list[tuple[Callable[..., Any], Callable[[int], Any]]] = [
    (torch.logaddexp, lambda n: (R(n, 3), p(3))),
    (torch.cdist, lambda n: (R(n, 2, 3), p(4, 3))),
    (torch.div, lambda n: (R(n, 3), p(3).detach().exp().requires_grad_())),
]


@pytest.mark.parametrize(("function", "make"), EXAMPLES, ids=lambda value: value.__name__)
def test_rules_of_torch_functions(function: Callable[..., Any], make: Callable[[int], Any]) -> None:
    assert check_use(function, make).error < 1e-12


def test_no_rule_is_left_out() -> None:
    # what cat joins is a tensor made of parameters and samples alike: covered by whole models
    checked = {RULES[function] for function, _ in EXAMPLES} | {RULES[torch.cat]}
    assert {rule.__name__ for rule in RULES.values() if rule not in checked} == set()


@pytest.mark.parametrize(("function", "make"), FALLBACKS, ids=lambda value: value.__name__)
def test_the_fallback(function: Callable[..., Any], make: Callable[[int], Any]) -> None:
    report = check_use(function, make, allow_fallback=True)
    assert set(report.structures.values()) == {"Dense, by the fallback"}
    assert report.laws["the fallback and the loop"] > 0


# Rules that are wrong


def right_factor(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.sigmoid() * (1 - weight.sigmoid())


def entry(structure_of: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for `gate` from what it makes of a product of cotangent and factor ``[v, n, p]``."""

    def rule(call: Any, x: Tensor, weight: Tensor) -> list[Entry]:
        def rows(cotangents: Any, where: Any, samples: Any) -> Dense:
            if cotangents[0] is None:
                return Dense(None)
            product = where[0].to_front(cotangents[0] * right_factor(x, weight), 1)
            rows = product.reshape(*product.shape[:2], -1, 4).sum(2)
            return Dense(structure_of(rows, samples))

        return [Entry(weight, "Dense", rows)]

    return rule


WRONG_RULES = {
    "factor": (
        lambda call, x, weight: [scaled(call, weight, lambda: x)],
        ("one sample at a time", "parameter 'weight'", "largest relative error"),
    ),
    "sums over columns": (
        entry(lambda product, samples: select_samples(product, samples, 1).sum(0, keepdim=True)),
        ("one sample at a time", "v=2", "shapes are [1, 1, 4] and [2, 1, 4]"),
    ),
    "ignores the choice": (
        entry(lambda product, samples: product),
        ("one sample at a time", "chosen [1]", "shapes are [1, 3, 4] and [1, 1, 4]"),
    ),
    "order of the choice": (
        entry(
            lambda product, samples: select_samples(
                product, samples if isinstance(samples, slice) else samples.sort().values, 1
            )
        ),
        ("one sample at a time", "chosen [2, 0]", "largest relative error"),
    ),
    "not differentiable": (
        lambda call, x, weight: [scaled(call, weight, lambda: right_factor(x, weight).detach())],
        ("in a model that calls it once: differentiable", "parameter 'weight'"),
    ),
    "no rows": (
        lambda call, x, weight: [Entry(weight, "Dense", lambda *_: Dense(None))],
        ("one sample at a time", "the structure has no rows"),
    ),
    "describes nothing": (
        lambda call, x, weight: None,
        ("the registered rule", "says nothing of parameter 'weight'"),
    ),
}


@pytest.mark.parametrize("name", WRONG_RULES)
def test_a_wrong_rule_is_caught(name: str) -> None:
    rule, texts = WRONG_RULES[name]
    packprop.register_use(gate)(rule)
    with pytest.raises(CheckFailed) as caught:
        check_use(gate, gates)
    for text in texts:
        assert text in str(caught.value)
    assert caught.value.error > 1e-3


def test_positions_folded_into_the_samples_are_tested() -> None:
    @packprop.register_use(gate)
    def rule(call, x, weight):
        def structure_of(cotangents, where, samples):  # right wherever each row is a sample
            if cotangents[0] is None:
                return Dense(None)
            return Dense(select_samples(cotangents[0] * right_factor(x, weight), samples, 1))

        return [Entry(weight, "Dense", structure_of)]

    with pytest.raises(CheckFailed, match="3 samples x 2 parts"):
        check_use(gate, gates)


@wrap_torch_function(lambda x, weight: (x, weight))
def symmetric(x: Tensor, weight: Tensor) -> Tensor:
    return x @ (weight + weight.T)


def test_a_fold_that_sums_breaks_fast_statistics() -> None:
    @packprop.register_use(symmetric)
    def rule(call, x, weight):
        def build(cotangent, x):
            if cotangent is not None:
                cotangent = cotangent.reshape(*cotangent.shape[:2], -1, 1, 3)
            inputs = x.reshape(x.shape[0], -1, 1, 3)
            return Outer(inputs, cotangent, lambda g: (g + g.mT).squeeze(-3))

        return [Entry(weight, "Outer", rowwise(build, "symmetric", x))]

    with pytest.raises(CheckFailed, match="fast statistics was compared") as caught:
        check_use(symmetric, lambda n: (R(n, 3), p(3, 3)))
    assert "sum_sq" in caught.value.where
    assert "rearrange" in caught.value.instead


def test_inputs_alone_are_tested() -> None:
    @packprop.register_use(F.linear)
    def rule(call, input, weight):
        right = affine(call, input, weight)

        def structure_of(cotangents, where, samples):
            structure = right.structure_of(cotangents, where, samples)
            if cotangents[0] is None:
                return Outer(2 * structure.x, None, structure.fold)
            return structure

        return [Entry(weight, "Outer", structure_of)]

    with pytest.raises(CheckFailed, match="inputs alone"):
        check_use(F.linear, lambda n: (R(n, 3), p(4, 3)))


def test_a_function_that_recording_does_not_see() -> None:
    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    packprop.register_use(plain)(lambda call, x, weight: [affine(call, x, weight)])
    with pytest.raises(CheckFailed, match="saw 'linear' in its place") as caught:
        check_use(plain, lambda n: (R(n, 3), p(4, 3)))
    assert "wrap_torch_function" in caught.value.instead
    report = check_use(plain, lambda n: (R(n, 3), p(4, 3)), allow_fallback=True)
    assert "recording sees 'linear' in place of 'plain'" in report.notes


def test_a_function_without_a_rule() -> None:
    with pytest.raises(CheckFailed, match="no rule is registered"):
        check_use(torch.logaddexp, lambda n: (R(n, 3), p(3)))


def test_a_function_that_mixes_samples() -> None:
    @wrap_torch_function(lambda x, weight: (x, weight))
    def mixing(x: Tensor, weight: Tensor) -> Tensor:
        return (x - x.mean(0)) * weight

    with pytest.raises(CheckFailed, match="samples are mixed"):
        check_use(mixing, gates, allow_fallback=True)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda n: (R(n, 3), R(3)), "no tensor is an nn.Parameter"),
        (lambda n: (R(2, 3), p(3)), "no tensor has extent n"),
        (lambda n: (R(n, n), p(n)), "on several axes"),
        (lambda n: ([R(1, 3)] * n, p(3)), "number of tensors depends"),
    ],
)
def test_arguments_that_are_none(make: Callable[[int], Any], text: str) -> None:
    with pytest.raises(packprop.BadInput, match=re.escape(text)):
        check_use(torch.mul, make)


# The catalogue


# Functions are no numbers that merge: test_products.py. Recursions are refused on most of the small problems.
FUNCTIONS, CHAINS = {"GGNMP", "HMP", "PCHMP"}, {"HBP", "KFRA"}


@pytest.mark.parametrize("name", sorted(set(extensions.__all__) - {"Extension", "Row"} - FUNCTIONS - CHAINS))
def test_laws_of_the_catalogue(name: str) -> None:
    kind = getattr(extensions, name)
    drawn = "mc_samples" in inspect.signature(kind).parameters
    source = generator()
    before = source.get_state()
    report = check_extension(kind(mc_samples=3, generator=source) if drawn else kind())
    assert report.error < 1e-12
    assert ("subsampling" in report.laws) == ("subsampling" in inspect.signature(kind).parameters)
    assert torch.equal(source.get_state(), before)


@pytest.mark.parametrize("name", sorted(CHAINS))
def test_laws_of_recursions(name: str) -> None:
    chain = nn.Sequential(
        nn.Conv2d(2, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 2)
    )
    on = chain, nn.CrossEntropyLoss(), R(4, 2, 3, 3), torch.tensor([0, 1, 1, 0])
    assert check_extension(getattr(extensions, name)(), on=on).error < 1e-12


@pytest.mark.parametrize(
    ("extension", "reference"),
    [
        (extensions.BatchGrad(), lambda rows: rows[0]),
        (extensions.Variance(), lambda rows: rows[0].var(0, correction=0)),
        (extensions.BatchDotGrad(), lambda rows: rows[0].flatten(1) @ rows[0].flatten(1).T),
        (extensions.DiagGGNExact(), lambda columns: columns.square().sum((0, 1))),
        (extensions.SqrtGGNExact(subsampling=[3, 1]), lambda columns: columns),
        (extensions.BatchDiagGGNMC(mc_samples=3), lambda drawn: drawn.square().sum(0)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_references_of_the_catalogue(extension: Extension, reference: Callable[..., Any]) -> None:
    on = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1),
        R(4, 3),
        torch.tensor([0, 2, 1, 1]),
    )
    report = check_extension(extension, reference, on=on)
    assert report.laws["reference"] >= 4
    assert report.laws["differentiable"] == 4


# Extensions that are wrong


def absolute(structure: Any) -> Tensor:
    return structure.rows.abs().sum((0, 1))


def made(statistic: Callable[..., Any], finish: Any = None, **options: Any) -> Extension:
    """An extension of one row."""
    seed = options.pop("seed", GRADIENT)
    body = {"savefield": "made", "rows": (Row(seed, statistic, **options),)}
    if finish is not None:
        body["finish"] = finish
    kind = type("Made", (Extension,), body)
    return kind()  # type: ignore[no-any-return]


def counts_passes(self: Extension, values: list[Any], samples: int) -> Tensor:
    seen = vars(self).setdefault("seen", {})
    shape = tuple(values[0].shape)
    seen[shape] = seen.get(shape, 0) + 1
    return values[0] * seen[shape]


@dataclass(frozen=True, eq=False)
class Forgetful(Extension):
    """Divides by another number where samples are chosen."""

    subsampling: list[int] | None = None
    savefield = "forgetful"
    rows = (Row(GRADIENT, absolute),)

    def finish(self, values: list[Any], samples: int) -> Tensor:
        return values[0] / (1 if self.subsampling is None else 2)


WRONG_EXTENSIONS: dict[str, tuple[Callable[[], Extension], Any, str, str]] = {
    "mean over a chunk": (
        lambda: made(lambda s: s.rows.mean((0, 1))),
        None,
        "chunks of samples",
        "1 of 4 at once",
    ),
    "needs all samples": (
        lambda: made(lambda s: s.rows[0].amax(0)),
        None,
        "chunks of samples",
        "whole=True",
    ),
    "over_n": (
        lambda: made(lambda s: s.rows[0].flatten(1).norm(dim=1)),
        None,
        "chunks of samples",
        "over_n",
    ),
    "over_v": (
        lambda: made(lambda s: s.rows.square().sum((0, 1)), seed=EXACT, over_v=CAT[0]),
        None,
        "columns at once",
        "over_v",
    ),
    "columns are added before they are squared": (
        lambda: made(lambda s: s.rows.sum(0).square().sum(0), seed=EXACT),
        None,
        "columns at once",
        "one by one",
    ),
    "accumulates": (lambda: made(absolute, counts_passes), None, "", "parameter"),
    "degree": (
        lambda: made(lambda s: s.rows.square().sum((0, 1))),
        None,
        "scales with the loss",
        "degree",
    ),
    "degree of columns": (
        lambda: made(lambda s: s.rows.square().sum((0, 1)), seed=EXACT, degree=2),
        None,
        "scales with the loss",
        "3 times the loss",
    ),
    "scale of batches": (
        lambda: made(absolute, lambda self, values, samples: values[0] / samples**2 * 4),
        lambda rows: rows[0].abs().mean(0),
        "reference",
        "largest relative error is 3",
    ),
    "another value": (
        lambda: made(absolute),
        lambda rows: rows[0].sum(0),
        "reference",
        "largest relative error",
    ),
    "another shape": (
        lambda: made(absolute),
        lambda rows: rows[0].abs(),
        "reference",
        "the shapes are",
    ),
    "detached": (
        lambda: made(lambda s: s.rows.detach().abs().sum((0, 1))),
        lambda rows: rows.abs().sum((0, 1)),
        "differentiable",
        "depend on no parameter",
    ),
    "detached in part": (
        lambda: made(lambda s: (s.rows.detach() * s.rows).sum((0, 1)), degree=2),
        lambda rows: rows.square().sum((0, 1)),
        "differentiable",
        "largest relative error is 0.5",
    ),
    "no value": (
        lambda: made(absolute, lambda self, values, samples: None),
        None,
        "saved on every parameter",
        "there is no value",
    ),
    "only for some": (
        lambda: made(
            lambda s: s.x.square().sum((0, 1)) if isinstance(s, Outer) else None, seed=INPUTS, degree=0
        ),
        None,
        "saved on every parameter",
        "there is no value",
    ),
    "no number": (
        lambda: made(absolute, lambda self, values, samples: "text"),
        None,
        "saved on every parameter",
        "values of type str",
    ),
    "subsampling": (Forgetful, None, "subsampling", "all samples"),
}


@pytest.mark.parametrize("name", WRONG_EXTENSIONS)
def test_a_wrong_extension_is_caught(name: str) -> None:
    make, reference, law, text = WRONG_EXTENSIONS[name]
    with pytest.raises(CheckFailed) as caught:
        check_extension(make(), reference)
    assert law in caught.value.asked
    assert text in str(caught.value)
    assert "parameter" in caught.value.where
    assert caught.value.error > 0.1


def test_values_that_accumulate_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that adds to what an earlier pass has saved."""
    save = saving.ResultSaver.save

    def add(self: Any, leaf: Tensor, results: Any) -> None:
        before = {extension: getattr(leaf, extension.savefield, 0) for extension in results}
        save(self, leaf, results)
        for extension, value in before.items():
            setattr(leaf, extension.savefield, getattr(leaf, extension.savefield) + value)

    monkeypatch.setattr(saving.ResultSaver, "save", add)
    monkeypatch.setattr(saving.ResultSaver, "take_off", lambda *_, **__: {})
    with pytest.raises(CheckFailed, match="overwritten") as caught:
        check_extension(made(absolute))
    assert caught.value.error == pytest.approx(1)


def test_batches_that_are_merged_wrongly_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of means in place of a mean."""
    monkeypatch.setattr(state, "rescale", lambda value, factor, degree: value)
    with pytest.raises(CheckFailed, match="batches of a data set"):
        check_extension(made(absolute))


@pytest.mark.parametrize("name", ["grad", "data", "sub"])
def test_a_savefield_that_every_tensor_has(name: str) -> None:
    class Own(Extension):
        savefield = name
        rows = (Row(GRADIENT, absolute),)

    with pytest.raises(packprop.BadInput, match="every tensor has an attribute"):
        check_extension(Own())


def test_a_class_in_place_of_an_extension() -> None:
    with pytest.raises(packprop.BadInput, match="class, not an instance"):
        check_extension(extensions.BatchGrad)  # type: ignore[arg-type]


# Models


def classifier() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    return model, nn.CrossEntropyLoss(), R(3, 3), torch.tensor([0, 2, 1])


@pytest.mark.parametrize(
    "name",
    [
        "conv2d-deep",
        "vision-transformer-hand-written",
        "tied-transpose",
        "weight-norm",
        "lstm",
        "add-scalar",
        "weight-norm-hook",
        "pruned",
    ],
)
def test_models(name: str) -> None:
    problem = BY_NAME[name].problem(3)
    problem.total()  # what a hook has left on the module does not matter
    report = check_model(problem.model, problem.loss, problem.inputs, problem.targets)
    trained = len(problem.parameters)
    expected = ["BatchGrad", "Variance", "DiagGGNExact", "SqrtGGNExact"]
    assert [report.laws[law] for law in expected] == [trained] * 4
    assert report.error < 1e-10
    assert any("draws" in note for note in report.notes)


class TimeFirst(nn.Module):
    """Samples on the second axis of the input, behind positions in the flattened output."""

    def __init__(self, interacts: bool) -> None:
        super().__init__()
        self.inner, self.unused, self.interacts = nn.Linear(2, 3), nn.Linear(2, 3), interacts

    def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
        hidden = self.inner(x + shift)
        if self.interacts:
            hidden = hidden * hidden.mean(0)
        return hidden.flatten(0, 1)


def scaled_sum(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f, y.flatten(), reduction="sum") / 7


def test_models_with_arguments_functions_and_other_axes() -> None:
    size = 3
    inputs, targets = {"x": R(4, size, 2), "shift": R(2)}, torch.randint(3, (4, size))
    report = check_model(TimeFirst(interacts=True), scaled_sum, inputs, targets, axis=1)
    assert report.laws["SqrtGGNExact"] == 2
    assert {"unused: unused.weight", "unused: unused.bias"} <= set(report.notes)


def test_samples_that_are_taken_for_something_else_are_caught() -> None:
    """Where positions are as separate as samples, the leading axis counts."""
    inputs, targets = {"x": R(4, 3, 2), "shift": R(2)}, torch.randint(3, (4, 3))
    with pytest.raises(CheckFailed, match="takes them for 4 samples"):
        check_model(TimeFirst(interacts=False), scaled_sum, inputs, targets, axis=1)


def test_a_loss_without_useful_curvature_is_noted() -> None:
    model, _, x, _ = classifier()
    report = check_model(model, nn.L1Loss(), x, R(3, 3))
    assert "BatchGrad" in report.laws
    assert "DiagGGNExact" not in report.laws
    assert any("no GGN" in note for note in report.notes)
    with pytest.raises(packprop.PackpropError, match="Hessian of l1_loss is zero"):
        check_model(model, nn.L1Loss(), x, R(3, 3), [extensions.DiagGGNExact()])


def test_chosen_extensions_and_those_without_a_loop() -> None:
    chosen = [extensions.BatchGrad(subsampling=[2, 0]), extensions.KFAC(), write_an_extension()]
    report = check_model(*classifier(), chosen)
    assert report.laws["BatchGrad"] == 4
    assert report.laws["chunks of samples"] > 0
    assert {note.split(":")[0] for note in report.notes} == {"KFAC", "MeanAbsolute"}
    with pytest.raises(packprop.BadInput):
        check_model(*classifier(), [extensions.BatchGrad])  # type: ignore[list-item]


def wrong_linear(call: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Entry]:
    return [affine(call, 2 * input, weight)]


def wrong_cell(structure: Outer) -> Tensor:
    assert structure.cotangent is not None
    return structure.fold(structure.cotangent.sum((0, 1, 2))[..., None] * structure.x.sum((0, 1))[:, None])


def wrong_draw(outputs: Tensor, scale: Tensor) -> Root:
    right = bernoulli_root(outputs, scale)
    return Root(right.columns, right.position, lambda m, source: 1.4 * right.draw(m, source))


def wrong_columns(outputs: Tensor, scale: Tensor) -> Root:
    right = bernoulli_root(outputs, scale)
    return Root(right.columns, lambda t, a, b: 1.4 * right.position(t, a, b), right.draw)


def test_a_wrong_rule_is_seen_in_a_model() -> None:
    packprop.register_use(F.linear)(wrong_linear)
    with pytest.raises(CheckFailed, match="BatchGrad was compared") as caught:
        check_model(*classifier())
    assert "weight'" in caught.value.where
    assert caught.value.error == pytest.approx(1)


def test_a_wrong_statistic_is_seen_in_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cells.FAST_CELLS["sum_sq"], Outer, wrong_cell)
    with pytest.raises(CheckFailed, match="SumGradSquared was compared"):
        check_model(*classifier())


@pytest.mark.parametrize(
    ("root", "text"), [(wrong_columns, "DiagGGNExact was compared"), (wrong_draw, "draws was compared")]
)
def test_a_wrong_loss_is_seen_in_a_model(root: Callable[..., Root], text: str) -> None:
    model, _, x, _ = classifier()

    @packprop.register_loss(F.binary_cross_entropy_with_logits)
    def rule(input, target, *args, **kwargs):
        return Loss(None, 1.0, input.numel(), root)

    with pytest.raises(CheckFailed, match=text) as caught:
        check_model(model, nn.BCEWithLogitsLoss(), x, torch.rand(3, 3))
    assert caught.value.error == pytest.approx(0.96, abs=0.1)


def test_a_model_that_mixes_or_draws() -> None:
    _, loss, x, y = classifier()
    with pytest.raises(packprop.PackpropError, match="BatchNorm1d"):
        check_model(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), loss, x, y)
    with pytest.raises(CheckFailed, match="random numbers are drawn"):
        check_model(nn.Sequential(nn.Dropout(), nn.Linear(3, 3)), loss, x, y)


def test_losses_that_are_no_number_and_inputs_without_samples() -> None:
    model, _, x, y = classifier()
    with pytest.raises(packprop.PackpropError):
        check_model(model, nn.CrossEntropyLoss(reduction="none"), x, y)
    with pytest.raises(packprop.BadInput, match="no tensor with samples"):
        check_model(model, nn.MSELoss(), torch.tensor(1.0), y)


def test_nothing_of_the_users_is_changed() -> None:
    model, loss, x, y = classifier()
    model.train()
    packprop.extend(model[0])
    model[0].weight.grad = torch.ones(4, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, hooks = torch.get_rng_state(), len(model._forward_hooks)
    check_model(model, loss, x, y)
    check_extension(extensions.BatchGrad(), on=(model, loss, x, y))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    assert (model[0].weight.dtype, x.dtype) == (torch.float32, torch.float32)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad.sum() == 12
    assert model[1].training
    assert len(model._forward_hooks) == hooks == 0
    assert not any(hasattr(parameter, "grad_batch") for parameter in model.parameters())


# Reports and errors


def test_a_report_prints_and_counts() -> None:
    report = check_model(*classifier())
    assert isinstance(report, Report)
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100
    assert "check_model(Sequential)" in lines[0]
    assert any("BatchDotGrad" in line and " 4 " in line for line in lines)
    assert sum(report.laws.values()) == len(report.comparisons)
    assert 0 < report.error < 1e-12


def test_a_failure_is_an_assertion_error_in_four_parts() -> None:
    with pytest.raises(AssertionError) as caught:
        check_extension(made(absolute), lambda rows: rows[0].sum(0), tolerance=1e-3)
    failure = caught.value
    assert isinstance(failure, CheckFailed)
    assert isinstance(failure, packprop.PackpropError)
    assert "0.001 is allowed" in failure.why or "1e-03 is allowed" in failure.why
    copied = pickle.loads(pickle.dumps(failure))
    assert (str(copied), copied.error) == (str(failure), failure.error)


def test_the_tolerance_is_obeyed() -> None:
    slightly = made(lambda s: s.rows.abs().sum((0, 1)) * (1 + 1e-6))
    with pytest.raises(CheckFailed):
        check_extension(slightly, lambda rows: rows.abs().sum((0, 1)))
    report = check_extension(slightly, lambda rows: rows.abs().sum((0, 1)), tolerance=1e-5)
    assert report.error == pytest.approx(1e-6, rel=0.01)


def test_values_that_are_not_finite_agree_with_themselves_alone() -> None:
    infinite = made(absolute, lambda self, values, samples: values[0] / 0)
    assert check_extension(infinite, lambda rows: rows.abs().sum((0, 1)) / 0).error < 1e-10
    with pytest.raises(CheckFailed):
        check_extension(infinite, lambda rows: rows.abs().sum((0, 1)))
