"""Cases about modules: parametrised, frozen, shared, called in unusual ways."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.cases.building import SMOKE, classes, regression, use
from tests.cases.case import Case
from tests.cases.models.parametrised import Softplus, old_weight_norm, pruned
from tests.cases.models.sharing import same_module_twice, tied_autoencoder, two_modules_one_weight
from tests.cases.models.wrapping import Apply, Checkpointed, frozen, two_layers


def _stopped(m: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        features = m.get_submodule("base")(x)
    return m.get_submodule("layer")(torch.tanh(features))


def cases() -> Iterator[Case]:
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
        tags=SMOKE,
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
    yield Case("checkpoint", Checkpointed, nn.CrossEntropyLoss, classes((3,), 3))
