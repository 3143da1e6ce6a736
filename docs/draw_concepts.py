"""Draw the pictures of docs/concepts.md into docs/images: ``python docs/draw_concepts.py``.

What can be computed is computed: the matrices of the structures, the bytes of the plans and the moments of the
batches are those of small passes. Needs matplotlib: ``pip install '.[report]'``.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

import packprop
from packprop import extensions

DOCS = Path(__file__).resolve().parent
BLUE, ORANGE, GREEN, PINK, SKY, RED, BLACK = (
    f"#{colour}" for colour in ("0072B2", "E69F00", "009E73", "CC79A7", "56B4E9", "D55E00", "000000")
)
MEBIBYTE = 2**20


def box(ax: Axes, x: float, y: float, text: str, colour: str, width: float = 1.5, height: float = 0.62) -> None:
    """A box with a text, centred on a point."""
    patch = matplotlib.patches.FancyBboxPatch(
        (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0.04", fc="white", ec=colour, lw=1.8
    )
    ax.add_patch(patch)
    ax.text(x, y, text, ha="center", va="center", fontsize=10)


def arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, style: str = "-"
) -> None:
    """An arrow from one point to another."""
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.6, "ls": style})


def canvas(width: float, height: float, size: tuple[float, float]) -> tuple[Figure, Axes]:
    """An empty drawing of these coordinates."""
    figure, ax = plt.subplots(figsize=size)
    ax.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    ax.axis("off")
    return figure, ax


def uses() -> Figure:
    """The graph of a small network, its uses and its leaves."""
    figure, ax = canvas(12.2, 4.0, (9, 3.1))
    line = 2.2
    places = [(0.8, "x", BLACK), (3.2, "F.linear", BLUE), (5.6, "tanh", BLACK), (8.0, "F.linear", BLUE)]
    for x, text, colour in [*places, (10.9, "cross entropy", GREEN)]:
        box(ax, x, line, text, colour, 1.9 if x > 10 else 1.4)
    for left, right in ((1.5, 2.5), (3.9, 4.9), (6.3, 7.3), (8.7, 9.95)):
        arrow(ax, (left, line), (right, line), BLACK)
    for x, name in ((3.2, "hidden"), (8.0, "head")):
        for shift, kind in ((-0.85, "weight"), (0.85, "bias")):
            box(ax, x + shift, 0.5, f"{name}\n{kind}", ORANGE, 1.3, 0.8)
            arrow(ax, (x + shift, 0.92), (x + shift / 3, line - 0.36), ORANGE)
        ax.text(x, line + 0.95, "use: inputs are kept here", ha="center", color=BLUE)
        ax.plot([x, x], [line + 0.36, line + 0.78], color=BLUE, lw=1.2)
    ax.text(10.9, line + 0.95, "loss: seeds enter\nat its input", ha="center", color=GREEN)
    ax.plot([10.9, 10.9], [line + 0.36, line + 0.78], color=GREEN, lw=1.2)
    ax.set_title("What the forward pass leaves on the graph")
    return figure


def sweeps() -> Figure:
    """Seeds at the loss, and what they become at the uses."""
    figure, ax = canvas(12.2, 4.7, (9, 3.6))
    for x, text, colour in (
        (2.2, "use: hidden", BLUE),
        (6.2, "use: head", BLUE),
        (10.6, "cross entropy", GREEN),
    ):
        box(ax, x, 4.2, text, colour, 2.0)
    rows = (
        (2.9, "the gradient", "1 column", BLACK, "-", "[1, n, 8]", "[1, n, 3]"),
        (1.8, "root of the loss's Hessian", "2 columns for 3 classes", RED, "-", "[2, n, 8]", "[2, n, 3]"),
        (0.7, "random root (Monte Carlo)", "m columns", PINK, "--", "[m, n, 8]", "[m, n, 3]"),
    )
    for y, seed, columns, colour, style, at_hidden, at_head in rows:
        arrow(ax, (9.0, y), (7.2, y), colour, style)
        arrow(ax, (5.2, y), (3.2, y), colour, style)
        ax.text(10.6, y, f"{seed}\n{columns}", ha="center", va="center", color=colour, fontsize=10)
        for x, shape in ((2.2, at_hidden), (6.2, at_head)):
            ax.text(x, y, f"cotangent {shape}", ha="center", va="center", fontsize=10)
    ax.set_title("A sweep carries a seed back; what arrives at a use is a cotangent [v, n, o]")
    return figure


def structures() -> Figure:
    """An outer product: what is kept, and what is formed only where it must be."""
    torch.manual_seed(0)
    inputs, cotangents = torch.randn(6, 8), torch.randn(6, 5)
    rows = torch.einsum("no,ni->noi", cotangents, inputs)
    norms = inputs.square().sum(1) * cotangents.square().sum(1)
    torch.testing.assert_close(norms, rows.square().sum((1, 2)))
    figure, axes = plt.subplots(1, 4, figsize=(9, 3.4), width_ratios=(8, 5, 9, 2.2))
    titles = (
        "inputs\n[n, i] = [6, 8]",
        "cotangents\n[n, o] = [6, 5]",
        "rows, if formed\n[n, o, i] = [6, 5, 8]",
        "norms\n[n]",
    )
    shown = (inputs, cotangents, rows.flatten(1), norms[:, None])
    for ax, title, values in zip(axes, titles, shown, strict=True):
        largest = float(values.abs().max())
        ax.imshow(values, cmap="PuOr", vmin=-largest, vmax=largest, aspect="auto")
        ax.set_title(title, fontsize=10)
        ax.set_xticks([])
        ax.set_yticks(range(6), [f"sample {n}" for n in range(6)] if ax is axes[0] else [""] * 6)
    figure.suptitle(
        "A linear use as a structure: 78 numbers hold what 240 would say", x=0.01, ha="left", fontsize=12
    )
    return figure


def plans() -> Figure:
    """What the peak of a step is made of, under budgets."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64))
    batch = (torch.empty(128, 256), torch.zeros(128, dtype=torch.long))
    asked, loss = [extensions.DiagGGNExact()], nn.CrossEntropyLoss()
    free = packprop.plan(model, loss, batch, asked)
    budgets = [None, int(free.peak * 0.75), int(free.peak * 0.55)]
    found = [packprop.plan(model, loss, batch, asked, memory=budget) for budget in budgets]
    figure, ax = plt.subplots(figsize=(8, 3.6))
    kinds = list(dict.fromkeys(kind for plan in found for kind in plan.parts))
    colours = [BLUE, ORANGE, GREEN, PINK, SKY, RED, BLACK, "#999999", "#666666"]
    for place, plan in enumerate(found):
        left = 0.0
        for kind, colour in zip(kinds, colours, strict=False):
            size = plan.parts.get(kind, 0) / MEBIBYTE
            ax.barh(place, size, left=left, color=colour, label=kind if place == 0 else None, height=0.55)
            left += size
        if plan.memory is not None:
            ax.plot([plan.memory / MEBIBYTE] * 2, [place - 0.4, place + 0.4], color=BLACK, lw=2.4)
            ax.text(plan.memory / MEBIBYTE + 0.3, place, "budget", va="center")
    labels = ["no budget" if b is None else f"budget {b / MEBIBYTE:.0f} MiB" for b in budgets]
    ax.set_yticks(range(len(found)), labels)
    ax.invert_yaxis()
    ax.set_xlabel("MiB alive at the peak of the step (from a dry run)")
    ax.legend(loc="upper center", bbox_to_anchor=(0.45, -0.22), ncols=len(kinds), fontsize=9)
    ax.set_title("The same step in chunks that fit: the exact GGN diagonal of three layers")
    return figure


def merging() -> Figure:
    """Moments of batches, and of all samples."""
    torch.manual_seed(0)
    batches = [
        torch.randn(n) * spread + shift for n, spread, shift in ((40, 0.5, -1), (80, 1.0, 0.5), (20, 0.3, 1.6))
    ]
    count, mean, moment = 0, torch.zeros(()), torch.zeros(())
    for batch in batches:
        n, step = len(batch), batch.mean() - mean
        moment = moment + (batch - batch.mean()).square().sum() + step**2 * count * n / (count + n)
        mean, count = mean + step * n / (count + n), count + n
    everything = torch.cat(batches)
    torch.testing.assert_close(mean, everything.mean())
    torch.testing.assert_close(moment / count, everything.var(correction=0))
    figure, ax = plt.subplots(figsize=(8, 3.6))
    for place, (batch, colour) in enumerate(zip(batches, (BLUE, ORANGE, GREEN), strict=True)):
        ax.plot(
            batch, torch.full_like(batch, place) + 0.16 * torch.rand(len(batch)), ".", color=colour, alpha=0.6
        )
        ax.errorbar(batch.mean(), place - 0.15, xerr=batch.std(correction=0), fmt="o", color=colour, capsize=4)
    ax.plot(everything, 3 + 0.16 * torch.rand(len(everything)), ".", color="#999999", alpha=0.6)
    ax.errorbar(mean, 2.85, xerr=(moment / count).sqrt(), fmt="o", color=BLACK, capsize=4)
    names = [f"batch {i + 1}: n = {len(batch)}" for i, batch in enumerate(batches)]
    ax.set_yticks(range(4), [*names, f"merged: n = {count}"])
    ax.invert_yaxis()
    ax.set_xlabel("one entry of samples' gradients; bars: mean and standard deviation")
    ax.set_title("(n, mean, M2) of batches merge into those of all samples, exactly")
    return figure


PICTURES = {"uses": uses, "sweeps": sweeps, "structures": structures, "plans": plans, "merging": merging}


def main(folder: Path = DOCS / "images") -> None:
    """Draw all of them."""
    matplotlib.use("agg")
    with plt.style.context("packprop.examples.gallery"), torch.random.fork_rng():
        for name, draw in PICTURES.items():
            draw().savefig(folder / f"concept-{name}.png")
    plt.close("all")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
