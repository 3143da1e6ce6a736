"""Linear operators against dense matrices, and SciPy's solvers on them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.sparse.linalg import LinearOperator, cg, eigsh
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import packprop
from packprop import extensions
from packprop.engine.algebra import kronecker
from packprop.engine.curvature import operators
from packprop.engine.curvature.operators import Operator
from packprop.errors import BadInput, PackpropError
from tests.cases.models.sharing import two_modules_one_weight
from tests.references.running import assert_near
from tests.selection import one_in

N = 5
DTYPES = [torch.float64, torch.float32]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))


def tied() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), two_modules_one_weight(), nn.Linear(3, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {"plain": plain, "tied": tied}


class Setting:
    """A model with a batch, whose matrices are known entry by entry."""

    def __init__(self, name: str, dtype: torch.dtype, subset: bool) -> None:
        torch.manual_seed(0)
        self.model = MODELS[name]().to(dtype)
        self.x = torch.randn(N, 3, dtype=dtype)
        self.y = torch.randint(3, (N,))
        self.parameters = list(self.model.parameters())[:: 2 if subset else 1]
        self.size = sum(p.numel() for p in self.parameters)

    def graph(self) -> tuple[Tensor, Tensor]:
        outputs = self.model(self.x)
        return outputs, F.cross_entropy(outputs, self.y)

    def loss(self) -> Tensor:
        return self.graph()[1]

    def rows(self, outputs: Tensor) -> Tensor:
        found = []
        for entry in outputs.flatten():
            slopes = torch.autograd.grad(
                entry, self.parameters, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            found.append(torch.cat([slope.flatten() for slope in slopes]))
        return torch.stack(found)

    def hessian(self) -> Tensor:
        slopes = torch.autograd.grad(self.loss(), self.parameters, create_graph=True)
        return self.rows(torch.cat([slope.flatten() for slope in slopes]))

    def ggn(self) -> Tensor:
        outputs, _ = self.graph()
        at = outputs.detach()
        middle = torch.autograd.functional.hessian(
            lambda f: F.cross_entropy(f.view_as(at), self.y), at.flatten()
        )
        jacobian = self.rows(outputs)
        return jacobian.T @ middle @ jacobian


def each_setting(function: Any) -> Any:
    for name, values in (("subset", [False, True]), ("dtype", DTYPES), ("name", list(MODELS))):
        function = pytest.mark.parametrize(name, values, ids=str)(function)
    return function


@one_in(3)
@each_setting
def test_products_are_those_of_the_dense_matrix(name: str, dtype: torch.dtype, subset: bool) -> None:
    setting = Setting(name, dtype, subset)
    pairs = [
        (operators.hessian(setting.loss, setting.parameters), setting.hessian()),
        (operators.hessian(setting.loss(), setting.parameters), setting.hessian()),
        (operators.ggn(setting.graph, setting.parameters), setting.ggn()),
        (operators.ggn(setting.graph(), setting.parameters), setting.ggn()),
        (
            operators.ggn(setting.graph, setting.parameters, damping=0.5),
            setting.ggn() + 0.5 * torch.eye(setting.size, dtype=dtype),
        ),
    ]
    for operator, dense in pairs:
        assert operator.shape == dense.shape == (setting.size, setting.size)
        assert operator.dtype == dtype
        vectors = torch.randn(setting.size, 3, dtype=dtype)
        assert_near(operator @ vectors, dense @ vectors, "many", TOLERANCE[dtype])
        assert_near(operator @ vectors[:, 0], dense @ vectors[:, 0], "one", TOLERANCE[dtype])
        array = operator.to_scipy()
        assert isinstance(array, LinearOperator)
        for product in (array.matmat, array.rmatmat):
            assert_near(torch.tensor(product(vectors.numpy())), dense @ vectors, "array", TOLERANCE[dtype])
        found = array @ vectors[:, 0].numpy()
        assert found.dtype == vectors.numpy().dtype
        assert_near(torch.tensor(found), dense @ vectors[:, 0], "array", TOLERANCE[dtype])


@each_setting
def test_conjugate_gradients_solve_a_newton_step(name: str, dtype: torch.dtype, subset: bool) -> None:
    setting = Setting(name, dtype, subset)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(setting.loss(), setting.parameters)])
    operator = operators.ggn(setting.graph, setting.parameters, damping=0.1)
    accuracy = TOLERANCE[dtype] / 10
    step, info = cg(operator.to_scipy(), gradient.numpy(), rtol=accuracy)
    assert info == 0
    expected = torch.linalg.solve(setting.ggn() + 0.1 * torch.eye(setting.size, dtype=dtype), gradient)
    assert_near(torch.tensor(step), expected, "step", 10 * TOLERANCE[dtype])


@one_in(2)
@each_setting
def test_lanczos_finds_the_largest_eigenvalues(name: str, dtype: torch.dtype, subset: bool) -> None:
    setting = Setting(name, dtype, subset)
    operator = operators.hessian(setting.loss, setting.parameters)
    values = eigsh(operator.to_scipy(), k=3, which="LA", return_eigenvectors=False)
    expected = torch.linalg.eigvalsh(setting.hessian())[-3:]
    assert_near(torch.tensor(values).sort().values, expected, "eigenvalues", 10 * TOLERANCE[dtype])


def test_entries_stand_where_torch_puts_them() -> None:
    setting = Setting("plain", torch.float64, False)
    vector = parameters_to_vector(setting.parameters).detach()
    pieces = packprop.products.hvp(
        setting.loss, setting.parameters, [p.detach().clone() for p in setting.parameters]
    )
    operator = operators.hessian(setting.loss, setting.parameters)
    assert_near(operator @ vector, parameters_to_vector(pieces), "H p")


def factored(dtype: torch.dtype, *asked: Any) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.ConvTranspose2d(2, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)]
    model = packprop.extend(nn.Sequential(*layers)).to(dtype)
    loss = packprop.extend(nn.CrossEntropyLoss())
    with packprop.backpack(*asked):
        loss(model(torch.randn(N, 2, 2, 2, dtype=dtype)), torch.randint(3, (N,))).backward()
    return model


def blocks_of(operator: Operator) -> Tensor:
    return operator @ torch.eye(operator.shape[0], dtype=operator.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_ekfac_and_their_damped_inverse(dtype: torch.dtype) -> None:
    parameters = list(factored(dtype, extensions.EKFAC(fisher="exact")).parameters())
    saved = [p.ekfac for p in parameters]
    expected = torch.block_diag(*map(kronecker.dense, saved))
    operator = operators.block_diagonal(parameters, saved, damping=0.1)
    eye = torch.eye(len(expected), dtype=dtype)
    assert_near(blocks_of(operator), expected + 0.1 * eye, "blocks", TOLERANCE[dtype])
    inverses = [kronecker.inverse(block, 0.1) for block in saved]
    inverse = operators.block_diagonal(parameters, inverses)
    assert_near(blocks_of(inverse) @ blocks_of(operator), eye, "inverse", 10 * TOLERANCE[dtype])
    vector = torch.randn(len(eye), dtype=dtype)
    preconditioned, info = cg(operator.to_scipy(), vector.numpy(), M=inverse.to_scipy(), maxiter=3, rtol=1e-3)
    assert info == 0
    assert_near(torch.tensor(preconditioned), inverse @ vector, "one step is enough", 1e-2)


def test_blocks_of_lists_of_factors() -> None:
    model = factored(torch.float64, extensions.KFLR())
    head = list(model[-1].parameters())
    operator = operators.block_diagonal(head, [p.kflr for p in head])
    expected = torch.block_diag(*(kronecker.dense(p.kflr) for p in head))
    assert_near(blocks_of(operator), expected, "blocks")
    inverse = operators.block_diagonal(head, [kronecker.inverse(kronecker.eigen(p.kflr), 0.3) for p in head])
    eye = torch.eye(len(expected), dtype=expected.dtype)
    assert_near(blocks_of(inverse), torch.linalg.inv(expected + 0.3 * eye), "inverse")


def test_blocks_must_fit() -> None:
    model = factored(torch.float64, extensions.KFLR(), extensions.EKFAC())
    weight, bias = model[-1].weight, model[-1].bias
    with pytest.raises(BadInput, match="1 blocks"):
        operators.block_diagonal([weight, bias], [weight.kflr])
    with pytest.raises(BadInput, match=r"shape \[3\]"):
        operators.block_diagonal([weight, bias], [weight.ekfac, weight.ekfac])
    with pytest.raises(BadInput, match=r"another order than \[o, i\]"):
        operators.block_diagonal([weight.mT], [weight.kflr])
    with pytest.raises(BadInput, match="counted twice"):
        operators.block_diagonal([bias, bias], [bias.kflr, bias.kflr])


def test_a_model_that_draws_is_one_operator() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(2, (6,))
    operator = operators.hessian(lambda: F.cross_entropy(model(x), y), list(model.parameters()))
    vector = torch.randn(operator.shape[0], dtype=torch.float64)
    assert torch.equal(operator @ vector, operator @ vector)
    dense = blocks_of(operator)
    assert_near(dense, dense.mT, "symmetric")


def test_old_values_and_freed_graphs_are_refused() -> None:
    setting = Setting("plain", torch.float64, True)
    operator = operators.ggn(setting.graph, setting.parameters)
    vector = torch.ones(setting.size, dtype=torch.float64)
    operator @ vector
    left_out = next(p for p in setting.model.parameters() if all(p is not q for q in setting.parameters))
    with torch.no_grad():
        left_out.mul_(2)
    with pytest.raises(PackpropError, match="changed in place"):
        operator @ vector
    loss = setting.loss()
    operator = operators.hessian(loss, setting.parameters)
    loss.backward()
    with pytest.raises(PackpropError, match="freed the graph"):
        operator @ vector


def test_a_change_of_the_inputs_is_refused() -> None:
    setting = Setting("plain", torch.float64, False)
    for operator in (
        operators.hessian(setting.loss(), setting.parameters),
        operators.ggn(setting.graph, setting.parameters),
    ):
        setting.x.mul_(2)
        with pytest.raises(PackpropError, match="inputs or other tensors of the forward pass were changed"):
            operator @ torch.ones(setting.size, dtype=torch.float64)


def test_parameters_without_entries() -> None:
    empty, weight = torch.zeros(0, 2, requires_grad=True), torch.ones(3, requires_grad=True)
    operator = operators.hessian((weight**3).sum() + empty.sum(), [empty, weight])
    assert_near(operator @ torch.ones(3), torch.full((3,), 6.0), "product")


def test_an_operator_prints_its_size() -> None:
    model = nn.Linear(3, 2)
    operator = operators.hessian(lambda: model(torch.ones(1, 3)).square().sum(), [*model.parameters()], 0.5)
    assert repr(operator) == "Operator(8 x 8, torch.float32, of 2 parameters, damping=0.5)"


def test_bad_arguments() -> None:
    setting = Setting("plain", torch.float64, False)
    (first, *_) = setting.parameters
    with pytest.raises(BadInput, match="would have no rows"):
        operators.hessian(setting.loss, [])
    with pytest.raises(BadInput, match="counted twice"):
        operators.ggn(setting.graph, [first, first])
    with pytest.raises(BadInput, match="requires_grad=False"):
        operators.hessian(setting.loss, [first.detach()])
    with pytest.raises(BadInput, match="no scalar"):
        operators.hessian(lambda: setting.graph()[0], [first])
    for damping in (float("nan"), float("inf")):
        with pytest.raises(BadInput, match=f"damping={damping}"):
            operators.hessian(setting.loss, [first], damping)
    operator = operators.hessian(setting.loss, [first])
    with pytest.raises(BadInput, match="12 columns"):
        operator @ torch.zeros(11, dtype=torch.float64)


def test_without_scipy_tensors_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting("plain", torch.float64, False)
    operator = operators.ggn(setting.graph, setting.parameters)
    monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
    assert (operator @ torch.zeros(setting.size, dtype=torch.float64)).shape == (setting.size,)
    with pytest.raises(PackpropError, match=r"\.\[scipy\]"):
        operator.to_scipy()


def test_complex_parameters_have_no_matrix() -> None:
    """Products would be linear over real numbers alone: traces and eigenvalues would be others."""
    w, x = nn.Parameter(torch.randn(3, dtype=torch.complex128)), torch.randn(6, 3, dtype=torch.complex128)
    with pytest.raises(BadInput, match="a complex parameter"):
        operators.hessian(lambda: ((x @ w).abs().square() + (x @ w).real ** 3).mean(), [w])
    with pytest.raises(BadInput, match="a complex parameter"):
        operators.ggn(lambda: ((out := (x @ w).abs()), out.square().mean()), [w])


def test_tables_that_divide_by_counts_have_no_hessian() -> None:
    table, ids = nn.Embedding(4, 2, scale_grad_by_freq=True).double(), torch.tensor([[0, 0], [0, 1], [2, 1]])

    def loss() -> Tensor:
        return F.cross_entropy(table(ids).tanh().mean(1), torch.tensor([0, 1, 1]))

    with pytest.raises(PackpropError, match="drop scale_grad_by_freq"):
        operators.hessian(loss, [table.weight])
    with pytest.raises(PackpropError, match="drop scale_grad_by_freq"):
        packprop.products.hvp(loss(), [table.weight], [torch.ones(4, 2).double()])
