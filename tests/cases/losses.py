"""Cases about loss functions, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.building import (
    FLATTENED,
    classes,
    labels,
    maps,
    net,
    probabilities,
    regression,
    sequence,
    some_ignored,
)
from tests.cases.case import Case, Data, Functional
from tests.cases.models.losses import DoubleWell, LogCosh, SoftMaximum
from tests.cases.models.wrapping import Apply


def linked(
    name: str,
    layer: Callable[[], nn.Module],
    link: Callable[[Tensor], Tensor],
    loss: Callable[[], nn.Module],
    data: Data,
) -> Case:
    """A loss of what a function has made of the output that it curves in, inside the model."""
    return Case(
        name,
        lambda: Apply(lambda m, x: link(m.a(x)), a=layer()),
        loss,
        data,
        output=lambda model, x: model.a(x),
        score=lambda loss, f, y: loss(link(f), y),
        total=lambda model, loss, x, y: loss(model(x), y),
        tags=frozenset({"linked"}),
    )


def cases() -> Iterator[Case]:
    linear = classes((3,), 3)

    weights = torch.tensor([0.5, 2.0, 1.3])

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
        tags=FLATTENED,
    )

    def bce(name: str, data: Data, model: Callable[[], nn.Module], **options: Any) -> Case:
        return Case(f"bce-{name}", model, lambda: nn.BCEWithLogitsLoss(**options), data)

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
    rows = functools.partial(torch.log_softmax, dim=1)
    some = some_ignored((3,), (), 2)
    yield linked("nll", lambda: nn.Linear(3, 3), rows, lambda: nn.NLLLoss(weight=weights, ignore_index=2), some)
    yield linked("nll-map", lambda: nn.Conv2d(1, 3, 2), rows, nn.NLLLoss, classes((1, 3, 3), 3, (2, 2)))
    yield linked("nll-of-softmax", lambda: nn.Linear(3, 3), lambda f: f.softmax(1).log(), nn.NLLLoss, linear)
    yield Case(
        "nll-flattened",  # as language models call it
        net(3),
        nn.NLLLoss,
        classes((2, 3), 3, (2,)),
        score=lambda loss, f, y: loss(f.log_softmax(-1).flatten(0, 1), y.flatten()),
        record=True,
        sizes=(3,),  # [1, t, d] against t rows of the loss is refused where no position meets another
        tags=FLATTENED,
    )
    yield Case(
        "nll-not-normalised",
        net(3),
        nn.NLLLoss,
        linear,
        order=1,
        refuses_curvature=("nll_loss", "cross_entropy"),
    )
    sigmoid = torch.sigmoid
    yield linked("bce-of-probabilities", lambda: nn.Linear(3, 2), sigmoid, nn.BCELoss, labels((3,), (2,)))
    yield linked(
        "bce-of-soft-targets",
        lambda: nn.Linear(3, 2),
        sigmoid,
        lambda: nn.BCELoss(weight=two),
        lambda n: (torch.randn(n, 3), torch.rand(n, 2)),
    )
    yield Case(
        "bce-of-softmax",
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)),
        nn.BCELoss,
        labels((3,), (2,)),
        order=1,
        refuses_curvature=("sigmoid", "binary_cross_entropy_with_logits"),
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
    yield Case(
        "ctc",  # time first, samples second
        lambda: Apply(lambda m, x: m.a(x).log_softmax(-1).transpose(0, 1), a=nn.Linear(2, 3)),
        nn.CTCLoss,
        lambda n: (torch.randn(n, 4, 2), torch.randint(1, 3, (n, 2))),
        order=1,
        score=lambda loss, f, y: loss(f, y, f.shape[1] * (4,), f.shape[1] * (2,)),
    )
    yield Case("multilabel-soft-margin", net(2), nn.MultiLabelSoftMarginLoss, labels((3,), (2,)))
    yield Case(
        "hinge-embedding",
        net(2),
        nn.HingeEmbeddingLoss,
        lambda n: (torch.randn(n, 3), torch.randn(n, 2).sign()),
    )
    yield linked("kl-divergence", lambda: nn.Linear(3, 3), rows, nn.KLDivLoss, probabilities((3,)))
    yield linked(
        "kl-divergence-of-logarithms",
        lambda: nn.Linear(3, 3),
        rows,
        lambda: nn.KLDivLoss(log_target=True),
        lambda n: (torch.randn(n, 3), torch.randn(n, 3)),  # of any mass
    )
    yield linked(
        "kl-divergence-map", lambda: nn.Conv2d(1, 3, 2), rows, nn.KLDivLoss, probabilities((1, 3, 3), (2, 2))
    )
    yield Case(
        "kl-divergence-transposed",
        net(3),
        nn.KLDivLoss,
        lambda n: (torch.randn(n, 3, 3), torch.rand(n, 3, 3)),
        score=lambda loss, f, y: loss(f.log_softmax(-1).mT, y),
        record=True,
    )
    yield Case(
        "kl-divergence-of-outputs",
        net(3),
        nn.KLDivLoss,
        probabilities((3,)),
        order=1,
        refuses_curvature=("kl_div", "log_softmax"),
    )
    yield Case(
        "distillation",
        net(3),
        lambda: nn.ModuleList([nn.CrossEntropyLoss(), nn.KLDivLoss()]),
        lambda n: (torch.randn(n, 3), (torch.randint(3, (n,)), torch.randn(n, 3).softmax(-1))),
        score=lambda loss, f, y: loss[0](f, y[0]) + 4 * loss[1]((f / 2).log_softmax(-1), y[1]),
        reductions=("sum",),
        columns=False,
        record=True,
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
    yield linked(
        "poisson-of-rates",
        lambda: nn.Linear(3, 2),
        torch.exp,
        lambda: nn.PoissonNLLLoss(log_input=False, eps=0.0),
        lambda n: (torch.randn(n, 3), torch.randint(4, (n, 2)) * 1.0),
    )
    yield Case(
        "poisson-of-other-rates",
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Softplus()),
        lambda: nn.PoissonNLLLoss(log_input=False, eps=0.0),
        lambda n: (torch.randn(n, 3), torch.randint(4, (n, 2)) * 1.0),
        order=1,
        refuses_curvature=("exponential", "log_input=True"),
    )
    yield Case(
        "own-not-convex",
        net(2),
        DoubleWell,
        regression((3,), (2,)),
        refuses_curvature=("positive semi-definite",),
    )
