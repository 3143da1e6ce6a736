"""The choice of algorithms: by the sizes of a use, or forced by name; results do not change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import NamedTuple

import torch

from packprop.engine.tensors.precision import wider_dtype
from packprop.engine.tensors.setting import setting
from packprop.errors import BadInput

CHOICES = {
    "norms": ("gradients", "products"),
    "products": ("batched", "single"),
    "factors": ("patches", "shifts"),
    "convolutions": ("patches", "groups"),
}
"""The names of the algorithms for each kind of computation."""


_FORCED: ContextVar[dict[str, str] | None] = ContextVar("packprop_forced", default=None)


@contextlib.contextmanager
def algorithms(
    *,
    norms: str | None = None,
    products: str | None = None,
    factors: str | None = None,
    convolutions: str | None = None,
) -> Iterator[None]:
    """Force algorithms by name where they apply; results do not change, time and memory do.

    Args:
        norms: Norms of per-sample gradients of weights shared over positions: from the ``"gradients"``
            themselves (``s i o`` multiplications for each sample), or from ``"products"`` between pairs of
            positions (``s^2 (i + o)``).
        products: Per-sample gradients of a chunk in one ``"batched"`` product, or each in a ``"single"`` one.
        factors: Input factors of convolutions from unfolded ``"patches"``, or from ``"shifts"`` of the input.
        convolutions: Per-sample gradients of convolutions from unfolded ``"patches"``, or by one convolution
            with ``"groups"`` for every sample, which unfolds nothing.

    Raises:
        BadInput: For an unknown name.
    """
    asked = {"norms": norms, "products": products, "factors": factors, "convolutions": convolutions}
    chosen = {kind: name for kind, name in asked.items() if name is not None}
    for kind, name in chosen.items():
        if name not in CHOICES[kind]:
            raise BadInput(
                f"algorithms({kind}={name!r}) was entered.",
                kind,
                "there is no such algorithm",
                f"choose from {', '.join(map(repr, CHOICES[kind]))}",
            )
    with setting(_FORCED, (_FORCED.get() or {}) | chosen):
        yield


def forced_algorithm(kind: str) -> str | None:
    """Return the name of the forced algorithm, if there is one."""
    chosen = _FORCED.get()
    return None if chosen is None else chosen.get(kind)


def choose_algorithm(kind: str, fastest: str, holds: Callable[[], Mapping[str, int]], held: int | None) -> str:
    """Return the name of the algorithm that one use takes.

    Args:
        kind: The kind of computation, a key of ``CHOICES``.
        fastest: The algorithm that takes the least time.
        holds: Returns, for each algorithm, the bytes that it keeps for one sample and that the others do not
            need.
        held: The limit on these bytes; ``None`` for no limit.

    Returns:
        The forced algorithm, if there is one. Otherwise the fastest, if it stays within the limit; else the one
        that holds the least.
    """
    forced = forced_algorithm(kind)
    if forced is not None:
        return forced
    if held is None:
        return fastest
    sizes = holds()
    return fastest if sizes[fastest] <= held else min(sizes, key=sizes.__getitem__)


FEW_CHANNELS = 8
"""Channels of a group below which oneDNN's gradients of a convolution take longer than unfolded images do."""


class Extents(NamedTuple):
    """The sizes of an affine use, and the other facts that choose its algorithms.

    Args:
        positions: Positions of one sample that share the parameter.
        groups: Groups of the affine map.
        fan_in: Inputs of one group at one position.
        fan_out: Outputs of one group at one position.
        channels: Channels of one group, if inputs have to be unfolded to get them by position, as in a
            convolution, and another algorithm for per-sample gradients does not unfold them; else 0.
        dtype: The precision of inputs and cotangents.
        device: The type of the device.
        held: The bytes of one sample that an algorithm may hold; one that holds more is taken only if no other
            holds less. ``None`` for no limit.
    """

    positions: int
    groups: int
    fan_in: int
    fan_out: int
    channels: int
    dtype: torch.dtype
    device: str
    held: int | None

    @property
    def unfolded(self) -> int:
        """Entries of one sample's unfolded inputs; 0 if inputs have an axis of positions anyway."""
        return self.positions * self.groups * self.fan_in if self.channels else 0


def norms_by_products(extents: Extents) -> bool:
    """Tell whether norms of per-sample gradients are best computed without forming the gradients.

    Products between pairs of positions take ``s^2 (i + o)`` multiplications, gradients ``s i o``. Gradients
    also add up to the summed gradient, which then needs no product of its own. So gradients win up to twice the
    multiplications of the products.
    """
    positions, groups, fan_in, fan_out = extents[:4]
    if positions == 1:
        return True
    few = 2 * positions * (fan_in + fan_out) <= fan_in * fan_out

    def holds() -> dict[str, int]:
        inputs = 0 if convolved_by_groups(extents) else extents.unfolded
        size = extents.dtype.itemsize
        return {
            "gradients": size * (groups * fan_in * fan_out + inputs),
            "products": _held_by_products(extents) + size * extents.unfolded,
        }

    return choose_algorithm("norms", "products" if few else "gradients", holds, extents.held) == "products"


def samples_in_products(extents: Extents, samples: int) -> int:
    """Return the number of samples whose products between pairs of positions exist at once.

    packprop forms large gradients one by one. So it also limits the products, where the gradient of one sample
    would hold too much.
    """
    if extents.held is None:
        return samples
    return max(1, min(samples, extents.held // _held_by_products(extents)))


def features_at_once(positions: int) -> int:
    """Return the number of entries of a position to widen at once: they take less memory than the products."""
    return max(32, positions // 4)


def _held_by_products(extents: Extents) -> int:
    """Return the bytes of one sample's products between positions, and of the entries widened for them."""
    positions, groups, fan_in, fan_out = extents[:4]
    wide = wider_dtype(extents.dtype, extents.device)
    widened = 0 if wide is None else min(max(fan_in, fan_out), features_at_once(positions))
    return (wide or extents.dtype).itemsize * groups * positions * (2 * positions + widened)


def convolved_by_groups(extents: Extents) -> bool:
    """Tell whether per-sample gradients of a convolution are best computed by ``grouped_gradients``.

    oneDNN's gradient of a weight takes images as they are. If there are many positions, unfolding the images is
    most of the work; if there are few, oneDNN spends more on rearranging its results. It takes channels in
    groups of eight: fewer channels, such as those of the first layer's images, cost as much as eight. It has a
    separate kernel for depthwise convolutions.
    """
    if not extents.channels or extents.dtype not in (torch.float32, torch.float64):
        return False
    onednn = extents.device == "cpu" and torch.backends.mkldnn.is_available()
    is_depthwise = extents.channels == 1 < extents.groups
    many = extents.positions > extents.fan_out and (extents.channels >= FEW_CHANNELS or is_depthwise)
    many = many and onednn and extents.dtype == torch.float32

    def holds() -> dict[str, int]:
        return {"patches": extents.dtype.itemsize * extents.unfolded, "groups": 0}

    return choose_algorithm("convolutions", "groups" if many else "patches", holds, extents.held) == "groups"
