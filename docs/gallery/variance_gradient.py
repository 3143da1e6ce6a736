"""# The gradient of a variance

The scatter of per-sample gradients around their mean is the noise of stochastic
gradient descent. It is a function of the parameters like the loss itself, so it has a
gradient, and you can train against it. With `create_graph=True` you can differentiate
again everything that an extension computes.
"""

# %%
from __future__ import annotations

import gc

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import LiveBytes, backpack, byte_text, extend, extensions
from packprop.examples import load_one_batch_mnist

torch.manual_seed(0)
images, digits = load_one_batch_mnist(batch_size=32)
loss_function = extend(nn.CrossEntropyLoss())

# %% [markdown]
# ## By hand
#
# This takes one gradient after the other, each with a graph of its own, stacks them,
# and differentiates their variance. The total variance is the sum over all entries of
# all parameters.

# %%
Gradients = tuple[Tensor, ...]


def by_hand(model: nn.Module) -> tuple[Tensor, Gradients]:
    parameters = list(model.parameters())
    rows = []
    with packprop.disable():
        for image, digit in zip(images.split(1), digits.split(1), strict=True):
            loss = F.cross_entropy(model(image), digit) / len(images)
            slopes = torch.autograd.grad(loss, parameters, create_graph=True)
            rows.append(torch.cat([slope.flatten() for slope in slopes]))
        total = torch.stack(rows).var(0, correction=0).sum()
        return total.detach(), torch.autograd.grad(total, parameters)


# %% [markdown]
# ## In one backward pass
#
# `Variance` saves the variance of each entry. With `create_graph=True` it comes with a
# graph, and `torch.autograd.grad` does the rest. PyTorch warns that such a backward
# pass ties parameters and their gradients together: `p.grad` has a graph that leads
# back to `p`, and Python frees neither before you undo that. Here the code undoes it at
# once.


# %%
def total_variance(model: nn.Module) -> Tensor:
    """Variance of the gradients, summed over all entries; with a graph."""
    with backpack(extensions.Variance()):
        loss_function(model(images), digits).backward(create_graph=True)
    total = sum(parameter.variance.sum() for parameter in model.parameters())
    for parameter in model.parameters():
        parameter.grad = None
        del parameter.variance
    return total


def in_one_pass(model: nn.Module) -> tuple[Tensor, Gradients]:
    total = total_variance(model)
    return total.detach(), torch.autograd.grad(total, list(model.parameters()))


# %% [markdown]
# Both agree, on a linear model, on a small convolutional network, and on a third model
# that no list of layers describes. It embeds patches of an image, mixes them by a
# residual connection with a normalised weight, and reads them with the embedding's
# weight.


# %%
class Patches(nn.Module):
    """Reads an image as 16 patches, `[n, 1, 28, 28] -> [n, 10]`."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(49, width)
        self.directions = nn.Parameter(torch.randn(width, width))
        self.norm = nn.LayerNorm(width)
        self.read = nn.Parameter(torch.randn(10, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(F.unfold(x, 7, stride=7).transpose(1, 2))
        x = x + torch.tanh(F.linear(self.norm(x), F.normalize(self.directions)))
        pixels = F.linear(x, self.embed.weight.T).mean(2)
        return F.linear(pixels, self.read)


models = {
    "linear": nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
    "convolutional": nn.Sequential(
        nn.Conv2d(1, 6, 4, stride=2),
        nn.SiLU(),
        nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Linear(96, 10),
    ),
    "patches": Patches(),
}
for name, model in models.items():
    extend(model)
    value, gradients = in_one_pass(model)
    expected, expected_gradients = by_hand(model)
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-7)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    print(f"{name:13s} total variance {value:.5f}, norm of its gradient", end=" ")
    print(f"{torch.cat([g.flatten() for g in gradients]).norm():.5f}")

# %% [markdown]
# ## In packprop, without these steps
#
# **Writing a loop, or restricting the model.** The third model above has a shared
# weight, a weight that it computes from others, and positions that share all of them;
# its rows are still one backward pass.
#
# **Guessing which quantities you can differentiate.** Nearly all can be differentiated.
# If PyTorch has no further derivative, or a wrong one, an error names the function. A
# penalty on curvature, for flat minima, is the gradient of a trace; this block compares
# it with a difference quotient along a random direction, in double precision.


# %%
def curvature(model: nn.Module) -> Tensor:
    """Trace of the GGN, with a graph."""
    with backpack(extensions.DiagGGNExact()):
        loss_function(model(images.double()), digits).backward(create_graph=True)
    total = sum(parameter.diag_ggn_exact.sum() for parameter in model.parameters())
    for parameter in model.parameters():
        parameter.grad = None
        del parameter.diag_ggn_exact
    return total


double = models["patches"].double()
slopes = torch.autograd.grad(curvature(double), list(double.parameters()))
direction = [torch.randn_like(parameter) for parameter in double.parameters()]
values = []
for shift in (-1e-5, 2e-5):
    with torch.no_grad():
        for parameter, step in zip(double.parameters(), direction, strict=True):
            parameter += shift * step
    values.append(float(curvature(double).detach()))
slope = sum(float((g * step).sum()) for g, step in zip(slopes, direction, strict=True))
quotient = (values[1] - values[0]) / 2e-5
print(f"slope of the GGN's trace: {slope:.6f}; difference quotient: {quotient:.6f}")
assert abs(slope - quotient) < 1e-5 * abs(slope)

# %% [markdown]
# **Hunting for leaks.** Once `p.grad` and the value on `p` are gone, so is the graph,
# without waiting for the garbage collector.

# %%
with LiveBytes():  # once uncounted: PyTorch imports parts of itself on the way
    in_one_pass(models["convolutional"])
gc.collect()
gc.disable()
with LiveBytes() as live:
    for _ in range(5):
        in_one_pass(models["convolutional"])
gc.enable()
print(
    f"after 5 rounds, with a peak of {byte_text(live.peak)}, there are "
    f"{byte_text(live.now)} left"
)
assert live.now == 0

# %% [markdown]
# ## Training against noise
#
# The gradient of the loss is a by-product of the pass that computes the variance. So
# one step with the penalty takes one forward pass, one backward pass, and one backward
# pass through that backward pass.


# %%
def train(
    penalty: float, steps: int = 50, rate: float = 0.1
) -> tuple[list[float], list[float]]:
    """Loss, and variance of the samples' gradients, over steps of gradient descent."""
    torch.manual_seed(1)
    model = extend(
        nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.Tanh(), nn.Linear(32, 10))
    )
    parameters = list(model.parameters())
    losses, variances = [], []
    for _ in range(steps):
        loss = loss_function(model(images), digits)
        with backpack(extensions.Variance()):
            loss.backward(create_graph=True)
        # rows carry the mean's 1/N: n^2 times their variance is that of samples
        variance = len(images) ** 2 * sum(p.variance.sum() for p in parameters)
        against = torch.autograd.grad(variance, parameters)
        losses.append(loss.item())
        variances.append(variance.item())
        with torch.no_grad():
            for p, slope in zip(parameters, against, strict=True):
                p -= rate * (p.grad.detach() + penalty * slope)
                p.grad = None
                del p.variance
    return losses, variances


runs = {f"penalty {strength:g}": train(strength) for strength in (0.0, 3e-3, 1e-2)}
for name, (losses, variances) in runs.items():
    print(
        f"{name}: loss {losses[0]:.2f} -> {losses[-1]:.3f}, variance "
        f"{variances[0]:.0f} -> {variances[-1]:.2f}"
    )


def noise_at(level: float, losses: list[float], variances: list[float]) -> float:
    """The variance at the first step whose loss is below a level."""
    return next(
        variance
        for loss, variance in zip(losses, variances, strict=True)
        if loss < level
    )


plain, *penalised = (noise_at(1.5, *run) for run in runs.values())
print("at a loss of 1.5:", ", ".join(f"{value:.0f}" for value in (plain, *penalised)))
assert all(value < 0.8 * plain for value in penalised)

# %%
import matplotlib.pyplot as plt

plt.style.use("packprop.examples.gallery")
figure, axes = plt.subplots()
for (name, (losses, variances)), color in zip(
    runs.items(), ("0.55", "C0", "C1"), strict=True
):
    axes.loglog(losses, variances, ".-", color=color, label=name)
axes.annotate(
    "start",
    (losses[0], variances[0]),
    (-8, 0),
    textcoords="offset points",
    ha="right",
    va="center",
)
axes.set(
    title="Gradient descent on 32 digits, a dot for each step",
    xlabel="cross entropy",
    ylabel="variance of samples' gradients",
)
ticks = [0.2, 0.5, 1, 2]
axes.set_xticks(ticks, list(map(str, ticks)))
axes.set_yticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
axes.minorticks_off()
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# On the way down, the penalised runs scatter less at the same loss. They take more
# steps to reach it.
