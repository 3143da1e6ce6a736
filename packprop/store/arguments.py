"""Checks of arguments that stores take."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch

from packprop.errors import BadInput
from packprop.store.folder import MOST_SHARDS, described
from packprop.store.places import rank_of_process
from packprop.store.plain import name_of


def whole_number(asked: str, name: str, value: Any, least: int = 0) -> int:
    """Return an argument as a whole number of at least ``least``.

    Raises:
        BadInput: If it is none.
    """
    try:
        number = least - 1 if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        instead = f"give a whole number of at least {least}"
        raise BadInput(asked, f"{name}={value!r}", "it is not a whole number, or too small", instead)
    return number


def finite_number(asked: str, name: str, value: Any) -> float:
    """Return an argument as a finite number of at least 0.

    Raises:
        BadInput: If it is none.
    """
    try:
        number = math.nan if isinstance(value, (bool, np.bool_, str)) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        kind = "finite number of at least 0"
        raise BadInput(asked, f"{name}={value!r}", f"it is not a {kind}", f"give a {kind}, such as 32.0")
    return number


def samples_and_terms(asked: str, samples: Any, terms: Any) -> tuple[int, float]:
    """Return a number of samples, and the sum of the divisors of their losses.

    Raises:
        BadInput: For anything but such numbers.
    """
    return whole_number(asked, "samples", samples), finite_number(asked, "terms", terms)


def divisor(asked: str, terms: Any) -> float:
    """Return the divisor of a batch's loss, by which values are multiplied.

    Raises:
        BadInput: If it is no finite number above 0.
    """
    number = finite_number(asked, "terms", terms)
    if not number:
        raise BadInput(
            asked,
            f"terms={terms!r}",
            "packprop multiplies values by it, so all values would be zero",
            "give the divisor of the batch's loss, such as the number of its samples; skip batches without "
            "terms",
        )
    return number


def seconds_of(asked: str, seconds: Any) -> float:
    """Return an argument as a number of seconds, which may be infinite.

    Raises:
        BadInput: If it is none.
    """
    return math.inf if seconds == math.inf else finite_number(asked, "seconds", seconds)


def notes_of(asked: str, notes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return notes as JSON stores them.

    Raises:
        BadInput: For anything that JSON cannot hold.
    """
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(notes or {}), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        instead = "give a dictionary of texts, finite numbers, lists and dictionaries"
        raise BadInput(asked, "notes", f"JSON cannot store them: {error}", instead) from error
    return found


def shard_numbers(asked: str, shard: Any, shards: Any) -> tuple[int, int]:
    """Return the number of a shard, and that of all shards: for ``None`` the rank, and the number of ranks.

    Raises:
        BadInput: If there cannot be such a shard.
    """
    rank, ranks = rank_of_process()
    shard, shards = rank if shard is None else shard, ranks if shards is None else shards
    shard, shards = whole_number(asked, "shard", shard), whole_number(asked, "shards", shards, 1)
    if shard >= shards or shards > MOST_SHARDS:
        raise BadInput(
            asked,
            f"shard={shard}, shards={shards}",
            "shards are numbered from 0 to shards - 1" if shard >= shards else "there are too many shards",
            f"give shards of at most {MOST_SHARDS}, and a shard below shards",
        )
    return shard, shards


def require_precision(asked: str, dtype: torch.dtype | None) -> None:
    """Refuse anything that is not a precision of stored floating-point values.

    Raises:
        BadInput: For any other ``dtype``.
    """
    if dtype is None:
        return
    described(dtype)
    if not dtype.is_floating_point:
        raise BadInput(
            asked,
            f"dtype={dtype}",
            f"floating-point values cannot be stored as {name_of(dtype)}",
            "give torch.float16, torch.bfloat16, torch.float32 or torch.float64, or leave dtype out",
        )


def require_names(asked: str, given: Set[str], known: Set[str], taken: Set[str], samples: int) -> None:
    """Refuse named values that this batch lacks, or that earlier batches lacked: zeros would stand for them.

    Args:
        asked: The call of the user, for messages.
        given: The names of this batch.
        known: Those of all quantities of earlier batches.
        taken: Those of extensions, which values must not have.
        samples: Samples of earlier batches.

    Raises:
        BadInput: With the first of them.
    """
    new = given - known if samples else set()
    same = "give the same values with each batch; StoreWriter.add(...) stores zeros for missing ones"
    for names, why, instead in (
        (given & taken, "an extension has this name", "give these values another name"),
        (known - taken - given, "earlier batches have it, but this one does not", same),
        (new, f"the {samples} samples before this batch do not have it", same),
    ):
        if names:
            raise BadInput(asked, f"values {min(names)!r}", why, instead)
