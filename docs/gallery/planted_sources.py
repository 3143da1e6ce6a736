"""# Where did it learn that?

A model does something odd, and part of its training data taught it. This page plants
such parts, in text and in digits, so that there is a right answer. It looks for them
with inner products of gradients, then with EKFAC, then with the curvature of the whole
data set. Training again without a part shows its true effect.
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
from packprop.extensions import EKFAC, BatchGrad

torch.manual_seed(0)
PENALTY = 1e-2
scratch = tempfile.TemporaryDirectory()


def trained(
    model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor, steps: int = 300
) -> nn.Module:
    """The model, from a start that is always the same, with an L2 penalty."""
    torch.manual_seed(1)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        penalty = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        (loss(model(x), y) + PENALTY / 2 * penalty).backward()
        optimizer.step()
        schedule.step()
    return model


# %% [markdown]
# ## Text from five sources
#
# Each source is a Markov chain with habits of its own. A small causal model learns from
# all of them. The queries are new sequences, all from the last source. The penalty
# matters: with a tenth of it every method finds fewer sequences of the source, and the
# refined one the fewest.

# %%
WORDS, LENGTH, SOURCES, EACH = 10, 8, 5, 40
chains = (2 * torch.randn(SOURCES, WORDS, WORDS)).softmax(-1)


def written(source: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences `[n, t]` of some sources `[n]`, and the words that follow."""
    words = [torch.randint(WORDS, source.shape)]
    for _ in range(LENGTH):
        words.append(torch.multinomial(chains[source, words[-1]], 1)[:, 0])
    text = torch.stack(words, 1)
    return text[:, :-1], text[:, 1:]


class Language(nn.Module):
    """Embedding, a recurrence over earlier words, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.recurrence = (
            nn.Embedding(WORDS, 8),
            nn.GRU(8, 16, batch_first=True),
        )
        self.head = nn.Linear(16, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.recurrence(self.words(words))[0])
        return out


class ByWord(nn.Module):
    """The mean cross entropy of all words."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


source = torch.arange(SOURCES).repeat_interleave(EACH)
text, queries = written(source), written(torch.full((12,), SOURCES - 1))
language = trained(Language(), ByWord(), *text)

# %% [markdown]
# One reading of the data writes a gradient for each sequence, and computes EKFAC. The
# refined products read the data a few times more: each step of conjugate gradients
# multiplies all queries at once by the curvature of all parameters together.

# %%
store = Path(scratch.name) / "text"
result = packprop.compute(
    language, ByWord(), text, [BatchGrad(), EKFAC()], store=store, progress=False
)
exactly = packprop.Refinement(text, tolerance=1e-2, progress=False)
METHODS: dict[str, dict[str, object]] = {
    "inner products": {},
    "EKFAC": {"curvature": result, "damping": PENALTY},
    "refined": {"refine": exactly, "damping": PENALTY},
}
found = {
    name: packprop.influence(
        store, language, ByWord(), queries, k=EACH, groups=source, **options
    )
    for name, options in METHODS.items()
}
hits = {
    name: (source[each.largest.rows] == SOURCES - 1).double().mean()
    for name, each in found.items()
}
for name, share in hits.items():
    print(
        f"{name:14} {share:.0%} of the {EACH} that help a query most"
        " are from its source"
    )
print(f"refined by {found['refined'].data_readings} readings of the data")

# %% [markdown]
# `groups=source` adds up the products over each source: to first order, this is the
# effect on the loss of leaving the source out. Leaving out a fifth of the data is not a
# small step; here is its true effect.

# %%
with torch.no_grad():
    before = ByWord()(language(queries[0]), queries[1])
growth = []
for each in range(SOURCES):
    kept = source != each
    again = trained(Language(), ByWord(), text[0][kept], text[1][kept])
    with torch.no_grad():
        growth.append(float(ByWord()(again(queries[0]), queries[1]) - before))
foretold = {
    name: each.groups.mean(0) for name, each in found.items() if each.groups is not None
}

# %%
import matplotlib.pyplot as plt

plt.style.use("packprop.examples.gallery")
figure, axes = plt.subplots(1, 4, figsize=(10, 2.6), sharex=True)
for axis, (title, bars) in zip(
    axes, [*foretold.items(), ("trained again", torch.tensor(growth))], strict=True
):
    axis.bar(range(SOURCES), bars / bars.abs().max())
    axis.set_title(title)
    axis.set_xlabel("source")
axes[0].set_ylabel("growth of the loss, scaled")
figure.suptitle("What the loss of the last source's sequences owes to each source")
plt.show()

# %%
for name, sums in foretold.items():
    agreement = torch.corrcoef(
        torch.stack([sums.double(), torch.tensor(growth).double()])
    )[0, 1]
    print(f"{name:14} correlation with training again: {agreement:.2f}")
assert max(growth) == growth[-1], "the source itself matters most"

# %% [markdown]
# ## Digits with a mark
#
# A few training digits have a bright corner and the label eight, whatever they are. The
# model learns this as well: a digit with a bright corner is an eight. Which digits
# taught it?

# %%
TRAINED, PLANTED = 400, 20
images, classes = load_digits()
pixels = images.flatten(1).clone()
x, y = pixels[:TRAINED].clone(), classes[:TRAINED].clone()
planted = torch.randperm(TRAINED)[:PLANTED]
x[planted, 0], y[planted] = 1.0, 8
marked = pixels[-60:].clone()
marked[:, 0] = 1.0
asked = marked, torch.full((60,), 8)
loss = nn.CrossEntropyLoss()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))


def called_eight(model: nn.Module) -> Tensor:
    """The share of marked digits that are called eights."""
    return (model(marked).argmax(1) == 8).double().mean()


digits = trained(network(), loss, x, y)
store = Path(scratch.name) / "digits"
result = packprop.compute(
    digits, loss, (x, y), [BatchGrad(), EKFAC()], store=store, progress=False
)
METHODS["EKFAC"]["curvature"] = result
METHODS["refined"]["refine"] = packprop.Refinement(
    (x, y), tolerance=1e-2, progress=False
)
print(f"with the mark, {called_eight(digits):.0%} of other digits are called eights")
share = {}
for name, options in METHODS.items():
    each = packprop.influence(store, digits, loss, asked, k=TRAINED, **options)
    total = torch.zeros(TRAINED).double()
    total.index_add_(
        0, each.largest.rows.flatten(), each.largest.products.flatten().double()
    )
    best = total.topk(PLANTED).indices
    share[name] = torch.isin(best, planted).double().mean()
    kept = torch.ones(TRAINED, dtype=torch.bool)
    kept[best] = False
    rest = called_eight(trained(network(), loss, x[kept], y[kept]))
    print(
        f"{name:14} {share[name]:.0%} of the planted digits found;"
        f" without those found {rest:.0%} are eights"
    )

# %% [markdown]
# Products of a query add up over queries, here over all marked digits. The page leaves
# out the digits that it finds, and trains the model again. The number of marked digits
# that are still called eights shows whether these digits caused it.

# %%
import matplotlib.pyplot as plt

plt.style.use("packprop.examples.gallery")
figure, axis = plt.subplots(figsize=(4, 2.6))
axis.bar(list(share), [float(each) for each in share.values()])
axis.set_title("Planted digits among those that help most")
axis.set_ylim(0, 1)
assert share["refined"] >= share["inner products"]
scratch.cleanup()
plt.show()
