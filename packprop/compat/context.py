"""BackPACK's ``backpack``, ``extend``, ``disable`` and ``CTX``, made of packprop's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from packprop.compat.calls import (
    are_calls_kept,
    calls_below,
    forget_call,
    unwatch_calls,
    watch_calls,
)
from packprop.compat.dispatch import Overrides, Start, run_on_modules
from packprop.compat.nothing import values_of_nothing
from packprop.compat.own import BackpropExtension, Unsupported
from packprop.engine import context
from packprop.engine.context import Backpack
from packprop.engine.graph import hooks_below, require_unsharded
from packprop.engine.memory import Plan
from packprop.engine.passes import Hook, changed_gradient
from packprop.engine.recording import EXTENDED, switch
from packprop.errors import PackpropError
from packprop.types import Extension, warn_of_shared_attributes


def extend(module: nn.Module, debug: bool = False, use_converter: bool = False) -> nn.Module:
    """Extend a module, with BackPACK's arguments, and let it keep its calls for extensions of single modules.

    Args:
        module: Any module, or a loss module.
        debug: Accepted for existing code.
        use_converter: Accepted for existing code; packprop converts nothing.

    Raises:
        BadInput: If ``module`` is not an instance of ``torch.nn.Module``.
    """
    switch.extend(module, use_converter, debug)
    watch_calls(module)
    return module


def memory_cleanup(module: nn.Module) -> None:
    """Drop the ``input0``, ``input1``, ..., ``output`` that a module keeps from its last call."""
    forget_call(module)


def convert_module_to_backpack(module: nn.Module, debug: bool = False) -> nn.Module:
    """Return the module as it is: functions, branches and in-place operations need no conversion.

    Args:
        module: Any module.
        debug: Accepted for existing code.
    """
    return module


class disable:  # noqa: N801  # the older library's name
    """``packprop.disable`` as a class."""

    def __init__(self) -> None:
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(switch.disable())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    @staticmethod
    def should_store_io() -> bool:
        """Tell whether forward passes are recorded."""
        return not switch.is_recording_disabled()


class backpack(Backpack):  # noqa: N801  # the older library's name
    """``packprop.backpack``, which also runs extensions that were written for single modules.

    Args:
        exts: Instances of extensions.
        extension_hook: A function that packprop calls with each module that owns parameters, as soon as its
            values are saved; if only extensions for single modules run, with every module.
        debug: Print what the pass goes through.
        retain_graph: Accepted for existing code; only ``backward(retain_graph=True)`` keeps the graph.
        memory: As for ``packprop.backpack``.

    Raises:
        BadInput: For a class instead of an instance, or anything that is no extension; a ``ValueError``.
    """

    def __init__(
        self,
        *exts: Any,
        extension_hook: Hook | None = None,
        debug: bool = False,
        retain_graph: bool = False,
        memory: int | str | Plan | None = None,
    ) -> None:
        exts = tuple(dict.fromkeys(exts))  # an extension that is given twice runs once
        ours = [ext for ext in exts if isinstance(ext, Extension) or not isinstance(ext, BackpropExtension)]
        super().__init__(ours, None if extension_hook is None else self._done, memory, debug)
        if len(ours) < len(exts):  # extensions for single modules save first
            warn_of_shared_attributes(sorted(exts, key=ours.__contains__))
        self.exts, self.debug = exts, debug
        self.extension_hook, self.retain_graph = extension_hook, retain_graph
        self._overrides: Overrides = []

    @property
    def _own(self) -> list[BackpropExtension]:
        """Extensions that look at single modules."""
        candidates = [ext for ext in self.exts if isinstance(ext, BackpropExtension)]
        return [ext for ext in candidates if ext.module_extensions or not isinstance(ext, Extension)]

    def _backward(self, run: Any, backward: Callable[[], None]) -> None:
        try:
            self._run(run, backward)
        except PackpropError as error:
            if type(error) is not PackpropError:
                raise
            # programs for BackPACK expect a NotImplementedError for quantities that a graph does not allow
            raise Unsupported(*error.args).with_traceback(error.__traceback__) from None

    def _run(self, run: Any, backward: Callable[[], None]) -> None:
        """Run all extensions, those for single modules first."""
        if run.is_plain or not (are_calls_kept() or self._without_samples):
            super()._backward(run, backward)
            return
        start = Start(run.roots, run.gradients, run.create_graph, self.extensions, self._drawn)
        # also without extensions for modules: extension hooks read kept tensors
        calls = calls_below(run.roots) if are_calls_kept() else {}
        self._overrides = []
        if self._own:
            done = None if self.extensions else self.extension_hook
            hooks = hooks_below(run.roots)
            alive = [module for call in calls if (module := call.module) is not None]  # until the pass is over
            require_unsharded(alive, hooks)
            with hooks.quiet():
                self._overrides = run_on_modules(start, calls, self._own, done)
            users_pass = backward

            def backward() -> None:
                with hooks.refusing_changes(changed_gradient):
                    users_pass()

        if self._without_samples:
            with hooks_below(run.roots).quiet():
                self._overrides += values_of_nothing(start.graph, self._without_samples)
        for call in calls:
            call.held = True
        keep = True
        try:
            super()._backward(run, backward)
            self._replace(None)
            keep = run.keeps_graph
        finally:
            self._overrides = []
            for call in calls:
                call.held = False
                if not keep:
                    call.drop()

    @property
    def _without_samples(self) -> list[Extension]:
        """Return extensions with an empty choice of samples."""
        return [ext for ext in self.extensions if ext.subsampling is not None and len(ext.subsampling) == 0]

    def _done(self, module: nn.Module) -> None:
        """Handle a module that has all of packprop's values: replace some of them, and call the user's hook."""
        self._replace({id(parameter) for parameter in module.parameters(recurse=False)})
        if self.extension_hook is not None:
            self.extension_hook(module)

    def _replace(self, parameters: set[int] | None) -> None:
        """Replace packprop's values by those of module extensions, on some parameters or on all."""
        later: Overrides = []
        for parameter, field, value in self._overrides:
            if parameters is None or id(parameter) in parameters:
                setattr(parameter, field, value)
            else:
                later.append((parameter, field, value))
        self._overrides = later


class CTX:
    """The active settings: the options of the innermost ``backpack`` context."""

    @staticmethod
    def get_active_exts() -> tuple[Any, ...]:
        """Return the extensions of the innermost context."""
        inner = context.innermost()
        return () if inner is None else getattr(inner, "exts", inner.extensions)

    @staticmethod
    def is_extension_active(*extension_classes: type) -> bool:
        """Tell whether an extension of one of these classes is active."""
        return any(isinstance(ext, extension_classes) for ext in CTX.get_active_exts())

    @staticmethod
    def get_extension_hook() -> Hook:
        """Return the innermost context's hook, or a function that does nothing."""
        hook = getattr(context.innermost(), "extension_hook", None)
        return no_op if hook is None else hook

    @staticmethod
    def get_debug() -> bool:
        """Tell whether the innermost context prints."""
        return bool(getattr(context.innermost(), "debug", False))

    @staticmethod
    def get_retain_graph() -> bool:
        """Tell whether the innermost context was made with ``retain_graph=True``."""
        return bool(getattr(context.innermost(), "retain_graph", False))

    @staticmethod
    def remove_hooks() -> None:
        """Undo every ``extend``."""
        for module in list(EXTENDED):
            unwatch_calls(module)
            switch.restore(module)


def no_op(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def subsample(tensor: Tensor, dim: int = 0, subsampling: list[int] | None = None) -> Tensor:
    """Return some samples of a tensor, in the order of the list.

    Args:
        tensor: Any tensor.
        dim: Axis that holds the samples.
        subsampling: Indices; ``None`` for all.
    """
    return tensor if subsampling is None else tensor[(slice(None),) * dim + (subsampling,)]
