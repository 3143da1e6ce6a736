"""Nodes that only CUDA's kernels leave on a graph: stand-ins for the kernels make them on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import packprop
from packprop import extensions
from packprop.engine.functions.nodes import readable_name
from packprop.errors import PackpropError
from tests.references.running import assert_near

aten = torch.ops.aten


def lstm_cell(gates: Tensor, hidden: Tensor, memory: Tensor, *biases: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (gates + hidden + sum(biases)).chunk(4, 1)
    after = f.sigmoid() * memory + i.sigmoid() * g.tanh()
    return o.sigmoid() * after.tanh(), after


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v


def lstm(x: Tensor, state: Tensor, memory: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return torch.lstm(x, (state, memory), weights, True, 1, 0.0, True, False, False)


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.batch_norm(x, None, None, weight, bias, True, eps=1e-3)


def pulled(function: Callable[..., Any], inputs: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """Gradients by autograd, in a thread of its own: below autograd there is none in this one."""

    def run() -> list[Any]:
        leaves = [each.detach().requires_grad_() for each in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=False) if c is not None]
        return list(torch.autograd.grad([o for o, _ in pairs], leaves, [c for _, c in pairs]))

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


class Kernels(TorchDispatchMode):
    """Computes by plain functions what CUDA has kernels for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        stand_in = getattr(self, name, None) if name in STOOD_IN_FOR else None
        return func(*args, **(kwargs or {})) if stand_in is None else stand_in(*args, **(kwargs or {}))

    def cudnn_batch_norm(
        self, x: Tensor, w: Tensor, b: Tensor, m: Any, v: Any, train: bool, by: Any, eps: Any
    ) -> Any:
        return (*torch.native_batch_norm(x, w, b, m, v, train, by, eps), torch.empty(0, dtype=torch.uint8))

    def cudnn_batch_norm_backward(self, x: Tensor, grad: Tensor, weight: Tensor, *_: Any) -> Any:
        return tuple(pulled(batch_norm, [x, weight, torch.zeros_like(weight)], [grad]))

    def _thnn_fused_lstm_cell(self, gates: Tensor, hidden: Tensor, memory: Tensor, *biases: Tensor) -> Any:
        return (*lstm_cell(gates, hidden, memory, *biases), gates + hidden + sum(biases))

    def _thnn_fused_lstm_cell_backward_impl(self, to_state: Any, to_memory: Any, *saved: Any) -> Any:
        memory, _, workspace, has_bias = saved
        nothing = torch.zeros_like(workspace)
        grads = pulled(lstm_cell, [workspace, nothing, memory], [to_state, to_memory])
        return grads[0], grads[2], grads[0].sum(0) if has_bias else None

    def _scaled_dot_product_efficient_attention(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
        number = torch.zeros((), dtype=torch.int64)
        return attention(q, k, v), q.new_zeros(q.shape[:-1]), number, number.clone()

    def _scaled_dot_product_efficient_attention_backward(self, grad: Tensor, *saved: Any) -> Any:
        return (*pulled(attention, saved[:3], [grad]), None)

    def _cudnn_rnn(
        self, x: Tensor, weights: list[Tensor], _: int, buffer: Any, state: Tensor, memory: Tensor, *__: Any
    ) -> Any:
        outputs = torch.lstm(x, (state, memory), weights, True, 1, 0.0, False, False, False)
        return (*outputs, torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=x.dtype))

    def _cudnn_rnn_backward(self, x: Tensor, weights: list[Tensor], *rest: Any) -> Any:
        _, _, state, memory, _, *cotangents = rest[:8]
        to_x, to_state, to_memory, *others = pulled(lstm, [x, state, memory, *weights], cotangents)
        return to_x, to_state, to_memory, others


STOOD_IN_FOR = {name for name in vars(Kernels) if not name.startswith("__")}


class Normalised(nn.Module):
    """A convolution, and cuDNN's batch normalisation in evaluation or training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.head = nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        statistics = norm.running_mean, norm.running_var
        x = torch.cudnn_batch_norm(
            self.before(x), norm.weight, norm.bias, *statistics, self.training, 0.1, 1e-3
        )[0]
        return self.head(x.flatten(1).tanh())


class Cell(nn.Module):
    """Two steps of an LSTM's cell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = memory = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            gates, hidden = step @ self.cell.weight_ih.T, state @ self.cell.weight_hh.T
            biases = self.cell.bias_ih, self.cell.bias_hh
            state, memory, _ = aten._thnn_fused_lstm_cell(gates, hidden, memory, *biases)
        return self.head(state)


class Attending(nn.Module):
    """Causal attention with dropout behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unsqueeze(1) for each in self.qkv(x).chunk(3, -1))
        mixed = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[0].squeeze(1)
        return self.head(torch.native_dropout(mixed, 0.5, False)[0]).mT


class Recurrent(nn.Module):
    """All layers of an LSTM in one node."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = [
            getattr(self.layer, name) for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        ]
        state = x.new_zeros(1, len(x), 4)
        options = 2, 4, 0, 1, False, 0.0, True, False, [], None
        out = torch._cudnn_rnn(x.transpose(0, 1).contiguous(), weights, 4, None, state, state, *options)[0]
        return self.head(out.transpose(0, 1)).mT


ATTENTION = "ScaledDotProductEfficientAttentionBackward0"
MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...], tuple[int, ...], str]] = {
    "CudnnBatchNormBackward0": (Normalised, (2, 3, 3), (), "batch_norm"),
    "ThnnFusedLstmCellBackward0": (Cell, (2, 3), (), "ThnnFusedLstmCellBackward0"),
    ATTENTION: (Attending, (3, 4), (3,), ATTENTION),
    "CudnnRnnBackward0": (Recurrent, (3, 3), (3,), "recurrent layer"),
}
"""Nodes, with a model that has one, the shapes of a sample and of its target, and the name that users read."""


def built(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    kind, entries, positions, _ = MODELS[name]
    model = kind().double().eval()
    return packprop.extend(model), torch.randn(4, *entries).double(), torch.randint(3, (4, *positions))


@pytest.mark.parametrize("name", MODELS)
def test_rows_and_curvature(name: str) -> None:
    model, x, y = built(name)
    lossfunc = packprop.extend(nn.CrossEntropyLoss())
    with Kernels():
        parameters = dict(model.named_parameters())
        rows = []
        for n in range(len(x)):
            share = lossfunc(model(x[n : n + 1]), y[n : n + 1]) / len(x)
            rows.append(torch.autograd.grad(share, list(parameters.values())))
        loss = lossfunc(model(x), y)
        assert MODELS[name][3] in named_above(loss, name)
        with packprop.backpack(
            extensions.BatchGrad(),
            extensions.Variance(),
            extensions.BatchDiagGGNExact(),
            extensions.SqrtGGNExact(),
        ):
            loss.backward()
    for (key, parameter), own in zip(parameters.items(), zip(*rows, strict=True), strict=True):
        assert_near(parameter.grad_batch, torch.stack(own), key)
        assert_near(parameter.variance, torch.stack(own).var(0, correction=0), key)
        assert_near(parameter.diag_ggn_exact_batch, parameter.sqrt_ggn_exact.square().sum(0), key)


def named_above(loss: Tensor, name: str) -> set[str]:
    """What nodes of a name are called where users read it; ``loss`` must be made by some."""
    found, stack = set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None:
            found |= {readable_name(node)} if node.name() == name else set()
            stack += [above for above, _ in node.next_functions]
    return found


def test_training_mode_is_refused_by_the_name_of_the_layer() -> None:
    model, x, y = built("CudnnBatchNormBackward0")
    with (
        Kernels(),
        packprop.backpack(extensions.BatchGrad()),
        pytest.raises(PackpropError, match="layer 'norm'"),
    ):
        nn.functional.cross_entropy(model.train()(x), y).backward()


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (ATTENTION, "SDPBackend.MATH"),
        ("CudnnRnnBackward0", "torch.backends.cudnn.flags"),
    ],
)
def test_second_derivatives_that_no_kernel_has(name: str, advice: str) -> None:
    model, x, y = built(name)
    lossfunc = packprop.extend(nn.CrossEntropyLoss())
    with Kernels(), packprop.backpack(extensions.DiagHessian()), pytest.raises(PackpropError, match=advice):
        lossfunc(model(x), y).backward()
