"""``check_model``: compare the values of a model and its loss with loops over samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packprop import extensions as catalogue
from packprop.engine.functions import trusting_rules
from packprop.engine.graph import Graph
from packprop.errors import PackpropError
from packprop.testing.laws import check_batches, check_laws, require_all
from packprop.testing.loops import Loops
from packprop.testing.passes import columns_at_outputs, graph_of, saved
from packprop.testing.problem import Problem, double_precision
from packprop.testing.report import TOLERANCE, CheckFailed, Ledger, Named, Report
from packprop.types import Extension, Extensions, Seed, check_extensions


def _flat(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), -1)


FIRST_ORDER: dict[type[Extension], Callable[[Tensor], Tensor]] = {
    catalogue.BatchGrad: lambda rows: rows,
    catalogue.BatchL2Grad: lambda rows: _flat(rows).square().sum(1),
    catalogue.SumGradSquared: lambda rows: rows.square().sum(0),
    catalogue.Variance: lambda rows: rows.var(0, correction=0),
    catalogue.BatchDotGrad: lambda rows: _flat(rows) @ _flat(rows).T,
}
"""For each extension, a function from gradients of single samples ``[n, *p]`` to its value."""
DIAGONALS: dict[type[Extension], Callable[[Tensor], Tensor]] = {
    catalogue.DiagGGNExact: lambda diagonals: diagonals.sum(0),
    catalogue.BatchDiagGGNExact: lambda diagonals: diagonals,
}
"""For each extension, a function from GGN diagonals of single samples ``[n, *p]`` to its value."""
DRAWS = 4096
"""The number of Monte Carlo draws to compare with the Hessian."""
DEVIATIONS = 6.0
"""A second moment of draws may be off by this many standard errors plus 1 % of the largest entry."""


def check_model(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    extensions: Extensions | None = None,
    *,
    axis: int = 0,
    singles: Sequence[Any] = (),
    tolerance: float = TOLERANCE,
) -> Report:
    """Compare values of a model's parameters with loops over samples, in double precision.

    The check works on copies, and does not change your model or data. Its time grows with the number of samples
    times the number of outputs. It tests an extension without a known loop by the laws of ``check_extension``.
    By default it also compares the loss's Monte Carlo draws with its Hessian: they may differ by six standard
    errors plus 1 % of the largest entry. Two batches of a data set must give the value of one, which tests the
    divisor that a rule of the loss declares.

    Args:
        model: The model, in the mode in which you use it.
        loss: A module, or a function that calls torch's losses. ``loss(model(inputs), targets)`` is one number.
        inputs: A few samples: a tensor, a tuple or dictionary of arguments, or an object.
        targets: The loss's arguments beside the model's outputs.
        extensions: The extensions to compare; by default those of first order and, unless the engine refuses
            them, those of the exact GGN.
        axis: The axis that holds the samples in the tensors of ``inputs``. As everywhere, declare the axis of
            the loss's arguments by ``extend(model, sample_axis=...)``.
        singles: The inputs of each sample alone, if the samples are no rows of the inputs, as in a batch of
            graphs: ``[Batch.from_data_list([graph]) for graph in graphs]``.
        tolerance: Largest relative error allowed.

    Returns:
        The report of all comparisons, which you can print. Its notes name everything that was left out.

    Raises:
        CheckFailed: An ``AssertionError`` that names extension, parameter and largest relative error.
        PackpropError: If the engine itself refuses the model.
    """
    ledger = Ledger(f"check_model({type(model).__name__})", tolerance)
    with double_precision(), trusting_rules():
        problem = Problem.of((model, loss, inputs, targets), axis, singles)
        if extensions is not None:
            chosen = check_extensions("check_model(...) was called.", extensions)
            compare(ledger, problem, chosen)
            return ledger.report()
        compare(ledger, problem, [kind() for kind in FIRST_ORDER])
        squares = catalogue.SumGradSquared()  # its factor in a batch is the square of the divisor's
        check_batches(ledger, problem, squares, saved(problem, squares))
        curved = [*(kind() for kind in DIAGONALS), catalogue.SqrtGGNExact()]
        try:
            saved(problem, curved[0])
        except PackpropError as refusal:
            ledger.notes.append(f"no GGN: {refusal.why}")
            return ledger.report()
        _check_draws(ledger, problem, compare(ledger, problem, curved))
    return ledger.report()


def require_samples(ledger: Ledger, problem: Problem, graph: Graph) -> None:
    """Raise ``CheckFailed`` if the engine finds another number of samples."""
    if graph.samples != problem.samples:
        raise CheckFailed(
            f"{ledger.subject}: numbers of samples were compared.",
            f"inputs with {problem.samples} samples on axis {problem.axis}",
            f"the engine takes them for {graph.samples} samples",
            "sample n is row n of what the loss takes: declare its axis by extend(model, sample_axis=...); if "
            "samples are no rows of the inputs, give the inputs of each sample alone, singles=[...]",
        )


def compare(ledger: Ledger, problem: Problem, extensions: Sequence[Extension]) -> Loops:
    """Compare the gradient and the values of extensions with loops over samples."""
    loss, _ = problem.forward()
    require_samples(ledger, problem, graph_of(loss))  # first: the engine's refusals say more than failed laws
    loops = Loops(problem, ledger)
    ledger.notes += [f"unused: {n}" for n in problem.parameters if n not in loops.gradient]
    total = {name: loops.rows[name].sum(0) for name in loops.used}
    ledger.same("samples sum to .grad", loops.gradient, total)
    for extension in extensions:
        value = saved(problem, extension)
        require_all(ledger, extension, value, loops)
        _compare_with_loops(ledger, problem, loops, extension, value)
    return loops


def _compare_with_loops(
    ledger: Ledger, problem: Problem, loops: Loops, extension: Extension, value: Named
) -> None:
    kind, names, shapes = type(extension), loops.used, problem.parameters
    chosen = extension.subsampling
    index = slice(None) if chosen is None else list(chosen)
    if kind in FIRST_ORDER:
        expected = {name: FIRST_ORDER[kind](loops.rows[name][index]) for name in names}
    elif kind in DIAGONALS:
        diagonals = {name: loops.diagonal(name)[index] for name in names}
        expected = {
            name: DIAGONALS[kind](diagonal.reshape(len(diagonal), *shapes[name].shape))
            for name, diagonal in diagonals.items()
        }
    elif kind is catalogue.SqrtGGNExact:
        # a root is known up to rotations of its columns; products with its square are unique
        vectors = {name: torch.randn(shapes[name].numel(), 3).to(value[name]) for name in names}
        roots = {name: value[name].reshape(*value[name].shape[:2], -1) for name in names}
        value = {name: torch.einsum("vnp,vnk->npk", roots[name], roots[name] @ vectors[name]) for name in names}
        expected = {name: loops.products(name, vectors[name])[index] for name in names}
    else:
        ledger.notes.append(f"{extension.name}: by its laws alone; no loop is known for it")
        check_laws(ledger, problem, extension)
        return
    ledger.same(extension.name, value, expected, f"{problem.samples} samples")


def _check_draws(ledger: Ledger, problem: Problem, loops: Loops) -> None:
    """Compare the mean of outer products of drawn columns with the loss's Hessian, within standard errors."""
    loss, outputs = problem.forward()
    seed = Seed("ggn", DRAWS, torch.Generator(loss.device).manual_seed(0))
    drawn = columns_at_outputs(graph_of(loss), seed, loops, outputs, create_graph=False)
    law, largest = f"second moment of {DRAWS} draws", 0.0
    for n, hessian in enumerate(loops.hessians):
        columns = drawn[:, n] * DRAWS**0.5
        mean = columns.T @ columns / DRAWS
        squares = columns.square().T @ columns.square() / DRAWS
        deviation = ((squares - mean.square()).clamp(min=0) / DRAWS).sqrt()
        scale = hessian.abs().amax()
        error = (mean - hessian).abs()
        relative = (error.amax() / scale).item() if scale else error.amax().item()
        if bool((error > DEVIATIONS * deviation + 0.01 * scale).any()):
            raise CheckFailed(
                f"{ledger.subject}: {law} was compared.",
                f"the loss, sample {n}",
                f"it is not the loss's Hessian: the largest relative error is {relative:.3g}",
                "let draw() return gradients of the loss for targets drawn from the model, each "
                "times the square root of what its term is scaled by",
                relative,
            )
        largest = max(largest, relative)
    ledger.notes.append(f"{law}: the loss's Hessian up to {largest:.1%}")
