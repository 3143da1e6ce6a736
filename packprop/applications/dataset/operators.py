"""Curvature matrices as linear operators, of one batch or of a data set, and functions of their products.

An operator multiplies tensors (``@``) and converts to SciPy (``to_scipy()``). The entries of some parameters
stand side by side in one vector, in the order of ``torch.nn.utils.parameters_to_vector``. All operators are
symmetric. ``hessian``, ``ggn`` and ``block_diagonal`` keep a graph or blocks; ``of_data`` reads a data set for
each product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from packprop.applications.dataset.batches import Data
from packprop.applications.dataset.given import objective_of
from packprop.applications.dataset.products import DataProduct
from packprop.engine.curvature import (
    Eigenpairs,
    Matrix,
    Operator,
    Solution,
    SpectralDensity,
    Trace,
    block_diagonal,
    chosen_parameters,
    eigenvalues,
    ggn,
    hessian,
    solve,
    spectral_density,
    trace,
)
from packprop.engine.tensors import LossFunction, named_parameters

__all__ = [
    "Eigenpairs",
    "Operator",
    "Solution",
    "SpectralDensity",
    "Trace",
    "block_diagonal",
    "eigenvalues",
    "ggn",
    "hessian",
    "of_data",
    "solve",
    "spectral_density",
    "trace",
]


def of_data(
    model: nn.Module,
    loss: LossFunction | None,
    data: Data,
    matrix: Matrix = "ggn",
    *,
    damping: float = 0.0,
    parameters: Sequence[Tensor] | None = None,
    batch_size: int | None = None,
    memory: int | str | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Operator:
    """Return the GGN or the Hessian of a loss over a whole data set; a product reads the data once.

    The matrix belongs to one loss over all samples, whatever the sizes of the batches, like the quantities of
    ``packprop.compute``. The GGN is that of everything before the loss function (Schraudolph 2002). The model's
    and the data's random draws are the same in each reading, and leave your generators as they are.
    ``operator.readings`` counts readings. Each process multiplies by the matrix of its own data.

    Args:
        model: The model, in the mode (train or eval) that you want; you need not extend it.
        loss: As for ``compute``: ``loss(model(inputs), targets)``, or ``None`` if the model computes it.
        data: Data in any form of ``compute`` that packprop can read more than once.
        matrix: ``"ggn"`` or ``"hessian"``.
        damping: Added to the diagonal, in units of the curvature.
        parameters: The parameters of its rows and columns, each once; by default all that require gradients.
        batch_size: Samples in a batch, 128 by default; not for data that come in batches.
        memory: The most bytes of tensor storage that may be alive at once in a product, with the model, the
            graph of a batch, vectors and products. As many vectors as fit go through a batch at once.
        device: The device of batches; by default that of the model's parameters.
        progress: Show a bar for each reading on standard error, if that is a terminal.

    Raises:
        BadInput: For data that packprop can read only once, a parameter that occurs twice, requires no
            gradient or is none of the model's. Products raise it for a budget that is too small, and batches
            that do not work.
        PackpropError: Products raise it if samples meet in the model (batch normalisation in training mode),
            something is not twice differentiable, or parameters have changed since.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> H = of_data(model, nn.MSELoss(), (x, torch.zeros(2, 1)), "hessian", batch_size=1)
        >>> H @ torch.eye(2)
        tensor([[2., 2.],
                [2., 4.]])
    """
    asked = "operators.of_data(...) was called."
    objective = objective_of(asked, model, loss, device)
    own = [parameter for _, parameter in named_parameters(model)]
    trainable = [parameter for parameter in own if parameter.requires_grad]
    chosen = chosen_parameters(asked, trainable if parameters is None else parameters, own=own)
    objective = replace(objective, device=device or chosen[0].device)
    batches = objective.batches(data, batch_size)
    product = DataProduct(objective, batches, matrix, chosen, memory=memory, progress=progress)
    return Operator(chosen, product, damping, product.snapshots)
