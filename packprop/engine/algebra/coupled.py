"""The damped inverse of the blocks of a weight and of its bias together.

# NOTE [Weight and bias]
The gradients of one sample are ``s x^T`` for a weight and ``s`` for its bias, so the bias is one more column,
with the input 1. Inputs have means that are not zero: most of a bias's effect is that of some column of the
weight, and two separate blocks count this curvature twice. Martens and Grosse (2015), section 2.1, factor the
moment of the inputs with a 1 at their end. Here both parameters keep the eigenvectors and eigenvalues of their
own blocks. One number joins each pair of an eigenvector of the weight and one of the bias that share ``u_o``:

    M[o i, o] = r_i sqrt(D[o, i] b[o]),   r_i = sum x_i / sqrt(sum x_i^2 sum 1),

with D and b the eigenvalues, and x_i an input along the eigenvector i. If cotangents and inputs are
independent, as Kronecker factors assume, these are the entries of the true block. For each o the matrix is a
diagonal with one more row and column. r has at most length 1, by Cauchy and Schwarz, so the matrix is positive,
even if eigenvalues are drawn. Its damped inverse is exact, by the Schur complement of the diagonal.
``benchmarks/attribution`` measures what influence gains by it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from packprop.engine.algebra.kronecker import Eigen, combined, coordinates
from packprop.engine.tensors.autocast import outside_autocast


class Coupled(NamedTuple):
    """The inverse of a damped matrix of two parameters; see NOTE [Weight and bias].

    Args:
        weight: The block of the weight.
        bias: The block of the bias.
        damped: Eigenvalues of the weight with the damping ``[o, i]``.
        coupling: The entries between weight and bias ``[o, i]``.
        complement: Eigenvalues of the bias with the damping, less what the weight explains ``[o]``.
    """

    weight: Eigen
    bias: Eigen
    damped: Tensor
    coupling: Tensor
    complement: Tensor

    @outside_autocast
    def solve(self, weights: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply vectors ``[v, *p]`` of the weight and ``[v, o]`` of the bias by the inverse."""
        of_weight = coordinates("solve", self.weight, weights)
        of_bias = coordinates("solve", self.bias, biases)[..., 0].to(of_weight)
        explained = torch.einsum("oi,voi->vo", self.coupling / self.damped, of_weight)
        of_bias = ((of_bias - explained) / self.complement)[..., None]
        of_weight = of_weight.addcmul_(self.coupling, of_bias, value=-1).div_(self.damped)
        return combined(self.weight, of_weight, weights), combined(self.bias, of_bias, biases)


@outside_autocast
def coupled(weight: Eigen, bias: Eigen, damping: float) -> Coupled | None:
    """Return the inverse for a weight and its bias; ``None`` without correlations, or if blocks do not fit."""
    size = len(weight.vectors[0])
    if weight.correlations is None or len(bias.vectors) != 1 or bias.values.numel() != size:
        return None
    basis, own, values = weight.vectors[0], bias.vectors[0], bias.values.to(weight.values)
    if own.dim() == basis.dim() == 1:
        turned = values
    else:  # the diagonal of the bias's block in the basis of the weight
        overlap = (
            basis.mT if own.dim() == 1 else own.to(basis) if basis.dim() == 1 else basis.mT @ own.to(basis)
        )
        turned = overlap.square() @ values
    coupling = weight.correlations.to(weight.values) * (weight.values * turned[:, None]).sqrt()
    damped = weight.values + damping
    complement = turned + damping - (coupling.square() / damped).sum(1)
    return Coupled(weight, Eigen(turned, [basis]), damped, coupling, complement)
