"""Names of parameters are those of the model itself, whatever wraps it: they seed, identify, and are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import packprop
from packprop import extensions
from packprop.engine.tensors.names import named_modules, named_parameters
from tests.distributed.processes import in_processes, needs_groups
from tests.selection import thorough

NAMES = ["0.weight", "0.bias", "module.weight", "module.bias"]
PROJECTED = extensions.Projected.savefield
LOSS = nn.CrossEntropyLoss()


def built() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model with a layer that is called as wrappers call what they wrap."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("0", nn.Linear(3, 4))
    model.add_module("module", nn.Linear(4, 2))
    return model.double(), (torch.randn(7, 3).double(), torch.randint(2, (7,)))


def wrappers() -> dict[str, Any]:
    def of_parts(model: nn.Module) -> nn.Module:
        model.module = checkpoint_wrapper(model.module)
        return nn.DataParallel(model)

    return {
        "nothing": lambda model: model,
        "DataParallel": nn.DataParallel,
        "DistributedDataParallel": nn.parallel.DistributedDataParallel,
        "a checkpoint inside": of_parts,
    }


def projections(model: nn.Module, data: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Projected gradients of a pass in which the outermost module was extended."""
    packprop.extend(model)
    loss = packprop.extend(nn.CrossEntropyLoss())(model(data[0]), data[1])
    with packprop.backpack(extensions.Projected(extensions.BatchGrad(), 16)):
        loss.backward()
    return [vars(parameter)[PROJECTED] for parameter in model.parameters()]


def compared(rank: int, folder: Path) -> None:
    (model, data), asked = built(), [extensions.Projected(extensions.BatchGrad(), 16), extensions.Variance()]
    expected = projections(*built())
    packprop.compute(
        model, LOSS, data, asked, store=folder / "store", checkpoint=folder / "kept", progress=False
    )
    for name, wrap in wrappers().items():
        wrapped = wrap(built()[0])
        assert [each for each, _ in named_parameters(wrapped)] == NAMES, name
        assert [each for each, _ in named_modules(wrapped)] == ["", "0", "module"], name
        for one, other in zip(projections(wrap(built()[0]), data), expected, strict=True):
            assert torch.equal(one, other), name
        found = packprop.compute(wrapped, LOSS, data, [extensions.Variance()], progress=False)
        assert {*found["variance"]} == {*NAMES}, name
        rows = packprop.compute(wrapped, LOSS, data, asked, store=folder / name, progress=False)
        assert {*rows["variance"]} == {*NAMES}, name
        headers = [packprop.Store(folder / each).headers[0].model for each in ("store", name)]
        assert headers[0] == headers[1]
        plain, other = (packprop.Store(folder / each)[PROJECTED, ""].torch() for each in ("store", name))
        assert torch.equal(plain, other), name
        for each in (model, wrapped):  # queries match a store that was written with either
            assert packprop.influence(folder / "store", each, LOSS, data).largest.products.isfinite().all()
        options = {"store": folder / f"again {name}", "checkpoint": folder / f"kept {name}", "progress": False}
        packprop.compute(model, LOSS, data, asked, **options)
        packprop.compute(wrapped, LOSS, data, asked, **options)  # goes on with what the model itself began


@thorough
@needs_groups
def test_wrappers_change_no_name(tmp_path: Path) -> None:
    in_processes(compared, 1, tmp_path)


def test_clipping_by_name() -> None:
    model, (x, y) = built()
    bounds = dict.fromkeys(NAMES, 0.01)
    wrapped = packprop.extend(nn.DataParallel(model))
    with packprop.clipped_gradients(max_norm=bounds, per="parameter"):
        packprop.extend(nn.CrossEntropyLoss())(wrapped(x), y).backward()
    assert all(parameter.grad.norm() <= 0.011 for parameter in model.parameters())


def test_a_compiled_model_has_the_names_of_the_model() -> None:
    model, _ = built()
    assert [name for name, _ in named_parameters(torch.compile(model))] == NAMES


@pytest.mark.parametrize("wrap", [nn.DataParallel, nn.Sequential], ids=["a wrapper", "a container"])
def test_only_wrappers_are_left_out(wrap: Any) -> None:
    names = [name for name, _ in named_parameters(wrap(built()[0]))]
    assert names == (NAMES if wrap is nn.DataParallel else [f"0.{name}" for name in NAMES])
