"""Everything private of PyTorch that packprop leans on still does what it did.

A failure here after an upgrade of torch names what has changed, before anything else fails oddly.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

import packprop
from packprop.engine.algebra import kernels
from packprop.engine.eager import pieces
from packprop.engine.functions import saved
from packprop.engine.functions.nodes import is_identity, is_once_differentiable
from packprop.engine.functions.operands import saved_constants
from packprop.engine.recording.marks import LOSS, RecordedLoss, nodes_above
from packprop.engine.recording.recorder import LossRecorder, unseen
from packprop.engine.tensors.hooks import dictionaries_of_node
from packprop.engine.tensors.state import taken_over, version
from packprop.errors import PackpropError
from tests.cases.models.functions import Cube
from tests.versions import needs_counting, needs_hooks


def kept(**options: Any) -> list[bool]:
    """What torch._C._autograd._get_current_graph_task_keep_graph says inside a hook on a node."""
    with torch.enable_grad():  # also inside a hook, where it is off
        x = torch.ones(2, requires_grad=True)
        y = (x * x).sum()
    said: list[bool] = []
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(
        lambda _: said.append(bool(torch._C._autograd._get_current_graph_task_keep_graph()))
    )
    y.backward(**options)
    return said


@pytest.mark.parametrize(
    ("options", "keeps"),
    [
        ({}, False),
        ({"retain_graph": False}, False),
        ({"retain_graph": True}, True),
        ({"create_graph": True}, True),
        ({"create_graph": True, "retain_graph": False}, False),
    ],
)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_whether_the_running_pass_keeps_its_graph(options: dict[str, bool], keeps: bool) -> None:
    assert kept(**options) == [keeps]


def test_a_pass_inside_a_pass_speaks_for_itself() -> None:
    """Inside a backward pass that a hook starts, the answer is about that inner pass."""
    inner: list[list[bool]] = []
    x = torch.ones(2, requires_grad=True)
    y = (x * x).sum()
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda _: inner.append(kept(retain_graph=True)))
    said: list[bool] = []
    y.grad_fn.register_prehook(
        lambda _: said.append(bool(torch._C._autograd._get_current_graph_task_keep_graph()))
    )
    y.backward()
    assert inner == [[True]]
    assert said == [False]


def arguments_alive(**options: Any) -> tuple[bool, Tensor]:
    """Whether what a loss was given still lives after a plain backward pass, while the loss is held."""
    model, loss_function = packprop.extend(nn.Linear(3, 2)), packprop.extend(nn.MSELoss())
    targets = torch.randn(4, 2)
    alive = weakref.ref(targets)
    loss = loss_function(model(torch.randn(4, 3)), targets)
    del targets
    loss.backward(**options)
    gc.collect()
    return alive() is not None, loss


def test_what_packprop_does_with_it() -> None:
    """What losses were given lives as long as what autograd saves, no longer and no shorter."""
    assert not arguments_alive()[0]
    assert arguments_alive(retain_graph=True)[0]
    model = packprop.extend(nn.Linear(3, 2))
    loss = packprop.extend(nn.MSELoss())(model(torch.randn(4, 3)), torch.randn(4, 2))
    loss.backward(retain_graph=True)
    with packprop.backpack(packprop.extensions.BatchGrad()):
        loss.backward()
    assert model.weight.grad_batch.shape == (4, 2, 3)
    with (
        pytest.raises(packprop.PackpropError, match="retain_graph=True"),
        packprop.backpack(packprop.extensions.BatchGrad()),
    ):
        loss.backward()


# The others, and public ones that are barely documented


def test_one_dnn_multiplies_matrices_by_rows_and_by_columns() -> None:
    """Without the operator products are as right and slower; if it changes, this says so."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this build of PyTorch has no oneDNN")
    left, right = torch.randn(5, 7), torch.randn(6, 7)
    for a in (left, left.T.contiguous().T):
        for b in (right, right.T.contiguous().T):
            product = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
            torch.testing.assert_close(product, left @ right.T)


def test_one_dnn_is_given_matrices_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """For others, such as columns of a wider matrix, its products take a thousand times as long."""
    given: list[torch.Tensor] = []

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        given.extend((a, b))
        return a @ b.T

    monkeypatch.setattr(kernels, "_kernel_for", lambda left, right, by_rows=False: product)
    rows = torch.randn(300, 40, dtype=torch.float64)[:, :30]
    batch = torch.randn(3, 8, 9)[:, :, :5]
    for least in (0, 2**40):
        monkeypatch.setattr(kernels, "WORTH_BLOCKS", least)
        torch.testing.assert_close(kernels.second_moment(rows), rows.T @ rows)
        torch.testing.assert_close(kernels.outer_products(batch, batch), batch @ batch.mT)
    assert len(given) == 2 * (4 + 3 + 1 + 3)
    assert all(t.is_contiguous() or t.T.is_contiguous() for t in given)


def test_tensors_without_data_know_the_size_of_their_storage() -> None:
    """`FakeTensorMode` and `TorchDispatchMode` have no public names; what is used of them is this."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2**20, 2**20)  # 4 TiB
        y = (x[:5].t() + 1).detach()
        assert x.untyped_storage().nbytes() == 2**42
        assert y.untyped_storage().nbytes() == 5 * 2**22
        wrapper = id(x.untyped_storage())
        gone: list[int] = []
        weakref.finalize(x.untyped_storage(), gone.append, 1)
        assert id(x[0].untyped_storage()) == wrapper
        assert not gone
        del x
        assert gone


@needs_counting
def test_storages_count_what_holds_them() -> None:
    """Not private, and documented nowhere; without it results are not overwritten, and this says so."""
    tensor = torch.zeros(4)
    storage = tensor.untyped_storage()
    held = sys.getrefcount(storage)
    del tensor
    assert sys.getrefcount(storage) == held - 1


@needs_counting
def test_a_tensor_that_nobody_holds_is_taken_over() -> None:
    whole = torch.arange(12.0).view(3, 4)
    holder, address = [whole[1:, ::2]], whole[1:].data_ptr()
    expected = holder[0].clone()
    assert taken_over([whole[1:, ::2]]) is None
    del whole
    part = taken_over(holder)
    assert part is not None
    assert torch.equal(part, expected)
    assert (part.data_ptr(), part.stride()) == (address, (4, 2))


def test_memory_of_others_is_not_taken_over() -> None:
    array = np.zeros(4)
    assert taken_over([torch.from_numpy(array)]) is None
    assert taken_over([torch.frombuffer(bytearray(16), dtype=torch.float32)]) is None
    assert taken_over([torch.zeros(4).share_memory_()]) is None


def test_versions_count_changes_in_place() -> None:
    x = torch.zeros(3)
    before = x._version
    x.add_(1)
    x[0] = 2
    assert x._version == before + 2
    view = x[:2]
    view.mul_(2)
    assert x._version == before + 3
    x.data.zero_()
    assert x._version == before + 3
    assert version(x) == x._version
    with torch.inference_mode():
        assert version(torch.zeros(3)) == 0  # these have no count, and raise


def test_nodes_know_the_shapes_of_their_outputs() -> None:
    parts = torch.ones(3, 2, requires_grad=True).split([1, 2])
    node = parts[1].grad_fn
    assert node is not None
    assert [torch.Size(made.shape) for made in node._input_metadata] == [(1, 2), (2, 2)]  # type: ignore[attr-defined]  # private
    assert (node, parts[1].output_nr) == (parts[0].grad_fn, 1)


def test_batch_norm_nodes_know_their_statistics() -> None:
    norm, x = nn.BatchNorm1d(3), torch.randn(4, 3)
    assert norm(x).grad_fn._saved_training is True
    assert norm.eval()(x).grad_fn._saved_training is False


def test_normalisations_know_their_weight() -> None:
    x, bias = torch.randn(4, 3), torch.randn(3, requires_grad=True)
    assert F.layer_norm(x, (3,), bias=bias).grad_fn._saved_weight is None  # type: ignore[union-attr]  # it has a node
    weight = torch.ones(3)
    assert torch.equal(F.layer_norm(x, (3,), weight, bias).grad_fn._saved_weight, weight)  # type: ignore[union-attr]  # it has a node


def test_a_bias_without_a_weight_has_no_second_derivative() -> None:
    """If this fails, PyTorch was mended, and ``bias_without_weight`` can go."""
    bias = torch.randn(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        F.layer_norm(torch.randn(4, 3), (3,), bias=bias).square().sum(), bias, create_graph=True
    )
    assert torch.autograd.grad(gradient.sum(), bias, allow_unused=True) == (None,)


def test_nodes_show_the_constants_that_they_saved() -> None:
    """And the indices, and nothing that was differentiated."""
    p, x, places = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3), torch.tensor([0, 2])
    for value, constant in ((p @ x, x), (p * x, x), (p[places], places), (torch.mv(p, x[0]), x[0])):
        (saved,) = saved_constants(value.grad_fn)
        assert saved.data_ptr() == constant.data_ptr()
    assert not list(saved_constants((p @ p).grad_fn))


class Often(Cube):
    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * cotangents[0]


def test_functions_that_are_differentiable_once_are_known() -> None:
    x = torch.randn(3, requires_grad=True)
    assert is_once_differentiable(Cube.apply(x).grad_fn)
    assert not is_once_differentiable(Often.apply(x).grad_fn)
    assert not is_once_differentiable((x**3).grad_fn)
    # the reason for looking: PyTorch does not say so itself
    (slope,) = torch.autograd.grad(Cube.apply(x).square().sum(), x, create_graph=True)
    assert torch.autograd.grad(slope.sum(), x, allow_unused=True) == (None,)


def test_nodes_can_be_called() -> None:
    """Not private, and not documented: the derivative of a node by itself, differentiable."""
    x = torch.tensor([0.5], requires_grad=True)
    z = x * 2
    node = torch.sigmoid(z).grad_fn
    slope = node(torch.ones(1))
    (second,) = torch.autograd.grad(slope.sum(), torch.autograd.graph.get_gradient_edge(z))
    s = torch.sigmoid(z)
    assert torch.allclose(slope, s * (1 - s))
    assert torch.allclose(second, s * (1 - s) * (1 - 2 * s))


def test_nodes_are_numbered_in_order() -> None:
    x = torch.ones(3, requires_grad=True)
    y, z = x * 2, x * 3
    assert y.grad_fn is not None
    assert z.grad_fn is not None
    assert y.grad_fn._sequence_nr() < z.grad_fn._sequence_nr()  # type: ignore[attr-defined]  # private


def test_hooks_of_a_tensor_are_a_dictionary() -> None:
    x = torch.ones(3, requires_grad=True)
    assert x._backward_hooks is None
    handle = x.register_hook(lambda gradient: gradient)
    assert x._backward_hooks is not None
    assert len(x._backward_hooks) == 1
    handle.remove()
    assert len(x._backward_hooks) == 0


def test_a_handle_knows_the_dictionary_of_a_node() -> None:
    """Hooks on one node share it, on nodes in C++ and in Python; a stand-in in it is called instead."""
    module = nn.Linear(3, 2)
    called: list[str] = []
    module.register_full_backward_hook(lambda *_: called.append("module"))
    x = torch.ones(1, 3, requires_grad=True)
    y = module(x)
    z = torch.sin(y)
    for node in (y.grad_fn, z.grad_fn):
        assert node is not None
        register: Any
        for register, hooks in zip(
            (node.register_prehook, node.register_hook), dictionaries_of_node(node), strict=True
        ):
            assert register(lambda *_: called.append("node")).id in hooks
            for number in hooks:
                hooks[number] = lambda *_: called.append("stand-in")
    z.sum().backward()
    assert called == ["stand-in"] * 5  # the module's own hook had one, too


def test_nodes_that_hand_gradients_on_are_known_by_name() -> None:
    from torch.nn.modules._functions import BackwardHookFunction
    from torch.nn.parallel.distributed import _DDPSink

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 2 * g

    x = torch.ones(3, requires_grad=True)
    Own.__name__ = Own.__qualname__ = "BackwardHookFunction"
    (y,), own = BackwardHookFunction.apply(x, x)[:1], Own.apply(x)
    assert is_identity(y.grad_fn)
    assert not is_identity(own.grad_fn)
    wrapper = nn.Linear(1, 1)
    wrapper._ddp_sink_clone = True
    (z,) = _DDPSink.apply(weakref.ref(wrapper), x)
    assert is_identity(z.grad_fn)
    z.grad_fn.apply = lambda gradient: (None, 3 * gradient)  # what the engine calls
    z.sum().backward()
    assert torch.equal(x.grad, 3 * torch.ones(3))


def test_marks_on_a_node_live_and_die_with_the_graph() -> None:
    """`Node.metadata` is public, and says nothing of how long it lives."""

    class Mark:
        pass

    x = torch.ones(3, requires_grad=True)
    y = torch.sin(x)
    mark = Mark()
    alive = weakref.ref(mark)
    assert y.grad_fn is not None
    y.grad_fn.metadata["packprop.test"] = mark
    del mark
    loss = torch.relu_(y * 1).sum()
    del y
    gc.collect()
    assert alive() is not None
    del loss
    gc.collect()
    assert alive() is None


def test_a_recorded_loss_is_found_from_the_loss_and_dies_with_it() -> None:
    model = packprop.extend(nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)))
    smoothed = packprop.extend(nn.CrossEntropyLoss(label_smoothing=0.1))  # no node tells that
    loss = 2 * smoothed(model(torch.randn(4, 3)), torch.zeros(4, dtype=torch.long))
    found = [node.metadata["packprop.loss"][0] for node in nodes_above([loss.grad_fn]) if LOSS in node.metadata]
    assert [type(each) for each in found] == [RecordedLoss]
    alive = weakref.ref(found[0])
    del found, loss
    gc.collect()
    assert alive() is None


# Hooks on saved tensors, and the frames of torch.utils.checkpoint


@needs_hooks
def test_hooks_in_force_are_known() -> None:
    assert pieces._top is not None
    assert pieces._top(False) is None
    with torch.autograd.graph.save_on_cpu():
        assert len(pieces._top(False)) == 2
    assert pieces._top(False) is None


def checkpointed() -> tuple[list[int], Tensor, Tensor, Any]:
    """Runs of a region so far, its input and output, and the node of its last function."""
    runs: list[int] = []

    def function(x: Tensor) -> Tensor:
        runs.append(1)
        return torch.sin(x).exp().square()

    x = torch.ones(2, requires_grad=True)
    y = checkpoint.checkpoint(function, x, use_reentrant=False)
    assert isinstance(y, Tensor)
    return runs, x, y, y.grad_fn


def test_a_checkpoint_hands_a_tensor_out_again_that_was_put_back() -> None:
    """As the backward pass of its node needs it: PyTorch would refuse the second reading."""
    runs, x, y, node = checkpointed()
    read: list[Tensor] = []
    node.register_prehook(lambda _: read.extend(saved.saved_tensor(node, "self") for _ in range(2)))
    (plain,) = torch.autograd.grad(y.sum(), x)
    assert len(runs) == 2
    assert torch.equal(read[0], read[1])
    assert torch.allclose(plain, 2 * y.detach() * torch.cos(x.detach()))
    _, x, y, node = checkpointed()
    node.register_prehook(lambda _: read.append(node._saved_self))
    with pytest.raises(checkpoint.CheckpointError, match="already unpacked once"):
        y.sum().backward()


def test_a_tensor_that_a_pass_has_had_is_computed_again() -> None:
    runs, x, y, node = checkpointed()
    read: list[Tensor] = []
    above = node.next_functions[0][0]
    above.register_hook(lambda *_: read.append(saved.saved_tensor(node, "self")))
    y.sum().backward(retain_graph=True)
    assert len(runs) == 3
    assert torch.allclose(read[0].square(), y)
    assert torch.allclose(x.grad, 2 * y.detach() * torch.cos(x.detach()))  # type: ignore[arg-type]  # it has one


def test_outside_of_a_pass_a_checkpoint_keeps_nothing() -> None:
    runs, _, y, node = checkpointed()
    frame = saved._frame_of(node._raw_saved_self.unpack_hook)
    assert saved.keeps_elsewhere(node)
    assert torch.allclose(saved.saved_tensor(node, "self").square(), y)
    assert len(runs) == 2
    assert not frame.recomputed
    assert not frame.is_recomputed
    assert all(not held().handles for held in frame.weak_holders)
    with saved.saved_again(node):
        node(torch.ones(2))
    assert not frame.recomputed


def test_the_stack_of_modes_names_the_outermost_first() -> None:
    """Leaving a mode takes the innermost off, whichever it is called on."""
    outer, inner, tensor = LossRecorder(None), LossRecorder(None), torch.ones(1)
    with outer, inner:
        assert torch.overrides._get_current_function_mode_stack() == [outer, inner]
        assert torch.overrides.has_torch_function((tensor,))
        TorchFunctionMode.__exit__(outer, None, None, None)
        assert torch.overrides._get_current_function_mode_stack() == [outer]
        TorchFunctionMode.__enter__(inner)
    assert not torch.overrides.has_torch_function((tensor,))


def test_modes_do_not_see_what_is_read_unseen() -> None:
    class Refusing(TorchFunctionMode):
        def __torch_function__(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("a mode sees an attribute")

    tensor = torch.ones(2)
    with Refusing(), unseen():
        assert tensor.shape == (2,)
        assert not tensor.requires_grad
    with Refusing(), pytest.raises(AssertionError, match="a mode sees"):
        _ = tensor.shape


def test_versions_that_do_not_show_hooks_say_what_a_checkpoint_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "SHOWS_HOOKS", False)
    with pytest.raises(PackpropError, match="and returns it only once"), saved.explaining_checkpoints():
        raise checkpoint.CheckpointError("already unpacked once")
    monkeypatch.setattr(saved, "SHOWS_HOOKS", True)
    with pytest.raises(checkpoint.CheckpointError), saved.explaining_checkpoints():
        raise checkpoint.CheckpointError("already unpacked once")
