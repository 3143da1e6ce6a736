"""What `influence` refuses, in four parts, before it searches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import BadInput, PackpropError
from packprop.extensions import EKFAC, KFLR, BatchGrad, BatchL2Grad, Variance
from tests.queries.small import LOSS, influence, problem, written


def refused(words: str, folder: Path, problem: Any, **options: Any) -> PackpropError:
    with pytest.raises(PackpropError, match=words) as caught:
        influence(folder, problem, **options)
    assert all(caught.value.args)
    return caught.value


def test_stores_of_something_else(tmp_path: Path) -> None:
    same, _ = written(tmp_path / "store")
    model, x, y = same
    packprop.compute(model, LOSS, (x, y), [BatchL2Grad()], store=tmp_path / "norms", progress=False)
    refused("it has batch_l2, and no gradients of samples", tmp_path / "norms", same)
    refused("quantity 'loss'(.|\n)*gradients in it are grad_batch", tmp_path / "store", same, quantity="loss")
    refused("not the folder of a store", tmp_path / "nothing", same)
    with packprop.StoreWriter(tmp_path / "empty", model, [BatchGrad()]):
        pass
    refused("it has no rows", tmp_path / "empty", same)
    wide = nn.Sequential(*model)
    wide[3] = nn.Linear(18, 4).double()
    refused(
        r"'3.weight'(.|\n)*\[4, 18\] in the model, and \[3, 18\] in the store", tmp_path / "store", (wide, x, y)
    )
    wide[3] = nn.Flatten()
    refused("'3.weight'(.|\n)*has no such parameter", tmp_path / "store", (wide, x, y))
    model[0].bias.requires_grad_(False)
    refused("'0.bias'(.|\n)*does not train it", tmp_path / "store", same)
    packprop.compute(model, LOSS, (x, y), [BatchGrad()], store=tmp_path / "frozen", progress=False)
    influence(tmp_path / "frozen", same)
    model[0].bias.requires_grad_(True)
    refused("'0.bias'(.|\n)*written for a model without it", tmp_path / "frozen", same)


def test_curvature_that_does_not_fit(tmp_path: Path) -> None:
    same, result = written(tmp_path / "store", KFLR(), EKFAC(fisher="exact"), Variance())
    folder, damped = tmp_path / "store", dict(damping=0.1)
    blocks = result["kflr"]
    refused("ekfac, kflr are curvature, and one(.|\n)*give result\\['ekfac'\\]", folder, same, curvature=result)
    only = packprop.Result({"variance": result["variance"]}, 9, 0.0)
    refused("none is curvature", folder, same, curvature=only, **damped)
    refused("curvature of type int", folder, same, curvature=3, **damped)
    lacking = {name: block for name, block in blocks.items() if name != "3.bias"}
    refused("'3.bias'(.|\n)*has no block", folder, same, curvature=lacking, **damped)
    other = {**blocks, "3.weight": blocks["0.weight"]}
    refused(
        r"'3.weight' of shape \[3, 18\](.|\n)*its block has 8 rows", folder, same, curvature=other, **damped
    )
    swapped = {**blocks, "3.weight": [*reversed(blocks["3.weight"])]}  # type: ignore[arg-type]  # values are factors
    refused("18 and 3 rows, where 3 and 18 belong", folder, same, curvature=swapped, **damped)
    diagonal = {**blocks, "3.bias": torch.ones(4)}
    refused(r"its diagonal in the given curvature has \[4\]", folder, same, curvature=diagonal, **damped)
    text = {**blocks, "3.bias": "wrong"}
    refused("it is of type str", folder, same, curvature=text, **damped)
    broken = {**blocks, "3.bias": [blocks["3.bias"][0] * math.nan]}  # type: ignore[index]  # values are factors
    refused("'3.bias'(.|\n)*not finite", folder, same, curvature=broken, **damped)
    exact: dict[str, Any] = {"curvature": result["ekfac"], "factored": True}
    refused("no block of the given curvature has two factors", folder, same, **exact, **damped)
    file = tmp_path / "result.safetensors"
    result.save(file)
    refused("ekfac, kflr are curvature", folder, same, curvature=file, **damped)


def test_damping(tmp_path: Path) -> None:
    same, result = written(tmp_path / "store", KFLR())
    folder, blocks = tmp_path / "store", result["kflr"]
    for wrong in (None, -1.0, math.nan, math.inf, True, "0.1"):
        refused(f"damping={wrong!r}", folder, same, curvature=blocks, damping=wrong)
    refused("without curvature", folder, same, damping=0.1)
    refused("without curvature", folder, same, factored=True)
    # the GGN of cross entropy is singular: the same number added to all outputs changes nothing
    error = refused("'3.weight'(.|\n)*not positive", folder, same, curvature=blocks, damping=0)
    enough = float(error.instead.split()[-1])
    influence(folder, same, curvature=blocks, damping=enough)
    # nor does damping below the last digit: the inverse of what rounding left would be most of the product
    refused("beyond rounding", folder, same, curvature=blocks, damping=1e-30)
    units = {name: torch.ones_like(parameter) for name, parameter in same[0].named_parameters()}
    influence(folder, same, curvature=units, damping=0)
    zeros = {**units, "3.bias": torch.tensor([1.0, 0, 1])}
    refused("'3.bias'(.|\n)*smallest of its eigenvalues is 0,", folder, same, curvature=zeros, damping=0)
    negative = {**units, "3.bias": torch.tensor([1.0, -0.5, 1])}
    refused("is -0.5, and damping=0.5 is added", folder, same, curvature=negative, damping=0.5)


@pytest.mark.filterwarnings("ignore:The cotangent at parameter")
def test_what_is_not_finite(tmp_path: Path) -> None:
    same, _ = written(tmp_path / "store")
    model, x, y = same
    wrong = x.clone()
    wrong[3] = math.inf
    refused("the gradient of a query is not finite", tmp_path / "store", (model, wrong, y))
    with packprop.StoreWriter(tmp_path / "broken", model, [BatchGrad()]) as writer:
        rows = {name: torch.zeros(5, *parameter.shape) for name, parameter in model.named_parameters()}
        rows["3.bias"][2, 1] = math.nan
        writer.add({("grad_batch", name): value for name, value in rows.items()}, 5)
    refused("query 0 and row 2 of the store(.|\n)*is nan", tmp_path / "broken", same)


def test_queries(tmp_path: Path) -> None:
    (model, x, y), _ = written(tmp_path / "store")
    for wrong, words in [
        ([], "it held no batch"),
        ([(x[:0], y[:0])], "the data hold no sample"),
        ((x, y[:3]), "not a pair whose first axes"),
        ([(x[:, :, :3], y)], "loss\\(model\\(inputs\\), targets\\) works"),
        (5, "it is neither a data set"),
    ]:
        with pytest.raises(BadInput, match=words):
            packprop.influence(tmp_path / "store", model, LOSS, wrong)  # type: ignore[arg-type]  # wrong on purpose
    for wrong in (0, True, 2.0):
        refused("no number of samples", tmp_path / "store", (model, x, y), k=wrong)
        refused("no number of samples", tmp_path / "store", (model, x, y), batch_size=wrong)
    for given, words in [((3, LOSS), "not a torch.nn.Module"), ((model, 3), "not a function of outputs")]:
        with pytest.raises(BadInput, match=words):
            packprop.influence(tmp_path / "store", *given, (x, y))  # type: ignore[arg-type]  # wrong on purpose


def test_models_that_mix_samples(tmp_path: Path) -> None:
    """A query has no gradient of its own there."""
    model, x, y = problem()
    mixing = nn.Sequential(model[0], nn.BatchNorm2d(2).double().eval(), *model[1:])
    packprop.compute(mixing, LOSS, (x, y), [BatchGrad()], store=tmp_path / "store", progress=False)
    influence(tmp_path / "store", (mixing, x, y))
    refused("BatchNorm2d", tmp_path / "store", (mixing.train(), x, y))


def test_losses_with_parameters(tmp_path: Path) -> None:
    """A module's own, and those of a function."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.3).double())

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return LOSS(outputs * self.scale, targets)

    model, x, y = problem()
    scaled = Scaled()
    packprop.compute(model, scaled, (x, y), [BatchGrad()], store=tmp_path / "store", progress=False)
    for loss, name in [(scaled, "'scale'"), (lambda f, t: scaled(f, t), r"'a tensor of shape \[\]'")]:
        for data in (tmp_path / "store", (x, y)):
            with pytest.raises(BadInput, match=f"parameter {name}(.|\n)*it is not the model's"):
                packprop.influence(data, model, loss, (x[:2], y[:2]))
        with pytest.raises(BadInput, match="it is not the model's"):
            packprop.token_influence(model, loss, (x, y), (x[:2], y[:2]))
    scaled.requires_grad_(False)
    packprop.influence((x, y), model, scaled, (x[:2], y[:2]))


def test_a_scale_that_depends_on_the_number_of_queries(tmp_path: Path) -> None:
    """All of them are in one batch."""
    model, x, y = problem()
    packprop.compute(model, LOSS, (x, y), [BatchGrad()], store=tmp_path / "store", progress=False)

    def divided(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="sum") / len(targets)

    for samples in (tmp_path / "store", (x, y)):
        with pytest.raises(PackpropError, match="it multiplies the loss by"):
            packprop.influence(samples, model, divided, (x[:3], y[:3]))


def test_inference_mode() -> None:
    model, x, y = problem()
    with torch.inference_mode(), pytest.raises(BadInput, match=r"torch.inference_mode\(\)"):
        packprop.influence((x, y), model, LOSS, (x[:2], y[:2]))
