"""Extensions of users' own, written for single modules, as BackPACK has them.

In packprop itself an extension is a row over functions (``packprop.types.Extension``), and works wherever a
function does. Code written for BackPACK says instead, for each class of modules, what is made of
``module.input0``, ``module.output``, ``g_inp``, ``g_out`` and what was propagated back: that code runs here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from packprop.compat.calls import (
    InputGradients,
    edge_key,
    is_loss_class,
    keep_calls,
)
from packprop.errors import BadInput, PackpropError
from packprop.types import Extension, Seed

FAIL_ERROR, FAIL_WARN, FAIL_SILENT = "ERROR", "WARNING", "SILENT"


OURS = "packprop."


def _note(cls: type) -> None:
    """An extension for modules was defined outside of packprop: forward passes must keep calls from now on."""
    if not f"{cls.__module__}.".startswith(OURS):
        keep_calls()


class Unsupported(PackpropError, NotImplementedError):
    """An extension does not know a module; a ``NotImplementedError``, as in BackPACK."""


class SavedQuantities:
    """What an extension propagates back, by the tensor that it has arrived at.

    Args:
        columns: Columns of the cotangent at tensors, where packprop has propagated them and nothing is saved.
    """

    def __init__(self, columns: dict[Any, Tensor] | None = None) -> None:
        self._values: dict[Any, Any] = dict(columns or {})
        self.are_given = columns is not None

    def save_quantity(self, key: Any, quantity: Any, accumulation_function: Callable[[Any, Any], Any]) -> None:
        """Save a quantity, or accumulate it with what is there."""
        if key in self._values:
            quantity = accumulation_function(self._values[key], quantity)
        self._values[key] = quantity

    def retrieve_quantity(self, key: Any, delete_old: bool) -> Any:
        """What was saved, or nothing."""
        return self._values.pop(key, None) if delete_old else self._values.get(key)


class ModuleExtension:
    """What an extension does with one class of modules.

    A method for each name in ``params``, with the arguments of ``backpropagate``, returns what is saved on the
    parameter of that name.

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
                    f"def {name}(self, extension, module, g_inp, g_out, bpQuantities): return what is saved",
                )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _note(cls)

    def backpropagate(
        self,
        extension: BackpropExtension,
        module: nn.Module,
        g_inp: Sequence[Tensor | None],
        g_out: Sequence[Tensor | None],
        bpQuantities: Any,  # the name that subclasses use
    ) -> Any:
        """What is propagated to the module's inputs.

        Args:
            extension: The extension that runs.
            module: The module, with ``input0``, ``input1``, ... and ``output`` of its call.
            g_inp: Gradients of the loss in the inputs, as far as they come through this module.
            g_out: Gradients of the loss in the outputs.
            bpQuantities: What was propagated to the output.
        """
        warnings.warn(f"{type(self).__name__} does not say what is propagated back.", stacklevel=2)

    def check_hyperparameters_module_extension(
        self,
        ext: BackpropExtension,
        module: nn.Module,
        g_inp: Sequence[Tensor | None],
        g_out: Sequence[Tensor | None],
    ) -> None:
        """To be overridden: raise if the module's options are not supported."""

    def __call__(
        self,
        extension: BackpropExtension,
        module: nn.Module,
        g_inp: Sequence[Tensor | None],
        g_out: Sequence[Tensor | None],
    ) -> None:
        """Save a value for each parameter; take what arrives at the output to the inputs."""
        self.check_hyperparameters_module_extension(extension, module, g_inp, g_out)
        quantities, arrived = extension.saved_quantities, None
        if extension.expects_backpropagation_quantities():
            arrived = quantities.retrieve_quantity(edge_key(_kept(module, "output")), True)
            if arrived is None and not is_loss_class(type(module)):
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
                value = getattr(self, name)(extension, module, g_inp, g_out, arrived)
                extension.save(parameter, value, f"{type(module).__name__}.{name}")
        if extension.expects_backpropagation_quantities() and not quantities.are_given:
            self._take_to_inputs(extension, module, g_inp, g_out, arrived)

    def _take_to_inputs(
        self, extension: BackpropExtension, module: nn.Module, g_inp: Any, g_out: Any, arrived: Any
    ) -> None:
        place, inputs = 0, []
        while (given := vars(module).get(f"input{place}")) is not None:
            if isinstance(given, Tensor) and given.requires_grad:
                inputs.append(given)
            place += 1
        if not inputs:
            return
        value = self.backpropagate(extension, module, g_inp, g_out, arrived)
        for tensor in inputs:
            extension.saved_quantities.save_quantity(
                edge_key(tensor), value, extension.accumulate_backpropagated_quantities
            )


class FirstOrderModuleExtension(ModuleExtension):
    """A module extension that needs gradients alone."""


class BackpropExtension:
    """An extension made of one module extension for each class of modules.

    Args:
        savefield: Attribute of parameters that values are saved in.
        module_exts: Module extensions by class; subclasses of a class are not meant.
        fail_mode: For modules of other classes: ``"ERROR"``, ``"WARNING"`` if they have parameters, or
            ``"SILENT"``.
        subsampling: Indices of samples, for module extensions to read by ``get_subsampling``.

    Raises:
        BadInput: If there is no such fail mode; a ``ValueError``.
    """

    savefield: Any
    """Attribute of parameters that values are saved in."""

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
                "it is not one of those that are known",
                f"choose from {FAIL_ERROR!r}, {FAIL_WARN!r}, {FAIL_SILENT!r}",
            )
        self.savefield = savefield
        self._own = module_exts
        self._fail_mode = fail_mode
        self._subsampling = subsampling
        self.saved_quantities = SavedQuantities()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _note(cls)

    @property
    def module_extensions(self) -> dict[type[nn.Module], ModuleExtension]:
        """Module extensions by class."""
        found: dict[type[nn.Module], ModuleExtension] = self.__dict__.setdefault("_own", {})
        return found

    def set_module_extension(
        self, module: type[nn.Module], extension: ModuleExtension, overwrite: bool = False
    ) -> None:
        """Say what is done with a class of modules.

        Args:
            module: The class.
            extension: What is done.
            overwrite: Whether it may replace what was said before.

        Raises:
            BadInput: If something was said before; a ``ValueError``.
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
        """Indices of the samples that are meant; nothing for all."""
        return self._subsampling

    def expects_backpropagation_quantities(self) -> bool:
        """Whether more than the gradient is propagated back."""
        return False

    def accumulate_backpropagated_quantities(self, existing: Any, other: Any) -> Any:
        """What becomes of two quantities that arrive at one tensor; to be overridden."""
        raise Unsupported(
            f"{type(self).__name__} was to run on a graph with branches.",
            "accumulate_backpropagated_quantities",
            "the extension does not say what becomes of two quantities that arrive at one tensor",
            "override it, for instance to return existing + other",
        )

    def extension_for(self, module: nn.Module) -> ModuleExtension | None:
        """What is done with a module.

        Raises:
            Unsupported: If nothing is known of its class, and that is an error.
        """
        found = self.module_extensions.get(type(module))
        if found is not None or self._fail_mode == FAIL_SILENT:
            return found
        what = f"no module extension for {type(module).__name__} was given to {type(self).__name__}"
        if self._fail_mode == FAIL_ERROR:
            raise Unsupported(
                f"{type(self).__name__}, which saves to {self.savefield!r}, was to run on a module.",
                f"a module of type {type(module).__name__}",
                what,
                "add one by set_module_extension, or pass fail_mode='WARNING'",
            )
        if next(module.parameters(), None) is not None:
            warnings.warn(
                f"{what}, but the module has parameters: they get no {self.savefield!r}.", stacklevel=2
            )
        return None

    def __call__(
        self, module: nn.Module, g_inp: Sequence[Tensor | None], g_out: Sequence[Tensor | None]
    ) -> None:
        """Run on one module."""
        extension = self.extension_for(module)
        if extension is not None:
            if isinstance(g_inp, InputGradients):
                g_inp.require_kept()
            extension(self, module, g_inp, g_out)

    def save(self, parameter: Tensor, value: Any, where: str) -> None:
        """Save a value on a parameter, once in each pass.

        Raises:
            PackpropError: If the parameter has one already from another module in the same pass.
        """
        noted = self.__dict__.setdefault("_saved", [])
        if any(parameter is other for other, _ in noted):
            raise PackpropError(
                f"{type(self).__name__}, which saves to {self.savefield!r}, has a value for a parameter.",
                where,
                "another module has the same parameter and has saved a value on it, which this would replace",
                "leave one of the modules out, or ask for an extension of packprop, which joins all uses",
            )
        noted.append((parameter, value))
        setattr(parameter, self.savefield, value)


class FirstOrderBackpropExtension(BackpropExtension):
    """An extension that needs gradients alone; unknown modules are warned of."""

    def __init__(
        self,
        savefield: str,
        module_exts: dict[type[nn.Module], ModuleExtension],
        fail_mode: str = FAIL_WARN,
        subsampling: list[int] | None = None,
    ) -> None:
        super().__init__(savefield, module_exts, fail_mode, subsampling)


class SecondOrderBackpropExtension(BackpropExtension):
    """An extension that propagates something back, or reads columns of the GGN's root."""

    def expects_backpropagation_quantities(self) -> bool:
        """It does."""
        return True


class Catalogued(BackpropExtension):
    """What extensions of packprop's catalogue get in addition: module extensions for some classes.

    Their values replace those that packprop finds. Columns come along where the extension has any: each method
    is handed those of the root of the GGN at the module's output, ``[v, n, *y]``.
    """

    def get_subsampling(self) -> list[int] | None:
        """Indices of the samples that are meant; nothing for all."""
        chosen = getattr(self, "subsampling", None)
        return None if chosen is None else list(chosen)

    def get_num_mc_samples(self) -> int:
        """Number of Monte Carlo draws."""
        count: int = getattr(self, "mc_samples")  # noqa: B009  # of those that have draws
        return count

    def expects_backpropagation_quantities(self) -> bool:
        """Whether it is made of more than inputs and the gradient."""
        return any(row.seed.kind not in ("none", "gradient") for row in self._rows)

    @property
    def _rows(self) -> Any:
        return self.rows if isinstance(self, Extension) else ()

    @property
    def seed(self) -> Seed:
        """What its columns are made from.

        Raises:
            Unsupported: If it has no columns that could be handed over.
        """
        for row in self._rows:
            if row.seed.kind == "ggn":
                found: Seed = row.seed
                return found
        raise Unsupported(
            f"{type(self).__name__} was to run a module extension.",
            type(self).__name__,
            "what it propagates back are not columns of a root",
            "leave the module extension out: packprop differentiates the module by autograd",
        )

    def extension_for(self, module: nn.Module) -> ModuleExtension | None:
        """What is done with a module instead of what packprop does."""
        return self.module_extensions.get(type(module))


Overrides = list[tuple[Tensor, str, Any]]


def _kept(module: nn.Module, name: str) -> Tensor:
    kept = vars(module)[name]
    assert isinstance(kept, Tensor)
    return kept
