"""# The curvature of an auto-encoder, in the memory you have

The exact diagonal of the generalized Gauss-Newton matrix (GGN) is a sum over all
outputs of a model. Ten classes are few. An auto-encoder has an output for each pixel,
and the columns of all outputs together soon do not fit in memory. You can split passes
by hand, or give them a budget.
"""

# %%
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from packprop.custom_module.slicing import Slicing
from torch import Tensor, nn

import packprop
from packprop import LiveBytes, backpack, byte_text, extend, extensions
from packprop.examples import load_one_batch_mnist

torch.manual_seed(0)
images, _ = load_one_batch_mnist(batch_size=8)
images = F.avg_pool2d(images, 2)  # 14 x 14, to be quick
pixels = images.flatten(1)


# %% [markdown]
# Encoder and decoder share one kernel, as the principal components of a linear
# auto-encoder do: the encoder convolves with it, and the decoder convolves back. A list
# of layers cannot express that; two calls of functions can.


# %%
class AutoEncoder(nn.Module):
    """`[n, 1, 14, 14] -> [n, 196]`, through 10 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(0.2 * torch.randn(10, 1, 5, 5))
        self.code = nn.Parameter(torch.zeros(10))
        self.shade = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(F.conv2d(x, self.kernel, self.code, stride=2))
        return F.conv_transpose2d(
            hidden, self.kernel, self.shade, stride=2, output_padding=1
        ).flatten(1)


model, loss_function = extend(AutoEncoder()), extend(nn.MSELoss())
parameters = dict(model.named_parameters())
Diagonal = dict[str, Tensor]


def peak_of(step: Callable[[], Diagonal]) -> tuple[int, Diagonal]:
    """Most bytes of tensors alive, with parameters and images; the step's result."""
    step()
    live = LiveBytes()
    live.own([*parameters.values(), images], "there before")
    with live:
        found = step()
    return live.peak, found


# %% [markdown]
# ## By hand
#
# The Hessian of the mean squared error in the output is `2 / numel` times the identity.
# So the diagonal is the sum of the squares of all entries of the Jacobian, times that
# factor: one backward pass for each of the 196 outputs of each image, or all of them at
# once.


# %%
def by_hand() -> Diagonal:
    with packprop.disable():
        output = model(images)
    total = {
        name: torch.zeros_like(parameter) for name, parameter in parameters.items()
    }
    for sample in output:
        unit_vectors = torch.eye(sample.numel())
        rows = torch.autograd.grad(
            sample,
            list(parameters.values()),
            unit_vectors,
            is_grads_batched=True,
            retain_graph=True,
        )
        for name, jacobian in zip(parameters, rows, strict=True):
            total[name] += 2 / output.numel() * jacobian.pow(2).sum(0)
    return total


# %% [markdown]
# ## In one backward pass


# %%
def collected() -> Diagonal:
    found = {}
    for name, parameter in parameters.items():
        found[name] = parameter.diag_ggn_exact
        parameter.grad = None
        del parameter.diag_ggn_exact
    return found


def in_one_pass(memory: str | None = None) -> Diagonal:
    loss = loss_function(model(images), pixels)
    with backpack(extensions.DiagGGNExact(), memory=memory):
        loss.backward()
    return collected()


peaks = {}
peaks["by hand"], expected = peak_of(by_hand)
peaks["one pass"], found = peak_of(in_one_pass)
for name, diagonal in expected.items():
    torch.testing.assert_close(found[name], diagonal, rtol=1e-3, atol=1e-7)
    print(f"{name:6s} trace of the GGN {diagonal.sum():.4f}")
for name, peak in peaks.items():
    print(f"{name:8s} peak {byte_text(peak)}")

# %% [markdown]
# The kernel's block is not the sum of an encoder's and a decoder's block: the two uses
# of a shared weight meet in the squares. Both ways above see it as one parameter.
#
# ## In chunks, by hand
#
# You can split the outputs: each chunk's loss has a GGN of its own, the GGNs add up,
# and all backward passes share one graph. `Slicing` is a module, so the loss knows its
# input. The mean over a chunk divides by the chunk's size, so you divide the sum by the
# number of chunks.


# %%
def in_chunks(count: int) -> Diagonal:
    output = model(images)
    total = {
        name: torch.zeros_like(parameter) for name, parameter in parameters.items()
    }
    for part in torch.arange(output.shape[1]).chunk(count):
        chosen = (slice(None), slice(int(part[0]), int(part[-1]) + 1))
        chunk = extend(Slicing(chosen))(output)
        loss = loss_function(chunk, pixels[chosen])
        with backpack(extensions.DiagGGNExact(), retain_graph=True):
            loss.backward(retain_graph=True)
        for name, diagonal in collected().items():
            total[name] += diagonal / count
    return total


chunked = {}
for count in (1, 4, 14):
    chunked[count], found = peak_of(lambda count=count: in_chunks(count))
    for name, diagonal in expected.items():
        torch.testing.assert_close(found[name], diagonal, rtol=1e-3, atol=1e-7)
    print(f"{count:2d} backward passes: peak {byte_text(chunked[count])}")
assert chunked[14] < chunked[4] < chunked[1]

# %% [markdown]
# This works. It needs a graph that stays, a layer that cuts, the scale of a mean, a
# loop, and the number of chunks, which you find by trying.
#
# ## In packprop, with a budget
#
# The budget is an argument. packprop runs the step without data to find the chunks that
# fit, before it computes anything. The loss, the model and the backward pass stay the
# same. With less memory the pass takes smaller pieces, and longer. If nothing fits,
# packprop raises an error that names the smallest budget.

# %%
budgeted = {}
for budget in (4, 2):
    budgeted[budget], found = peak_of(lambda budget=budget: in_one_pass(f"{budget}MiB"))
    for name, diagonal in expected.items():
        torch.testing.assert_close(found[name], diagonal, rtol=1e-3, atol=1e-7)
    print(f"memory={budget}MiB: peak {byte_text(budgeted[budget])}")
    assert budgeted[budget] <= budget * 2**20
assert budgeted[2] < budgeted[4] < peaks["one pass"]

# %%
import matplotlib.pyplot as plt

plt.style.use("packprop.examples.gallery")
figure, (left, right) = plt.subplots(1, 2, sharey=True)
left.plot(list(chunked), [peak / 2**20 for peak in chunked.values()], "o-", color="C1")
left.set_xscale("log", base=2)
left.set_xticks(list(chunked), list(map(str, chunked)))
left.set(
    title="Chunks by hand", xlabel="backward passes", ylabel="peak, tensors alive, MiB"
)
labels = ["none", *map(str, budgeted)]
right.plot(
    labels,
    [peak / 2**20 for peak in (peaks["one pass"], *budgeted.values())],
    "o",
    color="C0",
)
right.hlines(list(budgeted), [0.75, 1.75], [1.25, 2.25], color="0.4", linewidth=2)
right.annotate(
    "the budget", (1, 4), (0, 5), textcoords="offset points", ha="center", color="0.4"
)
right.set(
    title="One backward pass", xlabel="memory=, MiB", xlim=(-0.5, 2.5), ylim=(0.5, 8)
)
for axes in (left, right):
    axes.set_yscale("log", base=2)
    axes.axhline(peaks["by hand"] / 2**20, color="0.7", linewidth=1, linestyle="--")
left.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
top = (14, peaks["by hand"] / 2**20)
left.annotate(
    "Jacobians by hand",
    top,
    (0, 4),
    textcoords="offset points",
    ha="right",
    color="0.4",
)
plt.show()

# %% [markdown]
# ## The other two axes
#
# Samples: `subsampling` takes some, at the scale of the whole batch, so that parts add
# up. Parameters: `backward(inputs=...)` computes the values of some parameters, from
# the same graph. Setting `requires_grad=False` on the others also does this, but needs
# a new forward pass.

# %%
halves = []
for chosen in (range(4), range(4, 8)):
    with backpack(extensions.DiagGGNExact(subsampling=chosen)):
        loss_function(model(images), pixels).backward()
    halves.append(collected())

for name, diagonal in expected.items():
    torch.testing.assert_close(
        halves[0][name] + halves[1][name], diagonal, rtol=1e-3, atol=1e-7
    )

loss = loss_function(model(images), pixels)
for name, parameter in parameters.items():
    with backpack(extensions.DiagGGNExact()):
        loss.backward(inputs=[parameter], retain_graph=True)
    torch.testing.assert_close(
        parameter.diag_ggn_exact, expected[name], rtol=1e-3, atol=1e-7
    )
    others = [other for other in parameters.values() if other is not parameter]
    assert not any(hasattr(other, "diag_ggn_exact") for other in others)
    del parameter.diag_ggn_exact
print("samples in two halves, parameters one by one: the same diagonal")
