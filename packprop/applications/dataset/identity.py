"""The identity of a run over a data set: model, loss, extensions, options, versions; the difference of two."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packprop.applications.dataset.batches import Batches
from packprop.applications.dataset.describing import Describer
from packprop.applications.dataset.digests import kind_of
from packprop.engine.tensors import named_buffers, named_modules, named_parameters
from packprop.errors import PackpropWarning
from packprop.store.describing import packprop_version
from packprop.types import Extension

Identity = dict[str, Any]
"""Facts by name, as values of JSON."""

UNTOLD = "what cannot be told"
"""The name of a fact that is not compared: places of values that have no description."""

RANKS = "ranks"
"""The name of a fact that is not compared by itself: the number of ranks with batches of their own."""

SAMPLED = "some samples"
"""The name of digests of samples by their index; packprop compares those that both sides have."""

BATCHES = "batches"
"""The name of the facts about the data that need no full reading."""

OF_RANK = ("modules", "loss", BATCHES)
"""Facts in which ranks may differ: modules and losses may keep the number of their rank, or its device."""


def identity_of(
    model: nn.Module, loss: Any, extensions: Sequence[Extension], data: Batches, **options: Any
) -> Identity:
    """Describe a run: a run with the same description can continue it.

    Args:
        model: Described by names, shapes, precision and values of its parameters and buffers, which of them are
            trained, and the modes, classes, options and code of its modules.
        loss: Described by its name, code and options, the modes of its modules, and the values of its tensors.
        extensions: Described by names, code and options; a generator by its presence alone.
        data: Described by their number, some samples, and the code that reads them. They keep the generators in
            the data, the model and the loss; ``RunDraws`` keeps those of extensions.
        options: Further facts, as values of JSON.
    """
    tensors = {**dict(named_parameters(model)), **dict(named_buffers(model))}
    describer, of_data, of_extensions = Describer(), Describer(), Describer()
    modules = _described_modules(model, describer)
    facts: Identity = {
        "version of Python": ".".join(platform.python_version_tuple()[:2]),  # bytecode differs in each
        "version of packprop": packprop_version(),
        "version of torch": torch.__version__,
        "precision": _precision(tensors.values()),
        "extensions": [of_extensions.of(extension, "an extension") for extension in extensions],
        "model": {
            "class": modules[""]["class"],
            "tensors": {name: kind_of(tensor) for name, tensor in tensors.items()},
            "in training mode": [name for name, module in named_modules(model) if module.training],
        },
        "modules": {name or "the model": facts for name, facts in modules.items()},
        "values of the model's parameters and buffers": {
            name: describer.digest(tensor) for name, tensor in tensors.items()
        },
        "loss": describer.of(loss, "the loss"),
        "reduction of the loss": describer.of(getattr(loss, "reduction", None), "the loss"),
        "data": data.facts(),
        BATCHES: data.described(of_data),
        **options,
    }
    data.keep_generators(describer.generators)
    program = [*dict.fromkeys([*describer.untold, *of_extensions.untold])]
    versions = describer.versions | of_extensions.versions | of_data.versions
    facts["versions of packages"] = dict(sorted(versions.items()))
    facts[UNTOLD] = {"program": program, "data": [*dict.fromkeys(of_data.untold)]}
    return facts


def keep_generators(model: nn.Module, loss: Any, data: Batches) -> None:
    """Make the data keep the states of all generators in model, loss and data, for another reading."""
    data.described(Describer())
    data.keep_generators(describer_of(model, loss).generators)


def describer_of(model: nn.Module, loss: Any) -> Describer:
    """Return a ``Describer`` that has described the model and the loss."""
    describer = Describer(by_text=True)
    _described_modules(model, describer)
    describer.of(loss, "the loss")
    return describer


def _precision(tensors: Iterable[Tensor]) -> dict[str, str]:
    """Return PyTorch's settings of precision: the default, that of matrix products, those of autocast."""
    found = {"default": str(torch.get_default_dtype()), "products": torch.get_float32_matmul_precision()}
    for kind in sorted({"cpu", *(tensor.device.type for tensor in tensors)} - {"meta"}):
        if torch.is_autocast_enabled(kind):
            found[f"autocast on {kind}"] = str(torch.get_autocast_dtype(kind))
    return found


def _described_modules(model: nn.Module, describer: Describer) -> dict[str, dict[str, Any]]:
    return {
        name: describer.module(module, repr(name) if name else "the model")
        for name, module in named_modules(model)
    }


def difference(saved: Identity, asked: Identity, but: Collection[str] = ()) -> tuple[str, str] | None:
    """Return the name of the first fact that differs, and the difference; ``None`` if none differs.

    Args:
        saved: The facts of one side.
        asked: The facts of the other side.
        but: Facts that are not compared.
    """
    if not (saved.get(BATCHES) and asked.get(BATCHES)) or saved.get(RANKS) != asked.get(RANKS):
        but = (BATCHES, *but)  # an iterator tells nothing, and other ranks have other batches
    for name in dict.fromkeys([*asked, *saved]):
        found = None if name in (UNTOLD, RANKS, *but) else _difference(saved.get(name), asked.get(name))
        if found is not None:
            return name, found
    return None


def warn_of_untold(identity: Identity, data: bool) -> None:
    """Warn about things that may have changed unnoticed since the run began.

    Args:
        identity: The description of the continued run.
        data: True to warn about the data as well, because packprop does not read and compare them again.
    """
    untold = [*identity[UNTOLD]["program"], *(identity[UNTOLD]["data"] if data else ())]
    if untold:
        more = f" and {len(untold) - 3} more" if len(untold) > 3 else ""
        warnings.warn(
            "packprop cannot tell whether these have changed since the run began: "
            f"{', '.join(untold[:3])}{more}. The run continues.",
            PackpropWarning,
            stacklevel=3,
        )


def _sides(key: str, saved: dict[str, Any], asked: dict[str, Any]) -> tuple[Any, Any]:
    """Return both values of a key; for samples, the digests of those that both sides have read."""
    here, there = asked.get(key), saved.get(key)
    if key != SAMPLED:
        return there, here
    both = sorted({*(here or {})} & {*(there or {})})
    return [there[each] for each in both if there], [here[each] for each in both if here]


def _difference(saved: Any, asked: Any) -> str | None:
    """Describe the first difference of two facts, as a phrase; return ``None`` if there is none."""
    if saved == asked:
        return None
    if isinstance(saved, dict) and isinstance(asked, dict):
        if saved.get("class") != asked.get("class") and "tensors" not in saved:
            return f"{_last(saved.get('class'))} became {_last(asked.get('class'))}"
        for key in dict.fromkeys([*saved, *asked]):
            there, here = _sides(key, saved, asked)
            found = _difference(there, here)
            if found is not None:
                said = found if key in ("attributes", "values") else f"{key}: {found}"
                return "its code differs" if key == "code" and there and here else said
        return None
    if isinstance(saved, list) and isinstance(asked, list) and len(saved) == len(asked):
        return next(filter(None, map(_difference, saved, asked)), None)
    return f"{_short(saved)} there, {_short(asked)} here"


def _last(name: Any) -> str:
    return str(name).rpartition(".")[2]


def _short(fact: Any) -> str:
    if isinstance(fact, dict) and "class" in fact:
        return _last(fact["class"])
    if isinstance(fact, list) and all(isinstance(item, dict) and "class" in item for item in fact):
        fact = [item["class"].rpartition(".")[2] for item in fact]
    text = str(fact)
    return text if len(text) <= 80 else f"{text[:77]}..."
