"""Products of matrices: equal to those of a batch, wherever their operands and they lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import packprop
from packprop.engine.algebra import kernels
from packprop.engine.algebra.choices import Extents, convolved_by_groups
from packprop.engine.algebra.kernels import outer_products, products_one_by_one
from packprop.engine.algebra.one_by_one import evaluate_together
from packprop.engine.algebra.order import fold_to
from packprop.engine.algebra.statistics import moments, summed_grad
from packprop.engine.algebra.structures import Outer
from tests.references.running import assert_near


def laid_out(by_rows: bool, rows: int, columns: int) -> Tensor:
    """Three matrices, kept by rows or by columns."""
    return torch.randn(3, rows, columns) if by_rows else torch.randn(3, columns, rows).mT


@pytest.mark.parametrize("kept_by_rows", [False, True], ids=["product as it comes", "product by rows"])
@pytest.mark.parametrize("right", [False, True], ids=["inputs by columns", "inputs by rows"])
@pytest.mark.parametrize("left", [False, True], ids=["cotangents by columns", "cotangents by rows"])
def test_products_do_not_depend_on_the_order_in_memory(left: bool, right: bool, kept_by_rows: bool) -> None:
    cotangents, inputs = laid_out(left, 7, 4), laid_out(right, 5, 4)
    with packprop.algorithms(products="single"):
        products = products_one_by_one(cotangents, inputs, kept_by_rows)
        if products is None:
            pytest.skip("no operator of oneDNN here")
        found = list(products)
        torch.testing.assert_close(outer_products(cotangents, inputs), cotangents @ inputs.mT)
    torch.testing.assert_close(torch.stack(found), cotangents @ inputs.mT)
    if kept_by_rows:
        assert all(product.is_contiguous() for product in found)


def test_a_forced_product_is_the_one_that_is_made() -> None:
    with packprop.algorithms(products="single"):
        assert kernels.worth_a_call(1, 1, torch.float32, "cpu") == hasattr(
            torch.ops.mkldnn, "_linear_pointwise"
        )
        assert not kernels.worth_a_call(1, 1, torch.float64, "cpu")
    with packprop.algorithms(products="batched"):
        assert not kernels.worth_a_call(2**20, 2**20, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_depthwise_convolutions_of_large_images_go_sample_by_sample(dtype: torch.dtype) -> None:
    """Where oneDNN has its kernel, in single precision alone, and the other one is slower."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("no oneDNN here")
    cases = {(64, 7, 4): dtype == torch.float32, (64, 7, 1): False, (4, 7, 4): False, (64, 3, 4): False}
    for (side, kernel, groups), expected in cases.items():
        cotangent = torch.zeros(1, 4, side, side, dtype=dtype)
        shape = torch.Size([4, 4 // groups, kernel, kernel])
        assert kernels._is_faster_by_channels_last(cotangent, shape, groups) == expected
    wide = torch.zeros(1, 2048, 16, 16, dtype=dtype)
    assert not kernels._is_faster_by_channels_last(wide, torch.Size([2048, 1, 7, 7]), 2048)


@pytest.mark.parametrize(("groups", "channels"), [(96, 1), (1, 16), (4, 8)])
def test_convolutions_that_onednn_has_a_kernel_for_unfold_no_images(groups: int, channels: int) -> None:
    """Also depthwise ones: to unfold them took 1.4 times as long for the norms of a whole ConvNeXt."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("no oneDNN here")
    sizes = Extents(784, groups, 9 * channels, channels, channels, torch.float32, "cpu", None)
    assert convolved_by_groups(sizes)
    assert not convolved_by_groups(sizes._replace(dtype=torch.float64))
    assert not convolved_by_groups(Extents(784, 1, 27, 16, 3, torch.float32, "cpu", None))


def test_gradients_sample_by_sample_are_those_of_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    images, cotangent = torch.randn(3, 4, 12, 12), torch.randn(3, 4, 12, 12)
    given = images, cotangent, torch.Size([4, 1, 3, 3]), (1, 1), (1, 1), (1, 1), 4
    ways = []
    for one_by_one in (True, False):
        monkeypatch.setattr(kernels, "_is_faster_by_channels_last", lambda *_, found=one_by_one: found)
        ways.append(kernels.grouped_gradients(*given))
    assert ways[0].shape == (1, 3, 4, 1, 3, 3)
    assert_near(*ways, "gradients", tolerance=1e-5)


def test_deviations_one_by_one_keep_their_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are nearly equal: rounding of a sum of many of them does not count as deviation."""
    monkeypatch.setattr(kernels, "WORTH_A_CALL", 0)
    monkeypatch.setattr(kernels, "SHORT", 0)
    x = 1 + 1e-4 * torch.randn(3000, 2, 1, 3)
    structure = Outer(x, torch.ones(1, 3000, 2, 1, 4), fold_to(torch.Size([4, 3])))
    total, (samples, mean, deviation) = evaluate_together(structure, [summed_grad, moments])
    gradients = torch.einsum("vnsgo,nsgi->noi", torch.ones(1, 3000, 2, 1, 4).double(), x.double())
    assert samples == 3000
    torch.testing.assert_close(total.double(), gradients.sum(0), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(mean.double(), gradients.mean(0), rtol=1e-6, atol=0.0)
    expected = (gradients - gradients.mean(0)).square().sum(0)
    torch.testing.assert_close(deviation.double(), expected, rtol=1e-2, atol=0.0)
