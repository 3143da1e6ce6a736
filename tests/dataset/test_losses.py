"""`compute(..., store=..., losses=True)`: the loss of each sample, beside a loop over samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import BadInput, PackpropError, Store, StoreWriter
from packprop.extensions import BatchL2Grad, Variance
from tests.dataset.small import SIZE, compute, part, small
from tests.references.running import assert_near
from tests.selection import one_in

WEIGHT = torch.tensor([1.0, 3.0, 0.5]).double()


def sequences(classes_last: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """Outputs of three classes at four positions; some targets are ignored, all of one sample."""
    model = nn.Sequential(nn.Linear(2, 3)).double() if classes_last else nn.Conv1d(2, 3, 1).double()
    x = torch.randn(SIZE, 4, 2) if classes_last else torch.randn(SIZE, 2, 4)
    y = torch.randint(3, (SIZE, 4))
    y[1, 2:], y[4] = -100, -100
    return model, x.double(), y


def flattened(output: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), **options)


CASES: dict[str, tuple[bool | None, Callable[..., Tensor]]] = {
    "weights": (False, partial(F.cross_entropy, weight=WEIGHT)),
    "smoothing": (False, partial(F.cross_entropy, label_smoothing=0.1)),
    "flattened": (True, flattened),
    "squares": (None, F.mse_loss),
    "binary": (None, lambda o, t, **options: F.binary_cross_entropy_with_logits(o, t.sigmoid(), **options)),
    "multiplied": (None, lambda o, t, **options: 0.5 * F.smooth_l1_loss(o, t, **options)),
}


@one_in(2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_loop(tmp_path: Path, case: str, reduction: str) -> None:
    torch.manual_seed(0)
    form, function = CASES[case]
    if form is None:
        model: nn.Module = nn.Linear(3, 2).double()
        x, y = torch.randn(SIZE, 3).double(), torch.randn(SIZE, 2).double()
    else:
        model, x, y = sequences(form)
    data = [(part(x, *cut), part(y, *cut)) for cut in [(0, 3), (3, 4), (4, SIZE)]]
    loss = partial(function, reduction=reduction)
    result = compute(model, loss, data, BatchL2Grad(), Variance(), store=tmp_path / "store", losses=True)
    store = Store(tmp_path / "store")
    found = store["loss"].torch()
    one_by_one = [function(model(a[None]), b[None], reduction="sum") for a, b in zip(x, y, strict=True)]
    assert_near(found, torch.stack(one_by_one).detach(), "losses")
    total = float(found.sum()) / (store.terms if reduction == "mean" else 1)
    assert total == pytest.approx(result.loss, rel=1e-12)
    assert store["loss"].header.degree == 0
    assert set(store) == {"batch_l2", "loss"}


def test_losses_alone(tmp_path: Path) -> None:
    """Nothing else needs to grow; a model may compute the loss itself."""
    model, (x, y) = small()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.inner(x), labels)

    compute(Whole(), None, [{"x": x, "labels": y}], Variance(), store=tmp_path / "store", losses=True)
    store = Store(tmp_path / "store")
    expected = F.cross_entropy(model(x), y, reduction="none").detach()
    assert_near(store["loss"].torch(), expected, "losses")
    assert (set(store), store.finished) == ({"loss"}, True)


def test_gradients_and_values_are_the_same_with_losses(tmp_path: Path) -> None:
    model, data = small()
    loss = nn.CrossEntropyLoss()
    plain = compute(model, loss, data, BatchL2Grad(), Variance(), store=tmp_path / "plain")
    more = compute(model, loss, data, BatchL2Grad(), Variance(), store=tmp_path / "more", losses=True)
    assert all(torch.equal(plain["variance"][name], more["variance"][name]) for name in plain["variance"])  # type: ignore[arg-type]  # values are tensors
    one, other = Store(tmp_path / "plain")["batch_l2"], Store(tmp_path / "more")["batch_l2"]
    assert all(torch.equal(one[name].torch(), other[name].torch()) for name in one)


def broken(data: Any, after: int) -> Any:
    for number, batch in enumerate(data):
        if number == after:
            raise OSError("gone")
        yield batch


def test_losses_after_an_interruption(tmp_path: Path) -> None:
    model, (x, y) = small()
    loss = nn.CrossEntropyLoss()
    data = list(zip(x.split(2), y.split(2), strict=True))
    options: Any = dict(store=tmp_path / "store", checkpoint=tmp_path / "run", every=1, losses=True)
    with pytest.raises(BadInput, match="gone"):
        compute(model, loss, broken(data, 2), BatchL2Grad(), **options)
    with pytest.raises(BadInput):
        compute(model, loss, iter(data), BatchL2Grad(), **{**options, "losses": False})
    compute(model, loss, iter(data), BatchL2Grad(), **options)
    expected = F.cross_entropy(model(x), y, reduction="none").detach()
    assert_near(Store(tmp_path / "store")["loss"].torch(), expected, "losses")


def test_what_is_refused(tmp_path: Path) -> None:
    model, data = small()
    loss = nn.CrossEntropyLoss()
    with pytest.raises(BadInput, match="losses=True without a store"):
        compute(model, loss, data, Variance(), losses=True)
    for losses in (True, False):
        with StoreWriter(tmp_path / str(losses), model, [BatchL2Grad()]) as writer:
            compute(model, loss, data, *writer.extensions, store=writer, losses=losses)
            with pytest.raises(BadInput, match=f"continue with losses={losses}"):
                compute(model, loss, data, *writer.extensions, store=writer, losses=not losses)
            compute(model, loss, data, *writer.extensions, store=writer, losses=losses)
        assert Store(tmp_path / str(losses)).samples == 2 * SIZE


def test_losses_without_terms(tmp_path: Path) -> None:
    """A loss of one's own that reduces by itself does not say what a sample's part is."""

    @torch.overrides.wrap_torch_function(lambda output, target: (output, target))
    def own(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()

    rule = packprop.engine.functions.losses.description.LOSSES[F.mse_loss]
    packprop.register_loss(own)(lambda output, target: rule(output, target, reduction="sum"))
    try:
        model, (x, _) = small()
        data = x, torch.randn(SIZE, 2).double()
        with pytest.raises(PackpropError, match="Losses of single samples were asked for"):
            compute(model, own, data, BatchL2Grad(), store=tmp_path / "store", losses=True)
    finally:
        packprop.engine.functions.losses.description.LOSSES.pop(own)
