"""``check_use``: compare how parameters enter a function with loops over samples, and with the fallback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop import extensions as catalogue
from packprop.engine.functions import rule_for, trusting_rules
from packprop.engine.graph import Graph
from packprop.engine.recording import disable
from packprop.errors import PackpropError
from packprop.testing.example import Example, Make, make_example, name_of
from packprop.testing.host import Host
from packprop.testing.loops import gradients_in
from packprop.testing.models import compare, require_samples
from packprop.testing.passes import graph_of, saved
from packprop.testing.problem import Problem, double_precision
from packprop.testing.reference import check_reference
from packprop.testing.report import TOLERANCE, CheckFailed, Comparison, Ledger, Report
from packprop.testing.structures import check_structures


def check_use(
    function: Callable[..., Any],
    make: Make,
    *,
    allow_fallback: bool = False,
    tolerance: float = TOLERANCE,
) -> Report:
    """Compare the rules of a function's parameters with autograd on single samples, and with the fallback.

    The check runs the rules of all nodes that the function leaves on the graph for one column and two, for all
    samples and for some, for 1, 3 and 6 samples, with positions folded into the samples' axis, and for inputs
    alone. It then runs small models that call the function once or twice, these also under
    ``create_graph=True``.

    Args:
        function: ``MyFunction.apply``, or any function that calls it or torch functions.
        make: Maps a number of samples n to the arguments of one call: a tuple, or a dictionary of
            keyword arguments. Parameters are ``nn.Parameter``; tensors that hold samples have extent
            n along one axis.
        allow_fallback: Accept parameters that no rule describes. The fallback takes them: it calls the
            function's backward for each sample.
        tolerance: Largest relative error allowed.

    Returns:
        The report of all comparisons, with the structure of each parameter. You can print it.

    Raises:
        CheckFailed: An ``AssertionError`` that names parameter, samples and largest relative error, or a
            parameter without a rule.
        BadInput: If ``make`` returns anything else.
    """
    ledger = Ledger(f"check_use({name_of(function)})", tolerance)
    with double_precision(), trusting_rules():
        for samples in (1, 3, 6):
            problem = _problem([make_example(ledger, function, make, samples)])
            loss, outputs = problem.forward()
            graph = graph_of(loss)
            require_samples(ledger, problem, graph)
            _require_rules(ledger, problem, graph, allow_fallback)
            check_structures(ledger, problem, graph, outputs)
        for samples, calls in ((1, 1), (3, 1), (3, 2)):
            first = make_example(ledger, function, make, samples)
            examples = [first, make_example(ledger, function, make, samples, like=first)]
            _check_in_a_model(ledger, examples[:calls])
    return ledger.report()


def _require_rules(ledger: Ledger, problem: Problem, graph: Graph, allow_fallback: bool) -> None:
    """Note the structure of each parameter; refuse one without a rule unless the fallback is allowed."""
    for label, leaf in problem.parameters.items():
        uses = [(use, site.entry) for use in graph.uses for site in use.sites if site.leaf is leaf]
        structures = dict.fromkeys(entry.structure for _, entry in uses)
        ledger.structures[label] = ", ".join(structures)
        for use, entry in uses:
            if entry.by_rule:
                continue
            ledger.structures[label] = "Dense, by the fallback"
            if allow_fallback:
                continue
            node = use.anchors[0]
            is_registered = rule_for(node) is not None
            raise CheckFailed(
                f"{ledger.subject}: the registered rule was looked for.",
                f"parameter {label!r} in {use.name}",
                "its rule does not describe this parameter: it returned None"
                if is_registered
                else "no rule is registered for it: the fallback is used",
                "return an entry for it, or pass allow_fallback=True"
                if is_registered
                else f"decorate a rule with @packprop.register_use({_class_name(node.name())}), or pass "
                "allow_fallback=True",
            )


def _class_name(node: str) -> str:
    """Return the argument that registers a rule for a node: the class, for a user's function."""
    is_own = node.endswith("Backward") and not node.startswith("GeneratedBackwardFor")
    return node.removesuffix("Backward") if is_own else repr(node)


def _problem(examples: Sequence[Example]) -> Problem:
    host = Host(examples)
    targets = tuple(torch.randn_like(output.detach()) for output in host(*host.data))
    return Problem(host, _squared_error, host.data, targets, examples[0].samples, axis=0)


def _check_in_a_model(ledger: Ledger, examples: Sequence[Example]) -> None:
    problem = _problem(examples)
    law = f"in a model that calls it {'once' if len(examples) == 1 else 'twice'}"
    inside = Ledger(f"{ledger.subject}, {law}", ledger.tolerance)
    gradients = catalogue.BatchGrad()
    compare(inside, problem, [gradients, catalogue.SqrtGGNExact()])
    check_reference(inside, problem, gradients, lambda rows: rows[0])
    _check_hessian(inside, problem)
    ledger.comparisons += [Comparison(law, f"{c.law}, {c.where}", c.error) for c in inside.comparisons]
    ledger.notes += inside.notes


def _check_hessian(ledger: Ledger, problem: Problem) -> None:
    """Compare the Hessian's diagonal with double backward: packprop believes the ``linear=True`` of a rule."""
    try:
        value = saved(problem, catalogue.DiagHessian())
        with disable():
            leaves = [*problem.parameters.values()]
            slopes = gradients_in(leaves, [problem.outputs_and_loss()[1]], create_graph=True)
            diagonals = [_diagonal(slope, leaf) for slope, leaf in zip(slopes, leaves, strict=True)]
    except (PackpropError, NotImplementedError) as refusal:
        ledger.notes.append(f"no Hessian: {getattr(refusal, 'why', refusal)}")
        return
    expected = dict(zip(problem.parameters, diagonals, strict=True))
    ledger.same("double backward", value, {name: expected[name] for name in value})


def _diagonal(slope: Tensor, leaf: Tensor) -> Tensor:
    """Return the derivative of each entry of a gradient in the same entry of its parameter."""
    if not slope.requires_grad:
        return torch.zeros_like(leaf)
    rows = [gradients_in([leaf], [entry])[0].flatten() for entry in slope.flatten()]
    return torch.stack(rows).diagonal().view_as(leaf)


def _squared_error(outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    losses = [F.mse_loss(y, t) for y, t in zip(outputs, targets, strict=True)]
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]
