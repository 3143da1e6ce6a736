"""Conjugate gradients for many right-hand sides at once; each step takes one product with a block of vectors.

All systems share the matrix, so a step looks for every solution in the space that the directions of all systems
span (block conjugate gradients: O'Leary 1980). A step costs a product with ``m`` directions, which one reading
of the data computes for a whole block. Directions of similar systems become nearly dependent, which breaks the
plain recurrence. So packprop makes them orthonormal, and drops directions that are only rounding (Ji and Li
2017, "A breakdown-free block conjugate gradient method"). Converged systems give no more directions, so blocks
become smaller.

A few systems search a narrow space, and take many steps. Random right-hand sides in addition to them widen it;
packprop does not keep their solutions.

A step solves the system in the space of its directions, ``P A P^T``: its eigenvalues are between those of A. A
negative eigenvalue beyond rounding proves that A is not positive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from packprop.engine.tensors.autocast import outside_autocast

Rows = Callable[[Tensor], Tensor]
"""A function from vectors ``[m, p]`` to products with a symmetric matrix ``[m, p]``."""

BLOCK = 2**20
"""Entries of a row that are converted to double precision at once."""


class NotPositive(ArithmeticError):
    """Raised if the matrix has a negative eigenvalue.

    Args:
        value: A negative value of ``v^T A v / |v|^2``: the least eigenvalue is at most this.
        largest: The largest such value so far.
    """

    def __init__(self, value: float, largest: float) -> None:
        super().__init__(f"{value:.3g} beside {largest:.3g}")
        self.value, self.largest = value, largest


class ConjugateGradients:
    """Solutions ``[q, p]`` of ``A x = b`` for many b, one step at a time.

    The error of each solution, in the norm that A gives, does not grow from step to step.

    Args:
        right: The right-hand sides b ``[q, p]``.
        precondition: Products with an approximate inverse of A, symmetric and positive; ``None`` for none.
        tolerance: A system has converged if ``|b - A x|`` is at most this much of ``|b|``.
        beside: The number of random right-hand sides that widen the search space.

    Attributes:
        solutions: The solutions so far ``[q, p]``.
        steps: The number of products with blocks.
    """

    def __init__(self, right: Tensor, precondition: Rows | None, tolerance: float, beside: int = 0) -> None:
        self._norms = _norms(right)
        drawn = torch.randn(beside, right.shape[1], generator=torch.Generator().manual_seed(0), device="cpu")
        self._rests = torch.cat([right, drawn.to(right)])
        self._precondition = precondition or torch.clone
        self._tolerance = tolerance
        self.solutions = torch.zeros_like(right)
        self.steps, self._largest = 0, float("-inf")
        self._directions: Tensor | None = None

    @property
    def residuals(self) -> Tensor:
        """Return ``|b - A x| / |b|`` for each system ``[q]``, in double precision; 0 if b is zero."""
        shares = _norms(self._rests[: len(self._norms)]) / self._norms
        found: Tensor = torch.where(self._norms > 0, shares, 0.0)
        return found

    @property
    def is_done(self) -> bool:
        """Tell whether all systems have converged, or no direction is left that is more than rounding."""
        if self._directions is not None and not len(self._directions):
            return True
        return self._are_solved

    def step(self, product: Rows) -> None:
        """Take one product with a block of directions ``[m, p]``, and improve all solutions.

        Raises:
            NotPositive: If A turns out to have a negative eigenvalue; this changes nothing.
        """
        if self._directions is None:
            self._directions = _orthonormal(self._precondition(self._rests[self._open]))
        directions = self._directions
        if not len(directions):
            return
        self._improve(directions, product(directions))

    @outside_autocast
    def _improve(self, directions: Tensor, products: Tensor) -> None:
        """Improve all solutions along directions, given their products; choose the next directions."""
        inner = _inner(directions, products)
        values, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
        self._largest = max(self._largest, float(values[-1]))
        digit = 10 * len(values) ** 0.5 * torch.finfo(products.dtype).eps
        if float(values[0]) < -digit * self._largest:  # products round by digits of the whole matrix
            raise NotPositive(float(values[0]), self._largest)
        kept = values > digit * values.abs().max()
        inverse = (vectors[:, kept] / values[kept]) @ vectors[:, kept].mT
        share = inverse @ _inner(directions, self._rests)
        self.solutions.addmm_(share[:, : len(self.solutions)].mT.to(directions), directions)
        self._rests.addmm_(share.mT.to(directions), products, alpha=-1)
        self.steps += 1
        if self._are_solved:
            self._directions = directions[:0]
            return
        following = self._precondition(self._rests[self._open])
        for _ in range(2):  # normalising small directions brings back parts of earlier ones
            back = inverse @ _inner(products, following)
            following.addmm_(back.mT.to(directions), directions, alpha=-1)
            following = _orthonormal(following)
        self._directions = following

    def state(self) -> dict[str, Tensor]:
        """Return the state from which ``restore`` continues."""
        assert self._directions is not None
        tensors = {"norms": self._norms, "rests": self._rests, "solutions": self.solutions}
        numbers = {"steps": self.steps, "largest": self._largest}
        kept = {name: torch.tensor(number, device="cpu") for name, number in numbers.items()}
        return {**tensors, "directions": self._directions, **kept}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a state of the same systems."""
        like = self.solutions
        self._norms = state["norms"].to(like.device)
        self._rests, self.solutions = state["rests"].to(like), state["solutions"].to(like)
        self._directions, self.steps = state["directions"].to(like), int(state["steps"])
        self._largest = float(state.get("largest", float("-inf")))

    @property
    def _are_solved(self) -> bool:
        return not bool((self.residuals > self._tolerance).any())

    @property
    def _open(self) -> Tensor:
        """Mask of the systems that still give directions; random ones always do."""
        beside = self._norms.new_ones(len(self._rests) - len(self._norms), dtype=torch.bool)
        return torch.cat([self.residuals > self._tolerance, beside])


def _norms(rows: Tensor) -> Tensor:
    """Return lengths of rows, in double precision."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """Return inner products of rows ``[m, n]``, added up in double precision."""
    found = left.new_zeros(len(left), len(right), dtype=torch.float64)
    for first, second in zip(left.split(BLOCK, 1), right.split(BLOCK, 1), strict=True):
        found += first.double() @ second.double().mT
    return found


@outside_autocast
def _orthonormal(rows: Tensor) -> Tensor:
    """Return orthonormal rows that span some rows, without directions that are only rounding."""
    norms = _norms(rows)
    rows = rows[norms > 0] / norms[norms > 0].to(rows)[:, None]
    least = torch.finfo(rows.dtype).eps
    for cut in (len(rows) * max(least**2 * 100, torch.finfo(torch.float64).eps * 10), 0.0):
        if not len(rows):
            break
        values, vectors = torch.linalg.eigh(_inner(rows, rows))
        kept = values > cut
        rows = (vectors[:, kept] / values[kept].sqrt()).mT.to(rows) @ rows
    return rows
