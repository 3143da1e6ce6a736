"""Descriptions of values, in JSON, that two processes can compare: equal values have equal descriptions.

Plain values are their own description. packprop describes tensors by a digest, containers by their entries,
functions by their code and what it refers to, installed functions and classes by name, the user's classes by
the methods that are called, objects by class and attributes. ``untold`` names objects without attributes.
"""

from __future__ import annotations

import enum
import functools
import json
import logging
import math
import random
import threading
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packprop.applications.dataset.code import (
    Code,
    code_of,
    functions_in,
    is_code,
    is_special,
    own_classes,
    own_names,
    own_spaces,
    package_at,
    package_of,
    version_of,
)
from packprop.applications.dataset.digests import PIECE, SPOTS, bytes_digest, digest, kind_of, spot_check
from packprop.applications.dataset.hidden import CONTAINERS, GENERATORS, generators_in
from packprop.engine.recording import AXIS
from packprop.engine.tensors import (
    attributes_of,
    cells,
    class_before_sharding,
    named_buffers,
    named_modules,
    named_parameters,
)

CALLED = (
    *("__call__", "__getitem__", "__getitems__", "__iter__", "__len__", "__next__", "__torch_function__"),
    *("forward", "backward", "setup_context", "jvp", "vjp", "vmap", "rows", "finish"),
)
"""The methods that Python, PyTorch and packprop call on an object, beside operators and the like."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of modules that hold their hooks."""

MOST, DEEPEST = 5000, 40
"""The most values in one description, and their deepest nesting."""

OF_MODULE = {*vars(nn.Module()), "training"}
"""Attributes that every module has."""

PLAIN = (torch.dtype, torch.layout, torch.memory_format, torch.Size, range, slice, complex, type(...))
WITHOUT_VALUES = (torch.device, logging.Logger, type(threading.Lock()), type(vars(Set)["_abc_impl"]))


class Describer:
    """Describes values, each object once.

    Args:
        by_text: Also describe the methods of a class whose code may call them by name, as with ``getattr``.

    Attributes:
        untold: The places of values without a description.
        draws: True if generators of random numbers, or iterators, are among the values.
        changes: True if code changes something around it (a global counter), or imports a module of the user.
        generators: The generators so far whose states packprop can keep.
        versions: Versions of the packages of the classes and functions so far.
        around: Namespaces outside functions from which code reads a name, by their identity and the name.
    """

    def __init__(self, by_text: bool = False) -> None:
        self.untold: list[str] = []
        self._by_text = by_text
        self.draws = self.changes = False
        self.generators: list[Any] = []
        self.versions: dict[str, str] = {}
        self.around: dict[tuple[int, str], Mapping[str, Any]] = {}
        self._met: dict[tuple[Any, ...], tuple[str, Any]] = {}
        self._classes: dict[tuple[Any, ...], tuple[dict[str, Any], Code]] = {}
        self._digests: dict[int, tuple[str, Tensor]] = {}
        self._searched: dict[int, Any] = {}
        self._left, self._depth = MOST, 0

    def of(self, value: Any, where: str, read: set[str] | None = None) -> Any:
        """Return the description of a value.

        Args:
            value: Anything.
            where: The name of the value in messages.
            read: Attributes that other code reads of the value; packprop describes them as well.
        """
        if value is None or (isinstance(value, (bool, int, str)) and not isinstance(value, enum.Enum)):
            return value if not isinstance(value, str) or len(value) < 500 else bytes_digest(value.encode())
        if isinstance(value, float):
            return value if math.isfinite(value) else repr(value)
        if isinstance(value, (bytes, bytearray)):
            return bytes_digest(bytes(value))
        if isinstance(value, enum.Enum):
            return [str(value), self.of(value.value, where)]
        if isinstance(value, (PurePath, *PLAIN)):
            return str(value)
        if isinstance(value, WITHOUT_VALUES):
            return type(value).__name__
        if isinstance(value, ModuleType):
            return self._scope(value, read or set())
        self._left -= 1
        if self._left < 0 or self._depth > DEEPEST:
            self._cannot_tell(where)
            return self._name(type(value))
        self._depth += 1
        try:
            return self._of_many(value, where, read)
        finally:
            self._depth -= 1

    def _of_many(self, value: Any, where: str, read: set[str] | None) -> Any:
        """Describe a value with parts."""
        if isinstance(value, GENERATORS):
            self._note_generators([value], where)
            return "a generator"
        if isinstance(value, Tensor):
            whole = value.numel() * value.element_size() <= PIECE
            return f"{kind_of(value)} {self.digest(value) if whole else spot_check([value])}"
        if not isinstance(value, type) and hasattr(value, "__array_interface__"):
            return self._array(np.asarray(value), where)
        if isinstance(value, (*CONTAINERS, tuple, frozenset, MappingProxyType)):  # others may read files
            return self._entries(value, where)
        return self._once(value, where, read)

    def digest(self, tensor: Tensor) -> str:
        """Return the digest of a tensor; compute it once."""
        if id(tensor) not in self._digests:
            self._digests[id(tensor)] = digest(tensor), tensor
        return self._digests[id(tensor)][0]

    def _once(self, value: Any, where: str, read: set[str] | None) -> Any:
        """Describe a function, a class or an object; if it occurs again, refer to the first description."""
        key = id(value), *sorted((read or set()) & {name for name, _ in attributes_of(value)})
        if key in self._met and not isinstance(value, MethodType):
            return f"the same as {self._met[key][0]}"
        self._met[key] = where, value  # the value stays, so that nothing else can have its identity
        if isinstance(value, functools.partial):
            facts = {"partial": value.func, "arguments": value.args, "keywords": value.keywords}
            return {name: self.of(fact, where) for name, fact in facts.items()}
        if isinstance(value, MethodType):
            return self._method(value, where)
        if isinstance(value, FunctionType):
            if package_of(value) is None:
                return self._function(value, where)
            wrapped = {name: each for name, each in cells(value) if callable(each)}  # may be the user's
            held = {name: self.of(each, where) for name, each in wrapped.items()}
            return {"name": self._name(value), "names": held} if held else self._name(value)
        if isinstance(value, type):
            self._note_inside(value, read)
            told = [name for name in own_names(value) if is_code(value, name) or name in (read or ())]
            return self._class(value, told, where)[0]
        if isinstance(value, nn.Module):
            return self._whole_module(value, where)
        return self._object(value, where, read)

    def _name(self, thing: Any) -> str:
        """Return the name of a class or function, with its package if it is installed; note the version."""
        package = package_of(thing)
        short = getattr(thing, "__name__", type(thing).__name__)
        if package is None:
            return str(short)
        version = version_of(package)
        if version and package not in ("torch", "packprop"):
            self.versions[package] = version
        if version is None:
            self._cannot_tell(f"the version of {package}")
        return f"{getattr(thing, '__module__', None) or package}.{getattr(thing, '__qualname__', short)}"

    def _note_generators(self, values: Iterable[Any], where: str) -> None:
        """Note the generators that values hold, even in values that are not described."""
        for each in generators_in(values, self._searched):
            self.draws = True
            if isinstance(each, random.SystemRandom):  # it has no state
                self._cannot_tell(where)
            else:
                self.generators.append(each)

    def _cannot_tell(self, where: str) -> None:
        if where not in self.untold:
            self.untold.append(where)

    def _array(self, array: np.ndarray[Any, Any], where: str) -> Any:
        if array.dtype.hasobject:
            return self.of([*array.flat[:: max(1, array.size // SPOTS)]], where)
        step = 1 if array.nbytes <= PIECE else max(1, array.size // SPOTS)
        return f"{list(array.shape)} {array.dtype} {bytes_digest(array.flat[::step].tobytes())}"

    def _entries(self, value: Any, where: str) -> Any:
        """Describe the entries of a container; for a long one, return a digest of some entries."""
        if isinstance(value, Mapping) and len(value) <= SPOTS:
            return {str(self.of(key, where)): self.of(item, where) for key, item in value.items()}
        entries = [*value.items()] if isinstance(value, Mapping) else [*value]
        if isinstance(value, (set, frozenset)):
            return sorted((self.of(each, where) for each in entries), key=json.dumps)
        if len(entries) <= SPOTS:
            return [self.of(each, where) for each in entries]
        if {*map(type, entries)} <= {int, float}:  # indices of samples, and the like: all count
            return f"{len(entries)} entries {bytes_digest(json.dumps(entries).encode())}"
        left, self._left = self._left, MOST
        some = [self.of(each, where) for each in entries[:: len(entries) // 100]]
        self._left = left
        return f"{len(entries)} entries {bytes_digest(json.dumps(some, sort_keys=True).encode())}"

    def _function(self, function: FunctionType, where: str) -> dict[str, Any]:
        """Describe a function: its code, its defaults, and the names around it that it uses."""
        code = code_of(function.__code__)
        self.changes |= code.around or any(name[0] == "." or not package_at(name) for name in code.imported)
        self._note_around(function.__globals__, code.scope, code.read)
        scope = sorted(code.scope & function.__globals__.keys())
        around = dict(cells(function)) | {name: function.__globals__[name] for name in scope}
        around = {name: each for name, each in around.items() if _is_option(name, each, code)}
        reads = {name: code.options if isinstance(each, type) else code.read for name, each in around.items()}
        return {
            "function": function.__name__,
            "code": code.digest,
            "defaults": self.of([function.__defaults__, function.__kwdefaults__], where),
            "names": {name: self.of(each, name, reads[name]) for name, each in around.items()},
            **self._attributes_of_function(function, code, where),
        }

    def _note_around(self, space: Mapping[str, Any], names: set[str], read: set[str]) -> None:
        """Note names that code reads; for modules and classes of the user, note what it reads of them."""
        for name in sorted(names & space.keys()):
            if isinstance(space[name], (type, ModuleType)):
                self._note_inside(space[name], read)
            else:
                self.around[id(space), name] = space

    def _note_inside(self, owner: type | ModuleType, read: Set[str] | None) -> None:
        """Note names that code reads in a module or class of the user, and in those inside; ``None``: all."""
        todo = [owner]
        for each in todo:  # grows
            for space in own_spaces(each):
                names = vars(space).keys() if read is None else read & vars(space).keys()
                for name in sorted(name for name in names if not name.startswith("__")):
                    if not isinstance(value := vars(space)[name], (type, ModuleType)):
                        self.around[id(space), name] = vars(space)
                    elif not any(value is known for known in todo):
                        todo.append(value)

    def _attributes_of_function(self, function: Any, code: Code, where: str) -> dict[str, Any]:
        """Describe the attributes of a function, and the function that a decorator has wrapped, if any."""
        held = {name: each for name, each in vars(function).items() if name[0] != "_"}
        found = self._attributes(held, code, where)
        wrapped = vars(function).get("__wrapped__")
        found |= {} if wrapped is None else {"wrapped": self.of(wrapped, where)}
        return {"attributes": found} if found else {}

    def _method(self, method: MethodType, where: str) -> Any:
        owner, name = method.__self__, method.__func__.__name__
        if isinstance(owner, (type, nn.Module, *GENERATORS)):
            return {"method": self.of(method.__func__, where), "of": self.of(owner, where)}
        return {"method": name, "of": self._object(owner, where, None, [name])}

    def _scope(self, module: ModuleType, read: set[str]) -> Any:
        """Describe the names that code takes from a Python module."""
        if package_at(module.__name__) is not None:
            return module.__name__
        return {name: self.of(vars(module)[name], name, read) for name in sorted(read) if name in vars(module)}

    def _class(self, kind: type, called: Iterable[str], where: str) -> tuple[dict[str, Any], Code]:
        """Describe the user's methods of a class that are called; return what their code refers to as well.

        These are the methods that code of the user reaches, and members in place of those of installed bases,
        which installed code may reach. Attributes that only the latter write stay options: they may never run.
        """
        key = kind, *dict.fromkeys(called)
        if key in self._classes:
            return self._classes[key]
        held = {*own_names(kind)}
        special = sorted(name for name in held if is_special(name) and is_code(kind, name))
        methods, found = self._members(kind, [*called, *special], where)
        installed = {name for each in kind.__mro__ if package_of(each) is not None for name in vars(each)}
        replaced = sorted(name for name in held & installed if not name.startswith("__"))
        others, code = self._members(kind, replaced, where)
        found.take_in(replace(code, written=set(), filled=set()))
        methods = others | methods
        described = {"class": self._name(kind), **({"methods": methods} if methods else {})}
        return self._classes.setdefault(key, (described, found))

    def _members(self, kind: type, called: Iterable[str], where: str) -> tuple[dict[str, Any], Code]:
        """Describe the user's members of a class with some names, and those that their code names."""
        names = dict.fromkeys(called)
        held = {*own_names(kind)}
        by_text = {name for name in held if is_code(kind, name) and not name.startswith("__")}
        found, methods = Code(), {}
        todo = [*names]
        for name in todo:  # grows
            for each in own_classes(kind):
                if name not in vars(each):
                    continue
                member = vars(each)[name]
                parts = [*functions_in(member)]
                for part in parts:
                    code = code_of(part.__code__)
                    found.take_in(code)
                    read = code.read | (by_text if self._by_text and code.reads_all else set())
                    todo += sorted(read - names.keys())
                    names |= dict.fromkeys(sorted(read))
                if not parts:
                    self._note_around(vars(each), {name}, set())
                own = [self._function(part, where) for part in parts]
                methods[f"{each.__name__}.{name}"] = own or self.of(member, where)
        return methods, found

    def module(self, module: nn.Module, where: str) -> dict[str, Any]:
        """Describe the class and the options of a module, without its mode, its tensors and its submodules."""
        self._left = MOST
        kind = class_before_sharding(module)
        described, code = self._class(kind, CALLED, where)
        attributes = {name: each for name, each in vars(module).items() if name not in OF_MODULE}
        own = package_of(kind) is None
        known = {AXIS, *(code.read if own else ()), *(attributes if own and code.reads_all else ())}
        counted = {name: each for name, each in attributes.items() if name[0] != "_" or name in known}
        self._note_generators(attributes.values(), where)
        described = described | {"attributes": self._attributes(counted, code, where)}
        hooks = [each for name in HOOKS for each in vars(module).get(name, {}).values()]
        hooks = [each for each in hooks if package_of(getattr(each, "func", each)) is None]
        return described | ({"hooks": self.of(hooks, f"hooks of {where}")} if hooks else {})

    def _whole_module(self, module: nn.Module, where: str) -> dict[str, Any]:
        tensors = {**dict(named_parameters(module)), **dict(named_buffers(module))}
        children = dict(named_modules(module))
        return {
            **self._module_with_mode(children.pop(""), where),
            "modules": {
                name: self._module_with_mode(each, f"{where}.{name}") for name, each in children.items()
            },
            "values": {name: f"{kind_of(tensor)} {self.digest(tensor)}" for name, tensor in tensors.items()},
        }

    def _module_with_mode(self, module: nn.Module, where: str) -> dict[str, Any]:
        return {**self.module(module, where), "in training mode": module.training}

    def _object(self, value: Any, where: str, read: set[str] | None, called: Iterable[str] = CALLED) -> Any:
        """Describe the class of an object, and its attributes: those that user code reads, or public ones."""
        kind = type(value)
        if isinstance(value, BuiltinFunctionType) or hasattr(value, "__qualname__"):
            return self._built_in(value, where)
        self.draws = self.draws or isinstance(value, Iterator)
        attributes = dict(attributes_of(value))
        described, code = self._class(kind, (*called, *(read or ())), where)
        own, known = package_of(kind) is None, code.read | (read or set())
        if not own or known.isdisjoint(attributes) or code.reads_all:
            known |= {name for name in attributes if name[0] != "_"}
        counted = {name: each for name, each in attributes.items() if name in known}
        has_none = not attributes and not hasattr(value, "__dict__") and kind is not object
        if has_none or (not own and attributes and not counted):
            self._cannot_tell(where)
        self._note_generators(attributes.values(), where)
        return described | {"attributes": self._attributes(counted, code, where)}

    def _built_in(self, value: Any, where: str) -> Any:
        """Describe a value that is not written in Python: its name, its object, and the value that it wraps."""
        owner, wrapped = getattr(value, "__self__", None), getattr(value, "__wrapped__", None)
        if wrapped is not None:
            return {"name": self._name(value), "wrapped": self.of(wrapped, where)}
        if package_of(value) is None or isinstance(value, torch.jit.ScriptFunction):  # its code is not Python's
            self._cannot_tell(where)
            return {"name": self._name(value), "code": self.of(getattr(value, "code", None), where)}
        if owner is None or isinstance(owner, (type, ModuleType)):
            return self._name(value)
        return {"name": self._name(value), "of": self.of(owner, where)}

    def _attributes(self, attributes: Mapping[str, Any], code: Code, where: str) -> dict[str, Any]:
        """Describe attributes, except for those that the code writes itself: these are no options."""
        return {
            name: self.of(each, f"{name} of {where}" if len(where) < 60 else where)
            for name, each in attributes.items()
            if _is_option(name, each, code)
        }


def _is_option(name: str, value: Any, code: Code) -> bool:
    """Tell whether code leaves a named value unchanged; return False for Python's own ``__names__``."""
    filled = name in code.filled and isinstance(value, CONTAINERS)
    return name not in code.written and not filled and not name.startswith("__")
