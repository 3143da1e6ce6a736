"""# A training loop that measures itself in every step

Norms of per-sample gradients and the trace of the curvature show how a training goes. A
small network spends most of the time of a pass in Python, not in arithmetic, so
measuring costs several times the step itself. `packprop.compile` traces a step once and
then replays it as a graph, without Python.
"""

# %%
from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import packprop
from packprop import backpack, extend
from packprop.examples import load_one_batch_mnist
from packprop.extensions import BatchL2Grad, DiagGGNExact

torch.manual_seed(0)
images, digits = load_one_batch_mnist(batch_size=512)
STEPS = 400

# %% [markdown]
# ## The loop
#
# Each step takes 64 digits, runs one training step, and records the loss, the spread of
# the norms of per-sample gradients, and the trace of the GGN. The caller says what a
# step does.


# %%
def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.Tanh(), nn.Linear(32, 10))


Step = Callable[[Tensor, Tensor], Tensor]
"""From a batch to the loss; it leaves `.grad`, `.batch_l2`, `.diag_ggn_exact`."""


def train(model: nn.Module, step: Step) -> tuple[Tensor, list[float]]:
    """What each step wrote down `[steps, 3]`, and the seconds since the start."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    order = torch.Generator().manual_seed(2)
    log, clock, start = [], [], time.perf_counter()
    for _ in range(STEPS):
        batch = torch.randint(len(images), (64,), generator=order)
        optimizer.zero_grad()
        loss = step(images[batch], digits[batch])
        norms = sum(parameter.batch_l2 for parameter in model.parameters()).sqrt()
        trace = sum(parameter.diag_ggn_exact.sum() for parameter in model.parameters())
        log.append(torch.stack([loss.detach(), norms.max() / norms.median(), trace]))
        optimizer.step()
        clock.append(time.perf_counter() - start)
    return torch.stack(log), clock


# %% [markdown]
# ## As it is written
#
# Extend the model and the loss, and run a backward pass inside `backpack(...)`.

# %%
extended, loss_function = extend(network()), extend(nn.CrossEntropyLoss())


def ordinary_step(x: Tensor, y: Tensor) -> Tensor:
    loss = loss_function(extended(x), y)
    with backpack(BatchL2Grad(), DiagGGNExact()):
        loss.backward()
    return loss


logs, clocks = {}, {}
logs["ordinary"], clocks["ordinary"] = train(extended, ordinary_step)
for step in (0, STEPS - 1):
    loss, spread, trace = logs["ordinary"][step].tolist()
    print(
        f"step {step}: loss {loss:.3f}, largest norm over the median {spread:.2f}, "
        f"trace {trace:.2f}"
    )

# %% [markdown]
# ## Compiled
#
# `packprop.compile` takes the same four things and returns the step. `backend="eager"`
# replays the traced graph operation by operation, and needs no compiler. The default
# compiles it with Inductor, which takes seconds at first and less in each step. The
# first calls are ordinary ones: packprop finds the samples, traces the pass, and
# compares the graph with an ordinary pass.

# %%
for name, backend in (("replayed", "eager"), ("compiled", "inductor")):
    model = network()
    step = packprop.compile(
        model, nn.CrossEntropyLoss(), BatchL2Grad(), DiagGGNExact(), backend=backend
    )
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # without a compiler for C++ the graph is replayed, with a warning
        logs[name], clocks[name] = train(model, step)
    torch.testing.assert_close(logs[name], logs["ordinary"], rtol=1e-3, atol=1e-4)
print("all three write down the same")

# %% [markdown]
# ## The cost of measuring
#
# Without norms and curvature the loop would take the time of a plain pass.


# %%
def plain_loop() -> list[float]:
    """Seconds since the start after each step, where nothing but the loss is kept."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    clock, start = [], time.perf_counter()
    for _ in range(STEPS):
        batch = torch.randint(len(images), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), digits[batch]).backward()
        optimizer.step()
        clock.append(time.perf_counter() - start)
    return clock


clocks["plain"] = plain_loop()


def of_one_step(clock: list[float]) -> float:
    """Milliseconds of a step, over the second half of the steps."""
    half = len(clock) // 2
    return 1e3 * (clock[-1] - clock[half]) / (len(clock) - 1 - half)


for name, clock in clocks.items():
    print(
        f"{name}: {of_one_step(clock):.2f} ms a step, {clock[9]:.2f} s for the first "
        f"ten"
    )

# %%
import matplotlib.pyplot as plt

plt.style.use("packprop.examples.gallery")
figure, axes = plt.subplots()
for name, color in (
    ("ordinary", "0.55"),
    ("replayed", "C0"),
    ("compiled", "C2"),
    ("plain", "C1"),
):
    axes.loglog(range(1, STEPS + 1), clocks[name], color=color, label=name)
axes.set(
    title="64 digits a step, with norms and the trace of the GGN",
    xlabel="steps",
    ylabel="seconds since the start",
)
axes.legend()
plt.show()

# %% [markdown]
# The replayed graph is ahead after some dozens of steps. Compiling pays in long runs:
# its seconds come once, and `print(step)` says how many there were. If a graph does not
# pay, packprop keeps ordinary passes; [the guide](../guide/compiled.md) has the
# details.
