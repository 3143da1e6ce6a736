"""``with clipped_gradients(...):`` around ``backward()`` clips each sample's gradient, then sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from packprop.engine.context import Backpack
from packprop.engine.passes.clipping import ASKED, ClippedNorms, Clipping, Per, Reduction
from packprop.engine.passes.saving import Hook, factor_of
from packprop.errors import BadInput
from packprop.types import Extensions


def clipped_gradients(
    *extensions: Extensions,
    max_norm: float | Tensor | Mapping[str, float],
    per: Per = "all",
    reduction: Reduction | None = None,
    loss_scale: float | Tensor = 1.0,
    extension_hook: Hook | None = None,
    probes: Sequence[int] | Tensor | None = None,
) -> ClippedGradients:
    """Clip each sample's gradient before the sum, in every backward pass inside the context.

    The pass adds to ``.grad`` what a plain pass would add, with each sample's part multiplied by
    ``min(1, max_norm / norm)``. The norm is that of the gradient of the sample's own loss: N times its part of
    a mean loss, or its part of a sum. So this is the step of Abadi et al. (2016), except for the noise, which
    you add. A penalty that no sample enters is added unclipped.

    This takes one backward pass. It keeps per-sample gradients only if they take no more memory than the
    tensors that they are made of: the inputs of a function and the gradients at its outputs. Otherwise it keeps
    these tensors until it knows all norms; autograd would free them along the way. See NOTE [Clipping]
    (``engine/passes/clipping.py``).

    A table that is looked up with ``sparse=True`` gets a sparse gradient of its nonzero rows, as without
    clipping; a dense one exists for a moment.

    If you multiply the output of the loss function by a factor, the factor is part of the loss and of the
    norms. If you divide a sum by N yourself to get a mean, pass ``loss_scale=1 / N``.

    If the divisor of a mean depends on data (``ignore_index``, weights of classes), so do the losses of
    samples; those of a sum do not. An empty batch, which Poisson sampling may draw, adds what a plain pass
    adds: zeros, and penalties. Each process clips its own samples. There is no memory budget here: ``backpack``
    has one. If you nest contexts, the inner one is active: a ``backpack`` inside this one clips nothing, and
    packprop warns you.

    Args:
        extensions: Quantities to compute along, as in ``backpack``, from the gradients before clipping.
        max_norm: The largest norm; with ``per="module"`` or ``"parameter"`` also one for each of them by name.
            packprop does not wait for the value of a tensor: gradients are NaN if it is not positive.
        per: The parameters that share a norm: ``"all"``, those of each ``"module"``, or each ``"parameter"`` by
            itself.
        reduction: Says that the loss is the ``"mean"`` or the ``"sum"`` of its samples' losses. You need it
            only if no loss function of torch says so; packprop refuses it if one says something else.
        loss_scale: The factor on the loss before ``backward()``, from a gradient scaler or gradient
            accumulation. Norms are those of the loss without it; ``.grad`` has the factor.
        extension_hook: As in ``backpack``.
        probes: As in ``backpack``: samples that do not count in ``.grad``, as if the loss were taken over the
            others alone. Norms and factors are those of the others, in their order; probes are not clipped.

    Returns:
        The context, which also holds ``norms``, ``layer_norms``, ``fraction`` and ``bound`` after a pass.

    Raises:
        BadInput: For invalid arguments. In the backward pass, if packprop cannot tell whether the loss is a
            mean, if it is not what ``reduction`` says, or for a name without a bound or a bound without a name.
        PackpropError: In the backward pass, before any work, for mixed samples, hooks inside the model,
            sharded or complex parameters, ``create_graph`` and ``inputs``.

    >>> import packprop
    >>> _ = torch.manual_seed(0)
    >>> model, loss = torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss()
    >>> _ = packprop.extend(model), packprop.extend(loss)
    >>> with packprop.clipped_gradients(max_norm=0.5) as clipped:
    ...     loss(model(torch.randn(4, 3)), torch.tensor([0, 1, 0, 1])).backward()
    >>> clipped.norms.shape, bool(model.weight.grad.norm() <= 0.5)
    (torch.Size([4]), True)
    """
    return ClippedGradients(extensions, max_norm, per, reduction, loss_scale, extension_hook, probes)


class ClippedGradients(Backpack):
    """The context that ``clipped_gradients`` returns, with the results of its last pass."""

    call = "clipped_gradients"

    def __init__(
        self,
        extensions: Sequence[Extensions],
        max_norm: float | Tensor | Mapping[str, float],
        per: Per,
        reduction: Reduction | None,
        loss_scale: float | Tensor,
        hook: Hook | None,
        probes: Sequence[int] | Tensor | None,
    ) -> None:
        scale = factor_of(self.call, loss_scale)
        clipping = Clipping(max_norm, per, reduction, scale, self._note)
        super().__init__(extensions, hook, None, False, loss_scale, probes=probes, clipping=clipping)
        self._per = per
        self._clipped: ClippedNorms | None = None

    @property
    def norms(self) -> Tensor:
        """Norms of the gradients of samples' own losses in all parameters, before clipping, ``[n]``."""
        norms = self._last.norms
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(norms, dim=0)

    @property
    def layer_norms(self) -> dict[str, Tensor]:
        """The ``norms`` of each module or parameter by name, ``[n]`` each; empty with ``per="all"``."""
        last = self._last
        pairs = zip(last.groups, last.norms, strict=True)
        return {} if self._per == "all" else {group.name: norms for group, norms in pairs}

    @property
    def fraction(self) -> Tensor:
        """The share of samples whose gradient was clipped, ``[]``: the mean over modules or parameters."""
        return (self._last.factors < 1).to(self._last.norms.dtype).mean()

    @property
    def bound(self) -> Tensor:
        """The largest norm that one sample's clipped gradient may have in all parameters, ``[]``.

        This is ``max_norm`` itself, or the root of the sum of squares over modules or parameters; scale your
        noise by it. It holds for a loss that is a sum: a mean over N samples divides ``.grad`` by N, and a
        factor on the loss multiplies it, so one sample changes ``.grad`` by less or more.
        """
        bound: Tensor = torch.linalg.vector_norm(self._last.bounds)
        return bound

    @property
    def _last(self) -> ClippedNorms:
        if self._clipped is None:
            raise BadInput(
                ASKED,
                "the results of the last backward pass",
                "no backward pass was seen inside the context",
                "first call loss.backward() inside `with packprop.clipped_gradients(...) as clipped:`",
            )
        return self._clipped

    def _note(self, clipped: ClippedNorms) -> None:
        self._clipped = clipped
