"""What errors advise leads somewhere: a program that is refused, and the same with the advice followed."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import backpack, extend, extensions, operators
from packprop.engine.functions.losses.description import LOSSES
from packprop.errors import PackpropError
from tests.selection import thorough

X, Y = torch.randn(5, 3), torch.randint(2, (5,))
P = torch.rand(5, 2)


def run(extension: Any, loss: Callable[[Tensor], Tensor], outputs: int = 2) -> None:
    """One pass over a small network; the parameter of its first layer gets what was asked for."""
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)))
    with packprop.record():
        value = loss(model(X))
    with backpack(extension):
        value.backward()
    assert hasattr(model[0].weight, extension.savefield)


class _Squares(nn.Module):
    def forward(self, f: Tensor, targets: Tensor) -> Tensor:
        return (f - targets).square().sum()


def variance(f: Tensor) -> Tensor:
    return F.gaussian_nll_loss(f[:, :1], P[:, :1], f[:, 1:].exp())


ADVICE: dict[str, tuple[Callable[[], None], str, str, Callable[[], None]]] = {
    "a predicted variance: DiagHessian": (
        lambda: run(extensions.DiagGGNExact(), variance),
        "argument 2 of gaussian_nll_loss",
        "DiagHessian, BatchDiagHessian, HMP",
        lambda: run(extensions.DiagHessian(), variance),
    ),
    "a predicted variance: BatchDiagHessian": (
        lambda: run(extensions.SqrtGGNExact(), variance),
        "requires gradients",
        "DiagHessian, BatchDiagHessian, HMP",
        lambda: run(extensions.BatchDiagHessian(), variance),
    ),
    "a predicted variance: HMP": (
        lambda: run(extensions.GGNMP(), variance),
        "requires gradients",
        "DiagHessian, BatchDiagHessian, HMP",
        lambda: run(extensions.HMP(), variance),
    ),
    "targets with gradients": (
        lambda: run(extensions.DiagGGNExact(), lambda f: F.cross_entropy(f, f.softmax(1))),
        "requires gradients",
        "detach it",
        lambda: run(extensions.DiagGGNExact(), lambda f: F.cross_entropy(f, f.softmax(1).detach())),
    ),
    "no recorded loss, inside record()": (
        lambda: run(extensions.DiagGGNExact(), lambda f: f.square().sum()),
        "no recorded loss",
        "module without parameters",
        lambda: run(extensions.DiagGGNExact(), lambda f: extend(_Squares())(f, P)),
    ),
    "log-probabilities": (
        lambda: run(extensions.DiagGGNExact(), lambda f: F.nll_loss(f, Y)),
        "no log_softmax",
        "cross_entropy, or their log_softmax",
        lambda: run(extensions.DiagGGNExact(), lambda f: F.nll_loss(f.log_softmax(1), Y)),
    ),
    "a divergence of anything": (
        lambda: run(extensions.DiagGGNExact(), lambda f: F.kl_div(f, P)),
        "no log_softmax",
        "give it the log_softmax of logits",
        lambda: run(extensions.DiagGGNExact(), lambda f: F.kl_div(f.log_softmax(1), P)),
    ),
    "probabilities": (
        lambda: run(extensions.DiagGGNExact(), lambda f: F.binary_cross_entropy(f.softmax(1), P)),
        "no sigmoid",
        "binary_cross_entropy_with_logits",
        lambda: run(extensions.DiagGGNExact(), lambda f: F.binary_cross_entropy_with_logits(f, P)),
    ),
    "rates": (
        lambda: run(
            extensions.DiagGGNExact(), lambda f: F.poisson_nll_loss(F.softplus(f), P, log_input=False, eps=0.0)
        ),
        "no exponential",
        "log_input=True",
        lambda: run(extensions.DiagGGNExact(), lambda f: F.poisson_nll_loss(F.softplus(f).log(), P)),
    ),
}


class Complex(nn.Module):
    """A complex weight, or a real one that is seen as complex."""

    def __init__(self, real: bool) -> None:
        super().__init__()
        weight = torch.randn(2, 3, dtype=torch.cfloat)
        self.real, self.weight = real, nn.Parameter(torch.view_as_real(weight).clone() if real else weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.view_as_complex(self.weight) if self.real else self.weight
        return F.linear(x.to(weight.dtype), weight).abs()


class Checkpointed(nn.Linear):
    """Runs again in the backward pass, in one of two ways."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(3, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        again = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return torch.tanh(again)


def folder(*files: str) -> Path:
    """A new folder with these files."""
    found = Path(tempfile.mkdtemp())
    for name in files:
        (found / name).touch()
    return found


def passing(model: nn.Module, x: Any, loss: Callable[[Any], Tensor], *asked: Any, axis: Any = None) -> None:
    """A pass over any model, extended with an axis of samples if one is declared."""
    extend(model, sample_axis=axis)
    with packprop.record():
        value = loss(model(x))
    with backpack(*asked or (extensions.BatchGrad(),)):
        value.backward()


def mean(outputs: Tensor) -> Tensor:
    """A loss function of torch over whatever comes."""
    return F.mse_loss(outputs, torch.zeros_like(outputs))


class Centred(nn.Linear):
    """Subtracts the mean over the batch, unless it is told that each sample has one of its own."""

    def __init__(self, axis: int) -> None:
        super().__init__(3, 2)
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h - h.mean(self.axis, keepdim=True)


class Returning(nn.Linear):
    """Returns the loss, or what the loss is made of."""

    def __init__(self, whole: bool) -> None:
        super().__init__(3, 2)
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h.square().mean() if self.whole else h


def on_device(model: nn.Module, x: Tensor) -> None:
    passing(model, x, mean, extensions.BatchL2Grad())


def clipped(reduction: str | None, loss: Callable[[Tensor], Tensor]) -> None:
    model = extend(nn.Linear(3, 2))
    options: dict[str, Any] = {} if reduction is None else {"reduction": reduction}
    with packprop.record():
        value = loss(model(X))
    with packprop.clipped_gradients(max_norm=1.0, **options):
        value.backward()


def twice(again: bool) -> None:
    """A product after a parameter has changed, with a pass in between or without."""
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    loss = extend(nn.CrossEntropyLoss())
    with backpack(extensions.HMP()):
        loss(model(X), Y).backward()
    with torch.no_grad():
        model[2].weight.mul_(2)  # type: ignore[union-attr, operator]  # a layer's
    if again:
        with backpack(extensions.HMP()):
            loss(model(X), Y).backward()
    model[0].weight.hmp(torch.ones(1, 4, 3))


def over_data(data: Any, loss: Any = F.cross_entropy, **options: Any) -> None:
    given = options.pop("given", extensions.Variance())
    packprop.compute(nn.Linear(3, 2), loss, data, [given], progress=False, **options)


def with_probes(probes: Any) -> None:
    model = extend(nn.Linear(3, 2))
    loss = extend(nn.CrossEntropyLoss())(model(X), Y)
    with backpack(extensions.BatchGrad(), probes=probes):
        loss.backward()


def by_token(loss: Callable[[Tensor], Tensor], outputs: tuple[int, ...] = (5, 4, 2)) -> None:
    model = extend(nn.Linear(3, 2))
    with packprop.record():
        value = loss(model(torch.randn(*outputs[:-1], 3)))
    with backpack(extensions.BatchL2Grad(per="token")):
        value.backward()


def tokens(outputs: Tensor) -> Tensor:
    targets = torch.zeros(outputs.shape[:-1], dtype=torch.long)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def weighed(extended: bool) -> None:
    """Learned weights of two losses, in a module that is extended or that holds extended losses."""

    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.s, self.one, self.other = nn.Parameter(torch.zeros(2)), nn.MSELoss(), nn.CrossEntropyLoss()

        def forward(self, outputs: Tensor) -> Tensor:
            losses = torch.stack([self.one(outputs, P), self.other(outputs, Y)])
            return ((-self.s).exp() * losses + self.s).sum()

    model, loss = extend(nn.Linear(3, 2)), Weighed()
    for module in [loss] if extended else [loss.one, loss.other]:
        extend(module)
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss(model(X)).backward()
    assert loss.s.grad is not None


class Fourth(nn.Module):
    """A loss of ones own, without parameters."""

    reduction = "mean"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).pow(4).mean()


def told(of: Any, ask: Callable[[], None]) -> None:
    """Ask after a rule was registered."""
    rule = packprop.register_loss(of)
    rule(lambda outputs, targets: packprop.functions.Loss(None, 1.0, outputs.numel(), None))
    try:
        ask()
    finally:
        LOSSES.pop(of)


def fisher() -> None:
    run(extensions.KFAC(fisher="empirical"), lambda f: extend(Fourth())(f, P))


def fourth(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).pow(4).mean()


def bag(layer: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(layer(), nn.Tanh(), nn.Linear(2, 2))
    index = torch.randint(4, (5, 3))

    def graph() -> tuple[Tensor, Tensor]:
        return (outputs := model(index), F.cross_entropy(outputs, Y))

    operators.ggn(graph, [*model.parameters()]) @ torch.ones(14)


class SumOfRows(nn.Embedding):
    """What an EmbeddingBag of the same mode returns."""

    def forward(self, index: Tensor) -> Tensor:
        return super().forward(index).sum(1)


def pairs(halves: Callable[[nn.Module, Tensor], Sequence[Tensor]]) -> None:
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    value = F.cosine_embedding_loss(*halves(model, torch.cat([X, X + 1])), torch.ones(5))
    with backpack(extensions.BatchGrad()):
        value.backward()
    assert model[0].weight.grad_batch.shape == (5, 4, 3)


class Comparison(nn.Module):
    """A loss of pairs in one batch: the first half of its rows against the second, as preferences have them."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scores = (outputs * targets).sum(1)
        return -F.logsigmoid(scores[:5] - scores[5:]).mean()


def preferences(groups: Tensor | None) -> None:
    """One pass over five pairs."""
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    if groups is None:
        value = Comparison()(model(torch.cat([X, X + 1])), torch.cat([P, P]))
    else:
        with packprop.record(documents=groups):
            value = extend(Comparison())(model(torch.cat([X, X + 1])), torch.cat([P, P]))
    with backpack(extensions.BatchGrad()):
        value.backward()
    assert model[0].weight.grad_batch.shape == (5, 4, 3)


class Score(nn.Module):
    """Half the square of a derivative, of one argument or with targets."""

    def forward(self, slopes: Tensor, *targets: Tensor) -> Tensor:
        return (slopes - sum(targets)).square().sum(1).mean() / 2


def matched(*targets: Tensor) -> None:
    """One pass with a loss of the model's derivative in its inputs."""
    model, x = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))), X.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with backpack(extensions.BatchGrad()):
        extend(Score())(slopes, *targets).backward()
    assert model[0].weight.grad_batch.shape == (5, 4, 3)


HANDED_ON: Any = torch.overrides.wrap_torch_function(lambda outputs, targets: (outputs, targets))(fourth)


ADVICE |= {
    "a loss of one row": (
        lambda: run(extensions.BatchGrad(), lambda f: sum(F.mse_loss(f[i], P[i]) for i in range(5))),
        "the samples are mixed there",
        "if a loss takes one sample, `out[i]`, keep its axis: `out[i:i+1]`",
        lambda: run(
            extensions.BatchGrad(), lambda f: sum(F.mse_loss(f[i : i + 1], P[i : i + 1]) for i in range(5))
        ),
    ),
    "rows of a batch, unbound": (
        lambda: run(extensions.BatchGrad(), lambda f: sum(map(F.mse_loss, f.unbind(), P.unbind()))),
        "the samples are mixed there",
        "keep its axis: `out[i:i+1]`",
        lambda: run(extensions.BatchGrad(), lambda f: sum(map(F.mse_loss, f.split(1), P.split(1)))),
    ),
    "halves of a batch, compared": (
        lambda: pairs(lambda model, x: model(x).chunk(2)),
        "several samples contribute",
        "compare rows of several calls of the model",
        lambda: pairs(lambda model, x: [model(half) for half in x.chunk(2)]),
    ),
    "an axis of pairs, compared": (
        lambda: pairs(lambda model, x: model(x).chunk(2)),
        "several samples contribute",
        "or of an axis of their own, [n, 2, d]",
        lambda: pairs(lambda model, x: model(torch.stack(x.chunk(2), 1)).unbind(1)),
    ),
    "pairs in one batch, named": (
        lambda: preferences(None),
        "several samples contribute",
        "name the pair of each row with packprop.record(documents=pairs) around an extended loss module",
        lambda: preferences(torch.arange(5).repeat(2)),
    ),
    "a loss module of one argument": (
        matched,
        "neither a recorded loss",
        "two arguments, even if the targets are only zeros",
        lambda: matched(torch.zeros(5, 3)),
    ),
    "weights of losses in an extended module": (
        lambda: weighed(True),
        "outside of every known loss function",
        "keep it in a module that you do not extend",
        lambda: weighed(False),
    ),
    "the empirical Fisher of a loss of ones own": (
        fisher,
        "not known what its terms are divided by",
        "@packprop.register_loss(MyLoss) on a rule that returns packprop.functions.Loss(..., divisor=...)",
        lambda: told(Fourth, fisher),
    ),
    "a data set under a loss of ones own": (
        lambda: over_data((X, P), Fourth()),
        "the loss Fourth",
        "tell what it divides by with @packprop.register_loss(MyLoss)",
        lambda: told(Fourth, lambda: over_data((X, P), Fourth())),
    ),
    "a rule for a function whose calls nobody sees": (
        lambda: told(fourth, fisher),
        "PyTorch does not dispatch its calls to modes",
        "@packprop.register_loss(MyLoss), loss = packprop.extend(MyLoss())",
        lambda: told(Fourth, fisher),
    ),
    "a rule for a function, handed on": (
        lambda: told(fourth, fisher),
        "PyTorch does not dispatch its calls to modes",
        "@torch.overrides.wrap_torch_function(lambda input, target: (input, target))",
        lambda: told(HANDED_ON, lambda: run(extensions.KFAC(fisher="empirical"), lambda f: HANDED_ON(f, P))),
    ),
    "a rule for an instance": (
        lambda: told(Fourth(), fisher),
        "a class of loss modules",
        "MyLoss is the class of a module without parameters",
        lambda: told(Fourth, fisher),
    ),
    "bags of embeddings": (
        lambda: bag(lambda: nn.EmbeddingBag(4, 2, mode="sum")),
        "_embedding_bag",
        "use nn.Embedding with .sum(1)",
        lambda: bag(lambda: SumOfRows(4, 2)),
    ),
}


class Steps(nn.Module):
    """A running sum over the leading axis, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.first(x).cumsum(0))
        return out


ADVICE |= {
    "steps that meet come first into the loss": (
        lambda: passing(Steps(), torch.randn(4, 5, 3), mean),
        "the samples are mixed there: the loss of one of the 4 samples",
        "sample_axis=1",
        lambda: passing(Steps(), torch.randn(4, 5, 3), mean, axis=1),
    ),
    "rows of one sample that meet": (
        lambda: passing(Steps(), torch.randn(4, 5, 3), lambda f: mean(torch.cat([*f]))),
        "the samples are mixed there: the loss of one of the 20 samples",
        "flatten [n, t, c] directly in front of the loss",
        lambda: passing(Steps(), torch.randn(4, 5, 3), lambda f: mean(f.transpose(0, 1).flatten(0, 1))),
    ),
    "an axis that is not there": (
        lambda: passing(nn.Linear(3, 2), X, mean, axis=2),
        "no such axis",
        "leave sample_axis out",
        lambda: passing(nn.Linear(3, 2), X, mean),
    ),
    "the axis of classes": (
        lambda: passing(nn.Linear(3, 2), X, lambda f: F.cross_entropy(f, Y), axis=1),
        "that of the classes",
        "leave sample_axis out",
        lambda: passing(nn.Linear(3, 2), X, lambda f: F.cross_entropy(f, Y)),
    ),
    "losses of different sizes": (
        lambda: passing(nn.Linear(3, 2), X, lambda f: mean(f) + mean(torch.cat([f, f]))),
        "different numbers of samples",
        "a pass of its own",
        lambda: passing(nn.Linear(3, 2), X, mean),
    ),
    "losses of numbers": (
        lambda: passing(nn.Linear(3, 2), X, lambda f: mean(f[0, 0]) + mean(f[1, 0])),
        "numbers have no axis",
        "give each loss a row",
        lambda: passing(nn.Linear(3, 2), X, lambda f: mean(f[0:1]) + mean(f[1:2])),
    ),
    "batch normalisation": (
        lambda: passing(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), X, mean),
        "mixes the samples",
        "call .eval() on the layer",
        lambda: passing(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2).eval()), X, mean),
    ),
    "another normalisation": (
        lambda: passing(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), X, mean),
        "mixes the samples",
        "LayerNorm",
        lambda: passing(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), X, mean),
    ),
    "statistics over the batch": (
        lambda: passing(nn.Sequential(nn.Linear(3, 3), Centred(0)), X, mean),
        "the samples are mixed there",
        "remove statistics over the batch",
        lambda: passing(nn.Sequential(nn.Linear(3, 3), Centred(1)), X, mean),
    ),
    "a loss that mixes": (
        lambda: passing(nn.Linear(3, 2), X, lambda f: F.mse_loss(f, P) ** 2),
        "it mixes the samples",
        "2 * loss.detach() * loss",
        lambda: passing(nn.Linear(3, 2), X, lambda f: 2 * F.mse_loss(f, P).detach() * F.mse_loss(f, P)),
    ),
    "a loss that mixes: the whole batch": (
        lambda: passing(nn.Linear(3, 2), X, lambda f: F.mse_loss(f, P) ** 2),
        "it mixes the samples",
        "DiagHessian or HMP",
        lambda: passing(nn.Linear(3, 2), X, lambda f: F.mse_loss(f, P) ** 2, extensions.DiagHessian()),
    ),
    "a loss without a name": (
        lambda: passing(Returning(True), X, lambda f: f),
        "made it",
        "compute the loss outside",
        lambda: passing(Returning(False), X, mean),
    ),
    "samples that are not in the batch": (
        lambda: passing(nn.Linear(3, 2), X, mean, extensions.BatchGrad(subsampling=[7])),
        "5 samples",
        "from 0 to 4",
        lambda: passing(nn.Linear(3, 2), X, mean, extensions.BatchGrad(subsampling=[4])),
    ),
    "a class for an extension": (
        lambda: passing(nn.Linear(3, 2), X, mean, extensions.KFAC),
        "a class, not an instance",
        "KFAC()",
        lambda: passing(nn.Linear(3, 2), X, mean, extensions.KFAC()),
    ),
    "complex parameters": (
        lambda: passing(Complex(False), X, mean, extensions.BatchL2Grad()),
        "real parameters",
        "torch.view_as_real",
        lambda: passing(Complex(True), X, mean, extensions.BatchL2Grad()),
    ),
    "complex parameters: rows": (
        lambda: passing(Complex(False), X, mean, extensions.BatchL2Grad()),
        "real parameters",
        "BatchGrad takes complex parameters",
        lambda: passing(Complex(False), X, mean, extensions.BatchGrad()),
    ),
    "a reduction that the loss contradicts": (
        lambda: clipped("sum", lambda f: F.cross_entropy(f, Y)),
        "a mean over samples",
        "leave reduction out",
        lambda: clipped(None, lambda f: F.cross_entropy(f, Y)),
    ),
    "a reduction that nobody knows": (
        lambda: clipped(None, lambda f: f.square().sum()),
        "is not known",
        "say which",
        lambda: clipped("sum", lambda f: f.square().sum()),
    ),
    "a block of old values": (
        lambda: twice(False),
        "changed in place since",
        "run a forward and a backward pass",
        lambda: twice(True),
    ),
    "an extension that belongs to one batch": (
        lambda: over_data((X, Y), given=extensions.HMP()),
        "belongs to the graph of one backward pass",
        "backpack",
        lambda: run(extensions.HMP(), lambda f: F.cross_entropy(f, Y)),
    ),
    "tensors of two lengths": (
        lambda: over_data((X, Y[:3])),
        "the same number of samples",
        "targets [n, ...]",
        lambda: over_data((X[:3], Y[:3])),
    ),
    "a size of batches that come": (
        lambda: over_data([(X, Y)], batch_size=2),
        "come in batches already",
        "leave the batch size out",
        lambda: over_data([(X, Y)]),
    ),
    "one batch in place of many": (
        lambda: over_data({"input": X}, loss=None),
        "a mapping is one batch",
        "[batch]",
        lambda: over_data([(X, Y)]),
    ),
    "data that are read once": (
        lambda: over_data(iter([(X, Y)]), given=extensions.EKFAC()),
        "",
        "",
        lambda: over_data([(X, Y)], given=extensions.EKFAC()),
    ),
    "losses without a store": (
        lambda: over_data((X, Y), losses=True),
        "not into the result",
        "leave losses out",
        lambda: over_data((X, Y)),
    ),
    "a time that is none": (
        lambda: over_data((X, Y), checkpoint=folder(), every="soon"),
        "neither a time nor a number",
        "5min",
        lambda: over_data((X, Y), checkpoint=folder(), every="5min"),
    ),
    "a folder of other files": (
        lambda: over_data((X, Y), store=folder("note.txt"), given=extensions.BatchGrad()),
        "not empty",
        "does not exist yet",
        lambda: over_data((X, Y), store=folder() / "new", given=extensions.BatchGrad()),
    ),
    "nothing that grows": (
        lambda: over_data((X, Y), store=folder() / "store"),
        "none of these values grows",
        "ask for BatchGrad",
        lambda: over_data((X, Y), store=folder() / "store", given=extensions.BatchGrad()),
    ),
    "all samples are probes": (
        lambda: with_probes([0, 1, 2, 3, 4]),
        "there is none to train on",
        "give the indices of some",
        lambda: with_probes([0, 1]),
    ),
    "probes that are no indices": (
        lambda: with_probes([9]),
        "no indices",
        "whole numbers from -5 to 4",
        lambda: with_probes([4]),
    ),
    "tokens without a loss": (
        lambda: by_token(lambda f: f.square().sum()),
        "no recorded loss",
        "use a loss of torch",
        lambda: by_token(tokens),
    ),
    "tokens of one term for each sample": (
        lambda: by_token(lambda f: F.cross_entropy(f, Y), (5, 2)),
        "no axis of positions",
        "[n * t, c]",
        lambda: by_token(tokens),
    ),
    "half of a loss of tokens": (
        lambda: by_token(lambda f: tokens(f) + f.square().mean()),
        "without passing a recorded loss",
        "loss function of torch",
        lambda: by_token(lambda f: tokens(f) + F.mse_loss(f, torch.zeros_like(f))),
    ),
    "a budget that is no number": (
        lambda: over_data((X, Y), memory="much"),
        "no positive number of bytes",
        "600MiB",
        lambda: over_data((X, Y), memory="600MiB"),
    ),
    "a number of draws": (
        lambda: passing(nn.Linear(3, 2), X, mean, extensions.DiagGGNMC(mc_samples=0)),
        "Monte Carlo draws",
        "at least 1",
        lambda: passing(nn.Linear(3, 2), X, mean, extensions.DiagGGNMC(mc_samples=1)),
    ),
    "entries of the output": (
        lambda: passing(nn.Linear(3, 2), X, mean, extensions.BatchJacobian(outputs=[2])),
        "2 entries",
        "0 to 1",
        lambda: passing(nn.Linear(3, 2), X, mean, extensions.BatchJacobian(outputs=[1])),
    ),
    "reentrant checkpoints": (
        lambda: passing(Checkpointed(True), X.clone().requires_grad_(), mean, extensions.BatchGrad()),
        "reentrant checkpoint",
        "use_reentrant=False",
        lambda: passing(Checkpointed(False), X.clone().requires_grad_(), mean, extensions.BatchGrad()),
    ),
    "a penalty alone": (
        lambda: passing(nn.Linear(3, 2), X, lambda f: -F.mse_loss(f, P), extensions.DiagGGNExact()),
        "a negative factor",
        "change the sign",
        lambda: passing(nn.Linear(3, 2), X, lambda f: F.mse_loss(f, P), extensions.DiagGGNExact()),
    ),
    "negative weights of terms": (
        lambda: run(extensions.KFLR(), lambda f: F.binary_cross_entropy_with_logits(f, P, -P)),
        "a weight of its terms is negative",
        "DiagHessian",
        lambda: run(extensions.DiagHessian(), lambda f: F.binary_cross_entropy_with_logits(f, P, -P)),
    ),
    "a loss of bent parts": (
        lambda: passing(nn.Linear(3, 2), X, lambda f: F.mse_loss(f, P).exp(), extensions.DiagGGNExact()),
        "mixes|not linear in the loss",
        "",
        lambda: passing(nn.Linear(3, 2), X, lambda f: 2 * F.mse_loss(f, P), extensions.DiagGGNExact()),
    ),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", ADVICE)
def test_advice_leads_somewhere(name: str) -> None:
    refused, said, advised, followed = ADVICE[name]
    with pytest.raises(PackpropError, match=said) as caught:
        refused()
    assert advised in caught.value.instead
    followed()


def _texts_of_errors() -> Iterator[str]:
    """All texts that are given to the errors of the package."""
    for path in Path(packprop.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("BadInput", "PackpropError"):
                parts = (part for argument in node.args for part in ast.walk(argument))
                yield from (
                    part.value
                    for part in parts
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                )


@thorough
def test_what_errors_name_is_there() -> None:
    """Functions of packprop, and extensions with their arguments, that a text names."""
    names = {name for text in _texts_of_errors() for name in re.findall(r"packprop\.([A-Za-z_][\w.]*\w)", text)}
    assert len(names) > 8
    for name in names - {"integrations.lightning", "integrations.transformers"}:  # which import their library
        pkgutil.resolve_name(f"packprop.{name}")
    called = [call for text in _texts_of_errors() for call in re.findall(r"\b([A-Z]\w+)\((\w+)=", text)]
    known = {**vars(extensions), **vars(packprop.distributed), **vars(packprop.functions), **vars(nn)}
    assert len(called) > 3
    for name, argument in called:
        thing = known.get(name) or getattr(packprop, name)
        assert argument in inspect.signature(thing).parameters, f"{name}({argument}=...)"
