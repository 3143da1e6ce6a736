"""The main job: what the gradients and the curvature of a network look like, layer by layer.

# NOTE [Profile quantities]
Let ``L = 1/N sum_n l_n`` be the mean loss over N samples; a loss that sums is divided by N first.
``l_n`` is the loss of sample n alone (to be exact, N times its share of L, where samples differ in
weight). Rows are layers: modules that own trainable parameters, with all of these (weight and bias)
taken together. With ``g_n`` the gradient of ``l_n`` and ``g`` that of ``L`` in what a layer owns:

gradient norm:    ``|g|``.
sample norms:     ``|g_n|``; their median and 95th percentile over n.
signal to noise:  ``|g|^2 / tr S``, with ``S = 1/N sum_n (g_n - g)(g_n - g)^T`` the covariance of
                  per-sample gradients. Its inverse is the simple noise scale of McCandlish et al.
                  (2018, arXiv:1812.06162): the batch size at which the noise of a batch's gradient
                  is as large as its signal. Where N samples stand for a larger population, values
                  near 1/N cannot be told from zero.
GGN trace:        ``tr 1/N sum_n J_n^T H_n J_n``, the trace of the layer's block of the generalized
                  Gauss-Newton matrix (Schraudolph 2002) of ``L``: exact from every column of a root
                  of ``H_n``, Monte Carlo from targets drawn from the model.
condition:        of the Kronecker factors A (second moment of inputs) and B (of signals) of KFAC:
                  largest over smallest eigenvalue, among those above rounding error; their number
                  is the rank. A matrix of rank below its size is singular. The threshold is
                  ``largest * epsilon * (size + 2 sqrt(terms))``: ``size`` as for any matrix (Golub
                  and Van Loan 2013, section 5.4), the rest for the random walk of the rounding
                  errors of a sum over that many samples and draws, in the model's precision.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import io
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from packprop.dataset import Batches, Data, Result, compute, described
from packprop.errors import BadInput, PackpropError
from packprop.extensions import KFAC, BatchL2Grad
from packprop.monoid import CAT, MOMENTS, Moments
from packprop.statistics import input_gram, moments, signal_gram, sq_norm
from packprop.structures import Dense, Lookup, Structure, rows
from packprop.tape import disable
from packprop.types import EXACT, GRADIENT, INPUTS, Extension, Row, Seed, map_tensors, tensors_in

ASKED = "packprop.profile(...) was called."
EXACT_OUTPUTS = 32
"""Outputs of a sample up to which the exact GGN trace, one backward pass for each, is cheap."""
LARGEST_FACTOR = 2048
"""Side of the largest Kronecker factor that is built; eigenvalues take the third power of it."""
ROOT, TOTAL = "(model)", "(total)"
"""Names of the rows of parameters that the model itself owns, and of all of them."""
WIDTH = 100
"""Columns of a terminal that a printed profile needs."""
NAME_WIDTH = 12
"""Columns that names of layers have at least; longer ones are folded where more is not there."""


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of one Kronecker factor, in short; see NOTE [Profile quantities].

    Args:
        size: Side of the matrix.
        built: Whether it was; if not, it is too large.
        rank: Number of eigenvalues above rounding error; ``None`` if the matrix is not finite.
        largest: Largest eigenvalue.
        smallest: Smallest eigenvalue above rounding error.
        condition: Their ratio; that of the matrix only if ``rank == size``.
    """

    size: int
    built: bool = True
    rank: int | None = None
    largest: float | None = None
    smallest: float | None = None
    condition: float | None = None


@dataclass(frozen=True)
class Layer:
    """One row of the table, or the total; see NOTE [Profile quantities].

    Args:
        name: Name of the module.
        kind: Its class.
        parameters: Number of trainable parameters; tied ones count where they come first.
        gradient_norm: Norm of the mean loss's gradient; as all that follow, ``None`` if the loss
            does not depend on the layer.
        sample_gradient_norm_median: Of the norms of single samples' gradients.
        sample_gradient_norm_95: Their 95th percentile.
        signal_to_noise: Squared gradient norm over the trace of the samples' covariance; ``None``
            where that is zero, as for one sample.
        ggn_trace_exact: Trace of the GGN block; ``None`` if it was not computed.
        ggn_trace_monte_carlo: Its estimate; ``None`` if it was not computed.
        factors: Kronecker factors by name, ``"weight.A"`` and so on.
    """

    name: str
    kind: str
    parameters: int
    gradient_norm: float | None = None
    sample_gradient_norm_median: float | None = None
    sample_gradient_norm_95: float | None = None
    signal_to_noise: float | None = None
    ggn_trace_exact: float | None = None
    ggn_trace_monte_carlo: float | None = None
    factors: dict[str, Spectrum] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """What ``profile`` returns: prints as a table, converts to a dictionary, saves and loads.

    Args:
        layers: One for each module that owns trainable parameters, in the model's order.
        total: The same over all of them.
        loss: The mean loss over the data set.
        samples: How many it was computed from.
        batches: In how many batches they came.
        settings: How: model, loss function, device, precision, mode, seed, draws, versions.
        seconds: Wall time of the pass over the data.
        tensors: ``gradient/<parameter>`` and ``gradient_variance/<parameter>`` (of single samples'
            gradients) ``[*p]``; ``sample_gradient_norm/<layer>`` and ``sample_ggn_trace/<layer>``
            (exact, if it was computed) ``[n]``, of each sample's own loss; for each Kronecker
            factor ``kfac/<parameter>/A`` (or ``B``) ``[i, i]``, and ``kfac_eigenvalues/...`` of the
            same name ``[i]``, ascending.
    """

    layers: list[Layer]
    total: Layer
    loss: float
    samples: int
    batches: int
    settings: dict[str, Any]
    seconds: float
    tensors: dict[str, Tensor] = field(repr=False, compare=False, default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All but the tensors, of plain numbers, strings, lists and dictionaries."""
        plain = dataclasses.asdict(dataclasses.replace(self, tensors={}))
        del plain["tensors"]
        return plain

    def to_json(self) -> str:
        """``to_dict`` as text; ``null`` is what was not computed, and what is infinite or NaN."""
        return json.dumps(_finite(self.to_dict()), indent=2, allow_nan=False) + "\n"

    def save(self, folder: str | Path) -> tuple[Path, Path]:
        """Write ``profile.json`` and ``profile.safetensors``, over older ones; return their paths.

        Raises:
            BadInput: If files cannot be written there.
        """
        check_folder(folder)
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        paths = target / "profile.json", target / "profile.safetensors"
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        _replace(paths[0], self.to_json().encode())
        _replace(paths[1], safetensors.torch.save(tensors))
        return paths

    @classmethod
    def load(cls, folder: str | Path) -> Profile:
        """Read what ``save`` wrote."""
        saved = json.loads((Path(folder) / "profile.json").read_text(encoding="utf-8"))
        tensors = safetensors.torch.load_file(Path(folder) / "profile.safetensors")
        layers = [_layer(row) for row in saved["layers"]]
        return cls(**{**saved, "layers": layers, "total": _layer(saved["total"])}, tensors=tensors)

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=WIDTH, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _table(self, options.max_width)
        yield Text()
        yield from _footer(self)


def profile(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    data: Data,
    *,
    batch_size: int | None = None,
    mc_samples: int = 1,
    exact: bool | None = None,
    curvature: bool = True,
    largest_factor: int = LARGEST_FACTOR,
    evaluation: bool = True,
    seed: int = 0,
    progress: bool = True,
    memory: int | str | None = None,
) -> Profile:
    """Gradients and curvature of a model on its data, layer by layer, in one pass over the data.

    NOTE [Profile quantities] in this file says what exactly is computed. The model is left as it
    was, ``.grad`` included.

    Args:
        model: Any module; it need not be extended. Batches are moved to where its parameters are.
        loss: ``loss(model(inputs), targets)``: one loss of torch with reduction "mean" or "sum", as
            a module or a function.
        data: A ``Dataset`` of pairs, a tuple of tensors ``(inputs [n, ...], targets [n, ...])``, or
            batches ``(inputs, targets)``, such as a ``DataLoader``; inputs of a batch may be a
            tuple or a dictionary of arguments.
        batch_size: Samples in a batch, 128 by default; not for data that come in batches. It
            changes memory and time; of the numbers, only which Monte Carlo draws they are of.
        mc_samples: Draws for each sample, for the Monte Carlo trace and the Kronecker factors.
        exact: Whether to compute the exact GGN trace, which takes a backward pass for each output
            of a sample; by default if these are at most 32.
        curvature: Whether to compute the GGN trace and Kronecker factors at all.
        largest_factor: Kronecker factors with a longer side than this are left out.
        evaluation: Whether to switch the model to evaluation mode meanwhile, so that dropout is off
            and batch normalisation does not mix samples.
        seed: Of the Monte Carlo draws.
        progress: Whether to show a progress bar on standard error, if that is a terminal.
        memory: The most bytes of tensor storage that may be alive at once, ``"600MiB"`` or a number.

    Raises:
        BadInput: For anything else than the above, no data, or a batch that the model or the loss
            fails on.
        PackpropError: For a model or a loss that the quantities are not known for.
    """
    _check(model, loss, batch_size, mc_samples, largest_factor, seed)
    batches = Batches(ASKED, data, batch_size)
    started = time.perf_counter()
    where = next(p for p in model.parameters() if p.requires_grad).device
    generator = torch.Generator(device=where).manual_seed(seed)
    with _evaluating(model, evaluation):
        with batches.explained():
            outputs = _outputs_of_a_sample(model, loss, batches.first(), where)
        if exact is None:
            exact = outputs is not None and outputs <= EXACT_OUTPUTS
        asked: dict[str, Extension] = {"gradient": _GradientMoments(), "norms": BatchL2Grad()}
        if curvature:
            kfac = _BoundedKFAC(mc_samples, generator=generator, largest=largest_factor)
            asked |= {"monte_carlo": _SampleGGNTrace(kfac.rows[0].seed), "kfac": kfac}
        if curvature and exact:
            asked["exact"] = _SampleGGNTrace(EXACT)
        try:
            result = compute(model, loss, batches, list(asked.values()), progress=progress, memory=memory)
        except PackpropError as error:
            if not error.asked.startswith("A generalized Gauss-Newton quantity"):
                raise
            raise PackpropError(
                error.asked,
                error.where,
                error.why,
                f"{error.instead}; or leave curvature out: profile(..., curvature=False), "
                "packprop profile --no-curvature",
            ) from error
    settings = {
        "model": type(model).__name__,
        "loss": getattr(loss, "__name__", type(loss).__name__),
        "device": str(where),
        "precision": ", ".join(sorted({_precision(p.dtype) for p in model.parameters()})),
        "mode": _mode_of(model) if not evaluation else "evaluation",
        "monte_carlo_samples": mc_samples if curvature else None,
        "outputs_of_a_sample": outputs,
        "largest_factor": largest_factor if curvature else None,
        "seed": seed,
        "packprop": version(),
        "torch": torch.__version__,
    }
    tables = {key: result[extension] for key, extension in asked.items()}
    return _assemble(model, result, tables, batches.count, settings, started)


# What is asked of the engine


class _GradientMoments(Extension):
    """Sum and summed squared deviation of the rows of ``grad_batch``: two of ``[*p]``."""

    savefield = "gradient_moments"
    rows = (Row(GRADIENT, moments, over_n=MOMENTS),)

    def finish(self, values: list[Any], samples: int) -> list[Tensor]:
        total: Moments = values[0]
        return [total.mean * total.samples, total.deviation]


@dataclass(frozen=True, eq=False)
class _SampleGGNTrace(Extension):
    """Trace of each sample's GGN block ``[n]``: squared norms of the columns that are swept back.

    The diagonal, which has the same sum, would need the entries of every column.
    """

    seed: Seed

    @property
    def savefield(self) -> str:  # type: ignore[override]
        return f"sample_ggn_trace_{'exact' if self.seed == EXACT else 'monte_carlo'}"

    @property
    def rows(self) -> tuple[Row, ...]:
        return (Row(self.seed, sq_norm, over_n=CAT[0]),)

    @property
    def name(self) -> str:
        return "GGN trace"


@dataclass(frozen=True, eq=False)
class _BoundedKFAC(KFAC):
    """``KFAC`` without its large factors: an empty ``[0, size]`` stands for those."""

    largest: int = LARGEST_FACTOR

    @property
    def rows(self) -> tuple[Row, ...]:
        seed = super().rows[0].seed

        def signals(structure: Structure) -> Tensor:
            if isinstance(structure, Dense):
                form = rows(structure).shape[2:]
            else:
                assert structure.signal is not None
                form = structure.signal.shape[3:]
            if math.prod(form) > self.largest:
                return torch.empty(0, math.prod(form))
            return signal_gram(structure, self.approximation)

        def inputs(structure: Structure) -> Tensor | None:
            if isinstance(structure, Dense):
                return None
            size = structure.entries if isinstance(structure, Lookup) else structure.x.shape[3]
            if size > self.largest:
                return torch.empty(0, size)
            return input_gram(structure, self.approximation)

        return (Row(seed, signals), Row(INPUTS, inputs, degree=0))


# From values of parameters to rows of the table


def _assemble(
    model: nn.Module,
    result: Result,
    tables: dict[str, dict[str, Any]],
    batches: int,
    settings: dict[str, Any],
    started: float,
) -> Profile:
    count = result.samples
    # from the rows of a loss as reduced to samples' own losses, and from that loss to the mean one
    own = count if result.reduction == "mean" else 1
    whole = 1.0 if result.reduction == "mean" else 1 / count
    tensors: dict[str, Tensor] = {}
    factors: dict[str, dict[str, Spectrum]] = {}
    signal: dict[str, float] = {}
    noise: dict[str, float] = {}
    for name, (gradient, deviation) in tables["gradient"].items():
        tensors[f"gradient/{name}"] = gradient * whole
        tensors[f"gradient_variance/{name}"] = deviation * (own**2 / count)
        signal[name] = float((gradient.double() * whole).square().sum())
        noise[name] = float(deviation.double().sum() * (own**2 / count))
        factors[name] = {}
        for side, factor in zip("BA", tables.get("kfac", {}).get(name, []), strict=False):
            scaled = factor * whole if side == "B" else factor
            terms = count * (settings["monte_carlo_samples"] if side == "B" else 1)
            spectrum, eigenvalues = _spectrum(scaled, terms)
            factors[name][side] = spectrum
            if eigenvalues is not None:
                tensors[f"kfac/{name}/{side}"] = scaled
                tensors[f"kfac_eigenvalues/{name}/{side}"] = eigenvalues

    def row(name: str, kind: str, parameters: dict[str, nn.Parameter]) -> Layer:
        names = [full for full in parameters if full in signal]
        entries = sum(parameter.numel() for parameter in parameters.values())
        if not names:
            return Layer(name, kind, entries)

        def over(key: str) -> Tensor:
            return sum((tables[key][full].double().cpu() for full in names), torch.zeros(()))

        norms = over("norms").sqrt() * own
        variance = sum(noise[full] for full in names)
        squared = sum(signal[full] for full in names)
        traces = {key: over(key) * own for key in ("monte_carlo", "exact") if key in tables}
        tensors[f"sample_gradient_norm/{name}"] = norms
        for each in traces.values():  # the exact one comes last
            tensors[f"sample_ggn_trace/{name}"] = each
        means = {key: float(each.mean()) for key, each in traces.items()}
        median, percentile = np.quantile(norms.numpy(), [0.5, 0.95])
        return Layer(
            name,
            kind,
            entries,
            gradient_norm=math.sqrt(squared),
            sample_gradient_norm_median=float(median),
            sample_gradient_norm_95=float(percentile),
            signal_to_noise=None if variance == 0 else squared / variance,
            ggn_trace_exact=means.get("exact"),
            ggn_trace_monte_carlo=means.get("monte_carlo"),
            factors={
                f"{full.rpartition('.')[2]}.{side}": spectrum
                for full in names
                for side, spectrum in factors[full].items()
            },
        )

    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in trainable))
    layers = [
        row(
            owner or ROOT,
            type(model.get_submodule(owner)).__name__,
            {name: p for name, p in trainable.items() if name.rpartition(".")[0] == owner},
        )
        for owner in owners
    ]
    # a layer's factors say nothing of the whole
    total = dataclasses.replace(row(TOTAL, type(model).__name__, trainable), factors={})
    return Profile(
        layers,
        total,
        loss=result.loss * whole,
        samples=count,
        batches=batches,
        settings=settings,
        seconds=time.perf_counter() - started,
        tensors={name: tensor.cpu() for name, tensor in tensors.items()},
    )


def _spectrum(factor: Tensor, terms: int) -> tuple[Spectrum, Tensor | None]:
    """Rank and condition of a sum of outer products, and its eigenvalues in ascending order."""
    size = factor.shape[1]
    if len(factor) < size:
        return Spectrum(size, built=False), None
    if not bool(factor.isfinite().all()):
        return Spectrum(size), None
    eigenvalues = torch.linalg.eigvalsh(factor.detach().cpu().double())
    largest = float(eigenvalues[-1])
    error = torch.finfo(factor.dtype).eps * (size + 2 * math.sqrt(terms))
    kept = eigenvalues[eigenvalues > largest * error]
    if largest <= 0:
        return Spectrum(size, rank=0), eigenvalues
    smallest = float(kept[0])
    return Spectrum(size, True, len(kept), largest, smallest, largest / smallest), eigenvalues


# Checks


def _outputs_of_a_sample(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: Any, device: torch.device
) -> int | None:
    """How many entries of the model's output belong to one sample; ``None`` if it is no tensor."""
    inputs, targets = map_tensors(lambda tensor: tensor.to(device), batch)
    with torch.no_grad(), disable():
        if isinstance(inputs, dict):
            outputs = model(**inputs)
        else:
            outputs = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        value = loss(outputs, targets)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise BadInput(
            ASKED,
            f"the loss, {getattr(loss, '__name__', type(loss).__name__)}",
            f"it returned {described(value)} instead of one number",
            "use a loss with reduction='mean' or reduction='sum'",
        )
    samples = next(tensors_in(inputs)).shape[:1]
    if not isinstance(outputs, Tensor) or not samples or samples[0] == 0:
        return None
    return outputs.numel() // samples[0]


def _mode_of(model: nn.Module) -> str:
    modes = {module.training for module in model.modules()}
    return "mixed" if len(modes) == 2 else "training" if modes == {True} else "evaluation"


@contextlib.contextmanager
def _evaluating(model: nn.Module, evaluation: bool) -> Iterator[None]:
    """Evaluation mode for a while; afterwards every module is in its own mode again."""
    before = {module: module.training for module in model.modules()}
    try:
        if evaluation:
            model.eval()
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _check(model: Any, loss: Any, batch_size: Any, mc_samples: Any, largest_factor: Any, seed: Any) -> None:
    if not isinstance(model, nn.Module):
        raise BadInput(ASKED, f"model, {described(model)}", "it is not a torch.nn.Module", _instance_of(model))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadInput(
            ASKED,
            f"model, {described(model)}",
            "none of its parameters requires gradients",
            "set requires_grad=True on those that shall be profiled",
        )
    if not callable(loss) or isinstance(loss, type):
        raise BadInput(
            ASKED,
            f"loss, {described(loss)}",
            "it is not a function of outputs and targets",
            _instance_of(loss),
        )
    numbers = {
        "batch_size": 1 if batch_size is None else batch_size,
        "mc_samples": mc_samples,
        "largest_factor": largest_factor,
    }
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise BadInput(ASKED, f"{name}={number!r}", "it is a number of things", "give 1 or more")
    if not isinstance(seed, int):
        raise BadInput(ASKED, f"seed={seed!r}", "it is not a whole number", "give 0, for example")


def _instance_of(value: Any) -> str:
    if isinstance(value, type):
        return f"give an instance, {value.__name__}(...)"
    return "give a module such as torch.nn.Linear(3, 2) or torch.nn.CrossEntropyLoss()"


# Files


def check_folder(folder: str | Path) -> None:
    """Raise unless files can be written into a folder, which need not exist yet; nothing is left.

    Raises:
        BadInput: With the reason of the operating system.
    """
    existing = Path(folder)
    while not os.path.lexists(existing):
        existing = existing.parent
    why = ""
    if not existing.is_dir():
        why = f"{existing} is a file, not a folder"
    for name in ("profile.json", "profile.safetensors"):
        if (Path(folder) / name).is_dir():
            why = f"{name} in it is a folder"
    if not why:
        try:
            with tempfile.TemporaryFile(dir=existing):
                return
        except OSError as error:
            why = f"nothing can be written to {existing}: {error.strerror or error}"
    raise BadInput(
        f"A profile was to be saved in {str(folder)!r}.",
        "the output folder",
        why,
        "give a folder that can be written to, or that can be made",
    )


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that it is either the old one or the new one, whatever happens meanwhile."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_bytes(content)
    os.replace(scratch, path)


def _finite(value: Any) -> Any:
    """The same nesting without what JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _layer(saved: dict[str, Any]) -> Layer:
    factors = {name: Spectrum(**spectrum) for name, spectrum in saved["factors"].items()}
    return Layer(**{**saved, "factors": factors})


def _precision(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def version() -> str | None:
    """The version of packprop that is installed, if one is."""
    try:
        return importlib.metadata.version("packprop")
    except importlib.metadata.PackageNotFoundError:  # a source tree that was not installed
        return None


# Printing


def _number(value: float | None) -> str:
    """Three digits in at most six characters."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 0.01 <= abs(value) < 99999.5:
        return f"{value:#.3g}".rstrip(".") if abs(value) < 999.5 else f"{value:.0f}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def _counted(number: int, noun: str) -> str:
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def _condition(layer: Layer, side: str) -> str:
    """That of the first parameter that has such a factor, with the rank where that is lacking."""
    found = [spectrum for name, spectrum in layer.factors.items() if name.endswith(f".{side}")]
    if not found:
        return "-"
    spectrum = found[0]
    if not spectrum.built:
        return f"{spectrum.size} wide"
    if spectrum.rank is None:
        return "nan"
    condition = _number(spectrum.condition)
    if spectrum.rank == spectrum.size:
        return condition
    rank = f"{spectrum.rank}/{spectrum.size}"
    return f"{condition} {rank}" if len(condition + rank) <= 10 else f"{condition}\n{rank}"


def _cells(layer: Layer, name: str) -> list[str]:
    return [
        name,
        f"{layer.parameters:,}",
        _number(layer.gradient_norm),
        _number(layer.sample_gradient_norm_median),
        _number(layer.sample_gradient_norm_95),
        _number(layer.signal_to_noise),
        _number(layer.ggn_trace_exact),
        _number(layer.ggn_trace_monte_carlo),
        _condition(layer, "A"),
        _condition(layer, "B"),
    ]


def _table(found: Profile, room: int) -> Table:
    titles = [
        "\nlayer",
        "para-\nmeters",
        "grad\nnorm",
        "sample\nmedian",
        "sample\n95%",
        "grad\nSNR",
        "GGN tr\nexact",
        "GGN tr\nMC",
        "KFAC cond\nA (inputs)",
        "KFAC cond\nB (signals)",
    ]
    rows = [_cells(layer, layer.name) for layer in found.layers]
    total = [*_cells(found.total, "total")[:-2], "", ""]
    columns = list(zip(titles, *rows, total, strict=True))
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    numbers = sum(widths[1:])
    gap = 2 if NAME_WIDTH + numbers + 2 * (len(widths) - 1) <= room else 1
    # names that are too long are folded; numbers never are
    widths[0] = max(NAME_WIDTH, min(widths[0], room - numbers - gap * (len(widths) - 1)))
    # of the gap between columns, the box draws one character
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, show_footer=True, padding=(0, 0, 0, gap - 1), pad_edge=False
    )
    for place, (title, width) in enumerate(zip(titles, widths, strict=True)):
        table.add_column(
            title,
            total[place],
            justify="right" if place else "left",
            width=width,
            no_wrap=place > 0,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    return table


def _footer(found: Profile) -> list[Text]:
    settings = found.settings
    draws = settings["monte_carlo_samples"]
    facts = [
        f"{settings['model']}: {settings['loss']} {_number(found.loss)}",
        f"{_counted(found.samples, 'sample')} in {_counted(found.batches, 'batch')}",
        f"{settings['mode']} mode",
        f"{settings['precision']} on {settings['device']}",
    ]
    lines = [
        ", ".join(facts),
        "grad: of the mean loss; sample: norms of single gradients; SNR: |grad|^2 / trace of their covariance",
    ]
    if draws is not None:
        lines.append(
            f"GGN tr: exact, Monte Carlo ({_counted(draws, 'draw')}); "
            "KFAC cond: largest/smallest eigenvalue, rank/size if singular"
        )
    return [Text(line) for line in lines]
