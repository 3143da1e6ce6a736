"""A user's program: `mypy --strict` accepts it, knows the type of each value, and it runs."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import packprop
from packprop import BadInput, Plan, Profile, Result, backpack, extend, extensions, kronecker, restore


class Network(nn.Module):
    """A model with a method of its own, which is still known after `extend`."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs ``[n, 3]``."""
        return self.scores(self.hidden(x).tanh())

    def scores(self, hidden: Tensor) -> Tensor:
        """The outputs for hidden values ``[n, 8]``."""
        scores: Tensor = self.head(hidden)
        return scores


def a_step(x: Tensor, y: Tensor) -> list[Tensor]:
    """Values of one backward pass, read by a hook and from the parameters."""
    model = assert_type(extend(Network()), Network)
    loss = assert_type(extend(nn.CrossEntropyLoss()), nn.CrossEntropyLoss)
    seen: list[str] = []

    def hook(module: nn.Module) -> None:
        seen.append(type(module).__name__)

    with backpack(extensions.BatchGrad(), extensions.KFAC(mc_samples=2), extension_hook=hook, memory="1GiB"):
        loss(model(x), y).backward()
    assert seen
    assert_type(restore(model), Network)
    assert_type(kronecker.trace([torch.eye(2), torch.eye(3)]), Tensor)
    # torch says of attributes of modules and tensors only that they are `Any`, or `Tensor`
    return [getattr(parameter, extensions.BatchGrad.savefield) for parameter in model.parameters()]


def a_data_set(x: Tensor, y: Tensor, folder: Path) -> dict[str, object]:
    """Values over a data set, saved and read again."""
    extension = extensions.DiagGGNExact()
    result = packprop.compute(Network(), nn.CrossEntropyLoss(), (x, y), [extension], progress=False)
    assert_type(result, Result)
    assert_type(result.samples, int)
    result.save(folder / "result.safetensors")
    loaded = assert_type(Result.load(folder / "result.safetensors"), Result)
    return {**loaded[extension]}


def a_plan(x: Tensor, y: Tensor) -> Plan:
    """What a step takes; a budget that is too small is an error with a reason."""
    try:
        packprop.plan(Network(), nn.CrossEntropyLoss(), (x, y), [extensions.BatchGrad()], memory=1)
    except BadInput as error:
        assert_type(str(error), str)
    return packprop.plan(Network(), nn.CrossEntropyLoss(), (x, y), [extensions.BatchGrad()])


def a_profile(x: Tensor, y: Tensor) -> Profile:
    """The table, layer by layer."""
    return packprop.profile(Network(), nn.CrossEntropyLoss(), (x, y))


def jobs(x: Tensor, y: Tensor, folder: Path) -> dict[str, Tensor]:
    """Each job of the front page: what comes out has a type, or is any."""
    model, loss = extend(Network()), extend(nn.CrossEntropyLoss())
    with packprop.clipped_gradients(max_norm=1.0) as clipped:
        loss(model(x), y).backward()
    found = {"clipped": assert_type(clipped.norms, Tensor), "bound": assert_type(clipped.bound, Tensor)}
    with backpack([extensions.BatchL2Grad(), extensions.Variance()], memory="2GiB") as pass_:
        loss(model(x), y).backward()
    assert_type(pass_.rows, range)
    result = packprop.compute(model, loss, (x, y), extensions.KFAC(), extensions.BatchL2Grad(), progress=False)
    found["norms"] = assert_type(result.norms(), Tensor)
    weight = model.head.weight
    found["step"] = kronecker.solve(result["kfac"]["head.weight"], weight, damping=1e-2)
    found["inverse"] = kronecker.inverse(result[extensions.KFAC()]["head.bias"], damping=1e-2)[0]
    plan = packprop.plan(model, loss, (x, y), extensions.BatchGrad(), extensions.Variance(), memory="1GiB")
    assert_type(plan.peak, int)
    profile = packprop.profile(model, loss, (x, y), batch_size=3, progress=False)
    assert_type(profile.suspects(2), list[int])
    assert_type(packprop.compare(profile, profile), packprop.Comparison)
    monitor = packprop.Monitor(model, every=1, quantities="gradient_norm", log=None)
    with monitor.step():
        loss(model(x), y).backward()
    assert monitor.last is not None
    step = assert_type(
        packprop.compile(model, loss, extensions.BatchL2Grad(), backend="eager"), packprop.CompiledStep
    )
    found["loss"] = assert_type(step(x, y), Tensor)
    assert_type(packprop.coverage(model, x), packprop.Coverage)
    found["product"] = packprop.products.hvp(loss(model(x), y), [weight], [weight])[0]
    outputs = model(x)
    operator = packprop.operators.ggn((outputs, loss(outputs, y)), [*model.parameters()])
    found["curved"] = operator @ torch.ones(operator.shape[0])
    packprop.compute(
        model, loss, (x, y), extensions.BatchGrad(), progress=False, store=folder / "rows", batch_size=3
    )
    store = packprop.Store(folder / "rows")
    influence = packprop.influence(store, model, loss, (x[:2], y[:2]), k=2)
    assert_type(influence, packprop.Influence)
    with packprop.disable(), packprop.record():
        model(x)
    return found


def a_penalty(x: Tensor) -> Tensor:
    """A branch whose gradient is taken at once; as a decorator it keeps the function's signature."""

    @packprop.eager_backward
    def penalty(hidden: Tensor, weight: float) -> Tensor:
        return weight * hidden.square().sum()

    return assert_type(penalty(x, 0.5), Tensor) + packprop.eager_backward(lambda t: t.square().sum(), x)
