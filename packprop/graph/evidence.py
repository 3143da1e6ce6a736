"""What the witnesses of a forward pass say about a reading of its samples; see NOTE [Witnesses]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from packprop.graph.graph import Graph, ReachedUse
from packprop.graph.rows import sequences_of
from packprop.graph.separation import Fitting
from packprop.recording.evidence import Evidence, Touched
from packprop.tensors.layout import Layout, possible_layouts


class Reading(NamedTuple):
    """How the inputs of a pass may be read.

    Args:
        samples: Number of samples.
        axis: The axis of the inputs that holds them; ``None`` where it was declared.
        usual: Whether it is taken unless something contradicts; otherwise it has to be shown.
        in_turn: Whether several losses take the rows of all samples one after the other, in order.
        documents: Whether the samples are documents, as was declared.
    """

    samples: int
    axis: int | None
    usual: bool = True
    in_turn: bool = False
    documents: bool = False


class Verdict(NamedTuple):
    """What changed inputs have shown.

    Args:
        fitting: The layouts at the outputs of uses that nothing contradicts; ``None`` if a use has none.
        contradicted: That use.
        inside: Whether it is this use itself that mixes the samples.
        is_shown: Whether it was seen at all first uses that the samples are where they are taken to be.
        mixed: A use whose inputs mix the samples before any parameter comes in.
    """

    fitting: Fitting | None
    contradicted: ReachedUse | None = None
    inside: bool = False
    is_shown: bool = False
    mixed: ReachedUse | None = None

    @property
    def is_explained(self) -> bool:
        """Whether nothing that was seen speaks against it."""
        return self.fitting is not None and self.mixed is None


def judge(graph: Graph, fitting: Fitting, reading: Reading) -> Verdict:
    """Compare layouts that keep the samples apart with what changed inputs have changed.

    Args:
        graph: What the pass goes through.
        fitting: The layouts.
        reading: The number of samples, and their axis in the inputs.
    """
    kept: Fitting = {use: [list(layouts) for layouts in places] for use, places in fitting.items()}
    shown, mixed = not graph.checkpoints and reading.samples > 1, None
    for use in graph.uses:
        if sequences_of(use) is not None:
            shown = False  # packed sequences are in an order of their own, which the graph alone tells
            continue
        said = {each.samples for each in use.recorded.evidence if each.samples is not None}
        if reading.axis is not None and said - {reading.samples}:
            return Verdict(None, use, inside=True)
        evidence = [each for each in use.recorded.evidence if _is_about(each, reading)]
        seen = False
        for place, shape in enumerate(use.recorded.shapes):
            touched = [
                (each.change.rows(), each.outputs[place])
                for each in evidence
                if place in each.outputs and each.outputs[place].shape == shape
            ]
            if not any(_is_touched(where) for _, where in touched):
                continue
            explaining = [layout for layout in kept[use][place] if _explains(layout, touched)]
            in_any_order = [layout for layout in kept[use][place] if layout.rows is not None]
            if explaining:
                kept[use][place], seen = explaining, True
            elif _explaining(shape, touched, reading.samples):
                return Verdict(None, use)
            elif in_any_order and use.recorded.reordered:
                kept[use][place] = in_any_order  # changed inputs may have been sent elsewhere: nothing is shown
            elif _are_apart(evidence, reading.samples):
                return Verdict(None, use, inside=True)
            else:
                mixed = mixed or use
        if use.is_end and not seen:
            shown = False
    return Verdict(kept, is_shown=shown and mixed is None, mixed=mixed)


def _is_about(evidence: Evidence, reading: Reading) -> bool:
    return evidence.change.axis == reading.axis and evidence.change.extent == reading.samples


def _is_touched(where: Touched) -> bool:
    return any(bool(where.at(axis).any()) for axis in where.rows)


def _explains(layout: Layout, touched: Sequence[tuple[Tensor, Touched]]) -> bool:
    """Whether by this layout nothing of unchanged samples was touched."""
    if layout.axis is None or layout.joined:
        return True
    of_row = layout.sample_of(torch.device("cpu"))
    return not any(
        bool((where.at(layout.axis) & ~changed[of_row]).any())
        for changed, where in touched
        if layout.axis in where.rows
    )


def _explaining(shape: torch.Size, touched: Sequence[tuple[Tensor, Touched]], samples: int) -> list[Layout]:
    """Layouts by which nothing of unchanged samples was touched."""
    return [layout for layout in possible_layouts(shape, samples) if _explains(layout, touched)]


def _are_apart(evidence: Iterable[Evidence], samples: int) -> bool:
    """Whether some layout of each input of a use is explained."""
    inputs: dict[int, list[tuple[Tensor, Touched]]] = {}
    for each in evidence:
        for place, where in enumerate(each.inputs):
            if _is_touched(where):
                inputs.setdefault(place, []).append((each.change.rows(), where))
    return bool(inputs) and all(
        _explaining(touched[0][1].shape, touched, samples) for touched in inputs.values()
    )
