"""Readings of a pass that nothing tells apart: one of them has to be declared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from packprop.errors import PackpropError
from packprop.graph.evidence import Reading, Verdict, judge
from packprop.graph.graph import Graph
from packprop.graph.readings import choices
from packprop.graph.separation import Fitting, ModelOutput, separate
from packprop.tensors.layout import Layout


def require_the_only_reading(
    graph: Graph, outputs: Sequence[ModelOutput], verdict: Verdict, reading: Reading
) -> None:
    """Refuse a reading that is not the usual one if another axis is as good.

    So where inputs are mixed along the samples' axis before any parameter. What is made of inputs alone is a
    constant, however it mixes them; but it may as well mix positions.

    Args:
        graph: What the pass goes through.
        outputs: The model's outputs.
        verdict: What changed inputs have shown of the reading.
        reading: The reading.
    """
    mixed = verdict.mixed
    if reading.axis is None or any(output.loss.sample_axis is not None for output in outputs):
        return  # it was declared, or the loss knows
    for other, chosen in choices(graph, outputs):
        if other.axis == reading.axis or other.samples == 1:
            continue
        found = separate(graph, outputs, chosen, other.samples)
        if found.fitting is not None:
            others = judge(graph, found.fitting, other)
            is_as_good = others.is_shown or (mixed is None and not verdict.is_shown and others.is_explained)
        else:  # a loop over samples and one over steps look alike
            fitting = separate(graph, outputs, chosen, other.samples, in_parts=True).fitting
            is_as_good = fitting is not None and judge(graph, fitting, other).is_explained
        if is_as_good:
            assert other.axis is not None  # both were declared, or none
            one, two = sorted((reading.axis, other.axis))
            if mixed is not None:
                where = f"the inputs of {graph.label(mixed)}"
                why = (
                    f"they are mixed along axis {reading.axis} of the model's inputs before any parameter "
                    f"comes in, and not along axis {other.axis}: either may hold the samples"
                )
            else:
                where = "the inputs of the model and of the loss"
                why = (
                    "no position meets another one, and not all functions have the leading axis of the inputs: "
                    f"axis {one} or axis {two} of the model's inputs may hold the samples"
                )
            instead = f"say which: extend(model, sample_axis={one}) or sample_axis={two}"
            raise PackpropError(graph.asked, where, why, instead)


def is_explained_later(
    graph: Graph,
    outputs: Sequence[ModelOutput],
    reading: Reading,
    later: Iterable[tuple[Reading, list[Layout]]],
) -> bool:
    """Whether other places at the model's outputs explain all that was seen of a reading."""
    for other, chosen in later:
        if other == reading:
            found = separate(graph, outputs, chosen, other.samples, in_parts=True)
            if found.fitting is not None and judge(graph, found.fitting, other).is_explained:
                return True
    return False


def _each_holds_all(outputs: Sequence[ModelOutput], reading: Reading) -> bool:
    """Whether each loss has one row for each sample, as losses beside each other do."""
    return all(output.samples == reading.samples for output in outputs)


def require_not_in_turn(
    graph: Graph, outputs: Sequence[ModelOutput], reading: Reading, fitting: Fitting
) -> None:
    """Refuse positions as samples where losses may take the samples themselves in turn.

    A model whose positions do not interact keeps both apart, in chunks of samples and in chunks of time.
    """
    if reading.in_turn or reading.axis is None or reading.samples == 1 or len(outputs) == 1:
        return
    lead = all(layouts[0].axis in (0, None) for places in fitting.values() for layouts in places)
    for other, chosen in choices(graph, outputs):
        same = (other.samples, other.axis) == (reading.samples, reading.axis)
        if not other.in_turn or (same and (lead or _each_holds_all(outputs, reading))):
            continue
        found = separate(graph, outputs, chosen, other.samples)
        if found.fitting is not None and judge(graph, found.fitting, other).fitting is not None:
            raise PackpropError(
                graph.asked,
                "the inputs of the losses",
                f"they may hold {reading.samples} samples each, or some rows of {other.samples} samples that "
                "lead the model's inputs, one loss after the other: no position meets another one",
                "say which: extend(model, sample_axis=0) if samples lead the model's inputs, sample_axis=1 if "
                "they come second",
            )
