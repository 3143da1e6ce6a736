"""A check whether only the values of a pass keep the samples apart.

# NOTE [Hidden mixing]
A gate that is zero keeps samples apart, and mixes them in a later step, when it is not zero. Finite numbers do
not show that: ``0 * x`` is zero. But ``0 * nan`` is NaN. So packprop feeds NaN in at the loss in the rows of
some samples, and zeros in the rows of the others. A row that comes back as NaN depends on the samples that were
fed NaN, for some values of the factors on the way. Functions that drop entries by their values (a rectifier,
``where``, a maximum along an axis, a pool) would also hide NaN; in these sweeps they pass it on to every entry
that they might have taken. If no row of another sample comes back as NaN, the functions themselves keep the
samples apart. packprop keeps this finding for passes of the same functions, options and shapes, unless a node
does not show what its function computes (``is_opaque``). Each sample is fed NaN in half of the sweeps, and no
two samples in the same half, so that some sweep feeds any given sample without any given other. For that, k
sweeps are enough for as many samples as there are ways to choose k / 2 of k (Sperner 1928): 4 sweeps for 6
samples, 7 for 32, 10 for 128. Two random halves are enough for functions, options and edges that packprop has
examined at other shapes: other groups of samples may meet there, but with many samples hardly every group lies
within one half. Indices that the model computes from values stay unchecked.

If NaN comes back in another sample's row, values keep the samples apart, and packprop feeds random numbers in
every pass. It refuses the pass if a trainable parameter hides the mixing: the parameter's own gradient for one
sample then depends on others. This is so if the numbers in other samples' rows, which are zero, have a nonzero
derivative in the parameter; or, if a function on the way has no second derivative, if these rows are no longer
zero while random numbers replace the parameter's zeros. This check costs several times the pass. packprop makes
it in the first pass, again when a buffer or a frozen parameter has changed, and in the 2nd, 4th, 8th pass and
so on, in case that data alone hide the mixing, and whenever the numbers that came back leave a doubt: they left
the range of float16, or differ by very little, as if samples met in one of very many entries. In these passes
it also feeds NaN in if a node does not show what its function computes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from packprop.engine.graph.graph import Graph, ReachedUse
from packprop.engine.graph.sweep import ONE_COLUMN_WITHOUT_INPUTS, SweepOptions, sweep
from packprop.engine.samples.feeding import Feed, Fitting
from packprop.engine.tensors.state import version

_DIFFERENTIABLE = SweepOptions(needs_inputs=False, create_graph=True)


@dataclass
class Look:
    """The schedule of looks for hidden mixing at passes in which values keep the samples apart.

    Args:
        constants: The latest ``constants_of`` the graph.
        passes: Number of passes since these changed: packprop looks at the 1st, 2nd, 4th and so on.
    """

    constants: list[tuple[int, int, int]]
    passes: int = 1

    def is_due(self, graph: Graph) -> bool:
        """Count the next pass, and tell whether to look at it."""
        constants = constants_of(graph)
        if constants != self.constants:
            self.constants, self.passes = constants, 0
        self.passes += 1
        return self.passes.bit_count() == 1


def constants_of(graph: Graph) -> list[tuple[int, int, int]]:
    """Return the identities, versions and places in memory of buffers and frozen parameters."""
    return [
        (id(tensor), version(tensor), tensor.data_ptr())
        for module in graph.modules
        for tensor in (*module.buffers(), *module.parameters())
        if not tensor.requires_grad and tensor.layout is torch.strided
    ]


def parts(samples: int, every: bool) -> list[Tensor]:
    """Return a mask ``[n]`` of samples for each sweep: random halves, or masks that tell any two apart."""
    if not every:
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(samples), device="cpu")
        return [order < samples // 2, order >= samples // 2]
    sweeps = 2
    while math.comb(sweeps, sweeps // 2) < samples:
        sweeps += 1
    fed = torch.zeros(sweeps, samples, dtype=torch.bool, device="cpu")
    for sample, own in zip(range(samples), itertools.combinations(range(sweeps), sweeps // 2), strict=False):
        fed[list(own), sample] = True
    return list(fed)


def dependence(feed: Feed, samples: int, fitting: Fitting, every: bool) -> tuple[Fitting, bool, bool]:
    """Feed NaN in at the rows of some samples, and look for it in the rows of others.

    Args:
        feed: The places where NaN is fed in.
        samples: Number of samples.
        fitting: Layouts at the uses that keep the samples apart in this pass.
        every: Whether to tell any two samples apart.

    Returns:
        The layouts that keep the samples apart for all values, or if there are none, in this pass; whether only
        the values of this pass do so at some use; and whether the layouts are known to do so for all values,
        because NaN came back at every use.
    """
    lasting = {use: [list(layouts) for layouts in places] for use, places in fitting.items()}
    reached: set[ReachedUse] = set()
    for fed in parts(samples, every):
        sizes = feed.sizes_of_nan(fed, lasting)
        if sizes is None:
            return fitting, True, False
        for (use, index, layout), rows in sizes.items():
            if bool(rows[fed].isnan().any()):
                reached.add(use)
            if bool(rows[~fed].isnan().any()):
                lasting[use][index].remove(layout)
        if not all(all(places) for places in lasting.values()):
            kept = {
                use: [own or fitting[use][index] for index, own in enumerate(places)]
                for use, places in lasting.items()
            }
            return kept, True, False
    return lasting, False, len(reached) == len(feed.uses)


def find_hidden(
    graph: Graph, feed: Feed, samples: int, fitting: Fitting
) -> tuple[ReachedUse, Tensor | None] | None:
    """Return a use where samples are mixed although random numbers came back apart, and the leaf that hides it.

    The leaf is ``None`` if no leaf hides it. Return ``None`` if no values near those of the leaves mix samples.
    """
    generator = torch.Generator().manual_seed(samples)
    noise = feed.noise()
    tolerance = max(torch.finfo(output.dtype).eps for output in feed.outputs) ** 0.5

    def leaks(fed: Tensor, options: SweepOptions) -> list[tuple[ReachedUse, Tensor]]:
        """Return rows of samples that were fed zeros: detached if they are not zero, else with their graph."""
        found: list[tuple[ReachedUse, Tensor]] = []

        def visit(use: ReachedUse, cotangents: list[Tensor | None]) -> None:
            for layouts, cotangent in zip(fitting[use], cotangents, strict=True):
                if cotangent is None:
                    continue
                rows = layouts[0].to_front(cotangent, 1)[0]
                other = rows[~fed.to(rows.device)]
                if bool(other.detach().abs().amax() > tolerance * rows.detach().abs().amax()):
                    found.append((use, other.detach()))
                elif other.requires_grad:
                    found.append((use, other))

        sweep(feed.edges, feed.by_sample(noise, fed), feed.uses, visit, options)
        return found

    def leaks_of(leaves: Sequence[Tensor], fed: Tensor) -> list[tuple[ReachedUse, Tensor]]:
        with _zeros_changed(leaves, generator):
            return leaks(fed, ONE_COLUMN_WITHOUT_INPUTS)

    for fed in parts(samples, every=True):
        try:
            for use, leak in leaks(fed, _DIFFERENTIABLE):
                if not leak.requires_grad:
                    return use, None
                leaf = _leaf_that_moves(leak, graph.leaves(), generator)
                if leaf is not None:
                    return use, leaf
        except (RuntimeError, NotImplementedError):  # it cannot be differentiated twice
            found = leaks_of(graph.leaves(), fed)
            if found:
                hiding = (leaf for leaf in graph.leaves() if leaks_of([leaf], fed))
                return found[0][0], next(hiding, None)
    return None


@contextlib.contextmanager
def _zeros_changed(leaves: Sequence[Tensor], generator: torch.Generator) -> Iterator[None]:
    """Replace zeros of trainable leaves by random numbers inside the context, also in saved tensors."""
    changed: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        for leaf in leaves:
            data = leaf.data  # it has a version of its own, and autograd checks that of the leaf
            zero = data == 0
            before = data[zero]  # of either sign
            if leaf.requires_grad and before.numel():
                changed.append((data, zero, before))
                data[zero] = torch.randn(before.shape, generator=generator, device="cpu").to(
                    data.device, data.dtype
                )
        yield
    finally:
        for data, zero, before in changed:
            data[zero] = before


def _leaf_that_moves(leak: Tensor, leaves: Sequence[Tensor], generator: torch.Generator) -> Tensor | None:
    """Return the first leaf in which the zeros of ``leak`` have a nonzero derivative; else ``None``."""
    weights = torch.randn(leak.shape, generator=generator, device="cpu").to(leak.device, leak.dtype)
    slopes = torch.autograd.grad(leak, leaves, weights, retain_graph=True, allow_unused=True)
    pairs = zip(leaves, slopes, strict=True)
    moving = (leaf for leaf, slope in pairs if slope is not None and slope.nan_to_num(0.0, 0.0, 0.0).any())
    return next(moving, None)
