"""Helpers of BackPACK: Kronecker products, vectors and lists, classes of modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from packprop.compat.custom_module.reduce_tuple import ReduceTuple
from tests.compat.programs import installed, mlp, near


@installed
def test_kronecker_products() -> None:
    from backpack.utils import kroneckers

    factors = [a @ a.T for a in (torch.randn(2, 2), torch.randn(3, 3), torch.randn(2, 2))]
    dense = torch.kron(torch.kron(factors[0], factors[1]), factors[2])
    near(kroneckers.kfacs_to_mat(factors), dense)
    matrix = torch.randn(12, 4)
    near(kroneckers.apply_kfac_mat_prod(factors, matrix), dense @ matrix)
    near(kroneckers.kfac_mat_prod(factors)(matrix[:, 0]), dense @ matrix[:, 0])
    for shift in (0.1, [0.1, 0.2, 0.3]):
        each = [shift] * 3 if isinstance(shift, float) else shift
        inverse = [torch.linalg.inv(f + s * torch.eye(len(f))) for f, s in zip(factors, each, strict=True)]
        expected = torch.kron(torch.kron(inverse[0], inverse[1]), inverse[2])
        near(kroneckers.apply_inv_kfac_mat_prod(factors, matrix, shift), expected @ matrix)
    singular = kroneckers.inv_kfacs([torch.diag(torch.tensor([0.0, 2.0]))])[0]
    near(singular.diagonal(), torch.tensor([1e8, 0.5]))
    rectangular = [torch.randn(2, 3), torch.randn(4, 2)]
    near(kroneckers.apply_kfac_mat_prod(rectangular, matrix[:6]), torch.kron(*rectangular) @ matrix[:6])
    assert [kroneckers.is_matrix(t) for t in (matrix, matrix[0], matrix[None])] == [True, False, False]
    assert [kroneckers.is_vector(t) for t in (matrix, matrix[0], matrix[0, 0])] == [False, True, False]
    with pytest.raises(ValueError, match="there are 3 factors"):
        kroneckers.inv_kfacs(factors, [0.1])
    with pytest.raises(ValueError, match="tensors of two axes"):
        kroneckers.kfacs_to_mat([torch.ones(2)])


@installed
def test_products_with_vectors_of_a_lower_precision() -> None:
    """Factors of a model in bfloat16 are in float32; its gradient is not, nor is the product with it."""
    from backpack.utils import kroneckers

    factors = [a @ a.T for a in (torch.randn(2, 2), torch.randn(3, 3))]
    dense, gradient = torch.kron(*factors), torch.randn(6, 1).bfloat16()
    found = kroneckers.apply_kfac_mat_prod(factors, gradient)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, (dense @ gradient.to(dense)).bfloat16())
    assert kroneckers.apply_inv_kfac_mat_prod(factors, gradient, 0.1).dtype == torch.bfloat16


@installed
def test_vectors_and_lists() -> None:
    from backpack.utils.convert_parameters import vector_to_parameter_list
    from backpack.utils.subsampling import subsample

    model = mlp()
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    for piece, p in zip(vector_to_parameter_list(vector, model.parameters()), model.parameters(), strict=True):
        assert torch.equal(piece, p)
        assert not piece.requires_grad
    with pytest.raises(ValueError, match="the parameters have 43"):
        vector_to_parameter_list(vector[1:], model.parameters())
    with pytest.raises(TypeError):
        vector_to_parameter_list([1.0], model.parameters())
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(subsample(x, dim=1, subsampling=[2, 0]), x[:, [2, 0]])
    assert subsample(x) is x


@installed
def test_classes_of_modules() -> None:
    from backpack.utils.hooks import no_op
    from backpack.utils.module_classification import is_loss, is_nll, is_no_op

    assert is_loss(nn.L1Loss())
    assert not is_nll(nn.L1Loss())
    assert is_nll(nn.MSELoss())
    assert [is_no_op(m) for m in (mlp(), nn.Linear(1, 1), ReduceTuple())] == [True, False, True]
    assert no_op(1, a=2) is None
