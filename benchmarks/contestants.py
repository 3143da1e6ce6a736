"""What each library does for each quantity: ``QUANTITIES`` and ``CONTESTANTS``, two tables.

A contestant's ``prepare`` imports its library, so that one that is missing is a ``Gap`` with a
reason in the results and the rest goes on. It returns a function of no arguments: one training
step's forward and backward pass with the quantity, from gradients that are ``None``.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.problems import ALL_EIGHT, PRODUCT, ClassesSecond, First, Problem, Task

Results = dict[str, dict[str, Any]]
"""Extension, then parameter name, then a tensor or a list of Kronecker factors."""

Call = Callable[[], Results]


class Gap(Exception):
    """A contestant cannot take part; the text says why and goes into the results."""


@dataclass(frozen=True)
class Quantity:
    """What is asked for: extensions of one backward pass, ``traced`` if a hook sums and frees.

    ``product``: instead, the Hessian of the loss in all parameters times one vector.
    """

    extensions: tuple[str, ...]
    traced: bool = False
    product: bool = False


FIRST_ORDER = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance")
MONTE_CARLO = ("DiagGGNMC", "KFAC")
EXACT = ("DiagGGNExact", "KFLR")
NO_TRANSFORM = ("KFAC", "KFLR", "KFRA", "DiagHessian")
"""Extensions that no transform of ``torch.func`` is the plain way to."""

QUANTITIES: dict[str, Quantity] = {name: Quantity((name,)) for name in ALL_EIGHT} | {
    "gradient seed": Quantity(FIRST_ORDER),
    "exact seed": Quantity(EXACT),
    "Monte Carlo seed": Quantity(MONTE_CARLO),
    "all but KFLR": Quantity(tuple(name for name in ALL_EIGHT if name != "KFLR")),
    "all eight": Quantity(ALL_EIGHT),
    "DiagHessian": Quantity(("DiagHessian",)),
    "KFRA": Quantity(("KFRA",)),
    PRODUCT: Quantity((), product=True),
    "trace of DiagGGNExact by hook": Quantity(("DiagGGNExact",), traced=True),
    "trace of DiagHessian by hook": Quantity(("DiagHessian",), traced=True),
}

ATTRIBUTES = {
    "BatchGrad": "grad_batch",
    "BatchL2Grad": "batch_l2",
    "SumGradSquared": "sum_grad_squared",
    "Variance": "variance",
    "DiagGGNExact": "diag_ggn_exact",
    "DiagGGNMC": "diag_ggn_mc",
    "KFAC": "kfac",
    "KFLR": "kflr",
    "KFRA": "kfra",
    "DiagHessian": "diag_h",
}

HESSIAN_FREE = {"backpack": "backpack.hessianfree.hvp", "packprop": "packprop.compat.hessianfree"}
"""The module with Hessian-vector products of each library."""


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen, by name."""
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if name.partition(".")[0] == "packprop":  # a module that moved, not a library that is missing
            raise
        raise Gap(f"{name} cannot be imported: {error}") from error


# ---------------------------------------------------------------------- without any library


def _plain(task: Task, quantity: Quantity) -> Call:
    model, loss = deepcopy(task.model), task.loss

    def call() -> Results:
        model.zero_grad()
        loss(model(task.inputs), task.targets).backward()
        return {}

    return call


def _double_backward(task: Task, quantity: Quantity) -> Call:
    """Hessian-vector product by autograd alone."""
    model, loss = deepcopy(task.model), task.loss
    parameters, vectors = list(model.parameters()), _vectors(model)

    def call() -> Results:
        value = loss(model(task.inputs), task.targets)
        slopes = torch.autograd.grad(value, parameters, create_graph=True)
        return _named(model, torch.autograd.grad(slopes, parameters, vectors))

    return call


def _vectors(model: nn.Module) -> list[Tensor]:
    """One vector for each parameter, the same for every contestant."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(tensor.shape, generator=generator) for tensor in model.parameters()]


def _named(model: nn.Module, products: Sequence[Tensor]) -> Results:
    names = [name for name, _ in model.named_parameters()]
    return {PRODUCT: dict(zip(names, products, strict=True))}


# --------------------------------------------------- packprop and BackPACK: one interface


def _hessian_free(library: str, task: Task) -> Call:
    """Hessian-vector product by a library's own function; nothing needs to be extended."""
    products = _library(HESSIAN_FREE[library])
    model, loss = deepcopy(task.model), task.loss
    parameters, vectors = list(model.parameters()), _vectors(model)

    def call() -> Results:
        value = loss(model(task.inputs), task.targets)
        return _named(model, products.hessian_vector_product(value, parameters, vectors))

    return call


def _extended(library: str, task: Task, quantity: Quantity, *, save_memory: bool | None = None) -> Call:
    """Prepare a library that leaves results on parameters as attributes, until the next step's are there."""
    if quantity.product:
        return _hessian_free(library, task)
    package = _library(library)
    extensions = _library(f"{library}.extensions")
    missing = [name for name in quantity.extensions if not hasattr(extensions, name)]
    if missing:
        raise Gap(f"{library} has no {', '.join(missing)}")
    adapted = _for_backpack(task.model) if library == "backpack" else deepcopy(task.model)
    model, loss = package.extend(adapted), package.extend(deepcopy(task.loss))
    setting: Callable[[], AbstractContextManager[Any]] = nullcontext
    if save_memory is not None:
        algorithms = _library(f"{library}.core.derivatives.convnd")
        setting = partial(algorithms.weight_jac_t_save_memory, save_memory=save_memory)

    def wanted() -> list[Any]:
        return [getattr(extensions, name)() for name in quantity.extensions]

    def call() -> Results:
        model.zero_grad()
        value = loss(model(task.inputs), task.targets)
        with setting(), package.backpack(*wanted()):
            value.backward()
        return {
            name: {
                parameter: getattr(tensor, ATTRIBUTES[name]) for parameter, tensor in _trained(model).items()
            }
            for name in quantity.extensions
        }

    def traced() -> Results:
        model.zero_grad()
        sums = [torch.zeros(())]
        (attribute,) = (ATTRIBUTES[name] for name in quantity.extensions)

        def reduce(module: nn.Module) -> None:
            own = [each for each in module.parameters() if hasattr(each, attribute)]
            sums.extend(_take(each, attribute).sum() for each in own)

        value = loss(model(task.inputs), task.targets)
        with setting(), package.backpack(*wanted(), extension_hook=reduce):
            value.backward()
        return {"trace": {"": torch.stack(sums).sum()}}

    return traced if quantity.traced else call


def _for_backpack(model: nn.Module) -> nn.Module:
    """A copy in which modules of ours are those that BackPACK has for the same."""
    copy = deepcopy(model)
    for name, layer in copy.named_children():
        if isinstance(layer, First):
            setattr(copy, name, _library("backpack.custom_module.reduce_tuple").ReduceTuple(index=0))
        elif isinstance(layer, ClassesSecond):
            setattr(copy, name, _library("backpack.custom_module.permute").Permute(0, 2, 1))
    return copy


def _take(parameter: Tensor, attribute: str) -> Any:
    """Read a result and free the parameter of it."""
    value = getattr(parameter, attribute)
    delattr(parameter, attribute)
    return value


def _backpack_in_chunks(task: Task, quantity: Quantity, chunks: int) -> Call:
    """GGN diagonal in several backward passes over slices of the outputs, as BackPACK advises."""
    package, extensions = _library("backpack"), _library("backpack.extensions")
    slicing = _library("backpack.custom_module.slicing").Slicing
    model, loss = package.extend(deepcopy(task.model)), package.extend(deepcopy(task.loss))

    def call() -> Results:
        model.zero_grad()
        outputs = model(task.inputs)
        size = outputs.shape[1] // chunks
        sums = {name: torch.zeros_like(tensor) for name, tensor in model.named_parameters()}
        for start in range(0, outputs.shape[1], size):
            window = (slice(None), slice(start, start + size))
            part = package.extend(slicing(window))
            value = loss(part(outputs), task.targets[window])
            with package.backpack(extensions.DiagGGNExact(), retain_graph=True):
                value.backward(retain_graph=True)
            for name, tensor in model.named_parameters():
                sums[name] += tensor.diag_ggn_exact
        # Each slice's mean has a divisor that is smaller by the number of slices.
        return {"DiagGGNExact": {name: total / chunks for name, total in sums.items()}}

    return call


# ---------------------------------------------------------------------------- torch.func


def _torch_func(task: Task, quantity: Quantity) -> Call:
    """Per-sample gradients by ``vmap(grad)``; GGN diagonals by ``vmap`` over root columns too."""
    if quantity.product:
        return _torch_func_product(task)
    beyond = [name for name in quantity.extensions if name in NO_TRANSFORM]
    if beyond:
        raise Gap(f"torch.func has no transform for {', '.join(beyond)}")
    model, loss = deepcopy(task.model), task.loss
    parameters = {name: tensor.detach() for name, tensor in _trained(model).items()}
    samples = len(task.inputs)

    def outputs(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        predicted: Tensor = torch.func.functional_call(model, values, (sample[None],))
        return predicted

    def share(values: dict[str, Tensor], sample: Tensor, target: Tensor) -> Tensor:
        value: Tensor = loss(outputs(values, sample), target[None])
        return value / samples

    def projected(values: dict[str, Tensor], sample: Tensor, column: Tensor) -> Tensor:
        return (outputs(values, sample)[0] * column).sum()

    rows = torch.func.vmap(torch.func.grad(share), in_dims=(None, 0, 0))
    pulled = torch.func.vmap(torch.func.grad(projected), in_dims=(None, 0, 0))
    swept = torch.func.vmap(pulled, in_dims=(None, None, 0))
    # About as many (column, sample) pairs at a time as there are samples in a usual batch.
    columns_at_once = max(1, 64 // samples)

    def diagonal(columns_of: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            columns = columns_of(loss, model(task.inputs))
        sums = {name: torch.zeros_like(value) for name, value in parameters.items()}
        for chunk in columns.split(columns_at_once):
            for name, cotangent in swept(parameters, task.inputs, chunk).items():
                sums[name] += cotangent.square().sum(dim=(0, 1))
        return sums

    finish: dict[str, Callable[[Tensor], Tensor]] = {
        "BatchGrad": lambda g: g,
        "BatchL2Grad": lambda g: g.flatten(start_dim=1).square().sum(dim=1),
        "SumGradSquared": lambda g: g.square().sum(dim=0),
        "Variance": lambda g: g.var(dim=0, correction=0),
    }
    columns = {"DiagGGNExact": exact_columns, "DiagGGNMC": sampled_columns}

    def call() -> Results:
        results: Results = {}
        if any(name in finish for name in quantity.extensions):
            gradients = rows(parameters, task.inputs, task.targets)
        for name in quantity.extensions:
            if name in finish:
                results[name] = {key: finish[name](value) for key, value in gradients.items()}
            else:
                results[name] = diagonal(columns[name])
        if quantity.traced:
            (values,) = results.values()
            return {"trace": {"": torch.stack([value.sum() for value in values.values()]).sum()}}
        return results

    return call


def _torch_func_product(task: Task) -> Call:
    """Hessian-vector product by forward over reverse differentiation, right where no layer normalises."""
    model, loss = deepcopy(task.model), task.loss
    parameters = {name: tensor.detach() for name, tensor in model.named_parameters()}
    vectors = dict(zip(parameters, _vectors(model), strict=True))

    def value(values: dict[str, Tensor]) -> Tensor:
        found: Tensor = loss(torch.func.functional_call(model, values, (task.inputs,)), task.targets)
        return found

    def call() -> Results:
        _, product = torch.func.jvp(torch.func.grad(value), (parameters,), (vectors,))
        return {PRODUCT: product}

    return call


def exact_columns(loss: nn.Module, outputs: Tensor) -> Tensor:
    """Return ``[v, n, c]``, columns of a root of the Hessian of a mean loss, with its 1/N.

    >>> f = torch.tensor([[0.3, -0.2, 0.9]])
    >>> s = exact_columns(nn.CrossEntropyLoss(), f)
    >>> hessian = torch.func.hessian(lambda g: nn.functional.cross_entropy(g, torch.tensor([1])))
    >>> torch.allclose(torch.einsum("vnc,vnd->cd", s, s), hessian(f)[0, :, 0])
    True
    """
    samples, classes = outputs.shape
    eye = torch.eye(classes)[:, None, :]
    if isinstance(loss, nn.MSELoss):
        return math.sqrt(2 / outputs.numel()) * eye.expand(classes, samples, classes)
    probabilities = outputs.softmax(dim=1)
    weights = (probabilities.T[:, :, None] / samples).sqrt()
    return weights * (eye - probabilities[None])


def sampled_columns(loss: nn.Module, outputs: Tensor) -> Tensor:
    """Return ``[1, n, c, *t]``, a draw whose outer product is the same Hessian in expectation."""
    if isinstance(loss, nn.MSELoss):
        return math.sqrt(2 / outputs.numel()) * torch.randn_like(outputs)[None]
    terms = outputs.movedim(1, -1)
    probabilities = terms.softmax(dim=-1)
    drawn = probabilities.flatten(0, -2).multinomial(1).view(*terms.shape[:-1], 1)
    hot = torch.zeros_like(probabilities).scatter_(-1, drawn, 1.0)
    return (probabilities - hot).movedim(-1, 1)[None] / math.sqrt(terms[..., 0].numel())


# -------------------------------------------------------------------------------- Opacus


def _for_opacus(model: nn.Module) -> nn.Module:
    """A copy in which recurrent layers are Opacus' own, with the same parameters."""
    copy = deepcopy(model)
    for name, layer in copy.named_children():
        if isinstance(layer, nn.LSTM):
            own = _library("opacus.layers").DPLSTM(
                layer.input_size, layer.hidden_size, batch_first=layer.batch_first
            )
            own.load_state_dict(layer.state_dict())
            setattr(copy, name, own)
    return copy


def _opacus(task: Task, quantity: Quantity) -> Call:
    """Per-sample gradients by hooks; ``"sum"`` so that rows keep the 1/N of the mean loss."""
    grad_sample = _library("opacus.grad_sample")
    inner = _for_opacus(task.model)
    model, loss = grad_sample.GradSampleModule(inner, loss_reduction="sum"), task.loss

    def call() -> Results:
        model.zero_grad()
        loss(model(task.inputs), task.targets).backward()
        # A second backward pass would append to rows that were left there.
        values = {name: _take(tensor, "grad_sample") for name, tensor in _trained(inner).items()}
        for tensor in _trained(inner).values():
            vars(tensor)["grad_sample"] = None
        return {"BatchGrad": values}

    return call


def _opacus_norms(task: Task, quantity: Quantity) -> Call:
    """Norms without per-sample gradients (ghost clipping), up to the point where it would clip."""
    grad_sample = _library("opacus.grad_sample")
    inner = _for_opacus(task.model)
    model = grad_sample.GradSampleModuleFastGradientClipping(
        inner, loss_reduction="sum", max_grad_norm=1, use_ghost_clipping=True
    )

    def call() -> Results:
        model.zero_grad()
        task.loss(model(task.inputs), task.targets).backward()
        return {
            "BatchL2Grad": {
                name: _take(tensor, "_norm_sample").square() for name, tensor in _trained(inner).items()
            }
        }

    return call


# ---------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Contestant:
    """One row: how to prepare, and for which problems and quantities it stands at the start."""

    prepare: Callable[[Task, Quantity], Call]
    applies: Callable[[Problem, Quantity], bool] = lambda problem, quantity: True


def _first_order_on_convolutions(problem: Problem, quantity: Quantity) -> bool:
    # BackPACK reads its switch in products with per-sample Jacobians of convolutions alone.
    return bool(set(quantity.extensions) & {"BatchGrad", "SumGradSquared", "Variance"}) and any(
        isinstance(layer, nn.Conv2d) for layer in problem.model().modules()
    )


def _only(extension: str) -> Callable[[Problem, Quantity], bool]:
    return lambda problem, quantity: quantity == Quantity((extension,))


def _chunked(chunks: int) -> Callable[[Problem, Quantity], bool]:
    return lambda problem, quantity: chunks in problem.chunks and quantity == Quantity(("DiagGGNExact",))


# In this order a contestant is the reference for those after it, so what is plainest comes first.
CONTESTANTS: dict[str, Contestant] = {
    "plain": Contestant(_plain),
    "double backward": Contestant(_double_backward, lambda problem, quantity: quantity.product),
    "torch.func": Contestant(
        _torch_func,
        lambda problem, quantity: not set(quantity.extensions) & set(NO_TRANSFORM),
    ),
    "Opacus": Contestant(_opacus, _only("BatchGrad")),
    "Opacus, ghost norms": Contestant(_opacus_norms, _only("BatchL2Grad")),
    "BackPACK": Contestant(partial(_extended, "backpack")),
    "BackPACK, memory saving": Contestant(
        partial(_extended, "backpack", save_memory=True), _first_order_on_convolutions
    ),
    **{
        f"BackPACK, {chunks} chunks": Contestant(partial(_backpack_in_chunks, chunks=chunks), _chunked(chunks))
        for chunks in (4, 16, 64)
    },
    "packprop": Contestant(partial(_extended, "packprop")),
}
