"""Programs written for BackPACK run on packprop, unmodified, and get the right numbers."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packprop.engine.recording.switch import is_extended
from tests.compat.programs import (
    convolutional,
    dense_ggn,
    flat,
    images,
    installed,
    jacobians,
    mlp,
    near,
    softmax_hessian,
    vectors,
)


@installed
def test_a_loop_with_a_preconditioner() -> None:
    from backpack import backpack, extend
    from backpack.extensions import DiagGGNExact
    from backpack.utils.examples import autograd_diag_ggn_exact

    model, loss_function = extend(convolutional()), extend(nn.CrossEntropyLoss())
    reference = copy.deepcopy(model)
    x, y = images()
    for _ in range(3):
        loss = loss_function(model(x), y)
        model.zero_grad()
        with backpack(DiagGGNExact()):
            loss.backward()
        expected = autograd_diag_ggn_exact(x, y, reference, nn.CrossEntropyLoss())
        plain = torch.autograd.grad(F.cross_entropy(reference(x), y), list(reference.parameters()))
        near(flat(p.diag_ggn_exact for p in model.parameters()), expected)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad / (p.diag_ggn_exact + 0.01)
            step = 0.1 * flat(plain) / (expected + 0.01)
            start = 0
            for p in reference.parameters():
                p -= step[start : start + p.numel()].view_as(p)
                start += p.numel()
    near(flat(model.parameters()), flat(reference.parameters()))


@installed
def test_a_trace_by_a_hook() -> None:
    from backpack import backpack, extend
    from backpack.extensions.secondorder.diag_ggn import DiagGGNExact

    class Trace:
        def __init__(self) -> None:
            self.value: Tensor | float = 0.0
            self.alive: list[weakref.ref[Tensor]] = []
            self.most = 0

        def __call__(self, module: nn.Module) -> None:
            gc.collect()
            self.most = max(self.most, sum(ref() is not None for ref in self.alive))
            for parameter in module.parameters():
                if hasattr(parameter, "diag_ggn_exact"):
                    self.value = self.value + parameter.diag_ggn_exact.sum()
                    self.alive.append(weakref.ref(parameter.diag_ggn_exact))
                    del parameter.diag_ggn_exact

    model, loss_function, trace = extend(mlp()), extend(nn.CrossEntropyLoss()), Trace()
    x, y = vectors()
    with backpack(DiagGGNExact(), extension_hook=trace):
        loss_function(model(x), y).backward()
    assert isinstance(trace.value, Tensor)
    near(trace.value, dense_ggn(model, x, softmax_hessian).trace() / len(x))
    assert trace.most == 0
    assert not any(hasattr(parameter, "diag_ggn_exact") for parameter in model.parameters())


@installed
def test_a_newton_step_by_conjugate_gradients() -> None:
    from backpack.hessianfree.ggnvp import ggn_vector_product
    from backpack.utils.convert_parameters import vector_to_parameter_list

    model = mlp()
    x, y = vectors()
    output = model(x)
    loss = F.cross_entropy(output, y)
    parameters = list(model.parameters())
    gradient = flat(torch.autograd.grad(loss, parameters, retain_graph=True))

    def product(vector: Tensor) -> Tensor:
        found = ggn_vector_product(loss, output, model, vector_to_parameter_list(vector, parameters))
        return flat(found) + 0.5 * vector

    step, residual = torch.zeros_like(gradient), gradient.clone()
    direction = residual.clone()
    for _ in range(len(gradient)):
        image = product(direction)
        length = residual @ residual / (direction @ image)
        step, new = step + length * direction, residual - length * image
        direction = new + new @ new / (residual @ residual) * direction
        residual = new
        if residual.norm() < 1e-13:
            break
    matrix = dense_ggn(model, x, softmax_hessian) / len(x)
    near(step, torch.linalg.solve(matrix + 0.5 * torch.eye(len(gradient)), gradient))


@installed
def test_a_private_optimizer() -> None:
    """Clipping needs all norms before the first sum; noise comes from the global random state."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad, BatchL2Grad

    class Private(torch.optim.Optimizer):
        def __init__(self, parameters: Any, bound: float, noise: float) -> None:
            super().__init__(parameters, dict(bound=bound, noise=noise))

        def step(self) -> None:  # type: ignore[override]  # without a closure
            for group in self.param_groups:
                norms = torch.stack([p.batch_l2 for p in group["params"]]).sum(0).sqrt()
                factors = (group["bound"] / norms).clamp(max=1.0)
                for p in group["params"]:
                    shape = (-1, *(1,) * p.dim())
                    p.grad = (p.grad_batch * factors.view(shape)).sum(0) + group["noise"] * torch.randn_like(p)
                    p.data -= 0.1 * p.grad

    model, loss_function = extend(convolutional()), extend(nn.CrossEntropyLoss(reduction="sum"))
    reference, optimizer = copy.deepcopy(model), Private(model.parameters(), 0.9, 0.01)
    x, y = images()
    torch.manual_seed(3)
    for _ in range(2):
        loss = loss_function(model(x), y)
        with backpack(BatchGrad(), BatchL2Grad()):
            loss.backward()
        optimizer.step()
    torch.manual_seed(3)
    for _ in range(2):
        parameters = list(reference.parameters())
        totals = [torch.zeros_like(p) for p in parameters]
        clipped = 0
        for row, label in zip(x.split(1), y.split(1), strict=True):
            rows = torch.autograd.grad(F.cross_entropy(reference(row), label), parameters)
            norm = flat(rows).norm()
            clipped += bool(norm > 0.9)
            for total, part in zip(totals, rows, strict=True):
                total += part * min(1.0, 0.9 / norm.item())
        assert clipped > 0
        for p, total in zip(parameters, totals, strict=True):
            p.data -= 0.1 * (total + 0.01 * torch.randn_like(p))
    near(flat(model.parameters()), flat(reference.parameters()))


@installed
@pytest.mark.parametrize("chunks", [1, 2, 6])
def test_chunks_of_outputs(chunks: int) -> None:
    from backpack import backpack, extend
    from backpack.custom_module.slicing import Slicing as TheirSlicing
    from backpack.extensions import DiagGGNExact

    model, loss_function = extend(nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 6))), nn.MSELoss()
    extend(loss_function)
    x, target = torch.randn(3, 4), torch.randn(3, 6)
    output = model(x)
    totals = [torch.zeros_like(p) for p in model.parameters()]
    width = 6 // chunks
    for start in range(0, 6, width):
        part = (slice(None), slice(start, start + width))
        loss = loss_function(extend(TheirSlicing(part))(output), target[part])
        with backpack(DiagGGNExact(), retain_graph=True):
            loss.backward(retain_graph=True)
        for total, p in zip(totals, model.parameters(), strict=True):
            total += p.diag_ggn_exact / chunks
    matrix = dense_ggn(model, x, lambda out: 2 * torch.eye(6)) / 18
    near(flat(totals), matrix.diagonal())


@installed
def test_jacobians_as_a_backend() -> None:
    """How libraries call it: one backward pass for each output, hooks removed, everything extended again."""
    from backpack import backpack, extend, memory_cleanup
    from backpack.context import CTX
    from backpack.extensions import BatchGrad

    model = mlp()
    x, _ = vectors()
    expected = jacobians(model, x)
    for _ in range(2):
        extend(model)
        columns = []
        for entry in range(3):
            model.zero_grad()
            output = model(x)
            with backpack(BatchGrad()):
                output[:, entry].sum().backward()
            columns.append(torch.cat([p.grad_batch.flatten(1) for p in model.parameters()], 1))
            for p in model.parameters():
                del p.grad_batch
        near(torch.stack(columns, 1), expected)
        CTX.remove_hooks()
        for child in model.modules():
            memory_cleanup(child)
        assert not is_extended(model)
