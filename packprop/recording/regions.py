"""Inputs of uses that autograd does not keep, because a checkpoint computes them again.

# NOTE [Inputs kept elsewhere]
A use that held its inputs would undo what ``torch.utils.checkpoint`` and ``save_on_cpu`` are for. So where
hooks on saved tensors are in force, a use holds none. Inputs that such hooks move are given to the same hooks,
as autograd gives them its own. Inputs inside a checkpoint are collected while the checkpoint runs its *region*
of the forward pass again, which it does in every backward pass that goes through it. The calls of torch
functions in the region are counted in the forward pass and when it is run again, and a use is known by its
number. Nothing is saved for it: what a checkpoint saves and counts is the same with and without packprop.
Cotangents that arrive at a use before its inputs wait for them. Only if a pass ends before a region was run, is
it run for its inputs alone.
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

from packprop.errors import PackpropError
from packprop.functions.composites import COMPOSITES
from packprop.functions.entry import Call, Entry, name_of
from packprop.recording.aside import Nesting, OwnMode, can_look_inside
from packprop.recording.inputs import CallTemplate, InputSource, OffloadedInputs
from packprop.recording.provenance import Expansions
from packprop.recording.saved_hooks import Hooks, frame_of, hooks_in_force, inputs_of, is_checkpoint, is_counted

REGION = "_packprop_region"
"""Attribute of a checkpoint's frame: its region."""


CallNumber = tuple[int, int]
"""Number of a call in a region: of the recording that began inside the region, and of the call in it."""


class _Current(threading.local):
    replay: Replay | None = None


current = _Current()
"""The replay that runs in this thread."""


@dataclass(eq=False)
class RecomputedInputs:
    """Inputs of a use inside a region, which are there once the checkpoint has run the region again.

    Args:
        region: The region.
        frame: What keeps the region's own inputs, for as long as the use is kept.
        number: Number of the call in the region.
        template: The call without its inputs.
        entries: Entries with their inputs, while these are there.
    """

    region: Region
    frame: Any
    number: CallNumber
    template: CallTemplate
    entries: list[Entry] | None = None

    def ready(self) -> list[Entry] | None:
        """Entries, once the region was run again."""
        return self.entries

    def fetch(self) -> list[Entry]:
        """Entries, for which the region is run again if need be."""
        if self.entries is None:
            self.region.run_for(self)
        assert self.entries is not None
        return self.entries

    def taken(self) -> None:
        """The caller has taken the entries: the inputs are not collected again in this pass."""
        self.region.stop_collecting(self)
        self.entries = None

    def release(self) -> None:
        """Drop the region's own inputs."""
        self.frame = None

    def collect(self, replay: Replay, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Collect the inputs from the call that is being made again."""
        if function is not self.template.function:
            raise differs(name_of(self.template.function), f"{name_of(function)} was called in its place")
        unexpanded, differentiable = replay.expansions.source, self.region.differentiable
        self.entries = self.template.entries(args, kwargs, unexpanded, differentiable)


class Region:
    """A part of the forward pass that a checkpoint runs again in the backward pass.

    The checkpoint's frame keeps it, so that both live equally long. Its calls are counted in the forward pass.

    Args:
        frame: The checkpoint's frame.
    """

    def __init__(self, frame: Any) -> None:
        self._frame = weakref.ref(frame)
        self._uses: dict[CallNumber, weakref.ref[RecomputedInputs]] = {}
        self._wanted: set[RecomputedInputs] = set()
        self._recompute: Callable[..., Any] | None = None
        """The checkpoint's own function, while another one stands in its place."""
        self.has_recordings = False
        """Whether recordings began inside the region, one for each outermost module in it."""
        self.differentiable = False
        """Whether collected inputs stay attached to the graph that made them."""
        self.recordings, self.calls = 0, 0
        self.hooks: list[Callable[..., Any]] = []
        """Hooks that were put on tensors inside."""

    def begin_recording(self) -> None:
        """Count a recording that begins inside the region."""
        self.has_recordings = True
        self.recordings, self.calls = self.recordings + 1, 0

    def inputs_of_last_call(self, template: CallTemplate) -> RecomputedInputs:
        """The inputs of the call that was counted last, to be collected by its number."""
        number = (self.recordings, self.calls)
        inputs = RecomputedInputs(self, self._frame(), number, template)
        self._uses[number] = weakref.ref(inputs)
        return inputs

    def open(self, wanted: Iterable[RecomputedInputs], differentiable: bool) -> None:
        """From now on, collect the wanted inputs whenever the checkpoint runs the region again."""
        frame = self._frame()
        self._wanted, self.differentiable = set(wanted), differentiable
        if frame is None or self._recompute is not None:
            return
        recompute = self._recompute = frame.recompute_fn

        def recompute_and_collect(*args: Any, **kwargs: Any) -> Any:
            try:
                with Replay(self):
                    return recompute(*args, **kwargs)
            except RuntimeError as error:
                if "backward an extra time" not in str(error):
                    raise
                raise PackpropError(
                    "A quantity beyond the gradient was asked for.",
                    "a part of the model inside torch.utils.checkpoint, with contexts of its own",
                    "selective checkpointing gives what it has kept to one pass alone, and this takes several",
                    "checkpoint without context_fn",
                ) from error

        frame.recompute_fn = recompute_and_collect

    def close(self) -> None:
        """End of a pass: drop what was collected, and what the checkpoint has computed but nobody asked for.

        The checkpoint would keep the latter until its graph dies, once for each pass.
        """
        frame = self._frame()
        if frame is not None and self._recompute is not None:
            frame.recompute_fn = self._recompute
            frame.recomputed.clear()
        self._recompute = None
        self._wanted.clear()
        for reference in self._uses.values():
            inputs = reference()
            if inputs is not None:
                inputs.entries = None

    def wanted_at(self, number: CallNumber) -> RecomputedInputs | None:
        """The inputs of the call with a number, if they are still to be collected."""
        reference = self._uses.get(number)
        inputs = None if reference is None else reference()
        return inputs if inputs in self._wanted else None

    def stop_collecting(self, inputs: RecomputedInputs) -> None:
        """Do not collect these inputs any more in this pass."""
        self._wanted.discard(inputs)

    def run_for(self, inputs: RecomputedInputs) -> None:
        """Run the region only to collect inputs, because no pass has run it."""
        outside_pass = self._recompute is None
        if outside_pass:
            self.open([inputs], torch.is_grad_enabled())
        self._wanted.add(inputs)
        frame = inputs.frame
        try:
            with torch.enable_grad(), saved_tensors_hooks(_pack, _unpack):
                frame.recompute_fn(*inputs_of(frame))
            if inputs.entries is None:
                raise differs(name_of(inputs.template.function), "it was not called")
        finally:
            if outside_pass:
                entries = inputs.entries
                self.close()
                inputs.entries = entries

    def is_innermost_under(self, hooks: Hooks | None) -> bool:
        """Whether a call that runs under these hooks belongs to this region, and to none inside it."""
        if hooks is None:
            return False
        return hooks[0] is _pack or (is_checkpoint(hooks) and frame_of(hooks)[0] is self._frame())


def differs(name: str, what: str) -> PackpropError:
    """The error for a function ``name`` that does not do the same when it is run again."""
    return PackpropError(
        "A quantity beyond the gradient was asked for.",
        f"{name}, inside torch.utils.checkpoint",
        f"when the checkpoint ran its function again, {what}",
        "checkpoint a function that does the same each time, or leave it out of checkpointing",
    )


def _pack(tensor: Tensor) -> Tensor:
    return tensor.detach()  # a node that held its own output would be a cycle


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def region_under(hooks: Hooks) -> Region | None:
    """The region whose forward pass runs under these hooks, for the first time and not again."""
    if not is_checkpoint(hooks):
        return None
    frame, again = frame_of(hooks)
    if frame is None or again:
        return None
    if REGION not in frame.__dict__:
        frame.__dict__[REGION] = Region(frame)
    region: Region = frame.__dict__[REGION]
    return region


def input_source(call: Call, in_place: bool, hooks: Hooks) -> InputSource | None:
    """Where a use shall find its inputs, if the hooks on saved tensors do not let it hold them."""
    if not is_checkpoint(hooks):
        return OffloadedInputs(call, in_place)
    region = region_under(hooks)
    return None if region is None else region.inputs_of_last_call(CallTemplate.of(call, in_place))


class Replay(OwnMode):
    """Sees the torch functions of a region that is run again, and collects the inputs of its uses."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region
        self._recordings, self._calls = 0, 0
        self._nesting = Nesting()
        self.expansions = Expansions()

    def __enter__(self) -> Replay:
        self._before, current.replay = current.replay, self
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's own
        return self

    def __exit__(self, *error: Any) -> None:
        current.replay = self._before
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's own

    def begin(self, called: object) -> None:
        """Enter a module, or ``record()``, where the forward pass may have begun a recording."""
        if self._nesting.enter(called) and self._region.has_recordings:
            self._recordings, self._calls = self._recordings + 1, 0

    def end(self, called: object) -> None:
        """Leave what ``begin`` entered."""
        self._nesting.leave(called)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if func in COMPOSITES and can_look_inside(args, kwargs):
            return self.look_inside(func, args, kwargs)
        region = self._region
        recorded = self._nesting.outermost is not None or not region.has_recordings
        if (
            not recorded
            or not region.is_innermost_under(hooks_in_force())
            or not is_counted(func, (args, kwargs))
        ):
            return func(*args, **kwargs)
        self._calls += 1
        inputs = region.wanted_at((self._recordings, self._calls))
        if inputs is not None:
            inputs.collect(self, func, args, kwargs)
        out = func(*args, **kwargs)
        self.expansions.note(func, args, out)
        return out


def current_replay() -> Replay | None:
    """The replay of this thread, if a region is being run again to collect inputs."""
    return current.replay


@contextlib.contextmanager
def opened(sources: Iterable[InputSource | None], differentiable: bool, inputs: bool = True) -> Iterator[None]:
    """During a pass, collect the inputs of uses where checkpoints run their regions again.

    What checkpoints have computed again and nobody has asked for is dropped in any case.

    Args:
        sources: Where the uses find their inputs; ``None`` for a use that holds them.
        differentiable: Whether collected inputs stay attached to the graph that made them.
        inputs: Whether the pass needs the inputs at all.
    """
    given = [source for source in sources if source is not None]
    by_region: dict[Region, list[RecomputedInputs]] = {}
    for source in given:
        if isinstance(source, RecomputedInputs):
            by_region.setdefault(source.region, []).append(source)
    for region, wanted in by_region.items():
        region.open(wanted if inputs else (), differentiable)
    try:
        yield
    finally:
        for source in given:
            source.taken()
        for region in by_region:
            region.close()
