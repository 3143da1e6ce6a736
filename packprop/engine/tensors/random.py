"""The states of the random generators: reading them, setting them, drawing from them for a while."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from packprop.engine.tensors.traced import is_traced, not_traceable

RandomStates = dict[torch.device, Tensor]
"""One state for each device; the CPU is always among them."""


def generator_classes() -> tuple[type, ...]:
    """Return the classes of generators of random numbers."""
    import numpy as np  # a backward pass does not need it

    return torch.Generator, random.Random, np.random.Generator, np.random.RandomState


def device_of_draws(generator: torch.Generator | None, like: Tensor) -> torch.device:
    """Return the device to draw numbers for a tensor on: its own, or that of the given generator."""
    return like.device if generator is None or like.is_meta else generator.device


def drawn(
    draw: Callable[..., Tensor], shape: Sequence[int], like: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Draw numbers by ``torch.rand`` or ``torch.randn``, in the precision and on the device of a tensor."""
    device = device_of_draws(generator, like)
    return draw(tuple(shape), dtype=like.dtype, device=device, generator=generator).to(like.device)


def random_states(devices: Iterable[torch.device] | None = None) -> RandomStates:
    """Return the states of the generators of the CPU and of ``devices``; by default, all used CUDA devices."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    for device in _cuda_devices() if devices is None else devices:
        if device.type not in ("cpu", "meta"):
            states[device] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_states(states: RandomStates) -> None:
    """Restore the states that ``random_states`` returned."""
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def _python_states() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's generators; ``None`` for NumPy's if it is not loaded."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state()


def _set_python_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy.random"].set_state(states[1])


@contextmanager
def python_random_unchanged() -> Iterator[None]:
    """Restore the states of Python's and NumPy's generators afterwards, which models may also draw from."""
    states = _python_states()
    try:
        yield
    finally:
        _set_python_states(states)


@contextmanager
def random_numbers_from(states: RandomStates) -> Iterator[None]:
    """Draw random numbers from ``states`` inside; afterwards it is as if nothing had been drawn.

    Raises:
        NotTraceable: In a traced pass, whose replays draw other numbers.
    """
    if is_traced():
        raise not_traceable(
            "a function that draws random numbers, and has no rule",
            "it is evaluated again with the numbers that it drew, which a graph cannot draw twice",
        )
    before = random_states(states)
    with python_random_unchanged():
        try:
            set_random_states(states)
            yield
        finally:
            set_random_states(before)


class Draws:
    """Calls functions with random states of their own, which go on from call to call.

    packprop calls backward functions of the user's more often than autograd does, which would change what is
    drawn later.
    """

    def __init__(self) -> None:
        self._states: tuple[RandomStates, tuple[Any, Any]] | None = None

    def call(self, function: Callable[..., Any], *given: Any) -> Any:
        """Return what a function returns, and leave the random states as they are, unless a pass is traced."""
        if is_traced():
            return function(*given)
        before = random_states(), _python_states()
        if self._states is not None:
            self._set(self._states)
        try:
            return function(*given)
        finally:
            self._states = random_states(), _python_states()
            self._set(before)

    @staticmethod
    def _set(states: tuple[RandomStates, tuple[Any, Any]]) -> None:
        set_random_states(states[0])
        _set_python_states(states[1])


def _cuda_devices() -> list[torch.device]:
    """Return every CUDA device, once CUDA is initialised."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return []
