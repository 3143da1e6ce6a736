"""Square roots of the Hessians of losses, and Monte Carlo draws from the same distributions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.engine.algebra.decompositions import eigh
from packprop.engine.functions.losses.description import Root
from packprop.engine.tensors.dry import has_fault
from packprop.engine.tensors.precision import accumulation_dtype
from packprop.engine.tensors.random import device_of_draws, drawn
from packprop.errors import PackpropError

MANY_CLASSES = 256
"""From more classes than this, packprop draws one in two steps."""


def softmax_root(logits: Tensor, scale: Tensor) -> Root:
    """Return the root of ``scale * (diag(p) - p p^T)``, which has rank ``c - 1``.

    Draws are ``sqrt(scale) (p - e_y)``, and entrywise columns are ``sqrt(scale p_k) (e_k - p)``. These columns
    are linearly dependent: weighted by ``sqrt(p)`` they sum to zero. A reflection that maps ``sqrt(p)`` to the
    last class z (Householder 1958) leaves the columns
    ``sqrt(scale p_k) (e_k - (p + sqrt(p_z) e_z) / (1 + sqrt(p_z)))`` of the other classes.
    """
    strength = scale.sqrt()
    classes, wide = logits.shape[-1], accumulation_dtype(logits.dtype)
    made: list[Tensor] = []

    def log_p(t: int) -> Tensor:
        if not made:  # in sixteen bits, the probabilities of a thousand classes are each a few percent off
            made.append(logits.log_softmax(-1, dtype=wide))
        return made[0][:, t]

    def entrywise(t: int, start: int, stop: int) -> Tensor:
        log_p_t = log_p(t)
        unit = torch.eye(classes, dtype=log_p_t.dtype, device=log_p_t.device)[start:stop]
        root = (0.5 * log_p_t[:, start:stop]).exp()  # stays differentiable where p underflows
        columns = (unit[:, None] - log_p_t.exp()) * root.T[..., None] * strength[:, t, None]
        return columns.to(logits.dtype)

    def draw(draws: int, generator: torch.Generator | None) -> Tensor:
        p = logits.softmax(-1)
        index = drawn_classes(p.reshape(-1, classes), draws, generator)
        index = index.T.reshape(draws, *p.shape[:-1], 1)
        less = p.new_full((), -1.0).expand(index.shape)
        if p.requires_grad or strength.requires_grad:
            return p.expand(draws, *p.shape).scatter_add(-1, index, less) * strength[..., None]
        columns = p[None] if draws == 1 else p.repeat(draws, *[1] * p.dim())
        # in place: the columns are as large as the logits, and memory may not hold more
        return columns.scatter_add_(-1, index, less).mul_(strength[..., None])

    def reflected(t: int, start: int, stop: int) -> Tensor:
        root = (0.5 * log_p(t)).exp()
        last, off_diagonal = root[:, -1:], root.square()
        off_diagonal[:, -1:].add_(last)
        off_diagonal = off_diagonal / torch.rsub(last, -1)  # -1 - last
        factor = root[:, start:stop] * strength[:, t : t + 1]
        columns = factor.T.contiguous()[..., None] * off_diagonal
        own = columns.diagonal(start, 0, 2).zero_()
        own.sub_(columns.sum(-1).T)  # a column sums to zero over classes; 1 - p could cancel
        return columns.to(logits.dtype)

    every_class = Root(classes, entrywise, draw)
    return every_class if classes == 1 else Root(classes - 1, reflected, draw, every_class)


def drawn_classes(p: Tensor, draws: int, generator: torch.Generator | None) -> Tensor:
    """Draw classes with the probabilities in each row ``[k, c]``: ``[k, m]``.

    A draw takes a random number for each class. For many classes, packprop first draws a block of classes, and
    then a class in the block.
    """
    classes = p.shape[-1]
    if classes <= MANY_CLASSES:
        return _drawn(p, draws, generator)
    width = math.isqrt(classes)
    whole = classes // width * width
    blocks = [p[:, :whole].unflatten(-1, (-1, width))]
    if whole < classes:  # rows that are not finite could draw an empty block
        blocks.append(p[:, None, whole:])
    sums = torch.cat([each.sum(-1, dtype=accumulation_dtype(p.dtype)) for each in blocks], -1)
    block = _drawn(sums, draws, generator)
    places = block[..., None] * width + torch.arange(width, device=p.device)
    inside = p.gather(-1, places.clamp(max=classes - 1).flatten(1)).view_as(places)
    inside = inside.where(places < classes, 0.0).flatten(0, 1)
    drawn = block * width + _drawn(inside, 1, generator).view_as(block)
    return drawn.clamp_(max=classes - 1)  # rows that are not finite may draw an empty place


def _drawn(p: Tensor, draws: int, generator: torch.Generator | None) -> Tensor:
    """Draw classes ``[k, m]`` from rows ``[k, c]`` that are proportional to their probabilities."""
    weights = p.nan_to_num(1.0 / p.shape[-1])  # a column of NaN is NaN for any target
    weights = weights.to(device_of_draws(generator, p))
    return torch.multinomial(weights, draws, replacement=True, generator=generator).to(p.device)


def gaussian_root(outputs: Tensor, scale: Tensor) -> Root:
    """Return the root of ``2 * scale`` for each entry; draws are from ``Normal(f, sqrt(1/2))``."""
    strength = (2 * scale).sqrt()

    def draw(draws: int, generator: torch.Generator | None) -> Tensor:
        return drawn(torch.randn, (draws, *outputs.shape), outputs, generator) * strength[..., None]

    return Root(1, _entrywise(strength), draw)


def bernoulli_root(logits: Tensor, scale: Tensor) -> Root:
    """Return the root of ``scale * q (1 - q)`` for each entry, with ``q`` the sigmoid.

    Draws are ``sqrt(scale) (q - y)``.
    """
    q = logits.sigmoid()
    strength = scale.sqrt()
    deviation = (0.5 * (F.logsigmoid(logits) + F.logsigmoid(-logits))).exp()

    def draw(draws: int, generator: torch.Generator | None) -> Tensor:
        uniform = drawn(torch.rand, (draws, *q.shape), q, generator)
        return (q - (uniform < q.detach()).to(q.dtype)) * strength[..., None]

    return Root(1, _entrywise(deviation.squeeze(-1) * strength), draw)


def poisson_root(logarithms: Tensor, scale: Tensor) -> Root:
    """Return the root of ``scale * rate`` for each entry, given log-rates.

    Draws are ``sqrt(scale) (rate - y)``.
    """
    strength = scale.sqrt()

    def draw(draws: int, generator: torch.Generator | None) -> Tensor:
        rate = logarithms.exp()
        mean = torch.where(rate.isfinite(), rate, 0.0).detach()  # else the column is not finite either
        mean = mean.expand(draws, *mean.shape).contiguous().to(device_of_draws(generator, mean))
        return (rate - torch.poisson(mean, generator).to(rate.device)) * strength[..., None]

    return Root(1, _entrywise((0.5 * logarithms).exp().squeeze(-1) * strength), draw)


def matrix_root(hessian: Tensor, computed_in: torch.dtype) -> Root:
    """Return the root of any positive semi-definite Hessian ``[n, c, c]``.

    ``computed_in`` is the precision that its entries were computed in. Draws are sums of the columns with
    random signs.

    Raises:
        PackpropError: If an eigenvalue is negative by more than rounding.
    """
    values, vectors = eigh(hessian)
    largest = values.abs().amax().clamp(min=torch.finfo(values.dtype).tiny)
    rounding = hessian.shape[-1] * torch.finfo(values.dtype).eps * 10
    if computed_in != values.dtype:  # entries were rounded once or twice; many classes do not make it worse
        rounding = max(rounding, 8 * torch.finfo(computed_in).eps)
    tolerance = largest * rounding
    if has_fault((values < -tolerance).any()):
        raise PackpropError(
            "A generalized Gauss-Newton quantity was asked for.",
            "the loss function",
            f"its Hessian with respect to the model's output is not positive semi-definite (an eigenvalue "
            f"is {values.min().item():.3g})",
            "use a loss that is convex in the model's output, or ask for Hessian quantities"
            + (", or give the loss its input in float32" if computed_in != values.dtype else ""),
        )
    # the root of a rounded zero has a huge derivative; if nothing is differentiated, it only adds rounding
    of_sample = tolerance * values.abs().amax(-1, keepdim=True) / largest
    kept = values.where(values > (of_sample if torch.is_grad_enabled() else 0.0), 0)
    columns = (vectors * kept.sqrt().unsqueeze(-2)).movedim(-1, 0)  # [k, n, c]

    def draw(draws: int, generator: torch.Generator | None) -> Tensor:
        shape = (draws, hessian.shape[0], columns.shape[0])
        coin = drawn(torch.rand, shape, columns, generator)
        signs = torch.where(coin < 0.5, -1.0, 1.0).to(columns.dtype)
        return torch.einsum("mnk,knc->mnc", signs, columns).unsqueeze(2)

    return Root(columns.shape[0], lambda t, start, stop: columns[start:stop], draw)


def _entrywise(strength: Tensor) -> Callable[[int, int, int], Tensor]:
    """Return ``Root.position`` for entries that are each a position of their own, with one column."""
    return lambda t, start, stop: strength[None, :, t, None]
