"""# How sure is the network? A Laplace approximation

A Laplace approximation turns a trained network into a distribution: a normal one around
its weights, with the inverse of the curvature as covariance.
[laplace-torch](https://github.com/aleximmer/Laplace) has everything for it but the
curvature, which its backends take from other libraries. This page gives it packprop's,
in a few lines, for a model that those libraries refuse.
"""

# %%
from __future__ import annotations

import logging
from copy import deepcopy

import torch
import torch.nn.functional as F
from laplace import Laplace
from laplace.curvature import BackPackGGN, CurvlinopsGGN, GGNInterface
from laplace.utils import Kron
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from packprop import backpack, extend
from packprop.examples import load_digits
from packprop.extensions import KFLR, BatchJacobian, DiagGGNExact
from packprop.types import Extension

logging.disable(
    logging.WARNING
)  # of laplace-torch, about backends that are not installed
torch.manual_seed(0)
images, digits = load_digits()
order = torch.randperm(len(images))
train, held_out, test = order[:120], order[120:240], order[240:840]
loader = DataLoader(TensorDataset(images[train], digits[train]), batch_size=60)

# %% [markdown]
# There are few training samples, so the network has something to be unsure about. The
# model is ordinary: rows of the image as a sequence, a learned position, layer
# normalisation, a skip connection.


# %%
class Rows(nn.Module):
    """Reads an image row by row, `[n, 1, 8, 8] -> [n, 10]`."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.mix = nn.Linear(8, width), nn.Linear(8, 8)
        self.position = nn.Parameter(0.1 * torch.randn(8 * width))
        self.norm, self.grow = nn.LayerNorm(width), nn.Linear(width, width)
        self.head = nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x.squeeze(1)) + self.position.view(8, -1))
        x = x + self.mix(x.mT).mT
        x = x + F.gelu(self.grow(self.norm(x)))
        return self.head(x.flatten(1))


model = Rows()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for _ in range(150):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
model.eval()
with torch.no_grad():
    print(
        f"accuracy "
        f"{(model(images[test]).argmax(1) == digits[test]).double().mean():.3f}"
    )

# %% [markdown]
# ## The backend
#
# laplace-torch needs the loss and the curvature of a batch, as a vector of all entries
# or as Kronecker factors for each parameter, and Jacobians of the outputs.


# %%
class Packprop(GGNInterface):
    """Curvature for laplace-torch, of any model whose samples are apart."""

    def passed(self, x: Tensor, y: Tensor, extension: Extension) -> tuple[Tensor, list]:
        """The loss of a batch, and what an extension saves on the parameters."""
        loss = extend(self.lossfunc)(extend(self.model)(x), y)
        with backpack(extension):
            loss.backward()
        return self.factor * loss.detach(), [
            getattr(p, extension.savefield) for p in self.params
        ]

    def diag(self, x: Tensor, y: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        """The diagonal of the GGN `[P]`."""
        loss, diagonals = self.passed(x, y, DiagGGNExact())
        return loss, self.factor * torch.cat([each.flatten() for each in diagonals])

    def kron(
        self, x: Tensor, y: Tensor, N: int, **options: object
    ) -> tuple[Tensor, Kron]:
        """Kronecker factors; those of inputs are means that add up over N samples."""
        loss, factors = self.passed(x, y, KFLR())
        scaled = [[each[0], *(a * len(y) / N for a in each[1:])] for each in factors]
        return loss, self.factor * Kron(scaled)

    def jacobians(
        self, x: Tensor, enable_backprop: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Jacobians `[n, c, P]` and outputs `[n, c]`."""
        outputs = extend(self.model)(x)
        with backpack(BatchJacobian()):
            outputs.sum().backward()
        flat = [p.jac_batch.flatten(2) for p in self.params]
        return torch.cat(flat, 2), outputs.detach()


# %% [markdown]
# This block shows what laplace-torch's own backends do with this model. It then checks
# packprop's numbers: the diagonal beside the diagonal of the whole GGN, which
# `torch.func` makes from Jacobians.

# %%
for peer, structure in (
    (BackPackGGN, "diag"),
    (BackPackGGN, "kron"),
    (CurvlinopsGGN, "kron"),
):
    try:
        Laplace(deepcopy(model), "classification", "all", structure, backend=peer).fit(
            loader
        )
        print(f"{peer.__name__}, {structure}: a number")
    except Exception as error:  # each has errors of its own
        print(
            f"{peer.__name__}, {structure}: {type(error).__name__}: {str(error)[:70]}"
        )

backend = Packprop(model, "classification")
x, y = next(iter(loader))
jacobians, outputs = backend.jacobians(x)
expected, _ = GGNInterface.jacobians(backend, x)
torch.testing.assert_close(jacobians, expected, rtol=1e-3, atol=1e-4)
shares = outputs.softmax(1)
spread = torch.diag_embed(shares) - shares[:, :, None] * shares[:, None, :]
whole = torch.einsum("ncp,nck,nkp->p", jacobians, spread, jacobians)
_, diagonal = backend.diag(x, y)
torch.testing.assert_close(diagonal, whole, rtol=1e-3, atol=1e-4)

plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
peer = BackPackGGN(deepcopy(plain), "classification")
_, mine = Packprop(plain, "classification").kron(x, y, 120)
pairs = zip(mine.kfacs, peer.kron(x, y, 120)[1].kfacs, strict=True)
for ours, theirs in pairs:
    for factor, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(factor, expected, rtol=1e-4, atol=1e-4)
print("Packprop: Kronecker factors of a plain network are those of BackPACK")
print(
    f"Packprop: Jacobians and diagonal of {len(diagonal)} parameters are those of "
    f"torch.func"
)

# %% [markdown]
# ## Calibration
#
# A network is calibrated if it is right as often as it is sure. The one hyperparameter
# is the precision of the prior. The page chooses it on 120 held-out digits, by their
# log loss.


# %%
def predicted(approximation: object, chosen: Tensor) -> Tensor:
    """Probabilities of digits, averaged over the approximation `[n, 10]`."""
    return approximation(images[chosen], link_approx="probit").detach()


def log_loss(probabilities: Tensor, chosen: Tensor) -> float:
    """The mean of minus the log of the probability of the right digit."""
    return float(
        -probabilities.gather(1, digits[chosen][:, None]).clamp(min=1e-12).log().mean()
    )


def reliability(
    probabilities: Tensor, chosen: Tensor
) -> tuple[list[float], list[float], float]:
    """Confidence and accuracy of tenths of the samples, and their mean distance."""
    sure, said = probabilities.max(1)
    right = (said == digits[chosen]).float()
    bins = [
        (float(sure[part].mean()), float(right[part].mean()))
        for part in sure.argsort().chunk(10)
    ]
    return (
        [a for a, _ in bins],
        [b for _, b in bins],
        sum(abs(a - b) for a, b in bins) / len(bins),
    )


with torch.no_grad():
    found = {"the network itself": model(images[test]).softmax(1)}
for subset, structure in (("all", "diag"), ("all", "kron"), ("last_layer", "kron")):
    approximation = Laplace(
        model, "classification", subset, structure, backend=Packprop
    )
    approximation.fit(loader)
    losses = {}
    for precision in (1.0, 10.0, 100.0, 1000.0):
        approximation.prior_precision = torch.tensor([precision])
        losses[precision] = log_loss(predicted(approximation, held_out), held_out)
    approximation.prior_precision = torch.tensor([min(losses, key=losses.__getitem__)])
    name = f"{'all layers' if subset == 'all' else 'last layer'}, {structure}"
    found[name] = predicted(approximation, test)

curves = {name: reliability(each, test) for name, each in found.items()}
for name, each in found.items():
    right = (each.argmax(1) == digits[test]).double().mean()
    print(
        f"{name:>20s}: accuracy {right:.3f}, log loss {log_loss(each, test):.3f}, off "
        f"by {curves[name][2]:.3f}"
    )
itself, *others = (log_loss(each, test) for each in found.values())
assert min(others) < itself

# %%
import matplotlib.pyplot as plt

plt.style.use("packprop.examples.gallery")
figure, axes = plt.subplots()
axes.plot([0, 1], [0, 1], color="0.8", linewidth=1)
for (name, (sure, right, _)), color in zip(
    curves.items(), ("0.55", "C0", "C2", "C1"), strict=True
):
    axes.plot(sure, right, marker="o", markersize=4, color=color, label=name)
axes.set(
    title=f"{len(test)} digits in tenths, from the least to the most sure",
    xlabel="mean confidence",
    ylabel="share told right",
    xlim=(0.2, 1.01),
    ylim=(0.2, 1.01),
)
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# Below the grey line the network is surer than it is right. The approximations hardly
# change the answers; they change the confidence. This is one training of one small
# network, so it says little about the best structure for others. And an approximation
# does not repair a network that is wrong.
