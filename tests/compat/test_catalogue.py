"""Extensions of the catalogue as BackPACK has them: base classes, accessors of options, subsampling."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from packprop.compat.own import ModuleExtension
from packprop.errors import PackpropError
from tests.compat.module_extensions import Gate, run
from tests.compat.programs import installed, mlp, near, vectors
from tests.selection import one_in

FIRST = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "BatchDotGrad")
SECOND = (
    *("DiagGGNExact", "DiagGGNMC", "BatchDiagGGNExact", "BatchDiagGGNMC", "SqrtGGNExact", "SqrtGGNMC"),
    *("DiagHessian", "BatchDiagHessian", "HMP", "GGNMP", "PCHMP", "HBP", "KFAC", "KFLR", "KFRA", "EKFAC"),
)


@installed
@pytest.mark.parametrize("name", [*FIRST, *SECOND])
def test_base_classes(name: str) -> None:
    from backpack import extensions
    from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
    from backpack.extensions.secondorder.base import SecondOrderBackpropExtension

    kind = getattr(extensions, name)
    extension = kind()
    assert isinstance(extension, FirstOrderBackpropExtension) == (name in FIRST)
    assert isinstance(extension, SecondOrderBackpropExtension) == (name in SECOND)
    assert extension.expects_backpropagation_quantities() == (name in SECOND)
    assert isinstance(extension, extensions.HBP) == (name in ("HBP", "KFAC", "KFLR", "KFRA"))
    assert issubclass(kind, extensions.HBP) == isinstance(extension, extensions.HBP)
    assert type(pickle.loads(pickle.dumps(extension))) is kind


@installed
def test_accessors_of_options() -> None:
    from backpack import extensions

    found = {
        name: tuple(
            getattr(getattr(extensions, name)(), f"get_{option}")()
            for option in ("curv_type", "loss_hessian_strategy", "backprop_strategy", "ea_strategy")
        )
        for name in ("HBP", "KFAC", "KFLR", "KFRA")
    }
    botev_martens = "E[J^T E(H) J]"
    assert found == {
        "HBP": ("ggn", "sum", "average", botev_martens),
        "KFAC": ("ggn", "sampling", "sqrt", botev_martens),
        "KFLR": ("ggn", "exact", "sqrt", botev_martens),
        "KFRA": ("ggn", "sum", "average", botev_martens),
    }
    assert extensions.HBP("pch-abs").get_curv_type() == "pch-abs"
    for name in ("DiagGGN", "BatchDiagGGN", "SqrtGGN"):
        exact, sampled = getattr(extensions, f"{name}Exact")(), getattr(extensions, f"{name}MC")(4)
        assert exact.loss_hessian_strategy == exact.get_loss_hessian_strategy() == "exact"
        assert sampled.loss_hessian_strategy == sampled.get_loss_hessian_strategy() == "sampling"
        assert sampled.get_num_mc_samples() == 4
        assert sampled.accumulate_backpropagated_quantities(1, 2) == 3
    assert extensions.PCHMP(modify="abs").get_modification_mode() == "abs"
    with pytest.raises(NotImplementedError):
        extensions.BatchGrad().accumulate_backpropagated_quantities(1, 2)


@installed
@pytest.mark.parametrize("name", [*FIRST, *SECOND])
def test_a_second_module_extension_is_a_value_error(name: str) -> None:
    from backpack import extensions

    extension, other = getattr(extensions, name)(), ModuleExtension()
    extension.set_module_extension(Gate, ModuleExtension())
    with pytest.raises(ValueError, match="pass overwrite=True"):
        extension.set_module_extension(Gate, other)
    extension.set_module_extension(Gate, other, overwrite=True)
    assert extension.module_extensions == {Gate: other}


SUBSETS: list[Any] = [
    *([3, 1], (3, 1), torch.tensor([3, 1]), np.array([3, 1]), [np.int64(3), np.int64(1)], [-2, 1]),
    *(torch.tensor([False, True, False, True, False]), range(1, 4, 2)),
]


@one_in(3)
@installed
@pytest.mark.parametrize("chosen", SUBSETS, ids=str)
@pytest.mark.parametrize("name", ["BatchGrad", "Variance", "SqrtGGNExact", "KFLR"])
def test_subsets_of_samples(name: str, chosen: Any) -> None:
    """Whatever tensors can be indexed by."""
    from backpack import extensions

    model, (x, y) = mlp(), vectors()
    expected_order = torch.arange(5)[list(chosen) if isinstance(chosen, (tuple, range)) else chosen].tolist()
    kind = getattr(extensions, name)
    run(model, x, y, kind(subsampling=expected_order))
    expected = [getattr(p, kind.savefield) for p in model.parameters()]
    extension = kind(subsampling=chosen)
    assert isinstance(extension.get_subsampling(), list)
    run(model, x, y, extension)
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(getattr(p, kind.savefield), value)


@installed
@pytest.mark.parametrize("chosen", [[], torch.tensor([], dtype=torch.long), np.array([], dtype=int)], ids=str)
def test_no_samples_at_all(chosen: Any) -> None:
    from backpack.extensions import BatchGrad, SqrtGGNExact, SqrtGGNMC

    model, (x, y) = mlp(), vectors()
    run(model, x, y, BatchGrad(subsampling=chosen), SqrtGGNExact(chosen), SqrtGGNMC(4, chosen))
    for p in model.parameters():
        assert p.grad_batch.shape == (0, *p.shape)
        assert p.sqrt_ggn_exact.shape == (3, 0, *p.shape)
        assert p.sqrt_ggn_mc.shape == (4, 0, *p.shape)
        assert p.grad_batch.dtype == p.dtype
    near(model[2].bias.grad, torch.autograd.grad(nn.functional.cross_entropy(model(x), y), model[2].bias)[0])


@installed
@pytest.mark.parametrize(
    "wrong", ["all", [0.5], torch.tensor([0.5]), torch.tensor([[0]]), 3, [True, "a"]], ids=str
)
@pytest.mark.parametrize("name", ["BatchGrad", "KFAC", "KFLR"])
def test_what_is_no_subset(name: str, wrong: Any) -> None:
    from backpack import extensions

    with pytest.raises(ValueError, match="give whole numbers"):
        getattr(extensions, name)(subsampling=wrong)


@installed
def test_what_cannot_be_computed_is_not_implemented() -> None:
    """As in BackPACK, where programs go on with another quantity then; wrong use of the library is not."""
    from backpack import backpack, extend
    from backpack.extensions import KFRA, PCHMP, BatchL2Grad, DiagGGNExact, DiagHessian

    class Normalising(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    x, y = vectors()
    models = {
        KFRA: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
        PCHMP: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
        BatchL2Grad: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        DiagHessian: nn.Sequential(nn.Linear(4, 4), Normalising(), nn.Linear(4, 3)),
    }
    for kind, model in models.items():
        with pytest.raises(NotImplementedError, match="instead:") as error:
            run(model, x, y, kind())
        assert isinstance(error.value, PackpropError)
    model = extend(mlp())
    with pytest.raises(NotImplementedError, match="is zero"), backpack(DiagGGNExact()):
        extend(nn.L1Loss())(model(x), torch.randn(5, 3)).backward()
    loss = extend(nn.CrossEntropyLoss())(model(x), y)
    with backpack(DiagGGNExact()):
        loss.backward()
        with pytest.raises(PackpropError, match="retain_graph=True") as freed:
            loss.backward()
    assert not isinstance(freed.value, NotImplementedError)


@installed
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_empty_batches(reduction: str) -> None:
    """A pass over no samples says so of every quantity, and calls the hook."""
    from backpack import backpack, extend, extensions

    names = ["BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNExact", "DiagGGNMC"]
    names += [
        "BatchDiagGGNExact",
        "BatchDiagGGNMC",
        "DiagHessian",
        "BatchDiagHessian",
        "SqrtGGNExact",
        "SqrtGGNMC",
    ]
    model, seen = extend(mlp()), []
    loss = extend(nn.CrossEntropyLoss(reduction=reduction))
    with backpack(
        *(getattr(extensions, name)() for name in [*names, "HMP", "GGNMP"]), extension_hook=seen.append
    ):
        loss(model(torch.randn(0, 4)), torch.zeros(0, dtype=torch.long)).backward()
    for p in model.parameters():
        for value in (p.sum_grad_squared, p.diag_ggn_exact, p.diag_ggn_mc, p.diag_h, p.grad):
            near(value, torch.zeros_like(p))
        assert p.variance.isnan().all()  # as a mean over nothing is
        for value in (p.grad_batch, p.diag_ggn_exact_batch, p.diag_ggn_mc_batch, p.diag_h_batch):
            assert value.shape == (0, *p.shape)
        assert p.batch_l2.shape == (0,)
        assert p.sqrt_ggn_exact.shape == (3, 0, *p.shape)
        assert p.sqrt_ggn_mc.shape == (1, 0, *p.shape)
        vectors_of = torch.randn(2, *p.shape)
        near(p.hmp(vectors_of), torch.zeros_like(vectors_of))
        near(p.ggnmp(vectors_of), torch.zeros_like(vectors_of))
    assert seen == [model[0], model[2]]


@installed
def test_factors_of_an_empty_batch_are_refused() -> None:
    """Their mean over inputs is not defined; BackPACK has none either."""
    from backpack import backpack, extend
    from backpack.extensions import KFAC

    model = extend(mlp())
    loss = extend(nn.CrossEntropyLoss())(model(torch.randn(0, 4)), torch.zeros(0, dtype=torch.long))
    with pytest.raises(PackpropError, match="the batch is empty"), backpack(KFAC()):
        loss.backward()
