"""# Finding wrong labels by gradients

A wrong label pulls the network another way than the others do. The gradient of each
sample says how hard, and in which direction. This page flips some labels of the digits,
and tries to find them by four scores: the loss, which needs no gradient at all, and
three scores of gradients. On these data nothing beats the loss by more than chance.
Gradients add the direction: they show which samples pull against which.
"""

# %%
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packprop import backpack, extend
from packprop.examples import load_digits
from packprop.extensions import BatchGrad, BatchL2Grad

images, digits = load_digits()
COUNT = len(images)
FLIPPED = COUNT * 8 // 100


def flipped(seed: int) -> tuple[Tensor, Tensor]:
    """Labels of which 8 % were replaced by other digits, and which ones `[n]`."""
    source = torch.Generator().manual_seed(seed)
    wrong = torch.zeros(COUNT, dtype=torch.bool)
    wrong[torch.randperm(COUNT, generator=source)[:FLIPPED]] = True
    others = (digits + torch.randint(1, 10, (COUNT,), generator=source)) % 10
    return torch.where(wrong, others, digits), wrong


def trained(labels: Tensor, seed: int, epochs: int) -> nn.Module:
    """A network that has seen all samples once an epoch, wrong labels included."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(epochs):
        for batch in torch.randperm(COUNT).split(128):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return extend(model)


# %% [markdown]
# ## The scores
#
# The gradients come from one backward pass over all samples:
#
# - **loss**: the baseline.
# - **norm** of the sample's gradient in all parameters (`BatchL2Grad`).
# - **unlike its class**: minus the cosine between the sample's gradient and the mean of
#   the others with the same label, all at norm one (`BatchGrad`).
# - **harms trusted ones**: minus the inner product with the mean gradient of 100
#   samples whose labels are right for certain. If this is positive, a step along the
#   sample's gradient raises their loss.

# %%
loss_function = extend(nn.CrossEntropyLoss(reduction="sum"))


def scores(model: nn.Module, labels: Tensor, trusted: Tensor) -> dict[str, Tensor]:
    """How suspicious each sample is by each score `[n]`."""
    outputs = model(images)
    with backpack(BatchGrad(), BatchL2Grad()):
        loss_function(outputs, labels).backward()
    rows = torch.cat(
        [parameter.grad_batch.flatten(1) for parameter in model.parameters()], 1
    )
    norms = sum(parameter.batch_l2 for parameter in model.parameters()).sqrt()
    unit = rows / norms.clamp(min=1e-12)[:, None]
    others = torch.zeros(10, rows.shape[1]).index_add_(0, labels, unit)[labels] - unit
    return {
        "loss": F.cross_entropy(outputs.detach(), labels, reduction="none"),
        "norm": norms,
        "unlike its class": -F.cosine_similarity(unit, others, dim=1),
        "harms trusted ones": -rows @ rows[trusted].mean(0),
    }


# %% [markdown]
# The page checks the numbers for two samples, by autograd:

# %%
labels, wrong = flipped(0)
trusted = (~wrong).nonzero().flatten()[:100]
model = trained(labels, seed=0, epochs=2)
found = scores(model, labels, trusted)


def gradient(chosen: Tensor) -> Tensor:
    """The gradient of the mean loss of some samples, as one vector."""
    loss = F.cross_entropy(model(images[chosen]), labels[chosen])
    return torch.cat(
        [part.flatten() for part in torch.autograd.grad(loss, [*model.parameters()])]
    )


for sample in (3, 1000):
    own = gradient(torch.tensor([sample]))
    torch.testing.assert_close(found["norm"][sample], own.norm(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        found["harms trusted ones"][sample],
        -own @ gradient(trusted),
        rtol=1e-3,
        atol=1e-4,
    )
print(
    f"norms and products of samples 3 and 1000 are those of autograd; {FLIPPED} of "
    f"{COUNT} labels are wrong"
)

# %% [markdown]
# ## Precision at k
#
# How many of the k most suspicious samples have a wrong label, if k is the number of
# wrong labels? The trusted samples do not count. There are three seeds each: other
# wrong labels, other weights.


# %%
def found_by(score: Tensor, wrong: Tensor, trusted: Tensor) -> Tensor:
    """The share of wrong labels among the k most suspicious samples `[n]`."""
    score = score.index_fill(0, trusted, -torch.inf)
    hits = wrong[score.argsort(descending=True)].double()
    return hits.cumsum(0) / torch.arange(1, COUNT + 1)


EPOCHS, SEEDS = (1, 5, 20), range(3)
curves: dict[tuple[str, int], list[Tensor]] = {}
for epochs in EPOCHS:
    for seed in SEEDS:
        labels, wrong = flipped(seed)
        trusted = (~wrong).nonzero().flatten()[:100]
        for name, score in scores(
            trained(labels, seed, epochs), labels, trusted
        ).items():
            curves.setdefault((name, epochs), []).append(
                found_by(score, wrong, trusted)
            )

mean = {key: torch.stack(each).mean(0) for key, each in curves.items()}
print(
    f"precision at {FLIPPED}, mean of {len(SEEDS)} seeds (chance: "
    f"{FLIPPED / (COUNT - 100):.2f})"
)
print(f"{'epochs':>20s}" + "".join(f"{epochs:>8d}" for epochs in EPOCHS))
for name in found:
    row = [float(mean[name, epochs][FLIPPED - 1]) for epochs in EPOCHS]
    print(f"{name:>20s}" + "".join(f"{value:8.3f}" for value in row))
assert mean["loss", 20][FLIPPED - 1] > 0.85
assert mean["norm", 20][FLIPPED - 1] > 0.85
assert mean["unlike its class", 20][FLIPPED - 1] > 0.6

# %%
import matplotlib.pyplot as plt

plt.style.use("packprop.examples.gallery")
figure, axes = plt.subplots()
for name, color in zip(found, ("0.55", "C0", "C2", "C1"), strict=True):
    axes.plot(range(1, 301), mean[name, 20][:300], color=color, label=name)
axes.axvline(FLIPPED, color="0.8", linewidth=1, zorder=0)
axes.set(
    title=f"Wrong labels among the k most suspicious of {COUNT - 100}, after 20 epochs",
    xlabel=f"k ({FLIPPED} labels are wrong)",
    ylabel="precision",
    ylim=(0, 1.02),
    xlim=(1, 300),
)
axes.legend(loc="lower left")
plt.show()

# %% [markdown]
# Early in the training the loss is the best of the four; later the norm finds as many.
# The loss costs nothing, so start with it. The norm follows it, because a large loss
# has a large gradient. Both find samples that are *hard*. Here nearly all of these are
# wrong; in data with rare kinds of right samples they are not. Products with trusted
# samples, summed over the steps of a training, show which samples did harm, whatever
# their loss: [probes](../guide/probes.md) compute them in the passes of the training
# itself, without holding all per-sample gradients. These are three seeds on one small
# data set, with labels flipped evenly; labels that people get wrong are not wrong
# evenly.
