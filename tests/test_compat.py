"""Programs written for BackPACK run on packprop, unmodified, and get the right numbers."""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import pickle
import re
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import compat
from packprop.compat import calls, catalogue
from packprop.compat.custom_module.branching import Branch, Parallel, SumModule
from packprop.compat.custom_module.pad import Pad
from packprop.compat.custom_module.permute import Permute
from packprop.compat.custom_module.reduce_tuple import ReduceTuple
from packprop.compat.custom_module.scale_module import ScaleModule
from packprop.compat.custom_module.slicing import Slicing
from packprop.compat.names import TABLE, Catalogue
from packprop.compat.own import (
    BackpropExtension,
    FirstOrderModuleExtension,
    ModuleExtension,
    SecondOrderBackpropExtension,
)
from packprop.errors import BadInput, PackpropError, PackpropWarning
from packprop.recording.switch import is_extended

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "compat.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def _installed() -> Iterator[None]:
    assert compat.install(replace=True)
    yield
    compat.uninstall()


@pytest.fixture
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that has defined no extension for modules yet."""
    monkeypatch.setattr(calls, "_keeping", False)


installed = pytest.mark.usefixtures("_installed")


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3))


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3), nn.Tanh()
    )


def images(samples: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 1, 6, 6), torch.arange(samples) % 3


def vectors(samples: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 4), torch.arange(samples) % 3


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def jacobians(model: nn.Module, x: Tensor) -> Tensor:
    """``[n, c, p]``, row by row."""
    parameters = list(model.parameters())
    rows = [
        flat(torch.autograd.grad(entry, parameters, retain_graph=True)) for row in model(x) for entry in row
    ]
    return torch.stack(rows).unflatten(0, (len(x), -1))


def dense_ggn(model: nn.Module, x: Tensor, hessian: Callable[[Tensor], Tensor]) -> Tensor:
    """``sum_n J_n^T H_n J_n`` from rows of the Jacobian; ``hessian`` gives H_n of one output."""
    outputs = model(x).detach()
    return torch.stack([J.T @ hessian(f) @ J for J, f in zip(jacobians(model, x), outputs, strict=True)]).sum(0)


def softmax_hessian(output: Tensor) -> Tensor:
    p = output.softmax(-1)
    return torch.diag(p) - torch.outer(p, p)


# Names


def test_the_names_that_programs_are_known_to_use() -> None:
    """The paths that tutorials and libraries import from."""
    assert {
        *("backpack.backpack", "backpack.extend", "backpack.disable", "backpack.memory_cleanup"),
        *("backpack.convert_module_to_backpack", "backpack.context.CTX", "backpack.extensions.HMP"),
        *("backpack.extensions.firstorder.batch_grad.BatchGrad", "backpack.extensions.KFAC"),
        *("backpack.extensions.secondorder.diag_ggn.DiagGGNExact", "backpack.extensions.curvature.Curvature"),
        *("backpack.extensions.secondorder.diag_hessian.DiagHessian", "backpack.extensions.curvmatprod.GGNMP"),
        *("backpack.extensions.secondorder.hbp.HBP", "backpack.extensions.secondorder.hbp.KFRA"),
        *("backpack.extensions.secondorder.sqrt_ggn.SqrtGGNMC", "backpack.custom_module.slicing.Slicing"),
        *("backpack.custom_module.pad.Pad", "backpack.custom_module.permute.Permute"),
        *("backpack.custom_module.reduce_tuple.ReduceTuple", "backpack.custom_module.branching.Parallel"),
        *("backpack.custom_module.scale_module.ScaleModule", "backpack.custom_module.branching.SumModule"),
        *("backpack.custom_module.graph_utils.BackpackTracer", "backpack.utils.subsampling.subsample"),
        *("backpack.hessianfree.hvp.hessian_vector_product", "backpack.hessianfree.ggnvp.ggn_vector_product"),
        *("backpack.hessianfree.lop.L_op", "backpack.hessianfree.rop.R_op"),
        *("backpack.utils.convert_parameters.vector_to_parameter_list", "backpack.utils.kroneckers.inv_kfacs"),
        *("backpack.utils.examples.load_one_batch_mnist", "backpack.utils.kroneckers.kfacs_to_mat"),
        "backpack.core.derivatives.convnd.weight_jac_t_save_memory",
        "backpack.extensions.backprop_extension.BackpropExtension",
        "backpack.extensions.module_extension.ModuleExtension",
        "backpack.extensions.firstorder.base.FirstOrderModuleExtension",
    } <= {f"{module}.{name}" for module, names in TABLE.items() for name in names}


@installed
@pytest.mark.parametrize("module", TABLE)
def test_every_name_resolves(module: str) -> None:
    found = importlib.import_module(module)
    for name, value in TABLE[module].items():
        if isinstance(value, Catalogue) and not catalogue.is_available(value.name):
            with pytest.raises(ImportError, match="this version of packprop does not have it"):
                getattr(found, name)
        elif isinstance(value, Catalogue):
            assert issubclass(getattr(found, name), getattr(packprop.extensions, value.name))
        else:
            assert getattr(found, name) is value


def test_the_page_lists_every_name() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", PAGE, re.MULTILINE)
    listed = {module: set(re.findall(r"`(\w+)`", names)) for module, names in rows}
    documented = {
        module.removeprefix("backpack."): {name for name in names if not name.startswith("_")}
        for module, names in TABLE.items()
    }
    assert {module: names for module, names in documented.items() if names} == {
        module: names for module, names in listed.items() if module in documented
    }


def test_the_page_runs() -> None:
    names: dict[str, Any] = {}
    try:
        for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
            exec(compile(code, "docs/compat.md", "exec"), names)
    finally:
        compat.uninstall()
    assert "fourth" in names


@installed
def test_attributes_lead_to_modules() -> None:
    import backpack

    assert backpack.extensions.BatchGrad is backpack.extensions.firstorder.batch_grad.BatchGrad
    assert backpack.hessianfree.hvp.hessian_vector_product is packprop.compat.hessianfree.hessian_vector_product
    assert not hasattr(backpack, "__version__")
    namespace: dict[str, Any] = {}
    exec("from backpack.extensions.firstorder import *", namespace)
    assert "Variance" in namespace


@installed
def test_what_packprop_has_in_addition_is_there() -> None:
    from backpack.extensions import BatchDotGrad

    assert issubclass(BatchDotGrad, packprop.extensions.BatchDotGrad)


@installed
@pytest.mark.parametrize("name", ["core.derivatives.linear", "nothing"])
def test_inner_parts_are_missing(name: str) -> None:
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module(f"backpack.{name}")
    assert "packprop has rules for functions, not for layers" in str(error.value)
    assert "instead: use an extension" in str(error.value)


@installed
def test_a_name_that_is_not_documented_is_missing() -> None:
    with pytest.raises(ImportError):
        from backpack import nothing_of_this_name  # noqa: F401
    import backpack.context

    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        backpack.context.nothing  # noqa: B018


@installed
def test_a_missing_extension_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(packprop.extensions, "KFAC")
    compat.uninstall()
    compat.install(replace=True)
    with pytest.raises(ImportError) as error:
        from backpack.extensions import KFAC  # noqa: F401
    assert str(error.value).startswith("KFAC of backpack.extensions was asked for")
    assert "instead: choose from" in str(error.value)
    assert "BatchGrad" in str(error.value)


# Beside an installed BackPACK


@pytest.fixture
def _other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of this name that is found first."""
    folder = tmp_path / "backpack"
    (folder / "extensions").mkdir(parents=True)
    (folder / "__init__.py").write_text("who = 'the other'\n")
    (folder / "extensions" / "__init__.py").write_text("who = 'its extensions'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "backpack"}
    yield
    compat.uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] == "backpack"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.usefixtures("_other")
def test_an_installed_one_is_left_alone() -> None:
    with pytest.warns(PackpropWarning, match=r"install\(replace=True\)"):
        assert not compat.install()
    assert not compat.is_installed()
    import backpack

    assert backpack.who == "the other"


def test_where_none_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "backpack"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    try:
        assert compat.install()
        from backpack.extensions import BatchGrad

        assert issubclass(BatchGrad, packprop.extensions.BatchGrad)
    finally:
        compat.uninstall()
        sys.modules.update(before)


@pytest.mark.usefixtures("_other")
def test_an_installed_one_is_replaced_and_comes_back() -> None:
    import backpack as before
    import backpack.extensions as inner

    assert compat.install(replace=True)
    assert compat.install()  # again: nothing changes
    import backpack as during
    from backpack.extensions import BatchGrad

    assert not hasattr(during, "who")
    assert issubclass(BatchGrad, packprop.extensions.BatchGrad)
    compat.uninstall()
    compat.uninstall()
    import backpack as after

    assert after is before
    assert sys.modules["backpack.extensions"] is inner


# Programs


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

        def step(self) -> None:  # type: ignore[override]
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


# Extensions for single modules


class Gate(nn.Module):
    """A layer of a user's own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class GateGradients(FirstOrderModuleExtension):
    def __init__(self) -> None:
        super().__init__(params=["weight"])

    def weight(self, extension: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        assert bpQuantities is None
        return g_out[0] * module.input0


class LinearSquares(FirstOrderModuleExtension):
    """Sums of fourth powers: what no extension of the catalogue has."""

    def __init__(self) -> None:
        super().__init__(params=["weight", "bias"])
        self.seen: list[Any] = []

    def weight(self, extension: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        self.seen.append((module, module.input0, module.output, g_inp[0], g_out[0]))
        chosen = extension.get_subsampling() or slice(None)
        return torch.einsum("no,ni->oi", g_out[0][chosen] ** 4, module.input0[chosen] ** 4)

    def bias(self, extension: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        return (g_out[0][extension.get_subsampling() or slice(None)] ** 4).sum(0)


class Fourth(BackpropExtension):
    def __init__(self, fail_mode: str = "SILENT", subsampling: list[int] | None = None) -> None:
        self.of_linear = LinearSquares()
        super().__init__("fourth", {nn.Linear: self.of_linear}, fail_mode, subsampling)


def run(model: nn.Module, x: Tensor, y: Tensor, *extensions: Any, hook: Any = None, **options: Any) -> Tensor:
    from backpack import backpack, extend

    loss = extend(nn.CrossEntropyLoss())(extend(model)(x), y)
    with backpack(*extensions, extension_hook=hook):
        loss.backward(**options)
    return loss


def fourth_powers(model: nn.Module, x: Tensor, y: Tensor, chosen: list[int]) -> list[Tensor]:
    totals = [torch.zeros_like(p) for p in model.parameters()]
    for sample in chosen:
        loss = F.cross_entropy(model(x[sample : sample + 1]), y[sample : sample + 1]) / len(x)
        rows = torch.autograd.grad(loss, list(model.parameters()))
        totals = [total + row**4 for total, row in zip(totals, rows, strict=True)]
    return totals


@installed
@pytest.mark.parametrize("chosen", [None, [3, 1]])
def test_an_extension_of_ones_own(chosen: list[int] | None) -> None:
    model, (x, y) = mlp(), vectors()
    run(model, x, y, Fourth(subsampling=chosen), packprop.extensions.BatchL2Grad())
    expected = fourth_powers(model, x, y, chosen or list(range(5)))
    for p, value in zip(model.parameters(), expected, strict=True):
        near(p.fourth, value)
        assert p.batch_l2.shape == (5,)
    near(flat(p.grad for p in model.parameters()), flat(gradient(model, x, y)))


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))


@installed
def test_what_a_module_extension_sees() -> None:
    model, (x, y) = mlp(), vectors()
    own = Fourth()
    run(model, x, y, own)
    hidden = model[1](model[0](x))
    output = model[2](hidden)
    slopes = torch.autograd.grad(F.cross_entropy(output, y), [hidden, output])
    (module, given, made, g_inp, g_out), (first, first_given, *_) = own.of_linear.seen
    assert module is model[2]
    assert first is model[0]
    assert first_given is x
    near(given, hidden)
    near(made, output)
    near(g_inp, slopes[0])
    near(g_out, slopes[1])
    assert own.of_linear.seen[1][3] is None  # the data need no gradient


@installed
def test_module_extensions_replace_values_of_the_catalogue() -> None:
    from backpack.extensions import BatchGrad

    class Wrong(GateGradients):
        def weight(self, *arguments: Any) -> Tensor:
            return super().weight(*arguments) + 1

    model, (x, y) = nn.Sequential(nn.Linear(4, 4), Gate(4), nn.Linear(4, 3)), vectors()
    run(model, x, y, BatchGrad())
    expected = [p.grad_batch for p in model.parameters()]
    at_hook = {}
    for own in (GateGradients(), Wrong()):
        extension = BatchGrad()
        extension.set_module_extension(Gate, own)
        run(
            model, x, y, extension, hook=lambda m: at_hook.update({id(p): p.grad_batch for p in m.parameters()})
        )
        for p, value in zip(model.parameters(), expected, strict=True):
            near(p.grad_batch, value + (1 if p is model[1].weight and isinstance(own, Wrong) else 0))
            assert at_hook[id(p)] is p.grad_batch


@installed
def test_a_hook_that_deletes_what_it_read() -> None:
    from backpack.extensions import BatchGrad

    extension = BatchGrad()
    extension.set_module_extension(Gate, GateGradients())
    model, (x, y) = nn.Sequential(nn.Linear(4, 4), Gate(4), nn.Linear(4, 3)), vectors()

    def drop(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            del p.grad_batch

    run(model, x, y, extension, hook=drop)
    assert not any(hasattr(p, "grad_batch") for p in model.parameters())


@installed
def test_columns_at_a_module() -> None:
    """An extension of the catalogue hands on its columns; one that knows no loss gets those of the GGN."""
    from backpack.extensions import DiagGGNExact

    class GateDiagonal(ModuleExtension):
        def __init__(self) -> None:
            super().__init__(["weight"])

        def weight(self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any) -> Tensor:
            shapes.append(columns.shape)
            return (columns * module.input0).square().sum((0, 1))

    shapes: list[torch.Size] = []
    model, (x, y) = nn.Sequential(nn.Linear(4, 4), Gate(4), nn.Tanh(), nn.Linear(4, 3)), vectors()
    extension = DiagGGNExact()
    extension.set_module_extension(Gate, GateDiagonal())
    own = SecondOrderBackpropExtension("own_diagonal", {Gate: GateDiagonal()}, fail_mode="SILENT")
    run(model, x, y, extension, own)
    expected = dense_ggn(model, x, softmax_hessian).diagonal() / 5
    near(flat(p.diag_ggn_exact for p in model.parameters()), expected)
    near(model[1].weight.own_diagonal, model[1].weight.diag_ggn_exact)
    assert shapes == [torch.Size([2, 5, 4])] * 2  # of three classes: the root has one column less


@installed
def test_columns_of_some_samples() -> None:
    from backpack.extensions import SqrtGGNExact

    class Rows(ModuleExtension):
        def __init__(self) -> None:
            super().__init__(["weight"])

        def weight(self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any) -> Tensor:
            return columns * module.input0[extension.get_subsampling()]

    model, (x, y) = nn.Sequential(nn.Linear(4, 4), Gate(4), nn.Linear(4, 3)), vectors()
    run(model, x, y, packprop.extensions.SqrtGGNExact(subsampling=[4, 0]))
    expected = model[1].weight.sqrt_ggn_exact
    extension = SqrtGGNExact(subsampling=[4, 0])
    extension.set_module_extension(Gate, Rows())
    run(model, x, y, extension)
    near(model[1].weight.sqrt_ggn_exact, expected)
    assert expected.shape == (3, 2, 4)


class Propagated(SecondOrderBackpropExtension):
    """A user's own second order: squares of GGN columns, propagated module by module from the loss."""

    def __init__(self) -> None:
        class OfLoss(ModuleExtension):
            def backpropagate(
                self, extension: Any, module: Any, g_inp: Any, g_out: Any, arrived: Any
            ) -> Tensor:
                assert arrived is None
                p = module.input0.softmax(-1)
                roots = torch.diag_embed(p.sqrt()) - torch.einsum("no,nv->nov", p, p.sqrt())
                return roots.movedim(-1, 0) / len(p) ** 0.5

        class OfLinear(ModuleExtension):
            def __init__(self) -> None:
                super().__init__(["weight", "bias"])

            def weight(self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any) -> Tensor:
                return torch.einsum("vno,ni->oi", columns**2, module.input0**2)

            def bias(self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any) -> Tensor:
                return (columns**2).sum((0, 1))

            def backpropagate(
                self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any
            ) -> Tensor:
                return columns @ module.weight

        class OfSigmoid(ModuleExtension):
            def backpropagate(
                self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any
            ) -> Tensor:
                return columns * (module.output * (1 - module.output))

        class Same(ModuleExtension):
            def backpropagate(
                self, extension: Any, module: Any, g_inp: Any, g_out: Any, columns: Any
            ) -> Tensor:
                return columns

        super().__init__(
            "propagated",
            {
                nn.CrossEntropyLoss: OfLoss(),
                nn.Linear: OfLinear(),
                nn.Sigmoid: OfSigmoid(),
                nn.Identity: Same(),
                SumModule: Same(),
            },
        )


class Accumulating(Propagated):
    def accumulate_backpropagated_quantities(self, existing: Tensor, other: Tensor) -> Tensor:
        return existing + other


@installed
def test_second_order_by_ones_own_rules() -> None:
    model, (x, y) = mlp(), vectors()
    run(model, x, y, Propagated())
    expected = dense_ggn(model, x, softmax_hessian).diagonal() / 5
    near(flat(p.propagated for p in model.parameters()), expected)


@installed
def test_second_order_by_ones_own_rules_over_branches() -> None:
    """A residual connection: what arrives along both ways is accumulated."""
    branches = Parallel(nn.Identity(), nn.Sequential(nn.Linear(5, 5), nn.Sigmoid()))
    model, (x, y) = nn.Sequential(nn.Linear(4, 5), branches, nn.Linear(5, 3)), vectors()
    run(model, x, y, Accumulating())
    expected = dense_ggn(model, x, softmax_hessian).diagonal() / 5
    near(flat(p.propagated for p in model.parameters()), expected)
    with pytest.raises(NotImplementedError, match=r"existing \+ other"):
        run(model, x, y, Propagated())


@installed
def test_gradients_at_inputs_come_through_the_module_alone() -> None:
    """One input of the sum is computed from the other one."""

    class Watching(ModuleExtension):
        def check_hyperparameters_module_extension(self, ext: Any, module: Any, g_inp: Any, g_out: Any) -> None:
            found.extend([list(g_inp), g_inp[:1], len(g_inp), g_out[0]])

    found: list[Any] = []
    model = nn.Sequential(nn.Linear(4, 5), Parallel(nn.Identity(), nn.Linear(5, 5)), nn.Linear(5, 3))
    x, y = vectors()
    run(model, x, y, BackpropExtension("nothing", {SumModule: Watching()}, fail_mode="SILENT"))
    (left, right), first, count, g_out = found
    near(left, g_out)
    near(right, g_out)
    assert first[0] is left
    assert count == 2


@installed
def test_one_tensor_twice_has_no_gradients_of_its_own() -> None:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sum = SumModule()

        def forward(self, x: Tensor) -> Tensor:
            return self.sum(x, x)

    class Watching(ModuleExtension):
        def check_hyperparameters_module_extension(self, ext: Any, module: Any, g_inp: Any, g_out: Any) -> None:
            g_inp[0]

    model, (x, y) = nn.Sequential(nn.Linear(4, 3), Double()), vectors()
    with pytest.raises(PackpropError, match="one tensor enters it more than once"):
        run(model, x, y, BackpropExtension("nothing", {SumModule: Watching()}, fail_mode="SILENT"))


@installed
def test_values_are_differentiable() -> None:
    model, (x, y) = mlp(), vectors()
    run(model, x, y, Fourth(), create_graph=True)
    found = torch.autograd.grad(model[0].weight.fourth.sum(), list(model.parameters()), allow_unused=True)
    rows = []
    for row, label in zip(x.split(1), y.split(1), strict=True):
        loss = F.cross_entropy(model(row), label) / 5
        rows.append(torch.autograd.grad(loss, model[0].weight, create_graph=True)[0])
    total = sum((row**4).sum() for row in rows)
    assert isinstance(total, Tensor)
    expected = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    for value, other in zip(found, expected, strict=True):
        near(value, other)


@installed
def test_values_are_constants_without_create_graph() -> None:
    model, (x, y) = mlp(), vectors()
    run(model, x, y, Fourth())
    assert not model[0].weight.fourth.requires_grad


@installed
def test_a_hook_sees_every_module_once_where_only_own_extensions_run() -> None:
    model, (x, y) = mlp(), vectors()
    seen: list[str] = []

    def hook(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        for p in module.parameters(recurse=False):
            assert p.fourth.shape == p.shape

    run(model, x, y, Fourth(), hook=hook)
    assert seen == ["CrossEntropyLoss", "Linear", "Sigmoid", "Linear"]


@installed
def test_hooks_may_look_at_calls() -> None:
    Fourth()
    model, (x, y) = mlp(), vectors()
    seen = {}
    run(model, x, y, packprop.extensions.BatchGrad(), hook=lambda m: seen.update({m: m.input0.shape}))
    assert seen == {model[0]: (5, 4), model[2]: (5, 5)}
    assert not hasattr(model[0], "input0")


@installed
def test_calls_are_dropped_with_the_graph() -> None:
    from backpack import extend, memory_cleanup

    Fourth()
    model, (x, y) = extend(mlp()), vectors()
    loss = F.cross_entropy(model(x), y)
    assert model[0].output.shape == (5, 5)
    loss.backward(retain_graph=True)
    assert model[0].input0 is x
    loss.backward()
    assert not any(hasattr(child, name) for child in model for name in ("input0", "output"))
    model(x)
    for child in model:
        memory_cleanup(child)
    assert not any(hasattr(child, "output") for child in model)
    copy.deepcopy(model)


@installed
def test_a_graph_that_is_retained_serves_again() -> None:
    from backpack import backpack, extend

    model, (x, y) = extend(mlp()), vectors()
    Fourth()
    loss = extend(nn.CrossEntropyLoss())(model(x), y)
    found = []
    for retain in (True, True, False):
        with backpack(Fourth(), retain_graph=retain):
            loss.backward(retain_graph=retain)
        found.append(model[0].weight.fourth)
    near(found[0], found[2])
    assert not hasattr(model[0], "output")


@installed
def test_no_memory_stays() -> None:
    model, (x, y) = mlp(), vectors()
    loss = run(model, x, y, Fourth())
    alive = weakref.ref(loss)
    gc.disable()
    try:
        del loss
        assert alive() is None
    finally:
        gc.enable()


@installed
@pytest.mark.usefixtures("_nothing_kept")
def test_nothing_is_kept_before_an_extension_is_defined() -> None:
    from backpack import backpack, extend

    model, (x, y) = extend(mlp()), vectors()
    loss = F.cross_entropy(model(x), y)
    assert not hasattr(model[0], "output")

    class Late(BackpropExtension):
        pass

    with (
        pytest.raises(PackpropError, match="define the classes of extensions first"),
        backpack(Late("late", {}, "SILENT")),
    ):
        loss.backward()
    loss = F.cross_entropy(model(x), y)
    assert model[0].output.shape == (5, 5)


@pytest.mark.usefixtures("_nothing_kept")
def test_calls_are_kept_when_asked_for() -> None:
    assert compat.install(replace=True, keep_module_io=True)
    try:
        from backpack import extend

        model = extend(mlp())
        model(vectors()[0])
        assert model[0].output.shape == (5, 5)
    finally:
        compat.uninstall()


@installed
def test_a_module_with_a_part_called_output() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.output(x)

    model, (x, y) = Block(), vectors()
    part = model.output
    run(model, x, y, Fourth())
    assert model.output is part
    assert part.weight.fourth.shape == (3, 4)
    with pytest.raises(PackpropError, match="rename the part"):
        run(model, x, y, BackpropExtension("nothing", {Block: ModuleExtension()}, fail_mode="SILENT"))


@installed
def test_a_module_that_is_called_twice() -> None:
    shared = nn.Linear(4, 4)
    model, (x, y) = nn.Sequential(shared, nn.Tanh(), shared), vectors()
    with pytest.raises(PackpropError) as error:
        run(model, x, y % 4, Fourth())
    assert "keeps the tensors of one call" in str(error.value)
    assert "instead: call the module once before backward()" in str(error.value)
    act = nn.Tanh()
    model = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act)
    run(model, x, y % 4, Fourth())  # nothing is asked of the module that is called twice


@installed
def test_a_parameter_of_two_modules() -> None:
    model, (x, y) = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), vectors()
    model[2].weight = model[0].weight
    with pytest.raises(PackpropError, match="another module has the same parameter"):
        run(model, x, y % 4, Fourth())


@installed
def test_tensors_that_were_changed_in_place() -> None:
    model, (x, y) = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)), vectors()
    with pytest.raises(PackpropError, match="changed in place"):
        run(model, x, y, Fourth())


@installed
def test_fail_modes() -> None:
    model, (x, y) = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), vectors()
    with pytest.raises(NotImplementedError) as error:
        run(model, x, y, Fourth("ERROR"))
    assert "a module of type CrossEntropyLoss" in str(error.value)
    with pytest.warns(UserWarning, match="no module extension for LayerNorm") as noted:
        run(model, x, y, Fourth("WARNING"))
    assert len([w for w in noted if "module extension" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, x, y, Fourth("SILENT"))
    assert hasattr(model[0].weight, "fourth")
    with pytest.raises(ValueError, match="'SILENT'"):
        Fourth("QUIET")


@installed
def test_what_is_said_of_a_class_is_not_overwritten() -> None:
    extension = Fourth()
    with pytest.raises(ValueError, match="pass overwrite=True"):
        extension.set_module_extension(nn.Linear, LinearSquares())
    other = LinearSquares()
    extension.set_module_extension(nn.Linear, other, overwrite=True)
    assert extension.module_extensions == {nn.Linear: other}


@installed
def test_an_extension_without_a_method() -> None:
    class Incomplete(ModuleExtension):
        pass

    with pytest.raises(NotImplementedError, match="def weight"):
        Incomplete(params=["weight"])
    with pytest.warns(UserWarning, match="does not say what is propagated back"):
        Incomplete().backpropagate(Fourth(), nn.Linear(1, 1), (), (), None)


@installed
def test_nothing_was_propagated() -> None:
    class Broken(Propagated):
        def __init__(self) -> None:
            super().__init__()
            del self.module_extensions[nn.Sigmoid]
            self._fail_mode = "SILENT"

    model, (x, y) = mlp(), vectors()
    with pytest.raises(PackpropError, match="nothing was propagated to its output"):
        run(model, x, y, Broken())


@installed
def test_an_extension_that_is_called_itself() -> None:
    class Called(BackpropExtension):
        def __call__(self, module: nn.Module, g_inp: Any, g_out: Any) -> None:
            found[type(module).__name__] = [tuple(x.shape) for x in (module.output, g_out[0])]

    found: dict[str, Any] = {}
    model, (x, y) = mlp(), vectors()
    run(model, x, y, Called("called", {}))
    assert found == {"CrossEntropyLoss": [(), ()], "Linear": [(5, 5)] * 2, "Sigmoid": [(5, 5)] * 2}


@installed
def test_a_loss_that_is_gone() -> None:
    """The last one may be made in the line that calls it; an earlier one is missed where it is needed."""
    from backpack import backpack, extend

    model, (x, y) = extend(mlp()), vectors()
    for extension, refused in ((Propagated(), True), (Fourth(), False)):
        output = model(x)
        loss = extend(nn.CrossEntropyLoss())(output, y) + extend(nn.CrossEntropyLoss())(output, y)
        with backpack(extension):
            if refused:
                with pytest.raises(PackpropError, match="keep it in a variable"):
                    loss.backward()
            else:
                loss.backward()


@installed
def test_extensions_without_columns_say_so() -> None:
    from backpack.extensions import KFAC, BatchGrad

    extension = KFAC(3)
    assert extension.get_num_mc_samples() == 3
    assert extension.expects_backpropagation_quantities()
    assert not BatchGrad().expects_backpropagation_quantities()
    with pytest.raises(NotImplementedError, match="not columns of a root"):
        BatchGrad().seed  # noqa: B018


# The front door


@installed
def test_extensions_are_those_of_packprop() -> None:
    from backpack import BackpropExtension as Base
    from backpack.extensions import BatchGrad, DiagGGNMC, SqrtGGNMC

    extension = BatchGrad([2, 0])
    assert isinstance(extension, Base)
    assert isinstance(extension, packprop.extensions.BatchGrad)
    assert extension.savefield == "grad_batch"
    assert extension.get_subsampling() == [2, 0]
    assert DiagGGNMC(mc_samples=7).get_num_mc_samples() == 7
    assert SqrtGGNMC(2, [1]).get_subsampling() == [1]
    again = pickle.loads(pickle.dumps(extension))
    assert type(again) is BatchGrad
    assert again.subsampling == [2, 0]


@installed
@pytest.mark.parametrize("wrong", [Fourth, packprop.extensions.BatchGrad, "BatchGrad"])
def test_what_is_no_extension(wrong: Any) -> None:
    from backpack import backpack

    with pytest.raises(ValueError, match="instead:"):
        backpack(wrong)


@installed
def test_what_is_in_force() -> None:
    from backpack import backpack, extend
    from backpack.context import CTX
    from backpack.extensions import BatchGrad, Variance

    assert CTX.get_active_exts() == ()
    assert CTX.get_extension_hook()(None) is None
    extension, hook = BatchGrad(), lambda module: None
    model, (x, y) = extend(mlp()), vectors()
    loss = F.cross_entropy(model(x), y)
    with backpack(extension, Fourth(), extension_hook=hook, debug=True, retain_graph=True):
        assert CTX.get_active_exts()[0] is extension
        assert CTX.is_extension_active(BatchGrad)
        assert CTX.is_extension_active(Fourth, Variance)
        assert not CTX.is_extension_active(Variance)
        assert CTX.get_extension_hook() is hook
        assert CTX.get_debug()
        assert CTX.get_retain_graph()
        loss.backward()
    assert not CTX.get_debug()
    CTX.remove_hooks()
    assert not is_extended(model)
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in model.modules())


@installed
def test_disable() -> None:
    from backpack import backpack, disable, extend
    from backpack.extensions import BatchGrad

    Fourth()
    model, (x, y) = extend(mlp()), vectors()
    switch = disable()
    assert disable.should_store_io()
    for _ in range(2):
        with switch:
            assert not disable.should_store_io()
            loss = F.cross_entropy(model(x), y)
    assert disable.should_store_io()
    assert not hasattr(model[0], "output")
    with pytest.raises(PackpropError, match=r"packprop\.disable"), backpack(BatchGrad()):
        loss.backward()


@installed
def test_nothing_needs_to_be_converted() -> None:
    from backpack import backpack, convert_module_to_backpack, extend
    from backpack.custom_module.graph_utils import BackpackTracer
    from backpack.extensions import DiagGGNExact

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head, self.scale = nn.Linear(4, 4), nn.Linear(4, 3), ScaleModule(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + self.scale(self.inner(x).tanh()))

    model, (x, y) = Residual(), vectors()
    assert convert_module_to_backpack(model, False) is model
    assert extend(model, False, True) is model
    with backpack(DiagGGNExact()):
        extend(nn.CrossEntropyLoss())(model(x), y).backward()
    near(
        flat(p.diag_ggn_exact for p in model.parameters()),
        dense_ggn(model, x, softmax_hessian).diagonal() / 5,
    )
    nodes = [node.target for node in BackpackTracer().trace(model).nodes if node.op == "call_module"]
    assert nodes == ["inner", "scale", "head"]


@installed
def test_the_choice_for_convolutions() -> None:
    from backpack import backpack, extend
    from backpack.core.derivatives.convnd import weight_jac_t_save_memory
    from backpack.extensions import BatchGrad

    model, (x, y) = extend(convolutional()), images()
    found = []
    for save in (True, False):
        with weight_jac_t_save_memory(save_memory=save):
            assert weight_jac_t_save_memory.is_saving() is save
            with backpack(BatchGrad()):
                F.cross_entropy(model(x), y).backward()
        found.append(flat(p.grad_batch for p in model.parameters()))
    assert not weight_jac_t_save_memory.is_saving()
    near(*found)


@installed
def test_options() -> None:
    from backpack.extensions.curvature import Curvature
    from backpack.extensions.secondorder.hbp import BackpropStrategy, ExpectationApproximation
    from backpack.extensions.secondorder.hbp.hbp_options import LossHessianStrategy

    assert [Curvature.require_residual(c) for c in Curvature.CHOICES] == [True, False, True, True]
    assert [Curvature.is_pch(c) for c in Curvature.CHOICES] == [False, False, True, True]
    residual = torch.tensor([-2.0, 3.0])
    modified = {c: Curvature.modify_residual(residual, c) for c in Curvature.CHOICES}
    assert modified[Curvature.GGN] is None
    assert modified[Curvature.HESSIAN] is residual
    near(modified[Curvature.PCH_CLIP], torch.tensor([0.0, 3.0]))
    near(modified[Curvature.PCH_ABS], torch.tensor([2.0, 3.0]))
    assert Curvature.modify_residual(None, Curvature.GGN) is None
    Curvature.check_loss_hessian(False, Curvature.HESSIAN)
    with pytest.raises(ValueError, match="not positive semi-definite"):
        Curvature.check_loss_hessian(False, Curvature.GGN)
    assert BackpropStrategy.is_sqrt("sqrt")
    assert BackpropStrategy.is_batch_average(BackpropStrategy.BATCH_AVERAGE)
    assert ExpectationApproximation.should_average_param_jac(ExpectationApproximation.CHEN)
    with pytest.raises(ValueError, match="choose from 'exact', 'sampling', 'sum'"):
        LossHessianStrategy.check_exists("guess")


# Helpers


@installed
def test_kronecker_products() -> None:
    from backpack.utils import kroneckers

    factors = [a @ a.T for a in (torch.randn(2, 2), torch.randn(3, 3), torch.randn(2, 2))]
    dense = torch.kron(torch.kron(factors[0], factors[1]), factors[2])
    near(kroneckers.kfacs_to_mat(factors), dense)
    matrix = torch.randn(12, 4)
    near(kroneckers.apply_kfac_mat_prod(factors, matrix), dense @ matrix)
    near(kroneckers.kfac_mat_prod(factors)(matrix[:, 0]), dense @ matrix[:, 0])
    for shift in (0.1, [0.1, 0.2, 0.3]):
        each = [shift] * 3 if isinstance(shift, float) else shift
        inverse = [torch.linalg.inv(f + s * torch.eye(len(f))) for f, s in zip(factors, each, strict=True)]
        expected = torch.kron(torch.kron(inverse[0], inverse[1]), inverse[2])
        near(kroneckers.apply_inv_kfac_mat_prod(factors, matrix, shift), expected @ matrix)
    singular = kroneckers.inv_kfacs([torch.diag(torch.tensor([0.0, 2.0]))])[0]
    near(singular.diagonal(), torch.tensor([1e8, 0.5]))
    rectangular = [torch.randn(2, 3), torch.randn(4, 2)]
    near(kroneckers.apply_kfac_mat_prod(rectangular, matrix[:6]), torch.kron(*rectangular) @ matrix[:6])
    with pytest.raises(ValueError, match="there are 3 factors"):
        kroneckers.inv_kfacs(factors, [0.1])
    with pytest.raises(ValueError, match="tensors of two axes"):
        kroneckers.kfacs_to_mat([torch.ones(2)])


@installed
def test_vectors_and_lists() -> None:
    from backpack.utils.convert_parameters import vector_to_parameter_list
    from backpack.utils.subsampling import subsample

    model = mlp()
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    for piece, p in zip(vector_to_parameter_list(vector, model.parameters()), model.parameters(), strict=True):
        assert torch.equal(piece, p)
        assert not piece.requires_grad
    with pytest.raises(ValueError, match="the parameters have 43"):
        vector_to_parameter_list(vector[1:], model.parameters())
    with pytest.raises(TypeError):
        vector_to_parameter_list([1.0], model.parameters())
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(subsample(x, dim=1, subsampling=[2, 0]), x[:, [2, 0]])
    assert subsample(x) is x


@installed
def test_classes_of_modules() -> None:
    from backpack.utils.hooks import no_op
    from backpack.utils.module_classification import is_loss, is_nll, is_no_op

    assert is_loss(nn.L1Loss())
    assert not is_nll(nn.L1Loss())
    assert is_nll(nn.MSELoss())
    assert [is_no_op(m) for m in (mlp(), nn.Linear(1, 1), ReduceTuple())] == [True, False, True]
    assert no_op(1, a=2) is None


# Modules for functions


def test_modules_for_functions() -> None:
    x = torch.randn(2, 3, 4)
    assert torch.equal(Slicing((slice(None), slice(1, None), 0))(x), x[:, 1:, 0])
    assert torch.equal(Pad([1, 2], value=3.0)(x), F.pad(x, [1, 2], value=3.0))
    assert torch.equal(Pad((1, 1), mode="reflect")(x), F.pad(x, (1, 1), mode="reflect"))
    assert torch.equal(Permute(0, 2, 1)(x), x.permute(0, 2, 1))
    assert torch.equal(Permute(1, 2, init_transpose=True)(x), x.transpose(1, 2))
    assert ReduceTuple(1)((1, x)) is x
    assert torch.equal(ScaleModule(2.0)(x), 2 * x)
    assert torch.equal(SumModule()(x, x, x), 3 * x)
    left, right = Branch(nn.Tanh(), nn.ReLU())(x)
    assert torch.equal(left, x.tanh())
    assert torch.equal(right, x.relu())
    assert torch.equal(Parallel(nn.Tanh(), nn.ReLU())(x), x.tanh() + x.relu())
    named = OrderedDict(left=nn.Tanh(), right=nn.ReLU())
    assert list(Parallel(named).branch._modules) == ["left", "right"]
    product = Parallel(nn.Tanh(), nn.ReLU(), merge_module=nn.Bilinear(4, 4, 2))(x)
    assert product.shape == (2, 3, 2)


def test_modules_for_functions_refuse() -> None:
    with pytest.raises(BadInput, match="give a number"):
        ScaleModule("2")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="bring all branches to one shape"):
        SumModule()(torch.ones(2), torch.ones(3))
    with pytest.raises(BadInput, match="tensors of equal shape"):
        SumModule()()


def test_modules_for_functions_are_seen_through() -> None:
    model = nn.Sequential(
        Pad((1, 1, 1, 1)),
        nn.Conv2d(1, 2, 3),
        Parallel(nn.Identity(), nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Sigmoid(), ScaleModule(0.3))),
        Permute(0, 2, 3, 1),
        Slicing((slice(None), slice(1, 4))),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    x, y = torch.randn(3, 1, 4, 4), torch.tensor([0, 2, 1])
    loss = packprop.extend(nn.CrossEntropyLoss())(packprop.extend(model)(x), y)
    with packprop.backpack(packprop.extensions.DiagGGNExact()):
        loss.backward()
    near(
        flat(p.diag_ggn_exact for p in model.parameters()),
        dense_ggn(model, x, softmax_hessian).diagonal() / 3,
    )
