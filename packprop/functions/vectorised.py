"""A function of separate samples, evaluated again by ``vmap`` with a parameter of its own for each sample.

# NOTE [A parameter for each sample]
Pulled back once for each sample, a function without a rule costs as many passes over the batch as there are
samples. Called on one sample with that sample's own copy of the parameter, for all samples at once, it costs
one: the gradient of a copy is the gradient of its sample. But nothing says on which axis a function without a
rule takes its samples, or that it keeps them apart. It is tried with the axis of its outputs: all tensors that
have as many entries there are given sample by sample. That is right if the outputs are what they were, and if
the gradients of the samples add up to that of the batch. Otherwise, or where ``vmap`` does not know the
function, it is pulled back once for each sample.
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

    def by_sample(self, axis: int, samples: int) -> list[Tensor]:
        """Arguments with as many entries along an axis as there are samples, each once."""
        alike = {id(self.weight), *map(id, self.shared)}
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
    axis, samples, weight = layout.axis, layout.samples, copied.weight
    if axis is None or layout.parts != 1 or layout.rows is not None:
        return None
    if not reached or any(other != layout for _, _, _, other in reached):
        return None
    given = copied.by_sample(axis, samples)
    if not given or len(chosen) < 2:
        return None
    whole = list(chosen) == list(range(samples))
    places = None if whole else torch.tensor(chosen, device=weight.device)

    def of_chosen(tensor: Tensor, axis: int = axis) -> Tensor:
        return tensor if places is None else tensor.index_select(axis, places)

    of_one = copied.of_one(given, axis, [number for number, _, _, _ in reached])
    inputs = [of_chosen(tensor) for tensor in given]
    arrived = [of_chosen(cotangent, axis + 1) for _, _, cotangent, _ in reached]
    key = _key_of(copied, axis)
    made = None
    for way in _KNOWN.get(key, (_all_at_once, _one_after_another)):
        made = _tried(way, of_one, weight, inputs, arrived, axis)
        if made is not None:
            break
    _remember(key, () if made is None else (way,))
    if made is None:
        return None
    again, rows = made
    total = pulled(
        [output for _, output, _, _ in reached],
        weight,
        [_only(cotangent, axis + 1, places) for _, _, cotangent, _ in reached],
    )
    pairs = [(made, of_chosen(output)) for made, (_, output, _, _) in zip(again, reached, strict=True)]
    far = [_is_far(made, output, output.detach().abs().amax()) for made, output in pairs]
    far.append(_is_far(rows.sum(1), total, rows.abs().sum(1).amax()))
    if has_fault(torch.stack(far).any()):
        _remember(key, ())
        return None
    return rows


def effort_of_copies(copied: Copied, axis: int | None) -> str:
    """What the gradients of samples take, in calls of the function: known after the first ones."""
    ways = () if axis is None else _KNOWN.get(_key_of(copied, axis), ())
    return EFFORTS.get(ways, "one pass over the whole batch for each sample")


MANY = 256
"""For how many kinds of calls it is remembered what could be done."""


_KNOWN: dict[Any, tuple[Callable[..., Made], ...]] = {}
"""What could be done for a function and shapes of its arguments: attempts in vain take memory and time."""


def _key_of(copied: Copied, axis: int) -> Any:
    return copied.function, axis, tuple(tensor.shape for tensor in tensors_in(copied.arguments))


def _remember(key: Any, ways: tuple[Callable[..., Made], ...]) -> None:
    if len(_KNOWN) == MANY and key not in _KNOWN:
        _KNOWN.clear()
    _KNOWN[key] = ways


def _tried(make: Callable[..., Made], *given: Any) -> Made | None:
    """What is made, or nothing: ``vmap`` may not know the function, the function may not take one sample."""
    try:
        return make(*given)
    except Exception:  # of any kind: it is the user's function, on arguments that it may not be made for
        return None


def _all_at_once(
    of_one: OfOne, weight: Tensor, inputs: Sequence[Tensor], cotangents: Sequence[Tensor], axis: int
) -> Made:
    """All samples by one call."""
    copies = weight.detach().expand(inputs[0].shape[axis], *weight.shape).requires_grad_(True)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # vmap calls what it does not know once for each sample, and says so
        again = torch.func.vmap(of_one, in_dims=(0, *[axis] * len(inputs)), out_dims=axis)(copies, *inputs)
    return [output.detach() for output in again], pulled(again, copies, cotangents)


def _one_after_another(
    of_one: OfOne, weight: Tensor, inputs: Sequence[Tensor], cotangents: Sequence[Tensor], axis: int
) -> Made:
    """Sample by sample."""
    outputs: list[list[Tensor]] = []

    def gradient(place: int) -> Products:
        with torch.enable_grad():
            made = of_one(weight, *(tensor.select(axis, place) for tensor in inputs))
        outputs.append([output.detach() for output in made])
        return [pulled(made, weight, [cotangent.select(axis + 1, place) for cotangent in cotangents])]

    rows = [row for (row,) in one_by_one(inputs[0].shape[axis], gradient) if row is not None]
    again = [torch.stack(each, axis) for each in zip(*outputs, strict=True)]
    return again, torch.stack(rows, 1)


EFFORTS: dict[tuple[Callable[..., Made], ...], str] = {
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
