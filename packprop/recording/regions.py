"""Inputs of uses that autograd does not keep either: what a checkpoint computes again, or hooks have moved.

# NOTE [Inputs kept elsewhere]
A use that held its inputs would undo what ``torch.utils.checkpoint`` and ``save_on_cpu`` are for. So where
hooks on saved tensors are in force, it holds none. Inputs that hooks have moved are given to the same hooks, as
autograd's own are. Inputs inside a checkpoint are collected while the checkpoint runs its *region* of the
forward pass again, which it does in every backward pass that goes through: the calls of torch functions in it
are counted, in the forward pass and again, and a use is known by its number. Nothing is saved for it: what a
checkpoint saves and counts is the same with and without packprop. Cotangents that arrive at a use before its
inputs wait for them; only where a pass ends without a region having been run, it is run for its inputs alone.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from packprop.errors import PackpropError
from packprop.functions.entry import Entry, Expansions, name_of
from packprop.functions.traits import EXPANSIONS
from packprop.recording.inputs import CallTemplate, Source
from packprop.recording.saved_hooks import Hooks, frame_of, hooks_in_force, is_checkpoint, is_counted

REGION = "_packprop_region"


class _Local(threading.local):
    replay: Replay | None = None


thread = _Local()


@dataclass(eq=False)
class Place:
    """A use inside a region.

    Args:
        region: The region.
        frame: What keeps the region's own inputs, for as long as the use is kept.
        number: Of the call in the region: of a recording that began inside, and of the call in it.
        recipe: How entries are made of the call's inputs.
    """

    region: Region
    frame: Any
    number: tuple[int, int]
    recipe: CallTemplate
    live: list[Entry] | None = None

    def ready(self) -> list[Entry] | None:
        """Entries, once the region was run again."""
        return self.live

    def fetch(self) -> list[Entry]:
        """Entries, for which the region is run again if need be."""
        if self.live is None:
            self.region.run(self)
        assert self.live is not None
        return self.live

    def taken(self) -> None:
        """The entries are in other hands: the inputs are not collected again in this pass."""
        self.region.leave(self)
        self.live = None

    def release(self) -> None:
        """Let go of the region's own inputs."""
        self.frame = None

    def collect(self, replay: Replay, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Collect the inputs from the call that is just being made again."""
        if function is not self.recipe.function:
            raise differs(name_of(self.recipe.function), f"{name_of(function)} was called in its place")
        self.live = self.recipe.entries(args, kwargs, replay.expansions.source, self.region.attached)


class Region:
    """A part of the forward pass that a checkpoint runs again in the backward pass.

    It stands on the checkpoint's own frame and lives as long. Counts go on while the forward pass runs.

    Args:
        frame: The checkpoint's.
    """

    def __init__(self, frame: Any) -> None:
        self._frame = weakref.ref(frame)
        self._places: dict[tuple[int, int], weakref.ref[Place]] = {}
        self._wanted: set[Place] = set()
        self._original: Callable[..., Any] | None = None
        self.inside = False
        """Whether recordings began inside the region, once for each outermost module in it."""
        self.attached = False
        """Whether what is collected shall be differentiable."""
        self.recording, self.calls = 0, 0

    def begin(self) -> None:
        """A recording begins inside."""
        self.inside = True
        self.recording, self.calls = self.recording + 1, 0

    def place(self, recipe: CallTemplate) -> Place:
        """Give the call that was just counted a place."""
        number = (self.recording, self.calls)
        place = Place(self, self._frame(), number, recipe)
        self._places[number] = weakref.ref(place)
        return place

    def open(self, wanted: Iterable[Place], attached: bool) -> None:
        """From now on, inputs of these uses are collected whenever the checkpoint runs the region again."""
        frame = self._frame()
        self._wanted, self.attached = set(wanted), attached
        if frame is None or self._original is not None:
            return
        original = self._original = frame.recompute_fn

        def again(*args: Any, **kwargs: Any) -> Any:
            try:
                with Replay(self):
                    return original(*args, **kwargs)
            except RuntimeError as error:
                if "backward an extra time" not in str(error):
                    raise
                raise PackpropError(
                    "A quantity beyond the gradient was asked for.",
                    "a part of the model inside torch.utils.checkpoint, with contexts of its own",
                    "selective checkpointing gives what it has kept to one pass alone, and this takes several",
                    "checkpoint without context_fn",
                ) from error

        frame.recompute_fn = again

    def close(self) -> None:
        """The end of a pass: drop what was collected, and what the checkpoint has computed for nothing.

        A checkpoint keeps what a pass has not asked for until its graph dies: once for each pass.
        """
        frame = self._frame()
        if frame is not None and self._original is not None:
            frame.recompute_fn = self._original
            frame.recomputed.clear()
        self._original = None
        self._wanted.clear()
        for reference in self._places.values():
            place = reference()
            if place is not None:
                place.live = None

    def is_wanted(self, number: tuple[int, int]) -> Place | None:
        """The use at a number, if its inputs are still to be collected."""
        reference = self._places.get(number)
        place = None if reference is None else reference()
        return place if place in self._wanted else None

    def leave(self, place: Place) -> None:
        """The inputs of a use are not wanted any more."""
        self._wanted.discard(place)

    def run(self, place: Place) -> None:
        """Run the region for the inputs that are wanted alone, which no pass has collected."""
        alone = self._original is None
        if alone:
            self.open([place], torch.is_grad_enabled())
        self._wanted.add(place)
        frame = place.frame
        try:
            with torch.enable_grad(), saved_tensors_hooks(_keep, _give):
                frame.recompute_fn(*frame.get_inputs())
            if place.live is None:
                raise differs(name_of(place.recipe.function), "it was not called")
        finally:
            if alone:
                live = place.live
                self.close()
                place.live = live

    def belongs(self, hooks: Hooks | None) -> bool:
        """Whether a call that runs under these hooks belongs to this region, and to none inside it."""
        if hooks is None:
            return False
        return hooks[0] is _keep or (is_checkpoint(hooks) and frame_of(hooks)[0] is self._frame())


def differs(name: str, what: str) -> PackpropError:
    """The error for a function that does not do the same when it is run again."""
    return PackpropError(
        "A quantity beyond the gradient was asked for.",
        f"{name}, inside torch.utils.checkpoint",
        f"when the checkpoint ran its function again, {what}",
        "checkpoint a function that does the same each time, or leave it out of checkpointing",
    )


def _keep(tensor: Tensor) -> Tensor:
    return tensor.detach()  # a node that held its own output would be a cycle


def _give(tensor: Tensor) -> Tensor:
    return tensor


def region_under(hooks: Hooks) -> Region | None:
    """The region that runs for the first time under these hooks."""
    if not is_checkpoint(hooks):
        return None
    frame, again = frame_of(hooks)
    if frame is None or again:
        return None
    if REGION not in frame.__dict__:
        frame.__dict__[REGION] = Region(frame)
    region: Region = frame.__dict__[REGION]
    return region


class Replay(TorchFunctionMode):
    """Sees the torch functions of a region that is run again, and collects the inputs of its uses."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region
        self._recording, self._calls, self._depth = 0, 0, 0
        self.expansions = Expansions()

    def __enter__(self) -> Replay:
        self._before, thread.replay = thread.replay, self
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's own
        return self

    def __exit__(self, *error: Any) -> None:
        thread.replay = self._before
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's own

    def begin(self) -> None:
        """A module is entered that a recording would begin at."""
        if self._depth == 0 and self._region.inside:
            self._recording, self._calls = self._recording + 1, 0
        self._depth += 1

    def end(self) -> None:
        """It is left."""
        self._depth -= 1

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        seen = self._depth > 0 or not self._region.inside
        if not seen or not self._region.belongs(hooks_in_force()) or not is_counted(func, (args, kwargs)):
            return func(*args, **kwargs)
        self._calls += 1
        place = self._region.is_wanted((self._recording, self._calls))
        if place is not None:
            place.collect(self, func, args, kwargs)
        out = func(*args, **kwargs)
        if func in EXPANSIONS:
            self.expansions.note(out, args[0])
        return out


def replay() -> Replay | None:
    """What collects inputs in this thread, if a region is just being run again for them."""
    return thread.replay


@contextlib.contextmanager
def opened(sources: Iterable[Source | None], attached: bool, inputs: bool = True) -> Iterator[None]:
    """Have the inputs of uses collected (if there is need) where their regions are run again inside.

    What checkpoints have computed again and nobody has asked for is dropped in any case.
    """
    given = [source for source in sources if source is not None]
    places: dict[Region, list[Place]] = {}
    for source in given:
        if isinstance(source, Place):
            places.setdefault(source.region, []).append(source)
    for region, wanted in places.items():
        region.open(wanted if inputs else (), attached)
    try:
        yield
    finally:
        for source in given:
            source.taken()
        for region in places:
            region.close()
