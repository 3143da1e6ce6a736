"""Every rule that is registered, checked by `check_use` on examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packprop import backpack, extend, extensions
from packprop.engine.functions.node_calls import _is_close
from packprop.engine.functions.nodes import name_of_node
from packprop.engine.functions.registry import RULES
from packprop.testing import check_use
from tests.references.running import assert_near
from tests.references.tensors import R, p
from tests.selection import often, one_in

Make = Callable[[int], Any]


def recurrent(
    gates: int, layers: int = 1, directions: int = 1, bias: bool = True, proj: int = 0
) -> list[Tensor]:
    """Weights of a recurrent function of 3 inputs, with states of 4 entries or ``proj``."""
    made: list[Tensor] = []
    for layer in range(layers):
        for _ in range(directions):
            made += [p(gates * 4, directions * (proj or 4) if layer else 3), p(gates * 4, proj or 4)]
            made += [p(gates * 4), p(gates * 4)] if bias else []
            made += [p(proj, 4)] if proj else []
    return made


def joined(x: Tensor, weight: Tensor) -> Tensor:
    """A learned row in front of each sample."""
    return torch.cat([weight.expand(len(x), -1), x], 1)


def turned(x: Tensor, weight: Tensor) -> Tensor:
    """A parameter with its axes in another order, counted from the end."""
    return x * weight.permute(0, -1, 1)


def with_turned_bias(x: Tensor, bias: Tensor) -> Tensor:
    """``t()`` turns a matrix, and leaves a vector as it is, in the same node."""
    return F.linear(x, torch.eye(x.shape[1]).to(x), bias.t())


EXAMPLES: list[tuple[Callable[..., Any], Make]] = [
    (torch.einsum, lambda n: ("io,ni->no", p(1, 4), R(n, 3))),
    (F.linear, lambda n: (R(n, 3), p(4, 3), p(4))),
    (with_turned_bias, lambda n: (R(n, 3), p(3))),
    (F.linear, lambda n: {"input": R(2, n, 3), "weight": p(4, 3)}),
    (F.linear, lambda n: (R(n, 3), p(3))),
    (torch.matmul, lambda n: (R(n, 2, 3), p(3, 4))),
    (torch.matmul, lambda n: (p(4, 3), R(n, 3, 2))),
    (torch.mm, lambda n: (p(4, 3), R(3, n))),
    (torch.bmm, lambda n: (R(2, n, 3), p(2, 3, 4))),
    (torch.bmm, lambda n: (p(2, 4, 3), R(2, 3, n))),
    (torch.baddbmm, lambda n: {"input": p(2, 1, 4), "batch1": R(2, n, 3), "batch2": p(2, 3, 4), "beta": 2.0}),
    (Tensor.__matmul__, lambda n: (R(n, 3), p(3, 4))),
    (torch.addmm, lambda n: {"input": p(4), "mat1": R(n, 3), "mat2": p(3, 4), "beta": 0.5}),
    (torch.addmm, lambda n: {"input": p(4), "mat1": R(n, 3), "mat2": p(3, 4), "alpha": 0.5}),
    (torch.einsum, lambda n: ("nhd,hde->nhe", R(n, 2, 3), p(2, 3, 4))),
    (torch.einsum, lambda n: ("oi,tni->tno", p(4, 3), R(2, n, 3))),
    # Axes of one entry that einsum broadcasts: of the inputs, of the parameter, summed or kept.
    (torch.einsum, lambda n: ("ni,io->no", R(n, 1), p(3, 4))),
    (torch.einsum, lambda n: ("nti,tio->nto", R(n, 2, 3), p(1, 3, 4))),
    (torch.einsum, lambda n: ("nti,tio->nto", R(n, 1, 3), p(2, 3, 4))),
    (torch.einsum, lambda n: ("nti,tio->no", R(n, 1, 3), p(2, 3, 4))),
    (torch.einsum, lambda n: (R(n, 1), [0, 1], p(3, 4), [1, 2], [0, 2])),
    (F.bilinear, lambda n: (R(n, 5, 2), R(n, 5, 3), p(4, 2, 3), p(4))),
    (F.conv1d, lambda n: (R(n, 4, 7), p(6, 2, 3), p(6), 2, 1, 2, 2)),
    (F.conv2d, lambda n: {"input": R(n, 2, 5, 4), "weight": p(3, 2, 3, 3), "padding": "same"}),
    (F.conv2d, lambda n: {"input": R(n, 2, 5, 4), "weight": p(3, 2, 2, 2), "padding": "same"}),
    (F.conv3d, lambda n: (R(n, 2, 3, 4, 3), p(3, 2, 2, 2, 2), p(3))),
    (F.conv_transpose1d, lambda n: (R(n, 4, 5), p(4, 3, 3), p(6), 2, 1, 1, 2, 2)),
    (F.conv_transpose2d, lambda n: (R(n, 2, 3, 3), p(2, 3, 2, 2), p(3), 2)),
    (F.embedding, lambda n: (torch.randint(5, (n, 3)), p(5, 2), -1)),
    (F.embedding, lambda n: {"input": torch.randint(5, (n,)), "weight": p(5, 2), "sparse": True}),
    (torch.index_select, lambda n: {"input": p(5, 2), "dim": 0, "index": torch.randint(5, (n,))}),
    (torch.add, lambda n: {"input": p(2, 3), "other": R(n, 2, 3), "alpha": 2}),
    (torch.add, lambda n: {"input": R(n, 2, 3), "other": p(2, 3), "alpha": 2}),
    (Tensor.__radd__, lambda n: (R(n, 3), p(3))),
    (torch.sub, lambda n: (R(n, 2, 3), p(2, 1))),
    (turned, lambda n: (R(n, 2, 4, 3), p(2, 3, 4))),
    (torch.rsub, lambda n: (R(n, 2, 3), p(2, 1))),
    (torch.mul, lambda n: (R(2, n, 3), p(2, 1, 3))),
    (torch.div, lambda n: (R(n, 2, 3), p(2, 1))),
    (Tensor.__truediv__, lambda n: (p(3), R(n, 3))),
    (torch.div, lambda n: {"input": p(3), "other": R(n, 3), "rounding_mode": None}),
    (joined, lambda n: (R(n, 3), p(1, 2))),
    (torch.logaddexp, lambda n: (R(n, 3), p(3))),
    (torch.hypot, lambda n: (R(n, 3), p(3).detach().exp().requires_grad_())),
    (torch.addcmul, lambda n: (R(n, 3), R(n, 3), p(3))),
    (torch.lerp, lambda n: (R(n, 3), p(3), 0.3)),
    (F.prelu, lambda n: (R(n, 3, 2), p(3))),
    (F.batch_norm, lambda n: (R(n, 3, 2), R(3), R(3).abs() + 1, p(3), p(3))),
    (F.layer_norm, lambda n: (R(n, 2, 3), (3,), p(3), p(3))),
    (F.rms_norm, lambda n: (R(n, 2, 3), (3,), p(3))),
    (F.group_norm, lambda n: (R(n, 4, 3), 2, p(4), p(4))),
    (F.instance_norm, lambda n: {"input": R(n, 3, 4), "weight": p(3), "bias": p(3)}),
]

RECURRENT: list[tuple[Callable[..., Any], Make]] = [
    (
        torch.lstm,
        lambda n: (R(n, 3, 3), (R(1, n, 4), R(1, n, 4)), recurrent(4), True, 1, 0.0, False, False, True),
    ),
    (
        torch.lstm,
        lambda n: (
            R(2, n, 3),
            (R(4, n, 2), R(4, n, 4)),
            recurrent(4, 2, 2, bias=False, proj=2),  # 12 parameters; biases are in the example above
            *(False, 2, 0.0, False, True, False),
        ),
    ),
    (
        torch.gru,
        lambda n: (R(3, n, 3), R(2, n, 4), recurrent(3, 2, bias=False), False, 2, 0.0, False, False, False),
    ),
    (torch.gru, lambda n: (R(1, n, 3), R(1, n, 4), recurrent(3), True, 1, 0.0, False, False, False)),
    (torch.rnn_tanh, lambda n: (R(3, n, 3), R(2, n, 4), recurrent(1, 1, 2), True, 1, 0.0, False, True, False)),
    (torch.rnn_relu, lambda n: (R(n, 3, 3), R(1, n, 4), recurrent(1), True, 1, 0.0, False, False, True)),
    (torch.gru_cell, lambda n: (R(n, 3), R(n, 4), *recurrent(3))),
    (torch.rnn_tanh_cell, lambda n: (R(n, 3), R(n, 4), *recurrent(1, bias=False))),
    (torch.rnn_relu_cell, lambda n: (R(n, 3), R(n, 4), *recurrent(1))),
]

FALLBACKS: list[tuple[Callable[..., Any], Make]] = [
    (torch.cdist, lambda n: (R(n, 2, 3), p(4, 3))),
    (with_turned_bias, lambda n: (R(n, 3), p(3, 1))),
    (torch.addmm, lambda n: {"input": R(4, n), "mat1": p(4, 3), "mat2": R(3, n), "alpha": 0.5}),
    (torch.index_select, lambda n: {"input": p(2, 5), "dim": 1, "index": torch.randint(5, (n,))}),
    (F.embedding_bag, lambda n: {"input": torch.randint(5, (n, 3)), "weight": p(5, 2), "mode": "sum"}),
    (F.embedding_bag, lambda n: {"input": torch.randint(5, (n, 3)), "weight": p(5, 2), "mode": "max"}),
]


@one_in(6)
@pytest.mark.parametrize(("function", "make"), EXAMPLES, ids=lambda value: value.__name__)
def test_rules_of_nodes(function: Callable[..., Any], make: Make) -> None:
    assert check_use(function, make).error < 1e-12


SLOW = (torch.lstm, torch.gru, torch.rnn_tanh)  # `make test` has one function and the cells of this kind


@one_in(5)
@often(lambda function, make: function not in SLOW)
@pytest.mark.parametrize(("function", "make"), RECURRENT, ids=lambda value: value.__name__)
def test_recurrent_functions(function: Callable[..., Any], make: Make) -> None:
    assert check_use(function, make, allow_fallback=True).error < 1e-12


@one_in(3)
@pytest.mark.parametrize(("function", "make"), FALLBACKS, ids=lambda value: value.__name__)
def test_the_fallback(function: Callable[..., Any], make: Make) -> None:
    report = check_use(function, make, allow_fallback=True)
    assert set(report.structures.values()) == {"Dense, by the fallback"}
    assert report.laws["the fallback and the loop"] > 0


def test_no_rule_is_left_out() -> None:
    """The examples above go through each rule, but for some that other files are there for."""
    asked: set[str] = set()
    for function, make in (*EXAMPLES, *FALLBACKS):
        given = make(3)
        out = function(**given) if isinstance(given, dict) else function(*given)
        stack = [out.grad_fn]
        while stack:
            node = stack.pop()
            asked.add(name_of_node(node))
            stack += [above for above, _ in node.next_functions if above is not None]
    checked = {RULES[name].entry_of for name in asked if name in RULES}
    # Groups of rows have no double precision on a processor: see test_grouped.py. A head that is one function
    # with its loss returns no samples: see test_fused_heads.py. LSTMs are one node in single precision: see
    # test_recurrent_nodes.py. On processors a root mean square has no node.
    elsewhere = {"_grouped_product", "_summed_in_chunks", "_rms_norm", "_parameter_of_layer"}
    left = {rule.entry_of.__name__ for rule in RULES.values() if rule.entry_of not in checked}
    assert left - elsewhere == set()


class Positions(nn.Module):
    """Adds rows of a table that all samples share, rounded, to a layer."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.table, self.layer, self.mode = nn.Embedding(5, 3), nn.Linear(3, 3), mode
        self.register_buffer("places", torch.arange(3))
        self.register_buffer("divisors", torch.rand(3, 3) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.div(self.table(self.places), self.divisors, rounding_mode=self.mode)
        return self.layer(x) + x * rows


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_a_rounded_quotient_has_no_slope(mode: Any) -> None:
    x, shift = R(4, 3) + 2, p(3)
    out = torch.div(shift * 10, x, rounding_mode=mode) + torch.div(shift, x, rounding_mode=mode) + x * shift
    with backpack(extensions.BatchGrad(), extensions.DiagHessian()):
        F.mse_loss(out, torch.zeros_like(out), reduction="sum").backward()
    assert_near(shift.grad_batch, 2 * out.detach() * x, "shift")
    assert_near(shift.diag_h, (2 * x**2).sum(0), "shift")


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float16])
def test_divisors_in_a_lower_precision(dtype: torch.dtype) -> None:
    """Reciprocals of counts are in the precision of the quotient."""
    counts, scale = torch.arange(3, 15).view(4, 3).to(dtype), nn.Parameter(R(3).double())
    with backpack(extensions.BatchGrad()):
        F.mse_loss(scale / counts, torch.zeros(4, 3).double(), reduction="sum").backward()
    assert_near(scale.grad_batch, 2 * scale.detach() / counts.double().square(), "scale", 1e-14)


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_rounded_rows_of_a_table_have_no_slope(mode: str) -> None:
    model = extend(Positions(mode))
    with backpack(extensions.BatchGrad()):
        F.mse_loss(model(torch.randn(4, 3, 3)), torch.zeros(4, 3, 3)).backward()
    assert model.layer.weight.grad_batch.any()
    assert not model.table.weight.grad_batch.any()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_columns_are_compared_at_their_own_scale(scale: float) -> None:
    """A vectorised call of a node is trusted if it makes what single calls make."""
    columns = scale * torch.rand(3, 4).double()
    assert _is_close(columns * (1 + 1e-12), columns)
    assert not _is_close(columns * 1.1, columns)
    assert not _is_close(columns.flip(0), columns)
    assert not _is_close(columns[:, :2], columns)
    assert not _is_close(columns / 0, columns / 0)
