"""The findings of a profile, in sentences: a reader should see them before any figure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import itemgetter

from packprop.applications.reports.profile.layers import TOTAL, Layer
from packprop.applications.reports.profile.ranks import narrow_factors
from packprop.applications.reports.profile.table import counted, number_text, seconds_text
from packprop.applications.reports.profile.uncertainty import (
    interval_text,
    rounded_text,
    signal_to_noise_interval,
)
from packprop.applications.reports.profile.values import ProfileValues
from packprop.engine.memory import byte_text

TAIL = 0.05
"""The part of the samples whose share of the gradients is a finding."""

FAR = 1.1
"""The page reports a peak of more than this times the planned one."""


LONG = 0.1
"""The page reports a layer and a quantity that take this share of the time."""


@dataclass(frozen=True)
class Finding:
    """A sentence, and its grounds.

    Args:
        says: The sentence.
        because: The source of the finding, and its limits.
        figure: The key of the figure that shows it.
    """

    says: str
    because: str
    figure: str = ""


def findings_of(values: ProfileValues) -> list[Finding]:
    """Return the findings, the most general first."""
    said = [
        _not_finite(values),
        _noise(values),
        _tail(values),
        _curvature(values),
        _ranks(values),
        _time(values),
        _memory(values),
    ]
    return [finding for finding in said if finding is not None]


def noise_scale(values: ProfileValues) -> float | None:
    """Return the batch size at which noise is as large as signal; ``None`` if it is not known."""
    ratio = values.total.signal_to_noise
    return None if not ratio or not math.isfinite(ratio) else 1 / ratio


def scale_interval(values: ProfileValues) -> tuple[float, float] | None:
    """Return the range of the noise scale, see ``reports/profile/uncertainty.py``; ``None`` if not known."""
    norms = values.norms_of(values.total)
    interval = signal_to_noise_interval(values.total, norms)
    if interval is None:
        return None
    low, high = interval
    return 1 / high, 1 / low if low > 0 else math.inf


def scale_text(values: ProfileValues) -> str:
    """Return the noise scale, with the digits that its interval supports."""
    scale, interval = noise_scale(values), scale_interval(values)
    if scale is None:
        return "-"
    return rounded_text(scale, None if interval is None else scale - interval[0])


def trace_of(layer: Layer) -> float | None:
    """Return the layer's trace of the GGN: the exact one, if it was computed."""
    return layer.ggn_trace_monte_carlo if layer.ggn_trace_exact is None else layer.ggn_trace_exact


def _not_finite(values: ProfileValues) -> Finding | None:
    if values.headline is None:
        return None
    why = "Look for samples, parameters or settings that are not finite, or that make values overflow."
    return Finding(values.headline, why)


def _noise(values: ProfileValues) -> Finding | None:
    scale = noise_scale(values)
    if scale is None:
        return None
    if scale >= values.samples:
        return Finding(
            "The gradient may be nothing but noise.",
            f"Noise equals signal at a batch size of {scale_text(values)}, and there were only "
            f"{counted(values.samples, 'sample')}.",
            "signal",
        )
    between = scale_interval(values)
    return Finding(
        f"At a batch size of {scale_text(values)}, noise is as large as signal.",
        "Much smaller batches take steps that are mostly noise; much larger ones bring little more for each "
        "sample (the simple noise scale of McCandlish et al., 2018)."
        + (f" These samples place it {interval_text(*between)}." if between else ""),
        "signal",
    )


def _tail(values: ProfileValues) -> Finding | None:
    norms = values.norms_of(values.total)
    if norms is None or len(norms) < 20 or not bool(norms.isfinite().all()) or not float(norms.max()):
        return None
    squares = norms.double().square().sort(descending=True).values
    few = max(1, round(TAIL * len(squares)))
    share = float(squares[:few].sum() / squares.sum())
    median = float(norms.median())
    most = f"{number_text(float(norms.max()) / median)} times the median" if median else "the median is zero"
    says = (
        f"{counted(few, 'sample')} of {values.samples:,} hold {share:.0%} of the gradients."
        if share >= 0.25
        else f"No small group stands out: the largest {TAIL:.0%} hold {share:.0%} of the gradients."
    )
    return Finding(
        says,
        f"Share of the {TAIL:.0%} with the largest gradients in the sum of squared norms; the largest norm is "
        f"{number_text(float(norms.max()))}, {most}.",
        "norms",
    )


def _curvature(values: ProfileValues) -> Finding | None:
    traces = {layer.name: trace for layer in values.layers if (trace := trace_of(layer)) is not None}
    total = sum(traces.values())
    if len(traces) < 2 or not math.isfinite(total) or total <= 0:
        return None
    top = max(traces, key=lambda name: traces[name])
    layer = next(layer for layer in values.layers if layer.name == top)
    share = layer.parameters / values.total.parameters
    its_share = f"{share:.0%}" if share >= 0.01 else f"{100 * share:.1g}%"
    return Finding(
        f"{top} has {traces[top] / total:.0%} of the curvature.",
        f"Its share of the trace of the GGN, with {its_share} of the parameters. With one learning rate for "
        "all layers, this layer becomes unstable first.",
        "curvature",
    )


def _ranks(values: ProfileValues) -> Finding | None:
    built = [
        (layer, spectrum)
        for layer in values.layers
        for spectrum in layer.factors.values()
        if spectrum.rank is not None
    ]
    if not built:
        return None
    narrow = narrow_factors(values)
    if not narrow:
        whole = [(layer, spectrum) for layer, spectrum in built if spectrum.rank == spectrum.size]
        worst = max(whole or built, key=lambda pair: pair[1].condition or 0.0)
        return Finding(
            f"None of {counted(len(built), 'Kronecker factor')} is degenerate.",
            _few(len(built) - len(whole), len(built))
            + f"The worst condition is {number_text(worst[1].condition)}, in {worst[0].name}.",
            "spectra",
        )
    idle = [each for each in narrow if each.idle]
    if idle:
        most = max(idle, key=lambda each: each.idle / each.size)
        what = "inputs are always zero" if most.side == "A" else "outputs never have a gradient"
        return Finding(
            f"In {most.layer}, {most.idle} of {most.size} {what}.",
            _others(len({each.layer for each in idle}), "these units do nothing on these samples."),
            "spectra",
        )
    most = min(narrow, key=lambda each: each.rank / each.size)
    what = "inputs" if most.side == "A" else "gradients"
    return Finding(
        f"The {what} of {most.layer} span {most.rank} of {counted(most.size, 'direction')}.",
        _others(
            len({each.layer for each in narrow}),
            f"this is the rank of the Kronecker factor; {counted(values.samples, 'sample')} could span more.",
        ),
        "spectra",
    )


def _few(few: int, built: int) -> str:
    if not few:
        return "All have full rank. "
    return (
        f"{few} of {built} lack a few directions, as is usual after normalisation, a softmax or small numbers; "
        "damping makes up for this. "
    )


def _others(layers: int, what: str) -> str:
    return f"It is the only such layer: {what}" if layers == 1 else f"There are {layers} such layers: {what}"


def _time(values: ProfileValues) -> Finding | None:
    costs = [] if values.memory is None else values.memory.costs
    single = [cost for cost in costs if cost.layer != TOTAL]
    whole = sum(cost.seconds for cost in costs if cost.layer == TOTAL)
    longest = max(single, key=lambda cost: cost.seconds, default=None)
    if longest is None or longest.seconds < LONG * whole or not whole:
        return None
    return Finding(
        f"{longest.layer} takes longest: {longest.quantity}, {seconds_text(longest.seconds)}.",
        f"That is {longest.seconds / whole:.0%} of the time of all quantities in all layers, each computed "
        "alone on the first batch.",
        "costs",
    )


def _memory(values: ProfileValues) -> Finding | None:
    use = values.memory
    if use is None:
        return None
    what = f"a batch of {use.samples:,}"
    if use.planned is None:
        return Finding(f"The pass over {what} took {byte_text(use.peak)}.", f"There is no plan: {use.why_not}.")
    if use.budget is not None and use.peak > use.budget:
        says = f"The pass over {what} took more than its budget: {byte_text(use.peak)}."
    elif use.peak > FAR * use.planned:
        says = f"The pass over {what} took {byte_text(use.peak)}, more than was planned."
    else:
        says = f"The pass over {what} took {byte_text(use.peak)}, as planned."
    budget = "there is no budget" if use.budget is None else f"the budget is {byte_text(use.budget)}"
    where = use.phase_at(max(use.timeline, key=itemgetter(1))[0]) if use.timeline else ""
    peak = f"The peak is in the {where}. " if where else ""
    return Finding(says, f"{peak}The plan said {byte_text(use.planned)}; {budget}.", "memory")
