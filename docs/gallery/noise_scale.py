"""# How large a batch? The gradient noise scale

The noise scale `tr S / |G|^2` compares the scatter of per-sample gradients with their
mean. It is the number of samples at which a batch's noise is as large as its signal. So
it estimates the batch size beyond which more samples in a step stop paying (McCandlish
et al. 2018). `packprop.Monitor` estimates it from single batches. This page compares
these estimates, for batches of many sizes, with the exact number of a finite data set.
"""

# %%
from __future__ import annotations

import torch
from torch import nn

import packprop
from packprop.examples import load_digits
from packprop.extensions import BatchL2Grad

torch.manual_seed(0)
images, digits = load_digits()
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
loss_function = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

# %% [markdown]
# ## The exact number
#
# The scatter of the whole data set is the sum of the squared norms of all per-sample
# gradients, less the squared norm of their mean.


# %%
def exact_scale() -> float:
    """The noise scale of the whole data set."""
    summed = nn.CrossEntropyLoss(
        reduction="sum"
    )  # rows are gradients of samples' own losses
    found = packprop.compute(
        model, summed, (images, digits), [BatchL2Grad()], progress=False
    )
    mean_square = float(sum(found["batch_l2"].values()).mean())
    gradient = torch.autograd.grad(
        loss_function(model(images), digits), list(model.parameters())
    )
    signal = float(sum(part.square().sum() for part in gradient))
    return (mean_square - signal) / signal


# %% [markdown]
# ## The estimates
#
# The page draws 40 batches of each size, with fixed parameters. The monitor adds up
# numerators and denominators over them (`window=40`), because a ratio of averages is
# nearly unbiased and an average of ratios is not. It gives a confidence interval over
# the batches.


# %%
def estimated_scale(size: int) -> tuple[float | None, float | None, float | None]:
    """The estimate from 40 batches of one size, and the ends of its interval."""
    monitor = packprop.Monitor(
        model, every=1, quantities=["noise_scale"], window=40, log=None
    )
    for _ in range(40):
        batch = torch.randint(len(images), (size,))
        with monitor.step():
            loss_function(model(images[batch]), digits[batch]).backward()
        model.zero_grad()
    return tuple(
        monitor.last[f"critical_batch_size{end}"] for end in ("", "_low", "_high")
    )


sizes = [8, 32, 128, 512]
moments, done = {}, 0
for steps in (0, 30, 150):
    for _ in range(done, steps):
        batch = torch.randint(len(images), (128,))
        optimizer.zero_grad()
        loss_function(model(images[batch]), digits[batch]).backward()
        optimizer.step()
    done = steps
    moments[steps] = exact_scale(), [estimated_scale(size) for size in sizes]

for steps, (exact, estimates) in moments.items():
    print(f"after {steps} steps: exact {exact:.1f}")
    for size, (value, low, high) in zip(sizes, estimates, strict=True):
        shown = "unknown" if value is None else f"{value:.1f}"
        ends = f"{low:.1f} to {'infinity' if high is None else f'{high:.1f}'}"
        print(f"  batches of {size}: {shown} ({ends})")

# %% [markdown]
# The intervals hold the exact number for nearly all sizes. They are short unless
# batches are far smaller than the noise scale. Then the interval is open above, and you
# know only its lower end. At the beginning some dozens of samples agree; later the
# signal fades faster than the noise, and larger batches pay. The number belongs to the
# current parameters, so watch it during training.

# %%
held = [
    low <= exact and (high is None or exact <= high)
    for exact, estimates in moments.values()
    for _, low, high in estimates
]
assert sum(held) >= 0.8 * len(held)
exacts = [exact for exact, _ in moments.values()]
assert exacts[2] > 2 * exacts[0]

# %%
import matplotlib.pyplot as plt

plt.style.use("packprop.examples.gallery")
figure, axes = plt.subplots(figsize=(6.4, 3.6))
for (steps, (exact, estimates)), color in zip(
    moments.items(), ("C0", "C1", "C2"), strict=True
):
    axes.axhline(exact, color=color, linewidth=0.8, linestyle="--")
    known = [
        (size, *each)
        for size, each in zip(sizes, estimates, strict=True)
        if each[0] and each[2]
    ]
    places, values, lows, highs = zip(*known, strict=True)
    below = [value - low for value, low in zip(values, lows, strict=True)]
    above = [high - value for value, high in zip(values, highs, strict=True)]
    axes.errorbar(
        places,
        values,
        [below, above],
        color=color,
        fmt="o",
        capsize=3,
        label=f"after {steps} steps",
    )
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set_xlabel("samples in a batch")
axes.set_ylabel("noise scale (samples)")
axes.set_title("Estimates from 40 batches of each size; dashed: exact")
axes.legend()
plt.show()
