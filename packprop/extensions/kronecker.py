"""Kronecker-factored curvature.

# NOTE [Kronecker factors]
A weight's block is approximated by ``B kron A`` in the order of its entries ``[o, i]``, returned as
``[B, A]`` (grouped convolutions: ``B`` over all output channels, ``A`` averaged over groups).
``B = sum_v sum_n s s^T`` is ``[o, o]`` and carries the scale of the loss as reduced;
``A = 1/N sum_n x x^T`` is ``[i, i]``. A bias, and every parameter that no input multiplies matrix-wise (scales
and shifts of normalisation, raw parameters), is a block of its own ``[B]``, exact in its seed:
``B = sum_v sum_n j j^T`` with j the gradient of a sample.

Where a weight is shared over positions s (pixels, time steps):
``"mixed"``: ``A`` sums ``x x^T`` over positions, ``B`` takes signals summed over positions, as BackPACK does;
``"expand"``: every position counts as a sample: ``A`` averages over positions, ``B`` sums ``s s^T`` over them;
``"reduce"``: inputs are averaged, signals summed over positions first (both Eschenhagen et al. 2023).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor

from packprop.errors import BadInput
from packprop.extensions.sampled import Sampled
from packprop.statistics import Approximation, input_gram, signal_gram
from packprop.types import INPUTS, Row


@dataclass(frozen=True, eq=False)
class KFAC(Sampled):
    """Kronecker factors of the GGN from sampled columns, ``kfac``: ``[B, A]`` or ``[B]``.

    The method is that of Martens and Grosse (2015) and, for convolutions, of Grosse and Martens (2016).
    See NOTE [Kronecker factors] for conventions and scales. Both factors are added up in at least float32 and
    rounded to the parameter's precision once.

    Args:
        mc_samples: Draws for each sample of the batch.
        subsampling: Indices of samples; B is their sum at the scale of the full batch, A their mean.
        generator: Makes the draws repeatable; the global random state is left alone then.
        approximation: What is done with weights that are shared over positions.
    """

    approximation: Approximation = "mixed"
    savefield = "kfac"

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        super().__post_init__()
        if self.approximation not in get_args(Approximation):
            raise BadInput(
                f"KFAC(approximation={self.approximation!r}) was asked for.",
                "approximation",
                "it is not one of those that are known",
                f"choose from {', '.join(map(repr, get_args(Approximation)))}",
            )

    @property
    def rows(self) -> tuple[Row, ...]:
        """Second moments of signals and of inputs."""
        signals = functools.partial(signal_gram, approximation=self.approximation)
        inputs = functools.partial(input_gram, approximation=self.approximation)
        return (Row(self.seed, signals), Row(INPUTS, inputs, degree=0))

    def finish(self, values: list[Any], samples: int) -> list[Tensor]:
        """``B`` as it is; ``A`` divided by the number of samples."""
        signals, inputs = values
        return [signals] if inputs is None else [signals, inputs / samples]
