"""Out of memory in spite of a plan."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import packprop
from packprop import extensions
from packprop.engine.passes import chunks
from packprop.errors import PackpropWarning
from tests.references.running import ROWS, Row, as_tensors, assert_all_near
from tests.selection import one_in


class Scarce(TorchDispatchMode):
    """A device that has no room for a product of more than some bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.limit = limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "bmm" and out.numel() * out.element_size() > self.limit:
            raise torch.OutOfMemoryError("no storage of this size")
        return out


def positions() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3))
    return model, torch.randn(16, 7, 20), torch.randint(3, (16, 7))


ROW_BYTES = 20 * 30 * 4


@one_in(5)
@pytest.mark.parametrize("row", [row for row in ROWS if row.attribute != "batch_dot"], ids=lambda r: r.name)
def test_out_of_memory_halves_the_chunk_and_goes_on(row: Row, monkeypatch: Any) -> None:
    def run(limit: int) -> tuple[dict[str, Any], dict[str, Any]]:
        model, x, y = positions()
        packprop.extend(model)
        loss = packprop.extend(nn.CrossEntropyLoss())(model(x).mT, y)
        with packprop.backpack(row(torch.Generator().manual_seed(0))), Scarce(limit):
            loss.backward()
        values = {name: getattr(p, row.attribute) for name, p in model.named_parameters()}
        flat = {f"{n}[{i}]": t for n, value in values.items() for i, t in enumerate(as_tensors(value))}
        return flat, {name: p.grad for name, p in model.named_parameters()}

    monkeypatch.setattr(chunks, "COTANGENTS", 0)  # one column at a time, so that one sample is small
    expected, gradients = run(10**9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, others = run(3 * ROW_BYTES)
    assert_all_near(found, expected, row.attribute, 1e-5)
    assert_all_near(others, gradients, "grad", 1e-5)
    halved = [str(w.message) for w in caught if issubclass(w.category, PackpropWarning)]
    if row.attribute not in ("kfac", "kflr"):  # their factors are made of no such product
        assert "ran out of memory at parameter '0.weight'" in halved[-1]
        assert "with 1 samples at a time" in halved[-1] or "with 2 samples at a time" in halved[-1]


def test_one_sample_that_does_not_fit_is_the_device_s_own_error() -> None:
    model, x, y = positions()
    packprop.extend(model)
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x).mT, y)
    with (
        packprop.backpack(extensions.BatchGrad()),
        Scarce(ROW_BYTES - 1),
        pytest.raises(torch.OutOfMemoryError),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        loss.backward()
    assert not any(hasattr(p, "grad_batch") for p in model[0].parameters())
