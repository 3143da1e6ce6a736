"""What packprop makes of a program: right, refused, wrong or crashed."""

from __future__ import annotations

import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import packprop
from packprop import extensions
from packprop.engine.recording.marks import HANDLES
from packprop.errors import PackpropError
from tests.hunt.programs import Program, write
from tests.hunt.truth import Instance, Truth, build

BAD = ("wrong", "crashed")
TOLERANCE = 1e-8
FLOOR = 1e-4
"""Entries far below the largest of all parameters may be off by those' rounding."""

QUANTITIES: dict[str, list[Callable[[], Any]]] = {
    "gradients": [extensions.BatchGrad, extensions.Variance],
    "norms": [extensions.BatchL2Grad, extensions.SumGradSquared],
    "curvature": [extensions.DiagGGNExact, extensions.KFLR],
    "root": [extensions.SqrtGGNExact],
    "hessian": [extensions.DiagHessian],
}
"""What is asked for in one pass, by the name of the pass."""


@dataclass(frozen=True)
class Outcome:
    """What came of one pass.

    Attributes:
        quantity: a key of `QUANTITIES`, or ``program``.
        status: ``right``, ``refused``, ``wrong``, ``crashed``; ``invalid`` for programs of no use.
        reason: short, so that outcomes can be grouped by it.
        detail: the whole story.
    """

    quantity: str
    status: str
    reason: str = ""
    detail: str = ""


@dataclass
class Seen:
    """What a user could see of a pass apart from what was asked for."""

    state: dict[str, Any] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)


class Wrong(Exception):
    """An answer that is not right; the first argument is short."""


@contextmanager
def doubles() -> Iterator[None]:
    """Programs run in double precision, and leave the default and the random state as they were."""
    before = torch.get_default_dtype()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def hunt(
    seed: int, quantities: tuple[str, ...] | None = None, passes: int = 1
) -> tuple[Program, list[Outcome]]:
    """Write the program of a seed, and try all quantities on it, in the last of some passes."""
    program = write(seed)
    with doubles():
        try:
            return program, list(_tried(program, quantities or tuple(QUANTITIES), passes))
        except Exception as error:
            reason = f"the hunt itself: {type(error).__name__}: {error}"[:110]
            return program, [Outcome("program", "crashed", reason, traceback.format_exc())]


def _tried(program: Program, quantities: tuple[str, ...], passes: int) -> Iterator[Outcome]:
    truth = Truth(program)
    if not truth.invalid:
        mixing = truth.mixing
        inconsistent = not mixing and truth.inconsistent
    if truth.invalid or inconsistent:
        yield Outcome("program", "invalid", truth.invalid or "shares do not sum to the loss")
        return
    if mixing.startswith("model") and truth.inputs_mix:
        yield Outcome(
            "program", "invalid", "samples meet in what is made of the inputs alone, which are constants"
        )
        return
    if not mixing and truth.is_torch_wrong:
        yield Outcome("program", "invalid", "PyTorch's gradients of the shares do not sum to that of the loss")
        return
    plain, changes = run(program, [], passes), ""
    for quantity in quantities:
        outcome, seen = _outcome(program, truth, quantity, plain, mixing, passes)
        yield outcome
        if seen is not None and not changes:
            changes = changed(seen, plain)
            detail = f"in a pass of {quantity}: {changes}"
    short = changes.split(":")[0]
    yield Outcome("state", "wrong", f"{short} changed", detail) if changes else Outcome("state", "right")


def _outcome(
    program: Program, truth: Truth, quantity: str, plain: Seen, mixing: str, passes: int
) -> tuple[Outcome, Seen | None]:
    seen = None
    try:
        seen = run(program, [make() for make in QUANTITIES[quantity]], passes)
    except PackpropError as error:
        why = re.sub(r"'[^']*'", "'...'", re.sub(r"\d+", "#", error.why))[:110]
        return Outcome(quantity, "refused", why, str(error)), None
    except Exception as error:
        reason = re.sub(r"\d+", "#", f"{type(error).__name__}: {error}".split("\n")[0][:110])
        return Outcome(quantity, "crashed", reason, traceback.format_exc()), None
    try:
        if mixing == "loss" and quantity != "hessian":
            raise Wrong("answered, but the loss mixes samples")
        _right(seen, plain, truth, mixing)
    except Wrong as wrong:
        return Outcome(quantity, "wrong", str(wrong.args[0]), " ".join(map(str, wrong.args))), seen
    except NotImplementedError as error:  # the oracle needs a second derivative that torch does not have
        return Outcome(quantity, "unknown", str(error)[:110]), seen
    return Outcome(quantity, "right", f"mixed by the {mixing}" if mixing else "separate"), seen


def run(program: Program, asked: list[Any], passes: int = 1) -> Seen:
    """Run a program forward and backward, with packprop if something is asked for, and look at everything.

    Passes before the last one have data of their own: packprop may keep from them what holds for the last.
    """
    made, seen = build(program), Seen()
    watch = _Watch(made, program.seed)
    if asked:
        packprop.extend(made.model, sample_axis=1 if made.reading.positions_first else None)
        for module in made.loss_modules:
            packprop.extend(module)
    for _ in range(passes - 1):
        _pass(program, made, asked, made.space["data"]())
        made.model.zero_grad()
    f = _pass(program, made, asked, (made.inputs, made.targets), watch)
    seen.state = watch.state(f)
    for extension in asked:
        seen.values[extension.savefield] = {
            name: vars(p).get(extension.savefield) for name, p in made.model.named_parameters()
        }
    return seen


def _pass(program: Program, made: Instance, asked: list[Any], data: Any, watch: _Watch | None = None) -> Tensor:
    """Go forward and backward once; return what the model returned."""
    inputs, targets = data
    torch.manual_seed(program.seed + 2)
    with packprop.record() if asked and program.functional else nullcontext():
        f = made.model(inputs)
        if watch is not None:
            watch.activation()
        losses = made.space["loss"](f, targets, made.model)
    before = [] if watch is None else watch.hooks()
    with packprop.backpack(*asked) if asked else nullcontext():
        if isinstance(losses, tuple):
            torch.autograd.backward(list(losses))
        else:
            losses.backward()
    if watch is not None:
        watch.hooks_stay = watch.hooks() == before
    return f


class _Watch:
    """Hooks of a user, and what they and the user's tensors show after a pass."""

    def __init__(self, made: Instance, seed: int) -> None:
        self.made, self.calls, self.kept, self.hooks_stay = made, Counter[str](), None, True
        self.kind, pick = seed % 12, seed // 12
        modules, parameters = list(made.model.modules())[1:], list(made.model.parameters())
        if modules and self.kind == 0:
            modules[pick % len(modules)].register_full_backward_hook(self._count_module)
        if self.kind == 1:
            parameters[pick % len(parameters)].register_hook(lambda _: self._count("parameter"))
        if self.kind == 2:
            parameters[pick % len(parameters)].register_post_accumulate_grad_hook(
                lambda _: self._count("accumulation")
            )

    def _count(self, which: str) -> None:
        self.calls[which] += 1

    def _count_module(self, *_: Any) -> None:
        self._count("module")

    def activation(self) -> None:
        """Keep the gradient of an activation that the program shows."""
        self.kept = vars(self.made.model).get("kept")
        if self.kept is not None and self.kept.requires_grad:
            if self.kind in (3, 4):
                self.kept.retain_grad()
            elif self.kind in (5, 6):
                self.kept.register_hook(lambda _: self._count("activation"))

    def hooks(self) -> list[int]:
        """Numbers of hooks on all modules and parameters, but for those of ``extend``.

        A part of a model gets a second one of these when it is first called by itself, as checkpoints do.
        """
        model = self.made.model
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        found = [
            sum(len(getattr(module, kind)) for kind in kinds) - len(vars(module).get(HANDLES, ()))
            for module in model.modules()
        ]
        return found + [len(p._backward_hooks or ()) for p in model.parameters()]

    def state(self, f: Tensor) -> dict[str, Any]:
        """What must be the same with packprop and without."""
        model = self.made.model
        return {
            "gradient": {name: p.grad for name, p in model.named_parameters()},
            "gradient of an activation": {
                "kept": self.kept.grad if self.kind in (3, 4) and self.kept is not None else None
            },
            "buffer": dict(model.named_buffers()),
            "parameter": {name: p.detach() for name, p in model.named_parameters()},
            "output": {"f": f.detach()},
            "random state": {"": torch.get_rng_state()},
            "requires_grad": [p.requires_grad for p in model.parameters()],
            "training": [module.training for module in model.modules()],
            "calls of hooks": dict(self.calls),
            "hooks stay": self.hooks_stay,
        }


def changed(seen: Seen, plain: Seen) -> str:
    """What a user would find changed by packprop: what it is, a colon, the values."""
    for what, expected in plain.state.items():
        found = seen.state[what]
        if not isinstance(expected, dict):
            if found != expected:
                return f"{what}: {found} instead of {expected}"
            continue
        for name in expected.keys() | found.keys():
            one, other = found.get(name), expected.get(name)
            if not _same(one, other):
                return f"{what}: {name}: {_shown(one)} instead of {_shown(other)}"
    return ""


def _shown(value: Any) -> str:
    try:
        return str(value)
    except RuntimeError:
        return "a tensor of a vectorised sweep that has ended"


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other or one == other
    try:
        return torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-11, equal_nan=True)
    except RuntimeError:  # a tensor of a vectorised sweep that has ended
        return False


def _right(seen: Seen, plain: Seen, truth: Truth, mixing: str) -> None:
    for field_, values in seen.values.items():
        for name, value in values.items():
            gradient = plain.state["gradient"][name]
            if value is None and gradient is not None and gradient.abs().max() > 0 and name in truth.reached:
                raise Wrong(f"{field_} is missing", name)
        saved = {name: value for name, value in values.items() if value is not None}
        if field_ == "kflr":
            _right_factors(saved, truth)
        elif field_ == "sqrt_ggn_exact":
            if saved:
                _right_root(saved, truth)
        elif field_ == "diag_h":
            _right_hessian(saved, truth, mixing)
        else:
            _near(saved, lambda t, field_=field_: getattr(t.oracle, field_), truth, field_)


def _right_hessian(saved: dict[str, Tensor], truth: Truth, mixing: str) -> None:
    """Of the loss as it is written: that needs no separate samples. Or without a term of parameters alone."""
    try:
        _near(saved, lambda t: t.diag_h_whole, truth, "diag_h")
    except Wrong:
        if mixing or not truth.program.regularised:
            raise
        _near(saved, lambda t: t.diag_h, truth, "diag_h")


def _right_root(saved: dict[str, Tensor], truth: Truth) -> None:
    """A root is known up to a rotation; what it is the root of is unique, also between parameters."""

    def expected(t: Truth) -> dict[str, Tensor]:
        kept = [torch.arange(w.start, w.stop) for name, w in t.oracle.slices.items() if name in saved]
        rows = torch.cat(kept)
        return {"all parameters": t.oracle.ggn_batch[:, rows][:, :, rows]}

    root = torch.cat([s.reshape(*s.shape[:2], -1) for s in saved.values()], 2)
    _near({"all parameters": torch.einsum("vnp,vnq->npq", root, root)}, expected, truth, "S^T S")


def _right_factors(saved: dict[str, list[Tensor]], truth: Truth) -> None:
    """Factors of layers that are called once, exact blocks of everything with one factor."""

    def expected(t: Truth) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, factors in saved.items():
            known = t.kfac.get(name)
            if known is None or len(known) != len(factors):
                known = [t.oracle.ggn_block[name]] if len(factors) == 1 else []
            found.update({f"{name} {side}": factor for side, factor in enumerate(known)})
        return found

    flat = {f"{name} {side}": factor for name, factors in saved.items() for side, factor in enumerate(factors)}
    known = expected(truth)
    _near({k: v for k, v in flat.items() if k in known}, expected, truth, "kflr")


def _near(
    saved: dict[str, Tensor], reference: Callable[[Truth], dict[str, Tensor]], truth: Truth, what: str
) -> None:
    """Every entry as near to the reference as rounding lets it be."""
    expected = reference(truth)
    if any(bool(each.isnan().any()) for each in expected.values()):
        raise NotImplementedError(f"PyTorch's own derivative is not finite: {what}")
    largest = max((t.abs().max().item() for t in expected.values() if t.numel()), default=0.0)
    for name, value in saved.items():
        if value.shape != expected[name].shape:
            raise Wrong(f"{what}: wrong shape", name, list(value.shape), list(expected[name].shape))
        if value.numel() == 0:
            continue
        scale = max(expected[name].abs().max().item(), FLOOR * largest, 1e-12)
        error = (value - expected[name]).abs().max().item()
        if error <= TOLERANCE * scale:
            continue
        known = (reference(truth.nudged())[name] - expected[name]).abs().max().item()
        if not error <= max(TOLERANCE * scale, 1e3 * known):
            rough = "roughly" if error < 1e-4 * scale else "far"
            raise Wrong(
                f"{what}: {rough} off", f"{name}: off by {error:.3g} of {scale:.3g}\n", value, expected[name]
            )
