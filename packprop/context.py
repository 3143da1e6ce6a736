"""``with backpack(...):`` around ``backward()``: quantities are computed along, and saved on the parameters."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from packprop.engine.backward_pass import BackwardPass
from packprop.engine.chunks import ChunkSizes, default_chunk_sizes
from packprop.errors import BadInput, PackpropWarning
from packprop.graph.completeness import require_differentiable
from packprop.graph.graph import Graph
from packprop.graph.samples import check_graph
from packprop.graph.walk import walk
from packprop.memory.bytes import keep_freed_pages
from packprop.memory.plan import Plan
from packprop.memory.planning import chunk_sizes_of_pass
from packprop.memory.search import budget_of
from packprop.recording.switch import drop_stale_recording
from packprop.tensors.dry import is_dry_run
from packprop.tensors.nesting import map_tensors
from packprop.tensors.state import is_sole
from packprop.types import Extension

Hook = Callable[[nn.Module], Any]


class _Local(threading.local):
    def __init__(self) -> None:
        self.active: list[Backpack] = []


_local = _Local()


def innermost() -> Backpack | None:
    """The context that is in force in this thread."""
    return _local.active[-1] if _local.active else None


def backpack(
    *extensions: Extension,
    extension_hook: Hook | None = None,
    memory: int | str | Plan | None = None,
    retain_graph: bool = False,
    debug: bool = False,
) -> Backpack:
    """Compute more than the gradient in every backward pass inside the context.

    Args:
        extensions: Instances from ``packprop.extensions``; each saves its value on every trainable parameter
            under its ``savefield``, overwriting what an earlier pass left there.
        extension_hook: Called with each module that owns parameters as soon as all their values are saved.
        memory: The most bytes of tensor storage that may be alive at once in a step, with parameters,
            activations and results (``"600MiB"``, a number), or a ``Plan``. With a budget the model is run once
            more for each new shape, without data, to find the chunks that fit.
        retain_graph: Accepted for existing code; the graph is kept if ``backward(retain_graph=True)`` keeps it.
        debug: Print what the pass goes through.

    Raises:
        BadInput: For a class instead of an instance, or anything that is no extension; for a budget that is no
            number of bytes. In the backward pass, before any work: for a budget that nothing fits, or a plan
            that was made for something else.
    """
    return Backpack(extensions, extension_hook, memory, debug)


class Backpack(TorchFunctionMode):
    """The context that ``backpack`` returns; the innermost one is in force."""

    def __init__(
        self, extensions: Sequence[Any], hook: Hook | None, memory: int | str | Plan | None, debug: bool
    ) -> None:
        super().__init__()
        self.extensions = check_extensions("backpack(...) was entered.", extensions)
        if hook is not None and not callable(hook):
            raise BadInput(
                "backpack(extension_hook=...) was entered.",
                f"extension_hook of type {type(hook).__name__}",
                "it cannot be called",
                "give a function of one module",
            )
        self._memory = memory if isinstance(memory, Plan) else budget_of(memory)
        self._hook, self._debug, self._running, self._seen = hook, debug, False, False

    def __enter__(self) -> Backpack:
        drop_stale_recording()
        _local.active.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's own
        self._seen = False
        return self

    def __exit__(self, *error: Any) -> None:
        drop_stale_recording()
        _local.active.remove(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's own
        if not self._seen and self.extensions and error[0] is None:
            warnings.warn(
                "No backward pass was seen inside `with backpack(...)`: call loss.backward() inside it.",
                PackpropWarning,
                stacklevel=2,
            )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        run = None
        if func is Tensor.backward:
            run = _of_tensor(*args, **kwargs)
        elif func is torch.autograd.backward:
            run = _of_function(*args, **kwargs)
        if run is None or self._running or is_dry_run() or _local.active[-1] is not self:
            return func(*args, **kwargs)
        self._running = self._seen = True
        try:
            if any(extension.keeps_graph for extension in self.extensions):
                run.keeps_graph = True
                args, kwargs = _retaining(args, kwargs)
            return self._backward(run, lambda: func(*args, **kwargs))
        finally:
            self._running = False

    def _backward(self, run: _Pass, backward: Callable[[], None]) -> None:
        if not self.extensions or run.is_refused_by_torch:
            return backward()
        graph = walk(run.roots, run.gradients, run.wanted)
        check_graph(graph)
        if run.create_graph:
            require_differentiable(graph)
        attach = _Attach(graph, self._hook)
        backward_pass = BackwardPass(
            graph,
            self.extensions,
            run.create_graph,
            attach,
            self._chunk_sizes(graph),
            begin=lambda: attach.taken_off(self.extensions, spare=self._memory is None),
        )
        if self._debug:
            print(f"packprop: {graph.samples} samples, {len(graph.uses)} uses")
            for found in graph.uses:
                print(f"  {graph.label(found)}: {found.layouts[0]}")
        graph.hold(run.keeps_graph)
        keep = True

        def restricted(leaves: Sequence[Tensor] | None) -> None:
            if leaves is None:
                return backward()
            seeds = run.gradients if any(seed is not None for seed in run.gradients) else None
            torch.autograd.backward(run.roots, seeds, run.keeps_graph, inputs=leaves)

        try:
            if run.wanted is None:
                backward_pass.run(restricted)
            else:  # such a pass does not go through every node that is needed
                backward_pass.run(None)
                backward()
            keep = run.keeps_graph
        finally:
            graph.release(keep)

    def _chunk_sizes(self, graph: Graph) -> ChunkSizes:
        """How much is taken at once: by the plan, or by one that is made for passes of these shapes."""
        if self._memory is None:
            keep_freed_pages()
            return default_chunk_sizes(next((leaf.device for leaf in graph.leaves()), None))
        if isinstance(self._memory, Plan):
            self._memory.require_fit(graph, self.extensions, self._hook is not None)
            return self._memory.chunk_sizes
        return chunk_sizes_of_pass(graph, self.extensions, self._memory)


class _Pass:
    """The arguments of one call of ``backward``."""

    @property
    def is_refused_by_torch(self) -> bool:
        """Whether torch will not begin such a pass, and knows best what to say."""
        return not all(root.requires_grad for root in self.roots) or any(
            root.numel() != 1 and given is None for root, given in zip(self.roots, self.gradients, strict=True)
        )

    def __init__(
        self, roots: Any, gradients: Any, retain_graph: bool | None, create_graph: bool, inputs: Any
    ) -> None:
        self.roots = _listed(roots)
        self.gradients = _listed(gradients) if gradients is not None else [None] * len(self.roots)
        self.create_graph = create_graph
        self.keeps_graph = create_graph if retain_graph is None else retain_graph
        chosen = None if inputs is None else _listed(inputs)
        self.wanted = None if chosen is None else [t for t in chosen if isinstance(t, Tensor) and t.is_leaf]


def _of_tensor(
    root: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> _Pass:
    """The arguments of ``Tensor.backward``."""
    return _Pass(root, gradient, retain_graph, create_graph, inputs)


def _of_function(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> _Pass:
    """The arguments of ``torch.autograd.backward``."""
    gradients = grad_variables if grad_tensors is None else grad_tensors
    return _Pass(tensors, gradients, retain_graph, create_graph, inputs)


def _retaining(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``backward`` with ``retain_graph=True``, which comes third in both spellings."""
    if len(args) > 2:
        return (*args[:2], True, *args[3:]), kwargs
    return args, {**kwargs, "retain_graph": True}


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) or not isinstance(value, Sequence) else list(value)


def check_extensions(asked: str, extensions: Sequence[Any]) -> tuple[Extension, ...]:
    """Refuse classes, and anything that is no extension.

    Raises:
        BadInput: A ``ValueError``.
    """
    for extension in extensions:
        if isinstance(extension, type) and issubclass(extension, Extension):
            raise BadInput(
                asked,
                f"extension {extension.__name__}",
                "it is a class, not an instance",
                f"write {extension.__name__}()",
            )
        if not isinstance(extension, Extension):
            raise BadInput(
                asked,
                f"argument {extension!r} of type {type(extension).__name__}",
                "it is not an extension",
                "give instances from packprop.extensions, or of your own subclass of Extension",
            )
    return tuple(dict.fromkeys(extensions))  # the same one twice is one


class _Attach:
    """Saves finished values on parameters, and tells the user's hook which modules are done."""

    def __init__(self, graph: Graph, hook: Hook | None) -> None:
        self._graph, self._hook = graph, hook
        self._waiting = [] if hook is None else graph.owners()

    def taken_off(self, extensions: Sequence[Extension], spare: bool) -> dict[tuple[Extension, int], Tensor]:
        """Take off what an earlier pass has left; returned is what can be written over, if it is ``spare``.

        # NOTE [Results in place]
        A training loop leaves the results of a step on the parameters until those of the next take their place.
        They are taken off before, so that not both are there at once. On a processor fresh memory is paid for
        page by page, which takes a large part of the time of per-sample gradients: results that nobody else
        holds are written over there instead. Under a budget they are not: they would be there from the pass's
        first moment, where a step without them has room for activations.
        """
        found: dict[tuple[Extension, int], Tensor] = {}
        for extension in extensions:
            grows = not all(row.sums for row in extension.rows)
            for leaf in self._graph.leaves():
                holder = [vars(leaf).pop(extension.savefield, None)]
                if spare and grows and _can_be_written_over(holder):
                    found[extension, id(leaf)] = holder.pop()
        return found

    def __call__(self, leaf: Tensor, results: dict[Extension, list[Any]]) -> None:
        for extension, values in results.items():
            samples = self._graph.samples
            if extension.subsampling is not None:
                samples = len(extension.subsampling)
            value = extension.finish(values, samples)
            setattr(leaf, extension.savefield, map_tensors(lambda t: _saved(t, leaf.dtype), value))
        for module, own in self._waiting:
            if id(leaf) in own:
                own.remove(id(leaf))
                if not own and self._hook is not None:
                    self._hook(module)


def _can_be_written_over(holder: list[Any]) -> bool:
    """Whether a list's one item is memory of a processor that nobody else holds."""
    old = holder[0]
    if type(old) is not Tensor or old.device.type != "cpu" or old.layout is not torch.strided:
        return False
    if old.requires_grad or old.is_inference():
        return False
    del old
    return is_sole(holder)


def _saved(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A result in a parameter's precision; to autograd no view of a tensor that nobody sees."""
    value = value.to(dtype)
    return value if value.requires_grad else value.data
