"""Writes docs/coverage.md: every extension crossed with every use and every loss, and the test of each cell.

``python -m tests.house.coverage_page`` prints the page. Only its words are written by hand: a forward pass of
each case says which functions use its parameters and which loss it has; tests that compare an extension with a
reference, case by case, are marked ``covers``, and are collected; pairs that no such test covers are run, and
must be refused. A pair that is neither is a gap: then an error names it, and no page is printed.
"""

from __future__ import annotations

import contextlib
import io
import re
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from packprop import PackpropError, extensions
from packprop.engine.functions.losses.description import LOSSES, PROVEN
from packprop.engine.functions.nodes import is_wrong_in_second_order, short_name
from packprop.engine.functions.registry import RULES, Rule, rule_for
from packprop.engine.functions.saved import keeps_elsewhere
from packprop.engine.functions.verdicts import Verdicts
from packprop.engine.graph.graph import Graph, ReachedUse
from packprop.engine.graph.search import nodes_above
from packprop.engine.graph.site import Site
from packprop.engine.graph.walk import walk
from packprop.types import Extension
from tests.cases import BY_NAME, CASES, Case
from tests.references.oracle import Problem
from tests.references.running import backward, forward

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "coverage.md"
COMMAND = "make coverage-table"


# The columns: what can be asked for


ORDER = ("first_order", "jacobian", "diagonal", "square_root", "kronecker", "hessian", "products")
"""Files of the catalogue, as their columns come; others come last."""


def place_of(name: str) -> tuple[int, bool]:
    """Where an extension's column is."""
    file = CATALOGUE[name].__module__.rpartition(".")[2]
    return ORDER.index(file) if file in ORDER else len(ORDER), is_drawn(name)


def is_drawn(name: str) -> bool:
    """Whether values are estimates from random draws."""
    return any(row.seed.mc_samples is not None for row in CATALOGUE[name]().rows)


CATALOGUE = {
    name: kind
    for name in extensions.__all__
    if isinstance(kind := getattr(extensions, name), type)
    and issubclass(kind, Extension)
    and kind is not Extension
}
CATALOGUE = {name: CATALOGUE[name] for name in sorted(CATALOGUE, key=place_of)}


# The rows: how cases use their parameters, and what they make of their outputs


def plain(name: str) -> str:
    """The name of a function, from that of its node if this is all that is known."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", short_name(name)).lower()


def title_of(rule: Rule | None, name: str) -> str:
    """The row of a node by its rule."""
    if rule is None:
        return FALLBACK
    return ENTRIES if rule.entry_of.__name__ == "_entry_by_entry" else f"`{plain(name)}`"


ELSEWHERE = {
    "GroupedMm": "groups of rows, which have no double precision on a processor",
    "FusedRmsNorm": "a kernel of accelerators",
    "MkldnnRnnLayer": "LSTMs in single precision",
    "GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked_defaultBackward": "refused by its rule",
}
"""Nodes with a rule that no case has, and why."""


@dataclass
class Line:
    """A row of the tables.

    Attributes:
        title: What the parameters, or the outputs, go into.
        cases: Cases that have it: those that most extensions are tested on first.
        structures: How parameters enter it.
        layers: Layers of torch that call it.
    """

    title: str
    cases: list[Case] = field(default_factory=list)
    structures: dict[str, None] = field(default_factory=dict)
    layers: dict[str, None] = field(default_factory=dict)


FALLBACK = "a function without a rule"
ENTRIES = "another function, entry by entry"
DERIVED = "a tensor computed from parameters first"
NORMALISED = "a weight that `weight_norm` makes"
SHARED = "one parameter used more than once"
REGION = "a layer inside a checkpoint"
TWO, OWN, NONE = (
    "several losses in one pass",
    "a loss module of one's own",
    "no loss function that was recorded",
)


def captured(case: Case) -> tuple[Problem, Graph]:
    """The graph of a case, from its loss down, with marks of the loss functions that were called.

    Nodes alone do not tell cross entropy from ``nll_loss``; losses with rules of a user keep their marks.
    """
    problem = case.problem(max(case.sizes), case.reductions[0])
    with mock.patch.dict(PROVEN, dict.fromkeys(LOSSES, Verdicts())):
        return problem, walk([forward(problem, case.record)], [None], None)


def rows_of(found: ReachedUse, site: Site, layer: str, times: int) -> Iterator[str]:
    """The rows that one use of one parameter belongs to."""
    name = found.name
    yield title_of(rule_for(found.anchors[0]), name)
    if not site.direct:
        yield DERIVED
        if any(map(is_wrong_in_second_order, nodes_above([site.entry.parameter.grad_fn]))):
            yield NORMALISED
    if times > 1:
        yield SHARED
    if any(map(keeps_elsewhere, found.anchors)):
        yield REGION


def read_cases(covered: Covered) -> tuple[dict[str, Line], dict[str, Line]]:
    """Rows of uses and of losses, with their cases."""
    uses = {title: Line(title) for title in (ENTRIES, FALLBACK, DERIVED, NORMALISED, SHARED, REGION)}
    asked: set[Any] = set()
    losses = {
        title: Line(title) for title in (*(f"`{function.__name__}`" for function in LOSSES), OWN, TWO, NONE)
    }
    for case in sorted(CASES, key=lambda case: -sum((name, case.name) in covered for name in CATALOGUE)):
        if case.refuses:
            continue
        problem, graph = captured(case)
        owners = {
            id(parameter): type(module).__name__
            for module in problem.model.modules()
            if type(module).__module__.startswith("torch.nn.modules")
            for parameter in module.parameters(recurse=False)
        }
        sites = [(found, site) for found in graph.uses for site in found.sites]
        leaves = [id(site.leaf) for _, site in sites]
        rows: dict[int, Line] = {}
        asked |= {rule_for(node) for found, _ in sites for node in found.anchors}
        for found, site in sites:
            layer = owners.get(id(site.leaf), "") if site.direct else ""
            for title in rows_of(found, site, layer, leaves.count(id(site.leaf))):
                line = uses.setdefault(title, Line(title))
                line.structures[site.entry.structure] = None
                if layer and title.startswith("`"):
                    line.layers[layer] = None
                rows[id(line)] = line
        functions = [loss.call.function for loss in graph.losses]
        kinds = {f"`{function.__name__}`" if function in LOSSES else OWN for function in functions}
        kinds |= {TWO} if len(functions) > 1 else set() if functions else {NONE}
        for line in (*rows.values(), *(losses[kind] for kind in kinds)):
            line.cases.append(case)
    for name, rule in RULES.items():  # rules that serve several nodes need a case for one of them
        if name not in ELSEWHERE and rule not in asked:
            title = title_of(rule, name)
            uses[title] = Line(title)
    last = [ENTRIES, FALLBACK, DERIVED, NORMALISED, SHARED, REGION]
    ordered = sorted(uses, key=lambda title: last.index(title) if title in last else -1)
    return {title: uses[title] for title in ordered}, losses


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
        path for path in sorted((ROOT / "tests").rglob("test_*.py")) if ".covers(" in path.read_text("utf-8")
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


EXACT, DRAWN, REFUSED = "✓", "≈", "✗"


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
            return Cell(REFUSED, case.name, why=" ".join(refusal.why.split()))
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
            "These pairs are neither refused nor compared with a reference: add a case to tests/cases, or "
            "mark the test that compares them with `covers`.\n  " + "\n  ".join(gaps)
        )
    return found


# The page


HEAD = f"""# Coverage

Every extension on every function that takes parameters, and under every loss, with the test that compares it
with a reference. `{COMMAND}` writes this page from the code, and fails if a pair is neither refused nor tested;
a test fails if the page is not what the code says.

- {EXACT} exact: compared with its definition, by loops over single samples in double precision.
- {DRAWN} from random draws: each draw is compared with its definition, the mean over many with its limit.
- {REFUSED} refused, with an error that says why: the number below the table.

**Which test?** The test of the extension under [Tests](#tests), with the row's case in the place of `CASE`. A
letter behind a mark stands for another case. Cases are in [tests/cases](../tests/cases); `+ 36` says how many
more contain the row. Every check of this page runs the refusals.

**What does a row mean?** It describes one use of a parameter, or one loss, whatever else the model does. For
`KFRA`, `HBP`, `PCHMP` and second derivatives, the functions between parameter and loss also matter: an error
names the one in the way. Tests that differentiate attention twice run the forward pass with PyTorch's math
kernel, as the error for its fused kernels advises. `packprop.coverage(model, batch)` lists, for each parameter
of your model, the functions that use it and the route of its Hessian diagonal.
"""


def pattern(test: str, case: str) -> str:
    """A node id with CASE in place of the case."""
    return re.sub(rf"(?<=[\[-]){re.escape(case)}(?=[\]-])", "CASE", test)


class Notes:
    """Footnotes of one table, marked as they come."""

    def __init__(self, marks: Callable[[int], str]) -> None:
        self.uses: dict[str, str] = {}
        self._marks = marks

    def mark(self, text: str) -> str:
        """The mark of a footnote."""
        return self.uses.setdefault(text, self._marks(len(self.uses)))


def columns(lines: Iterable[Line], known: dict[tuple[str, str], Cell]) -> list[list[str]]:
    """Extensions side by side; those whose cells are all the same share a column."""
    merged: dict[tuple[Cell, ...], list[str]] = {}
    for name in CATALOGUE:
        merged.setdefault(tuple(known[line.title, name] for line in lines), []).append(name)
    return list(merged.values())


def table(lines: Sequence[Line], known: dict[tuple[str, str], Cell], head: str) -> Iterator[str]:
    """A table and its footnotes."""
    cases, reasons = Notes(lambda place: string.ascii_lowercase[place]), Notes(lambda place: str(place + 1))
    groups = columns(lines, known)
    uses = any(line.structures for line in lines)
    titles = [head, *["structure"] * uses, "case", *("<br>".join(f"`{n}`" for n in names) for names in groups)]
    yield f"| {' | '.join(titles)} |"
    yield "|---|---|" + "---|" * uses + ":-:|" * len(groups)
    for line in lines:
        main = line.cases[0].name
        shown = []
        for names in groups:
            found = known[line.title, names[0]]
            if not found.test:
                shown.append(f"{found.symbol}<sup>{reasons.mark(found.why)}</sup>")
            elif found.case != main:
                shown.append(f"{found.symbol}<sup>{cases.mark(found.case)}</sup>")
            else:
                shown.append(found.symbol)
        layers = ", ".join(f"`{name}`" for name in line.layers if not name.startswith("NonDynamically"))
        more = f" + {len(line.cases) - 1}" if len(line.cases) > 1 else ""
        first = [line.title + (f" ({layers})" if layers else ""), *[", ".join(line.structures)] * uses]
        yield f"| {' | '.join([*first, f'`{main}`{more}', *shown])} |"
    yield ""
    if cases.uses:
        other = "; ".join(f"{mark}: `{case}`" for case, mark in cases.uses.items())
        yield from (f"Other cases: {other}.", "")
    yield from ("Why it is refused:", "", *(f"{mark}. {why}" for why, mark in reasons.uses.items()), "")


def tests(known: dict[tuple[str, str], Cell]) -> Iterator[str]:
    """The tests of each extension."""
    found: dict[str, dict[str, None]] = {name: {} for name in CATALOGUE}
    for (_, name), each in known.items():
        if each.test:
            found[name][pattern(each.test, each.case)] = None
    merged: dict[tuple[str, ...], list[str]] = {}
    for name, patterns in found.items():
        merged.setdefault(tuple(sorted(patterns)), []).append(name)
    yield "| extensions | tests |"
    yield "|---|---|"
    for patterns, names in merged.items():
        yield f"| {', '.join(f'`{n}`' for n in names)} | {'<br>'.join(f'`{p}`' for p in patterns)} |"


def page() -> str:
    """The whole page.

    Raises:
        SystemExit: If there are gaps.
    """
    covered = collected()
    uses, losses = read_cases(covered)
    known = cells([*uses.values(), *losses.values()], covered)
    text = [
        *(HEAD, "## Functions that take parameters", "", *table([*uses.values()], known, "function")),
        *("## Losses", "", *table([*losses.values()], known, "loss")),
        *("## Tests", "", *tests(known), ""),
    ]
    return "\n".join(text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(page())
