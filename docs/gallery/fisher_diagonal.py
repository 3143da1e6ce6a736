"""# What a network must not forget: the exact Fisher diagonal

The diagonal of the Fisher information says how much the network's answers depend on
each weight. For cross entropy it equals the diagonal of the generalized Gauss-Newton
matrix. `compute` computes it for a whole data set, exactly. This page uses it for three
jobs, beside simpler quantities that often replace it, and says where these do as well.
"""

# %%
from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

import packprop
from packprop.examples import load_digits
from packprop.extensions import DiagGGNExact

images, digits = load_digits()
torch.manual_seed(0)
order = torch.randperm(len(images))
train, test = order[:1200], order[1200:]
Diagonal = dict[str, Tensor]
"""A number for each weight, by the name of the parameter."""


def network(seed: int, outputs: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, outputs)
    )


def fit(
    model: nn.Module,
    chosen: Tensor,
    labels: Tensor,
    epochs: int,
    penalty: Callable[[], Tensor] | None = None,
) -> nn.Module:
    """Train a model on some samples, with a penalty on its weights if there is one."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        for batch in chosen[torch.randperm(len(chosen))].split(100):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            (loss if penalty is None else loss + penalty()).backward()
            optimizer.step()
    return model


def accuracy(model: nn.Module, chosen: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float(
            (model(images[chosen]).argmax(1) == labels[chosen]).double().mean()
        )


# %% [markdown]
# ## The diagonal of a data set
#
# One call computes it, in batches of any size. The value belongs to the mean loss over
# all samples.


# %%
def fisher(model: nn.Module, chosen: Tensor, labels: Tensor) -> Diagonal:
    """The exact diagonal of the Fisher information on some samples."""
    data = DataLoader(TensorDataset(images[chosen], labels[chosen]), batch_size=256)
    extension = DiagGGNExact()
    result = packprop.compute(
        model, nn.CrossEntropyLoss(), data, [extension], progress=False
    )
    return dict(result[extension])


def squares_of_batches(model: nn.Module, chosen: Tensor, labels: Tensor) -> Diagonal:
    """Mean squares of batches' gradients, which are small where a network fits."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    batches = chosen.split(64)
    for batch in batches:
        model.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        for name, parameter in model.named_parameters():
            total[name] += parameter.grad.square() / len(batches)
    return total


# %% [markdown]
# By definition it is a mean over samples and over digits drawn from the network's
# prediction for each sample. It averages the squared gradient of the log probability.
# This takes a gradient for each sample and digit:


# %%
def by_definition(model: nn.Module, chosen: Tensor) -> Diagonal:
    """The same by a gradient for each sample and class."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    shares = model(images[chosen]).softmax(1).detach()

    def loss(values: Diagonal, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, values, image[None]), label[None])

    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for label in range(shares.shape[1]):
        rows = vmap(grad(loss), (None, 0, None))(
            parameters, images[chosen], torch.tensor(label)
        )
        for name, row in rows.items():
            total[name] += torch.tensordot(shares[:, label], row.square(), 1) / len(
                chosen
            )
    return total


halves = digits % 5
first, second = train[digits[train] < 5], train[digits[train] >= 5]
first_test, second_test = test[digits[test] < 5], test[digits[test] >= 5]
model = fit(network(0, 5), first, halves, epochs=10)
exact = fisher(model, first[:300], halves)
for name, expected in by_definition(model, first[:300]).items():
    torch.testing.assert_close(exact[name], expected, rtol=1e-3, atol=1e-7)
batched = squares_of_batches(model, first[:300], halves)
traces = [
    sum(float(each.sum()) for each in diagonal.values())
    for diagonal in (exact, batched)
]
print(
    f"sum of the diagonal: {traces[0]:.3f}, as by definition; of squares of batches: "
    f"{traces[1]:.4f}"
)
assert traces[1] < 0.1 * traces[0]

# %% [markdown]
# ## Elastic weight consolidation
#
# A network learns the digits 0 to 4, then 5 to 9 under the same five outputs, and
# forgets the first. A penalty holds each weight where it was, as strongly as the first
# task needs it (Kirkpatrick et al. 2017). Both diagonals have the same sum here, so
# they differ in *which* weights they hold. The strength is a compromise between old and
# new; each strength is one point. Three seeds.

# %%
STRENGTHS, SEEDS = (30.0, 100.0, 300.0, 1000.0), range(3)


def consolidated(
    start: nn.Module, importance: Diagonal | None, strength: float
) -> tuple[float, float]:
    """Accuracy on the old and on the new task, after the new one was learned."""
    model = deepcopy(start)
    anchor = {name: p.detach().clone() for name, p in model.named_parameters()}

    def penalty() -> Tensor:
        return strength * sum(
            (importance[name] * (p - anchor[name]).square()).sum()
            for name, p in model.named_parameters()
        )

    torch.manual_seed(1)
    fit(model, second, halves, 10, None if importance is None else penalty)
    return accuracy(model, first_test, halves), accuracy(model, second_test, halves)


def of_sum_one(diagonal: Diagonal) -> Diagonal:
    total = sum(each.sum() for each in diagonal.values())
    return {name: each / total for name, each in diagonal.items()}


points: dict[tuple[str, float], list[tuple[float, float]]] = {}
before = []
for seed in SEEDS:
    start = fit(network(seed, 5), first, halves, epochs=10)
    before.append(accuracy(start, first_test, halves))
    kinds = {
        "exact Fisher": of_sum_one(fisher(start, first, halves)),
        "squares of batches": of_sum_one(squares_of_batches(start, first, halves)),
        "all alike": of_sum_one(
            {name: torch.ones_like(p) for name, p in start.named_parameters()}
        ),
    }
    points.setdefault(("no penalty", 0.0), []).append(consolidated(start, None, 0.0))
    for name, importance in kinds.items():
        for strength in STRENGTHS:
            points.setdefault((name, strength), []).append(
                consolidated(start, importance, strength)
            )
    packprop.restore(start)

means = {
    key: tuple(sum(each) / len(SEEDS) for each in zip(*found, strict=True))
    for key, found in points.items()
}
print(f"old task before the new one: {sum(before) / len(SEEDS):.3f}")
print(f"{'':>20s}{'strength':>10s}{'old':>8s}{'new':>8s}{'mean':>8s}")
names = list(dict.fromkeys(name for name, _ in means))
best = {}
for name in names:
    strength = max(
        (s for n, s in means if n == name), key=lambda s: sum(means[name, s])
    )
    old, new = best[name] = means[name, strength]
    print(f"{name:>20s}{strength:10.0f}{old:8.3f}{new:8.3f}{(old + new) / 2:8.3f}")
assert sum(best["exact Fisher"]) > sum(best["no penalty"]) + 0.2
assert sum(best["exact Fisher"]) > sum(best["all alike"])

# %%
import matplotlib.pyplot as plt

plt.style.use("packprop.examples.gallery")
figure, axes = plt.subplots()
for name, color in zip(names, ("0.55", "C0", "C1", "C2"), strict=True):
    old, new = zip(*(means[key] for key in means if key[0] == name), strict=True)
    axes.plot(new, old, marker="o", markersize=4, color=color, label=name)
axes.set(
    title="Two tasks in turn; a point for each strength of the penalty",
    xlabel="new task (digits 5 to 9) told right",
    ylabel="old task (digits 0 to 4) told right",
    xlim=(0.3, 1),
    ylim=(0.3, 1),
)
axes.legend(loc="lower left")
plt.show()

# %% [markdown]
# It matters which weights you hold: both diagonals keep more of both tasks than a
# penalty that holds all weights alike. Three seeds show no difference between the two.
# They differ in size. Gradients of batches nearly cancel once a network fits its data.
# So their squares are smaller, by a factor that depends on the batch size and the
# length of the training: a strength that suits one network means nothing for the next.
# The exact diagonal is a property of the network and the data alone.
#
# ## Pruning
#
# Setting a weight to zero raises the loss by about half its square times its curvature
# (LeCun et al. 1990). The figure shows this beside the size of the weight alone; no
# training follows.


# %%
def pruned(model: nn.Module, importance: Diagonal, share: float) -> float:
    """The accuracy on all digits without the share of weights that matter least."""
    smaller = deepcopy(model)
    limit = torch.cat([each.flatten() for each in importance.values()]).quantile(share)
    with torch.no_grad():
        for name, parameter in smaller.named_parameters():
            parameter.mul_(importance[name] > limit)
    return accuracy(smaller, test, digits)


shares = (0.5, 0.7, 0.8, 0.9)
rows: dict[str, list[list[float]]] = {}
for seed in SEEDS:
    model = fit(network(seed, 10), train, digits, epochs=10)
    curvature = fisher(model, train, digits)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for name, importance in {
        "curvature": {
            name: 0.5 * curvature[name] * p.square() for name, p in weights.items()
        },
        "size": {name: p.abs() for name, p in weights.items()},
    }.items():
        rows.setdefault(name, []).append(
            [pruned(model, importance, share) for share in shares]
        )
print(f"{'set to zero':>12s}" + "".join(f"{share:8.0%}" for share in shares))
pruning = {name: torch.tensor(found).mean(0).tolist() for name, found in rows.items()}
for name, row in pruning.items():
    print(f"{name:>12s}" + "".join(f"{value:8.3f}" for value in row))
assert pruning["curvature"][0] > 0.9

# %% [markdown]
# If you prune up to four weights of five, the curvature chooses a little better; at
# nine in ten, size does. The estimate holds for small changes to a network at rest, and
# nine in ten is neither.
#
# ## Merging two models
#
# Two networks start from one that has seen 100 digits: one trains on 0 to 4, one on 5
# to 9. You make one network of both, by their mean, or by weighting each weight of each
# network by its importance there (Matena and Raffel 2022).


# %%
def merged(models: list[nn.Module], importances: list[Diagonal]) -> nn.Module:
    """The mean of some models, each weight counted by its importance."""
    result = deepcopy(models[0])
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            weights = torch.stack([each[name] for each in importances]) + 1e-8
            values = torch.stack(
                [dict(each.named_parameters())[name] for each in models]
            )
            parameter.copy_((weights * values).sum(0) / weights.sum(0))
    return result


table: dict[str, list[float]] = {}
for seed in SEEDS:
    start = fit(network(seed, 10), train[:100], digits, epochs=20)
    parts = [fit(deepcopy(start), part, digits, epochs=3) for part in (first, second)]
    diagonals = [
        fisher(model, part, digits)
        for model, part in zip(parts, (first, second), strict=True)
    ]
    alike = [{name: torch.ones_like(each) for name, each in diagonals[0].items()}] * 2
    for name, model in {
        "the start": start,
        "digits 0 to 4": parts[0],
        "digits 5 to 9": parts[1],
        "mean of both": merged(parts, alike),
        "by Fisher": merged(parts, diagonals),
    }.items():
        table.setdefault(name, []).append(accuracy(model, test, digits))
for name, values in table.items():
    print(f"{name:>14s}: {sum(values) / len(values):.3f} of all digits told right")
means_of = {name: sum(values) / len(values) for name, values in table.items()}
assert min(means_of["mean of both"], means_of["by Fisher"]) > max(
    means_of["digits 0 to 4"], means_of["digits 5 to 9"]
)

# %% [markdown]
# Both merged networks recover digits that the parts had forgotten. Weighting by Fisher
# information is no better than the mean here, it is worse. All figures on this page are
# means of three seeds on one small data set. We chose the best strength of each penalty
# on the digits that it is reported on, for all penalties alike.
