"""Random projections of per-sample gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, get_args

import torch
from torch import Tensor

from packprop.engine.algebra.monoid import CAT
from packprop.engine.algebra.projections import Kind, Projection, projected
from packprop.errors import BadInput, require_number, require_seed
from packprop.extensions.arguments import require_one_of
from packprop.extensions.first_order import BatchGrad
from packprop.types import GRADIENT, Extension, Row


@dataclass(frozen=True, eq=False)
class Projected(Extension):
    """Random projection of the rows of ``grad_batch``, ``grad_batch_projected``: ``[n, d]``.

    Inner products of projected rows are those of the rows in expectation over seeds (Johnson and Lindenstrauss
    1984). Each parameter has a matrix of its own, which depends on the seed and its name. So the sum over
    parameters of ``grad_batch_projected`` is a projection of the whole gradient, and a store keeps this sum.

    - ``"rademacher"``: signs. The standard deviation of an inner product ``<g, h>`` is at most
      ``sqrt((|g|^2 |h|^2 + <g, h>^2) / d)``. Work grows with samples times entries times d; neither the matrix
      nor a gradient of a linear layer ever exists as a whole.
    - ``"gaussian"``: normal numbers, which take several times as long to make; the bound is the deviation.
    - ``"kronecker"``: a Kronecker product of two matrices of signs for each parameter, in place of one large
      matrix. It projects the factors of a gradient, and never forms the gradient: this takes a few percent of a
      pass. For gradients of rank one, about ``1 / a + 1 / b`` takes the place of ``1 / d``: d = a b, where a
      and b are nearly equal.

    Matrices are the same on every device and in every precision, up to rounding; see ``matrix``, and NOTE
    [Matrices of a seed] (``engine/algebra/projections.py``) for their entries. Sums use at least float32, and
    keep this precision.

    Args:
        of: The quantity to project: ``BatchGrad()``, with ``subsampling`` if it has one.
        dimension: Entries of a projected row, d; for ``"kronecker"`` best a product of two similar numbers.
        kind: ``"rademacher"``, ``"gaussian"`` or ``"kronecker"``.
        seed: Chooses the matrices.

    Raises:
        BadInput: If ``of`` is anything else, a number is not whole or too small, or ``kind`` is unknown.
    """

    of: Extension = field(default_factory=BatchGrad)
    dimension: int = 1024
    kind: Kind = "rademacher"
    seed: int = 0
    subsampling: Sequence[int] | None = field(default=None, init=False, repr=False)
    savefield = "grad_batch_projected"
    cheaper: ClassVar[str] = 'Projected(..., kind="kronecker")'

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        asked = (
            f"Projected({self.of!r}, {self.dimension!r}, kind={self.kind!r}, seed={self.seed!r}) was asked for."
        )
        if not isinstance(self.of, BatchGrad) or self.of.per != "sample":
            raise BadInput(
                asked,
                "the quantity to project",
                "packprop projects only per-sample gradients",
                "write Projected(BatchGrad(), ...)",
            )
        require_number(asked, "dimension", self.dimension, "number of entries")
        require_seed(asked, self.seed)
        require_one_of(asked, "kind", self.kind, get_args(Kind))
        object.__setattr__(self, "subsampling", self.of.subsampling)
        if self.kind == "kronecker":
            object.__setattr__(self, "cheaper", "")

    @property
    def projection(self) -> Projection:
        """The matrices."""
        return Projection(self.kind, self.dimension, self.seed)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The gradient's rows, projected."""
        statistic = functools.partial(projected, projection=self.projection)
        return (Row(GRADIENT, statistic, over_n=CAT[0], of_parameter=True, condenses=True),)

    def matrix(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Return the matrix that multiplies gradients of a parameter, ``[d, *p]``.

        ``torch.tensordot(grad_batch, matrix, dims=[[1, ...], [1, ...]])`` is ``grad_batch_projected``.

        Args:
            name: Name of the parameter in the module that was called.
            shape: Its shape.
            dtype: Precision of the entries.
            device: The device to make them on.
        """
        return self.projection.matrix(name, shape, torch.empty((), dtype=dtype, device=device))
