"""The facts of one forward pass about the parameters of a model, as values that print."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from packprop.engine.tensors import plain_text
from packprop.errors import PackpropError


@dataclass(frozen=True)
class Consumption:
    """One use of a parameter.

    Args:
        function: The function that the graph shows, or the name of its node.
        structure: The structure of the parameter in the function; ``Dense`` if per-sample gradients are formed.
        direct: True if the function takes the parameter itself, false if a tensor computed from it.
        refusal: The reason why packprop can compute nothing for this use; empty if it can.
        fallback: True if no rule describes the parameter; packprop then calls the derivative for each sample.
    """

    function: str
    structure: str
    direct: bool
    refusal: str = ""
    fallback: bool = False


@dataclass(frozen=True)
class ParameterCoverage:
    """The facts about one parameter.

    Args:
        name: Its name in the model; the first one if it is tied.
        aliases: Its other names.
        shape: Its shape ``[*p]``.
        layer: Class of the module that owns it.
        trainable: True if it requires a gradient.
        uses: Its uses, the one nearest to the output first.
        missing: The nodes that use it, and at which packprop cannot tell samples apart.
        factors: Its factors in KFAC: ``"B, A"``, or ``"B"`` for the exact block; empty if unknown.
        hessian: The route to the Hessian's diagonal, see NOTE [Hessian diagonal]: ``"swept"``, ``"output"`` or
            ``"parameter"``; ``"refused"`` if PyTorch has no second derivative, or a wrong one; empty if
            unknown.
    """

    name: str
    aliases: tuple[str, ...]
    shape: torch.Size
    layer: str
    trainable: bool
    uses: tuple[Consumption, ...] = ()
    missing: tuple[str, ...] = ()
    factors: str = ""
    hessian: str = ""

    @property
    def state(self) -> str:
        """``"used"``, ``"unused"``, ``"frozen"``, ``"not recorded"`` or ``"refused"``."""
        if not self.trainable:
            return "frozen"
        if self.missing:
            return "not recorded"
        if any(use.refusal for use in self.uses):
            return "refused"
        return "used" if self.uses else "unused"


ROUTES = {
    "swept": "signed seeds at the elementwise nonlinearities, beside those of the GGN",
    "output": "Hessian columns at the outputs of its uses, by double backward",
    "parameter": "Hessian columns in the parameter itself, entry by entry",
    "refused": "PyTorch has no second derivative of a function on the way, or a wrong one",
}
"""The meaning of the words of ``ParameterCoverage.hessian``."""


@dataclass(frozen=True)
class Family:
    """Extensions with the same seeds.

    Args:
        name: The quantity that the extensions compute.
        extensions: The names of the extensions.
        applies: True if the extensions apply to the model.
        why: The reason why they do not apply, or the condition under which they do.
    """

    name: str
    extensions: tuple[str, ...]
    applies: bool
    why: str = ""


@dataclass(frozen=True)
class Coverage:
    """The facts of one forward pass; prints as two tables.

    Args:
        parameters: The facts about each parameter by name, in the model's order.
        families: The families of the catalogue.
        samples: Number of samples in the batch; 0 if they cannot be told apart.
        mixers: Layers that mix samples.
        refusal: The error that a backward pass with any extension would raise; printed below the tables.
    """

    parameters: dict[str, ParameterCoverage]
    families: tuple[Family, ...]
    samples: int
    mixers: tuple[str, ...] = ()
    refusal: PackpropError | None = None

    @property
    def complete(self) -> bool:
        """Tell whether every trainable parameter is used, and gets gradients of samples."""
        return self.refusal is None and all(p.state in ("used", "frozen") for p in self.parameters.values())

    @property
    def fallback_share(self) -> float:
        """The share of the entries of trainable parameters that functions without a rule use, from 0 to 1."""
        trained = [parameter for parameter in self.parameters.values() if parameter.trainable]
        served = [parameter for parameter in trained if any(use.fallback for use in parameter.uses)]
        total = sum(parameter.shape.numel() for parameter in trained)
        return sum(parameter.shape.numel() for parameter in served) / total if total else 0.0

    def __rich__(self) -> Group:
        table = Table("parameter", "shape", "layer", "used by", "structure", "KFAC", "Hessian")
        for parameter in self.parameters.values():
            table.add_row(*_cells(parameter), style=None if parameter.trainable else "dim")
        below = Table("extensions", "apply", "why not, or when")
        for family in self.families:
            names = f"{family.name}: {', '.join(family.extensions)}"
            why = family.why if self.refusal is None else "see below"
            below.add_row(names, "yes" if family.applies else "no", why)
        states = Counter(p.state for p in self.parameters.values())
        counts = [f"{count} {state}" for state, count in states.items()]
        lines = [f"{self.samples} samples; parameters: {', '.join(counts) or 'none'}"]
        lines += [f"mixes samples: {mixer}" for mixer in self.mixers]
        if self.fallback_share:
            uses = [use for parameter in self.parameters.values() for use in parameter.uses if use.fallback]
            functions = ", ".join(dict.fromkeys(use.function for use in uses))
            lines.append(f"called for each sample: {functions}; {self.fallback_share:.3g} of all entries")
        routes = {parameter.hessian for parameter in self.parameters.values()}
        lines += [f"Hessian diagonals, {route}: {text}" for route, text in ROUTES.items() if route in routes]
        lines += [str(self.refusal)] if self.refusal is not None else []
        return Group(table, below, *map(Text, lines))

    def __str__(self) -> str:
        return plain_text(self, width=100)


def _cells(parameter: ParameterCoverage) -> list[str]:
    name = " = ".join([parameter.name, *parameter.aliases])
    shape = "x".join(map(str, parameter.shape)) or "1"
    counts = Counter(
        (use.function, use.structure if use.direct else f"{use.structure}, then Dense")
        for use in parameter.uses
    )
    functions = [f"{name} x {n}" if n > 1 else name for (name, _), n in counts.items()]
    functions += [f"not recorded: {node}" for node in parameter.missing]
    used = ", ".join(functions) or parameter.state
    refused = ["refused"] * any(use.refusal for use in parameter.uses)
    structures = [*dict.fromkeys(structure for _, structure in counts), *refused]
    return [name, shape, parameter.layer, used, ", ".join(structures), parameter.factors, parameter.hessian]
