"""What is true of a program: its numbers sample by sample, and whether its samples are separate at all.

Nothing here knows packprop. Samples are separate if, at the program's own point and at a second one with all
parameters moved, no sample's loss input depends on another sample: running it alone, giving the others new
data and differentiating by them all say so; and if the loss is a sum over samples, which mixed second
differences show.
"""

from __future__ import annotations

import itertools
import re
import textwrap
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.hunt.programs import Program
from tests.references.oracle import Named, Oracle, Problem

EXACT = 1e-9
IN_OTHER_BATCHES = "model in other batches"


@dataclass(frozen=True)
class Reading:
    """Where samples may be seen: an axis of the inputs, their place in the loss input, how many there are."""

    axis: int
    positions_first: bool
    samples: int
    last: bool = False


@dataclass
class Instance:
    """A program that was run up to its model and data: the same numbers every time."""

    space: dict[str, Any]
    model: nn.Module
    inputs: Tensor
    targets: tuple[Tensor, ...]

    def __getattr__(self, name: str) -> Any:
        return self.space[name]

    @property
    def loss_modules(self) -> list[nn.Module]:
        """Losses that are modules."""
        return [value for value in self.space.values() if isinstance(value, nn.Module)]

    def whole(self, f: Tensor) -> Tensor:
        """The loss of loss inputs, a sum if there are two."""
        value = self.space["loss"](f, self.targets, self.model)
        return sum(value) if isinstance(value, tuple) else value

    @property
    def reading(self) -> Reading:
        """What the program means by a sample."""
        return Reading(self.space["INPUT_AXIS"], self.space["POSITIONS_FIRST"], self.space["N"])

    def one(self, n: int, axis: int | None = None) -> Tensor:
        """The inputs of sample n alone."""
        return self.inputs.narrow(self.reading.axis if axis is None else axis, n, 1)

    def chosen(self, mask: Tensor, one: Tensor, other: Tensor) -> Tensor:
        """Loss inputs of the first where ``mask [n]`` says so, of the second elsewhere."""
        numbers = torch.arange(one.numel()).view_as(one)
        picked = torch.zeros(one.numel(), dtype=torch.bool)
        picked[rows_of(numbers, self.reading)[mask].flatten()] = True
        return torch.where(picked.view_as(one), one, other)

    def rows_as(self, alone: Tensor, f: Tensor, n: int) -> Tensor:
        """The loss inputs of sample n out of those of all samples, in the shape that they have alone."""
        numbers = rows_of(torch.arange(f.numel()).view_as(f), self.reading)[n]
        return f.flatten()[numbers.sort().values].view_as(alone)


def build(program: Program) -> Instance:
    """Run a program's text."""
    torch.manual_seed(program.seed)
    space: dict[str, Any] = {}
    exec(compile(program.text, f"<program {program.seed}>", "exec"), space)
    model = space["Model"]().eval()
    move(model, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    inputs, targets = space["data"]()
    return Instance(space, model, inputs, targets)


def move(model: nn.Module, far: float, gates: bool = False) -> None:
    """Move parameters away from where they are; gates stay unless they are asked for."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if gates or "gate_" not in name:
                parameter.add_(far * torch.randn_like(parameter))


def problem_of(made: Instance, together: bool = False) -> Problem:
    """What the oracle of loops over samples takes; outputs are those before the link.

    Args:
        made: The program.
        together: Whether samples run in the batch that they are in, rather than each alone.
    """
    link = made.space["link"]

    def share(f: Tensor, n: int) -> Tensor:
        return made.space["share"](link(f), tuple(t[n : n + 1] for t in made.targets), made.targets)

    def total() -> Tensor:
        return made.whole(made.model(made.inputs))

    def output(n: int) -> Tensor:
        made.space["link"] = lambda h: h
        try:
            alone = made.model(made.one(n))
            return made.rows_as(alone, made.model(made.inputs), n) if together else alone
        finally:
            made.space["link"] = link

    return Problem(made.model, None, made.inputs, made.targets, made.space["N"], total, output, share)


@dataclass
class Truth:
    """A program's own numbers; everything is computed when it is asked for."""

    program: Program

    @cached_property
    def made(self) -> Instance:
        return build(self.program)

    @cached_property
    def oracle(self) -> Oracle:
        return Oracle(problem_of(self.made, together=self.mixing in ("model", IN_OTHER_BATCHES)))

    @cached_property
    def invalid(self) -> str:
        """Why the program itself is of no use; empty where it runs."""
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                f = self.made.model(self.made.inputs)
                whole = self.made.whole(f)
                slopes = torch.autograd.grad(whole, list(self.made.model.parameters()), allow_unused=True)
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:90]}"
        finite = all(slope.isfinite().all() for slope in slopes if slope is not None) and whole.isfinite()
        if not finite:
            return "not finite"
        if not any(slope is not None and bool((slope != 0).any()) for slope in slopes):
            return "nothing has a gradient"
        text = self.program.text
        if re.search(r"F\.binary_cross_entropy\(|nn\.BCELoss\(", text) and bool((f * (1 - f) < 0.03).any()):
            return "probabilities to which PyTorch's second derivative adds 1e-12"
        if re.search(r"ross_?[eE]ntropy|NLLLoss|nll_loss|kl_div|KLDiv", text) and _is_saturated(f):
            return "probabilities next to 1, whose curvature is lost in rounding"
        return "" if whole.abs() < 1e6 else "too large"

    @cached_property
    def mixing(self) -> str:
        """How samples are mixed: by the model, by the loss, or not at all.

        The model may mix them at other parameters alone, or with other data, as a sort does whose order the
        samples have already; then the numbers of its own are right, too. If samples come out differently in
        batches of their own, while no derivative in this batch says so, each has its term's gradient in this
        batch: behind a rectifier that is closed for all of them, or a sort that moves whole rows. Where the
        model mixes them, an answer is right only if it holds each term's gradient in this batch: so it may be
        if a single sample has a derivative behind the place where they meet.
        """
        first, second = self.made, build(self.program)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.program.seed + 1)
            move(second.model, 0.5, gates=True)
            if _model_mixes(first, others=False):
                has_slopes = first.inputs.is_floating_point()
                mixes = _slopes_mix(first, moved=True) if has_slopes else not _moves_rows(first)
                return "model" if mixes else IN_OTHER_BATCHES
            if _model_mixes(first) or _model_mixes(second):
                return "model elsewhere"
            return "loss" if any(_loss_mixes(made) for made in (first, second) for _ in range(3)) else ""

    @cached_property
    def inputs_mix(self) -> bool:
        """Whether samples meet before any parameter comes in: what is made of inputs alone is a constant."""
        made = self.made
        alone = self.program.text.split("        h = x\n")[-1].split("self.")[0].splitlines()[:-1]
        lines = "\n".join(itertools.takewhile(lambda line: not line.endswith(":"), alone))  # no part of a loop

        def prepared(x: Tensor) -> Tensor:
            space = {"torch": torch, "F": F, "n": made.reading.samples, "h": x}
            exec(textwrap.dedent(lines), space)
            return space["h"]

        axis = made.reading.axis
        if made.reading.samples == 1:
            return False
        changed = made.inputs.clone()
        changed.narrow(axis, 0, 1).copy_(_others(made).narrow(axis, 0, 1))
        before, after = prepared(made.inputs), prepared(changed)
        if before.shape != after.shape:
            return True
        moved = (before != after).flatten()
        rows = before.shape[axis] if axis < before.dim() else 0
        if rows != made.reading.samples:
            return bool(moved.any()) and bool(moved.all())
        return bool((before != after).movedim(axis, 0)[1:].any())

    @cached_property
    def reached(self) -> set[str]:
        """Names of the parameters that the model's output depends on; a penalty may reach others."""
        made = build(self.program)
        made.model(made.inputs).sum().backward()
        return {name for name, parameter in made.model.named_parameters() if parameter.grad is not None}

    @cached_property
    def inconsistent(self) -> bool:
        """Whether shares do not make up the loss: a mistake of the grammar, not of packprop."""
        problem = self.oracle.problem
        try:
            shares = sum(problem.term(problem.output(n), n) for n in range(problem.size))
        except (ValueError, RuntimeError):  # a sample alone is none of the model's inputs, or has no deviation
            return True
        return not torch.allclose(shares, self._without_penalty(problem.total()), rtol=EXACT, atol=EXACT)

    @cached_property
    def is_torch_wrong(self) -> bool:
        """Whether PyTorch's gradients of shares, which sum to the loss, do not sum to its gradient of the loss.

        That happens: PyTorch 2.13 differentiates an instance normalisation of one sample wrongly on a CPU, if
        the gradient that arrives has the strides of a transposed tensor.
        """
        parameters = self.oracle.problem.parameters
        whole = self._without_penalty(self.oracle.problem.total())
        slopes = torch.autograd.grad(
            whole, list(parameters.values()), allow_unused=True, materialize_grads=True
        )
        rows = self.oracle.grad_batch
        scale = max(row.abs().sum(0).max().item() for row in rows.values() if row.numel())
        pairs = zip(slopes, parameters, strict=True)
        return any(not torch.allclose(rows[name].sum(0), slope, 0, 1e-5 * scale) for slope, name in pairs)

    def _without_penalty(self, whole: Tensor) -> Tensor:
        """The part of a loss that the samples make up."""
        if not self.program.regularised:
            return whole
        return whole - 0.1 * sum((p**2).sum() for p in self.made.model.parameters())

    @cached_property
    def diag_h(self) -> Named:
        """The Hessian diagonal of the sum of all samples' shares."""
        problem = self.oracle.problem
        with sdpa_kernel(SDPBackend.MATH):
            return _hessian_diagonal(
                problem, sum(problem.term(problem.output(n), n) for n in range(problem.size))
            )

    @cached_property
    def diag_h_whole(self) -> Named:
        """The Hessian diagonal of the loss as it is written."""
        with sdpa_kernel(SDPBackend.MATH):
            return _hessian_diagonal(self.oracle.problem, self.oracle.problem.total())

    @cached_property
    def kfac(self) -> dict[str, list[Tensor]]:
        """Kronecker factors of layers alone: not behind checkpoints, and of weights that nothing else takes."""
        text = self.program.text.split("class Model")[1]
        found = {} if "checkpoint(" in text else self.oracle.kfac
        return {name: factors for name, factors in found.items() if f"self.{name}" not in text}

    def nudged(self) -> Truth:
        """The same at parameters that are off by rounding: numbers that move then are not known better."""
        other = Truth(replace(self.program))
        move_by_rounding(other.made.model)
        return other


def move_by_rounding(model: nn.Module) -> None:
    """Change parameters in their last digits."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-14 * torch.randn_like(parameter))


def _is_saturated(f: Tensor) -> bool:
    """Whether a softmax of loss inputs, over the last axis or over axis 1, comes nearer to 1 than 1e-7."""
    axes = {axis for axis in (1, f.dim() - 1) if 0 < axis < f.dim() and f.shape[axis] > 1}
    return any(bool((f.softmax(axis) > 1 - 1e-7).any()) for axis in axes)


def _hessian_diagonal(problem: Problem, scalar: Tensor) -> Named:
    parameters = problem.parameters
    options = dict(allow_unused=True, materialize_grads=True)
    slopes = torch.autograd.grad(scalar, list(parameters.values()), create_graph=True, **options)
    found = {}
    for (name, parameter), slope in zip(parameters.items(), slopes, strict=True):
        entries = [torch.zeros(()) for _ in range(parameter.numel())]
        if slope.requires_grad:
            for j, entry in enumerate(slope.flatten()):
                row = torch.autograd.grad(entry, parameter, retain_graph=True, **options)[0]
                entries[j] = row.flatten()[j]
        found[name] = torch.stack(entries).view_as(parameter)
    return found


def _differ(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return True
    if not one.numel():
        return False
    scale = max(one.abs().max().item(), other.abs().max().item(), 1e-6)
    return (one - other).abs().max().item() > EXACT * scale


def rows_of(f: Tensor, reading: Reading, samples: int | None = None) -> Tensor:
    """Loss inputs by sample ``[n, ...]``."""
    count = samples or reading.samples
    if reading.last:
        f = f.movedim(-1, 0)
    elif reading.positions_first:
        f = f.reshape(-1, count, f.shape[-1]).transpose(0, 1)
    return f.reshape(count, -1)


def _others(made: Instance) -> Tensor:
    """New inputs of the same kind."""
    return made.space["data"]()[0]


def _model_mixes(
    made: Instance, reading: Reading | None = None, alone: bool = True, others: bool = True
) -> bool:
    """Whether a reading mixes samples.

    Args:
        made: The program.
        reading: Where the samples are taken to be; where the program means them to be if not given.
        alone: Whether it counts that samples in batches of their own come out differently.
        others: Whether it counts that they do with other samples beside them, where no derivative says so.
    """
    reading = reading or made.reading
    count, axis = reading.samples, reading.axis
    if count == 1:
        return False
    new = _others(made)
    with torch.no_grad():
        try:
            together = rows_of(made.model(made.inputs), reading)
        except (RuntimeError, ValueError, IndexError):
            return True
        try:
            single = [rows_of(made.model(made.one(n, axis)), reading, 1)[0] for n in range(count * alone)]
        except (RuntimeError, ValueError, IndexError):  # as in a normalisation of one entry
            single = []
        if any(_differ(row, together[n]) for n, row in enumerate(single)):
            return True
        by_derivatives = made.inputs.is_floating_point() or bool(single)
        for m in range(count * (others or not by_derivatives)):
            changed = made.inputs.clone()
            changed.narrow(axis, m, 1).copy_(new.narrow(axis, m, 1))
            kept = [n for n in range(count) if n != m]
            if _differ(rows_of(made.model(changed), reading)[kept], together[kept]):
                return True
    return made.inputs.is_floating_point() and _slopes_mix(made, reading)


def _moves_rows(made: Instance) -> bool:
    """Whether the samples' loss inputs are those that each has alone, in another order."""
    reading = made.reading
    with torch.no_grad():
        try:
            left = [*rows_of(made.model(made.inputs), reading)]
            alone = [rows_of(made.model(made.one(n)), reading, 1)[0] for n in range(reading.samples)]
        except (RuntimeError, ValueError, IndexError):
            return False
    for row in alone:
        place = next((place for place, other in enumerate(left) if not _differ(row, other)), None)
        if place is None:
            return False
        del left[place]
    return True


def _slopes_mix(made: Instance, reading: Reading | None = None, moved: bool = False) -> bool:
    """Whether derivatives in the inputs say that samples are mixed; ``moved`` allows for another order."""
    reading = reading or made.reading
    inputs = made.inputs.clone().requires_grad_()
    try:
        rows = rows_of(made.model(inputs), reading)
    except (RuntimeError, ValueError, IndexError):
        return True
    if not rows.requires_grad:
        return False
    own: set[int] = set()
    for n in range(reading.samples):
        probe = (rows[n] * torch.randn_like(rows[n])).sum()
        (slope,) = torch.autograd.grad(
            probe, inputs, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        sizes = slope.movedim(reading.axis, 0).flatten(1).abs().amax(1)
        if not sizes.any():
            continue
        place = int(sizes.argmax()) if moved else n
        if place in own:
            return True
        own.add(place)
        sizes[place] = 0
        if sizes.max() > EXACT * max(slope.abs().max().item(), 1e-6):
            return True
    return False


def _loss_mixes(made: Instance) -> bool:
    """Whether what one sample adds to the loss depends on another sample's loss input."""
    count = made.space["N"]
    with torch.no_grad():
        here, there = made.model(made.inputs), made.model(_others(made))

        def at(*moved: int) -> Tensor:
            mask = torch.tensor([n in moved for n in range(count)])
            return made.whole(made.chosen(mask, there, here))

        scale = max(abs(at().item()), abs(at(*range(count)).item()), 1e-3)
        return any(
            (at() - at(n) - at(m) + at(n, m)).abs().item() > EXACT * scale
            for n in range(count)
            for m in range(n)
        )
