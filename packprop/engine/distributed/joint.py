"""One backward pass on all ranks: keeps its results until it is over, then merges and saves them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from packprop.engine.algebra.monoid import MOMENTS, SINGLE, lift, nothing_like, rescale
from packprop.engine.distributed.merging import RefusedElsewhere, in_buckets, merge_over_ranks, require_well
from packprop.engine.distributed.statement import (
    ASKED,
    AllRanks,
    Statement,
    agreed,
    described,
    leaves_of_all,
    losses_of,
    merged_counts,
    shares,
)
from packprop.engine.graph.graph import Graph
from packprop.engine.passes.nothing import saved_nothing
from packprop.engine.passes.request import Request, require_possible, tasks_by_seed
from packprop.engine.passes.saving import ResultSaver
from packprop.engine.recording.marks import EXTENDED
from packprop.engine.tensors.names import named_parameters
from packprop.engine.tensors.sharding import named_wholes
from packprop.errors import PackpropError
from packprop.types import Extension

AT_ONCE = 2**22
"""The number of entries of parameters at which a group of results is large enough to merge."""


class JointPass:
    """The part of one rank in a pass whose values cover the samples of all ranks.

    A rank that leaves the context by an error tells it to the other ranks, if they wait for this rank.

    Args:
        ranks: The ranks, and how their samples count.
        extensions: The extensions of the pass.
    """

    def __init__(self, ranks: AllRanks, extensions: Sequence[Extension]) -> None:
        self._ranks, self._extensions = ranks, extensions
        self._results: dict[str, dict[Extension, list[Any]]] = {}
        self._counts: dict[tuple[int, int], Any] = {}  # the rows of each result: samples that count, or tokens
        self._names: dict[int, str] = {}
        self._own: dict[str, Tensor] = {}
        self._statements: list[Statement] | None = None
        self._share = 0.0
        self._groups: list[list[str]] = []  # names of parameters whose results merge together
        self._is_under_way = False
        self._others_wait = False  # they come to `require_well` next
        self.rows = range(0)
        """This rank's samples among those of all ranks, in the order of ranks."""

    def __enter__(self) -> JointPass:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, RefusedElsewhere):
            return
        if self._others_wait:
            self._others_wait = False
            with contextlib.suppress(PackpropError, RuntimeError):  # the error that is on its way says more
                require_well(self._ranks.group, str(error) or type(error).__name__)
        elif self._statements is None:
            self._statements = []
            asked = described(self._ranks, self._extensions)
            try:
                agreed(self._ranks, Statement(refused=str(error) or type(error).__name__, asked=asked))
            except PackpropError as told:
                error.add_note(f"(Not all other ranks could be told of this: {told.where}.)")

    @property
    def finds_samples(self) -> bool:
        """Tell whether the number of samples must be known."""
        return self._ranks.share == "samples"

    def require_possible(self, create_graph: bool) -> None:
        """Refuse values that cannot be merged over ranks.

        Raises:
            PackpropError: If there are any, on every rank.
        """
        if create_graph:
            raise PackpropError(
                ASKED,
                "backward(create_graph=True)",
                "nothing can differentiate the exchange between ranks",
                "ask for values of this rank's own samples, ranks='own'",
            )
        for extension in self._extensions:
            why = _unmergeable(extension)
            if why:
                raise PackpropError(ASKED, f"extension {extension.name}", *why)

    def agree(self, graph: Graph, request: Request | None, saver: ResultSaver | None = None) -> None:
        """Exchange statements with the other ranks before any rank begins to work.

        ``request`` is ``None`` if this rank has no samples, or no use of a parameter. If no rank has samples,
        ``saver`` saves empty values.

        Raises:
            PackpropError: On every rank, if a rank cannot take part, or if statements do not fit together.
        """
        own = Statement(asked=described(self._ranks, self._extensions))
        self._own, several = _parameters()
        own = replace(own, models=EXTENDED.numbered)
        if request is not None:
            require_possible(request, tasks_by_seed(self._extensions))
            self._names = _names(graph, self._own, several)
            own = replace(
                own,
                samples=graph.samples,
                counts=tuple(
                    graph.samples if each.subsampling is None else len(each.subsampling)
                    for each in self._extensions
                ),
                losses=losses_of(graph) if self._ranks.share == "terms" else (),
                is_whole=not graph.without_loss,
                has_penalties=bool(graph.terms) and any(each.takes_hessian for each in self._extensions),
                leaves={self._names[id(leaf)]: leaf.numel() for leaf in graph.leaves()},
            )
        rank = torch.distributed.get_rank(self._ranks.group)
        told = self._statements = []  # from here on no rank waits for this one
        told += agreed(self._ranks, own)
        share = shares(self._ranks, told)[rank]
        self._share = float(self._ranks.share) if not isinstance(self._ranks.share, str) else share
        start = sum(statement.samples for statement in told[:rank])
        self.rows = range(start, start + own.samples)
        entries = leaves_of_all(told)
        self._groups = [*in_buckets(entries, entries.__getitem__, AT_ONCE)]
        self._others_wait = True
        if saver is not None and not any(statement.samples for statement in told):
            saved_nothing(graph, self._extensions, saver)

    def before_backward(self) -> None:
        """Wait until all ranks are about to run their own backward pass, which may exchange gradients.

        Raises:
            RefusedElsewhere: If another rank has failed in its sweeps.
        """
        if not self._is_under_way:
            self._is_under_way = True
            self._require_well()
            self._others_wait = bool(self._groups)

    def _require_well(self) -> None:
        self._others_wait = False
        require_well(self._ranks.group)

    def keep(self, leaf: Tensor, results: dict[Extension, list[Any]]) -> None:
        """Keep the results of a leaf until the pass is over."""
        self._results[self._names[id(leaf)]] = results
        for place, extension in enumerate(self._extensions):
            for index, (row, value) in enumerate(zip(extension.rows, results.get(extension, []), strict=False)):
                if row.over_n is MOMENTS and value is not None:
                    self._counts[place, index] = value.samples
                elif row.over_n.axis is not None and value is not None:
                    self._counts[place, index] = value.shape[row.over_n.axis]

    def hand_over(self, saver: ResultSaver) -> None:
        """Merge the results of all ranks, and save them, even on parameters that this rank has not used."""
        assert self._statements is not None
        self.before_backward()  # if the user's own pass did not run
        counts = merged_counts(self._statements, self._extensions)
        for place, names in enumerate(self._groups, 1):
            own = {key: value for name in names for key, value in self._partial(name)}
            keys = ((name, *which) for name in names for which in self._counts)
            absent = {key: int(self._counts[key[1:]]) for key in keys if key not in own}
            self._require_well()
            merged = merge_over_ranks(
                own,
                lambda key: self._extensions[key[1]].rows[key[2]].over_n,
                group=self._ranks.group,
                gather=self._ranks.gather,
                absent=absent,
            )
            self._others_wait = place < len(self._groups)  # the other ranks hear of a hook that fails
            for name in names:
                leaf = self._own.get(name)
                if leaf is not None:
                    saver.save(leaf, self._values(name, merged), counts)

    def _partial(self, name: str) -> Iterator[tuple[tuple[str, int, int], Any]]:
        """Yield this rank's results for one parameter, at the scale of the loss of all ranks."""
        results = self._results.pop(name, {})
        for place, extension in enumerate(self._extensions):
            for index, (row, value) in enumerate(zip(extension.rows, results.get(extension, []), strict=False)):
                if value is not None:
                    counts = self._share or not row.degree  # without a share, NaN must not count
                    scaled = rescale(value, self._share, row.degree) if counts else nothing_like(value)
                    yield (name, place, index), lift(row.over_n, scaled)

    def _values(self, name: str, merged: dict[tuple[str, int, int], Any]) -> dict[Extension, list[Any]]:
        values: dict[Extension, list[Any]] = {}
        for place, extension in enumerate(self._extensions):
            found = [merged.get((name, place, index)) for index in range(len(extension.rows))]
            if any(each is not None for each in found):
                pairs = zip(extension.rows, found, strict=True)
                values[extension] = [None if each is None else row.over_n.result(each) for row, each in pairs]
        return values


def _unmergeable(extension: Extension) -> tuple[str, str] | None:
    """Return why values of ranks cannot be merged, and what to do; ``None`` if they can be."""
    own = "ask for values of this rank's own samples, ranks='own'"
    for row in extension.rows:
        if row.after is not None:
            return "it goes over the samples twice, and needs the results of all ranks in between", own
        if row.over_n is SINGLE:
            return "its value is a function of vectors, which belongs to the graph of one rank", own
        if row.whole:
            return (
                "it relates all samples to each other, those of one rank to those of another: no merge of "
                "the results of single ranks gives it",
                own,
            )
    return None


def _parameters() -> tuple[dict[str, Tensor], set[str]]:
    """Return the parameters of all extended models by names that ranks share, and names that several share."""
    found: dict[str, Tensor] = {}
    several: set[str] = set()
    for module, title in list(EXTENDED.items()):
        own: dict[str, Tensor] = {}
        for name, parameter in (*named_wholes(module), *named_parameters(module)):
            own.setdefault(f"{name} of {title}", parameter)
        several |= own.keys() & found.keys()
        found = own | found
    return found, several


def _names(graph: Graph, parameters: dict[str, Tensor], several: set[str]) -> dict[int, str]:
    """Name each leaf as all ranks name it: after the first extended model that it is a parameter of.

    Raises:
        PackpropError: If a leaf has no such name, or one that parameters of several models share.
    """
    names: dict[int, str] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), name)
    for leaf in graph.leaves():
        known = names.get(id(leaf))
        if known is None or known in several:
            raise PackpropError(
                ASKED,
                graph.name(leaf),
                "no name tells the ranks which parameter it is: "
                + ("it is in no extended model" if known is None else f"several models have {known!r}"),
                "call packprop.extend(model) on every rank, with it among the model's parameters; for a copy "
                "of an extended model, packprop.extend(packprop.restore(copy))",
            )
    return names
