"""Jacobians of the model's output in the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

from torch import Tensor

from packprop.engine.algebra.monoid import CAT
from packprop.engine.algebra.statistics import per_sample_grad
from packprop.errors import BadInput
from packprop.types import Extension, Row, Seed


@dataclass(frozen=True, eq=False)
class BatchJacobian(Extension):
    """Jacobian of each sample's output, ``jac_batch``: ``[n, c, *p]``.

    The output is the return value of the extended module. The loss, or any other reduction that you call
    ``backward()`` on, does not enter the result. Sums over positions use at least float32; packprop rounds each
    row to the parameter's precision once.

    Args:
        outputs: The entries of a sample's flattened output to take, in this order, so that you can compute a
            Jacobian in pieces; ``None`` for all.
        subsampling: Indices of samples; they come in this order.
    """

    outputs: Sequence[int] | None = None
    subsampling: Sequence[int] | None = None
    cheaper: ClassVar[str] = "BatchJacobian(outputs=...) for some outputs"
    rounded: ClassVar[bool] = True
    savefield = "jac_batch"

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        super().__post_init__()
        if self.outputs is not None and (
            not len(self.outputs)
            or any(isinstance(entry, bool) or not isinstance(entry, Integral) for entry in self.outputs)
        ):
            raise BadInput(
                f"{self.name}(outputs={self.outputs!r}) was asked for.",
                "outputs",
                "it is not a list of at least one output index",
                "give whole numbers, as in outputs=[0, 3]",
            )

    @property
    def rows(self) -> tuple[Row, ...]:
        """Gradients of single output entries."""
        entries = None if self.outputs is None else tuple(map(int, self.outputs))
        seed = Seed("jacobian", entries=entries)
        return (Row(seed, per_sample_grad, over_n=CAT[1], over_v=CAT[0], degree=0),)

    def finish(self, values: list[Any], samples: int) -> Tensor:
        """Move the samples to the first axis."""
        jacobians: Tensor = values[0]
        return jacobians.transpose(0, 1)
