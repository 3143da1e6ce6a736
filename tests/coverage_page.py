"""Writes docs/coverage.md: every extension crossed with every use and every loss, and the test of each cell.

``python -m tests.coverage_page`` prints the page. Nothing of it is written by hand but its words: a forward pass
of each case says which functions use its parameters and which loss it has; tests that compare an extension with
a reference on a case are marked ``covers``, and are collected; pairs that no such test covers are run, and must
be refused. A pair that is neither is a gap, and there is no page.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from packprop import PackpropError, extensions
from packprop.graph import Found, Graph, Site, walk
from packprop.losses import LOSSES
from packprop.types import Extension
from packprop.uses import RULES, name_of
from tests.cases import BY_NAME, CASES, Case
from tests.oracle import Problem
from tests.running import backward, forward

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "coverage.md"
COMMAND = "make coverage-table"


# The columns: what can be asked for


CATALOGUE = {
    name: kind
    for name in extensions.__all__
    if isinstance(kind := getattr(extensions, name), type)
    and issubclass(kind, Extension)
    and kind is not Extension
}


def seeds_of(name: str) -> set[str]:
    """Kinds of what is swept for an extension."""
    return {row.seed.kind for row in CATALOGUE[name]().rows}


def is_drawn(name: str) -> bool:
    """Whether values are estimates from random draws."""
    return any(row.seed.mc_samples is not None for row in CATALOGUE[name]().rows)


# A table for each; an extension belongs to the first that fits.
GROUPS: dict[str, Callable[[str], bool]] = {
    "Gradients of samples, Jacobians": lambda name: seeds_of(name) <= {"gradient", "jacobian"},
    "Kronecker factors": lambda name: "none" in seeds_of(name) or hasattr(CATALOGUE[name], "approximation"),
    "Diagonals and roots of the GGN": lambda name: seeds_of(name) == {"ggn"},
    "Hessian diagonals, products": lambda name: True,
}


def grouped() -> dict[str, list[str]]:
    """The extensions of each table."""
    found: dict[str, list[str]] = {title: [] for title in GROUPS}
    for name in CATALOGUE:
        found[next(title for title, fits in GROUPS.items() if fits(name))].append(name)
    return found


# The rows: how cases use their parameters, and what they make of their outputs


def plain(name: str) -> str:
    """The name of a function without spellings of the same one."""
    name = name.removesuffix("_")
    return {"multiply": "mul", "subtract": "sub", "concat": "cat", "concatenate": "cat"}.get(name, name)


# Every function that has a rule, by name; operators are seen under the name of their function.
KNOWN = dict.fromkeys(plain(name_of(function)) for function in RULES if not name_of(function).endswith("__"))


@dataclass
class Line:
    """A row of the tables.

    Attributes:
        title: What the parameters, or the outputs, go into.
        detail: Structures and layers that were seen in it.
        cases: Cases that have it, in the order of the list.
    """

    title: str
    detail: dict[str, None] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)

    def add(self, case: Case, detail: Iterable[str]) -> None:
        """A case that has it."""
        self.detail.update(dict.fromkeys(detail))
        if case not in self.cases:
            self.cases.append(case)


FALLBACK = "any other function of torch"
DERIVED = "what is computed from parameters first"
SHARED = "one parameter used more than once"
REGION = "a layer inside a checkpoint"
TWO, OWN, NONE = (
    "several losses in one pass",
    "a loss module of one's own",
    "no loss function that was recorded",
)


def captured(case: Case) -> tuple[Problem, Graph]:
    """The graph of a case, from its loss down."""
    problem = case.problem(max(case.sizes), case.reductions[0])
    return problem, walk([forward(problem, case.record)], [None], None)


def rows_of_uses(found: Found, site: Site, owners: dict[int, str], times: int) -> Iterator[tuple[str, str]]:
    """The rows that one use of one parameter belongs to, and what is said there."""
    name = plain(found.use.name)
    layer = owners.get(id(site.leaf), "")
    structure = site.entry.structure
    if name in KNOWN or layer:
        yield f"`{name}`", f"{layer}: {structure}" if layer and site.direct else structure
    else:
        yield FALLBACK, f"`{name}`"
    if not site.direct:
        yield DERIVED, f"`{name}`"
    if times > 1:
        yield SHARED, ""
    if found.use.source is not None or found.host is not None:
        yield REGION, "reentrant" if found.host is not None else "not reentrant"


def read_cases() -> tuple[dict[str, Line], dict[str, Line]]:
    """Rows of uses and of losses, with their cases."""
    uses: dict[str, Line] = {}
    losses: dict[str, Line] = {}
    for function in LOSSES:
        losses.setdefault(f"`{name_of(function)}`", Line(f"`{name_of(function)}`"))
    for case in CASES:
        if case.refuses:
            continue
        problem, graph = captured(case)
        owners = {
            id(parameter): type(module).__name__
            for module in problem.model.modules()
            if type(module).__module__.startswith("torch.nn.modules")
            for parameter in module.parameters(recurse=False)
        }
        sites = [(found, site) for found in graph.found for site in found.sites]
        leaves = [id(site.leaf) for _, site in sites]
        for found, site in sites:
            for title, detail in rows_of_uses(found, site, owners, leaves.count(id(site.leaf))):
                uses.setdefault(title, Line(title)).add(case, filter(None, [detail]))
        functions = [loss.call.function for loss in graph.losses]
        titles = {f"`{name_of(function)}`" if function in LOSSES else OWN for function in functions}
        titles |= {TWO} if len(functions) > 1 else set() if functions else {NONE}
        for title in titles:
            losses.setdefault(title, Line(title)).add(case, ())
    for name in KNOWN:
        uses.setdefault(f"`{name}`", Line(f"`{name}`"))
    last = [FALLBACK, DERIVED, SHARED, REGION]
    ordered = sorted(uses.values(), key=lambda line: last.index(line.title) if line.title in last else -1)
    return {line.title: line for line in ordered}, losses


# The cells: tests that are marked, or a refusal


Covered = dict[tuple[str, str], str]
"""Extension and case -> node id of the test."""


class Collector:
    """What pytest finds of tests that are marked ``covers``."""

    def __init__(self) -> None:
        self.covered: Covered = {}

    def pytest_collection_modifyitems(self, items: Sequence[Any]) -> None:
        for item in items:
            for mark in item.iter_markers("covers"):
                values = item.callspec.params
                case = values.get("case") or BY_NAME[values["name"]]
                asked = mark.args or [row.name for row in mark.kwargs["by"](case)]
                if values.get("size", max(case.sizes)) != max(case.sizes):
                    continue
                for name in asked:
                    self.covered.setdefault((name, case.name), item.nodeid)


def collected() -> Covered:
    """Every pair of extension and case that a marked test compares with a reference, and that test."""
    collector = Collector()
    files = [
        path for path in sorted((ROOT / "tests").glob("test_*.py")) if ".covers(" in path.read_text("utf-8")
    ]
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *map(str, files)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = pytest.main(options, plugins=[collector])
    if status != pytest.ExitCode.OK:
        raise SystemExit(printed.getvalue().partition("= ERRORS =")[2])
    return collector.covered


@dataclass(frozen=True)
class Cell:
    """One extension on one row.

    Attributes:
        symbol: Exact, drawn or refused.
        case: The case that shows it.
        test: Node id of its test; empty if it is refused.
        why: The reason of a refusal.
    """

    symbol: str
    case: str
    test: str = ""
    why: str = ""


EXACT, DRAWN, REFUSED = "✓", "≈", "–"


def cell(line: Line, name: str, covered: Covered) -> Cell | None:
    """What is known of an extension on a row; nothing if it is a gap."""
    for case in line.cases:
        if (name, case.name) in covered:
            return Cell(DRAWN if is_drawn(name) else EXACT, case.name, covered[name, case.name])
    for case in line.cases[:1]:
        problem, asked = case.problem(max(case.sizes), case.reductions[0]), CATALOGUE[name]()
        try:
            backward(problem, asked, record=case.record)
            for parameter in problem.parameters.values():
                value = getattr(parameter, asked.savefield)
                if callable(value) and not isinstance(value, torch.Tensor):
                    value(torch.zeros_like(parameter))
        except PackpropError as refusal:
            return Cell(REFUSED, case.name, why=refusal.why)
    return None


def cells(lines: Iterable[Line], covered: Covered) -> dict[tuple[str, str], Cell]:
    """Every cell of some rows.

    Raises:
        SystemExit: If there are gaps; it names them.
    """
    found, gaps = {}, []
    for line in lines:
        for name in CATALOGUE:
            known = cell(line, name, covered)
            if known is None:
                gaps.append(f"{name} on {line.title}: {line.cases[0].name if line.cases else 'no case'}")
            else:
                found[line.title, name] = known
    if gaps:
        raise SystemExit(
            "These pairs are neither refused nor compared with a reference: add a case to tests/cases.py, or "
            "its name to a test that is marked `covers`.\n  " + "\n  ".join(gaps)
        )
    return found
