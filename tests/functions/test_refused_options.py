"""Options of layers that no per-sample quantity goes with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from tests.cases.models.wrapping import Raw
from tests.references.refusals import check, each_row, refused
from tests.references.running import Row, as_tensors, assert_near
from tests.selection import one_in


def embedded(layer: nn.Module, *more: Tensor) -> tuple[nn.Module, Tensor]:
    model = packprop.extend(Raw(lambda m, ids: m.layer(ids, *more).flatten(1)))
    model.layer = layer
    packprop.extend(model)
    ids = torch.tensor([[0, 1], [2, 1], [0, 0]])
    out = model(ids)
    return model, packprop.extend(nn.MSELoss())(out, torch.zeros_like(out))


@one_in(2)
@each_row
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag], ids=lambda kind: kind.__name__)
def test_rows_are_rescaled_before_they_are_used(row: Row, kind: type[nn.Module]) -> None:
    """max_norm rewrites the weight in the forward pass: values are those of what is left there."""
    model, loss = embedded(kind(4, 2, max_norm=0.5))
    plain, plain_loss = embedded(kind(4, 2, _weight=model.layer.weight.detach().clone()))
    for each in (loss, plain_loss):
        with packprop.backpack(row(torch.Generator().manual_seed(0))):
            each.backward()
    found, expected = (getattr(m.layer.weight, row.attribute) for m in (model, plain))
    for a, b in zip(as_tensors(found), as_tensors(expected), strict=True):
        assert_near(a, b, "layer.weight", 1e-5)


@each_row
def test_scale_grad_by_freq_is_refused(row: Row) -> None:
    """scale_grad_by_freq divides by how often an index occurs in the whole batch."""
    model, loss = embedded(nn.Embedding(4, 2, scale_grad_by_freq=True))
    check(refused(loss, row(), model=model), "scale_grad_by_freq", "layer.weight")


@each_row
def test_sparse_gradients_are_right(row: Row) -> None:
    model, loss = embedded(nn.Embedding(4, 2, sparse=True))
    dense, dense_loss = embedded(nn.Embedding(4, 2))
    dense.load_state_dict(model.state_dict())
    dense_loss = packprop.extend(nn.MSELoss())(
        out := dense(torch.tensor([[0, 1], [2, 1], [0, 0]])), torch.zeros_like(out)
    )
    source = torch.Generator()
    for each in (loss, dense_loss):
        with packprop.backpack(row(source.manual_seed(0))):
            each.backward()
    assert model.layer.weight.grad.is_sparse
    for name in ("layer.weight",):
        found, expected = (getattr(m.get_parameter(name), row.attribute) for m in (model, dense))
        for a, b in zip(torch.atleast_1d(found[0]), torch.atleast_1d(expected[0]), strict=True):
            assert_near(a, b, name, 1e-5)


@each_row
def test_an_input_changed_in_place_after_its_use(row: Row) -> None:
    """Autograd refuses if the weight is trained; in no case do changed inputs give a number."""

    def change(m: nn.Module, x: Tensor) -> Tensor:
        x = x * 1.0
        y = F.linear(x, m.get_parameter("w"))
        x.add_(1.0)
        return y

    model = packprop.extend(Raw(change, w=(2, 3)))
    loss = packprop.extend(nn.MSELoss())(model(torch.randn(4, 3)), torch.zeros(4, 2))
    with pytest.raises(RuntimeError), packprop.backpack(row()):
        loss.backward()
    assert not hasattr(model.w, row.attribute)
