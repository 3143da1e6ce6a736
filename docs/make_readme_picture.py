"""Draw docs/images/profile.png from a run of the built-in example.

Needs matplotlib and scikit-learn: ``pip install '.[examples,report]'``, then
``python docs/make_readme_picture.py``.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

import packprop
from packprop.examples import digits

BLUE, ORANGE, GREY = "#2a5d9f", "#d9772b", "#555555"


def draw(found: packprop.Profile, path: Path) -> None:
    """Three panels over the same layers: gradients of samples, GGN traces, Kronecker spectra."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, panels = plt.subplots(1, 3, figsize=(11, 4.2), sharey=True, layout="constrained")
    names = [layer.name for layer in found.layers]
    for panel in panels:
        panel.set_xscale("log")
        panel.grid(axis="x", color="#e5e5e5")
        panel.set_axisbelow(True)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    _gradients(panels[0], found, names)
    _traces(panels[1], found)
    _spectra(panels[2], found)
    figure.suptitle(
        f"{found.settings['model']} on {found.samples} handwritten digits, "
        f"loss {found.loss:.3f}, {found.total.parameters} parameters",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)


def _gradients(panel: Axes, found: packprop.Profile, names: list[str]) -> None:
    for place, layer in enumerate(found.layers):
        norms = found.tensors[f"sample_gradient_norm/{names[place]}"]
        levels = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=norms.dtype)
        low, left, middle, right, high = norms.quantile(levels).tolist()
        panel.plot([low, high], [place, place], color=BLUE, linewidth=1)
        panel.plot([left, right], [place, place], color=BLUE, linewidth=6, alpha=0.5)
        panel.plot(middle, place, "|", color=BLUE, markersize=10, markeredgewidth=2)
        panel.plot(layer.gradient_norm, place, "o", color=ORANGE, markersize=5)
    panel.plot([], [], color=BLUE, linewidth=1, label="samples: 5 to 95 %")
    panel.plot([], [], color=BLUE, linewidth=6, alpha=0.5, label="samples: 25 to 75 %, median")
    panel.plot([], [], "o", color=ORANGE, markersize=5, label="mean gradient")
    panel.set_title("Gradient norm")
    _legend(panel)


def _traces(panel: Axes, found: packprop.Profile) -> None:
    places = range(len(found.layers))
    exact = [layer.ggn_trace_exact for layer in found.layers]
    drawn = [layer.ggn_trace_monte_carlo for layer in found.layers]
    panel.plot(drawn, places, "o", color=ORANGE, markersize=5, label="Monte Carlo, one draw")
    panel.plot(exact, places, "|", color=BLUE, markersize=12, markeredgewidth=2, label="exact")
    panel.set_title("Trace of the GGN")
    _legend(panel)


def _spectra(panel: Axes, found: packprop.Profile) -> None:
    first = True
    for place, layer in enumerate(found.layers):
        for side, color, shift in (("A", GREY, -0.2), ("B", BLUE, 0.2)):
            values = found.tensors.get(f"kfac_eigenvalues/{layer.name}.weight/{side}")
            if values is None:
                continue
            spectrum = layer.factors[f"weight.{side}"]
            kept = values[-spectrum.rank :] / values[-1]
            panel.plot(kept, [place + shift] * len(kept), "|", color=color, markersize=5)
            if first:
                label = {"A": "A, of inputs", "B": "B, of signals"}[side]
                panel.plot([], [], "|", color=color, markersize=5, label=label)
        first = False
    panel.set_title("Kronecker factors: eigenvalues / largest")
    _legend(panel)


def _legend(panel: Axes) -> None:
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False, fontsize=8)


if __name__ == "__main__":
    torch.set_num_threads(1)
    draw(packprop.profile(*digits()), Path(__file__).parent / "images" / "profile.png")
