"""# Per-sample gradients in a convolutional network

You can compute per-sample gradients in several ways. They differ in memory and in time,
and none is best for every layer. This page measures their cost, and leaves the choice
to packprop, within a budget if you give one.
"""

# %%
from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from packprop.core.derivatives.convnd import weight_jac_t_save_memory
from torch import Tensor, nn

import packprop
from packprop import LiveBytes, backpack, byte_text, extend, extensions
from packprop.examples import load_one_batch_mnist

torch.manual_seed(0)
images, digits = load_one_batch_mnist(batch_size=32)


# %%
class Network(nn.Module):
    """Three convolutions, of which the second is by far the largest; a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 64, 3, padding=1)
        self.second = nn.Conv2d(64, 128, 3, padding=1)
        self.third = nn.Conv2d(128, 32, 3, padding=1)
        self.head = nn.Linear(32 * 9, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        x = F.max_pool2d(F.relu(self.third(x)), 2)
        return self.head(x.flatten(1))


model, loss_function = extend(Network()), extend(nn.CrossEntropyLoss())
names, parameters = zip(*model.named_parameters(), strict=True)
Gradients = dict[str, Tensor]

# %% [markdown]
# ## By hand
#
# The first way takes one sample after the other. A row carries the 1/N of the mean loss
# here and below, so that the rows sum to the gradient.


# %%
def one_after_the_other() -> Gradients:
    rows = []
    with packprop.disable():
        for image, digit in zip(images.split(1), digits.split(1), strict=True):
            loss = F.cross_entropy(model(image), digit) / len(images)
            rows.append(torch.autograd.grad(loss, parameters))
    return {name: torch.stack(each) for name, *each in zip(names, *rows, strict=True)}


# %% [markdown]
# The second way takes all at once, by a transformation of the function. You first have
# to write the model as a function of the parameters.


# %%
def all_at_once() -> Gradients:
    def loss_of_one(values: Gradients, image: Tensor, digit: Tensor) -> Tensor:
        output = torch.func.functional_call(model, values, (image[None],))
        return F.cross_entropy(output, digit[None]) / len(images)

    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with packprop.disable():
        return torch.func.vmap(torch.func.grad(loss_of_one), (None, 0, 0))(
            values, images, digits
        )


# %% [markdown]
# ## In one backward pass
#
# `BatchGrad` saves the rows as `grad_batch` while the backward pass runs. BackPACK has
# a switch between two implementations for convolutions. packprop has it as well, and it
# means "unfold no inputs". Without it packprop decides for each layer, by time.


# %%
def in_one_pass(memory: str | None = None, save_memory: bool = False) -> Gradients:
    loss = loss_function(model(images), digits)
    with (
        weight_jac_t_save_memory(save_memory),
        backpack(extensions.BatchGrad(), memory=memory),
    ):
        loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.grad_batch
        parameter.grad = None
        del parameter.grad_batch
    return found


# %% [markdown]
# ## Memory and time
#
# The peak counts all tensors that are alive during the step, parameters and images
# included. It does not count memory inside a kernel. Grouped convolutions, which `vmap`
# calls, take most of their memory there; packprop calls them for a few samples at a
# time. The results are part of every peak. Times are medians of a few steps of a small
# network, on one core: [benchmarks](../benchmarks.md) measure with care.


# %%
def took(step: Callable[[], object]) -> tuple[int, float]:
    """Peak in bytes of a step, and its time in seconds."""
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    live = LiveBytes()
    live.own([*parameters, images, digits], "there before")
    live.own([p.grad_batch for p in parameters if hasattr(p, "grad_batch")], "results")
    with live:
        step()
    return live.peak, statistics.median(seconds[1:])


ways: dict[str, Callable[[], Gradients]] = {
    "one sample after the other": one_after_the_other,
    "torch.func: vmap of grad": all_at_once,
    "BatchGrad": in_one_pass,
    "BatchGrad, save_memory": lambda: in_one_pass(save_memory=True),
}
expected = one_after_the_other()
results = sum(rows.nbytes for rows in expected.values())
peaks = {}
print(f"the results alone: {byte_text(results)}")
for name, way in ways.items():
    for parameter, rows in way().items():
        torch.testing.assert_close(rows, expected[parameter], rtol=1e-3, atol=1e-6)
    peaks[name], seconds = took(way)
    print(f"{name:28s} peak {byte_text(peaks[name])}, {seconds:.3f} s")

# %% [markdown]
# The switch changes almost nothing: packprop never unfolds a whole batch of images at
# once. It takes samples in chunks that fit a cache, by an algorithm that it chooses for
# each layer and its shapes.
#
# ## In packprop, without these steps
#
# **Choosing.** `plan` shows the algorithm for each parameter, the number of samples at
# once, and the predicted peak, without running the step on data. It is the peak of a
# training loop. There the rows of the step before are on the parameters until the next
# rows are written over them, so they are there beside all activations.


# %%
def in_a_loop() -> None:
    for parameter in parameters:
        parameter.grad = None
    with backpack(extensions.BatchGrad()):
        loss_function(model(images), digits).backward()


plan = packprop.plan(model, loss_function, (images, digits), [extensions.BatchGrad()])
print(plan)
in_the_loop, _ = took(in_a_loop)
print(f"\nmeasured in a loop: {byte_text(in_the_loop)}")
assert abs(plan.peak - in_the_loop) < 0.01 * plan.peak
assert peaks["BatchGrad"] <= plan.peak
for parameter in parameters:
    parameter.grad = None
    del parameter.grad_batch

# %% [markdown]
# **Trying until it fits.** If nothing fits a budget, packprop raises an error before
# any work, and the error says what makes up the memory.

# %%
try:
    in_one_pass(memory="30MiB")
except packprop.BadInput as error:
    print(error)
else:
    raise AssertionError("half of that are results and activations")

# %% [markdown]
# **Holding the rows**, if you only reduce them. To clip the gradient of every sample to
# the same norm, as private training does, the norms are enough. A sample's weight in
# the clipped gradient follows from its norm, and the gradient of the weighted loss is
# an ordinary one. packprop computes norms with or without per-sample gradients,
# whichever is less work in a layer, and for a few samples at a time: the peak is hardly
# above that of the gradient alone.


# %%
def clipped(limit: float = 0.05) -> Gradients:
    with backpack(extensions.BatchL2Grad()):
        loss_function(model(images), digits).backward()
    norms = sum(parameter.batch_l2 for parameter in parameters).sqrt()
    for parameter in parameters:
        parameter.grad = None
        del parameter.batch_l2
    weights = (limit / norms).clamp(max=1)
    losses = F.cross_entropy(model(images), digits, reduction="none")
    gradients = torch.autograd.grad((weights * losses).sum() / len(images), parameters)
    return dict(zip(names, gradients, strict=True))


def clipped_by_hand(limit: float = 0.05) -> Gradients:
    rows = in_one_pass()
    norms = torch.stack([each.flatten(1).norm(dim=1) for each in rows.values()]).norm(
        dim=0
    )
    weights = (limit / norms).clamp(max=1)
    assert (weights < 1).any()
    return {
        name: torch.einsum("n,n...->...", weights, each) for name, each in rows.items()
    }


found = clipped()
for name, gradient in clipped_by_hand().items():
    torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)
peaks["clipped, from BatchGrad"], _ = took(clipped_by_hand)
peaks["clipped, from BatchL2Grad"], _ = took(clipped)
assert (
    peaks["clipped, from BatchL2Grad"]
    < peaks["BatchGrad"]
    < peaks["torch.func: vmap of grad"]
)


def ordinary() -> None:
    loss_function(model(images), digits).backward()
    for parameter in parameters:
        parameter.grad = None


peaks["the gradient alone"], _ = took(ordinary)
assert peaks["clipped, from BatchL2Grad"] < 1.1 * peaks["the gradient alone"]
for name, peak in peaks.items():
    print(f"{name:28s} {byte_text(peak)}")

# %%
import matplotlib.pyplot as plt

plt.style.use("packprop.examples.gallery")
figure, axes = plt.subplots(figsize=(8, 3.9))
sizes = {name: peak / 2**20 for name, peak in peaks.items()}
rows_held = [
    results / 2**20 if name in ways or "from BatchGrad" in name else 0.0
    for name in sizes
]
rest = [size - held for size, held in zip(sizes.values(), rows_held, strict=True)]
axes.barh(
    list(sizes), rows_held, color="C4", height=0.65, label="gradients of all samples"
)
bars = axes.barh(
    list(sizes), rest, left=rows_held, color="C0", height=0.65, label="everything else"
)
axes.bar_label(bars, [f"{size:.0f}" for size in sizes.values()], padding=4)
axes.invert_yaxis()
axes.margins(x=0.08)
axes.tick_params(axis="y", length=0)
axes.set(title=f"Peak of a step on {len(images)} images", xlabel="tensors alive, MiB")
axes.legend(loc="lower right")
plt.show()
