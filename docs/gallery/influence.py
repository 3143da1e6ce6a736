"""# Which training digits made it wrong?

A classifier reads a digit wrongly. Some of its training digits pulled it there, others
pulled the other way. To first order, inner products of gradients tell them apart, with
the inverse of the curvature in between. This page finds these digits, and trains again
without them to check.
"""

# %%
from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop.examples import load_digits
from packprop.extensions import EKFAC, BatchGrad, Projected, SqrtGGNExact

torch.manual_seed(0)
TRAINED, RIDGE = 300, 1e-2
images, digits = load_digits()
pixels = torch.cat([images.flatten(1), torch.ones(len(images), 1)], 1).double()
x, y = pixels[:TRAINED], digits[:TRAINED]

# %% [markdown]
# The model is a multinomial logistic regression with an L2 penalty: one matrix, whose
# last column goes with an input of ones. Its loss is convex, so it has one minimum, and
# a new training gives the same result. Newton's method, with the Hessian at the minimum
# on all digits, finds it in double precision, for many choices of training digits side
# by side.

# %%
model = nn.Linear(65, 10, bias=False).double()
loss_function = nn.CrossEntropyLoss()
nn.init.zeros_(model.weight)


def slopes(weights: Tensor, counted: Tensor) -> Tensor:
    """Gradients of objectives that count each digit so often: `[m, 10, 65]`."""
    errors = (x @ weights.mT).softmax(-1) - F.one_hot(y, 10)
    return (errors * counted[..., None] / TRAINED).mT @ x + RIDGE * weights


def curvature_of(weight: Tensor) -> Tensor:
    """Hessian of the mean cross entropy, `[650, 650]`."""
    chances = (x @ weight.mT).softmax(1)
    outputs = torch.diag_embed(chances) - chances[:, :, None] * chances[:, None]
    return torch.einsum("nab,ni,nj->aibj", outputs, x, x).reshape(650, 650) / TRAINED


everyone, penalty = torch.ones(1, TRAINED).double(), RIDGE * torch.eye(650).double()
weights = torch.zeros(1, 10, 65).double()
for _ in range(12):
    step = torch.linalg.solve(
        curvature_of(weights[0]) + penalty, slopes(weights, everyone).flatten()
    )
    weights = weights - step.view_as(weights)
assert slopes(weights, everyone).norm() < 1e-12
with torch.no_grad():
    model.weight.copy_(weights[0])

wrong = (
    torch.nonzero(model(pixels[TRAINED:]).argmax(1) != digits[TRAINED:]).flatten()
    + TRAINED
)
print(f"{len(wrong)} of {len(pixels) - TRAINED} other digits are read wrongly")
asked = int(wrong[0])
query = pixels[asked : asked + 1], digits[asked : asked + 1]
taken_for = int(model(query[0]).argmax())
print(f"one of them is a {int(query[1])}, taken for a {taken_for}")

# %% [markdown]
# ## The digits that help, and those that harm
#
# One pass over the training digits writes a gradient for each of them to disk, and
# returns the curvature. The penalty adds `RIDGE` to the diagonal of the curvature, so
# `RIDGE` is the damping.

# %%
scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)
result = packprop.compute(
    model,
    loss_function,
    (x, y),
    [BatchGrad(), EKFAC(fisher="exact")],
    store=folder / "gradients",
    progress=False,
)
found = packprop.influence(
    folder / "gradients",
    model,
    loss_function,
    query,
    curvature=result,
    damping=RIDGE,
    k=6,
)
print(found)

# %%
import matplotlib.pyplot as plt

plt.style.use("packprop.examples.gallery")
figure, axes = plt.subplots(2, 7, figsize=(8, 2.9))
sides = {"help most": found.largest, "harm most": found.smallest}
for row, (name, side) in zip(axes, sides.items(), strict=True):
    shown = [asked, *side.identifiers[0].tolist()]
    titles = [
        f"a {int(query[1])}, read as {taken_for}",
        *(f"{int(digits[each])}" for each in shown[1:]),
    ]
    for place, (panel, each, title) in enumerate(zip(row, shown, titles, strict=True)):
        panel.imshow(images[each, 0].numpy(), cmap="gray_r")
        panel.set_title(
            title, loc="center", fontsize=9, color="C5" if not place else "black"
        )
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_visible(False)
    row[1].set_ylabel(name)
figure.suptitle("A wrong digit, and six training digits of either kind")
plt.show()

# %% [markdown]
# The digits that help have the label of the query. The digits that harm have, with one
# exception, the label that the classifier took it for.

# %%
assert [int(digits[each]) for each in found.largest.identifiers[0]].count(
    int(query[1])
) == 6
assert [int(digits[each]) for each in found.smallest.identifiers[0]].count(
    taken_for
) == 5

# %% [markdown]
# ## Is it true?
#
# With the curvature of a mean loss over N digits, a product divided by N predicts the
# growth of the query's loss if you train again without that digit. So the page trains
# again, 300 times, without each in turn.

# %%
left_out = 1 - torch.eye(TRAINED).double()
retrained = weights.repeat(TRAINED, 1, 1)
inverse = torch.linalg.inv(curvature_of(weights[0]) + penalty)
slope = slopes(retrained, left_out).flatten(1)
while slope.norm(dim=1).max() > 1e-11:
    retrained = retrained - (slope @ inverse).view_as(retrained)
    slope = slopes(retrained, left_out).flatten(1)

before = loss_function(model(query[0]), query[1]).detach()
after = F.cross_entropy(
    (query[0] @ retrained.mT).flatten(0, 1), query[1].expand(TRAINED), reduction="none"
)
change = after - before

# %% [markdown]
# The model is small enough for its whole curvature: `S.T @ S`, with the root S that
# `SqrtGGNExact` returns. Here it equals the Hessian. A dense matrix is a block like any
# other, and the products with it are the textbook's.

# %%
root = packprop.compute(model, loss_function, (x, y), [SqrtGGNExact()], progress=False)[
    "sqrt_ggn_exact"
]
columns = root["weight"].flatten(0, 1).flatten(1)
ggn = columns.mT @ columns
torch.testing.assert_close(ggn, curvature_of(weights[0]))


def products(store: str, **options: object) -> Tensor:
    """Inner products of all training digits with the query, in their order."""
    every = packprop.influence(
        folder / store, model, loss_function, query, k=TRAINED, **options
    ).largest
    return (
        torch.empty(TRAINED)
        .double()
        .scatter(0, every.identifiers[0], every.products[0].double())
    )


ways = {
    "gradients alone": products("gradients"),
    "EKFAC": products("gradients", curvature=result, damping=RIDGE),
    "whole curvature": products(
        "gradients", curvature={"weight": [ggn]}, damping=RIDGE
    ),
}
errors = model(x).softmax(1) - F.one_hot(y, 10)
gradients = (errors[:, :, None] * x[:, None]).flatten(1).detach()
error = model(query[0]).softmax(1) - F.one_hot(query[1], 10)
wanted = (error[:, :, None] * query[0][:, None]).flatten().detach()
torch.testing.assert_close(ways["whole curvature"], gradients @ inverse @ wanted)


def agreement(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The correlation of the places in order (Spearman's), and of the values."""
    places = torch.stack([a.argsort().argsort(), b.argsort().argsort()]).double()
    return float(torch.corrcoef(places)[0, 1]), float(
        torch.corrcoef(torch.stack([a, b]))[0, 1]
    )


agreements = {name: agreement(way, change) for name, way in ways.items()}
print("correlation with training again:  of ranks  of values")
for name, (of_ranks, of_values) in agreements.items():
    print(f"{name:33s} {of_ranks:8.3f} {of_values:10.3f}")
assert min(agreements["whole curvature"]) > 0.99
assert agreements["EKFAC"][0] > 0.65
assert agreements["EKFAC"][1] > 0.95
assert all(
    a > b
    for a, b in zip(agreements["EKFAC"], agreements["gradients alone"], strict=True)
)

# %%
figure, axes = plt.subplots(1, 3, figsize=(8, 3))
for panel, (name, way) in zip(axes, ways.items(), strict=True):
    panel.scatter(change.numpy(), (way / TRAINED).numpy(), s=8, alpha=0.6)
    if name != "gradients alone":
        panel.axline((0, 0), slope=1, color="0.6", linewidth=0.8)
    panel.set(title=name, xlabel="growth, trained again")
axes[0].set(ylabel="product / N")
figure.suptitle("How much the query's loss grows without each training digit")
plt.show()

# %% [markdown]
# On the line, prediction and truth are equal. With the whole curvature they nearly are;
# the rest is of second order, and largest for the digits that matter most. EKFAC finds
# the digits that matter, and how much they do; do not read from it the order of those
# that hardly matter. Gradients alone have another unit, and rank digits with large
# gradients too high.
#
# ## Gradients that are too large
#
# A store of projections keeps a few hundred numbers for each digit. packprop
# preconditions the query first, then projects it. The products are right in
# expectation. Their noise falls with the square root of the dimension, whatever the
# number of parameters, so projecting pays if you have millions of them.

# %%
asked_for = Projected(BatchGrad(), 256)
packprop.compute(
    model,
    loss_function,
    (x, y),
    [asked_for],
    store=folder / "projected",
    progress=False,
)
projected = products("projected", curvature=result, damping=RIDGE)
_, kept = agreement(projected, ways["EKFAC"])
print(
    f"256 numbers in place of 650: correlation with the products without projection "
    f"{kept:.3f}"
)
assert kept > 0.65
scratch.cleanup()
