"""Statistics of tokens: like those of samples, with a row for each token of each sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from packprop.engine.algebra.monoid import Moments
from packprop.engine.algebra.statistics import Statistic, along, batch_sq, sq_norm, sum_sq
from packprop.engine.algebra.structures import ByToken, rows


def token_grads(structure: ByToken) -> Tensor:
    """Return gradients of single tokens, one column each, ``[t, n, *p]``."""
    return rows(structure.source)


def token_sum_sq(structure: ByToken) -> Tensor:
    """Sum squares of gradients of tokens over columns, tokens and samples ``[*p]``."""
    return sum_sq(structure.source)


def token_moments(structure: ByToken) -> Moments:
    """Return number, mean and summed squared deviation of the gradients of tokens that count, one column each.

    The others have rows of zeros, which add nothing to the mean.
    """
    gradients = rows(structure.source).flatten(0, 1)
    counts = structure.counted.to(gradients.dtype)
    number = counts.sum()
    mean = gradients.sum(0) / number.clamp(min=1)
    deviations = (gradients - mean) * counts.reshape(-1, *[1] * mean.dim())
    return Moments(number, mean, deviations.square().sum(0))


def token_along(structure: ByToken, directions: Mapping[str, Tensor], name: str, shape: object) -> Tensor:
    """Return inner products of gradients of tokens, one column each, with several directions ``[t, n, q]``.

    Args:
        structure: Structure of the parameter.
        directions: The directions ``[q, *p]`` by name of the parameter.
        name: Name of the parameter.
        shape: Its shape, which the directions have already.
    """
    products = torch.stack([along(structure.folded, [each]) for each in directions[name]], -1)
    by_token: Tensor = products.unflatten(0, (structure.tokens, -1))
    return by_token


def _by_token(statistic: Statistic) -> Callable[[ByToken], Tensor]:
    """Turn a statistic ``[n, ...]`` of the samples into one of their tokens ``[t, n, ...]``."""

    def of_tokens(structure: ByToken) -> Tensor:
        value: Tensor = statistic(structure.folded)
        by_token: Tensor = value.unflatten(0, (structure.tokens, -1))
        return by_token

    return of_tokens


token_sq_norm = _by_token(sq_norm)
"""Squared norms of gradients of tokens, summed over columns, ``[t, n]``."""

token_batch_sq = _by_token(batch_sq)
"""Squares of gradients of tokens, summed over columns, ``[t, n, *p]``."""
