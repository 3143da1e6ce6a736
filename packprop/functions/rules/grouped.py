"""Products of groups of rows with a matrix each, as in a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from packprop.algebra.structures import Outer, Structure
from packprop.functions.building import SavedTensor, select_samples
from packprop.functions.entry import Call, Cotangents, Entry, Fans, Samples, Scratch
from packprop.functions.registry import register_use
from packprop.tensors.layout import Layout, layout_of_rows


def _grouped_product(
    call: Call,
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> list[Entry] | None:
    if call.consumes(input) or bias is not None or offs is None or (input.dim(), mat2.dim()) != (2, 3):
        return None
    groups, fan_in, fan_out = mat2.shape
    saved, ends = SavedTensor(input, "grouped_mm"), SavedTensor(offs, "grouped_mm")

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        layout, cotangent, x = layouts[0], cotangents[0], saved()
        rows = torch.arange(len(x))
        group_of = torch.searchsorted(ends().cpu(), rows, right=True)
        sample_of = torch.zeros_like(rows) if layout.axis is None else layout.sample_of(rows.device)
        used = group_of < groups  # the function leaves rows behind the last group out
        place = layout_of_rows(0, (sample_of * groups + group_of)[used], layout.samples * groups)
        used = used.to(x.device)

        def by_group(tensor: Tensor, skip: int) -> Tensor:
            """``[*skipped, rows, i] -> [*skipped, n, s, g, i]``, of the chosen samples."""
            kept = tensor[used] if skip == 0 else tensor[:, used]
            front = place.to_front(kept, skip).unflatten(skip, (layout.samples, groups))
            return select_samples(front.transpose(skip + 1, skip + 2), samples, skip)

        columns = None if cotangent is None else by_group(cotangent, 1)
        return Outer(by_group(x, 0), columns, _fan_in_before_fan_out, is_filled_up=True)

    return [
        Entry(
            mat2,
            "Outer",
            structure_of,
            admits=lambda axis: axis == 0,
            scratch=Scratch(per_column=mat2.numel(), inputs_only=groups * fan_in),
            fans=Fans(groups, fan_in, fan_out),
            linear=True,
        )
    ]


def _fan_in_before_fan_out(gradient: Tensor) -> Tensor:
    """``[..., g, o, i] -> [..., g, i, o]``."""
    return gradient.mT


class _First(TorchFunctionMode):
    """Notes the first torch function that is called inside, in place of calling it."""

    function: Callable[..., Any]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.function = func


def called_first(function: Callable[..., Any], *tensors: Tensor) -> Callable[..., Any]:
    """What a torch-function mode sees of a function that asks no mode itself, and calls another at once."""
    seen = _First()
    with seen:
        function(*tensors)
    return seen.function


if hasattr(F, "grouped_mm"):
    register_use(called_first(F.grouped_mm, torch.Tensor(), torch.Tensor()))(_grouped_product)
