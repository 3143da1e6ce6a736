"""Batches that are objects: taken apart when they are read, put together in front of a call.

# NOTE [Objects in batches]
A model may take an object: a batch of graphs, a dataclass, an instance of any class. packprop moves the tensors
of a batch, compares them, and plans without their data. So it divides an object into a list of its tensors and
the rest, and calls the model and the loss with a deep copy that has the tensors in their places.
``copy.deepcopy`` finds the tensors in any class. Parameters, and tensors of classes with a ``__deepcopy__``,
come back as copies: a second try replaces these by places as well, and keeps modules and generators of random
numbers, because their copies would not belong to the model and the data. An object that occurs twice in a
batch, because model and loss both take it, is one object in each call: the loss sees what the model wrote to
it. The graph of the loss shows how many samples there are, as for all batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from packprop.engine.tensors.nesting import PLAIN, attributes_of, map_chosen, once, tensors_in
from packprop.engine.tensors.random import generator_classes
from packprop.errors import BadInput


class _Place:
    """Stands for a tensor in an object that was taken apart."""


class _Rest:
    """An object without its tensors; no container, so that nothing looks into it.

    Args:
        value: A copy of the object, with places instead of tensors.
        places: The places of its tensors.
        kept: The parts of the object that are not copied.
    """

    def __init__(self, value: Any, places: list[_Place], kept: list[Any]) -> None:
        self.value, self.places, self.kept = value, places, kept


@dataclass
class Apart:
    """An object that was taken apart; see NOTE [Objects in batches].

    Args:
        tensors: Its tensors, each once.
        rest: The rest of it.
    """

    tensors: list[Tensor]
    rest: _Rest

    @classmethod
    def of(cls, value: Any, known: Sequence[Any] = ()) -> Apart:
        """Take an object apart; ``known`` are things in it that ``copy.deepcopy`` must not copy.

        Raises:
            BadInput: If it cannot be copied.
        """
        tensors: list[Tensor] = []
        places: list[_Place] = []
        kept = [each for each in known if not isinstance(each, Tensor)]

        def taken(tensor: Tensor) -> _Place:
            tensors.append(tensor)
            places.append(_Place())
            return places[-1]

        memo: dict[int, Any] = {id(each): taken(each) if isinstance(each, Tensor) else each for each in known}
        try:
            with _Copying(taken):
                rest = copy.deepcopy(value, memo)
        except Exception as error:  # anything: it may be the user's code
            why = f"copy.deepcopy cannot copy it: {type(error).__name__}: {error}"
            raise _not_copied(value, why) from error
        copied = memo.pop(id(memo), [])  # copy.deepcopy keeps what it has copied alive there
        missed = [each for each in copied if isinstance(each, (nn.Module, *generator_classes()))]
        missed = missed or [each for each in copied if isinstance(memo.get(id(each)), Tensor)]
        if missed:
            return cls.of(value, [*known, *missed])
        left = next(tensors_in([each for _, each in attributes_of(rest)]), None)
        if left is not None or type(rest) is not type(value):
            raise _not_copied(value, "its own __deepcopy__ does not hand its tensors to copy.deepcopy")
        return cls(tensors, _Rest(rest, places, kept))

    def together(self) -> Any:
        """Return a copy of the object with these tensors."""
        memo: dict[int, Any] = {
            id(place): tensor for place, tensor in zip(self.rest.places, self.tensors, strict=True)
        }
        memo.update({id(each): each for each in self.rest.kept})
        return copy.deepcopy(self.rest.value, memo)


def _not_copied(value: Any, why: str) -> BadInput:
    return BadInput(
        "The tensors of a batch were asked for.",
        f"an object of the class {type(value).__name__} in it",
        why,
        "let copy.deepcopy copy it; or give a mapping of its tensors, and make the object in the model",
    )


class _Copying(TorchFunctionMode):
    """Puts something else in the place of each tensor that would be copied."""

    def __init__(self, instead: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._instead = instead

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._instead(args[0]) if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def is_object(value: Any) -> bool:
    """Tell whether a value is none of tensor, plain value, collection, module, generator and class."""
    others = (Tensor, tuple, list, Mapping, Apart, _Rest, type, nn.Module, *generator_classes())
    return type(value) not in PLAIN and not isinstance(value, others)


def apart(batch: Any) -> Any:
    """Return the same nesting with all objects taken apart, each once."""
    return map_chosen(is_object, once(Apart.of, id), batch)


def together(batch: Any) -> Any:
    """Return the same nesting with all objects put together, each once."""
    made = once(Apart.together, lambda value: id(value.rest))
    return map_chosen(lambda value: isinstance(value, Apart), made, batch)
