"""The random states that a run draws from, on one rank or several, and those that it leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from packprop.applications.dataset.ranks import Ranks
from packprop.applications.dataset.sources import unless_drawn
from packprop.engine.tensors import random_states, set_random_states

States = dict[str, Tensor]
"""States of the devices by their names, and of generators by their places."""


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
        self._own = {f"generator {place}": each for place, each in enumerate(generators)}
        self._ranks = ranks
        self.before = self.now()
        if ranks.world > 1:
            self.set(self.derived(self.before))
        self.begin = self.now()

    def now(self) -> States:
        """Return the states of the next draws."""
        states = {str(device): state for device, state in random_states().items()}
        return states | {place: each.get_state() for place, each in self._own.items()}

    def set(self, states: States) -> None:
        """Draw from these states from now on."""
        set_random_states({torch.device(name): states[name] for name in states.keys() - self._own.keys()})
        for place in states.keys() & self._own.keys():
            self._own[place].set_state(states[place])

    def derived(self, states: States) -> States:
        """Return states of this rank, given those of the first rank."""
        devices = {place: each.device for place, each in self._own.items()}
        return {
            name: self._ranks.derived(state, devices.get(name) or torch.device(name))
            for name, state in states.items()
        }

    def end_alike(self) -> None:
        """Leave random states as if the ranks had not drawn numbers of their own.

        A rank that began with the state of the first rank ends with that of the first rank; on another rank, a
        state that nothing was drawn from is unchanged.
        """
        first, first_now = self._ranks.each((self.before, self.now()))[0]

        def after(was: Tensor, begun: Tensor, now: Tensor, first: Tensor, first_now: Tensor) -> Tensor:
            return first_now if torch.equal(was, first) else unless_drawn(was, begun, now)

        self.set(_each(after, self.before, self.begin, self.now(), first, first_now))

    def leave_undrawn(self) -> None:
        """Put back this process's states that the run has not drawn from, after it began in another process."""
        self.set(_each(unless_drawn, self.before, self.begin, self.now()))


def _each(choose: Callable[..., Tensor], *moments: States) -> States:
    """Choose a state for each device and generator from those of several moments."""
    first, *others = moments
    names = [name for name in first if all(name in each for each in others)]
    return {name: choose(*(each[name] for each in moments)) for name in names}
