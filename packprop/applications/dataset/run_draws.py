"""The random states that a run draws from, on one rank or several, and what it leaves of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.applications.dataset.ranks import Ranks
from packprop.applications.dataset.sources import set_states, states_of, unless_drawn
from packprop.engine.tensors import random_states, set_random_states

States = dict[str, Any]
"""States of the devices by name, and of generators in their order."""


class RunDraws:
    """Random states of the devices, and of the generators that belong to extensions.

    Args:
        generators: The generators.
        ranks: The ranks of the run; each draws its own numbers.

    Attributes:
        before: The states before the run.
        begin: The states that the run begins with.
    """

    def __init__(self, generators: Sequence[torch.Generator], ranks: Ranks) -> None:
        self._generators, self._ranks = generators, ranks
        self.before = self.now()
        if ranks.world > 1:
            self.set(self.derived(self.before))
        self.begin = self.now()

    def now(self) -> States:
        """Return the states of the next draws."""
        states = {str(device): state for device, state in random_states().items()}
        return {"devices": states, "generators": states_of(self._generators)}

    def set(self, states: States) -> None:
        """Draw from these states from now on."""
        set_random_states({torch.device(name): state for name, state in states["devices"].items()})
        set_states(self._generators, states["generators"])

    def derived(self, states: States) -> States:
        """Return states of this rank, given those of the first one."""
        generators = [
            self._ranks.derived(state, generator.device)
            for state, generator in zip(states["generators"], self._generators, strict=True)
        ]
        devices = {
            name: self._ranks.derived(state, torch.device(name)) for name, state in states["devices"].items()
        }
        return {"devices": devices, "generators": generators}

    def end_alike(self) -> None:
        """Leave random states as users expect them, who do not know of numbers that ranks draw on their own.

        A rank that had the state of the first one has it again; on another rank, a state that nothing was drawn
        from is unchanged.
        """
        first, first_now = self._ranks.each((self.before, self.now()))[0]

        def after(was: Tensor, begun: Tensor, now: Tensor, first: Tensor, first_now: Tensor) -> Tensor:
            return first_now if torch.equal(was, first) else unless_drawn(was, begun, now)

        self.set(_each(after, self.before, self.begin, self.now(), first, first_now))

    def leave_undrawn(self) -> None:
        """Put back states, of another process than the run began in, that it has not drawn from."""
        self.set(_each(unless_drawn, self.before, self.begin, self.now()))


def _each(choose: Callable[..., Tensor], *moments: States) -> States:
    """Choose a state for each device and generator from those of several moments."""
    names = [name for name in moments[0]["devices"] if all(name in each["devices"] for each in moments)]
    devices = {name: choose(*(each["devices"][name] for each in moments)) for name in names}
    generators = [choose(*each) for each in zip(*(each["generators"] for each in moments), strict=True)]
    return {"devices": devices, "generators": generators}
