"""Extensions that users write for single modules, as in BackPACK.

In packprop itself an extension consists of rows (``packprop.types.Extension``), and works with every function.
An extension for BackPACK has code for each class of modules, which takes ``module.input0``, ``module.output``,
``g_inp``, ``g_out`` and a quantity that it propagates back. This module runs such code.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from packprop.compat.calls import InputGradients, edge_key, is_loss_class, keep_calls, kept_inputs, require_kept
from packprop.compat.saved_quantities import SavedQuantities
from packprop.errors import BadInput, PackpropError

FAIL_ERROR, FAIL_WARN, FAIL_SILENT = "ERROR", "WARNING", "SILENT"

PACKAGE = "packprop."


class Unsupported(PackpropError, NotImplementedError):
    """Raised if an extension does not support a module or graph; a ``NotImplementedError``, as in BackPACK."""


class _KeepsCalls:
    """Makes forward passes keep calls as soon as a subclass is defined outside of packprop."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not f"{cls.__module__}.".startswith(PACKAGE):
            keep_calls()


class ModuleExtension(_KeepsCalls):
    """The work of an extension on one class of modules.

    It has one method for each name in ``params``, which takes the arguments of ``backpropagate`` and returns
    the value to save on the parameter of that name.

    Args:
        params: Names of the module's parameters.

    Raises:
        Unsupported: If a method is missing; a ``NotImplementedError``.
    """

    def __init__(self, params: Sequence[str] | None = None) -> None:
        keep_calls()
        self._params = list(params or ())
        for name in self._params:
            if not hasattr(self, name):
                raise Unsupported(
                    f"{type(self).__name__}(params={self._params}) was called.",
                    f"parameter {name!r}",
                    "the class has no method of this name",
                    f"def {name}(self, extension, module, g_inp, g_out, bpQuantities): return a value to save",
                )

    def backpropagate(
        self,
        extension: BackpropExtension,
        module: nn.Module,
        g_inp: Sequence[Tensor | None],
        g_out: Sequence[Tensor | None],
        bpQuantities: Any,  # the name that subclasses use
    ) -> Any:
        """Compute the quantity that goes to the module's inputs.

        Args:
            extension: The extension that runs.
            module: The module, with ``input0``, ``input1``, ... and ``output`` of its call.
            g_inp: Gradients of the loss in the inputs, as far as they come through this module.
            g_out: Gradients of the loss in the outputs.
            bpQuantities: The quantity that was propagated to the output.
        """
        warnings.warn(
            f"{type(self).__name__} does not override backpropagate(): it propagates nothing.", stacklevel=2
        )

    def check_hyperparameters_module_extension(
        self,
        ext: BackpropExtension,
        module: nn.Module,
        g_inp: Sequence[Tensor | None],
        g_out: Sequence[Tensor | None],
    ) -> None:
        """Override this to raise an error if the module's options are not supported."""

    def __call__(
        self,
        extension: BackpropExtension,
        module: nn.Module,
        g_inp: Sequence[Tensor | None],
        g_out: Sequence[Tensor | None],
    ) -> None:
        """Save a value for each parameter; propagate the output's quantity to the inputs."""
        self.check_hyperparameters_module_extension(extension, module, g_inp, g_out)
        quantities, arriving = extension.saved_quantities, None
        if extension.expects_backpropagation_quantities():
            arriving = quantities.retrieve_quantity(edge_key(vars(module)["output"]), True)
            if arriving is None and not is_loss_class(type(module)):
                raise PackpropError(
                    f"{type(extension).__name__} was to run on a module.",
                    f"a module of type {type(module).__name__}",
                    "nothing was propagated to its output",
                    "extend the loss, and give every module between it and this one a module extension that "
                    "backpropagates",
                )
        for name in self._params:
            parameter = getattr(module, name)
            if parameter is not None and parameter.requires_grad:
                value = getattr(self, name)(extension, module, g_inp, g_out, arriving)
                extension.save(parameter, value, f"{type(module).__name__}.{name}")
        if extension.expects_backpropagation_quantities() and not quantities.are_given:
            self._propagate(extension, module, g_inp, g_out, arriving)

    def _propagate(
        self, extension: BackpropExtension, module: nn.Module, g_inp: Any, g_out: Any, arriving: Any
    ) -> None:
        given = kept_inputs(module)
        inputs = [each for each in given if isinstance(each, Tensor) and each.requires_grad]
        if not inputs:
            return
        value = self.backpropagate(extension, module, g_inp, g_out, arriving)
        for tensor in inputs:
            extension.saved_quantities.save_quantity(
                edge_key(tensor), value, extension.accumulate_backpropagated_quantities
            )


class FirstOrderModuleExtension(ModuleExtension):
    """A module extension that needs gradients alone."""


class BackpropExtension(_KeepsCalls):
    """An extension that consists of module extensions, one for each class of modules.

    Args:
        savefield: The attribute of parameters that holds their values.
        module_exts: Module extensions by class; they do not apply to subclasses.
        fail_mode: The reaction to modules of other classes: ``"ERROR"``, ``"WARNING"`` if they have parameters,
            or ``"SILENT"``.
        subsampling: Indices of samples. Module extensions read them by ``get_subsampling``.

    Raises:
        BadInput: If there is no such fail mode; a ``ValueError``.
    """

    savefield: Any
    """The attribute of parameters that holds their values."""

    def __init__(
        self,
        savefield: str,
        module_exts: dict[type[nn.Module], ModuleExtension],
        fail_mode: str = FAIL_ERROR,
        subsampling: list[int] | None = None,
    ) -> None:
        keep_calls()
        if fail_mode not in (FAIL_ERROR, FAIL_WARN, FAIL_SILENT):
            raise BadInput(
                f"{type(self).__name__}(fail_mode={fail_mode!r}) was called.",
                "fail_mode",
                "there is no such fail mode",
                f"choose from {FAIL_ERROR!r}, {FAIL_WARN!r}, {FAIL_SILENT!r}",
            )
        self.savefield = savefield
        self._module_extensions = module_exts
        self._fail_mode = fail_mode
        self._subsampling = subsampling
        self.saved_quantities = SavedQuantities()

    @property
    def module_extensions(self) -> dict[type[nn.Module], ModuleExtension]:
        """Module extensions by class."""
        extensions: dict[type[nn.Module], ModuleExtension] = self.__dict__.setdefault("_module_extensions", {})
        return extensions

    def set_module_extension(
        self, module: type[nn.Module], extension: ModuleExtension, overwrite: bool = False
    ) -> None:
        """Set the module extension of a class of modules.

        Args:
            module: The class.
            extension: The module extension.
            overwrite: Allow it to replace an earlier one.

        Raises:
            BadInput: If the class has a module extension, and ``overwrite`` is false; a ``ValueError``.
        """
        keep_calls()
        if module in self.module_extensions and not overwrite:
            raise BadInput(
                f"{type(self).__name__}.set_module_extension({module.__name__}, ...) was called.",
                module.__name__,
                f"it has the extension {type(self.module_extensions[module]).__name__} already",
                "pass overwrite=True to replace it",
            )
        self.module_extensions[module] = extension

    def get_subsampling(self) -> list[int] | None:
        """Return the indices of the samples; ``None`` for all."""
        return self._subsampling

    def expects_backpropagation_quantities(self) -> bool:
        """Tell whether more than the gradient is propagated back."""
        return False

    def accumulate_backpropagated_quantities(self, existing: Any, other: Any) -> Any:
        """Combine two quantities that arrive at one tensor; override this."""
        raise Unsupported(
            f"{type(self).__name__} was to run on a graph with branches.",
            "accumulate_backpropagated_quantities",
            "the extension does not combine two quantities that arrive at one tensor",
            "override it, for instance to return existing + other",
        )

    def extension_for(self, module: nn.Module) -> ModuleExtension | None:
        """Return the module extension for a module; ``None`` if its class has none.

        Raises:
            Unsupported: If its class has none, and the fail mode is ``"ERROR"``.
        """
        extension = self.module_extensions.get(type(module))
        if extension is not None or self._fail_mode == FAIL_SILENT:
            return extension
        why = f"no module extension for {type(module).__name__} was given to {type(self).__name__}"
        if self._fail_mode == FAIL_ERROR:
            raise Unsupported(
                f"{type(self).__name__}, which saves to {self.savefield!r}, was to run on a module.",
                f"a module of type {type(module).__name__}",
                why,
                "add one by set_module_extension, or pass fail_mode='WARNING'",
            )
        if next(module.parameters(), None) is not None:
            warnings.warn(
                f"{why}, but the module has parameters: they get no {self.savefield!r}.", stacklevel=2
            )
        return None

    def __call__(
        self, module: nn.Module, g_inp: Sequence[Tensor | None], g_out: Sequence[Tensor | None]
    ) -> None:
        """Run on one module."""
        extension = self.extension_for(module)
        if extension is not None:
            if isinstance(g_inp, InputGradients):
                require_kept(g_inp.call)
            extension(self, module, g_inp, g_out)

    def save(self, parameter: Tensor, value: Any, where: str) -> None:
        """Save a value on a parameter, once in each pass.

        Raises:
            PackpropError: If another module has saved a value on it in the same pass.
        """
        saved = self.__dict__.setdefault("_saved", [])
        if any(parameter is other for other, _ in saved):
            raise PackpropError(
                f"{type(self).__name__}, which saves to {self.savefield!r}, was to save a value.",
                where,
                "another module has the same parameter and has saved a value on it, which this would replace",
                "leave one of the modules out, or ask for an extension of packprop, which joins all uses",
            )
        saved.append((parameter, value))
        setattr(parameter, self.savefield, value)


class FirstOrderBackpropExtension(BackpropExtension):
    """An extension that needs gradients alone; it warns about unknown modules."""

    def __init__(
        self,
        savefield: str,
        module_exts: dict[type[nn.Module], ModuleExtension],
        fail_mode: str = FAIL_WARN,
        subsampling: list[int] | None = None,
    ) -> None:
        super().__init__(savefield, module_exts, fail_mode, subsampling)


class SecondOrderBackpropExtension(BackpropExtension):
    """An extension that propagates its own quantity back, or reads columns of the GGN's root."""

    def expects_backpropagation_quantities(self) -> bool:
        """Return true: more than the gradient is propagated back."""
        return True
