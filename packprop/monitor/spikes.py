"""Steps whose loss or gradient leaves its recent range, by sample, then by token.

Losses of steps scatter around a level that changes slowly. A step is a spike if its loss, or norm, is above the
median of the last ``RECENT`` steps by more than ``reach`` times their median absolute deviation (scaled to the
standard deviation of normal values), or not finite. Spikes do not enter the range. Deviations below a
thousandth of the median count as that much: values that are nearly equal make no range.

An ordinary step costs a comparison of numbers. packprop runs a spike again, with norms of samples, and once
more with norms of the tokens of the sample that stands out most: see NOTE [Repeated pass].
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor, nn

from packprop.errors import BadInput, PackpropError
from packprop.extensions.first_order import BatchL2Grad
from packprop.monitor.identifiers import names_of, require_identifiers
from packprop.monitor.repeated import norms_again

ASKED = "packprop.Monitor(on_spike=...) was made."
IDENTIFIED = "monitor.check(identifiers=...) was called."

RECENT = 50
"""The most steps in the recent range."""

FEWEST = 10
"""The number of steps from which on there is a range."""

SHOWN = 5
"""The number of samples, and tokens, in a spike."""

NORMAL = 1.4826
"""The factor from the median absolute deviation of normal values to their standard deviation."""


@dataclass(frozen=True)
class SpikeToken:
    """A token of the sample that stands out most.

    Args:
        place: Its place in the sample.
        norm: Norm of the gradient of its term of the loss.
        text: Its text, if ``decode`` gave one for each token.
    """

    place: int
    norm: float
    text: str | None = None


@dataclass(frozen=True)
class SpikeSample:
    """A sample of a step that left its range.

    Args:
        sample: Its identifier, or its place in the batch.
        norm: Norm of the gradient of its part of the loss.
        times: Its multiple of the median of the batch; ``None`` if that is zero or infinite.
        text: Its text, if ``decode`` gives one.
        tokens: Its tokens with the largest gradients, for the first sample alone.
    """

    sample: Any
    norm: float
    times: float | None
    text: str | None = None
    tokens: tuple[SpikeToken, ...] = ()


@dataclass(frozen=True)
class Spike:
    """A step whose loss, or norm, left its recent range; prints.

    Args:
        step: The number of the step: of ``monitor.step()``, or of the call of ``check`` if there is none.
        what: ``"loss"`` or ``"norm"``.
        value: The value.
        usual: The median of recent steps; NaN if there are none.
        samples: Those of the step with the largest gradients, largest first.
    """

    step: int
    what: str
    value: float
    usual: float
    samples: tuple[SpikeSample, ...]

    def __str__(self) -> str:
        usual = "" if math.isnan(self.usual) else f", where {self.usual:.4g} is usual"
        lines = [f"step {self.step}: {self.what} {self.value:.4g}{usual}"]
        for each in self.samples:
            times = "" if each.times is None else f", {each.times:.3g} times the median"
            lines.append(f"  {each.sample}: gradient {each.norm:.3g}{times}")
            if each.text is not None:
                lines.append(f"    {each.text!r}")
            lines += [
                f"    token {token.place}: gradient {token.norm:.3g}"
                + (f", {token.text!r}" if token.text else "")
                for token in each.tokens
            ]
        return "\n".join(lines)


class Range:
    """The range of values of recent steps.

    Args:
        reach: The number of deviations above the median at which a value leaves the range.
    """

    def __init__(self, reach: float) -> None:
        self._reach = reach
        self.values: deque[float] = deque(maxlen=RECENT)

    def left_by(self, value: float) -> float | None:
        """Return the median of the range, NaN if it is empty, if the value leaves it; otherwise add the value.

        A value that is not finite leaves every range.
        """
        middle = median(self.values) if self.values else math.nan
        if not math.isfinite(value):
            return middle
        if len(self.values) >= FEWEST:
            deviation = max(NORMAL * median(abs(each - middle) for each in self.values), 1e-3 * abs(middle))
            if value > middle + self._reach * deviation:
                return middle
        self.values.append(value)
        return None


Decode = Callable[[Any], "str | Sequence[str]"]
"""A function from an identifier (or a place in the batch) to a text, or to the text of each token."""


class SpikeWatch:
    """The memory of recent steps, and the reaction to those that are out of range.

    Args:
        on_spike: A function to call with each spike.
        decode: Maps identifiers to texts.
        reach: The number of deviations above the median at which a step is out of range.

    Raises:
        BadInput: For a handler that cannot be called, or a reach that is no positive number.
    """

    def __init__(self, on_spike: Callable[[Spike], object] | None, decode: Decode | None, reach: float) -> None:
        for name, value in {"on_spike": on_spike, "decode": decode}.items():
            if value is not None and not callable(value):
                raise BadInput(
                    ASKED, f"{name}={value!r}", "it cannot be called", "give a function: on_spike=print"
                )
        if isinstance(reach, bool) or not isinstance(reach, (int, float)) or not reach > 0:
            raise BadInput(ASKED, f"reach={reach!r}", "it is not a positive number", "give 6.0, for example")
        self._on_spike, self._decode = on_spike, decode
        self._ranges = {"loss": Range(reach), "norm": Range(reach)}

    def check(
        self,
        model: nn.Module,
        step: int,
        loss: Tensor | float,
        norm: Tensor | float | None,
        again: Callable[[], Tensor],
        identifiers: Iterable[Any] | None,
    ) -> Spike | None:
        """Look into a step that is out of range; return ``None`` for others."""
        if identifiers is not None:
            require_identifiers(IDENTIFIED, identifiers)
        told = {"loss": loss} | ({} if norm is None else {"norm": norm})
        values = {
            what: float(each.detach()) if isinstance(each, Tensor) else float(each)
            for what, each in told.items()
        }
        left = {what: self._ranges[what].left_by(value) for what, value in values.items()}
        for what, usual in left.items():
            if usual is None:
                continue
            given = names_of(IDENTIFIED, identifiers)
            spike = Spike(step, what, values[what], usual, samples_of(model, again, given, self._decode))
            if self._on_spike is not None:
                self._on_spike(spike)
            return spike
        return None

    def state(self) -> dict[str, list[float]]:
        """Return the ranges, as numbers."""
        return {what: [*each.values] for what, each in self._ranges.items()}

    def take_up(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue from a ``state``, in place of the current one."""
        for what, known in self._ranges.items():
            known.values = deque(state.get(what, ()), RECENT)


def samples_of(
    model: nn.Module, again: Callable[[], Tensor], identifiers: Sequence[Any], decode: Decode | None
) -> tuple[SpikeSample, ...]:
    """Return samples of a batch with the largest gradients, and tokens of the first; run the batch again."""
    norms = norms_again(model, again, BatchL2Grad()).nan_to_num(nan=math.inf)
    if identifiers and len(identifiers) != len(norms):
        raise BadInput(
            IDENTIFIED,
            f"{len(identifiers)} identifiers",
            f"the batch has {len(norms)} samples",
            "give one for each sample of the batch, in their order",
        )
    middle = float(norms.median())
    places = norms.argsort(descending=True)[:SHOWN].tolist()
    found = []
    for rank, place in enumerate(places):
        name = identifiers[place] if identifiers else place
        told = None if decode is None else decode(name)
        pieces = None if told is None or isinstance(told, str) else list(told)
        text = told if isinstance(told, str) or told is None else "".join(told)
        tokens = _tokens(model, again, place, pieces) if rank == 0 else ()
        norm = float(norms[place])
        times = norm / middle if 0 < middle < math.inf else None
        found.append(SpikeSample(name, norm, times, text, tokens))
    return tuple(found)


def _tokens(
    model: nn.Module, again: Callable[[], Tensor], place: int, pieces: list[str] | None
) -> tuple[SpikeToken, ...]:
    """Return tokens of one sample with the largest gradients; none if the loss has no tokens."""
    try:
        norms = norms_again(model, again, BatchL2Grad(subsampling=[place], per="token"))[0]
    except PackpropError:  # a loss whose terms are not those of tokens
        return ()
    if len(norms) < 2:
        return ()
    norms = norms.nan_to_num(nan=math.inf)
    largest = norms.argsort(descending=True)[:SHOWN].tolist()
    texts = pieces if pieces is not None and len(pieces) == len(norms) else None
    return tuple(SpikeToken(at, float(norms[at]), None if texts is None else texts[at]) for at in largest)
