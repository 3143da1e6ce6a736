"""How the parameters of a call meet a signal: entries, what rules are made of, and the fallback.

A rule has the signature of its torch function behind a leading ``call``, and returns one ``Entry`` for each
parameter that it can describe. Parameters that no rule describes get the fallback: the function is
evaluated again on its own and pulled back once for each sample.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packprop.errors import PackpropError
from packprop.memory import is_dry, version
from packprop.structures import Dense, Outer, Structure
from packprop.types import Layout, accumulation_dtype, map_tensors, tensors_in

Samples = slice | Tensor
Signals = Sequence[Tensor | None]
Meet = Callable[[Signals, Sequence[Layout], Samples], Structure]


class Fans(NamedTuple):
    """Groups of an affine map, and how many entries of each go in and come out.

    ``unfolds``: whether inputs are unfolded to positions, and gradients can be had without that.
    """

    groups: int
    fan_in: int
    fan_out: int
    unfolds: bool = False


@dataclass(frozen=True)
class Entry:
    """How one parameter enters one call.

    Args:
        parameter: A leaf, or a tensor computed from leaves alone.
        structure: Name of the structure, for tables and messages.
        meet: From signals at the outputs ``[v, *y]`` (``None``: inputs only, or an output that nothing
            reaches), their layouts, and a choice of samples, to a structure.
        scratch: Entries of temporary memory for one sample and one column, where these are more than
            the entries of the parameter and those of a sample's output.
        refusal: Why and what instead, where no number can be given.
        admits: Whether an axis of the (first) output can hold the samples.
        alone: Entries of temporary memory for one sample where only inputs are asked for.
        single: As ``scratch`` in a sweep of one column that unfolds no inputs, where there is such a way.
        fans: Groups and extents of an affine map.
        linear: Whether the outputs are known to be affine in the parameter, all else held.
        constant: Whether what multiplies the parameter is known to be one number for all samples.
        squares: As ``meet``, with squares of what multiplies the parameter; ``None`` if the structure itself
            tells them (``with_squares``), or if they are not known.
    """

    parameter: Tensor
    structure: str
    meet: Meet
    scratch: int = 0
    refusal: tuple[str, str] | None = None
    admits: Callable[[int], bool] = lambda axis: True
    alone: int = 0
    single: int = 0
    fans: Fans | None = None
    linear: bool = False
    constant: bool = False
    squares: Meet | None = None


@dataclass(frozen=True)
class Call:
    """One call of a torch function that consumes trainable parameters, after it returned.

    Args:
        parameters: Trainable tensors among the arguments that do not depend on the samples.
        shape: Shape of the (first) output.
        unexpanded: The tensor that a parameter was expanded from, or the parameter itself.
        random_state: State of the random generators before the call, where the call drew from them.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: tuple[Tensor, ...]
    shape: torch.Size
    unexpanded: Callable[[Tensor], Tensor]
    random_state: Any = None

    def consumes(self, value: Any) -> bool:
        """Whether ``value`` is one of the trainable parameters of this call."""
        return any(value is parameter for parameter in self.parameters)


class Expansions:
    """Tensors that are parameters expanded to a larger shape, and what they were expanded from."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def note(self, out: Tensor, given: Tensor) -> None:
        """``out`` was expanded from ``given``."""
        self._sources[id(out)] = (weakref.ref(out), self.source(given))

    def source(self, tensor: Tensor) -> Tensor:
        """What a tensor was expanded from, or the tensor itself."""
        reference, source = self._sources.get(id(tensor), (None, tensor))
        return source if reference is not None and reference() is tensor else tensor


Rule = Callable[..., Iterable[Entry] | None]
RULES: dict[Callable[..., Any], Rule] = {}


def register_use(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Say how the parameters of a torch function (or of an overridable function of one's own) meet a signal.

    The decorated rule is called as ``rule(call, *args, **kwargs)`` with the arguments of the function and
    returns entries, made with ``affine``, ``scaled`` or ``Entry`` itself; ``None`` means: use the fallback.
    """

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, rule))
        return rule

    return register


def entries_of(call: Call) -> list[Entry]:
    """One entry for each parameter of a call: by its rule, or by the fallback."""
    complex_valued = any(parameter.is_complex() for parameter in call.parameters)
    rule = None if complex_valued else RULES.get(call.function)  # rules are written for real numbers
    known = list(rule(call, *call.args, **call.kwargs) or ()) if rule else []
    known = [entry for entry in known if entry.parameter.requires_grad]
    described = {id(entry.parameter) for entry in known}
    return known + [
        fallback(call, parameter)
        for parameter in call.parameters
        if id(parameter) not in described and id(call.unexpanded(parameter)) not in described
    ]


# Building blocks of rules


class Saved:
    """A tensor that must not change before the signal arrives."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self._tensor, self._before, self._name = tensor, version(tensor), name

    def __call__(self) -> Tensor:
        """The tensor, unless it was changed."""
        if version(self._tensor) != self._before:
            raise changed_since(self._name, self._tensor)
        return self._tensor


def changed_since(name: str, tensor: Tensor) -> PackpropError:
    """The error for an input of a function that no longer holds what the function had used."""
    return PackpropError(
        "A per-sample quantity was asked for.",
        f"an input of {name}, of shape {list(tensor.shape)}",
        "it was changed in place after the function had used it",
        "use the out-of-place version of the operation that changes it, or clone it first",
    )


def choose(tensor: Tensor, samples: Samples, skip: int = 0) -> Tensor:
    """Some samples of a tensor whose samples are at axis ``skip``, in at least single precision."""
    if isinstance(samples, Tensor):
        tensor = tensor.index_select(skip, samples.to(tensor.device))
    elif samples != slice(None):
        tensor = tensor[(slice(None),) * skip + (samples,)]
    return tensor.to(accumulation_dtype(tensor.dtype))


@functools.lru_cache(maxsize=4096)
def fold_to(shape: torch.Size) -> Callable[[Tensor], Tensor]:
    """``[..., g, o, i] -> [..., *p]`` in the same order; cached, so that equal folds are one object."""
    return functools.partial(_as_it_is, shape=shape)


@functools.lru_cache(maxsize=4096)
def fold_swapped(shape: torch.Size) -> Callable[[Tensor], Tensor]:
    """``[..., g, o, (c k)] -> [..., (g c), o, k]``: fan-in leads, as in transposed convolutions."""
    return functools.partial(_fan_in_first, shape=shape)


def _as_it_is(gradient: Tensor, shape: torch.Size) -> Tensor:
    return gradient.reshape(gradient.shape[:-3] + shape)


def _fan_in_first(gradient: Tensor, shape: torch.Size) -> Tensor:
    split: Tensor = gradient.unflatten(-1, (-1, shape[2:].numel())).movedim(-2, -3)
    return split.reshape(gradient.shape[:-3] + shape)


def rowwise(build: Callable[..., Structure], name: str, *inputs: Tensor) -> Meet:
    """A meeting built from signal and inputs whose leading axes hold the samples alike."""
    saved = [Saved(tensor, name) for tensor in inputs]

    def meet(signals: Signals, where: Sequence[Layout], samples: Samples) -> Structure:
        signal = signals[0]
        if signal is not None:
            signal = choose(where[0].to_front(signal, 1), samples, 1)
        return build(signal, *(choose(where[0].to_front(tensor()), samples) for tensor in saved))

    return meet


def affine(call: Call, x: Tensor, weight: Tensor, *, transposed: bool = False) -> Entry:
    """A weight ``[o, i]`` (``[i, o]`` if ``transposed``) applied to the last axis of ``x``."""
    fold = (fold_swapped if transposed else fold_to)(weight.shape)
    fan_in = x.shape[-1]

    def build(signal: Tensor | None, x: Tensor) -> Structure:
        if signal is not None:
            signal = signal.reshape(*signal.shape[:2], -1, 1, weight.numel() // fan_in)
        return Outer(x.reshape(x.shape[0], -1, 1, fan_in), signal, fold)

    meet = rowwise(build, name_of(call.function), x)
    last = len(call.shape) - 1
    fans = Fans(1, fan_in, weight.numel() // fan_in)
    return Entry(weight, "Outer", meet, admits=lambda axis: axis != last, alone=fan_in, fans=fans, linear=True)


def scaled(
    call: Call,
    parameter: Tensor,
    factor: Callable[[], Tensor] | float = 1.0,
    *,
    aligned: Sequence[int] | None = None,
    window: tuple[int, int] | None = None,
    linear: bool = False,
) -> Entry:
    """A parameter that multiplies entries of the output: ``y = parameter * factor + ...``.

    Args:
        call: The call.
        parameter: The parameter, broadcast against the output.
        factor: What multiplies it, computed when needed, broadcast against the output; or a number.
        aligned: The parameter's shape among the output's axes, where it is not aligned on the right.
        window: Axis of the output and offset of the part that the parameter makes up (concatenation).
        linear: Whether ``factor`` is known not to depend on the parameter; numbers and saved tensors do not.
    """
    parameter = call.unexpanded(parameter)
    dims = len(call.shape)
    form = tuple(aligned or (1,) * (dims - parameter.dim()) + tuple(parameter.shape))

    def meet(signals: Signals, where: Sequence[Layout], samples: Samples, power: int = 1) -> Structure:
        layout, signal = where[0], signals[0]
        if signal is None:
            return Dense(None)
        if window is not None:
            axis, offset = window
            signal = signal.narrow(axis + 1, offset, form[axis])
        product = choose(layout.to_front(signal, 1), samples, 1)
        if callable(factor):
            shape = torch.Size(signal.shape[1:])
            product = product * choose(layout.to_front(factor().expand(shape)), samples) ** power
        elif factor != 1.0:
            product = product * factor**power
        rows = _reduce(product, layout, form, samples)
        return Dense(rows.reshape(*rows.shape[:2], *parameter.shape))

    def admits(axis: int) -> bool:
        return window is None or axis != window[0]

    linear = linear or not callable(factor) or isinstance(factor, Saved)
    squares = functools.partial(meet, power=2) if linear else None
    constant = not callable(factor)
    return Entry(parameter, "Scale", meet, admits=admits, linear=linear, constant=constant, squares=squares)


def _reduce(product: Tensor, layout: Layout, form: tuple[int, ...], samples: Samples) -> Tensor:
    """Sum ``[v, n, (k), *rest]`` over what a parameter of extents ``form`` is broadcast over."""
    if layout.axis is None:
        rest, own = form, None
    else:
        rest, own = form[: layout.axis] + form[layout.axis + 1 :], form[layout.axis]
        if layout.parts > 1:  # parts stay where the sample axis was
            rest = (*form[: layout.axis], 1 if own == 1 else layout.parts, *form[layout.axis + 1 :])
    summed = [2 + axis for axis, size in enumerate(rest) if size == 1 and product.shape[2 + axis] != 1]
    rows = product.sum(summed, keepdim=True) if summed else product.clone()  # never a view of the signal
    if own is None or own == 1:
        return rows
    # each sample has entries of the parameter to itself: its row is zero elsewhere
    assert layout.axis is not None
    index = torch.arange(layout.samples, device=rows.device)
    chosen = index[samples.to(rows.device) if isinstance(samples, Tensor) else samples]
    full = rows.new_zeros(rows.shape[0], len(chosen), layout.samples, *rows.shape[2:])
    full[:, torch.arange(len(chosen), device=rows.device), chosen] = rows
    return layout.from_front(full, 2)


def fallback(call: Call, parameter: Tensor) -> Entry:
    """Any function: evaluated again by itself, then pulled back once for each sample.

    Exact wherever the samples are separate in the outputs; costs one vector-Jacobian product of the
    function for each sample and column.
    """

    def meet(signals: Signals, where: Sequence[Layout], samples: Samples) -> Structure:
        if all(signal is None for signal in signals):
            return Dense(None)
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad(), _replayed(call.random_state):
            weight = parameter.view_as(parameter) if differentiable else parameter.detach()
            weight.requires_grad_(True)

            def isolate(tensor: Tensor) -> Tensor:
                if tensor is parameter:
                    return weight
                return tensor if differentiable else tensor.detach()

            args, kwargs = map_tensors(isolate, call.args), map_tensors(isolate, call.kwargs)
            outputs = call.function(*args, **kwargs)
            outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        signals = _from_outside(outputs, signals, {tensor.grad_fn for tensor in tensors_in((args, kwargs))})
        return pulled_samplewise(outputs, weight, signals, where, samples)

    return Entry(parameter, "Dense", meet, scratch=parameter.numel())


def _from_outside(outputs: Sequence[Any], signals: Signals, ends: set[Any]) -> Signals:
    """Signals without what came from other outputs of the same call.

    Where an output is computed from another one, as the state of an LSTM cell from its memory, what arrives at
    the latter is the whole gradient: it would be counted once by itself and once through the former.

    Args:
        outputs: Of the function, evaluated again.
        signals: What arrived at each, ``[v, *y]``.
        ends: Nodes that made the inputs.
    """
    made = [output.grad_fn if isinstance(output, Tensor) else None for output in outputs]
    above = [_upstream(node, ends) & set(made) for node in made]
    if not any(above):
        return signals
    outside = list(signals)
    for place in sorted(range(len(outputs)), key=lambda place: -len(above[place])):  # the last ones first
        later = [
            other
            for other, nodes in enumerate(above[: len(outside)])
            if made[place] in nodes and outside[other] is not None
        ]
        if later and (signal := outside[place]) is not None:
            columns = [column for other in later if (column := outside[other]) is not None]
            outside[place] = signal - pulled([outputs[other] for other in later], outputs[place], columns)
    return outside


def _upstream(node: Any, ends: set[Any]) -> set[Any]:
    """The nodes that a node's inputs came from, as far as those of ``ends``."""
    found: set[Any] = set()
    stack = [] if node is None else [node]
    while stack:
        for above, _ in stack.pop().next_functions:
            if above is not None and above not in found and above not in ends:
                found.add(above)
                stack.append(above)
    return found


def pulled_samplewise(
    outputs: Sequence[Any],
    parameter: Tensor,
    signals: Signals,
    where: Sequence[Layout],
    samples: Samples,
) -> Structure:
    """Signals at tensors or edges, pulled back to a parameter once for each sample."""
    pairs = [
        (output, signal, layout)
        for output, signal, layout in zip(outputs, signals, where, strict=False)
        if signal is not None and not (isinstance(output, Tensor) and not output.requires_grad)
    ]
    if not pairs:
        return Dense(None)
    count = pairs[0][2].samples
    found = [
        pulled(
            [output for output, _, _ in pairs],
            parameter,
            [_only(signal, layout, sample) for _, signal, layout in pairs],
        )
        for sample in _listed(samples, count)
    ]
    stacked = torch.stack(found, 1)
    return Dense(stacked.to(accumulation_dtype(stacked.dtype)))


def _listed(samples: Samples, count: int) -> Sequence[int]:
    """The indices of the samples that were chosen."""
    if isinstance(samples, slice):
        return range(count)[samples]
    return range(len(samples)) if is_dry() else samples.tolist()


def pulled(outputs: Sequence[Any], parameter: Tensor, columns: Sequence[Tensor]) -> Tensor:
    """Vector-Jacobian products of every column ``[v, *y]`` with a parameter, ``[v, *p]``.

    # NOTE [Autograd in rules]
    Here alone a rule calls autograd: what has no rule is differentiated by PyTorch itself.
    """
    differentiable = torch.is_grad_enabled()

    def pull(vectors: Sequence[Tensor], batched: bool) -> Tensor:
        (product,) = torch.autograd.grad(
            outputs,
            parameter,
            vectors,
            is_grads_batched=batched,
            retain_graph=True,
            create_graph=differentiable,
            allow_unused=True,
        )
        if product is not None:
            return product.to_dense() if product.is_sparse else product
        lead = vectors[0].shape[:1] if batched else ()
        return parameter.new_zeros((*lead, *parameter.shape))

    try:
        return pull(columns, batched=True)
    except RuntimeError:  # a function of the user's own without a batching rule
        count = columns[0].shape[0]
        return torch.stack(
            [pull([column[place] for column in columns], batched=False) for place in range(count)]
        )


def _only(signal: Tensor, layout: Layout, sample: int) -> Tensor:
    """A signal that is zero but for one sample."""
    if layout.axis is None:
        return signal
    mask = layout.sample_of(signal.device) == sample
    return signal * mask.view([-1 if axis == layout.axis + 1 else 1 for axis in range(signal.dim())])


@contextlib.contextmanager
def _replayed(state: Any) -> Iterator[None]:
    """The random state that the call saw, for as long as it is evaluated again."""
    if state is None:
        yield
        return
    before = random_state()
    set_random_state(state)
    try:
        yield
    finally:
        set_random_state(before)


def random_state() -> list[Tensor]:
    """State of the generators of the CPU and of every initialised CUDA device."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states


def set_random_state(states: list[Tensor]) -> None:
    """Put back what ``random_state`` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


def name_of(function: Callable[..., Any]) -> str:
    """The name of a torch function, as users know it."""
    return str(getattr(function, "__name__", function))
