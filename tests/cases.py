"""The one list of cases: models x losses x data that every extension is crossed with.

A case says how to build a small model, a loss and N samples, and, where it is not the obvious
thing, how one sample is cut out and what the loss function receives. `Case.problem` turns it into
the one-sample functions that the oracle works on. Nothing here knows packprop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.models import (
    Apply,
    Attention,
    Checkpointed,
    DoubleWell,
    FlashAttention,
    InitialState,
    LanguageModel,
    LanguageModelWithLoss,
    LearnedQueries,
    LibraryAttention,
    LogCosh,
    Raw,
    Recurrent,
    ResNet,
    ShiftedEmbedding,
    SoftMaximum,
    Softplus,
    Square,
    TimeFirst,
    VisionTransformer,
    Wave,
    Windows,
    assign_slice,
    cell_loop,
    frozen,
    headed,
    in_place,
    in_place_operator,
    last_step,
    masked_in_place,
    old_weight_norm,
    pruned,
    same_module_twice,
    tied_autoencoder,
    two_layers,
    two_modules_one_weight,
)
from tests.oracle import Problem

Data = Callable[[int], tuple[Any, Any]]
Take = Callable[[Any, int], Any]


# --------------------------------------------------------------------------------------------------
# What a case is
# --------------------------------------------------------------------------------------------------


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor of nested tuples and dictionaries."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {k: map_tensors(function, v) for k, v in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tensors(function, v) for v in tree)
    return tree


def along(axis: int) -> Take:
    """Cut sample n out of an axis, keeping the axis with length 1."""
    return lambda tree, n: map_tensors(lambda t: t.narrow(axis, n, 1), tree)


_LEADING = along(0)


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model on a tensor, a tuple of arguments or a dictionary of keyword arguments."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(inputs)


class Functional:
    """A loss function with its options, called like a loss module."""

    def __init__(self, function: Callable[..., Tensor], **options: Any) -> None:
        self.function, self.options, self.reduction = function, options, "mean"

    def __call__(self, output: Tensor, *target: Tensor) -> Tensor:
        return self.function(output, *target, reduction=self.reduction, **self.options)


def loss_parts(loss: Any) -> Iterator[Any]:
    """Every part of a loss that has a reduction of its own."""
    parts = loss.modules() if isinstance(loss, nn.Module) else [loss]
    return (part for part in parts if hasattr(part, "reduction"))


@dataclass(frozen=True)
class Case:
    """A model, a loss and data, and how samples are told apart.

    Attributes:
        name: unique; the test id.
        model: builds the model; called under a fixed seed.
        loss: builds the loss module (or `Functional`); its ``reduction`` is set afterwards.
        data: ``N -> (inputs, targets)``.
        sizes: the numbers of samples to test.
        order: 2 where curvature is defined, 1 where only gradients are.
        reductions: the reductions to test; ``None`` leaves the loss as it was built.
        output: ``(model, inputs) -> what the loss function receives``.
        score: ``(loss, output, targets) -> the whole loss``.
        total: ``(model, loss, inputs, targets) -> the whole loss`` where a user writes something
            else than ``score(loss, output(model, inputs), targets)``.
        term: ``(loss, f_n, targets, n) -> the share of sample n`` where a sum over the sample
            divided by the whole batch's divisor is not it.
        take_input: cuts sample n out of the inputs.
        take_target: cuts sample n out of the targets.
        record: the loss is a function, so the whole computation runs inside ``packprop.record()``.
        columns: whether a sample's loss input has as many columns as it has entries.
        dense: weights of linear layers that no sample goes into: they have no Kronecker factors.
        refuses: text parts of the error that is right instead of numbers, for every extension.
        refuses_curvature: the same, for second order extensions alone.
        tags: further groups that tests select by.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[], Any]
    data: Data
    sizes: tuple[int, ...] = (1, 3)
    order: int = 2
    reductions: tuple[str | None, ...] = ("mean", "sum")
    output: Callable[[nn.Module, Any], Tensor] = call
    score: Callable[[Any, Tensor, Any], Tensor] = lambda loss, output, target: loss(output, target)
    total: Callable[[nn.Module, Any, Any, Any], Tensor] | None = None
    term: Callable[[Any, Tensor, Any, int], Tensor] | None = None
    take_input: Take = _LEADING
    take_target: Take = _LEADING
    record: bool = False
    columns: bool = True
    dense: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()
    refuses_curvature: tuple[str, ...] = ()
    tags: frozenset[str] = field(default_factory=frozenset)

    def whole(self, model: nn.Module, loss: Any, inputs: Any, targets: Any) -> Tensor:
        """The whole loss, as a user writes it."""
        if self.total is not None:
            return self.total(model, loss, inputs, targets)
        return self.score(loss, self.output(model, inputs), targets)

    def problem(self, size: int, reduction: str | None = "mean", dtype: torch.dtype = torch.float64) -> Problem:
        """Build everything afresh: the same numbers every time, rounded to ``dtype``."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = randomised(self.model().double().eval()).to(dtype)
            loss = self.loss()
            if isinstance(loss, nn.Module):
                loss = loss.double().to(dtype)
            inputs, targets = map_tensors(
                lambda t: t.to(dtype) if t.is_floating_point() else t,
                _in_double(self.data, size),
            )
        if reduction is not None:
            for part in loss_parts(loss):
                part.reduction = reduction
        summed = copy.deepcopy(loss)
        for part in loss_parts(summed):
            part.reduction = "sum"

        def total() -> Tensor:
            return self.whole(model, loss, inputs, targets)

        def output(n: int) -> Tensor:
            return self.output(model, self.take_input(inputs, n))

        def share(f: Tensor, n: int) -> Tensor:
            if self.term is not None:
                return self.term(loss, f, targets, n)
            return self.score(summed, f, self.take_target(targets, n)) / divisor

        divisor = torch.ones((), dtype=dtype)
        if self.term is None and reduction == "mean":
            with torch.no_grad():
                f = self.output(model, inputs)
                divisor = self.score(summed, f, targets) / self.score(loss, f, targets)
        return Problem(model, loss, inputs, targets, size, total, output, share)


def _in_double(data: Data, size: int) -> tuple[Any, Any]:
    torch.set_default_dtype(torch.float64)
    try:
        return data(size)
    finally:
        torch.set_default_dtype(torch.float32)


def randomised(model: nn.Module) -> nn.Module:
    """Move every parameter and running statistic off its special initial value (ones, zeros)."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn_like(buffer))
            elif name.endswith("running_var"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model


# --------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------


def regression(inputs: tuple[int, ...], targets: tuple[int, ...]) -> Data:
    """Real inputs ``[N, *inputs]`` and real targets ``[N, *targets]``."""
    return lambda n: (torch.randn(n, *inputs), torch.randn(n, *targets))


def classes(inputs: tuple[int, ...], count: int, positions: tuple[int, ...] = ()) -> Data:
    """Real inputs ``[N, *inputs]`` and class labels ``[N, *positions]``."""
    return lambda n: (torch.randn(n, *inputs), torch.randint(count, (n, *positions)))


def tokens(length: tuple[int, ...], vocabulary: int, count: int, positions: tuple[int, ...] = ()) -> Data:
    """Integer inputs ``[N, *length]`` and class labels ``[N, *positions]``."""
    return lambda n: (
        torch.randint(vocabulary, (n, *length)),
        torch.randint(count, (n, *positions)),
    )


def use(
    name: str,
    layer: Callable[[], nn.Module],
    inputs: tuple[int, ...],
    features: int,
    **options: Any,
) -> Case:
    """A case about one layer: the layer, a nonlinearity, a head, cross entropy over 3 classes."""
    return Case(
        name,
        lambda: headed(layer(), features=features),
        nn.CrossEntropyLoss,
        options.pop("data", classes(inputs, 3)),
        **options,
    )


def raw(
    name: str,
    function: Callable[..., Tensor],
    inputs: tuple[int, ...],
    features: int,
    shapes: dict[str, tuple[int, ...]],
    **options: Any,
) -> Case:
    """A case about a torch function that consumes raw parameters."""
    return use(name, lambda: Raw(function, **shapes), inputs, features, **options)


# --------------------------------------------------------------------------------------------------
# The list
# --------------------------------------------------------------------------------------------------


def _linear() -> Iterator[Case]:
    yield use("linear-2d", lambda: nn.Linear(3, 4), (3,), 4)
    yield use("linear-3d", lambda: nn.Linear(3, 2), (4, 3), 8)
    yield use("linear-3d-square", lambda: nn.Linear(3, 3), (3, 3), 9)  # every axis as long as N
    yield use("linear-4d", lambda: nn.Linear(2, 2), (2, 3, 2), 12)
    yield use("linear-no-bias", lambda: nn.Linear(3, 4, bias=False), (3,), 4)
    yield use("linear-one-feature", lambda: nn.Linear(1, 2), (1,), 2)
    yield Case("linear-alone", lambda: nn.Linear(3, 2), nn.MSELoss, regression((3,), (2,)), tags=_SMOKE)
    yield Case(
        "linear-deep",
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 3)),
        nn.CrossEntropyLoss,
        classes((3,), 3),
        tags=_SMOKE,
    )
    yield raw("matmul-x-w", lambda m, x: x @ m.w, (3,), 4, {"w": (3, 4)})
    yield raw("matmul-x-wt", lambda m, x: x @ m.w.t(), (3,), 4, {"w": (4, 3)})
    yield raw("matmul-x-wT-3d", lambda m, x: x @ m.w.T, (2, 3), 8, {"w": (4, 3)})
    yield raw("matmul-x-mT", lambda m, x: torch.matmul(x, m.w.mT), (3,), 4, {"w": (4, 3)})
    yield raw("matmul-w-x", lambda m, x: m.w @ x, (3, 2), 8, {"w": (4, 3)})
    yield raw("matmul-w-xt", lambda m, x: (m.w @ x.t()).t(), (3,), 4, {"w": (4, 3)})
    yield raw("matmul-w-xt-square", lambda m, x: (m.w @ x.t()).t(), (3,), 3, {"w": (3, 3)})
    yield raw("matmul-vector", lambda m, x: (x @ m.w).unsqueeze(1), (3,), 1, {"w": (3,)})
    yield raw("matmul-vector-x", lambda m, x: m.w @ x, (3, 2), 2, {"w": (3,)})
    yield raw(
        "matmul-heads", lambda m, x: x.unsqueeze(1) @ m.w, (2, 3), 8, {"w": (2, 3, 2)}
    )  # [N, 1, s, i] @ [h, i, o]
    yield raw("mm", lambda m, x: torch.mm(x, m.w), (3,), 4, {"w": (3, 4)})
    yield raw("mm-keyword", lambda m, x: torch.mm(input=x, mat2=m.w), (3,), 4, {"w": (3, 4)})
    yield raw("mv", lambda m, x: torch.mv(x, m.w).unsqueeze(1), (3,), 1, {"w": (3,)})
    yield raw("addmm", lambda m, x: torch.addmm(m.b, x, m.w), (3,), 4, {"w": (3, 4), "b": (4,)})
    yield raw(
        "addmm-scaled",
        lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2.0),
        (3,),
        4,
        {"w": (3, 4), "b": (4,)},
    )
    yield raw("einsum-ni-io-no", lambda m, x: torch.einsum("ni,io->no", x, m.w), (3,), 4, _W34)
    yield raw("einsum-implicit", lambda m, x: torch.einsum("ni,io", x, m.w), (3,), 4, _W34)
    yield raw("einsum-weight-first", lambda m, x: torch.einsum("io,ni->no", m.w, x), (3,), 4, _W34)
    yield raw("einsum-shared", lambda m, x: torch.einsum("nsi,oi->nso", x, m.w), (2, 3), 8, {"w": (4, 3)})
    yield raw(
        "einsum-heads",
        lambda m, x: torch.einsum("nsi,hid->nhsd", x, m.w),
        (2, 3),
        8,
        {"w": (2, 3, 2)},
    )
    yield raw(
        "einsum-two-fan-in-axes",
        lambda m, x: torch.einsum("nshd,hdo->nso", x, m.w),
        (2, 2, 3),
        4,
        {"w": (2, 3, 2)},
    )
    yield raw("einsum-scale", lambda m, x: torch.einsum("ni,i->ni", x, m.w), (3,), 3, {"w": (3,)})
    yield raw("einsum-inner", lambda m, x: torch.einsum("ni,i->n", x, m.w)[:, None], (3,), 1, _W3)
    yield raw("einsum-sample-last", lambda m, x: torch.einsum("io,ni->on", m.w, x).t(), (3,), 4, _W34)
    yield raw(
        "einsum-two-parameters",
        lambda m, x: torch.einsum("ni,ir,ro->no", x, m.a, m.b),
        (3,),
        4,
        {"a": (3, 2), "b": (2, 4)},
    )
    yield raw("einsum-ellipsis", lambda m, x: torch.einsum("...i,io->...o", x, m.w), (2, 3), 8, _W34)
    yield raw(
        "einsum-diagonal",
        lambda m, x: torch.einsum("nij,ij->n", x, m.w)[:, None],
        (2, 3),
        1,
        {"w": (2, 3)},
    )
    yield raw(
        "einsum-quadratic",
        lambda m, x: torch.einsum("ni,oij,nj->no", x, m.w, x),
        (3,),
        2,
        {"w": (2, 3, 3)},
    )
    yield raw(
        "bmm-heads-first",
        lambda m, x: torch.bmm(x.transpose(0, 1), m.w).transpose(0, 1),
        (2, 3),
        4,
        {"w": (2, 3, 2)},
    )  # [h, N, i] @ [h, i, o]
    yield raw(
        "baddbmm-heads-first",
        lambda m, x: torch.baddbmm(m.b, x.transpose(0, 1), m.w).transpose(0, 1),
        (2, 3),
        4,
        {"w": (2, 3, 2), "b": (2, 1, 2)},
    )
    yield raw(
        "bmm-expanded",
        lambda m, x: torch.bmm(x, m.w.expand(x.shape[0], -1, -1)),
        (2, 3),
        8,
        _W34,
    )
    yield raw("tensordot", lambda m, x: torch.tensordot(x, m.w, dims=([2], [0])), (2, 3), 8, _W34)
    yield raw("inner", lambda m, x: torch.inner(x, m.w), (3,), 4, {"w": (4, 3)})
    yield raw(
        "linear-function",
        lambda m, x: F.linear(x, m.w, m.b),
        (3,),
        4,
        {"w": (4, 3), "b": (4,)},
    )
    yield raw(
        "linear-function-keyword",
        lambda m, x: F.linear(bias=m.b, weight=m.w, input=x),
        (3,),
        4,
        {"w": (4, 3), "b": (4,)},
    )
    yield raw("linear-parameter-as-input", lambda m, x: F.linear(m.w, x).t(), (3,), 4, {"w": (4, 3)})
    yield use(
        "bilinear",
        lambda: Apply(lambda m, x: m.layer(x[:, :2], x[:, 2:]), layer=nn.Bilinear(2, 3, 2)),
        (5,),
        2,
    )
    yield use(
        "bilinear-shared-same-input",
        lambda: Apply(lambda m, x: m.layer(x, x), layer=nn.Bilinear(2, 2, 2, bias=False)),
        (3, 2),
        6,
    )


def _convolution() -> Iterator[Case]:
    def conv(name: str, layer: Callable[[], nn.Module], inputs: tuple[int, ...]) -> Case:
        with torch.no_grad():
            features = layer()(torch.zeros(1, *inputs)).numel()
        return use(name, layer, inputs, features)

    yield conv("conv1d", lambda: nn.Conv1d(2, 3, 3), (2, 5))
    yield conv("conv1d-stride", lambda: nn.Conv1d(2, 2, 2, stride=2, padding=1), (2, 6))
    yield conv("conv1d-dilation", lambda: nn.Conv1d(2, 2, 2, dilation=2), (2, 5))
    yield conv("conv1d-groups", lambda: nn.Conv1d(4, 2, 2, groups=2), (4, 4))
    yield conv("conv1d-same", lambda: nn.Conv1d(2, 2, 2, padding="same", dilation=3), (2, 5))
    yield conv("conv1d-valid", lambda: nn.Conv1d(2, 2, 3, padding="valid", bias=False), (2, 5))
    yield conv("conv2d", lambda: nn.Conv2d(2, 3, 2), (2, 3, 4))
    yield conv("conv2d-no-bias", lambda: nn.Conv2d(2, 2, (2, 1), bias=False), (2, 3, 3))
    yield conv(
        "conv2d-stride-padding-dilation",
        lambda: nn.Conv2d(2, 2, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        (2, 4, 3),
    )
    yield conv("conv2d-stride-leaves-rest", lambda: nn.Conv2d(1, 2, 2, stride=3), (1, 6, 6))
    yield conv("conv2d-groups", lambda: nn.Conv2d(4, 6, 2, groups=2), (4, 3, 3))
    yield conv("conv2d-depthwise", lambda: nn.Conv2d(3, 6, 2, groups=3), (3, 3, 3))
    yield conv("conv2d-same-even", lambda: nn.Conv2d(1, 2, (2, 4), padding="same"), (1, 3, 3))
    yield conv("conv2d-one-channel", lambda: nn.Conv2d(1, 1, 3), (1, 3, 3))
    yield conv("conv3d", lambda: nn.Conv3d(2, 2, 2), (2, 2, 3, 2))
    yield conv(
        "conv3d-stride-dilation-groups",
        lambda: nn.Conv3d(2, 2, 2, stride=2, dilation=(1, 2, 1), groups=2, padding=1),
        (2, 2, 3, 2),
    )
    yield conv("conv3d-same", lambda: nn.Conv3d(1, 2, (1, 2, 3), padding="same"), (1, 2, 2, 2))
    for mode in ("reflect", "replicate", "circular"):
        yield conv(f"conv1d-{mode}", partial(nn.Conv1d, 1, 2, 3, padding=2, padding_mode=mode), (1, 4))
        yield conv(
            f"conv2d-{mode}",
            partial(nn.Conv2d, 1, 2, 3, padding=(1, 2), padding_mode=mode),
            (1, 3, 3),
        )
        yield conv(
            f"conv3d-{mode}",
            partial(nn.Conv3d, 1, 1, 2, padding=1, padding_mode=mode, stride=2),
            (1, 2, 2, 3),
        )
    yield conv(
        "conv2d-same-circular",
        lambda: nn.Conv2d(1, 2, (2, 3), padding="same", padding_mode="circular"),
        (1, 3, 3),
    )
    yield conv("convtranspose1d", lambda: nn.ConvTranspose1d(2, 3, 3), (2, 3))
    yield conv(
        "convtranspose1d-options",
        lambda: nn.ConvTranspose1d(4, 2, 3, stride=2, padding=1, output_padding=1, dilation=2, groups=2),
        (4, 3),
    )
    yield conv("convtranspose2d", lambda: nn.ConvTranspose2d(2, 3, 2), (2, 2, 2))
    yield conv(
        "convtranspose2d-options",
        lambda: nn.ConvTranspose2d(
            2, 4, (2, 3), stride=(2, 1), padding=(1, 0), output_padding=(1, 0), groups=2
        ),
        (2, 2, 3),
    )
    yield conv(
        "convtranspose2d-dilation",
        lambda: nn.ConvTranspose2d(2, 1, 2, dilation=2, stride=3, output_padding=2, bias=False),
        (2, 2, 2),
    )
    yield conv("convtranspose3d", lambda: nn.ConvTranspose3d(2, 1, 2), (2, 1, 2, 2))
    yield conv(
        "convtranspose3d-options",
        lambda: nn.ConvTranspose3d(2, 2, 2, stride=2, padding=1, output_padding=1, groups=2),
        (2, 2, 1, 2),
    )
    yield use(
        "convtranspose2d-output-size",
        lambda: Apply(lambda m, x: m.layer(x, output_size=[4, 4]), layer=nn.ConvTranspose2d(1, 1, 2, stride=2)),
        (1, 2, 2),
        16,
    )
    yield raw(
        "conv2d-function-viewed-weight",
        lambda m, x: F.conv2d(x, m.w.view(2, 1, 2, 2), m.b, stride=1),
        (1, 3, 3),
        8,
        {"w": (2, 4), "b": (2,)},
    )
    yield raw(
        "conv2d-function-keyword",
        lambda m, x: F.conv2d(weight=m.w, input=x, padding=1, dilation=2),
        (1, 3, 3),
        18,
        {"w": (2, 1, 2, 2)},
    )
    yield raw(
        "conv2d-standardised-weight",
        lambda m, x: F.conv2d(x, (m.w - m.w.mean((1, 2, 3), keepdim=True)) / m.w.std()),
        (1, 3, 3),
        8,
        {"w": (2, 1, 2, 2)},
    )
    yield Case(
        "conv2d-deep",
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2, 2, 2),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(2, 3),
        ),
        nn.CrossEntropyLoss,
        classes((1, 4, 4), 3),
        tags=_SMOKE,
    )
    yield Case(
        "avgpool-divisor-override",
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2),
            nn.AvgPool2d(2, stride=1, padding=1, divisor_override=3, ceil_mode=True),
            nn.Conv2d(2, 2, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ),
        nn.MSELoss,
        regression((1, 4, 4), (2,)),
    )
    yield Case(
        "autoencoder",
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Sigmoid(), nn.ConvTranspose2d(2, 1, 2), nn.Flatten()),
        nn.MSELoss,
        regression((1, 3, 3), (9,)),
        tags=_SMOKE,
    )
    yield Case(
        "upsampled-map",
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 1), nn.Upsample(scale_factor=2), nn.PixelShuffle(1), nn.Conv2d(2, 2, 3)
        ),
        nn.MSELoss,
        regression((1, 2, 2), (2, 2, 2)),
    )


def _normalisation() -> Iterator[Case]:
    yield use("batchnorm1d-2d", lambda: nn.BatchNorm1d(4), (4,), 4)
    yield use("batchnorm1d-3d", lambda: nn.BatchNorm1d(2), (2, 3), 6)
    yield use("batchnorm2d", lambda: nn.BatchNorm2d(2), (2, 2, 3), 12)
    yield use("batchnorm3d", lambda: nn.BatchNorm3d(2), (2, 1, 2, 2), 8)
    yield use("layernorm", lambda: nn.LayerNorm(4), (4,), 4)
    yield use("layernorm-shared", lambda: nn.LayerNorm(4), (3, 4), 12)
    yield use("layernorm-two-axes", lambda: nn.LayerNorm((2, 3)), (2, 2, 3), 12)
    yield use("layernorm-no-bias", lambda: nn.LayerNorm(4, bias=False), (4,), 4)
    yield use("groupnorm", lambda: nn.GroupNorm(2, 4), (4, 2), 8)
    yield use("groupnorm-2d", lambda: nn.GroupNorm(1, 2), (2, 2, 2), 8)
    yield use("groupnorm-features", lambda: nn.GroupNorm(2, 4), (4,), 4)
    yield use("instancenorm1d", lambda: nn.InstanceNorm1d(2, affine=True), (2, 4), 8)
    yield use("instancenorm2d", lambda: nn.InstanceNorm2d(2, affine=True), (2, 2, 3), 12)
    yield use("instancenorm3d", lambda: nn.InstanceNorm3d(2, affine=True), (2, 1, 2, 2), 8)
    yield use(
        "instancenorm2d-running",
        lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
        (2, 2, 3),
        12,
    )
    yield use("rmsnorm", lambda: nn.RMSNorm(4), (2, 4), 8)
    yield use("rmsnorm-two-axes", lambda: nn.RMSNorm((2, 3), eps=1e-3), (2, 2, 3), 12)
    yield raw(
        "rmsnorm-by-hand",
        lambda m, x: m.w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)),
        (2, 4),
        8,
        {"w": (4,)},
    )
    yield raw(
        "layernorm-function",
        lambda m, x: F.layer_norm(x, (4,), weight=m.w, bias=m.b),
        (4,),
        4,
        {"w": (4,), "b": (4,)},
    )


def _embedding() -> Iterator[Case]:
    def bag(name: str, layer: Callable[[], nn.Module], **options: Any) -> Case:
        options.setdefault("data", tokens((3,), 4, 3))
        return use(name, layer, (), 2, **options)

    def offsets(n: int) -> tuple[Any, Tensor]:
        lengths = torch.arange(n) % 3 + 1
        starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
        return (torch.randint(4, (int(lengths.sum()),)), starts), torch.randint(3, (n,))

    def weighted_offsets(n: int) -> tuple[Any, Tensor]:
        (ids, starts), target = offsets(n)
        return (ids, starts, torch.rand(ids.shape[0])), target

    def take_bag(inputs: Any, n: int) -> Any:
        ids, starts, *rest = inputs
        end = starts[n + 1] if n + 1 < len(starts) else len(ids)
        return (
            ids[starts[n] : end],
            torch.zeros(1, dtype=torch.long),
            *(w[starts[n] : end] for w in rest),
        )

    def bags(function: Callable[..., Tensor], **options: Any) -> nn.Module:
        return Apply(
            lambda m, *x: m.head(torch.tanh(function(m, *x))),
            bag=nn.EmbeddingBag(4, 2, **options),
            head=nn.Linear(2, 3),
        )

    yield use("embedding", lambda: nn.Embedding(5, 2), (), 6, data=tokens((3,), 5, 3), tags=_SMOKE)
    yield use("embedding-one-id", lambda: nn.Embedding(4, 2), (), 2, data=tokens((), 4, 3))
    yield use("embedding-grid", lambda: nn.Embedding(4, 2), (), 8, data=tokens((2, 2), 4, 3))
    yield use(
        "embedding-padding-idx",
        lambda: nn.Embedding(4, 2, padding_idx=1),
        (),
        8,
        data=tokens((4,), 4, 3),
    )
    yield use("embedding-subclass", lambda: ShiftedEmbedding(4, 2), (), 6, data=tokens((3,), 4, 3))
    yield raw(
        "embedding-function",
        lambda m, ids: F.embedding(input=ids, weight=m.w),
        (),
        6,
        {"w": (4, 2)},
        data=tokens((3,), 4, 3),
    )
    yield raw("embedding-by-index", lambda m, ids: m.w[ids], (), 6, _W42, data=tokens((3,), 4, 3))
    yield raw(
        "embedding-index-select",
        lambda m, ids: torch.index_select(m.w, 0, ids.flatten()).view(ids.shape[0], -1),
        (),
        6,
        _W42,
        data=tokens((3,), 4, 3),
    )
    yield raw(
        "embedding-one-hot",
        lambda m, ids: F.one_hot(ids, 4).to(m.w.dtype) @ m.w,
        (),
        6,
        _W42,
        data=tokens((3,), 4, 3),
    )
    yield raw(
        "embedding-gather",
        lambda m, ids: m.w.expand(ids.shape[0], -1).gather(1, ids),
        (),
        3,
        {"w": (4,)},
        data=tokens((3,), 4, 3),
    )
    yield use(
        "embedding-positions",
        lambda: Apply(
            lambda m, ids: m.token(ids) + m.position(torch.arange(ids.shape[1])),
            token=nn.Embedding(4, 2),
            position=nn.Embedding(5, 2),
        ),
        (),
        6,
        data=tokens((3,), 4, 3),
    )
    for mode in ("sum", "mean", "max"):
        yield bag(f"embedding-bag-{mode}", partial(nn.EmbeddingBag, 4, 2, mode=mode))
        yield Case(
            f"embedding-bag-offsets-{mode}",
            partial(bags, lambda m, ids, starts: m.bag(ids, starts), mode=mode),
            nn.CrossEntropyLoss,
            offsets,
            take_input=take_bag,
        )
    yield bag("embedding-bag-padding-idx", lambda: nn.EmbeddingBag(4, 2, mode="mean", padding_idx=2))
    yield Case(
        "embedding-bag-weights",
        lambda: bags(lambda m, ids, w: m.bag(ids, per_sample_weights=w), mode="sum"),
        nn.CrossEntropyLoss,
        lambda n: ((torch.randint(4, (n, 3)), torch.rand(n, 3)), torch.randint(3, (n,))),
    )
    yield Case(
        "embedding-bag-offsets-weights",
        lambda: bags(lambda m, ids, starts, w: m.bag(ids, starts, w), mode="sum"),
        nn.CrossEntropyLoss,
        weighted_offsets,
        take_input=take_bag,
    )


def _raw() -> Iterator[Case]:
    yield use("prelu-one", lambda: nn.PReLU(), (4,), 4)
    yield use("prelu-channels", lambda: nn.PReLU(3), (3, 2), 6)
    yield use("prelu-channels-features", lambda: nn.PReLU(3), (3,), 3)
    yield raw("add", lambda m, x: x + m.w, (3,), 3, _W3)
    yield raw("add-scalar", lambda m, x: x + m.w, (3,), 3, {"w": ()})
    yield raw("add-leading-one", lambda m, x: x + m.w, (2, 3), 6, {"w": (1, 2, 3)})
    yield raw("add-inner-one", lambda m, x: x + m.w, (2, 3), 6, {"w": (2, 1)})
    yield raw("add-square", lambda m, x: x + m.w, (3, 3), 9, {"w": (3, 3)})
    yield raw("add-grows-input", lambda m, x: x + m.w, (1, 3), 6, {"w": (2, 1)})
    yield raw("add-alpha", lambda m, x: torch.add(input=x, other=m.w, alpha=2.0), (3,), 3, _W3)
    yield raw("add-reversed", lambda m, x: m.w + x, (3,), 3, _W3)
    yield raw("subtract", lambda m, x: x - m.w, (3,), 3, _W3)
    yield raw("subtract-reversed", lambda m, x: m.w - x, (3,), 3, _W3)
    yield raw("rsub", lambda m, x: torch.rsub(x, m.w), (3,), 3, _W3)
    yield raw("multiply", lambda m, x: x * m.w, (3,), 3, _W3)
    yield raw("multiply-scalar", lambda m, x: m.w * x, (3,), 3, {"w": ()})
    yield raw("multiply-channels", lambda m, x: x * m.w[:, None], (2, 3), 6, {"w": (2,)})
    yield raw("multiply-grows-input", lambda m, x: x * m.w, (1, 3), 6, {"w": (2, 3)})
    yield raw("divide", lambda m, x: x / (2 + m.w), (3,), 3, _W3)
    yield raw("divide-direct", lambda m, x: x / m.w, (3,), 3, _W3)
    yield raw("divide-reversed", lambda m, x: m.w / (2 + x.square()), (3,), 3, _W3)
    yield raw("power", lambda m, x: (1 + x.square()) ** m.w, (3,), 3, _W3)
    yield raw("affine", lambda m, x: x * m.w + m.b, (3,), 3, {"w": (3,), "b": (3,)})
    yield raw("addcmul", lambda m, x: torch.addcmul(m.b, x, m.w), (3,), 3, {"w": (3,), "b": (3,)})
    yield raw("lerp", lambda m, x: torch.lerp(x, m.w, 0.3), (3,), 3, _W3)
    yield raw("maximum", lambda m, x: torch.maximum(x, m.w), (3,), 3, _W3)
    yield raw("clamp", lambda m, x: torch.clamp(x, min=m.w), (3,), 3, _W3)
    yield raw("where", lambda m, x: torch.where(x > 0, x, m.w), (3,), 3, _W3)
    yield raw("where-two", lambda m, x: torch.where(x > 0, m.v * x, m.w), (3,), 3, _VW3)
    yield raw("where-scalar", lambda m, x: torch.where(x > 0, m.w, 0.0), (3,), 3, {"w": ()})
    yield raw("index-integer", lambda m, x: x * m.w[1], (3,), 3, {"w": (2, 3)})
    yield raw("index-slice", lambda m, x: x + m.w[1:4], (3,), 3, {"w": (5,)})
    yield raw("index-ellipsis", lambda m, x: x + m.w[..., ::2], (3,), 3, {"w": (1, 5)})
    yield raw("index-list", lambda m, x: x + m.w[[0, 2, 0]], (3,), 3, _W3)
    yield raw("index-twice", lambda m, x: x * m.w[0] + m.w[1], (3,), 3, {"w": (2, 3)})
    yield raw("select-narrow", lambda m, x: x * m.w.select(0, 1).narrow(0, 1, 3), (3,), 3, _W25)
    yield raw("unbind", lambda m, x: x * m.w.unbind(0)[0] - m.w.unbind(0)[1], (3,), 3, _W23)
    yield raw("chunk", lambda m, x: x * m.w.chunk(2)[0] + m.w.chunk(2)[1], (3,), 3, {"w": (6,)})
    yield raw("view", lambda m, x: x @ m.w.view(3, 2), (3,), 2, {"w": (6,)})
    yield raw("reshape-permute", lambda m, x: x @ m.w.permute(1, 0, 2).reshape(3, 4), (3,), 4, _W232)
    yield raw("unsqueeze", lambda m, x: x + m.w.unsqueeze(0), (3,), 3, _W3)
    yield raw("expand-as", lambda m, x: x * m.w.expand_as(x), (3,), 3, _W3)
    yield raw("expand-add", lambda m, x: m.w.expand(x.shape[0], -1) + x, (3,), 3, _W3)
    yield raw("broadcast-to", lambda m, x: torch.broadcast_to(m.w, x.shape) * x, (3,), 3, _W3)
    yield raw("repeat", lambda m, x: m.w.repeat(x.shape[0], 1) * x, (3,), 3, _W3)
    yield raw("tile-inside", lambda m, x: m.w.tile(2) * x, (4,), 4, {"w": (2,)})
    yield raw("repeat-interleave", lambda m, x: m.w.repeat_interleave(2) * x, (4,), 4, _W2)
    yield raw(
        "class-token",
        lambda m, x: torch.cat([m.w.expand(x.shape[0], -1, -1), x], dim=1),
        (2, 3),
        9,
        {"w": (1, 1, 3)},
    )
    yield raw(
        "class-token-through-layer",
        lambda m, x: torch.cat((m.w.expand(len(x), 1, 3), x), 1) @ m.v,
        (2, 3),
        6,
        {"w": (1, 1, 3), "v": (3, 2)},
    )
    yield raw(
        "stack",
        lambda m, x: torch.stack([m.w.expand_as(x), x, m.w * x], dim=1),
        (3,),
        9,
        _W3,
    )
    yield raw("cat-parameters", lambda m, x: x * torch.cat([m.v, m.w]), (6,), 6, _VW3)
    yield raw("stack-parameters", lambda m, x: x @ torch.stack([m.v, m.w], 1), (3,), 2, _VW3)
    yield raw("position-slice", lambda m, x: x + m.w[:, : x.shape[1]], (2, 3), 6, {"w": (1, 4, 3)})
    yield raw(
        "position-interpolated",
        lambda m, x: x + F.interpolate(m.w, size=x.shape[-1], mode="linear"),
        (2, 4),
        8,
        {"w": (1, 2, 3)},
    )
    yield raw("pad", lambda m, x: x + F.pad(m.w, (1, 1)), (4,), 4, {"w": (2,)})
    yield raw("function-of-parameter", lambda m, x: x * torch.sigmoid(m.w).exp(), (3,), 3, _W3)
    yield raw("softmax-of-parameter", lambda m, x: x * F.softmax(m.w, 0), (3,), 3, _W3)
    yield raw("norm-of-parameter", lambda m, x: x * m.w / m.w.norm(), (3,), 3, _W3)
    yield raw("product-of-parameters", lambda m, x: x @ (m.a @ m.b), (3,), 3, _LOW_RANK)
    yield raw(
        "low-rank-update",
        lambda m, x: F.linear(x, m.w + 0.5 * m.b @ m.a),
        (3,),
        2,
        {"w": (2, 3), "a": (1, 3), "b": (2, 1)},
    )
    yield raw("sum-of-parameter", lambda m, x: x * m.w.sum(), (3,), 3, _W3)
    yield raw("used-twice-differently", lambda m, x: torch.tanh(x @ m.w) @ m.w.T, (3,), 3, _W34)
    yield raw("squared-use", lambda m, x: m.w * (m.w * x), (3,), 3, _W3)
    yield raw("scale-and-matmul", lambda m, x: (x * m.w.diagonal()) @ m.w, (3,), 3, {"w": (3, 3)})
    yield raw("assign-slice", assign_slice, (3,), 4, {"w": ()})
    yield raw("in-place-add", lambda m, x: in_place(x * 2, "add_", m.w), (3,), 3, _W3)
    yield raw("in-place-multiply", lambda m, x: in_place(x * 2, "mul_", m.w), (3,), 3, _W3)
    yield raw("in-place-operator", in_place_operator, (3,), 3, _VW3)
    yield raw("to-and-contiguous", lambda m, x: x @ m.w.t().contiguous().clone(), (3,), 2, _W23)
    yield raw("index-second-axis", lambda m, x: x + m.w[:, [2, 0, 2]].sum(0), (3,), 3, _W34)
    yield raw(
        "index-by-two-inputs",
        lambda m, ids: m.w[ids, ids.flip(1)],
        (),
        3,
        {"w": (4, 4)},
        data=tokens((3,), 4, 3),
    )
    yield raw("masked-in-place", masked_in_place, (3,), 4, _W34)
    yield raw(
        "normalised-weight",
        lambda m, x: F.linear(F.normalize(x), F.normalize(m.w)),
        (3,),
        2,
        _W23,
    )
    yield raw("derived-used-twice", _derived_twice, (3,), 3, _W3)
    yield raw("derived-in-two-steps", lambda m, x: x * (s := m.w.exp()) + (s * m.v).sum(), (3,), 3, _VW3)
    yield raw("cdist", lambda m, x: torch.cdist(x, m.w), (2, 3), 8, {"w": (4, 3)}, tags=_FALLBACK)
    yield raw(
        "cosine-similarity",
        lambda m, x: F.cosine_similarity(x[:, None], m.w[None], dim=-1),
        (3,),
        2,
        {"w": (2, 3)},
        tags=_FALLBACK,
    )
    yield raw(
        "fft",
        lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(m.w), n=4),
        (4,),
        4,
        {"w": (4,)},
        tags=_FALLBACK,
    )
    yield raw(
        "solve",
        lambda m, x: torch.linalg.solve(m.w + 4 * torch.eye(3, dtype=x.dtype), x.unsqueeze(-1)),
        (3,),
        3,
        {"w": (3, 3)},
        tags=_FALLBACK,
    )
    yield raw(
        "grid-sample",
        lambda m, x: F.grid_sample(x, torch.tanh(m.w).expand(x.shape[0], -1, -1, -1), align_corners=False),
        (1, 3, 3),
        4,
        {"w": (1, 2, 2, 2)},
        tags=_FALLBACK,
    )
    yield raw("logaddexp", lambda m, x: torch.logaddexp(x, m.w), (3,), 3, _W3, tags=_FALLBACK)
    yield raw(
        "custom-function-without-parameters",
        lambda m, x: Square.apply(x @ m.w),
        (3,),
        4,
        _W34,
    )
    yield raw(
        "custom-function-consuming-parameter",
        lambda m, x: Wave.apply(x, m.w),
        (3,),
        3,
        _W3,
    )


def _derived_twice(m: nn.Module, x: Tensor) -> Tensor:
    positive = F.softplus(m.get_parameter("w"))
    return torch.tanh(x * positive) + positive


def _stopped(m: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        features = m.get_submodule("base")(x)
    return m.get_submodule("layer")(torch.tanh(features))


def _steps(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 2), torch.randn(n, 3)


def _modules() -> Iterator[Case]:
    yield use("weight-norm", lambda: parametrizations.weight_norm(nn.Linear(3, 4)), (3,), 4)
    yield use(
        "weight-norm-convolution",
        lambda: parametrizations.weight_norm(nn.Conv2d(1, 2, 2)),
        (1, 3, 3),
        8,
    )
    yield use("weight-norm-hook", old_weight_norm, (3,), 4)
    yield use("spectral-norm", lambda: parametrizations.spectral_norm(nn.Linear(3, 4)), (3,), 4)
    yield use(
        "parametrised-positive",
        lambda: parametrize.register_parametrization(nn.Linear(3, 4), "weight", Softplus()),
        (3,),
        4,
    )
    yield use("pruned", pruned, (3,), 4)
    yield use(
        "weight-norm-twice",
        lambda: Apply(
            lambda m, x: m.layer(torch.tanh(m.layer(x))),
            layer=parametrizations.weight_norm(nn.Linear(3, 3)),
        ),
        (3,),
        3,
    )
    yield Case(
        "frozen-layer",
        lambda: frozen(two_layers(), "0.weight", "0.bias"),
        nn.CrossEntropyLoss,
        classes((3,), 3),
    )
    yield Case(
        "frozen-weight",
        lambda: frozen(two_layers(), "0.weight", "2.weight"),
        nn.CrossEntropyLoss,
        classes((3,), 3),
    )
    yield Case("frozen-bias", lambda: frozen(two_layers(), "2.bias"), nn.MSELoss, regression((3,), (3,)))
    yield use(
        "frozen-norm-inside",
        lambda: nn.Sequential(nn.Linear(3, 4), frozen(nn.LayerNorm(4), "weight", "bias"), nn.Linear(4, 2)),
        (3,),
        2,
    )
    yield use(
        "module-twice",
        lambda: Apply(lambda m, x: m.layer(torch.tanh(m.layer(x))), layer=nn.Linear(3, 3)),
        (3,),
        3,
        tags=_SMOKE,
    )
    yield use("module-twice-in-sequential", same_module_twice, (3,), 3)
    yield use(
        "module-thrice-other-shapes",
        lambda: Apply(lambda m, x: m.layer(m.layer(x).mean(1)) + m.layer(x[:, 0]), layer=nn.Linear(3, 3)),
        (2, 3),
        3,
    )
    yield use(
        "convolution-twice",
        lambda: Apply(lambda m, x: m.layer(m.layer(x).relu()), layer=nn.Conv2d(1, 1, 2)),
        (1, 4, 4),
        4,
    )
    yield use(
        "convolution-on-two-scales",
        lambda: Apply(
            lambda m, x: m.layer(x).mean((2, 3)) + m.layer(F.avg_pool2d(x, 2)).mean((2, 3)),
            layer=nn.Conv2d(1, 2, 2),
        ),
        (1, 4, 4),
        2,
    )
    yield use("tied-transpose", tied_autoencoder, (3,), 3)
    yield use("tied-parameter-of-two-modules", two_modules_one_weight, (3,), 3)
    yield use(
        "weight-of-child",
        lambda: Apply(lambda m, x: F.linear(x, m.child.weight), child=nn.Linear(3, 4, bias=False)),
        (3,),
        4,
    )
    yield use(
        "weight-of-child-shared",
        lambda: Apply(
            lambda m, x: F.linear(torch.tanh(m.child(x)), m.child.weight.t()),
            child=nn.Linear(3, 4),
        ),
        (3,),
        3,
    )
    yield use(
        "keyword-call",
        lambda: Apply(lambda m, x: m.layer(input=x), layer=nn.Linear(3, 4)),
        (3,),
        4,
    )
    yield Case(
        "loss-called-by-keyword",
        two_layers,
        nn.CrossEntropyLoss,
        classes((3,), 3),
        score=lambda loss, f, y: loss(target=y, input=f),
    )
    yield Case(
        "output-in-a-dictionary",
        lambda: Apply(lambda m, x: {"logits": m.layer(x), "extra": [x]}, layer=nn.Linear(3, 3)),
        nn.CrossEntropyLoss,
        classes((3,), 3),
        output=lambda model, x: model(x)["logits"],
    )
    yield Case(
        "inputs-in-containers",
        lambda: Apply(
            lambda m, items: m.left(items["a"][0]) * m.right(items["b"]),
            left=nn.Linear(3, 2),
            right=nn.Linear(2, 2),
        ),
        nn.MSELoss,
        lambda n: (
            ({"a": (torch.randn(n, 3),), "b": torch.randn(n, 2)},),
            torch.randn(n, 2),
        ),
    )
    yield Case(
        "features-without-gradient",
        lambda: frozen(
            Apply(_stopped, base=nn.Linear(3, 3), layer=nn.Linear(3, 2)), "base.weight", "base.bias"
        ),
        nn.MSELoss,
        regression((3,), (2,)),
    )
    yield Case(
        "model-called-by-keyword",
        lambda: Apply(lambda m, features: m.layer(features), layer=nn.Linear(3, 3)),
        nn.CrossEntropyLoss,
        lambda n: ({"features": torch.randn(n, 3)}, torch.randint(3, (n,))),
    )
    yield Case(
        "two-inputs",
        lambda: Apply(
            lambda m, x, z: m.head(torch.tanh(m.left(x) + m.right(z))),
            left=nn.Linear(3, 2),
            right=nn.Linear(2, 2, bias=False),
            head=nn.Linear(2, 3),
        ),
        nn.CrossEntropyLoss,
        lambda n: ((torch.randn(n, 3), torch.randn(n, 2)), torch.randint(3, (n,))),
    )
    yield use("relu-in-place", lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True)), (3,), 4)
    yield use(
        "relu-in-place-function",
        lambda: Apply(lambda m, x: F.relu_(m.layer(x)), layer=nn.Conv1d(2, 2, 2)),
        (2, 3),
        4,
    )
    yield use(
        "tanh-in-place",
        lambda: Apply(lambda m, x: m.layer(x).tanh_(), layer=nn.Linear(3, 4)),
        (3,),
        4,
    )
    yield use("dropout-eval", lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), (3,), 4)
    for reentrant in (False, True):
        yield Case(
            "checkpoint-reentrant" if reentrant else "checkpoint",
            partial(Checkpointed, reentrant),
            nn.CrossEntropyLoss,
            classes((3,), 3),
            output=lambda model, x: model.plain(x),
            total=lambda model, loss, x, y: loss(model(x), y),
        )
    yield Case("resnet", ResNet, nn.CrossEntropyLoss, classes((1, 4, 4), 3), tags=_SMOKE)
    for name, attention in (
        ("hand-written", Attention),
        ("scaled-dot-product", FlashAttention),
        ("library", LibraryAttention),
        ("library-batch-second", lambda width, heads: LibraryAttention(width, heads, False)),
    ):
        yield Case(
            f"vision-transformer-{name}",
            partial(VisionTransformer, attention),
            nn.CrossEntropyLoss,
            classes((1, 4, 4), 3),
            tags=_SMOKE if name == "hand-written" else frozenset(),
        )
    yield Case(
        "learned-queries",
        LearnedQueries,
        nn.CrossEntropyLoss,
        classes((3, 2), 3),
        dense=("query.weight",),
    )
    yield use(
        "attention-bias-kv",
        lambda: Apply(
            lambda m, x: m.a(x, x, x)[0],
            a=nn.MultiheadAttention(2, 1, add_bias_kv=True, add_zero_attn=True, batch_first=True),
        ),
        (3, 2),
        6,
    )
    yield use(
        "attention-cross-with-masks",
        lambda: Apply(
            lambda m, x: m.a(
                x[:, :2, :2],
                x[:, :, 1:],
                x,
                key_padding_mask=x[:, :, 0] > 0.8,
                attn_mask=torch.tensor([[False, False, True], [False, False, False]]),
            )[0],
            a=nn.MultiheadAttention(2, 2, kdim=2, vdim=3, batch_first=True),
        ),
        (3, 3),
        4,
    )
    yield use(
        "transformer-decoder-layer",
        lambda: Apply(
            lambda m, x: m.a(x[:, :2], x),
            a=nn.TransformerDecoderLayer(2, 1, 2, dropout=0.0, batch_first=True),
        ),
        (3, 2),
        4,
    )
    yield use(
        "transformer-encoder-layer",
        lambda: nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True),
        (3, 4),
        12,
    )
    yield Case("windows", Windows, nn.CrossEntropyLoss, classes((4, 4, 2), 3))
    yield Case("time-first-inside", TimeFirst, nn.CrossEntropyLoss, classes((3, 3), 3))
    yield Case(
        "time-first-input",
        lambda: Apply(
            lambda m, x: m.head(torch.tanh(m.layer(x)).mean(0)),
            layer=nn.Linear(2, 3),
            head=nn.Linear(3, 3),
        ),
        nn.CrossEntropyLoss,
        lambda n: (torch.randn(3, n, 2), torch.randint(3, (n,))),
        take_input=along(1),
    )
    yield Case(
        "flattened-inside",
        lambda: Apply(
            lambda m, x: m.head(torch.tanh(m.layer(x.reshape(-1, 2))).view(x.shape[0], -1)),
            layer=nn.Linear(2, 2),
            head=nn.Linear(6, 3),
        ),
        nn.CrossEntropyLoss,
        classes((3, 2), 3),
    )
    yield Case(
        "flattened-inside-then-position-bias",
        lambda: Apply(
            lambda m, x: m.head((m.layer(x.reshape(-1, 3)).view(-1, 3, 3) * m.scale(x)).mean(1)),
            layer=nn.Linear(3, 3),
            scale=nn.Linear(3, 3),
            head=nn.Linear(3, 3),
        ),
        nn.CrossEntropyLoss,
        classes((3, 3), 3),
    )
    for layer in (nn.RNN, nn.GRU, nn.LSTM):
        yield Case(
            layer.__name__.lower(),
            partial(last_step, layer),
            nn.CrossEntropyLoss,
            classes((3, 2), 3),
        )
    yield Case("rnn-relu", partial(last_step, partial(nn.RNN, nonlinearity="relu")), nn.MSELoss, _steps)
    yield Case(
        "lstm-time-first",
        lambda: Recurrent(nn.LSTM(2, 2), 2),
        nn.CrossEntropyLoss,
        lambda n: (torch.randn(3, n, 2), torch.randint(3, (n,))),
        take_input=along(1),
    )
    yield Case(
        "gru-two-layers-both-directions",
        lambda: Recurrent(nn.GRU(2, 1, num_layers=2, bidirectional=True, batch_first=True), 4, final=True),
        nn.CrossEntropyLoss,
        classes((3, 2), 3),
    )
    yield Case(
        "lstm-final-state-given-initial-state",
        lambda: Apply(
            lambda m, x, h, c: m.recurrent(x, (h.transpose(0, 1), c.transpose(0, 1))),
            recurrent=Recurrent(nn.LSTM(2, 2, batch_first=True), 2, final=True),
        ),
        nn.CrossEntropyLoss,
        lambda n: (
            (torch.randn(n, 2, 2), torch.randn(n, 1, 2), torch.randn(n, 1, 2)),
            torch.randint(3, (n,)),
        ),
    )
    yield Case("gru-trained-initial-state", InitialState, nn.CrossEntropyLoss, classes((2, 2), 3))
    for cell in (nn.RNNCell, nn.LSTMCell, nn.GRUCell):
        yield use(
            f"{cell.__name__.removesuffix('Cell').lower()}-cell-loop",
            lambda cell=cell: Apply(cell_loop, cell=cell(2, 2)),
            (3, 2),
            2,
        )


# A loss over flattened positions: what the loss function receives is [N * positions, C].
def _flat(model: nn.Module, inputs: Any) -> Tensor:
    output = call(model, inputs)
    return output.reshape(-1, output.shape[-1])


def _flat_score(loss: Any, output: Tensor, target: Tensor) -> Tensor:
    return loss(output, target.reshape(-1))


def _losses() -> Iterator[Case]:
    linear = classes((3,), 3)

    def net(outputs: int = 3) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, outputs))

    def maps(channels: int, kernel: int = 1) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Conv2d(2, channels, kernel))

    def sequence(channels: int) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.Conv1d(2, 2, 2, padding=1), nn.Tanh(), nn.Conv1d(2, channels, 2))

    weights = torch.tensor([0.5, 2.0, 1.3])

    def probabilities(inputs: tuple[int, ...], positions: tuple[int, ...] = ()) -> Data:
        return lambda n: (
            torch.randn(n, *inputs),
            torch.randn(n, 3, *positions).softmax(1),
        )

    def some_ignored(inputs: tuple[int, ...], positions: tuple[int, ...], index: int) -> Data:
        def data(n: int) -> tuple[Tensor, Tensor]:
            target = torch.randint(3, (n, *positions))
            # Sample 1, where there is one, is ignored as a whole, others in part.
            if n > 1:
                target[1] = index
            if positions:
                target[0].flatten()[0] = index
            return torch.randn(n, *inputs), target

        return data

    def ce(name: str, data: Data, model: Callable[[], nn.Module], **options: Any) -> Case:
        return Case(f"ce-{name}", model, lambda: nn.CrossEntropyLoss(**options), data)

    yield ce("plain", linear, net())
    yield ce("two-classes", classes((3,), 2), net(2))
    yield ce("weights", linear, net(), weight=weights)
    yield ce("ignore-default", some_ignored((3,), (), -100), net())
    yield ce("ignore-index", some_ignored((3,), (), 2), net(), ignore_index=2)
    yield ce("label-smoothing", linear, net(), label_smoothing=0.3)
    yield ce("probabilities", probabilities((3,)), net())
    yield ce("probabilities-weights", probabilities((3,)), net(), weight=weights)
    yield ce("probabilities-smoothing", probabilities((3,)), net(), label_smoothing=0.2)
    yield ce("weights-smoothing", linear, net(), weight=weights, label_smoothing=0.2)
    yield ce(
        "weights-ignore-smoothing",
        some_ignored((3,), (), 1),
        net(),
        weight=weights,
        ignore_index=1,
        label_smoothing=0.1,
    )
    yield ce(
        "probabilities-weights-smoothing",
        probabilities((3,)),
        net(),
        weight=weights,
        label_smoothing=0.2,
    )
    yield ce("sequence", classes((2, 3), 3, (3,)), sequence(3))  # every axis as long as N
    yield ce("map", classes((1, 3, 3), 3, (2, 2)), maps(3))
    yield ce("map-weights", classes((1, 3, 3), 3, (2, 2)), maps(3), weight=weights)
    yield ce(
        "map-weights-ignore-smoothing",
        some_ignored((1, 3, 3), (2, 2), -1),
        maps(3),
        weight=weights,
        ignore_index=-1,
        label_smoothing=0.1,
    )
    yield ce("map-probabilities", probabilities((1, 3, 3), (2, 2)), maps(3), weight=weights)
    yield ce("map-interacting", classes((1, 4, 4), 3, (2, 2)), maps(3, 2))

    for name, data, outputs in (
        ("vector", regression((3,), (2,)), 2),
        ("one", regression((3,), (1,)), 1),
    ):
        yield Case(f"mse-{name}", net(outputs), nn.MSELoss, data)
    yield Case(
        "mse-scalar-per-sample",
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0)),
        nn.MSELoss,
        regression((3,), ()),
    )
    yield Case("mse-map", maps(2), nn.MSELoss, regression((1, 3, 3), (2, 2, 2)))
    yield Case("mse-shared", net(2), nn.MSELoss, regression((2, 3), (2, 2)))
    yield Case(
        "mse-flattened-over-samples",
        net(2),
        nn.MSELoss,
        regression((3,), (2,)),
        output=lambda model, x: model(x).flatten(),
        score=lambda loss, f, y: loss(f, y.flatten()),
        tags=_FLATTENED,
    )

    def bce(name: str, data: Data, model: Callable[[], nn.Module], **options: Any) -> Case:
        return Case(f"bce-{name}", model, lambda: nn.BCEWithLogitsLoss(**options), data)

    def labels(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Data:
        return lambda n: (torch.randn(n, *inputs), (torch.rand(n, *outputs) > 0.5) * 1.0)

    two = torch.tensor([0.5, 3.0])
    yield bce("vector", labels((3,), (2,)), net(2))
    yield bce("soft-targets", lambda n: (torch.randn(n, 3), torch.rand(n, 2)), net(2))
    yield bce("weight", labels((3,), (2,)), net(2), weight=two)
    yield bce("pos-weight", labels((3,), (2,)), net(2), pos_weight=two)
    yield bce("weight-pos-weight", labels((3,), (2,)), net(2), weight=two, pos_weight=two.flip(0))
    yield bce("map", labels((1, 3, 3), (2, 2, 2)), maps(2))
    yield bce("map-pos-weight", labels((1, 3, 3), (2, 2, 2)), maps(2), pos_weight=two.view(2, 1, 1))
    yield Case(
        "bce-scalar-per-sample",
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0)),
        nn.BCEWithLogitsLoss,
        labels((3,), ()),
    )
    yield Case(
        "bce-weight-per-sample",
        net(2),
        lambda: Functional(F.binary_cross_entropy_with_logits),
        lambda n: (torch.randn(n, 3), ((torch.rand(n, 2) > 0.5) * 1.0, torch.rand(n, 1) + 0.5)),
        score=lambda loss, f, y: loss(f, y[0], y[1]),
        record=True,
    )

    yield Case(
        "l1",
        net(2),
        nn.L1Loss,
        regression((3,), (2,)),
        order=1,
        refuses_curvature=("l1_loss", "zero"),
    )
    yield Case("smooth-l1", net(2), lambda: nn.SmoothL1Loss(beta=0.7), regression((3,), (2,)))
    yield Case("huber", net(2), lambda: nn.HuberLoss(delta=0.6), regression((3,), (2,)))
    yield Case(
        "nll",
        lambda: nn.Sequential(nn.Linear(3, 3), nn.LogSoftmax(1)),
        lambda: nn.NLLLoss(weight=weights, ignore_index=2),
        some_ignored((3,), (), 2),
        order=1,
        refuses_curvature=("nll_loss", "cross_entropy"),
    )
    yield Case(
        "nll-map",
        lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.LogSoftmax(1)),
        nn.NLLLoss,
        classes((1, 3, 3), 3, (2, 2)),
        order=1,
        refuses_curvature=("nll_loss", "cross_entropy"),
    )
    yield Case(
        "bce-of-probabilities",
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Sigmoid()),
        nn.BCELoss,
        labels((3,), (2,)),
    )
    yield Case(
        "gaussian-nll",
        net(2),
        lambda: nn.GaussianNLLLoss(full=True),
        lambda n: (torch.randn(n, 3), (torch.randn(n, 2), torch.rand(n, 2) + 0.5)),
        score=lambda loss, f, y: loss(f, y[0], y[1]),
    )
    yield Case(
        "soft-margin",
        net(2),
        nn.SoftMarginLoss,
        lambda n: (torch.randn(n, 3), torch.randn(n, 2).sign()),
    )
    yield Case(
        "multi-margin",
        net(3),
        nn.MultiMarginLoss,
        linear,
        order=1,
    )
    yield Case(
        "multilabel-margin",
        net(3),
        nn.MultiLabelMarginLoss,
        lambda n: (torch.randn(n, 3), torch.tensor([2, 0, -1]).repeat(n, 1)),
        order=1,
    )
    yield Case("multilabel-soft-margin", net(2), nn.MultiLabelSoftMarginLoss, labels((3,), (2,)))
    yield Case(
        "hinge-embedding",
        net(2),
        nn.HingeEmbeddingLoss,
        lambda n: (torch.randn(n, 3), torch.randn(n, 2).sign()),
    )
    yield Case(
        "kl-divergence",
        lambda: nn.Sequential(nn.Linear(3, 3), nn.LogSoftmax(1)),
        nn.KLDivLoss,
        probabilities((3,)),
    )
    yield Case("own-convex", net(2), LogCosh, regression((3,), (2,)))
    yield Case("own-convex-map", maps(2), LogCosh, regression((1, 3, 3), (2, 2, 2)))
    yield Case("own-coupled", net(3), SoftMaximum, regression((3,), (3,)))
    yield Case(
        "poisson",
        net(2),
        nn.PoissonNLLLoss,
        lambda n: (torch.randn(n, 3), torch.randint(4, (n, 2)) * 1.0),
    )
    yield Case(
        "own-not-convex",
        net(2),
        DoubleWell,
        regression((3,), (2,)),
        refuses_curvature=("positive semi-definite",),
    )

    # Losses as functions, inside packprop.record().
    yield Case(
        "function-ce",
        net(),
        lambda: Functional(F.cross_entropy, label_smoothing=0.1),
        linear,
        record=True,
    )
    yield Case("function-mse", net(2), lambda: Functional(F.mse_loss), regression((3,), (2,)), record=True)
    yield Case(
        "function-bce",
        net(2),
        lambda: Functional(F.binary_cross_entropy_with_logits, pos_weight=two.double()),
        labels((3,), (2,)),
        record=True,
        tags=frozenset({"float64-only"}),
    )
    yield Case(
        "function-ce-positional",
        net(),
        lambda: Functional(
            lambda f, y, reduction: F.cross_entropy(f, y, weights.to(f.dtype), None, -100, None, reduction, 0.2)
        ),
        linear,
        record=True,
    )
    yield Case(
        "function-mse-keyword",
        net(2),
        lambda: Functional(lambda f, y, reduction: F.mse_loss(target=y, input=f, reduction=reduction)),
        regression((3,), (2,)),
        record=True,
    )
    yield Case(
        "function-mse-weights",
        net(2),
        lambda: Functional(F.mse_loss),
        lambda n: (torch.randn(n, 3), (torch.randn(n, 2), torch.rand(n, 2) + 0.1)),
        score=lambda loss, f, y: loss.function(f, y[0], weight=y[1], reduction=loss.reduction),
        record=True,
    )
    yield Case(
        "function-of-own",
        net(2),
        lambda: Functional(lambda f, y, reduction: getattr(torch.log(torch.cosh(f - y)), reduction)()),
        regression((3,), (2,)),
        order=1,
        record=True,
    )

    # Losses over flattened positions.
    yield Case(
        "language-model",
        LanguageModel,
        nn.CrossEntropyLoss,
        tokens((3,), 4, 4, (3,)),
        output=_flat,
        score=_flat_score,
        tags=_SMOKE | _FLATTENED,
    )
    yield Case(
        "language-model-ignore-index",
        LanguageModel,
        lambda: nn.CrossEntropyLoss(ignore_index=0),
        _with_padding(tokens((3,), 4, 4, (3,))),
        output=_flat,
        score=_flat_score,
        tags=_FLATTENED,
    )
    yield Case(
        "language-model-transposed",
        LanguageModel,
        nn.CrossEntropyLoss,
        tokens((3,), 4, 4, (3,)),
        output=lambda model, ids: model(ids).transpose(1, 2),
    )
    yield Case(
        "flattened-independent-positions",
        net(3),
        nn.CrossEntropyLoss,
        classes((2, 3), 3, (2,)),
        output=_flat,
        score=_flat_score,
        tags=_FLATTENED,
    )
    yield Case(
        "flattened-attention-mse",
        lambda: nn.Sequential(Attention(2, 1), nn.Linear(2, 2)),
        nn.MSELoss,
        regression((3, 2), (3, 2)),
        output=_flat,
        score=lambda loss, f, y: loss(f, y.reshape(-1, 2)),
        tags=_FLATTENED,
    )
    yield Case(
        "flattened-time-first",
        lambda: Apply(
            lambda m, x: m.head(torch.tanh(m.layer(x).cumsum(0))),
            layer=nn.Linear(2, 2),
            head=nn.Linear(2, 3),
        ),
        nn.CrossEntropyLoss,
        lambda n: (torch.randn(2, n, 2), torch.randint(3, (2, n))),
        output=_flat,
        score=_flat_score,
        take_input=along(1),
        take_target=along(1),
        sizes=(3,),  # [t, 1, d] against t rows of the loss is refused: it could be a batch of t samples
        tags=_FLATTENED,
    )
    yield Case(
        "loss-inside-forward",
        LanguageModelWithLoss,
        lambda: Functional(F.cross_entropy),
        lambda n: ((ids := torch.randint(4, (n, 3))), ids),
        reductions=("mean",),
        output=lambda model, ids: (f := model(ids))[:, :-1].reshape(-1, f.shape[-1]),
        score=lambda loss, f, y: loss(f, y[:, 1:].reshape(-1)),
        total=lambda model, loss, x, y: model(x, labels=y),
        tags=_SMOKE | _FLATTENED,
    )

    # Losses that are changed after the loss function, or joined.
    yield Case(
        "doubled",
        net(),
        nn.CrossEntropyLoss,
        linear,
        score=lambda loss, f, y: 2 * loss(f, y),
        tags=_SMOKE,
    )
    yield Case(
        "divided-mse",
        net(2),
        nn.MSELoss,
        regression((3,), (2,)),
        score=lambda loss, f, y: loss(f, y) / 4,
    )
    yield Case(
        "two-losses-one-output",
        net(2),
        lambda: nn.ModuleList([nn.MSELoss(), nn.BCEWithLogitsLoss()]),
        lambda n: (torch.randn(n, 3), (torch.randn(n, 2), torch.rand(n, 2))),
        score=lambda loss, f, y: 0.3 * loss[0](f, y[0]) + loss[1](f, y[1]),
        columns=False,
    )
    yield Case(
        "two-losses-two-heads",
        lambda: Apply(
            lambda m, x: (lambda h: (m.left(h), m.right(h)))(torch.tanh(m.trunk(x))),
            trunk=nn.Linear(3, 3),
            left=nn.Linear(3, 2),
            right=nn.Linear(3, 2),
        ),
        lambda: nn.ModuleList([nn.MSELoss(), nn.MSELoss()]),
        lambda n: (torch.randn(n, 3), (torch.randn(n, 2), torch.randn(n, 2))),
        output=lambda model, x: torch.cat(model(x), dim=1),
        score=lambda loss, f, y: loss[0](f[:, :2], y[0]) + 0.5 * loss[1](f[:, 2:], y[1]),
        total=_two_heads,
    )
    # no sweep of one loss's columns reaches both uses, and yet the factors are those of both together
    yield Case(
        "two-losses-two-uses-of-one-weight",
        lambda: Apply(
            lambda m, x: (F.linear(x, m.shared.weight), (x[:, :2] @ m.shared.weight)[:, :2]),
            shared=nn.Linear(3, 2, bias=False),
        ),
        lambda: nn.ModuleList([nn.MSELoss(), nn.MSELoss()]),
        lambda n: (torch.randn(n, 3), (torch.randn(n, 2), torch.randn(n, 2))),
        output=lambda model, x: torch.cat(model(x), dim=1),
        score=lambda loss, f, y: loss[0](f[:, :2], y[0]) + 0.5 * loss[1](f[:, 2:], y[1]),
        total=_two_heads,
    )
    yield Case(
        "two-forward-passes",
        net(),
        nn.CrossEntropyLoss,
        lambda n: (
            (torch.randn(n, 3), torch.randn(n, 3)),
            (torch.randint(3, (n,)), torch.randint(3, (n,))),
        ),
        output=lambda model, x: torch.stack([model(x[0]), model(x[1])], dim=2),
        score=lambda loss, f, y: loss(f[:, :, 0], y[0]) + loss(f[:, :, 1], y[1]),
        total=lambda model, loss, x, y: loss(model(x[0]), y[0]) + loss(model(x[1]), y[1]),
    )
    yield Case(
        "siamese",
        net(2),
        nn.MSELoss,
        lambda n: ((torch.randn(n, 3), torch.randn(n, 3)), torch.randn(n, 2)),
        output=lambda model, x: model(x[0]) * model(x[1]),
    )
    yield Case(
        "none-then-mean",
        net(),
        lambda: nn.CrossEntropyLoss(reduction="none"),
        linear,
        reductions=(None,),
        score=lambda loss, f, y: loss(f, y).mean(),
        term=lambda loss, f, y, n: loss(f, y[n : n + 1]).sum() / len(y),
    )
    yield Case(
        "none-then-weighted-mean",
        net(2),
        lambda: nn.MSELoss(reduction="none"),
        lambda n: (torch.randn(n, 3), (torch.randn(n, 2), torch.rand(n) + 0.1)),
        reductions=(None,),
        score=lambda loss, f, y: (loss(f, y[0]).sum(1) * y[1]).sum() / y[1].sum(),
        term=lambda loss, f, y, n: loss(f, y[0][n : n + 1]).sum() * y[1][n] / y[1].sum(),
    )
    yield Case(
        "none-then-weighted-entries",
        net(2),
        lambda: nn.BCEWithLogitsLoss(reduction="none"),
        lambda n: (torch.randn(n, 3), (torch.rand(n, 2), torch.rand(n, 2) + 0.1)),
        reductions=(None,),
        score=lambda loss, f, y: (loss(f, y[0]) * y[1]).mean(),
        term=lambda loss, f, y, n: (loss(f, y[0][n : n + 1]) * y[1][n]).sum() / y[1].numel(),
    )
    yield Case(
        "none-then-masked-mean",
        LanguageModel,
        lambda: nn.CrossEntropyLoss(reduction="none"),
        lambda n: (
            torch.randint(4, (n, 3)),
            (torch.randint(4, (n, 3)), (torch.arange(3 * n) % 4 != 1).view(n, 3) * 1.0),
        ),
        reductions=(None,),
        output=_flat,
        score=lambda loss, f, y: (loss(f, y[0].flatten()) * y[1].flatten()).sum() / y[1].sum(),
        term=lambda loss, f, y, n: (loss(f, y[0][n]) * y[1][n]).sum() / y[1].sum(),
        tags=_FLATTENED,
    )


def _two_heads(model: nn.Module, loss: Any, x: Tensor, y: Any) -> Tensor:
    left, right = model(x)
    return loss[0](left, y[0]) + 0.5 * loss[1](right, y[1])


def _with_padding(data: Data) -> Data:
    def padded(n: int) -> tuple[Any, Tensor]:
        ids, target = data(n)
        target[:, -1] = 0
        target[0, 0] = 1  # never everything
        return ids, target

    return padded


_SMOKE = frozenset({"smoke"})
_FALLBACK = frozenset({"fallback"})
_FLATTENED = frozenset({"flattened"})
_W2, _W3 = {"w": (2,)}, {"w": (3,)}
_VW3 = {"v": (3,), "w": (3,)}
_W23, _W25, _W34, _W42, _W232 = (
    {"w": (2, 3)},
    {"w": (2, 5)},
    {"w": (3, 4)},
    {"w": (4, 2)},
    {"w": (2, 3, 2)},
)
_LOW_RANK = {"a": (3, 2), "b": (2, 3)}

CASES: list[Case] = [
    *_linear(),
    *_convolution(),
    *_normalisation(),
    *_embedding(),
    *_raw(),
    *_modules(),
    *_losses(),
]
BY_NAME: dict[str, Case] = {case.name: case for case in CASES}

# One case for each function that takes parameters, for each way of meeting them, and for each loss: what costs
# too much for every case is compared with a reference on these.
ONE_OF_EACH: list[Case] = [
    BY_NAME[name]
    for name in (
        *("linear-2d", "matmul-x-w", "mm", "mv", "addmm", "einsum-ni-io-no", "bmm-heads-first", "bilinear"),
        *("conv1d", "conv2d", "conv3d", "convtranspose1d", "convtranspose2d", "convtranspose3d"),
        *("batchnorm1d-2d", "layernorm", "groupnorm", "instancenorm1d", "rmsnorm", "prelu-one"),
        *("embedding", "embedding-bag-sum", "add", "subtract", "multiply", "class-token", "tensordot"),
        *("vision-transformer-library", "rnn", "rnn-relu", "gru", "lstm"),
        *("rnn-cell-loop", "lstm-cell-loop", "gru-cell-loop"),
        *("weight-norm", "tied-transpose", "module-twice", "checkpoint"),
        *("ce-plain", "linear-alone", "bce-vector", "l1", "smooth-l1", "huber", "nll", "bce-of-probabilities"),
        *("gaussian-nll", "poisson", "soft-margin", "multi-margin", "multilabel-margin", "hinge-embedding"),
        *("multilabel-soft-margin", "kl-divergence", "own-convex", "function-of-own", "two-losses-one-output"),
    )
]
