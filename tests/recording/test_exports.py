"""An extended model is traced and exported as it is; scripting says that it has to be restored."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import PackpropError
from tests.references.per_sample import batch, check_rows
from tests.references.running import assert_rows_of_terms

X = torch.randn(5, 1, 8, 8)


def network() -> nn.Module:
    layers = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)
    return packprop.extend(nn.Sequential(*layers))


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return packprop.extend(nn.Sequential(nn.Flatten(2), nn.Flatten(1, 1), layer))


@pytest.mark.parametrize("make", [network, attention])
@pytest.mark.parametrize("grad", [True, False])
def test_a_trace_is_that_of_the_plain_model(make: Callable[[], nn.Module], grad: bool) -> None:
    model = make().eval()
    x = X if make is network else X.flatten(1, 2)
    plain = packprop.restore(copy.deepcopy(model))
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        traced, expected = (torch.jit.trace(each, x, check_trace=False) for each in (model, plain))
    if make is network:  # an encoder layer takes its one kernel only where there are no hooks on it
        kinds = [sorted(node.kind() for node in each.inlined_graph.nodes()) for each in (traced, expected)]
        assert kinds[0] == kinds[1]
    torch.testing.assert_close(traced(x), plain(x))


def test_after_a_trace_passes_go_on() -> None:
    model, targets = network(), torch.tensor([0, 1, 2, 0, 1])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        torch.jit.trace(model, X)
    terms = nn.functional.cross_entropy(model(X), targets, reduction="none") / len(X)
    loss = packprop.extend(nn.CrossEntropyLoss())(model(X), targets)
    assert_rows_of_terms(terms, loss, model.parameters(), tolerance=1e-5)


class Both(nn.Module):
    """A model and its loss in one module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, packprop.extend(nn.CrossEntropyLoss())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = self.loss(self.model(x), y)
        return value


CLASSES = torch.tensor([0, 1, 2, 0, 1])
SCRIPTED: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "model": (network, (X,)),
    "attention": (attention, (X.flatten(1, 2),)),
    "inside": (lambda: nn.Sequential(network(), nn.ReLU()), (X,)),
    "child": (lambda: attention().get_submodule("2.self_attn"), (torch.randn(2, 3, 8),) * 3),
    "loss": (lambda: packprop.extend(nn.CrossEntropyLoss()), (torch.randn(5, 3), CLASSES)),
    "both": (lambda: Both(network()), (X, CLASSES)),
    "a loss alone inside": (lambda: Both(packprop.restore(network())), (X, CLASSES)),
    "extended as a whole": (lambda: packprop.extend(Both(network())), (X, CLASSES)),
}


@pytest.mark.parametrize("name", SCRIPTED)
def test_scripting_says_restore_and_works_after_it(name: str) -> None:
    make, given = SCRIPTED[name]
    module = make().eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        for _ in range(2):
            with pytest.raises(PackpropError, match=r"packprop\.restore\(module\)"):
                torch.jit.script(module)
        scripted = torch.jit.script(packprop.restore(module))
    assert "__prepare_scriptable__" not in {name for each in module.modules() for name in vars(each)}
    torch.testing.assert_close(scripted(*given), module(*given))


@pytest.mark.parametrize("name", ["loss", "both", "a loss alone inside", "extended as a whole"])
def test_losses_are_traced_and_exported_as_they_are(name: str) -> None:
    make, given = SCRIPTED[name]
    module = make().eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        traced = torch.jit.trace(module, given)
    exported = torch.export.export(module, given).module()
    for other in (traced, exported):
        torch.testing.assert_close(other(*given), module(*given))


def test_torch_export_takes_it() -> None:
    model = network()
    exported = torch.export.export(model, (X,)).module()
    torch.testing.assert_close(exported(X), model(X))


@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_takes_it(dynamo: bool, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    if dynamo:
        pytest.importorskip("onnxscript")
    kinds = []
    for place, model in enumerate((network(), packprop.restore(network()))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(model, (X,), tmp_path / f"{place}.onnx", dynamo=dynamo)
        kinds.append([node.op_type for node in onnx.load(tmp_path / f"{place}.onnx").graph.node])
    assert kinds[0] == kinds[1]


def test_hooks_are_copied_and_pickled_by_name() -> None:
    for module in (network(), packprop.extend(nn.CrossEntropyLoss())):
        for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            for hooks in ("_forward_pre_hooks", "_forward_hooks"):
                assert [*getattr(again, hooks).values()] == [*getattr(module, hooks).values()]
            assert again._forward_hooks


def test_a_model_has_one_hook_and_a_loss_has_two() -> None:
    """Submodules have none, so that what is exported by parts is plain."""
    model, loss = network(), packprop.extend(nn.CrossEntropyLoss())
    assert [len(part._forward_hooks) for part in model.modules()] == [1] + [0] * len(model)
    assert not any(part._forward_pre_hooks for part in model.modules())
    assert (len(loss._forward_pre_hooks), len(loss._forward_hooks)) == (1, 1)


@pytest.mark.parametrize("front", [True, False])
def test_a_scripted_part(front: bool) -> None:
    """The optimised script is one node of the graph, which shows nothing but the parameters that it takes."""
    torch.manual_seed(0)
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 4)).double())
    head = nn.Linear(4, 3).double()
    layers = [scripted, head] if front else [nn.Linear(3, 3).double(), scripted, head]
    model = packprop.extend(nn.Sequential(*layers))
    for _ in range(4):  # torch optimises it in the second call
        check_rows(model, *batch(7))
