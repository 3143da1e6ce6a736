"""``Monitor``: measurements of a training loop, in some of its steps."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packprop.applications.dataset.checkpoint import Every
from packprop.applications.reports.profile.quantities import SampleGGNTrace
from packprop.engine.distributed import AllRanks, ranks_of
from packprop.engine.recording import Walks
from packprop.engine.tensors import require_model
from packprop.errors import BadInput, PackpropWarning, require_number, require_seed
from packprop.monitor.logs import Values, logs_of
from packprop.monitor.measurements import TOTAL, LayerValues, StepValues, norm_quantiles, outliers
from packprop.monitor.noise import GradientNoise, Interval, smoothed_scale
from packprop.monitor.own_rank import require_whole
from packprop.monitor.passes import MonitoredPass
from packprop.monitor.spikes import Decode, Spike, SpikeWatch
from packprop.monitor.step import UNWATCHED, MonitoredStep, Step
from packprop.types import EXACT, Seed

ASKED = "packprop.Monitor(...) was made."
ONE_SAMPLE = (
    "Monitor: a step had one sample, and the noise scale needs at least two. Instead: use larger batches, or "
    "accumulate gradients inside one `with monitor.step():`."
)

QUANTITIES = (
    "gradient_norm",
    "noise_scale",
    "signal_to_noise",
    "sample_norms",
    "outliers",
    "update_ratio",
    "ggn_trace",
    "sharpness",
)
"""The quantities that a monitor can measure."""

DEFAULT = QUANTITIES[:6]
"""The quantities that take no sweep of their own."""


class Monitor:
    """Measures a training loop in some of its steps, and logs the numbers.

    Put ``with monitor.step():`` around the forward pass, ``loss.backward()`` and, for update ratios, the
    optimizer's step. A step may have several backward passes (gradient accumulation). Steps without monitoring
    cost nothing: the monitor extends the model only in monitored ones. It changes nothing in the model, in
    ``.grad`` or in the random state.

    Args:
        model: The model, extended or not.
        every: Steps from one monitored step to the next, or a time (``"5min"``); the first step is monitored.
        quantities: One of these names, or a list of them. Numbers of all parameters together have the name
            alone, those of a module that owns parameters ``name/layer`` (none of outliers and of sharpness):

            - ``"gradient_norm"``: of the step's gradient, as the sum of its passes, without penalties that no
              sample enters.
            - ``"noise_scale"``: in samples, the unbiased estimate of this step with its interval,
              ``noise_scale_low`` and ``noise_scale_high``, and ``critical_batch_size``, likewise, over the last
              ``window`` monitored steps; see NOTE [Gradient noise scale].
            - ``"signal_to_noise"``: squared gradient norm over the trace of the samples' covariance, as in a
              profile.
            - ``"sample_norms"``: quantiles of the norms of samples' gradients; of layers the median.
            - ``"outliers"``: samples with norms far above those of the others, with their identifiers.
            - ``"update_ratio"``: norm of the optimizer's update over that of the parameters before it.
            - ``"ggn_trace"``: trace of the generalized Gauss-Newton matrix of the step's loss. For cross
              entropy it is that of the Fisher information. One more sweep.
            - ``"sharpness"``: ``g^T H g / g^T g`` with the Hessian of the loss, all parameters together, of
              steps of one backward pass. Two more passes, one of them through the gradient.

            A number is ``None`` if there is none: an open upper end, a ratio over zero.
        log: ``"print"`` for one line; a file name that ends in ``.jsonl``; a ``SummaryWriter`` or
            ``packprop.monitor.TensorBoard(folder)``; a function of a dictionary and the number of the step; a
            list of these; ``None`` for ``monitor.last`` alone.
        window: Monitored steps behind the critical batch size.
        confidence: The probability with which intervals hold the true value.
        mc_samples: Draws for the GGN trace; ``None`` for the exact one, which takes a column for each output.
        ranks: Whose samples count if several processes train: ``"own"``, ``"all"``, or
            ``packprop.AllRanks(...)``. With values of all ranks the first of them logs.
        per: ``"sample"``. Tokens of one sequence are no independent draws, as the noise scale needs them.
        seed: Seed of the Monte Carlo draws, which do not come from PyTorch's own generators. Those of a step
            depend on it and on the number of the step alone.
        on_spike: A function to call with a ``packprop.monitor.Spike`` for each step that ``check`` finds out of
            its recent range: ``print``, for example.
        decode: Maps an identifier (or a place in the batch) to the text of a sample, or of each of its tokens.
        reach: The number of deviations above the recent median at which a loss or a norm is out of its range.

    Raises:
        BadInput: For any other argument, a model without trainable parameters, or parameters of lazy modules
            that have no shape yet.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> monitor = Monitor(model, every=2, log=None)
        >>> for _ in range(4):
        ...     with monitor.step():
        ...         model(torch.randn(8, 3)).square().mean().backward()
        ...         torch.optim.SGD(model.parameters(), lr=0.1).step()
        >>> monitor.last["samples"]
        8
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int | str = 100,
        quantities: str | Sequence[str] = DEFAULT,
        log: Any = "print",
        window: int = 20,
        confidence: float = 0.95,
        mc_samples: int | None = 1,
        ranks: str | AllRanks = "own",
        per: str = "sample",
        seed: int = 0,
        on_spike: Callable[[Spike], object] | None = None,
        decode: Decode | None = None,
        reach: float = 6.0,
    ) -> None:
        is_list = isinstance(quantities, Iterable) and not isinstance(quantities, str)
        listed: list[Any] = [*quantities] if is_list else [quantities]
        _check(model, listed, confidence, per)
        require_number(ASKED, "window", window)
        if mc_samples is not None:
            require_number(ASKED, "mc_samples", mc_samples)
        require_seed(ASKED, seed)
        self._model, self._quantities = model, frozenset(listed)
        self._every, self._begun = Every(every, ASKED), -math.inf
        if not self._every.batches and not self._every.seconds:
            raise BadInput(ASKED, f"every={every!r}", "a time of zero is no interval", "give 1 for each step")
        if self._every.seconds and ranks != "own":
            why = "each rank has its own clock, so ranks would monitor different steps"
            raise BadInput(ASKED, f"every={every!r} with ranks", why, "give a number of steps")
        if "sharpness" in self._quantities and ranks != "own":
            why = "each rank only knows the curvature of its own loss"
            raise BadInput(ASKED, "quantity 'sharpness' with ranks", why, "leave one of them out")
        self._confidence, self._window = confidence, window
        chosen = ranks_of(ranks)
        self._ranks = None if chosen is None else dataclasses.replace(chosen, gather=True)
        self._logs = logs_of(log)
        device = next(p for p in model.parameters() if p.requires_grad).device
        self._seed, self._generator = seed, torch.Generator(device=device)
        traced = EXACT if mc_samples is None else Seed("ggn", mc_samples=mc_samples, generator=self._generator)
        self._trace = SampleGGNTrace(traced) if "ggn_trace" in self._quantities else None
        self._noise: dict[str, deque[GradientNoise]] = {}
        self._next, self._checked, self._told = 0, 0, set[str]()
        self._current: MonitoredStep | None = None
        self._walks = Walks()
        self._spikes = SpikeWatch(on_spike, decode, reach)
        self.last: Values | None = None
        """The values of the last step that was monitored."""

    def __repr__(self) -> str:
        return f"<Monitor of {type(self._model).__name__}: {', '.join(sorted(self._quantities))}>"

    def is_due(self, number: int) -> bool:
        """Tell whether the step of this number is monitored."""
        if self._every.seconds:
            return time.monotonic() - self._begun >= self._every.seconds
        return number % self._every.batches == 0

    def step(
        self,
        identifiers: Iterable[Any] | None = None,
        *,
        number: int | None = None,
        loss_scale: float | Tensor = 1.0,
    ) -> Step:
        """Return the context for one step of the optimizer.

        Args:
            identifiers: The names of outlying samples: one for each sample of the step, in order. Without them
                packprop gives their place. ``step.identify(...)`` names them batch by batch.
            number: The number of the step; by default steps are counted from 0.
            loss_scale: The factor of a gradient scaler on the loss, ``scaler.get_scale()``. Not the number of
                passes that divides it: see NOTE [Monitored step].

        Raises:
            BadInput: If another step is under way, or a ``backpack(...)`` is around it.
        """
        if number is None:
            number = self._next
        self._next = number + 1
        if not self.is_due(number):
            return UNWATCHED
        step = self.begin(number, loss_scale)
        if identifiers is not None:
            step.identify(identifiers)
        return step

    def begin(self, number: int, loss_scale: float | Tensor = 1.0) -> MonitoredStep:
        """Return a step that is monitored whatever its number, for loops that cannot put ``with`` around it."""
        if self._current is not None and self._current.is_open:
            raise BadInput(
                "monitor.step() was called.",
                f"step {self._current.number}, which is under way",
                "a step ends when its `with` block ends",
                "call monitor.step() once for each step of the optimizer; it may hold several backward passes",
            )
        require_whole("monitor.step() was called.", self._model)
        watch = MonitoredPass(
            self._model,
            self._trace,
            products="noise_scale" in self._quantities and self._ranks is None,
            sharpness="sharpness" in self._quantities,
            ranks="own" if self._ranks is None else self._ranks,
            loss_scale=loss_scale,
        )
        self._begun = time.monotonic()
        self._generator.manual_seed(((self._seed << 32) + number) % 2**63)  # also in a continued run
        updates = "update_ratio" in self._quantities
        step = MonitoredStep(
            self._model, number, watch, updates=updates, done=self._log, told=self._told, walks=self._walks
        )
        self._current = step
        return step

    def check(
        self,
        loss: Tensor | float,
        again: Callable[[], Tensor],
        identifiers: Iterable[Any] | None = None,
        *,
        norm: Tensor | float | None = None,
    ) -> Spike | None:
        """Look into a step if its loss, or norm, is out of its recent range (``packprop/monitor/spikes.py``).

        Call it in every step, before the optimizer's: ``again`` runs the forward pass of the same batch once
        more, with the parameters as they are. A step within the range costs a comparison, and waits for the
        loss if that is on a GPU.

        Args:
            loss: The loss of the step.
            again: Computes that loss again: ``lambda: loss_function(model(x), y)``.
            identifiers: The names of the samples of the batch; else their places.
            norm: The norm of the gradient, such as ``clip_grad_norm_`` returns.

        Returns:
            The spike that ``on_spike`` was called with; ``None`` for a step within its range.

        Raises:
            PackpropError: For sharded parameters; for a step out of its range whose samples are mixed, as for
                ``backpack``, or whose forward pass exchanges values with other ranks.
        """
        require_whole("monitor.check(...) was called.", self._model)
        number = self._next - 1 if self._next else self._checked  # without `monitor.step()` checks are counted
        self._checked += 1
        return self._spikes.check(self._model, number, loss, norm, again, identifiers)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a continued run: the next step's number, and the window of earlier steps."""
        window = {
            layer: [[each.noise, each.signal, each.samples] for each in steps]
            for layer, steps in self._noise.items()
        }
        return {"next": self._next, "window": window, "checked": self._checked, "ranges": self._spikes.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        self._next, self._checked = state["next"], state.get("checked", 0)
        self._spikes.take_up(state.get("ranges", {}))
        self._noise = {
            layer: deque((GradientNoise(a, b, None, n) for a, b, n in steps), self._window)
            for layer, steps in state["window"].items()
        }

    def _log(self, step: MonitoredStep, values: StepValues) -> None:
        names = self._names(step, values)
        numbers: Values = {"samples": values.samples}
        for layer, of_layer in values.layers.items():
            numbers |= self._of_layer(layer, of_layer)
        if "sharpness" in self._quantities and values.samples:
            numbers["sharpness"] = _finite(values.sharpness)
        if "outliers" in self._quantities and values.samples:
            found = outliers(values.layers[TOTAL].squares)
            numbers["outliers"] = [{"sample": names[index], "norm": norm} for index, norm in found]
        if values.samples == 1 and "noise_scale" in self._quantities and ONE_SAMPLE not in self._told:
            self._told.add(ONE_SAMPLE)
            warnings.warn(ONE_SAMPLE, PackpropWarning, stacklevel=4)
        self.last = numbers
        if self._ranks is None or torch.distributed.get_rank(self._ranks.group) == 0:
            for log in self._logs:
                log(numbers, step.number)

    def _of_layer(self, layer: str, values: LayerValues) -> Values:
        """Return the numbers of one layer, by their full names."""
        numbers: Values = {}
        squares, mean_square, noise = values.squares, values.mean_square, values.noise
        if "gradient_norm" in self._quantities:
            numbers["gradient_norm"] = mean_square**0.5
        if "noise_scale" in self._quantities:
            window = self._noise.setdefault(layer, deque(maxlen=self._window))
            scale = Interval()
            if noise is not None and noise.is_finite:
                window.append(noise)
                scale = noise.scale(self._confidence)
            numbers |= _named("noise_scale", scale)
            smoothed = smoothed_scale(window, self._confidence) if window else Interval()
            numbers |= _named("critical_batch_size", smoothed)
        if "signal_to_noise" in self._quantities:
            scatter = float(squares.mean()) - mean_square
            numbers["signal_to_noise"] = mean_square / scatter if scatter > 0 else None
        if "sample_norms" in self._quantities:
            quantiles = norm_quantiles(squares)
            chosen = quantiles if layer == TOTAL else {"median": quantiles["median"]}
            numbers |= {f"sample_norm_{name}": norm for name, norm in chosen.items()}
        if values.trace is not None:
            numbers["ggn_trace"] = values.trace
        if values.update is not None:
            numbers["update_ratio"] = values.update
        suffix = f"/{layer}" if layer != TOTAL else ""
        return {name + suffix: _finite(number) for name, number in numbers.items()}

    def _names(self, step: MonitoredStep, values: StepValues) -> Sequence[Any]:
        """Return the name of each sample of the step."""
        given, own = step.identifiers, sum(len(each) for each in values.own)
        if given and len(given) != own:
            raise BadInput(
                "monitor.step(identifiers=...) was called.",
                f"{len(given)} identifiers",
                f"the step had {own} samples" + (" on this rank" if self._ranks is not None else ""),
                "give one for each sample of the step, of all its backward passes, in their order",
            )
        if self._ranks is None:
            return given or range(values.samples)
        return _of_all_ranks(self._ranks, given, [len(each) for each in values.own]) or range(values.samples)


def _of_all_ranks(ranks: AllRanks, given: list[Any], counts: list[int]) -> list[Any]:
    """Return the identifiers of all ranks, pass by pass and rank by rank; none if a rank has none."""
    told: list[Any] = [None] * torch.distributed.get_world_size(ranks.group)
    torch.distributed.all_gather_object(told, (given, counts), group=ranks.group)
    if any(sum(numbers) and not names for names, numbers in told):
        return []
    rows = [iter(names) for names, _ in told]
    return [
        next(names)
        for place in range(len(counts))
        for names, (_, numbers) in zip(rows, told, strict=True)
        for _ in range(numbers[place])
    ]


def _named(name: str, interval: Interval) -> Values:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _finite(number: float | None) -> float | None:
    """Return the number, or ``None`` if it is not finite."""
    return number if number is not None and math.isfinite(number) else None


def _check(model: Any, quantities: Any, confidence: Any, per: Any) -> None:
    require_model(ASKED, model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadInput(
            ASKED, "model", "none of its parameters requires gradients", "set requires_grad=True on some"
        )
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise BadInput(
            ASKED,
            f"parameter {lazy[0]!r} of a lazy module",
            "it has no shape before the model's first call",
            "run the model once on a batch before you make the monitor",
        )
    unknown = [each for each in quantities or [quantities] if each not in QUANTITIES]
    if unknown:
        raise BadInput(
            ASKED,
            f"quantities, {unknown!r}",
            "it is not a list of names of quantities",
            f"choose from {', '.join(QUANTITIES)}",
        )
    if isinstance(confidence, bool) or not isinstance(confidence, float) or not 0 < confidence < 1:
        raise BadInput(
            ASKED, f"confidence={confidence!r}", "it is not a number between 0 and 1", "give 0.95, for example"
        )
    if per != "sample":
        raise BadInput(
            ASKED,
            f"per={per!r}",
            "the noise scale needs independent samples, and tokens of one sequence are not independent",
            "leave per out: a noise scale in sequences, times their length, is one in tokens",
        )
