"""``python -m benchmarks.page``: ``docs/benchmarks.md`` and its pictures from the results."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks import attribution_page
from benchmarks.compiled_page import CONTESTANTS as CONTENDERS
from benchmarks.compiled_page import draw, rows_of
from benchmarks.contestants import CONTESTANTS
from benchmarks.data_page import draw_course, rows_of_dataset, rows_of_store
from benchmarks.measure import MIB, ROOT
from benchmarks.problems import SUITES
from benchmarks.run import RESULTS, Record, disagrees
from benchmarks.targets import SHORTFALLS, TARGETS, Missing, Records, Target
from benchmarks.training_page import CLIPPING, MONITOR, MOST, rows_of_clipping, rows_of_monitor
from benchmarks.work import KINDS

DOCS = ROOT / "docs"

WORK = (
    "*Work over plain* says what is left to gain where a target in time is missed: the multiplications of "
    "matrix products, the bytes that operators read and write, the operators and the calls of Python functions "
    "of one step, each over those of a plain step (`python -m benchmarks.work`). Large models take the time of "
    "the first two, small ones that of the last two. An empty cell was not counted yet."
)

# Okabe and Ito's colours, which colour-blind readers can tell apart, with a marker for each too.
STYLES: dict[str, tuple[str, str]] = {
    "plain": ("#7f7f7f", "|"),
    "double backward": ("#56b4e9", "X"),
    "torch.func": ("#0072b2", "s"),
    "Opacus": ("#cc79a7", "^"),
    "Opacus, ghost norms": ("#cc79a7", "v"),
    "BackPACK": ("#e69f00", "o"),
    "BackPACK, memory saving": ("#d55e00", "D"),
    "BackPACK, 4 chunks": ("#d55e00", "<"),
    "BackPACK, 16 chunks": ("#d55e00", ">"),
    "BackPACK, 64 chunks": ("#d55e00", "P"),
    "packprop": ("#009e73", "*"),
}

HEAD = """# Benchmarks

`python -m benchmarks.run` (or `.compiled`, `.planning`, `.choices`, `.eager`) measured every number on
this page and wrote it to `benchmarks/results/`. `python -m benchmarks.page` wrote the page from there.
`plain` is a forward and a backward pass without any library. [On a GPU](gpu.md) has what an H200 showed.
All contestants leave the gradient in `.grad` as well, except `torch.func`: it computes the quantity alone.

- **Time** is the median over rounds. In each round every contestant has one turn in one process, and
  its time counts as a ratio to `plain` in the same round. Freeing the results is part of it.
- **Memory** is the peak above the start of one call in a fresh process. *Resident* is the system's
  figure, the median of several processes; *allocated* is the figure of PyTorch's allocator; *results*
  are the tensors that you get in the end.
- **Agreement** comes before any timing: values are equal to a relative 1e-3, or, for Monte Carlo
  quantities, equal in expectation within five standard errors.
"""


def _load(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of the results files by suite, in the order of the suites."""
    paths = {suite: folder / f"{suite}.json" for suite in SUITES}
    return {s: json.loads(path.read_text()) for s, path in paths.items() if path.exists()}


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _ordered(records: Iterable[Record]) -> list[str]:
    present = {record["contestant"] for record in records}
    return [name for name in CONTESTANTS if name in present]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a table, the first column to the left and the others to the right.

    >>> print(markdown(["a", "b"], [["x", "1"]]))
    | a | b |
    | :-- | --: |
    | x | 1 |
    """
    lines = [heads, [":--", *["--:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def significant(value: float) -> str:
    """Write a number with three digits that count, without an exponent.

    >>> [significant(v) for v in (0.01234, 1.5, 16.04, 1706.4)]
    ['0.0123', '1.50', '16.0', '1706']
    """
    if value == 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _crossed(records: Sequence[Record], cell: Callable[[Record], str], corner: str) -> str:
    """Cross quantities with contestants."""
    names = _ordered(records)
    cells = {(r["quantity"], r["contestant"]): "gap" if r["gap"] else cell(r) for r in records}
    quantities = _unique(record["quantity"] for record in records)
    return markdown(
        [corner, *names],
        ([q, *(cells.get((q, name), "") for name in names)] for q in quantities),
    )


def _time_cell(record: Record) -> str:
    if record["contestant"] == "plain":
        return f"{significant(1000 * record['seconds']['median'])} ms"
    return significant(record["over_plain"]["median"])


def _memory_cell(record: Record) -> str:
    peaks = record["peak_bytes"]
    return f"{peaks['resident'] / MIB:.0f} / {peaks['allocated'] / MIB:.0f} / {peaks['results'] / MIB:.0f}"


def _work_cell(record: Record) -> str:
    return " / ".join(significant(record["over_plain"][kind]) for kind in KINDS)


def work_over_plain(content: dict[str, Any] | None) -> dict[str, list[Record]]:
    """Return by problem what ``python -m benchmarks.work`` has counted, each over that of plain."""
    counted: dict[str, list[Record]] = {}
    plain: dict[tuple[str, str], Record] = {}
    for record in [] if content is None else content["records"]:
        asked = record["problem"], record["quantity"]
        if record["contestant"] == "plain":
            plain[asked] = record
            continue
        over = {kind: record[kind] / plain[asked][kind] for kind in KINDS}
        counted.setdefault(record["problem"], []).append(record | {"over_plain": over, "gap": None})
    return counted


def _environment(described: Record) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in described["versions"].items() if v)
    commit = (described["commit"] or "none yet")[:10]
    changed = " with uncommitted changes" if described["uncommitted_changes"] else ""
    again = described.get("processes_again")
    processes = f"{described['processes']} processes" + (f", {again} for some peaks" if again else "")
    return (
        f"{described['date'][:10]}, commit {commit}{changed}; {described['processor']}, "
        f"{described['threads']} threads on {described['cores']} cores, load average "
        f"{described['load_average_at_start']} at the start; {described['rounds']} rounds, "
        f"{processes}; "
        f"Python {described['python']}, {versions}."
    )


def _agreement(records: Sequence[Record]) -> str:
    checked = [r for r in records if "agreement" in r or "agreement_in_expectation" in r]
    wrong = [r for r in checked if disagrees(r)]
    text = f"{len(checked)} contestants were checked against another; "
    if not wrong:
        return text + "all agree."
    named = "; ".join(f"{r['contestant']} ({r['problem']}, {r['quantity']})" for r in wrong)
    return f"{text}**these do not agree: {named}.**"


def _gaps(records: Sequence[Record]) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record["gap"]:
            where = reasons.setdefault((record["contestant"], record["gap"]), [])
            where.append(record["quantity"])
    return [
        f"- Gap: {name}, {', '.join(_unique(where))}: {reason}" for (name, reason), where in reasons.items()
    ]


# ---------------------------------------------------------------------------------- pictures


def _logarithmic(axes: Axes, which: str) -> None:
    axis = getattr(axes, f"{which}axis")
    getattr(axes, f"set_{which}scale")("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _legend(names: Sequence[str], line: Literal["-", ""]) -> list[Line2D]:
    return [Line2D([], [], color=STYLES[n][0], marker=STYLES[n][1], linestyle=line, label=n) for n in names]


def draw_suite(records: Sequence[Record], path: Path) -> None:
    """Draw time and memory of one problem, a row of marks for each quantity."""
    present = [record for record in records if record["gap"] is None]
    names = _ordered(present)
    quantities = _unique(record["quantity"] for record in present)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 1.7 + 0.55 * len(quantities)), sharey=True, layout="constrained"
    )
    for record in present:
        colour, marker = STYLES[record["contestant"]]
        # Marks of one row step downwards, so that equal figures do not hide one another.
        beside = [
            r["contestant"]
            for r in present
            if r["quantity"] == record["quantity"] and r["contestant"] != "plain"
        ]
        row: float = quantities.index(record["quantity"])
        if record["contestant"] != "plain":
            row += 0.11 * (beside.index(record["contestant"]) - (len(beside) - 1) / 2)
        ours = record["contestant"] == "packprop"
        style: dict[str, Any] = dict(
            color=colour,
            marker=marker,
            linestyle="",
            markersize=12 if ours or marker == "|" else 7.5,
            markeredgewidth=2 if marker == "|" else 0.5,
            markeredgecolor=colour if marker == "|" else "white",
            zorder=4 if ours else 3,
            clip_on=False,
        )
        left.plot(record["over_plain"]["median"], row, **style)
        right.plot(record["peak_bytes"]["resident"] / MIB, row, **style)
    left.set_yticks(range(len(quantities)), quantities)
    left.set_ylim(len(quantities) - 0.5, -0.5)
    left.set_xlabel("time over plain")
    right.set_xlabel("resident peak above the start, MiB")
    for axes in (left, right):
        _logarithmic(axes, "x")
        axes.grid(axis="both", which="major", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        handles=_legend(names, ""),
        loc="outside upper center",
        ncols=min(5, len(names)),
        frameon=False,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_growth(records: Sequence[Record], points: dict[str, int], axis: str, path: Path) -> None:
    """Draw seconds and resident memory over one axis, a column of panels for each quantity."""
    present = [record for record in records if record["gap"] is None]
    names = _ordered(present)
    quantities = _unique(record["quantity"] for record in present)
    figure, grid = plt.subplots(
        2,
        len(quantities),
        figsize=(2.6 * len(quantities) + 1, 6.2),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for column, quantity in enumerate(quantities):
        grid[0, column].set_title(quantity, fontsize=11)
        grid[1, column].set_xlabel(axis)
        for name in names:
            mine = [r for r in present if (r["quantity"], r["contestant"]) == (quantity, name)]
            at = [points[r["problem"]] for r in mine]
            colour, marker = STYLES[name]
            style: dict[str, Any] = dict(color=colour, marker=marker, markersize=5, linewidth=1.4)
            grid[0, column].plot(at, [1000 * r["seconds"]["median"] for r in mine], **style)
            memory = [r["peak_bytes"]["resident"] / MIB for r in mine]
            grid[1, column].plot(at, memory, **style)
        ticks = sorted(set(points.values()))
        for axes in grid[:, column]:
            _logarithmic(axes, "x")
            _logarithmic(axes, "y")
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.grid(color="#e4e4e4", linewidth=0.8)
            axes.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_ylabel("ms")
    grid[1, 0].set_ylabel("resident peak, MiB")
    figure.legend(handles=_legend(names, "-"), loc="outside upper center", ncols=len(names), frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ------------------------------------------------------------------------------------- page


def _exponents(records: Sequence[Record], points: dict[str, int]) -> str:
    """Say how cost grows between the two largest sizes: ``b`` in cost ~ size^b."""

    def slope(quantity: str, name: str, cost: Callable[[Record], float | None]) -> str:
        mine = sorted(
            (points[r["problem"]], cost(r) or 0.0)
            for r in records
            if (r["quantity"], r["contestant"]) == (quantity, name) and not r["gap"]
        )[-2:]
        if len(mine) < 2 or min(cost for _, cost in mine) <= 0:
            return ""
        (before, low), (after, high) = mine
        return f"{math.log(high / low) / math.log(after / before):.2f}"

    names = _ordered(records)

    def cell(quantity: str, name: str) -> str:
        time = slope(quantity, name, lambda r: float(r["seconds"]["median"]))
        memory = slope(quantity, name, lambda r: r["peak_bytes"]["resident"])
        return f"{time} / {memory}" if time or memory else ""

    quantities = _unique(record["quantity"] for record in records)
    return markdown(
        ["exponent of time / memory", *names],
        ([quantity, *(cell(quantity, name) for name in names)] for quantity in quantities),
    )


REASONS = {
    "N": "All work goes sample by sample, so time is proportional to N once the fixed cost of a pass no "
    "longer counts. `BatchGrad` keeps N gradients. The others keep a chunk of samples at a time, so their "
    "memory grows by the activations, as the memory of plain does. BackPACK holds all samples of all "
    "columns.",
    "C": "An exact GGN sweeps C - 1 columns: its time is proportional to C. packprop sweeps large ones one "
    "after the other, so its memory does not depend on C; BackPACK holds all columns at once. `BatchGrad` "
    "and `KFAC` sweep one column, whatever C.",
    "width": "Products with a weight of width x width entries make time grow towards the square of the "
    "width. The growth is slower while kernels and passes through memory still count. `BatchGrad` keeps N "
    "such weights, and so grows with the square; `KFAC` keeps factors of (9 width)^2 entries; activations "
    "are proportional to the width.",
    "depth": "Each layer adds the same: time and the memory of results and activations are proportional to "
    "depth. Temporary memory covers one layer, so the memory of `DiagGGNExact` grows only by activations "
    "and results.",
}
"""Why cost grows as it does, by axis."""


def _section(suite: str, content: dict[str, Any], images: Path, work: dict[str, list[Record]]) -> list[str]:
    records, problems = content["records"], content["problems"]
    picture = images / f"benchmark-{suite}.png"
    if suite.startswith("growth-"):
        axis = suite.removeprefix("growth-")
        points = {name: row["point"] for name, row in problems.items()}
        draw_growth(records, points, axis, picture)
        body = [
            f"## How cost grows with {axis}",
            "The model is a stem and equal 3 x 3 convolutions on 16 x 16 pixels. All sizes but "
            f"{axis} keep their defaults: N = 32, C = 10, width 32, depth 4. The exponents compare the two "
            "largest sizes.",
            REASONS[axis],
            f"![Time and memory over {axis}](images/{picture.name})",
            _exponents(records, points),
        ]
    else:
        draw_suite(records, picture)
        (described,) = problems.values()
        body = [
            f"## {described['title']}",
            *([described["note"]] if described.get("note") else []),
            f"![Time and memory of each contestant](images/{picture.name})",
            "Time over plain:",
            _crossed(records, _time_cell, "time"),
            "Peak in MiB, resident / allocated / results:",
            _crossed(records, _memory_cell, "memory"),
        ]
        if counted := work.get(suite):
            body += [
                "What a step does over plain, multiplications / bytes / operators / Python calls:",
                _crossed(counted, _work_cell, "work"),
            ]
    if gaps := _gaps(records):
        body.append("\n".join(gaps))
    return [*body, f"{_agreement(records)} {_environment(content['environment'])}"]


def targets(records: Records, work: dict[str, list[Record]]) -> str:
    """Cross the figures that were aimed at with those reached; where they are missed, say why."""
    rows, missed = [], []
    for target in TARGETS:
        try:
            reached = target.figure(records)
        except Missing as missing:
            rows.append([target.case, target.what, f"{target.bound:g}", f"none ({missing})", "", ""])
            continue
        met = reached <= target.bound
        if not met:
            missed.append(target)
        rows.append(
            [
                target.case,
                target.what,
                f"{target.bound:g}",
                significant(reached),
                "yes" if met else "**no**",
                "" if met else _work_of(target, work),
            ]
        )
    table = markdown(["case", "figure", "at most", "reached", "met", "work over plain"], rows)
    return f"{table}\n\n{_shortfalls(missed)}"


def _shortfalls(missed: Sequence[Target]) -> str:
    """List why targets are missed, each reason with its targets."""
    explained = tuple(start for shortfall in SHORTFALLS for start in shortfall.of)
    said = [
        ("nobody has looked into it yet.", [each for each in missed if not each.name.startswith(explained)]),
        *((why.text, [each for each in missed if each.name.startswith(why.of)]) for why in SHORTFALLS),
    ]
    lines = [f"- **{'; '.join(each.name for each in own)}:** {text}" for text, own in said if own]
    return "\n".join(["Why targets are missed:\n", *lines]) if lines else "All targets are met."


def _work_of(target: Target, work: dict[str, list[Record]]) -> str:
    """Return what packprop's step and its peer's do, if the target is about one quantity."""
    if target.of is None:
        return ""
    problem, quantity, peer = target.of
    return "; ".join(
        f"{record['contestant']} {_work_cell(record)}"
        for record in work.get(problem, [])
        if record["quantity"] == quantity and record["contestant"] in ("packprop", peer)
    )


GLANCED = ("BatchGrad", "BatchL2Grad", "Variance", "DiagGGNExact", "KFAC")
"""The quantities of the first tables."""


def glance(suites: dict[str, dict[str, Any]], cost: Callable[[Record], float], least: float = 0.0) -> str:
    """Cross problems with quantities: the cost over that of plain, and the best of the other libraries'.

    ``least``: the cost of plain below which a ratio says nothing, and its cell stays empty.
    """
    rows = []
    for content in suites.values():
        (first, *others) = content["problems"].values()
        if others:
            continue
        cells = [first["title"].partition(":")[0].partition(", N =")[0]]
        for quantity in GLANCED:
            costs = {
                record["contestant"]: cost(record)
                for record in content["records"]
                if record["quantity"] == quantity and not record["gap"]
            }
            plain, ours = costs.pop("plain", 0.0), costs.pop("packprop", None)
            if ours is None or not costs or plain < least:
                cells.append("")
                continue
            peer = min(costs, key=costs.__getitem__)
            own, best = significant(ours / plain), significant(costs[peer] / plain)
            cells.append(f"{f'**{own}**' if ours <= costs[peer] else own} ({best}, {peer})")
        if any(cells[1:]):
            rows.append(cells)
    return markdown(["model", *GLANCED], rows)


def _glance_section(suites: dict[str, dict[str, Any]]) -> list[str]:
    """Return the first tables, with which somebody who chooses a library begins."""
    return [
        "## At a glance",
        "Each cell is packprop's cost over that of a plain step; in brackets stands the best of the other "
        "libraries that have the quantity. packprop's figure is bold if it is the lowest. Time:",
        glance(suites, lambda record: float(record["over_plain"]["median"])),
        "Resident peak, where a plain step takes at least 4 MiB:",
        glance(suites, lambda record: float(record["peak_bytes"]["resident"]), least=4 * MIB),
    ]


def _eager_section(content: dict[str, Any]) -> list[str]:
    """What ``python -m benchmarks.eager`` found: peaks, times over plain, the cost of a tiny branch."""
    parts = ["## Penalties taken at once (`eager_backward`)"]
    for case, described in content["cases"].items():
        rows = [
            [
                record["contestant"],
                *(
                    f"{record[kind] / MIB:.0f}"
                    for kind in ("resident_bytes", "resident_bytes_without_heap", "tracked_bytes")
                ),
                *(
                    f"{row['seconds']['median']:.2f} s ({significant(row['over_reference']['median'])})"
                    for name, row in record["seconds"].items()
                    if name.endswith("wall")
                ),
            ]
            for record in content["records"]
            if record["case"] == case
        ]
        heads = ["MiB:", "resident", "without heap", "tensors", "first step (over plain)", "later steps"]
        parts += [f"{described['title']}; {described['point']}:", markdown(heads, rows)]
    tiny = [
        [f"`{name}`", *(f"{row[part]['median']:.0f}" for part in ("plain", "eager", "difference"))]
        for name, row in content["tiny_branch_microseconds"].items()
    ]
    parts += [
        "Each figure comes from a fresh process. *Without heap* maps each block of 1 MiB and more by itself, "
        "so it does not count freed tensors that the C library keeps.",
        "A branch with almost no work, in microseconds for both passes:",
        markdown(["branch", "plain", "eager", "difference"], tiny),
    ]
    return [*parts, _environment(content["environment"])]


def draw_planning(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw predicted over measured peaks, and the time that a smaller budget costs."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    names = _unique(point["extension"] for point in points)
    colours = dict(zip(names, plt.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]  # matplotlib leaves it out
    problems = _unique(point["problem"] for point in points)
    markers = dict(zip(problems, "os^Dv", strict=False))
    for point in points:
        at = point["measured_bytes"] / MIB, point["predicted_bytes"] / MIB
        style: dict[str, Any] = dict(color=colours[point["extension"]], marker=markers[point["problem"]])
        left.plot(*at, linestyle="", markersize=6, **style)
    sizes = [point["measured_bytes"] / MIB for point in points]
    left.plot([min(sizes), max(sizes)], [min(sizes), max(sizes)], color="#999999", linewidth=1, zorder=0)
    for problem in problems:
        for name in names:
            mine = [p for p in points if (p["problem"], p["extension"]) == (problem, name)]
            if len(mine) > 1:
                most = max(p["measured_bytes"] for p in mine)
                right.plot(
                    [p["measured_bytes"] / most for p in mine],
                    [p["time_over_default"] for p in mine],
                    color=colours[name],
                    marker=markers[problem],
                    markersize=5,
                    linewidth=1,
                )
    for axes, which in ((left, "x"), (left, "y")):
        _logarithmic(axes, which)
    left.set_xlabel("measured peak of tensor bytes, MiB")
    left.set_ylabel("predicted peak, MiB")
    right.set_xlabel("measured peak over that of the default chunks")
    right.set_ylabel("time over that of the default chunks")
    for axes in (left, right):
        axes.grid(color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    handles = [Line2D([], [], color=colours[name], linewidth=4, label=name) for name in names]
    handles += [
        Line2D([], [], color="#555555", marker=markers[name], linestyle="", label=name) for name in problems
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(names), frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _planning_section(content: dict[str, Any], images: Path) -> list[str]:
    """What ``python -m benchmarks.planning`` found: predicted and measured peaks, and plans as they print."""
    points = content["points"]
    draw_planning(points, images / "benchmark-planning.png")
    worst = max(abs(point["predicted_bytes"] / point["measured_bytes"] - 1) for point in points)
    over = [point for point in points if point["measured_bytes"] > point["budget_bytes"]]
    excess = max((point["measured_bytes"] / point["budget_bytes"] - 1 for point in over), default=0.0)
    parts = [
        "## Predicted and measured peaks",
        f"{len(points)} passes over five problems, six extensions and budgets down to the least that is "
        f"possible. The prediction errs by at most {worst:.1%}; {len(over)} passes went over their budget, "
        f"by {excess:.1%} at most. The right figure shows the time that a smaller peak costs.",
        "![Predicted over measured peaks, and the time of smaller ones](images/benchmark-planning.png)",
    ]
    for title, text in content["plans"].items():
        parts += [f"{title}:", f"```text\n{text}\n```"]
    return [*parts, _environment(content["environment"])]


def _choices_section(content: dict[str, Any]) -> list[str]:
    """What ``python -m benchmarks.choices`` found: the default beside the best fixed choice."""
    points = content["points"]
    rows = [
        [
            point["problem"],
            point["extension"],
            significant(point["over_plain"]["default"]["median"]),
            significant(point["over_plain"][point["best"]]["median"]),
            f"{point['default_over_best']:.2f}",
            point["best"],
            *(f"{point['peak_bytes'][title] / MIB:.1f}" for title in ("plain", "default", point["best"])),
        ]
        for point in points
    ]
    within = sum(point["default_over_best"] <= 1.1 for point in points)
    most = max(len(point["first_round_over_plain"]) for point in points) - 1
    return [
        "## The default beside every fixed choice",
        "Without a budget, packprop chooses sizes of chunks and algorithms itself. We ran the same passes with "
        f"each of up to {most} choices fixed, as many as an extension takes note of, and timed the best of "
        f"them again: the default is within a tenth of the best in {within} of {len(points)} cases. Times over "
        "plain, peaks of tensors in MiB.",
        markdown(
            [
                "problem",
                "extension",
                "default",
                "best",
                "default / best",
                "which",
                *(f"peak: {each}" for each in ("plain", "default", "best")),
            ],
            rows,
        ),
        _environment(content["environment"]),
    ]


def _compiled_section(content: dict[str, Any], images: Path) -> list[str]:
    """What ``python -m benchmarks.compiled`` found: steps replayed and compiled beside ordinary ones."""
    records = content["records"]
    draw(records, images / "benchmark-compiled.png")
    heads = ["time over plain", "plain", *(label for label, *_ in CONTENDERS.values())]
    return [
        "## Compiled steps (`packprop.compile`)",
        "These steps run a pass as a graph: packprop replays it operation by operation, or Inductor compiles "
        "it. Beside them are ordinary passes, plain passes through `torch.compile`, and BackPACK if it has "
        "the quantity. Tracing and compiling happen once; "
        + (
            "no cache of an earlier run was used."
            if content["fresh_caches"]
            else "caches of earlier runs may help."
        ),
        "![Time over plain of each kind of step](images/benchmark-compiled.png)",
        markdown([*heads, "operations", "to trace", "to compile"], rows_of(records)),
        _environment(content["environment"]),
    ]


def _data_section(results: Path, images: Path) -> list[str]:
    """What ``python -m benchmarks.dataset`` and ``python -m benchmarks.store`` found."""
    kinds = {"dataset": rows_of_dataset, "store": rows_of_store}
    there = {name: results / f"{name}.json" for name in kinds if (results / f"{name}.json").exists()}
    if not there:
        return []
    contents = {name: json.loads(path.read_text()) for name, path in there.items()}
    rows = [row for name, content in contents.items() for row in kinds[name](content)]
    curves = []
    if (results / "course.json").exists():
        course = json.loads((results / "course.json").read_text())
        draw_course(course, images / "benchmark-course.png")
        curves = [
            "Throughput and memory on the way, a point for every "
            f"{course['samples_of_a_point']:,} samples of a process:",
            "![Throughput and peak memory from the first batch to the last](images/benchmark-course.png)",
            _environment(course["environment"]),
        ]
    return [
        "## Whole data sets and stores (`packprop.compute`, `packprop.Store`)",
        markdown(["what", "measured", "aimed at"], rows),
        *dict.fromkeys(_environment(content["environment"]) for content in contents.values()),
        *curves,
    ]


def _clipping_section(content: dict[str, Any]) -> list[str]:
    """What ``python -m benchmarks.clipping`` found."""
    apart = {
        name: max(record["off_by"].get(name, 0.0) for record in content["records"])
        for name in content["records"][0]["off_by"]
        if name != "packprop"
    }
    said = ", ".join(f"{off:.0e} ({name})" for name, off in apart.items())
    return [
        "## Clipped gradients (`packprop.clipped_gradients`)",
        "Forward pass, backward pass and clipping of one step by the norm of all parameters. What the others "
        f"leave in `.grad` differs by at most so much of its largest entry: {said}. Peaks count the "
        "allocations of one step, in a fresh process.",
        markdown(CLIPPING, rows_of_clipping(content)),
        _environment(content["environment"]),
    ]


def _monitor_section(content: dict[str, Any]) -> list[str]:
    """What ``python -m benchmarks.monitor`` found."""
    return [
        "## Monitored steps (`packprop.Monitor`)",
        "A training step beside monitored ones, with the default quantities. A loop that monitors every "
        f"100th step should take at most {MOST} of a plain one.",
        markdown(MONITOR, rows_of_monitor(content)),
        _environment(content["environment"]),
    ]


def _attribution_section(content: dict[str, Any]) -> list[str]:
    """Return the tables of ``benchmarks.attribution``."""
    parts = ["## Influence and retraining (`packprop.influence`)", attribution_page.INTRODUCTION]
    for problem, records in content["problems"].items():
        for record in records:
            facts = f"{record['parameters']:,} parameters, {record['halves']} halves, seed {record['seed']}"
            table = markdown(attribution_page.HEADS, attribution_page.rows_of_attribution(record))
            parts += [f"### {problem.capitalize()}: {facts}", table, attribution_page.remarks_of(record)]
    return [*filter(None, parts), _environment(content["environment"])]


def _costs_section(content: dict[str, Any]) -> list[str]:
    """Return the table of ``benchmarks.attribution.costs``."""
    sizes = f"{content['sequences']:,} sequences of {content['length']} tokens, {content['asked']} queries"
    return [
        f"### Cost on a decoder of ten million parameters: {sizes}",
        attribution_page.COSTS,
        markdown(attribution_page.COST_HEADS, attribution_page.rows_of_costs(content)),
        *attribution_page.notes_of_costs(content),
        _environment(content["environment"]),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page and its pictures from whatever results there are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of JSON files")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the page")
    options = parser.parse_args(arguments)
    images = options.docs / "images"
    images.mkdir(parents=True, exist_ok=True)

    suites = _load(options.results)
    counted = options.results / "work.json"
    work = work_over_plain(json.loads(counted.read_text()) if counted.exists() else None)
    parts = [HEAD.strip()]
    if suites:
        everything = Records(r for content in suites.values() for r in content["records"])
        parts += [*_glance_section(suites), "## Targets", WORK, targets(everything, work)]
    for suite, content in suites.items():
        parts += _section(suite, content, images, work)
    compiled = options.results / "compiled.json"
    if compiled.exists():
        parts += _compiled_section(json.loads(compiled.read_text()), images)
    parts += _data_section(options.results, images)
    for name, section in {
        "clipping": _clipping_section,
        "monitor": _monitor_section,
        "attribution": _attribution_section,
        "attribution-costs": _costs_section,
    }.items():
        if (options.results / f"{name}.json").exists():
            parts += section(json.loads((options.results / f"{name}.json").read_text()))
    planning = options.results / "planning.json"
    if planning.exists():
        parts += _planning_section(json.loads(planning.read_text()), images)
    choices = options.results / "choices.json"
    if choices.exists():
        parts += _choices_section(json.loads(choices.read_text()))
    eager = options.results / "eager.json"
    if eager.exists():
        parts += _eager_section(json.loads(eager.read_text()))
    (options.docs / "benchmarks.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
