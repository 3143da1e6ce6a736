"""Refusals of batches whose losses are no parts of one loss over all samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from packprop.errors import PackpropError

ROUNDING = 4
"""The relative difference of factors on losses that counts as rounding, in units of their precision: 3 % in
bfloat16."""


TERMS = "terms"
"""The name of the weights of terms, among those of the options of loss functions."""


@dataclass
class TermWeights:
    """Weights of terms in the losses of batches, times the terms of a batch; see NOTE [Weights of terms].

    Args:
        own: Under ``TERMS``, the smallest and the largest weight in all batches so far; numbers that stand for
            the options of each loss function; empty without terms.
        of_more: Those in the first batch with its last sample twice; empty if they are not known.
        rounding: The relative difference that counts as rounding, in the precision of the loss.
    """

    own: dict[str, Any] = field(default_factory=dict)
    of_more: dict[str, Any] = field(default_factory=dict)
    rounding: float = 0.0

    def add(self, weights: Mapping[str, Tensor], terms: float) -> None:
        """Add the weights of a batch, whose loss was divided by ``terms``; without terms it has none.

        Raises:
            PackpropError: If they are not those of the batches before.
        """
        found = {name: each.tolist() for name, each in weights.items()} if terms else {}
        if found and all(map(math.isfinite, found[TERMS])):
            self.rounding = max(self.rounding, ROUNDING * torch.finfo(weights[TERMS].dtype).eps)
            self.require(found)
            self.own = {**found, **self.own}

    def require_any_size(self) -> None:
        """Refuse further batches if the weights depend on the number of samples.

        Raises:
            PackpropError: If they do.
        """
        if self.of_more:
            self.require(self.of_more)

    def require(self, other: Mapping[str, Any]) -> None:
        """Refuse other weights, or options, than these.

        Raises:
            PackpropError: If they differ by more than rounding.
        """
        for name in self.own.keys() & other.keys() - {TERMS}:
            for least, most, least_now, most_now in zip(*self.own[name], *other[name], strict=True):
                varies = least != most or least_now != most_now  # an option of each sample
                if not varies and not self._are_close(least, least_now):
                    raise not_one_loss(
                        "an option of a loss function, such as weight or pos_weight",
                        "it is another one in another batch or with the last sample twice: quantities would "
                        "depend on the split of the data into batches",
                        "give the same options in all batches; compute weights of classes from all of the data",
                    )
        for before, now in zip(self.own.get(TERMS, ()), other.get(TERMS, ()), strict=False):
            if not self._are_close(before, now):
                raise not_one_loss(
                    "what follows the loss function",
                    f"it multiplies the loss by {now:.6g}, and by {before:.6g} in another batch or with the "
                    "last sample twice: quantities would depend on the split of the data into batches",
                    "leave the division to the loss function, reduction='mean' in place of reduction='sum' and "
                    "a division by the size of the batch; multiply by one number in all batches; and add the "
                    "losses of single samples as sums",
                )

    def _are_close(self, one: float, other: float) -> bool:
        return math.isclose(one, other, rel_tol=self.rounding)


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
