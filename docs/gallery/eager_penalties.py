"""# Penalties that cost no memory

A network computes one large tensor after another, and each of them is penalised:

```
layer -> layer -> layer -> ... -> loss
  |        |        |
penalty  penalty  penalty
```

Autograd keeps everything that each penalty was computed from until the backward pass, although
nothing that comes later can change it. `torch.utils.checkpoint` throws it away and computes it
again. `packprop.eager_backward` takes the gradient of a penalty on the spot: what stays is one
tensor of the size of its input.
"""

# %%
from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from packprop import eager_backward

torch.manual_seed(0)
LAYERS, WIDTH, SAMPLES = 6, 64, 512

network = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
data = torch.randn(SAMPLES, WIDTH)

# %% [markdown]
# The penalty keeps samples apart: a Gaussian kernel between all pairs, at three bandwidths. It is
# heavy, for its matrices have one entry per pair of samples.


# %%
def closeness(x: Tensor) -> Tensor:
    """How close each sample is to the others, `[n]`."""
    squares = x.pow(2).sum(1)
    distance = (squares[:, None] + squares - 2 * x @ x.T).clamp(min=0) / x.shape[1]
    return torch.stack([torch.exp(-distance / width).mean(1) for width in (0.3, 1.0, 3.0)]).sum(0)


def penalty(x: Tensor) -> Tensor:
    """The mean of that."""
    return closeness(x).mean()


# %% [markdown]
# The loss is the user's own, and the same for all three ways; only how a penalty is evaluated
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
    "eager_backward": lambda fn, x: eager_backward(fn, x),
}

# %% [markdown]
# To see memory over time, count the bytes of all tensors that are alive after each operation of
# the forward and of the backward pass.


# %%
class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made since the start, after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.history: list[int] = []
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it made."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and not self.history:
                self.known.add(leaf.untyped_storage()._cdata)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.known:
                    self.known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.history.append(self.now)
        return out

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


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
# The three ways agree on every gradient:

# %%
plain = gradients["plain autograd"]
for name, found in gradients.items():
    difference = max(float((a - b).abs().max()) for a, b in zip(plain, found, strict=True))
    print(f"{name:24s} peak {max(histories[name]):5.1f} MiB, gradients differ by {difference:.0e}")
    assert difference < 1e-6

# %%
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for (name, history), color in zip(histories.items(), ("0.55", "C1", "C0"), strict=True):
    axes.plot(history, color=color, label=name, linewidth=1.5)
    turn = turns[name]
    axes.plot(turn, history[turn - 1], "o", color=color, markersize=5)
axes.set(
    title="A penalty on each of 6 layers, 512 samples",
    xlabel="operations of the pass; the dot is where the backward pass begins",
    ylabel="tensors alive, MiB",
    ylim=(0, None),
    xlim=(0, None),
)
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
images = Path(os.environ.get("GALLERY_IMAGES", Path(__file__).parent / "images"))
figure.savefig(images / "eager_penalties.png", dpi=120)

# %% [markdown]
# ![Tensors alive over the operations of one training step](images/eager_penalties.png)
#
# Each saw tooth of the blue line is one penalty: evaluated, differentiated, freed. The grey line
# climbs until the backward pass. The orange one pays in the backward pass for what it saved in the
# forward pass: every penalty is computed twice.
#
# ## A scale that is known only at the end
#
# What arrives at the value scales the kept gradient, and may be decided as late as one likes. A
# penalty that returns one value per sample can be scaled sample by sample; here by how far the
# output of the network is off, which the last layer alone knows. The samples must not meet in such
# a penalty, since its gradient is then a row per sample.


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
# With `check=True` a penalty whose samples do meet is found out. `closeness` compares every
# sample with every other:

# %%
try:
    eager_backward(closeness, data.clone().requires_grad_(), check=True)
except ValueError as error:
    print(error)
else:
    raise AssertionError("samples meet, and nobody noticed")
