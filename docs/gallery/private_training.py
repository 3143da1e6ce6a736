"""# Training that no single sample decides

Differentially private training clips the gradient of each sample, and adds noise that
hides any one of them. Ordinary backward passes cannot clip: they add up the samples
first. Here clipping takes one backward pass. PyTorch draws the noise, and Opacus'
accountant computes the privacy: packprop is no privacy product, and knows neither.
"""

# %%
from __future__ import annotations

import torch
from opacus.accountants import RDPAccountant
from torch import Tensor, nn

import packprop
from packprop import backpack, clipped_gradients, extend
from packprop.examples import load_digits
from packprop.extensions import BatchGrad

torch.manual_seed(0)
images, digits = load_digits()
order = torch.randperm(len(images))
train, test = order[:1500], order[1500:]

# %% [markdown]
# You can use any network whose samples stay apart: group normalisation in place of
# batch normalisation, which packprop would refuse by name. The loss is the sum over
# samples, so nothing divides by a number that depends on who is in the batch.


# %%
def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.GroupNorm(2, 8),
        nn.Tanh(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


model, loss_function = extend(network()), extend(nn.CrossEntropyLoss(reduction="sum"))

# %% [markdown]
# ## By hand
#
# One gradient for each sample, its norm over all parameters, a factor, a sum: this
# holds as many gradients in memory as there are samples.

# %%
batch = train[:128]
with backpack(BatchGrad()):
    loss_function(model(images[batch]), digits[batch]).backward()
rows = [parameter.grad_batch for parameter in model.parameters()]
norms = sum(row.flatten(1).square().sum(1) for row in rows).sqrt()
factors = (3.4 / norms).clamp(max=1)
by_hand = [torch.tensordot(factors, row, 1) for row in rows]

# %% [markdown]
# ## In one backward pass
#
# `clipped_gradients` keeps the cotangents at each layer until it knows all norms, and
# then sums with the factors on the samples. It leaves the clipped sum in `.grad`.

# %%
model.zero_grad()
with clipped_gradients(max_norm=3.4) as clipped:
    loss_function(model(images[batch]), digits[batch]).backward()

for parameter, expected in zip(model.parameters(), by_hand, strict=True):
    torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-4)
torch.testing.assert_close(clipped.norms, norms, rtol=1e-4, atol=1e-5)
print(
    f"norms from {clipped.norms.min():.2f} to {clipped.norms.max():.2f}, "
    f"{clipped.fraction:.0%} clipped"
)

# %% [markdown]
# ## Private training
#
# Each sample is in a batch with the same probability, independently of the others, as
# the accountant assumes. The noise has the standard deviation `noise * clipped.bound`
# in every entry: one sample can change the sum by at most the bound. The loop divides
# the sum by the expected number of samples, not by the actual number.

# %%
EXPECTED, STEPS, DELTA = 250, 40, 1e-4
rate = EXPECTED / len(train)


def accuracy(network: nn.Module) -> float:
    """Share of the digits that were kept apart and are told right."""
    with torch.no_grad():
        return float((network(images[test]).argmax(1) == digits[test]).double().mean())


def epsilon(noise: float, steps: int) -> float:
    """What these steps give away, at most, in all cases but a share of `DELTA`."""
    accountant = RDPAccountant()
    accountant.history = [(noise, rate, steps)]
    return float(accountant.get_epsilon(delta=DELTA))


def trained(noise: float, max_norm: float = 1.0) -> tuple[list[float], list[Tensor]]:
    """The accuracy after every 4 steps, and the fraction clipped in each step."""
    model = extend(network())
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)
    source = torch.Generator().manual_seed(2)
    history, fractions = [accuracy(model)], []
    for step in range(STEPS):
        batch = train[torch.rand(len(train), generator=source) < rate]
        optimizer.zero_grad()
        loss = loss_function(model(images[batch]), digits[batch])
        with clipped_gradients(max_norm=max_norm) as clipped:
            loss.backward()
        for parameter in model.parameters():
            hidden = (
                torch.randn(parameter.shape, generator=source) * noise * clipped.bound
            )
            parameter.grad = (parameter.grad + hidden) / EXPECTED
        optimizer.step()
        fractions.append(clipped.fraction)
        if step % 4 == 3:
            history.append(accuracy(model))
    return history, fractions


curves = {}
for noise in (0.0, 1.0, 2.0, 4.0):
    curves[noise], fractions = trained(noise)
    worth = (
        f"epsilon {epsilon(noise, STEPS):.2f} at delta {DELTA}"
        if noise
        else "not private"
    )
    print(
        f"noise {noise}: accuracy {curves[noise][-1]:.3f}, {worth}; clipped "
        f"{torch.stack(fractions).mean():.0%}"
    )
assert curves[0.0][-1] > 0.88
assert curves[1.0][-1] > 0.85

# %%
import matplotlib.pyplot as plt

plt.style.use("packprop.examples.gallery")
figure, axes = plt.subplots()
for noise, color in zip(curves, ("0.55", "C0", "C2", "C1"), strict=True):
    label = f"epsilon {epsilon(noise, STEPS):.1f}" if noise else "clipped, no noise"
    axes.plot(range(0, STEPS + 1, 4), curves[noise], color=color, label=label)
axes.set(
    title=f"Accuracy on {len(test)} digits, delta {DELTA}",
    xlabel="steps",
    ylabel="share told right",
    ylim=(0, 1),
    xlim=(0, STEPS),
)
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# These are runs with one seed each. Their privacy rests on assumptions that no program
# checks: that the data were drawn as described, that nobody saw the norms or the
# accuracies above, which guided the settings, and that the noise is as random as it
# claims; PyTorch's generator is not made for secrets. [Opacus](https://opacus.ai) has
# samplers, a secure generator and the accountants, and its `DPOptimizer` leaves the
# same gradients, with all per-sample gradients in memory.
#
# ## Bounds by layer
#
# With `per="module"` or `"parameter"`, each module or parameter has a norm of its own,
# with one number or a mapping from names to numbers. A sample can then change the sum
# by at most the root of the sum of their squares.

# %%
model.zero_grad()
bounds = {
    name: 0.5
    for name, module in model.named_modules()
    if any(True for _ in module.parameters(False))
}
with clipped_gradients(max_norm=bounds, per="module") as clipped:
    loss_function(model(images[batch]), digits[batch]).backward()
for name, norms in clipped.layer_norms.items():
    print(
        f"{name} {type(model.get_submodule(name)).__name__:>10s}: median norm "
        f"{norms.median():.2f}"
    )
print(f"one sample changes the sum by {clipped.bound:.3f} at most")
assert abs(float(clipped.bound) - 0.5 * len(bounds) ** 0.5) < 1e-6
assert len(clipped.layer_norms) == len(bounds)
packprop.restore(model)
