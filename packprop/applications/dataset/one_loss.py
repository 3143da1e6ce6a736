"""Refusals of batches whose losses are no parts of one loss over all samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from packprop.errors import PackpropError

ROUNDING = 4
"""The relative difference of factors on losses that counts as rounding, in units of their precision: 3 % in
bfloat16."""


@dataclass
class TermWeights:
    """Weights of terms in the losses of batches, times the terms of a batch; see NOTE [Weights of terms].

    Args:
        own: The smallest and the largest weight in all batches so far, then numbers that stand for options of
            the loss functions; empty without terms.
        of_more: Those in the first batch with its last sample twice; empty if they are not known.
        rounding: The relative difference that counts as rounding, in the precision of the loss.
    """

    own: list[float] = field(default_factory=list)
    of_more: list[float] = field(default_factory=list)
    rounding: float = 0.0

    def add(self, weights: Tensor, terms: float) -> None:
        """Add the weights of a batch ``[2 + o]``, whose loss was divided by ``terms``; 0 terms have none.

        Raises:
            PackpropError: If they are not those of the batches before.
        """
        found: list[float] = weights.tolist() if terms else []
        if all(map(math.isfinite, found)):
            self.rounding = max(self.rounding, ROUNDING * torch.finfo(weights.dtype).eps)
            if found:
                self.own = self.own or found
                self.require(found)

    def require_any_size(self) -> None:
        """Refuse further batches if the weights depend on the number of samples.

        Raises:
            PackpropError: If they do.
        """
        if self.of_more:
            self.require(self.of_more)

    def require(self, other: Sequence[float]) -> None:
        """Refuse other weights than these.

        Raises:
            PackpropError: If they differ by more than rounding.
        """
        same = [math.isclose(*each, rel_tol=self.rounding) for each in zip(self.own, other, strict=False)]
        if not all(same[2:]) or len(self.own) != len(other):
            raise not_one_loss(
                "an option of a loss function, such as weight or pos_weight",
                "it is another one in another batch or with the last sample twice: quantities would depend on "
                "the split of the data into batches",
                "give the same options in all batches; compute weights of classes from all of the data",
            )
        for before, now, is_same in zip(self.own, other, same, strict=True):
            if not is_same:
                raise not_one_loss(
                    "what follows the loss function",
                    f"it multiplies the loss by {now:.6g}, and by {before:.6g} in another batch or with the "
                    "last sample twice: quantities would depend on the split of the data into batches",
                    "leave the division to the loss function, reduction='mean' in place of reduction='sum' and "
                    "a division by the size of the batch; multiply by one number in all batches; and add the "
                    "losses of single samples as sums",
                )


def require_same_weights(weights: Sequence[TermWeights]) -> None:
    """Refuse the losses of ranks if their terms have other weights."""
    known = [each for each in weights if each.own]
    for each in known[1:]:
        each.require_any_size()
        known[0].require_any_size()
        known[0].require(each.own)


def two_reductions(first: str, second: str) -> PackpropError:
    """Return the error about batches that reduce their losses in two ways."""
    return not_one_loss(
        f"a loss that reduces by {first}, then by {second}",
        "there is no one loss over all samples that they are parts of",
        "use the same loss for every batch",
    )


def not_one_loss(where: str, why: str, instead: str) -> PackpropError:
    """Return an error about losses of batches."""
    return PackpropError("Quantities of a loss over several batches were asked for.", where, why, instead)
