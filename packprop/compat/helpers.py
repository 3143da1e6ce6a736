"""Helpers of BackPACK's ``utils``: Kronecker products, lists of parameters, checks by autograd alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from packprop.compat.hessianfree import ggn_vector_product
from packprop.engine.algebra import eigh
from packprop.engine.tensors import result_dtype
from packprop.errors import BadInput
from packprop.examples import MNIST_DEVIATION, MNIST_MEAN, load_mnist

SMALLEST_EIGENVALUE = 1e-8
"""Inverses of eigenvalues are bounded by the inverse of this number."""


def vector_to_parameter_list(vec: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Cut a vector into views with the parameters' shapes; inverse of ``torch.nn.utils.parameters_to_vector``.

    Args:
        vec: ``[p]``, the entries of all parameters.
        parameters: Tensors that give the shapes; they do not change.

    Raises:
        TypeError: If ``vec`` is no tensor.
        BadInput: If there are too few or too many entries; a ``ValueError``.
    """
    if not isinstance(vec, Tensor):
        raise TypeError(f"vec must be a tensor, not {type(vec).__name__}")
    shapes = [parameter.shape for parameter in parameters]
    sizes = [shape.numel() for shape in shapes]
    if vec.numel() != sum(sizes):
        raise BadInput(
            "vector_to_parameter_list(vec, parameters) was called.",
            f"vec with {vec.numel()} entries",
            f"the parameters have {sum(sizes)} entries",
            "give one entry for each entry of the parameters",
        )
    return [piece.view(shape).detach() for piece, shape in zip(vec.split(sizes), shapes, strict=True)]


# Kronecker products


def is_matrix(tensor: Tensor) -> bool:
    """Tell whether a tensor has two axes."""
    return tensor.dim() == 2


def is_vector(tensor: Tensor) -> bool:
    """Tell whether a tensor has one axis."""
    return tensor.dim() == 1


def _check_matrices(factors: Sequence[Tensor]) -> None:
    if not factors or not all(map(is_matrix, factors)):
        raise BadInput(
            "A Kronecker product was asked for.",
            f"factors of shapes {[list(factor.shape) for factor in factors]}",
            "a Kronecker product takes matrices",
            "give one or more tensors of two axes",
        )


def kfacs_to_mat(factors: Sequence[Tensor]) -> Tensor:
    """Return the matrix ``A kron B kron ...``."""
    _check_matrices(factors)
    return functools.reduce(two_kfacs_to_mat, factors)


def two_kfacs_to_mat(A: Tensor, B: Tensor) -> Tensor:
    """Return the matrix ``A kron B``."""
    _check_matrices([A, B])
    return torch.kron(A.contiguous(), B.contiguous())


def kfac_mat_prod(factors: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the map ``M -> (A kron B kron ...) M`` for matrices ``[i, k]`` and vectors ``[i]``."""
    _check_matrices(factors)

    def multiply(mat: Tensor) -> Tensor:
        columns = 1 if mat.dim() == 1 else mat.shape[-1]
        precision = functools.reduce(torch.promote_types, (factor.dtype for factor in factors), mat.dtype)
        product = mat.to(precision).reshape(*(factor.shape[1] for factor in factors), columns)
        for axis, factor in enumerate(factors):
            product = torch.tensordot(factor.to(precision), product, ([1], [axis])).movedim(0, axis)
        product = product.reshape(-1) if mat.dim() == 1 else product.reshape(-1, columns)
        return product.to(result_dtype(mat, product))

    return multiply


def apply_kfac_mat_prod(factors: Sequence[Tensor], mat: Tensor) -> Tensor:
    """Return ``(A kron B kron ...) M``."""
    return kfac_mat_prod(factors)(mat)


def inv_kfacs(factors: Sequence[Tensor], shift: float | Sequence[float] | None = None) -> list[Tensor]:
    """Return ``(A + a I)^-1, (B + b I)^-1, ...`` of symmetric factors, with eigenvalues bounded by 1e8.

    Args:
        factors: Symmetric matrices.
        shift: A number to add to all diagonals, or one number for each; ``None`` for none.

    Raises:
        BadInput: If a factor is no matrix, or there are not as many shifts as factors; a ``ValueError``.
    """
    _check_matrices(factors)
    shifts = [shift or 0.0] * len(factors) if shift is None or isinstance(shift, (int, float)) else list(shift)
    if len(shifts) != len(factors):
        raise BadInput(
            "Inverses of Kronecker factors were asked for.",
            f"{len(shifts)} shifts",
            f"there are {len(factors)} factors",
            "give one number for all, or one for each",
        )
    bound = 1 / SMALLEST_EIGENVALUE
    inverses = []
    for factor, each in zip(factors, shifts, strict=True):
        values, vectors = eigh(factor)
        inverses.append((vectors * (1 / (values + each)).clamp(-bound, bound)) @ vectors.mT)
    return inverses


def inv_kfac_mat_prod(
    factors: Sequence[Tensor], shift: float | Sequence[float] | None = None
) -> Callable[[Tensor], Tensor]:
    """Return the map ``M -> ((A + a I)^-1 kron (B + b I)^-1 kron ...) M``."""
    return kfac_mat_prod(inv_kfacs(factors, shift))


def apply_inv_kfac_mat_prod(
    factors: Sequence[Tensor], mat: Tensor, shift: float | Sequence[float] | None = None
) -> Tensor:
    """Return ``((A + a I)^-1 kron (B + b I)^-1 kron ...) M``."""
    return inv_kfac_mat_prod(factors, shift)(mat)


# Examples


def load_mnist_dataset() -> Dataset[tuple[Tensor, ...]]:
    """Load MNIST's training images ``[1, 28, 28]``, of mean 0 and standard deviation 1, with their classes."""
    images, classes = load_mnist()
    return TensorDataset((images.unsqueeze(1) / 255 - MNIST_MEAN) / MNIST_DEVIATION, classes)


def autograd_diag_ggn_exact(
    X: Tensor, y: Tensor, model: nn.Module, loss_function: nn.Module, idx: Sequence[int] | None = None
) -> Tensor:
    """Return the diagonal of the generalized Gauss-Newton matrix, by one product with it for each entry.

    Args:
        X: Inputs.
        y: Targets.
        model: The model; the matrix is that of its trainable parameters, in the order of ``parameters()``.
        loss_function: The loss.
        idx: Indices of entries; ``None`` for all.

    Returns:
        ``[p]``, or one entry for each index.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = sum(parameter.numel() for parameter in parameters)
    output = model(X)
    loss = loss_function(output, y)
    entries = []
    for place in range(total) if idx is None else idx:
        unit = torch.zeros(total, dtype=loss.dtype, device=loss.device)
        unit[place] = 1.0
        product = ggn_vector_product(loss, output, model, vector_to_parameter_list(unit, parameters))
        entries.append(torch.cat([piece.reshape(-1) for piece in product])[place])
    return torch.stack(entries)
