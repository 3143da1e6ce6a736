"""Products of groups of rows with one matrix for each group, as in a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from packprop.engine.algebra.structures import Outer, Structure
from packprop.engine.functions.building import select_samples
from packprop.engine.functions.entry import Cotangents, Entry, Fans, Samples, Scratch
from packprop.engine.functions.node_calls import NodeCall
from packprop.engine.functions.registry import rule_of
from packprop.engine.tensors.layout import Layout, layout_of_rows


@rule_of("GroupedMm", form="shape")
def _grouped_product(call: NodeCall) -> Entry | None:
    """Return the entry of weights ``[g, i, o]``, each for the rows up to the end of its group."""
    if call.place != 1 or len(call.operand.shape) != 3 or len(call.option("self_sym_sizes")) != 2:
        return None
    saved, ends = call.saved("self"), call.saved("offs")
    groups, fan_in, fan_out = call.operand.shape

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        layout, cotangent, x = layouts[0], cotangents[0], saved()
        rows = torch.arange(len(x), device="cpu")
        group_of = torch.searchsorted(ends().cpu(), rows, right=True)
        sample_of = torch.zeros_like(rows) if layout.axis is None else layout.sample_of(rows.device)
        used = group_of < groups  # the function leaves out rows after the last group
        place = layout_of_rows(0, (sample_of * groups + group_of)[used], layout.samples * groups)
        used = used.to(x.device)

        def by_group(tensor: Tensor, skip: int) -> Tensor:
            """Map ``[*skipped, rows, i] -> [*skipped, n, s, g, i]``, for the chosen samples."""
            kept = tensor[used] if skip == 0 else tensor[:, used]
            front = place.to_front(kept, skip).unflatten(skip, (layout.samples, groups))
            return select_samples(front.transpose(skip + 1, skip + 2), samples, skip)

        columns = None if cotangent is None else by_group(cotangent, 1)
        assert place.rows is not None
        real = select_samples(place.rows.counts.view(-1, groups), samples).sum()
        return Outer(by_group(x, 0), columns, _fan_in_before_fan_out, real=real)

    return Entry(
        call.operand.tensor,
        "Outer",
        structure_of,
        admits=lambda axis: axis == 0,
        scratch=Scratch(per_column=call.operand.shape.numel(), inputs_only=groups * fan_in),
        fans=Fans(groups, fan_in, fan_out),
        linear=True,
    )


def _fan_in_before_fan_out(gradient: Tensor) -> Tensor:
    """Map ``[..., g, o, i] -> [..., g, i, o]``."""
    return gradient.mT
