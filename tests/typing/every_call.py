"""A user's program with the public calls that `accepted.py` does not make; `mypy --strict` accepts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import (
    Influence,
    Monitor,
    PackpropError,
    PackpropWarning,
    Refinement,
    StoredArray,
    StoreWriter,
    backpack,
    compat,
    distributed,
    errors,
    examples,
    extend,
    extensions,
    functions,
    kronecker,
    memory,
    monitor,
    operators,
    products,
    register_loss,
    register_use,
    store,
    testing,
    types,
)

Result = dict[str, object]


def network() -> nn.Sequential:
    """A model, extended."""
    return extend(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))


def curvature(x: Tensor, y: Tensor) -> Result:
    """Products, operators, what is computed from them, and Kronecker factors."""
    model, loss = network(), nn.CrossEntropyLoss()
    parameters = [*model.parameters()]
    some = [torch.randn_like(parameter) for parameter in parameters]
    outputs = model(x)
    assert_type(products.vjp(outputs, parameters, torch.ones_like(outputs)), list[Tensor])
    assert_type(products.jvp(outputs, parameters, some), Tensor)
    assert_type(products.ggnvp((outputs, loss(outputs, y)), parameters, some), list[Tensor])
    hessian = assert_type(operators.hessian(lambda: loss(model(x), y), parameters), operators.Operator)
    whole = operators.of_data(model, loss, (x, y), damping=1e-2, batch_size=3, progress=False)
    blocks = operators.block_diagonal(parameters, [[torch.eye(p.numel())] for p in parameters])
    assert_type(operators.trace(hessian, draws=4), operators.Trace)
    assert_type(operators.eigenvalues(whole, k=2), operators.Eigenpairs)
    assert_type(operators.spectral_density(whole, steps=4, draws=2), operators.SpectralDensity)
    right = torch.ones(whole.shape[0])
    assert_type(operators.solve(whole, right, preconditioner=blocks, steps=200), operators.Solution)
    result = packprop.compute(model, loss, (x, y), extensions.EKFAC(), extensions.KFLR(), progress=False)
    factors, weight = result["kflr"]["2.weight"], parameters[2].detach()
    assert_type(kronecker.eigen(factors), kronecker.Eigen)
    assert_type(kronecker.dense(factors), Tensor)
    assert_type(kronecker.logdet(factors, damping=1e-2), Tensor)
    return {"product": assert_type(kronecker.multiply(result["ekfac"]["2.weight"], weight), Tensor)}


def every_extension(x: Tensor, y: Tensor) -> Result:
    """Each extension, one pass for each, with values that are read by the name of their attribute."""
    model, loss = network(), extend(nn.CrossEntropyLoss())
    asked: list[types.Extension] = [
        extensions.BatchGrad(subsampling=[0]),
        extensions.BatchL2Grad(),
        extensions.BatchDotGrad(),
        extensions.SumGradSquared(),
        extensions.Variance(),
        extensions.Projected(extensions.BatchGrad(), 2),
        extensions.DiagGGNExact(),
        extensions.DiagGGNMC(mc_samples=2),
        extensions.BatchDiagGGNExact(),
        extensions.BatchDiagGGNMC(),
        extensions.SqrtGGNExact(),
        extensions.SqrtGGNMC(),
        extensions.DiagHessian(),
        extensions.DiagHessianMC(),
        extensions.BatchDiagHessian(),
        extensions.KFAC(),
        extensions.KFLR(),
        extensions.KFRA(),
        extensions.HBP(),
        extensions.EKFAC(),
        extensions.HMP(),
        extensions.GGNMP(),
        extensions.PCHMP(),
        extensions.BatchJacobian(),
    ]
    found: Result = {}
    for extension in asked:
        with backpack(extension):
            loss(model(x), y).backward()
        found[extension.name] = getattr(model[2].weight, extension.savefield)
    return found


def rows_on_disk(x: Tensor, y: Tensor, folder: Path) -> Result:
    """Gradients of single samples in a store, and what they say of queries."""
    model, loss = network(), extend(nn.CrossEntropyLoss())
    with StoreWriter(folder / "rows", model, [extensions.BatchGrad()]) as writer:
        for start in (0, 3):
            with backpack(extensions.BatchGrad()):
                loss(model(x[start : start + 3]), y[start : start + 3]).backward()
            writer.write([10 + start, 11 + start, 12 + start], terms=3)
    read = store.Store(folder / "rows")
    assert_type(read.identifiers, Tensor)
    assert_type(read.arrays("grad_batch"), dict[str, StoredArray])
    curved = packprop.compute(model, loss, (x, y), extensions.EKFAC(), progress=False)
    refinement = Refinement((x, y), readings=4, progress=False)
    found = packprop.influence(read, model, loss, (x, y), curvature=curved, damping=0.1, refine=refinement, k=2)
    assert_type(found, Influence)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    assert_type(packprop.optimizer_curvature(model, optimizer), dict[str, Tensor])
    moment = packprop.Checkpoint(read, model.state_dict(), rate=0.1)
    assert_type(packprop.tracin([moment], model, loss, (x, y), k=2), Influence)
    tokens = x[:, None].expand(-1, 5, -1), torch.zeros(len(x), 5, 3)
    assert_type(packprop.token_influence(model, nn.MSELoss(), tokens, tokens), Tensor)
    return {"self": assert_type(packprop.self_influence(read, curvature=curved, damping=0.1), Tensor)}


def training(x: Tensor, y: Tensor, folder: Path) -> Result:
    """A loop that is watched, with an eye on spikes, and gradients that are clipped."""
    model, loss = network(), extend(nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    spikes: list[monitor.Spike] = []
    watched = Monitor(model, every=2, log=monitor.JsonLines(folder / "run.jsonl"), on_spike=spikes.append)
    for _ in range(4):
        optimizer.zero_grad()
        with watched.step():
            loss(model(x), y).backward()
        optimizer.step()
    state = assert_type(watched.state_dict(), dict[str, Any])
    Monitor(model, every=2, log=None).load_state_dict(state)
    with packprop.clipped_gradients(extensions.BatchL2Grad(), max_norm=1.0, per="module") as clipped:
        assert_type(clipped, packprop.ClippedGradients)
        loss(model(x), y).backward()
    with packprop.algorithms(norms="gradients"), backpack(extensions.BatchL2Grad()):
        loss(model(x), y).backward()
    assert_type(clipped.fraction, Tensor)
    return {"layers": assert_type(clipped.layer_norms, dict[str, Tensor])}


def of_ones_own(x: Tensor) -> Result:
    """A loss and an extension of one's own, their checks, and what is put together from several ranks."""

    class Fourth(nn.Module):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return (input - target).pow(4).mean()

    @register_loss(Fourth)
    def describe(input: Tensor, target: Tensor) -> Any:
        return None

    class Largest(extensions.BatchGrad):
        """The largest entry of each parameter's rows."""

        savefield = "largest"

        def finish(self, values: list[Any], samples: int) -> Any:
            """The entry."""
            return super().finish(values, samples).abs().amax()

    assert all(map(callable, [register_use, testing.check_use, testing.check_extension]))
    assert all(map(callable, [distributed.merge_over_ranks, compat.install]))
    report = testing.check_model(nn.Linear(4, 1), F.mse_loss, x, torch.randn(len(x), 1))
    ranks = packprop.AllRanks()
    assert ranks == distributed.AllRanks()
    with packprop.LiveBytes() as live:
        made = functions.Loss(None, 1.0, 1, None)
    assert_type(packprop.byte_text(live.peak) + memory.byte_text(live.peak), str)
    assert_type(examples.load_digits(), tuple[Tensor, Tensor])
    return {"checked": assert_type(report, testing.Report), "ranks": ranks, "own": Largest(), "made": made}


def mistakes(model: nn.Module) -> str:
    """An error has four parts, and is told by its class from others."""
    try:
        data = torch.ones(2, 4), torch.ones(2)
        packprop.compute(model, nn.CrossEntropyLoss(), data, extensions.BatchGrad(), memory="much")
    except PackpropError as error:
        told: PackpropError = error
        assert_type(told.instead, str)
        return told.where
    return errors.PackpropWarning.__name__ + PackpropWarning.__name__
