"""Products with the blocks of curvature matrices, saved as one function for each parameter.

A function takes vectors ``[v, *p]``, or a single ``[*p]``, and returns their products with the block of its
parameter, for the loss as reduced. It holds the graph of the forward pass, so ``backward()`` keeps the graph.
It stays valid until you delete it (``del parameter.hmp``) or the next pass overwrites it. It does not run the
model again, so there is no random state to restore. It raises an error if you have changed a parameter in place
that it reads: mostly parameters downstream of its own. So you may update the parameters one by one, each after
its own product, from the input to the output.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, get_args

from packprop.engine.algebra.monoid import SINGLE
from packprop.engine.curvature.block_products import Matrix, Modify, block_products
from packprop.extensions.arguments import require_one_of
from packprop.types import GRAPH, Extension, Row


@dataclass(frozen=True, eq=False)
class _Products(Extension):
    """The shared part of the three: one function for each parameter, and the attribute as an argument."""

    savefield: str = ""  # type: ignore[misc]  # a choice of each instance here
    matrix: ClassVar[Matrix] = "hessian"
    keeps_graph: ClassVar[bool] = True
    of_batch: ClassVar[bool] = True

    @property
    def rows(self) -> tuple[Row, ...]:
        """One function for each parameter."""
        modify: Modify = getattr(self, "modify", "clip")
        products = functools.partial(block_products, matrix=self.matrix, modify=modify)
        return (Row(GRAPH, products, over_v=SINGLE, over_n=SINGLE),)


@dataclass(frozen=True, eq=False)
class HMP(_Products):
    """Product with the Hessian's block, ``hmp``.

    Args:
        savefield: The attribute that the function is saved in.
    """

    savefield: str = "hmp"  # type: ignore[misc]  # as above


@dataclass(frozen=True, eq=False)
class GGNMP(_Products):
    """Product with the block of the generalized Gauss-Newton matrix, ``ggnmp`` (Schraudolph 2002).

    Args:
        savefield: The attribute that the function is saved in.
    """

    savefield: str = "ggnmp"  # type: ignore[misc]  # as above
    matrix: ClassVar[Matrix] = "ggn"


@dataclass(frozen=True, eq=False)
class PCHMP(_Products):
    """Product with the block of the positive-curvature Hessian, ``pchmp`` (Chen et al. 2018).

    This is the GGN plus the curvature of each elementwise nonlinearity, without negative entries (``"clip"``)
    or with positive ones in their place (``"abs"``). packprop refuses the pass if another nonlinearity
    lies between a parameter and the loss: the matrix is not defined there.

    Args:
        savefield: The attribute that the function is saved in.
        modify: The treatment of negative curvature.
    """

    savefield: str = "pchmp"  # type: ignore[misc]  # as above
    modify: Modify = "clip"
    matrix: ClassVar[Matrix] = "positive"
    of_batch: ClassVar[bool] = False  # it needs the samples at each nonlinearity

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        asked = f"PCHMP(modify={self.modify!r}) was asked for."
        require_one_of(asked, "modify", self.modify, get_args(Modify))
