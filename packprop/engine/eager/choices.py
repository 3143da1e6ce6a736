"""The keyword arguments of ``eager_backward``, and its errors for wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypedDict

import torch
from torch import Tensor

from packprop.engine.memory.bytes import byte_count as memory_bytes
from packprop.errors import BadInput

Keep = Literal["exact", "cpu", "recompute"] | torch.dtype
Hook = Callable[..., Tensor | Sequence[Tensor] | None]

ASKED = "eager_backward: the value of a function and, at once, its gradient"


class Choices(TypedDict, total=False):
    """The keyword arguments of `eager_backward`."""

    chunks: int | None
    axes: int | Sequence[int | None]
    reduction: Literal["sum", "mean"]
    weights: Tensor | None
    keep: Keep
    memory: int | str | None
    hook: Hook | None
    check: bool


def bad(where: str, why: str, instead: str) -> BadInput:
    """Make the error for an unusable argument of `eager_backward`."""
    return BadInput(ASKED, where, why, instead)


def check_choices(choices: Choices) -> None:
    """Refuse keyword arguments that are wrong for any inputs."""
    chunks, keep, weights = choices["chunks"], choices["keep"], choices["weights"]
    if chunks is not None and (type(chunks) is not int or chunks < 1):
        raise bad(f"{chunks=}", "the number of pieces is a positive integer", "chunks=4, say")
    if choices["reduction"] not in ("sum", "mean"):
        why = "the scalars of pieces are added or averaged"
        raise bad(f"reduction={choices['reduction']!r}", why, "'sum' or 'mean'")
    if keep not in ("exact", "cpu", "recompute") and not (
        isinstance(keep, torch.dtype) and keep.is_floating_point
    ):
        known = "'exact', 'cpu', 'recompute', or a dtype such as torch.bfloat16"
        raise bad(f"{keep=}", "there is no such choice", known)
    if (memory := choices["memory"]) is not None:
        byte_count(memory)
        if keep != "exact":
            raise bad(f"{keep=}, {memory=}", "both say what is kept", "give one of them")
    if weights is not None and not (
        isinstance(weights, Tensor) and weights.ndim == 1 and weights.is_floating_point()
    ):
        raise bad("weights", "there is one weight per sample", "a floating point tensor [n]")


def byte_count(memory: int | str) -> int:
    """Return the bytes of a number, or of a text such as `"64MiB"` or `"1.5 GB"`."""
    count = memory_bytes(memory)
    if count is None:
        raise bad(f"{memory=}", "this is no number of bytes", "memory='64MiB', say")
    return count
