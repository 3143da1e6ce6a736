"""# Read, reduce, forget: a hook in the backward pass

A large quantity is often only the way to a small one: you want the trace of the
Hessian, not its diagonal, or the norms of per-sample gradients, not the gradients. An
extension hook sees each module as soon as its quantities are there, reduces them, and
frees them before packprop makes the next ones.
"""

# %%
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packprop import LiveBytes, backpack, byte_text, extend, extensions, products
from packprop.examples import load_one_batch_mnist

torch.manual_seed(0)
images, digits = load_one_batch_mnist(batch_size=64)

# %% [markdown]
# The model is ordinary: residual blocks with layer normalisation, GELU, an average over
# the positions of the image, functions next to modules. It is not a `Sequential`, and
# you need not tell packprop anything about it.


# %%
class Block(nn.Module):
    """Two affine maps around a smooth function, added to what came in."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.grow, self.shrink = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shrink(F.gelu(self.grow(self.norm(x))))


class Rows(nn.Module):
    """Reads an image row by row, `[n, 1, 28, 28] -> [n, 10]`."""

    def __init__(self, width: int = 12, hidden: int = 24, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(28, width)
        self.position = nn.Parameter(0.1 * torch.randn(28, width))
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.squeeze(1)) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


model, loss_function = extend(Rows()), extend(nn.CrossEntropyLoss())
few, their_digits = images[:8], digits[:8]

# %% [markdown]
# ## By hand
#
# A diagonal entry of the Hessian is the second derivative along one parameter. Autograd
# gives a whole row of the Hessian for each backward pass through the gradient, and you
# keep one entry of it. So this takes as many passes as there are parameters. Here it is
# for the smallest of them.


# %%
def diagonal_by_hand(parameter: nn.Parameter) -> Tensor:
    """Second derivatives of the loss along each entry of a parameter."""
    loss = F.cross_entropy(model(few), their_digits)
    (slope,) = torch.autograd.grad(loss, parameter, create_graph=True)
    rows = (
        torch.autograd.grad(entry, parameter, retain_graph=True)[0]
        for entry in slope.flatten()
    )
    return torch.stack(
        [row.flatten()[place] for place, row in enumerate(rows)]
    ).view_as(parameter)


small = ("blocks.0.norm.weight", "blocks.1.grow.bias", "head.bias")
by_hand = {name: diagonal_by_hand(model.get_parameter(name)) for name in small}

# %% [markdown]
# ## In one backward pass
#
# `DiagHessian` saves the diagonal of every parameter. The trace is its sum.

# %%
with backpack(extensions.DiagHessian()):
    loss_function(model(few), their_digits).backward()

for name, expected in by_hand.items():
    torch.testing.assert_close(
        model.get_parameter(name).diag_h, expected, rtol=1e-4, atol=1e-6
    )
afterwards = sum(float(p.diag_h.sum()) for p in model.parameters())
print(f"trace, summed after the backward pass: {afterwards:.4f}")
for parameter in model.parameters():
    del parameter.diag_h

# %% [markdown]
# ## While the backward pass runs
#
# packprop calls the hook with each module that has parameters of its own, once it has
# saved all of their values. Whatever the hook deletes is gone before the next module's
# turn.


# %%
class Trace:
    """Sums up diagonals and deletes them."""

    def __init__(self) -> None:
        self.of_module: dict[str, float] = {}
        self.names = {
            module: name or "position" for name, module in model.named_modules()
        }

    def __call__(self, module: nn.Module) -> None:
        total = 0.0
        for parameter in module.parameters(recurse=False):
            total += float(parameter.diag_h.sum())
            del parameter.diag_h
        self.of_module[self.names[module]] = total


trace = Trace()
with backpack(extensions.DiagHessian(), extension_hook=trace):
    loss_function(model(few), their_digits).backward()

meanwhile = sum(trace.of_module.values())
print(f"trace, summed while it ran:            {meanwhile:.4f}")
for name, part in trace.of_module.items():
    print(f"{name:>18s} {part:8.4f}")
assert abs(meanwhile - afterwards) < 1e-4 * abs(afterwards)
assert not any(hasattr(parameter, "diag_h") for parameter in model.parameters())

# %% [markdown]
# ## In packprop, without these steps
#
# **Rebuilding the model.** The diagonal is exact although the model branches, shares
# its weights over positions, and has GELU, layer normalisation and softmax, which are
# neither linear nor all elementwise. If packprop could not compute the diagonal of a
# parameter, it would raise an error with its name, and leave no gap in the sum.
#
# **Waiting for the exact trace of a large model.** The mean of `v @ H v` over random
# signs `v` estimates it. Products with the Hessian of the whole model are a function of
# their own.

# %%
parameters = list(model.parameters())
signs = [torch.randint(0, 2, (200, *p.shape)) * 2.0 - 1 for p in parameters]
turned = products.hvp(loss_function(model(few), their_digits), parameters, signs)
draws = sum((a * b).flatten(1).sum(1) for a, b in zip(signs, turned, strict=True))
error = float(draws.std() / len(draws) ** 0.5)
print(
    f"estimate from {len(draws)} products: {draws.mean():.1f} +- {error:.1f}; exact: "
    f"{afterwards:.1f}"
)
assert abs(float(draws.mean()) - afterwards) < 5 * error

# %% [markdown]
# ## Where it matters: gradients of all samples
#
# A diagonal is as large as the gradient. The gradients of 64 samples are 64 times as
# large, and often you need only something as small as a gradient from them. Here this
# is their median, entry by entry, a robust stand-in for the mean when some labels are
# wrong. You cannot accumulate a median in one pass over the samples. All rows have to
# be there at once, but only those of one layer.

# %%
WIDTH, DEPTH = 192, 7
deep = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(196, WIDTH))
for _ in range(DEPTH - 1):
    deep.extend([nn.ReLU(), nn.Linear(WIDTH, WIDTH)])
deep.extend([nn.ReLU(), nn.Linear(WIDTH, 10)])
extend(deep)


def keep_median(module: nn.Module) -> None:
    """Put the median of a module's rows in their place."""
    for parameter in module.parameters(recurse=False):
        parameter.median = parameter.grad_batch.median(0).values
        del parameter.grad_batch


def step(hook: Callable[[nn.Module], None] | None) -> LiveBytes:
    """One forward and backward pass, and the bytes of the tensors that it made."""
    deep.zero_grad()
    with LiveBytes() as live:
        loss = loss_function(deep(images), digits)
        with backpack(extensions.BatchGrad(), extension_hook=hook):
            loss.backward()
        if hook is None:
            for module in deep:
                keep_median(module)
    return live


step(None)  # the first pass looks where the samples are
medians, counted = {}, {}
for name, hook in {
    "medians taken at the end": None,
    "medians taken by a hook": keep_median,
}.items():
    counted[name] = step(hook)
    medians[name] = [parameter.median.clone() for parameter in deep.parameters()]
    print(f"{name}: peak {byte_text(counted[name].peak)}")

for late, early in zip(*medians.values(), strict=True):
    torch.testing.assert_close(late, early)
at_the_end, by_hook = (live.peak for live in counted.values())
assert by_hook < 0.5 * at_the_end

# %%
import matplotlib.pyplot as plt

plt.style.use("packprop.examples.gallery")
figure, axes = plt.subplots()
for (name, live), color in zip(counted.items(), ("0.55", "C0"), strict=True):
    axes.plot([size / 2**20 for size in live.history], color=color, label=name)
axes.set(
    title=f"Gradients of {len(images)} samples, {DEPTH + 1} layers of width {WIDTH}",
    xlabel="operations, forward and backward",
    ylabel="tensors alive, MiB",
    xlim=(0, None),
    ylim=(0, None),
)
axes.legend(loc="upper left")
plt.show()

# %% [markdown]
# Each saw tooth is one layer: packprop computes its rows, the hook reduces and frees
# them. Deleting an attribute frees the tensor only if nothing else holds it, so a hook
# that collects views of the rows frees nothing.
#
# Quantities that *do* accumulate over samples need no hook: `BatchL2Grad`,
# `SumGradSquared`, `Variance` and the curvature diagonals go through the samples in
# chunks and never hold all rows.
