"""A function of separate samples, evaluated again by ``vmap`` with a parameter of its own for each sample.

# NOTE [A parameter for each sample]
Pulled back once for each sample, a function without a rule costs as many passes over the batch as there are
samples. Called on one sample with that sample's own copy of the parameter, for all samples at once, it costs
one: the gradient of a copy is the gradient of its sample. But nothing says on which axis a function without a
rule takes its samples, or that it keeps them apart. It is tried with the axis of its outputs: all tensors that
have as many entries there are given sample by sample. That is right if the outputs are what they were, and if
the gradients of the samples add up to that of the batch. Otherwise, or where ``vmap`` does not know the
function, it is pulled back once for each sample. A tensor that was computed from parameters alone, and
expanded to the batch (a learned query, say), has a row for each sample, which meets that sample alone: its
gradient is one pass over the batch, taken apart.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packprop.functions.pulling import pulled
from packprop.tensors.dry import has_fault
from packprop.tensors.layout import Layout
from packprop.tensors.nesting import map_tensors, tensors_in
from packprop.tensors.repeated import Products, one_by_one

Made = tuple[list[Tensor], Tensor]
"""Outputs of all samples, and gradients of their copies ``[v, n, *p]``."""


OfOne = Callable[..., list[Tensor]]
"""From a copy of the parameter, and inputs without the axis of samples, to outputs without it."""


class Copied(NamedTuple):
    """A call whose parameter each sample gets a copy of.

    Args:
        function: What is called.
        arguments: Its positional and named arguments, detached but for the parameter.
        weight: The parameter among them, a leaf.
        shared: Arguments that are the same for all samples.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    weight: Tensor
    shared: Sequence[Tensor]

    def by_sample(self, axis: int, samples: int, with_parameters: bool = False) -> list[Tensor]:
        """Arguments with as many entries along an axis as there are samples, each once; perhaps shared ones."""
        alike = {id(self.weight)} | (set() if with_parameters else set(map(id, self.shared)))
        found = {
            id(tensor): tensor
            for tensor in tensors_in(self.arguments)
            if id(tensor) not in alike and tensor.dim() > axis and tensor.shape[axis] == samples
        }
        return list(found.values())

    def of_one(self, given: Sequence[Tensor], axis: int, numbers: Sequence[int]) -> Callable[..., list[Tensor]]:
        """The function of one copy and one sample of what is given: the outputs with these numbers."""
        places = {id(tensor): place for place, tensor in enumerate(given)}

        def call(copy: Tensor, *own: Tensor) -> list[Tensor]:
            def substitute(tensor: Tensor) -> Tensor:
                if tensor is self.weight:
                    return copy
                place = places.get(id(tensor))
                return tensor if place is None else own[place].unsqueeze(axis)

            args, kwargs = map_tensors(substitute, self.arguments)
            made = self.function(*args, **kwargs)
            made = [made] if isinstance(made, Tensor) else list(made)
            return [made[number].squeeze(axis) for number in numbers]

        return call


class Batch(NamedTuple):
    """What is pulled back.

    Args:
        copied: The call.
        numbers: The outputs that something arrived at.
        cotangents: What arrived there for the chosen samples ``[v, *y]``.
        axis: Where the outputs hold the samples.
        samples: Number of samples.
        places: The chosen samples ``[m]``; ``None`` for all of them in order.
    """

    copied: Copied
    numbers: Sequence[int]
    cotangents: Sequence[Tensor]
    axis: int
    samples: int
    places: Tensor | None

    def chosen(self, tensor: Tensor) -> Tensor:
        """The chosen samples of a tensor."""
        return _chosen(tensor, self.axis, self.places)

    def of_one(self, with_parameters: bool = False) -> tuple[OfOne, list[Tensor]]:
        """The function of one sample, and what it is given of the chosen samples."""
        given = self.copied.by_sample(self.axis, self.samples, with_parameters)
        if not given:
            raise ValueError("nothing holds the samples where the outputs do")
        return self.copied.of_one(given, self.axis, self.numbers), [self.chosen(tensor) for tensor in given]


Way = Callable[[Batch], Made]
"""From what is pulled back to the outputs again, and gradients of single samples."""


def gradients_of_copies(
    copied: Copied,
    outputs: Sequence[Any],
    cotangents: Sequence[Tensor | None],
    layouts: Sequence[Layout],
    chosen: Sequence[int],
) -> Tensor | None:
    """Gradients of single samples ``[v, n, *p]``; ``None`` where they cannot be had so.

    Args:
        copied: The call.
        outputs: What it has returned for the whole batch.
        cotangents: What arrived at each output ``[v, *y]``.
        layouts: Where each output holds the samples.
        chosen: The numbers of the samples that are asked for.
    """
    triples = zip(outputs, cotangents, layouts, strict=False)
    reached = [
        (number, output, cotangent, layout)
        for number, (output, cotangent, layout) in enumerate(triples)
        if cotangent is not None and isinstance(output, Tensor) and output.requires_grad
    ]
    layout = layouts[0]
    axis, samples = layout.axis, layout.samples
    if axis is None or layout.parts != 1 or layout.rows is not None or len(chosen) < 2:
        return None
    if not reached or any(other != layout for _, _, _, other in reached):
        return None
    places = None
    if list(chosen) != list(range(samples)):
        places = torch.tensor(chosen, device=copied.weight.device)
    arrived = [_chosen(cotangent, axis + 1, places) for _, _, cotangent, _ in reached]
    batch = Batch(copied, [number for number, _, _, _ in reached], arrived, axis, samples, places)
    expected = [_chosen(output, axis, places) for _, output, _, _ in reached]
    total: Tensor | None = None
    key = _key_of(copied, axis)
    for way in _KNOWN.get(key, _ways(batch)):
        made = _tried(way, batch)
        if made is None:
            continue
        if total is None:
            only = [_only(cotangent, axis + 1, places) for _, _, cotangent, _ in reached]
            total = pulled([output for _, output, _, _ in reached], copied.weight, only)
        if _is_right(*made, expected, total):
            _remember(key, (way,))
            return made[1]
    _remember(key, ())
    return None


def _is_right(again: Sequence[Tensor], rows: Tensor, expected: Sequence[Tensor], total: Tensor) -> bool:
    """Whether outputs are what they were, and gradients ``[v, n, *p]`` add up to that of the batch."""
    far = [
        _is_far(made, output, output.detach().abs().amax())
        for made, output in zip(again, expected, strict=True)
        if output.numel()
    ]
    if rows.numel():
        far.append(_is_far(rows.sum(1), total, rows.abs().sum(1).amax()))
    return not far or not has_fault(torch.stack(far).any())


def effort_of_copies(copied: Copied, axis: int | None) -> str:
    """What the gradients of samples take, in calls of the function: known after the first ones."""
    ways = () if axis is None else _KNOWN.get(_key_of(copied, axis), ())
    return EFFORTS.get(ways, "one pass over the whole batch for each sample")


MANY = 256
"""For how many kinds of calls it is remembered what could be done."""


_KNOWN: dict[Any, tuple[Way, ...]] = {}
"""What could be done for a function and shapes of its arguments: attempts in vain take memory and time."""


def _key_of(copied: Copied, axis: int) -> Any:
    return copied.function, axis, tuple(tensor.shape for tensor in tensors_in(copied.arguments))


def _remember(key: Any, ways: tuple[Way, ...]) -> None:
    if len(_KNOWN) == MANY and key not in _KNOWN:
        _KNOWN.clear()
    _KNOWN[key] = ways


def _ways(batch: Batch) -> tuple[Way, ...]:
    """What to try, the most likely first."""
    weight, axis = batch.copied.weight, batch.axis
    has_rows = weight.dim() > axis and weight.shape[axis] == batch.samples
    return (*((_by_rows_of_its_own,) if has_rows else ()), _all_at_once, _one_after_another)


def _tried(make: Way, batch: Batch) -> Made | None:
    """What is made, or nothing: ``vmap`` may not know the function, the function may not take one sample."""
    try:
        return make(batch)
    except Exception:  # of any kind: it is the user's function, on arguments that it may not be made for
        return None


def _by_rows_of_its_own(batch: Batch) -> Made:
    """All samples by one call, in which each meets its own row of the parameter."""
    copied, axis = batch.copied, batch.axis
    of_one, inputs = batch.of_one(with_parameters=True)
    own = batch.chosen(copied.weight.detach()).requires_grad_(True)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        again = torch.func.vmap(
            lambda row, *others: of_one(row.unsqueeze(axis), *others), in_dims=axis, out_dims=axis
        )(own, *inputs)
    gradients = pulled(again, own, batch.cotangents).movedim(axis + 1, 1)  # [v, n, ...]
    rows = gradients.new_zeros(*gradients.shape[:2], *copied.weight.shape)
    numbers = torch.arange(len(own.movedim(axis, 0)), device=own.device)
    rows.movedim(axis + 2, 2)[:, numbers, numbers if batch.places is None else batch.places] = gradients
    return [output.detach() for output in again], rows


def _all_at_once(batch: Batch) -> Made:
    """All samples by one call."""
    of_one, inputs = batch.of_one()
    weight, axis = batch.copied.weight, batch.axis
    copies = weight.detach().expand(inputs[0].shape[axis], *weight.shape).requires_grad_(True)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # vmap calls what it does not know once for each sample, and says so
        again = torch.func.vmap(of_one, in_dims=(0, *[axis] * len(inputs)), out_dims=axis)(copies, *inputs)
    return [output.detach() for output in again], pulled(again, copies, batch.cotangents)


def _one_after_another(batch: Batch) -> Made:
    """Sample by sample."""
    of_one, inputs = batch.of_one()
    weight, axis = batch.copied.weight, batch.axis
    outputs: list[list[Tensor]] = []

    def gradient(place: int) -> Products:
        with torch.enable_grad():
            made = of_one(weight, *(tensor.select(axis, place) for tensor in inputs))
        outputs.append([output.detach() for output in made])
        return [pulled(made, weight, [cotangent.select(axis + 1, place) for cotangent in batch.cotangents])]

    rows = [row for (row,) in one_by_one(inputs[0].shape[axis], gradient) if row is not None]
    again = [torch.stack(each, axis) for each in zip(*outputs, strict=True)]
    return again, torch.stack(rows, 1)


def _chosen(tensor: Tensor, axis: int, places: Tensor | None) -> Tensor:
    return tensor if places is None else tensor.index_select(axis, places)


EFFORTS: dict[tuple[Way, ...], str] = {
    (_by_rows_of_its_own,): "all samples in one call",
    (_all_at_once,): "all samples in one call",
    (_one_after_another,): "one call for each sample",
}
"""What each way takes, for people."""


def _only(cotangent: Tensor, axis: int, places: Tensor | None) -> Tensor:
    """A cotangent that is zero for all samples but some."""
    if places is None:
        return cotangent
    return torch.zeros_like(cotangent).index_copy(axis, places, cotangent.index_select(axis, places))


def _is_far(one: Tensor, other: Tensor, scale: Tensor) -> Tensor:
    """Whether two tensors differ by more than rounding."""
    if one.shape != other.shape:
        return torch.tensor(True, device=one.device)
    tolerance = torch.finfo(one.dtype).eps ** 0.75
    near: Tensor = (one - other.detach()).abs().amax() <= tolerance * scale.detach()  # NaN is not
    return ~near
