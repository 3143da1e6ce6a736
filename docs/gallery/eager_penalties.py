"""# Penalties that cost no memory

A network computes one large tensor after another, and you penalise each of them.
Autograd keeps everything that each penalty computed until the backward pass, although
nothing that comes later can change it. `packprop.eager_backward` takes the gradient of
a penalty on the spot.
"""

# %% [markdown]
# ```
# layer -> layer -> layer -> ... -> loss
#   |        |        |
# penalty  penalty  penalty
# ```
#
# `torch.utils.checkpoint` throws away the tensors of a penalty, and computes them again
# in the backward pass. `packprop.eager_backward` differentiates the penalty at once,
# and keeps one tensor of the size of its input.

# %%
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from packprop import LiveBytes, eager_backward

torch.manual_seed(0)
LAYERS, WIDTH, SAMPLES = 6, 64, 512

network = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
data = torch.randn(SAMPLES, WIDTH)

# %% [markdown]
# The penalty pushes samples apart: it is a Gaussian kernel between all pairs, at three
# bandwidths. It is heavy, because its matrices have one entry per pair of samples.


# %%
def closeness(x: Tensor, others: Tensor) -> Tensor:
    """How close each sample is to others, `[n]`."""
    distance = (
        x.pow(2).sum(1)[:, None] + others.pow(2).sum(1) - 2 * x @ others.T
    ).clamp(min=0)
    widths = (0.3, 1.0, 3.0)
    return torch.stack(
        [torch.exp(-distance / x.shape[1] / width).mean(1) for width in widths]
    ).sum(0)


def penalty(x: Tensor) -> Tensor:
    """The mean of that, of all samples among each other."""
    return closeness(x, x).mean()


# %% [markdown]
# ## By hand
#
# You differentiate the penalty on a detached copy of its input. A term that is linear
# in the input, has the value zero and has that gradient as its slope then stands for
# the penalty in the loss.


# %%
def by_hand(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    copy = x.detach().requires_grad_()
    value = fn(copy)
    (slope,) = torch.autograd.grad(value, copy)
    return value.detach() + ((x - x.detach()) * slope).sum()


# %% [markdown]
# This is right for a scalar function of one tensor without parameters, random numbers,
# or hooks. `eager_backward` does the same for any branch: parameters in a closure,
# several inputs, one value per sample, pieces.
#
# ## With eager_backward
#
# The loss is your own, and the same for all ways. Only the evaluation of a penalty
# differs.

# %%
Evaluate = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def loss_of(evaluate: Evaluate) -> Tensor:
    """The loss of one training step."""
    x, loss = data, torch.zeros(())
    for layer in network:
        x = torch.tanh(layer(x))
        loss = loss + 0.1 * evaluate(penalty, x)
    return loss + x.pow(2).mean()


ways: dict[str, Evaluate] = {
    "plain autograd": lambda fn, x: fn(x),
    "torch.utils.checkpoint": lambda fn, x: checkpoint(fn, x, use_reentrant=False),
    "by hand": by_hand,
    "eager_backward": lambda fn, x: eager_backward(fn, x),
    "eager_backward, 8 pieces": lambda fn, x: eager_backward(
        lambda some, every: closeness(some, every).mean(),
        x,
        x,
        chunks=8,
        axes=(0, None),
        reduction="mean",
    ),
}

# %% [markdown]
# The last way splits the penalty itself: some samples at a time against all of them. To
# show memory over time, the page counts the bytes of all live tensors after each
# operation.

# %%
histories, turns, gradients = {}, {}, {}
for name, evaluate in ways.items():
    network.zero_grad()
    with LiveBytes() as live:
        loss = loss_of(evaluate)
        turns[name] = len(live.history)
        loss.backward()
    histories[name] = [size / 2**20 for size in live.history]
    gradients[name] = [parameter.grad.clone() for parameter in network.parameters()]
    del loss

# %% [markdown]
# They agree on every gradient:

# %%
plain = gradients["plain autograd"]
for name, found in gradients.items():
    difference = max(
        float((a - b).abs().max()) for a, b in zip(plain, found, strict=True)
    )
    print(
        f"{name:24s} peak {max(histories[name]):5.1f} MiB, gradients differ by "
        f"{difference:.0e}"
    )
    assert difference < 1e-6

peaks = {name: max(history) for name, history in histories.items()}
assert peaks["eager_backward"] < 0.4 * peaks["plain autograd"]
assert peaks["eager_backward, 8 pieces"] < 0.5 * peaks["eager_backward"]

# %%
import matplotlib.pyplot as plt

plt.style.use("packprop.examples.gallery")
figure, axes = plt.subplots()
colors = {
    "plain autograd": "0.55",
    "torch.utils.checkpoint": "C1",
    "eager_backward": "C0",
}
for name, color in colors.items():
    axes.plot(histories[name], color=color, label=name)
    axes.plot(
        turns[name], histories[name][turns[name] - 1], "o", color=color, markersize=5
    )
axes.set(
    title=f"A penalty on each of {LAYERS} layers, {SAMPLES} samples",
    xlabel="operations of a step; the dot is where the backward pass begins",
    ylabel="tensors alive, MiB",
    ylim=(0, None),
    xlim=(0, None),
)
axes.legend()
plt.show()

# %% [markdown]
# Each saw tooth of the blue line is one penalty: packprop evaluates it, differentiates
# it and frees it. The grey line climbs until the backward pass. The orange one pays in
# the backward pass for its savings in the forward pass: it computes every penalty
# twice.
#
# ## A scale that you know only at the end
#
# The gradient of the value scales the kept gradient, and you may decide it late. If a
# penalty returns one value per sample, you can scale it sample by sample. Here the
# scale is the error of the network's output, which only the last layer knows. The
# samples must not meet in such a penalty, because its gradient is then a row per
# sample.
# sample.


# %%
def energy(x: Tensor) -> Tensor:
    """How much of a sample's activation lies beyond 0.5, `[n]`."""
    return (x.abs() - 0.5).clamp(min=0).pow(2).sum(1)


def scaled_loss(evaluate: Evaluate) -> Tensor:
    """A loss in which every sample has its own weight on all of its penalties."""
    x, energies = data, []
    for layer in network:
        x = torch.tanh(layer(x))
        energies.append(evaluate(energy, x))
    error = (x - data).pow(2).mean(1)
    scale = error.detach() / error.detach().mean()
    return error.mean() + 0.01 * sum((scale * each).mean() for each in energies)


found = []
for evaluate in (ways["plain autograd"], ways["eager_backward"]):
    network.zero_grad()
    scaled_loss(evaluate).backward()
    found.append([parameter.grad.clone() for parameter in network.parameters()])
difference = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))
print(f"scaled per sample at the end: gradients differ by {difference:.0e}")
assert difference < 1e-6

# %% [markdown]
# With `check=True`, packprop detects a penalty whose samples meet. `closeness` compares
# every sample with every other:

# %%
try:
    eager_backward(lambda x: closeness(x, x), data.clone().requires_grad_(), check=True)
except ValueError as error:
    print(error)
else:
    raise AssertionError("samples meet, and nobody noticed")
