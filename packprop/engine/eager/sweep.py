"""The gradient of a branch, computed piece by piece."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from packprop.engine.eager.choices import ASKED, Keep, bad, choose_keep, to_keep
from packprop.engine.eager.pieces import Job, surroundings
from packprop.engine.eager.reach import Key, clock, reached, tensors_of
from packprop.engine.memory.bytes import byte_count
from packprop.engine.tensors.dry import has_fault
from packprop.engine.tensors.hooks import undisturbed
from packprop.engine.tensors.precision import accumulation_dtype
from packprop.engine.tensors.random import random_states
from packprop.errors import PackpropError, PackpropWarning


class Sweep:
    """Evaluates a job piece by piece; takes each piece's gradient, then frees its graph.

    Args:
        job: The job to evaluate.
        leaves: The tensors of its arguments.
        cotangent: The gradient of the value; None for ones, before the backward pass.
        known: Tensors that the branch takes from the graph around it.
    """

    def __init__(
        self,
        job: Job,
        leaves: list[Tensor],
        cotangent: Tensor | None = None,
        known: Mapping[Key, Tensor] | None = None,
    ) -> None:
        self.job, self.leaves, self.cotangent, self.known = job, leaves, cotangent, known or {}
        self._trained = [number for number, leaf in enumerate(leaves) if leaf.requires_grad]
        self.keep: Keep = "exact" if cotangent is not None else job.choices["keep"]
        self.budget = None if cotangent is not None else job.choices["memory"]
        self.inputs: dict[int, Tensor] = {}
        self.shared: dict[Key, Tensor] = {}
        self.outside: dict[Key, Tensor] = {}
        self.values: list[Tensor] = []
        self._is_attached = False

    def run(self) -> Tensor:
        """Go through all pieces; return the value."""
        detached = list(self.leaves)
        for number in self._trained:
            detached[number] = detached[number].detach()
        check = self.job.choices["check"] and self.cotangent is None
        for number, (start, length, piece) in enumerate(self.job.split(detached)):
            before = random_states({leaf.device for leaf in piece}) if check else {}
            self._piece(start, length, piece)
            if check and number == 1:
                self._compare(detached, before)
        if self._trained and not self._is_attached:
            why = "it returned a detached value, but there are inputs that require a gradient"
            instead = "compute it without detach, .data and no_grad, or call fn by itself"
            raise bad(self.job.where, why, instead)
        self.inputs = {n: self._final(self.inputs[n], self.leaves[n]) for n in sorted(self.inputs)}
        self.shared = {key: self._final(g, self.outside[key]) for key, g in self.shared.items()}
        return self.job.join(self.values)

    def _final(self, gradient: Tensor, like: Tensor) -> Tensor:
        """Return the gradient of all pieces, in the form in which packprop keeps it."""
        if self.keep == "recompute":
            return gradient
        # A sum over pieces is of a wider dtype than its terms.
        rounded = gradient if isinstance(self.keep, torch.dtype) else gradient.to(like.dtype)
        self._require_range(rounded, like)
        return to_keep(rounded, self.keep)

    def _require_range(self, gradient: Tensor, like: Tensor) -> None:
        """Refuse a gradient with entries beyond the range of the precision in which packprop keeps it."""
        has_numbers = type(gradient) is Tensor and gradient.layout is torch.strided and gradient.numel()
        if not has_numbers or not isinstance(self.keep, torch.dtype) or gradient.is_complex():
            return
        if self.keep in (gradient.dtype, like.dtype):
            return
        low, high = gradient.aminmax()
        largest, end = torch.maximum(-low, high), torch.finfo(self.keep).max
        rounded = largest.to(self.keep).to(largest.dtype)  # some precisions have no infinity
        if has_fault((largest > end) & (largest.isfinite() | rounded.isfinite())):
            raise PackpropError(
                ASKED,
                f"keep={self.keep}, for a gradient of shape {list(gradient.shape)}",
                f"an entry of it is larger than {end:.3g}: this precision ends there",
                "keep=torch.bfloat16, which has the range of float32; or leave out keep",
            )

    def _piece(self, start: int, length: int, piece: list[Tensor]) -> None:
        # Locals of this function must be gone before the next piece is evaluated.
        job, since = self.job, clock()
        for number in self._trained:
            piece[number].requires_grad_()
        output = job.evaluate(piece, length)
        self.values.append(output.detach().clone())
        if not output.requires_grad:
            return
        self._is_attached = True
        sources, doubt = reached(output, since, self.known, job)
        own = {key: n for n in self._trained if (key := (id(piece[n]), 0)) in sources}
        outside = {key: tensor for key, tensor in sources.items() if key not in own}
        if self.cotangent is None:
            self._decide(output, piece, own, outside)
        self.outside |= outside
        if self.keep == "recompute":
            for number in own.values():
                self.inputs.setdefault(number, self.leaves[number])
            self.shared |= outside
            return
        targets = [sources[key] for key in own] + list(outside.values())
        with surroundings(job.autocast, backward=True), undisturbed(outside.values()):
            seed = job.seed(output, self.cotangent, start)
            gradients = torch.autograd.grad(output, targets, seed, retain_graph=doubt, allow_unused=True)
        for number, gradient in zip(own.values(), gradients, strict=False):
            axis = job.axes[number]
            where = None if axis is None else (axis, start, length)
            self._add(self.inputs, number, gradient, self.leaves[number], where)
        for key, gradient in zip(outside, gradients[len(own) :], strict=True):
            self._add(self.shared, key, gradient, outside[key])

    def _decide(
        self, output: Tensor, piece: list[Tensor], own: dict[Key, int], outside: dict[Key, Tensor]
    ) -> None:
        """Decide what to keep; refuse gradients that cannot be scaled and, under ``check``, mixed samples."""
        job = self.job
        whole = [piece[n] for n in own.values() if n not in job.rows] if job.rows else []
        shared = [*whole, *outside.values()] if job.rows else []
        if self.budget is not None:
            # those of earlier pieces, too: the choice moves on to forms that keep less
            numbers = {**self.inputs, **dict.fromkeys(own.values())}
            targets = [self.leaves[n] for n in numbers] + list((self.outside | outside).values())
            self.keep = choose_keep(byte_count(self.budget) or 0, self.leaves, targets, bool(shared))
        if shared and self.keep != "recompute":
            names = {id(tensor): name for name, tensor in tensors_of(job)}
            tensor = shared[0]
            raise PackpropError(
                ASKED,
                f"{names.get(id(tensor)) or 'a tensor'} of shape {list(tensor.shape)}, which all "
                f"samples share in {job.where}",
                "with one value per sample, the gradient of each value would have to scale that sample's "
                "share of this tensor's gradient, and only the sum over samples is kept",
                "give weights=, if they are known by now; or keep='recompute'; or return the sum",
            )
        if job.rows and job.choices["check"]:
            probe(output, {n: piece[n] for n in own.values() if n in job.rows}, job.where)

    def _add(
        self,
        store: dict[Any, Tensor],
        key: Any,
        gradient: Tensor | None,
        like: Tensor,
        where: tuple[int, int, int] | None = None,
    ) -> None:
        """Write a piece's gradient to its place (axis, start, length), or add it to those of other pieces."""
        if gradient is None:
            return
        if len(self.job.spans) == 1:
            store[key] = gradient
        elif gradient.layout is not torch.strided:
            store[key] = store[key] + gradient if key in store else gradient
        elif where is None:
            if key not in store:
                store[key] = torch.zeros_like(like, dtype=accumulation_dtype(like.dtype))
            store[key].add_(gradient)
        else:
            if key not in store:
                store[key] = to_keep(torch.zeros_like(like), self.keep)
            self._require_range(gradient, like)
            store[key].narrow(*where).copy_(gradient, non_blocking=True)

    def _compare(self, leaves: list[Tensor], before: dict[torch.device, Tensor]) -> None:
        """Refuse a function whose value for the first two pieces together differs from their joined values."""
        job = self.job
        after = random_states({leaf.device for leaf in leaves})
        if any(not torch.equal(state, after[device]) for device, state in before.items()):
            text = f"check=True: {job.where} draws random numbers, so its pieces were not compared"
            warnings.warn(text, PackpropWarning, stacklevel=6)
            return
        (_, first), (middle, second) = job.spans[:2]
        both = [
            leaf if axis is None else leaf.narrow(axis, 0, middle + second)
            for leaf, axis in zip(leaves, job.axes, strict=True)
        ]
        with torch.no_grad():
            together = job.evaluate(both, first + second)
        apart = job.join(self.values[:2])
        tolerance = torch.finfo(apart.dtype).eps ** 0.5
        if apart.shape != together.shape or not torch.allclose(
            apart, together, tolerance, tolerance, equal_nan=True
        ):
            raise bad(
                f"chunks={job.choices['chunks']} with {job.where}",
                f"its first two pieces give {apart.tolist()} apart, {together.tolist()} together",
                "reduction='mean', if it averages; or let it sum, and divide the value; or chunks "
                "along an axis whose entries do not depend on each other",
            )


def probe(output: Tensor, rows: dict[int, Tensor], where: str) -> None:
    """Refuse a function in which the value of a sample depends on another sample's input.

    The numbers of two samples differ in some binary digit. For each digit, one seed selects the values
    of samples whose digit is 1, another those whose digit is 0: any dependence between two samples
    shows as a gradient in the row of a sample that was not selected.
    """
    index = torch.arange(len(output), device=output.device)
    for digit in range((len(output) - 1).bit_length()):
        ones = index >> digit & 1 == 1
        for selected in (ones, ~ones):
            gradients = torch.autograd.grad(
                output, list(rows.values()), selected.to(output), retain_graph=True, allow_unused=True
            )
            for number, gradient in zip(rows, gradients, strict=True):
                if gradient is None:
                    continue
                leak = gradient[~selected].nan_to_num(0).ne(0).reshape(len(gradient[~selected]), -1).any(1)
                if leak.any():
                    sample = index[~selected][leak][0].item()
                    raise bad(
                        where,
                        f"values of other samples depend on sample {sample} of input {number}, "
                        "so a factor per sample cannot scale its gradient",
                        "return the sum over samples, or keep='recompute'",
                    )
