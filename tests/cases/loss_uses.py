"""Cases about what is done with losses: called as functions, flattened, scaled, joined, averaged by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from tests.cases.building import FLATTENED, SMOKE, classes, labels, net, regression, tokens
from tests.cases.case import Case, Data, Functional, along, call
from tests.cases.models.attention import Attention
from tests.cases.models.language import LanguageModel, LanguageModelWithLoss
from tests.cases.models.wrapping import Apply


# A loss over flattened positions: what the loss function receives is [N * positions, C].
def _flat(model: nn.Module, inputs: Any) -> Tensor:
    output = call(model, inputs)
    return output.reshape(-1, output.shape[-1])


def _flat_score(loss: Any, output: Tensor, target: Tensor) -> Tensor:
    return loss(output, target.reshape(-1))


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


def cases() -> Iterator[Case]:
    linear = classes((3,), 3)
    weights = torch.tensor([0.5, 2.0, 1.3])
    two = torch.tensor([0.5, 3.0])

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
            lambda f, y, reduction: F.cross_entropy(f, y, weights.to(f), None, -100, None, reduction, 0.2)
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
        tags=SMOKE | FLATTENED,
    )
    yield Case(
        "language-model-ignore-index",
        LanguageModel,
        lambda: nn.CrossEntropyLoss(ignore_index=0),
        _with_padding(tokens((3,), 4, 4, (3,))),
        output=_flat,
        score=_flat_score,
        tags=FLATTENED,
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
        tags=FLATTENED,
    )
    yield Case(
        "flattened-attention-mse",
        lambda: nn.Sequential(Attention(2, 1), nn.Linear(2, 2)),
        nn.MSELoss,
        regression((3, 2), (3, 2)),
        output=_flat,
        score=lambda loss, f, y: loss(f, y.reshape(-1, 2)),
        tags=FLATTENED,
    )
    yield Case(
        "flattened-time-first",
        lambda: packprop.extend(
            Apply(
                lambda m, x: m.head(torch.tanh(m.layer(x).cumsum(0))),
                layer=nn.Linear(2, 2),
                head=nn.Linear(2, 3),
            ),
            sample_axis=1,
        ),
        nn.CrossEntropyLoss,
        lambda n: (torch.randn(2, n, 2), torch.randint(3, (2, n))),
        output=_flat,
        score=_flat_score,
        take_input=along(1),
        take_target=along(1),
        tags=FLATTENED,
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
        tags=SMOKE | FLATTENED,
    )

    # Losses that are changed after the loss function, or joined.
    yield Case(
        "doubled",
        net(),
        nn.CrossEntropyLoss,
        linear,
        score=lambda loss, f, y: 2 * loss(f, y),
        tags=SMOKE,
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
        tags=FLATTENED,
    )
