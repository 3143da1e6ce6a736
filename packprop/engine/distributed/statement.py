"""Statements that ranks exchange before a pass, and refusals if these do not fit together."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from packprop.engine.curvature.second_order import factors_on_losses
from packprop.engine.distributed.merging import PATIENCE, arrive, exchanged
from packprop.engine.graph.graph import Graph
from packprop.engine.passes.loss_terms import reduction_and_divisor
from packprop.errors import BadInput, PackpropError
from packprop.types import Extension

ASKED = "Values of the samples of all ranks were asked for."

Share = Literal["terms", "samples", "equal"]
"""The weight of each rank's loss in the loss of all of them."""


@dataclass(frozen=True)
class AllRanks:
    """Makes values cover the samples of all ranks, as if one process had them all.

    Sums, moments and Kronecker factors are the same on every rank. Values with a row for each sample stay on
    the rank of the sample, at the scale of the loss of all ranks, unless you gather them.

    Args:
        share: The weight of a rank's loss in the loss of all ranks: values are derivatives of that loss.
            ``"terms"``: as if there were one loss over all samples: under a mean, the rank's number of terms
            divided by that of all ranks, under a sum 1. ``"samples"``: the rank's number of samples divided by
            that of all ranks. ``"equal"``: 1 divided by the number of ranks, as in the gradients of
            ``DistributedDataParallel`` and ``fully_shard``. Or a number of at least 0, for a loss that is
            already weighted.
        gather: Give every rank the rows of all samples, in the order of ranks.
        group: The ranks whose samples count; if parameters are sharded, the ranks that share them. ``None`` for
            all.
        timeout: Seconds to wait for the other ranks before each pass with gloo; the error names the ranks that
            did not come. Other backends wait by their own timeout.

    Raises:
        BadInput: For a share that is neither a name nor a number of at least 0; for a timeout of 0 or less.
    """

    share: Share | float = "terms"
    gather: bool = False
    group: torch.distributed.ProcessGroup | None = None
    timeout: float = PATIENCE

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        named = isinstance(self.share, str) and self.share in get_args(Share)
        is_number = isinstance(self.share, (int, float)) and not isinstance(self.share, bool)
        if not (named or (is_number and 0 <= float(self.share) < math.inf)):
            raise BadInput(
                f"AllRanks(share={self.share!r}) was asked for.",
                "share",
                "it is neither a known name nor a number of at least 0",
                f"choose from {', '.join(map(repr, get_args(Share)))}, or give what this rank's loss is "
                "multiplied by in the loss of all ranks",
            )
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)) or self.timeout <= 0:
            raise BadInput(
                f"AllRanks(timeout={self.timeout!r}) was asked for.",
                "timeout",
                "it is no positive number",
                "give seconds",
            )


def ranks_of(ranks: Any) -> AllRanks | None:
    """Read the argument ``ranks`` of ``backpack``: ``None`` for this rank's samples.

    Raises:
        BadInput: If it is neither ``"own"``, ``"all"`` nor an ``AllRanks``, or if this process is in no process
            group, or not in that of ``AllRanks``.
    """
    if ranks == "own":
        return None
    chosen = AllRanks() if ranks == "all" else ranks
    if not isinstance(chosen, AllRanks):
        raise BadInput(
            "backpack(ranks=...) was entered.",
            f"ranks={ranks!r}",
            "it does not say which samples values cover",
            "give 'own', 'all', or packprop.AllRanks(...)",
        )
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise BadInput(
            ASKED,
            f"ranks={ranks!r}",
            "there is no process group in this process",
            "call torch.distributed.init_process_group() first, and start the program by torchrun",
        )
    if torch.distributed.get_rank(chosen.group) < 0:
        raise BadInput(
            ASKED,
            "AllRanks(group=...)",
            "this process is not in that group",
            "give the group that this process shares its data with",
        )
    return chosen


BY_NUMBER = (
    "give the weight of each rank's loss: packprop.AllRanks(share=...), 'equal' for the mean over ranks, as in "
    "the gradients of DistributedDataParallel, 'samples', or a number"
)


@dataclasses.dataclass(frozen=True)
class LossTerms:
    """One loss function of a rank's loss.

    Args:
        reduction: ``"mean"`` or ``"sum"``; empty if it is neither.
        terms: The number by which a mean divides the sum.
        factor: The factor on its value on the way to the rank's loss.
    """

    reduction: str
    terms: float
    factor: float


@dataclasses.dataclass(frozen=True)
class Statement:
    """The statement of one rank about its pass.

    Args:
        refused: The reason why this rank cannot take part; empty if it can.
        asked: Its extensions, and how it puts values together.
        models: The number of models that ``extend`` was called on.
        samples: Its number of samples.
        counts: The number of samples that each extension takes.
        losses: Its loss functions, in the order of their calls.
        is_whole: Says that all of its loss comes from these.
        has_penalties: Says that its loss has added terms that no sample enters.
        leaves: Names of its parameters, with their numbers of entries.
    """

    refused: str = ""
    asked: tuple[str, ...] = ()
    models: int = 0
    samples: int = 0
    counts: tuple[int, ...] = ()
    losses: tuple[LossTerms, ...] = ()
    is_whole: bool = True
    has_penalties: bool = False
    leaves: Mapping[str, int] = dataclasses.field(default_factory=dict)


def described(ranks: AllRanks, extensions: Sequence[Extension]) -> tuple[str, ...]:
    """Describe the properties that must be the same on all ranks."""
    share = ranks.share if isinstance(ranks.share, str) else "a number"
    return (*map(_described, extensions), f"share: {share}", f"gather: {ranks.gather}")


def _described(extension: Extension) -> str:
    own = ("generator", "subsampling")  # these may differ
    fields: tuple[Any, ...] = dataclasses.fields(extension) if dataclasses.is_dataclass(extension) else ()
    values = {each.name: getattr(extension, each.name) for each in fields if each.name not in own}
    options = [
        f"{name}={_described(value) if isinstance(value, Extension) else repr(value)}"
        for name, value in values.items()
    ]
    rows = [f"{row.over_n}**{row.degree}" for row in extension.rows]
    return f"{extension.name}({', '.join(options)}) as {extension.savefield}: {', '.join(rows)}"


def losses_of(graph: Graph) -> tuple[LossTerms, ...]:
    """Return the loss functions of a rank's loss."""
    terms = []
    for loss, factor in factors_on_losses(graph):
        known = reduction_and_divisor(loss.call, loss.layout) if factor.numel() == 1 else None
        reduction, divisor = known or ("", math.nan)
        terms.append(LossTerms(reduction, float(divisor), float(factor.sum())))
    return tuple(terms)


def agreed(ranks: AllRanks, own: Statement) -> list[Statement]:
    """Exchange statements with all ranks; return them in order, or nothing if this rank itself has refused.

    Raises:
        PackpropError: On every rank, if a rank cannot take part, or if ranks ask for different values.
    """
    arrive(ranks.group, ranks.timeout)
    statements = exchanged(own, ranks.group)
    if own.refused:
        return []
    for rank, statement in enumerate(statements):
        if statement.refused:
            raise PackpropError(
                ASKED,
                f"rank {rank}",
                f"it has refused its part of the pass:\n{statement.refused}\n",
                "read the error of that rank",
            )
    for rank, statement in enumerate(statements):
        for other, mine in zip(statement.asked, statements[0].asked, strict=False):
            if other != mine:
                raise _different(rank, mine, other)
        if len(statement.asked) != len(statements[0].asked):
            raise _different(rank, ", ".join(statements[0].asked), ", ".join(statement.asked))
        if statement.models != statements[0].models:
            raise PackpropError(
                ASKED,
                f"rank {rank}",
                f"it has extended {statement.models} models, and rank 0 {statements[0].models}: ranks name a "
                "parameter by the number of the call of packprop.extend for its model",
                "call packprop.extend for the same models in the same order on every rank",
            )
    return statements


def _different(rank: int, first: str, other: str) -> PackpropError:
    return PackpropError(
        ASKED,
        f"rank {rank}",
        f"it asks for {other}, where rank 0 asks for {first}",
        "ask for the same extensions with the same options, in the same order, on every rank",
    )


def shares(ranks: AllRanks, statements: Sequence[Statement]) -> list[float]:
    """Return the weight of each rank's loss in the loss of all ranks; ``NaN`` if only the rank knows it.

    Raises:
        PackpropError: On every rank, if a weight is not known.
    """
    if ranks.share == "equal":
        return [1 / len(statements)] * len(statements)
    if ranks.share == "samples":
        total = sum(statement.samples for statement in statements)
        return [statement.samples / max(total, 1) for statement in statements]
    if not isinstance(ranks.share, str):
        return [math.nan] * len(statements)
    there = [(rank, statement) for rank, statement in enumerate(statements) if statement.samples]
    for rank, statement in there:
        _require_known(rank, statement, there[0][1])
    if not there:
        return [0.0] * len(statements)
    if there[0][1].losses[0].reduction == "sum":
        return [1.0 if statement.samples else 0.0 for statement in statements]
    totals = [sum(each.losses[place].terms for _, each in there) for place in range(len(there[0][1].losses))]
    found = []
    for rank, statement in enumerate(statements):
        parts = [loss.terms / (total or 1) for loss, total in zip(statement.losses, totals, strict=False)]
        if any(not math.isclose(part, parts[0], rel_tol=1e-9, abs_tol=1e-12) for part in parts):
            raise PackpropError(
                ASKED,
                f"rank {rank}, whose loss is made of {len(parts)} loss functions",
                f"it holds another share of the terms of each ({', '.join(f'{part:.3g}' for part in parts)}): "
                "no single weight describes its loss within the loss of all ranks",
                f"call backward() for one loss function after the other; or {BY_NUMBER}",
            )
        found.append(parts[0] if parts else 0.0)
    return found


def _require_known(rank: int, statement: Statement, first: Statement) -> None:
    """Refuse a loss whose weight is not known."""
    reductions = [loss.reduction for loss in statement.losses]
    error = functools.partial(_unknown, rank)
    if not statement.is_whole or not reductions or "" in reductions:
        raise error("it is not made of loss functions of torch that reduce by mean or sum alone")
    if len(set(reductions)) > 1:
        raise error("it is made of means and of sums")
    if reductions != [loss.reduction for loss in first.losses]:
        raise error("it is not made of the same loss functions as that of other ranks")
    for loss, other in zip(statement.losses, first.losses, strict=True):
        if loss.terms and other.terms and not math.isclose(loss.factor, other.factor, rel_tol=1e-12):
            raise error(
                f"its loss function is multiplied by {loss.factor:.9g}, that of another rank by "
                f"{other.factor:.9g}, as if it were weighted by hand"
            )
    if reductions[0] == "sum" and statement.has_penalties:
        raise error("a penalty is added to a sum: every rank adds one, and the loss of all ranks has one")


def _unknown(rank: int, why: str) -> PackpropError:
    return PackpropError(
        ASKED,
        f"the loss of rank {rank}",
        f"{why}: its weight in the loss of all ranks is not known",
        f"use one loss function with reduction='mean' or 'sum', the same factor on every rank; or {BY_NUMBER}",
    )


def merged_counts(statements: Sequence[Statement], extensions: Sequence[Extension]) -> dict[Extension, int]:
    """Return the number of samples that each extension takes on all ranks."""
    return {
        extension: sum(statement.counts[place] for statement in statements if statement.counts)
        for place, extension in enumerate(extensions)
    }


def leaves_of_all(statements: Sequence[Statement]) -> dict[str, int]:
    """Return the names of the parameters of all ranks, with their numbers of entries, in one order for all."""
    names: dict[str, Any] = {}
    for statement in statements:
        names |= {name: entries for name, entries in statement.leaves.items() if name not in names}
    return names
