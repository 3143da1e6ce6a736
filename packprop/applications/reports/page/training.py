"""The page of a training run: the lines of a monitor, over steps."""

from __future__ import annotations

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packprop.applications.reports.page.findings import Finding
from packprop.applications.reports.page.libraries import require_libraries
from packprop.applications.reports.page.templating import template
from packprop.applications.reports.profile.table import counted, number_text
from packprop.applications.reports.profile.uncertainty import interval_text, range_text, rounded_text
from packprop.errors import BadInput, PackpropWarning

ASKED = "The page of a training run was asked for."
INSTEAD = "give a file that packprop.Monitor(model, log='run.jsonl') has written"

SCALE = "critical_batch_size"
"""The noise scale over some steps, in the lines of a monitor."""

QUANTITIES = {
    SCALE: (
        "Noise scale",
        "samples",
        "The batch size at which noise is as large as signal, over the last monitored steps. The band is its "
        "confidence interval; it reaches the top of the figure if its upper end is higher, or infinite. The "
        "line has a gap where the samples cannot tell the signal from zero.",
    ),
    "signal_to_noise": (
        "Signal to noise",
        "",
        "Squared gradient norm over the trace of the samples' covariance.",
    ),
    "gradient_norm": ("Gradient norm", "", "Of the step's gradient, in all parameters together."),
    "sample_norm_median": ("Norms of samples", "", "The median of the norms of single samples' gradients."),
    "update_ratio": ("Update ratio", "", "Norm of the optimizer's update over that of the parameters."),
    "ggn_trace": ("Trace of the GGN", "", "Curvature of the step's loss, in all parameters together."),
    "sharpness": ("Sharpness", "", "Curvature of the loss along its gradient."),
}
"""The drawn quantities by key: title, unit, and an explanation for readers."""

SHOWN = 20
"""The number of outlying samples in the list."""

SPIKE = 5
"""The page reports a gradient of more than this times the median."""

Line = Mapping[str, Any]
Outlying = tuple[str, int, int, float]
"""A sample's name, the number of steps in which it stood out, the last of these steps, its largest norm."""


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Return the last line of each step in a monitor's file, in the order of steps.

    Lines that a kill or a full disk has cut off are left out, with a warning.

    Raises:
        BadInput: If there is no such file, it has no lines, or a monitor did not write one of them.
    """
    where, lines, cut = f"the file {str(path)!r}", [], 0
    try:
        for line in filter(str.strip, Path(path).read_text(encoding="utf-8").splitlines()):
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                if not '{"step": '.startswith(line[:9]):
                    raise
                cut += 1
        by_step = {int(line["step"]): line for line in lines}
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"it cannot be read as lines of a monitor ({type(error).__name__}: {error})"
        raise BadInput(ASKED, where, why, INSTEAD) from error
    if not by_step:
        raise BadInput(ASKED, where, "it has no lines", INSTEAD)
    if cut:
        said = f"The page leaves out {counted(cut, 'line')} of {str(path)!r}, cut off by a kill or a full disk."
        warnings.warn(said, PackpropWarning, stacklevel=2)
    return [by_step[step] for step in sorted(by_step)]


def training_page(lines: Sequence[Line], name: str) -> str:
    """Return the page, as text.

    Raises:
        PackpropError: If the libraries that draw it are not installed.
    """
    require_libraries()
    from packprop.applications.reports.page.steps import over_steps

    drawn = [over_steps(lines, key, *said) for key, said in QUANTITIES.items()]
    figures = [figure for figure in drawn if figure is not None]
    outlying = outlying_samples(lines)
    return template("training.html").render(
        title=name,
        facts=f"{counted(len(lines), 'monitored step')}, from {lines[0]['step']:,} to {lines[-1]['step']:,}",
        findings=findings_of(lines, outlying),
        shown=[*(figure.key for figure in figures), "outliers"],
        key_numbers=_key_numbers(lines[-1]),
        figures=figures,
        outlying=outlying,
    )


def outlying_samples(lines: Sequence[Line]) -> list[Outlying]:
    """Return samples that stood out, the most frequent first."""
    seen: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in lines:
        for each in line.get("outliers") or []:
            seen[str(each["sample"])].append((line["step"], float(each["norm"])))
    found = [(sample, len(at), at[-1][0], max(norm for _, norm in at)) for sample, at in seen.items()]
    return sorted(found, key=lambda each: (-each[1], -each[3]))[:SHOWN]


def findings_of(lines: Sequence[Line], outlying: Sequence[Outlying]) -> list[Finding]:
    """Return the findings to read before any figure."""
    found = []
    scales = [line for line in lines if _is_number(line.get(SCALE))]
    if len(scales) > 1:
        found.append(_of_scale(scales[0], scales[-1]))
    known = [(line["gradient_norm"], line["step"]) for line in lines if _is_number(line.get("gradient_norm"))]
    if known:
        median, (most, step) = sorted(known)[len(known) // 2][0], max(known)
        if most > SPIKE * median > 0:
            found.append(
                Finding(
                    f"The gradient was {number_text(most / median)} times its median in step {step:,}.",
                    "The outliers of this step show which samples caused it.",
                    "gradient_norm",
                )
            )
    often = [each for each in outlying if each[1] > 1]
    if often:
        found.append(
            Finding(
                f"{counted(len(often), 'sample')} stood out more than once.",
                f"Most often {often[0][0]}, in {often[0][1]} steps. It may be mislabelled, rare or damaged.",
                "outliers",
            )
        )
    return found


def _of_scale(first: Line, last: Line) -> Finding:
    """Return the change of the noise scale, as far as its intervals show it."""
    (below, least), (above, most) = (_interval(line) for line in (first, last))
    grew = last[SCALE] > first[SCALE]
    between = f"from {_scale_text(first)} to {_scale_text(last)} samples"
    placed = (
        f"Samples place it {interval_text(below, least)} at first, and {interval_text(above, most)} at last."
        if below < least or above < most
        else ""
    )
    if max(below, above) < min(least, most):
        return Finding(f"The noise scale changed {between}, which may be chance.", placed, SCALE)
    meaning = "The signal fades, and larger batches pay off." if grew else "Samples agree more than before."
    moved = "grew" if grew else "fell"
    return Finding(f"The noise scale {moved} {between}.", f"{meaning} {placed}".strip(), SCALE)


def _interval(line: Line) -> tuple[float, float]:
    """Return the confidence interval of the noise scale; the number itself if there is none."""
    low, high = line.get(f"{SCALE}_low"), line.get(f"{SCALE}_high")
    if low is None or not math.isfinite(low):
        return float(line[SCALE]), float(line[SCALE])
    return float(low), float(high) if high is not None and math.isfinite(high) else math.inf


def _scale_text(line: Line) -> str:
    scale = float(line[SCALE])
    return rounded_text(scale, scale - _interval(line)[0])


def _key_numbers(line: Line) -> list[tuple[str, str]]:
    found = [("samples a step", f"{line['samples']:,}")] if _is_number(line.get("samples")) else []
    for key, (title, _, _) in QUANTITIES.items():
        name = title.lower()
        if _is_number(line.get(key)):
            found.append((name, _scale_text(line) if key == SCALE else number_text(line[key])))
        if key == SCALE and _is_number(line.get(f"{key}_low")):
            found.append((f"{name}, range", range_text(*_interval(line))))
    return found[:7]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
