"""Losses: what a user writes, and beside it the share of some samples, written out for the oracle.

A loss is a few lines of text about the loss input ``f``, a tuple ``y`` of targets whose leading axes hold the
samples, and ``Y``, the targets of the whole batch: divisors depend on these alone.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from tests.hunt.writing import Form, Writer


@dataclass(frozen=True)
class LossText:
    """A loss in text.

    Attributes:
        setup: lines that make modules and constants.
        whole: expression of the whole loss.
        share: expression of the share of the samples in ``f`` and ``y``.
        targets: expressions of the targets.
        prepare: what the model makes of its output ``h`` at last; losses of probabilities curve in ``h``.
    """

    setup: list[str]
    whole: str
    share: str
    targets: list[str]
    prepare: str = ""


CLASSES = ("cross_entropy", "cross_entropy", "cross_entropy", "probabilities", "nll_loss")
ENTRIES = (
    "mse_loss",
    "mse_loss",
    "binary_cross_entropy_with_logits",
    "binary_cross_entropy_with_logits",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "poisson_nll_loss",
    "soft_margin_loss",
    "kl_div",
    "binary_cross_entropy",
)
FOLLOWING = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
"""Losses whose targets may depend on parameters, too."""
MODULES = {
    "cross_entropy": "CrossEntropyLoss",
    "nll_loss": "NLLLoss",
    "mse_loss": "MSELoss",
    "binary_cross_entropy_with_logits": "BCEWithLogitsLoss",
    "binary_cross_entropy": "BCELoss",
    "l1_loss": "L1Loss",
    "smooth_l1_loss": "SmoothL1Loss",
    "huber_loss": "HuberLoss",
    "poisson_nll_loss": "PoissonNLLLoss",
    "soft_margin_loss": "SoftMarginLoss",
    "kl_div": "KLDivLoss",
}
MIXING = (
    "({l}) ** 2",
    "torch.sqrt({l} + 9)",
    "torch.log({l} + 9)",
    "torch.exp(0.1 * ({l}))",
)
ROWS_MIXING = (
    "torch.logsumexp({rows}, 0)",
    "{rows}.max()",
    "{rows}.std()",
    "({rows} * {rows}.softmax(0)).sum()",
    "(({rows} - {rows}.mean()) ** 2).mean()",
)
ROWS_SEPARATE = (
    ("({rows} * y[1]).sum()", "({rows} * y[1]).sum()"),
    ("({rows} * y[1]).mean()", "({rows} * y[1]).sum() / len(Y[1])"),
    ("(({rows} * y[1]).sum() / y[1].sum())", "({rows} * y[1]).sum() / Y[1].sum()"),
    ("({rows} ** 2 + {rows} * y[1]).mean()", "({rows} ** 2 + {rows} * y[1]).sum() / len(Y[1])"),
    ("torch.sigmoid({rows}).mean()", "torch.sigmoid({rows}).sum() / len(Y[1])"),
    ("{rows}[0::2].sum() + {rows}[1::2].sum()", "{rows}.sum()"),
    ("{rows}.clamp(max=1.0).sum()", "{rows}.clamp(max=1.0).sum()"),
)


def write_loss(w: Writer, form: Form, mixing: bool = False) -> LossText:
    """A random loss of what the model gives."""
    kind = w.rng.choice(ENTRIES if form.kind in ("first", "seq") or w.chance(0.45) else CLASSES)
    made = _Maker(w, form, 0).make(kind, "none" if w.chance(0.25) and form.leading else "", mixing)
    if w.chance(0.12) and kind not in ("nll_loss", "kl_div", "binary_cross_entropy"):
        second = _Maker(w, form, len(made.targets)).make("mse_loss", "", False)
        whole = w.choose(f"{made.whole} + 0.5 * ({second.whole})", f"({made.whole}, 0.5 * ({second.whole}))")
        w.tags.append("two losses")
        share = f"{made.share} + 0.5 * ({second.share})"
        return LossText([*made.setup, *second.setup], whole, share, [*made.targets, *second.targets])
    return made


class _Maker:
    """One loss; ``place`` is the place of its targets in the tuple."""

    def __init__(self, w: Writer, form: Form, place: int) -> None:
        self.w, self.form, self.place = w, form, place
        self.entries = ", ".join(map(str, ("N", *form.dims)))
        dims = form.dims[1:] if form.kind == "map" else form.dims[:-1]
        self.positions = ", ".join(map(str, ("N", *dims)))
        self.classes = form.dims[0] if form.kind == "map" else form.last

    def target(self, entries: bool, batch: str = "y", place: int = 0) -> str:
        """Targets in the form of the loss input."""
        y, kind = f"{batch}[{self.place + place}]", self.form.kind
        if kind == "fold":
            return f"{y}.flatten(0, 1)"
        if kind == "major":
            return f"{y}.transpose(0, 1).flatten(0, 1)"
        return f"{y}.transpose(0, 1)" if kind == "first" else y

    def make(self, kind: str, reduction: str, mixing: bool) -> LossText:
        """The loss of a kind, with random options."""
        w, name = self.w, self.w.name("loss")
        function = "cross_entropy" if kind == "probabilities" else kind
        options, setup, divisor, y, prepare = self._options(kind, name)
        reduction = reduction or w.choose("mean", "mean", "sum")
        if reduction == "mean" and kind == "kl_div" and w.chance(0.6):
            reduction, divisor = "batchmean", f"{'len(Y[0])' if self.form.leading else None}"
            if not self.form.leading:
                reduction, divisor = "mean", f"Y[{self.place}].numel()"
        w.tags += [kind, reduction, f"loss input {self.form.kind}"]
        target = self.target(entries=kind in ENTRIES)
        chosen = zlib.crc32(f"{name} {kind} {w.tags}".encode()) % 6 == 0  # all other draws stay what they are
        if kind in FOLLOWING and chosen:
            turned = mixing and self.form.kind != "first" and reduction != "none"
            mixing = mixing and not turned
            target = "f.flip(0)" if turned else f"({target} + 0.3 * f.tanh())"
            w.tags.append("target of the model")
        module = w.chance(0.5)

        def called(how: str, own: bool) -> str:
            given = ", ".join([*options, f"reduction='{how}'"])
            if module and own:
                setup.append(f"{name} = nn.{MODULES[function]}({given})")
                return f"{name}(f, {target})"
            return f"F.{function}(f, {target}, {given})"

        if not module:
            w.tags.append("functional")
        summed = called("sum", False)
        if reduction == "none":
            rows = f"{called('none', True)}.reshape(len(y[1]), -1).sum(1)"
            y.append("torch.rand(N) + 0.1")
            if mixing:
                return LossText(setup, w.choose(*ROWS_MIXING).format(rows=rows), summed, y, prepare)
            whole, share = w.choose(*(ROWS_SEPARATE[:3] * 3 + ROWS_SEPARATE[3:]))
            return LossText(setup, whole.format(rows=rows), share.format(rows=rows), y, prepare)
        whole = called(reduction, True)
        share = summed if reduction == "sum" else f"{summed} / {divisor}"
        if mixing:
            return LossText(setup, w.choose(*MIXING).format(l=whole), share, y, prepare)
        factor = w.choose("", "", "", "0.1 * ", "2 * ", "1 / 3 * ", "-1 * ")
        return LossText(setup, factor + whole, factor + share, y, prepare)

    def _options(self, kind: str, name: str) -> tuple[list[str], list[str], str, list[str], str]:
        """Options, lines of set-up, the divisor of the mean, targets, what the model does last."""
        w, c, axis = self.w, self.classes, 1 if self.form.kind == "map" else -1
        first = f"Y[{self.place}]"
        if kind in ("cross_entropy", "nll_loss"):
            options, setup, counted = [], [], f"{first}.numel()"
            target = f"torch.randint({c}, ({self.positions},))"
            if w.chance(0.3):
                options.append("ignore_index=0")
                counted = f"({first} != 0).sum()"
                target = f"keep_one({target})"
            if w.chance(0.3):
                setup.append(f"{name}_w = torch.rand({c}) + 0.5")
                options.append(f"weight={name}_w")
                counted = (
                    f"({name}_w[{first}] * ({first} != {0 if 'ignore_index=0' in options else -100})).sum()"
                )
            if kind == "cross_entropy" and w.chance(0.3):
                options.append("label_smoothing=0.1")
            return options, setup, counted, [target], f"h.log_softmax({axis})" if kind == "nll_loss" else ""
        if kind == "probabilities":
            options = ["label_smoothing=0.1"] if w.chance(0.3) else []
            target = f"torch.randn({self.entries}).softmax({axis})"
            return options, [], f"({first}.numel() / {c})", [target], ""
        target = {
            "binary_cross_entropy_with_logits": f"torch.rand({self.entries}).round()",
            "binary_cross_entropy": f"torch.rand({self.entries})",
            "poisson_nll_loss": f"torch.randint(4, ({self.entries},)).double()",
            "soft_margin_loss": f"torch.randn({self.entries}).sign()",
            "kl_div": f"torch.randn({self.entries}).softmax({axis})",
        }.get(kind, f"torch.randn({self.entries})")
        options, setup, prepare = [], [], ""
        if kind == "binary_cross_entropy_with_logits" and w.chance(0.4):
            setup.append(f"{name}_w = torch.rand({self.form.last}) + 0.5")
            options.append(f"pos_weight={name}_w")
        if kind == "smooth_l1_loss" and w.chance(0.5):
            options.append("beta=0.5")
        if kind == "huber_loss" and w.chance(0.5):
            options.append("delta=0.7")
        if kind == "kl_div":
            prepare = f"h.log_softmax({axis})"
            if w.chance(0.3):
                options.append("log_target=True")
                target += ".log()"
        if kind == "binary_cross_entropy":
            prepare = "torch.sigmoid(h)"
        if kind == "poisson_nll_loss" and w.chance(0.4):
            options.append("full=True")
        return options, setup, f"{first}.numel()", [target], prepare
