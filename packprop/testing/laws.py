"""``check_extension``: the laws that every extension obeys, on small problems or one's own."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packprop.algebra.monoid import lift, rescale
from packprop.context import check_extensions
from packprop.dataset.compute import compute
from packprop.errors import BadInput, PackpropError
from packprop.tensors.nesting import tensors_in
from packprop.testing.loops import Loops, Parts, Problem, double_precision, strided
from packprop.testing.passes import (
    columns_at_outputs,
    finished,
    graph_of,
    observed,
    same_draws,
    saved,
    two_passes,
)
from packprop.testing.report import TOLERANCE, Ledger, Named, Report
from packprop.types import INPUTS, Extension

ALL_COLUMNS = 10**6


FACTOR = 3.0


Reference = Callable[..., Any]


def check_extension(
    extension: Extension,
    reference: Reference | None = None,
    *,
    on: Parts | None = None,
    tolerance: float = TOLERANCE,
) -> Report:
    """Test an extension's laws, and its values against a function of per-sample gradients.

    The laws: a value is saved on every parameter; it does not depend on how many samples or columns
    are taken at once; a second pass overwrites it; it scales with the loss as the rows' ``degree``
    says; batches of a data set merge to the value of one batch; ``subsampling``, if it is an
    argument, means some samples in their order.

    Args:
        extension: An instance. What it draws is made repeatable; give several draws, so that there
            are columns to be merged.
        reference: From per-sample gradients ``[v, n, *p]`` of one parameter to the value, with v=1
            for the gradient, else one for each column of the root of the loss's Hessian, or draw.
            Called with one such tensor for each different seed of the rows, that of inputs left
            out. Its derivatives are compared with those under ``create_graph=True``, too.
        on: ``(model, loss, inputs, targets)``, small, to test on; by default three small problems
            that have every structure, 1 and 4 samples, mean and sum.
        tolerance: Largest relative error allowed.

    Returns:
        What was compared; prints.

    Raises:
        CheckFailed: An ``AssertionError`` that names law, parameter and largest relative error.
        BadInput: For anything that is no instance of an extension.
    """
    check_extensions("check_extension(...) was called.", [extension])
    ledger = Ledger(f"check_extension({extension.name})", tolerance)
    if hasattr(nn.Parameter, extension.savefield):
        raise BadInput(
            f"{ledger.subject} was called.",
            f"savefield {extension.savefield!r}",
            "every tensor has an attribute of that name",
            "choose a name that torch.Tensor does not have",
        )
    with double_precision():
        for parts in _small_problems() if on is None else [on]:
            check_laws(ledger, Problem.of(parts), extension, reference)
    return ledger.report()


class _Words(nn.Module):
    """Look-ups, affine maps that are shared, plain or used twice, scales and shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.shared = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.rand(3) + 0.5)
        self.head = nn.Linear(3, 3)

    def forward(self, words: Tensor) -> Tensor:
        x = torch.tanh(self.shared(self.norm(self.table(words))))
        x = torch.tanh(self.shared(x)).mean(1) * self.scale
        scores: Tensor = self.head(x)
        return scores


def _small_problems() -> list[Parts]:
    pixels = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Sigmoid(), nn.Flatten(), nn.Linear(12, 2))
    plain = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2))
    words = torch.tensor([[0, 2, 2], [1, 4, 3], [3, 3, 3], [0, 1, 2]])
    return [
        (_Words(), nn.CrossEntropyLoss(), words, torch.tensor([0, 2, 1, 1])),
        (pixels, nn.MSELoss(), torch.randn(4, 2, 3, 3), torch.randn(4, 2)),
        (plain, nn.BCEWithLogitsLoss(reduction="sum"), torch.randn(1, 3), torch.rand(1, 2)),
    ]


def check_laws(ledger: Ledger, problem: Problem, extension: Extension, reference: Reference | None) -> None:
    """Every law on one problem."""
    chosen = extension.subsampling
    samples = problem.samples if chosen is None else len(chosen)
    whole = observed(problem, extension, (samples, None))
    value = finished(extension, whole, samples)
    loops = Loops(problem, ledger)
    require_all(ledger, extension, value, loops)
    ledger.same("saved on every parameter", saved(problem, extension), value)

    def hold(law: str, at_once: tuple[int, int | None], how: str) -> None:
        try:
            taken = observed(problem, extension, at_once)
        except PackpropError:
            raise
        except RuntimeError as error:  # parts of shapes that cannot be added
            where = f"{extension.name} of a parameter, {how}"
            raise ledger.failed(law, where, f"parts do not merge: {error}") from error
        ledger.same(law, finished(extension, taken, samples), value, how)

    for size in range(1, samples):
        hold("chunks of samples", (size, None), f"{size} of {samples} at once")
    hold("columns at once", (samples, 1), "one by one")
    hold("columns at once", (samples, 2), "two at once")
    hold("columns at once", (samples, ALL_COLUMNS), "all at once")
    ledger.same("overwritten", saved(problem, extension, passes=2), value, "second pass")
    larger = observed(problem, extension, (samples, 1), FACTOR)
    scaled = {
        name: [
            # what was made of a first pass is a basis, whatever the loss is multiplied by
            rescale(result, FACTOR, 0 if two_passes(extension) and row.after is None else row.degree)
            for row, result in zip(extension.rows, results, strict=True)
        ]
        for name, results in copy.deepcopy(whole).items()
    }
    ledger.same(
        "scales with the loss",
        finished(extension, larger, samples),
        finished(extension, scaled, samples),
        f"{FACTOR:g} times the loss",
    )
    _check_batches(ledger, problem, extension, value)
    if takes_subsampling(extension):
        _check_subsampling(ledger, problem, extension, value)
    if reference is not None:
        check_reference(ledger, problem, extension, reference)


def require_all(ledger: Ledger, extension: Extension, value: Named, loops: Loops) -> None:
    """Every parameter that the loss depends on must have a value."""
    missing = [name for name in loops.used if value.get(name) is None]
    if missing:
        where = f"{extension.name} of parameter {missing[0]!r}"
        raise ledger.failed("saved on every parameter", where, "there is no value")


def _check_batches(ledger: Ledger, problem: Problem, extension: Extension, value: Named) -> None:
    """Two batches of a data set, of different size."""
    single = any(row.whole or row.seed.mc_samples is not None for row in extension.rows)
    cut = problem.samples - 1
    batches = problem.batches(cut)
    if single or extension.subsampling is not None or batches is None or cut == 0:
        return
    try:
        result = compute(problem.model, problem.loss, batches, [extension], progress=False)
    except PackpropError as refusal:
        ledger.notes.append(f"not compared over a data set: {refusal.why}")
        return
    ledger.same("batches of a data set", result[extension], value, f"{cut} and 1 samples")


def takes_subsampling(extension: Extension) -> bool:
    """Whether it is an argument of the extension, and was not given."""
    known = "subsampling" in inspect.signature(type(extension)).parameters
    return known and extension.subsampling is None


def subsampled(extension: Extension, chosen: list[int]) -> Extension:
    """The same extension for some samples."""
    if dataclasses.is_dataclass(extension):
        other: Extension = dataclasses.replace(extension, subsampling=chosen)
    else:
        other = copy.copy(extension)
        other.subsampling = chosen
    return other


def _check_subsampling(ledger: Ledger, problem: Problem, extension: Extension, value: Named) -> None:
    """All samples in their order are the whole; some are the merged results of each of them."""
    law, every = "subsampling", list(range(problem.samples))
    listed = subsampled(extension, every)
    taken = finished(listed, observed(problem, listed, (2, 1)), len(every))
    ledger.same(law, taken, value, "all samples")
    if problem.samples < 3 or any(row.whole for row in extension.rows) or two_passes(extension):
        return
    chosen = [2, 0]
    singles = [observed(problem, subsampled(extension, [n]), (1, 1)) for n in chosen]
    merged = {}
    for name in singles[0]:
        results = []
        for row, *parts in zip(extension.rows, *(single[name] for single in singles), strict=True):
            total: Any = None
            if all(part is not None for part in parts):
                first, second = (lift(row.over_n, part) for part in parts)
                total = row.over_n.result(row.over_n.merge(first, second))
            results.append(total)
        merged[name] = results
    pair = subsampled(extension, chosen)
    taken = finished(pair, observed(problem, pair, (2, 1)), len(chosen))
    ledger.same(law, taken, finished(pair, merged, len(chosen)), f"samples {chosen}")


def check_reference(ledger: Ledger, problem: Problem, extension: Extension, reference: Reference) -> None:
    """Values, those of some samples, and their derivatives against a function of the user's."""
    given = _per_sample(ledger, problem, extension, create_graph=False)
    chosen = extension.subsampling

    def expected(tables: list[dict[str, Tensor]], chosen: Sequence[int] | None) -> Named:
        index = slice(None) if chosen is None else list(chosen)
        return {name: reference(*(table[name][:, index] for table in tables)) for name in tables[0]}

    ledger.same("reference", saved(problem, extension), expected(given, chosen))
    if takes_subsampling(extension) and problem.samples > 2:
        part = saved(problem, subsampled(extension, [2, 0]))
        ledger.same("reference", part, expected(given, [2, 0]), "subsampling [2, 0]")
    given = _per_sample(ledger, problem, extension, create_graph=True)
    try:
        slopes = _slopes(problem, expected(given, chosen))
    except NotImplementedError as missing:
        ledger.notes.append(f"not compared under create_graph=True: {missing}")
        return
    if slopes is None:
        return
    own = _slopes(problem, saved(problem, extension, create_graph=True))
    if own is None:
        why = "as far as autograd knows, the values depend on no parameter"
        raise ledger.failed("differentiable", "all parameters", why)
    ledger.same("differentiable", own, slopes, "gradient of a weighted sum of all values")


def _per_sample(
    ledger: Ledger, problem: Problem, extension: Extension, create_graph: bool
) -> list[dict[str, Tensor]]:
    """For each seed gradients of single samples ``[v, n, *p]`` by loops, of the same draws."""
    loops = Loops(problem, ledger, create_graph)
    loss, outputs = problem.forward()
    graph = graph_of(loss)
    given = []
    with same_draws(extension):
        for seed in dict.fromkeys(row.seed for row in extension.rows):
            if seed == INPUTS:
                continue
            if seed.kind == "gradient":
                fed = loops.by_sample(loops.slopes)[None]
            else:
                fed = columns_at_outputs(graph, seed, loops, outputs, create_graph)
                if seed.mc_samples is None:
                    squares = torch.einsum("vnc,vnd->ncd", fed, fed)
                    law = "columns are a root of the loss's Hessian"
                    ledger.same(law, {"(loss)": squares}, {"(loss)": loops.hessians})
            pulled = loops.pulled(fed)
            given.append({name: pulled[name] for name in loops.used})
    return given


def _slopes(problem: Problem, values: Named) -> Named | None:
    """Gradient of one fixed weighted sum of all values."""
    total: Tensor | float = 0.0
    source = torch.Generator().manual_seed(1)
    for name in sorted(values):
        for tensor in tensors_in(values[name]):
            weights = torch.randn(tensor.shape, generator=source, dtype=tensor.dtype)
            total = total + (weights.to(tensor.device) * tensor).sum()
    if not isinstance(total, Tensor) or not total.requires_grad:
        return None
    gradients = torch.autograd.grad(
        total, list(problem.parameters.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(problem.parameters, strided(gradients), strict=True))
