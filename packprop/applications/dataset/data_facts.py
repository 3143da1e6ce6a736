"""Facts that tell one data set from another: the code that reads it, and some of its samples."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from packprop.applications.dataset.code import package_of
from packprop.applications.dataset.describing import Describer
from packprop.applications.dataset.digests import bytes_digest, spot_check

SAMPLER_OPTIONS = (
    *("batch_size", "drop_last", "replacement", "num_samples", "shuffle", "seed", "epoch", "num_replicas"),
    *("indices", "weights"),
)
"""Attributes of PyTorch's samplers that determine the samples and their order."""

KNOWN = ("torch", "torchdata")
"""Packages whose loaders and samplers have no other options than these."""

SECONDS = 0.03
"""Seconds after which packprop reads no further sample."""


def data_set_facts(data: Any, describer: Describer, is_read: bool = True) -> dict[str, Any]:
    """Describe the class of a data set with its code and options, and digests of some samples.

    packprop reads each of these samples twice, from the same random state, and leaves it out if the two differ.
    It reads none if the data draw from their own generators, which would draw other numbers afterwards.

    Args:
        data: A data set, with indices or without.
        describer: Describes the class and options, and notes parts that it cannot describe. It must not have
            described anything else, so that its ``draws`` is about the data set alone.
        is_read: True if samples may be read.
    """
    facts, found = {"data set": describer.of(data, "the data set")}, dict[str, str]()
    has_indices = isinstance(data, Sized) and hasattr(data, "__getitem__")
    if has_indices and not isinstance(data, IterableDataset):
        found = {} if describer.draws or not is_read else _some_samples(data)
        facts |= {"samples": len(data), "some samples": found}
    if not found:
        describer.untold.append("samples of the data set")
    return facts


def loader_facts(loader: Any, describer: Describer) -> dict[str, Any]:
    """Describe the user's loader, or batches, without iterating over it."""
    if isinstance(loader, DataLoader):
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        # with workers, read no sample: each worker has to open the data set's files itself
        of_data_set = data_set_facts(loader.dataset, describer, is_read=loader.num_workers == 0)
        package = package_of(type(loader))
        if package not in (None, *KNOWN):
            describer.untold.append("the loader")
        return {
            "class": type(loader).__name__,
            "loader": describer.of(loader, "the loader", {"batch_size"}) if package is None else None,
            "batch size": loader.batch_size,
            "sampler": _sampler_facts(sampler, describer),
            "collate_fn": describer.of(loader.collate_fn, "collate_fn"),
            "worker_init_fn": describer.of(loader.worker_init_fn, "worker_init_fn"),
            **of_data_set,
        }
    if isinstance(loader, (list, tuple)):
        some = [loader[at] for at in _places(len(loader))]
        return {"batches": len(loader), "some values": spot_check(some)}
    if package_of(type(loader)) is None and not isinstance(loader, Iterator):
        return {"loader": describer.of(loader, "the loader")}
    describer.untold.append("the batches")
    return {} if isinstance(loader, Iterator) else {"class": type(loader).__name__}


def _sampler_facts(sampler: Any, describer: Describer) -> Any:
    if isinstance(sampler, (list, tuple, range, np.ndarray, torch.Tensor)):  # of indices, or of batches of them
        listed = [each.tolist() if hasattr(each, "tolist") else each for each in sampler]
        return describer.of(json.dumps(listed, default=str), "the sampler")
    package = package_of(type(sampler))
    if package is None:
        return describer.of(sampler, "the sampler")
    if package not in KNOWN:
        describer.untold.append("the sampler")
    found = {"class": type(sampler).__name__}
    for name in SAMPLER_OPTIONS:
        with contextlib.suppress(Exception):  # this sampler does not have the option, or not yet
            found[name] = describer.of(getattr(sampler, name), f"{name} of the sampler")
    inner = getattr(sampler, "sampler", None)
    return found if inner is None else {**found, "sampler": _sampler_facts(inner, describer)}


def _places(number: int) -> list[int]:
    """Return up to four indices, spread over the whole range."""
    return [*dict.fromkeys((0, number // 3, 2 * number // 3, number - 1))] if number else []


def _some_samples(data: Any) -> dict[str, str]:
    """Return digests of some samples by their index."""
    found, begin = {}, time.monotonic()
    for at in _places(len(data)):
        try:
            texts = {_digest_of(data, at) for _ in range(2)}
        except Exception:  # the run meets the same error, and explains it
            break
        if len(texts) == 1:
            found[str(at)] = texts.pop()
        if time.monotonic() - begin > SECONDS:
            break
    return found


def _digest_of(data: Any, at: int) -> str:
    with _fixed_draws():
        sample = data[at]
    described = Describer().of(sample, "a sample")
    return bytes_digest(json.dumps(described, sort_keys=True).encode())


@contextlib.contextmanager
def _fixed_draws() -> Iterator[None]:
    """Draw the same random numbers in every such block; restore the random states afterwards."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002  # data draw from it
    torch.default_generator.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  # as above
    random.seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002  # as above
        random.setstate(states[2])
