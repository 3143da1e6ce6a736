"""A program for every seed: a model, data and a loss, as text that runs by itself."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from tests.hunt import layouts, positions  # noqa: F401  # registers the blocks
from tests.hunt.losses import LossText, write_loss
from tests.hunt.mixing import mix
from tests.hunt.writing import Form, Writer, extend_by_one

HEADER = '''\
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

torch.set_default_dtype(torch.float64)


class Squash(nn.Module):
    def forward(self, weight):
        return weight * torch.sigmoid(weight)


def parametrized(layer, name, parametrization):
    register_parametrization(layer, name, parametrization)
    return layer


def keep_one(target):
    """At least one target of the batch is not ignored."""
    target.view(-1)[0] = 1
    return target
'''


@dataclass(frozen=True)
class Program:
    """A program, and what is known about how it was written.

    Attributes:
        seed: what it was written from.
        text: a module that defines ``Model``, ``data``, ``loss`` and ``share``; ``N`` samples, on
            ``INPUT_AXIS`` of the inputs; ``POSITIONS_FIRST`` if positions lead the loss input.
        tags: names of the blocks and of the loss, for counting.
        functional: losses are functions, so the program runs inside ``packprop.record()``.
        regularised: the loss contains a function of the parameters alone.
    """

    seed: int
    text: str
    tags: tuple[str, ...]
    functional: bool
    regularised: bool


def write(seed: int) -> Program:
    """The program of a seed."""
    w = Writer(random.Random(seed))
    samples = w.choose(2, 2, 3, 3, 4, 1) if w.chance(0.5) else 3
    given, form, axis = _start(w)
    steps, planted = w.choose(1, 2, 3, 3, 4, 5), ""
    mixed_at = w.rng.randrange(steps) if w.chance(0.15) and samples > 1 else None
    kept_at = w.rng.randrange(steps) if w.chance(0.2) else None
    for step in range(steps):
        form = extend_by_one(w, form)
        if step == mixed_at and not form.leading and form.kind == "first":
            w.set("h.transpose(0, 1)")
            form = Form("seq", form.dims)
        if step == mixed_at and form.leading:
            planted = mix(w, form)
        if step == kept_at:
            w.line("self.kept = h")
    form = _finish(w, form)
    bad_loss = not planted and samples > 1 and w.chance(0.06)
    loss = write_loss(w, form, mixing=bad_loss)
    if planted:
        w.tags.append(f"mixing: {planted}")
    if bad_loss:
        w.tags.append("loss that mixes")
    regularised = "two losses" not in w.tags and w.chance(0.05)
    text = _module(w, seed, samples, given, axis, form, loss, regularised)
    functional = "F." in re.sub(r"[^\n]*def share[\s\S]*", "", text.split("def loss")[1])
    return Program(seed, text, tuple(dict.fromkeys(w.tags)), functional, regularised)


def _start(w: Writer) -> tuple[str, Form, int]:
    """The inputs, what the first line makes of them, and the axis of the inputs that holds the samples."""
    d, t = w.size(), w.size()
    kind = w.choose("vec", "vec", "seq", "seq", "first", "image", "map", "tokens", "ids", "bag")
    if kind == "first":
        t = 1 if w.chance(0.2) else t
        w.set("x")
        return f"torch.randn({t}, N, {d})", Form("first", (t, d)), 1
    if kind in ("tokens", "ids", "bag"):
        shape = "N" if kind == "ids" else f"N, {t}"
        options = w.choose("", ", padding_idx=1", "") if kind != "bag" else w.choose("", ", mode='sum'")
        made = w.module(f"nn.Embedding{'Bag' if kind == 'bag' else ''}(5, {d}{options})")
        raw = kind != "bag" and w.chance(0.3)
        w.set(w.choose(f"{made}.weight[x]", f"F.embedding(x, {made}.weight)") if raw else f"{made}(x)")
        return (
            f"torch.randint(5, ({shape},))",
            Form("seq", (t, d)) if kind == "tokens" else Form("vec", (d,)),
            0,
        )
    dims = {"vec": (d,), "seq": (t, d), "map": (d, t), "image": (w.choose(1, 2), 3, w.choose(2, 3))}[kind]
    w.set("x")
    return f"torch.randn(N, {', '.join(map(str, dims))})", Form(kind, dims), 0


def _finish(w: Writer, form: Form) -> Form:
    """Towards a loss input: few features, and sometimes another place for positions."""
    if form.kind == "image":
        c, a, b = form.dims
        w.set("h.flatten(2)")
        form = Form("map", (c, a * b))
    if form.kind == "map" and form.dims[1] > 4 and w.chance(0.7):
        w.set("h.mean(2)")
        form = Form("vec", form.dims[:1])
    classes = w.choose(2, 3)
    if form.kind == "map":
        w.set(f"{w.module(f'nn.Conv1d({form.dims[0]}, {classes}, 1)')}(h)")
        return Form("map", (classes, form.dims[1]))
    w.set(f"{w.module(f'nn.Linear({form.last}, {classes})')}(h)")
    form = form.with_last(classes)
    t = form.dims[0]
    if form.kind == "seq":
        way = w.choose("map", "fold", "seq", "mean", "major")
        moves = {
            "map": ("h.transpose(1, 2)", Form("map", (classes, t))),
            "fold": (f"h.reshape(-1, {classes})", Form("fold", (t, classes))),
            "mean": ("h.mean(1)", Form("vec", (classes,))),
            "major": ("h.transpose(0, 1).flatten(0, 1)", Form("major", (t, classes))),
        }
        if way in moves:
            w.set(moves[way][0])
            return moves[way][1]
    if form.kind == "first" and w.chance(0.6):
        w.set(w.choose("h.flatten(0, 1)", f"h.reshape(-1, {classes})"))
        return Form("major", form.dims)
    return form


def _module(
    w: Writer, seed: int, samples: int, given: str, axis: int, form: Form, loss: LossText, regularised: bool
) -> str:
    """All parts, one below the other."""

    def indented(lines: list[str], depth: int) -> str:
        return "\n".join(f"{'    ' * depth}{line}" if line else "" for line in lines)

    whole = loss.whole
    if regularised:
        whole += " + 0.1 * sum((p ** 2).sum() for p in model.parameters())"
    shown = {"fold": "(n, -1)", "major": "(-1, n)"}.get(form.kind)
    if shown:  # whose rows they are is seen in front of the loss
        w.line(f"h = h.unflatten(0, {shown}).flatten(0, 1)")
    targets = "".join(f"{target}, " for target in loss.targets)
    methods = indented(w.methods, 1)
    return f"""# Program {seed}
{HEADER}

N, INPUT_AXIS, POSITIONS_FIRST = {samples}, {axis}, {form.kind in ("first", "major")}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
{indented(w.init, 2)}

    def forward(self, x):
        n = x.shape[{axis}]
{indented(w.body, 2)}
        return {"link(h)" if loss.prepare else "h"}

{methods}

def link(h):
    return {loss.prepare or "h"}


def data():
    return {given}, ({targets})


{indented(loss.setup, 0)}


def loss(f, y, model):
    return {whole}


def share(f, y, Y):
    return {loss.share}
"""
