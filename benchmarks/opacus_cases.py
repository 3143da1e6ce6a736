"""``python -m benchmarks.opacus_cases``: cases of Opacus' own tests, put to packprop; writes
``results/opacus_cases.json``.

Opacus' tests of per-sample gradients (``opacus.tests.grad_samples``, with hypothesis) run as they are, but
for what they call in order to compare: layers and batches that they draw are kept. Each is a case
under a sum and under a mean, and again with no sample in the batch, as Poisson sampling may draw it. Right are
rows of ``BatchGrad``, and norms and sums of ``clipped_gradients``, that equal those of autograd on one sample
after the other, in double precision; of an empty batch, zeros and PyTorch's own gradients. Tests of norms of
embeddings compare with numbers, and get those of packprop.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import importlib
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from typing import Any
from unittest import mock

import hypothesis
import torch
import torch.nn.functional as F
from opacus.utils.per_sample_gradients_utils import (
    compute_microbatch_grad_sample,
    compute_opacus_grad_sample,
    unpack_packedsequences,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.testing import assert_close

import packprop
from benchmarks.run import environment, write_results
from packprop import extensions

REDUCTIONS = ("sum", "mean")
TESTS = "opacus.tests.grad_samples"
MAX_NORM = 0.5
NOT_RUN = "not run by PyTorch itself"
STATES = ("right", "refused", "wrong", "crashed", NOT_RUN)


@dataclass(frozen=True)
class Case:
    """A layer and a batch of one of Opacus' tests."""

    test: str
    layer: nn.Module
    batch: Any
    batch_first: bool
    chunks: Callable[[Any], Iterator[Any]]

    @property
    def is_empty(self) -> bool:
        """Whether there is no sample in the batch, or nothing in its samples."""
        return _tensor(self.batch).numel() == 0

    @property
    def samples(self) -> int:
        """How many samples are in a batch that is not packed."""
        return (
            len(self.batch[1])
            if isinstance(self.batch, tuple)
            else self.batch.shape[0 if self.batch_first else 1]
        )

    @property
    def name(self) -> str:
        """Test, layer, and shape of the batch."""
        kind = "packed " if isinstance(self.batch, PackedSequence) else ""
        axis = "" if self.batch_first else " samples second"
        return f"{self.test}: {_described(self.layer)} {kind}{list(_tensor(self.batch).shape)}{axis}"

    def without_samples(self) -> Case | None:
        """The same layer under an empty batch; ``None`` where a batch cannot be empty."""
        if self.is_empty or isinstance(self.batch, PackedSequence):
            return None
        if isinstance(self.batch, tuple):
            nothing: Any = tuple(part[:0] for part in self.batch)
        else:
            nothing = self.batch[:0] if self.batch_first else self.batch[:, :0]
        return Case(self.test, self.layer, nothing, self.batch_first, self.chunks)


def _tensor(batch: Any) -> Tensor:
    """The values of a batch, which may be packed, or bags of indices with offsets."""
    return batch if isinstance(batch, Tensor) else batch[0]


def _described(layer: nn.Module) -> str:
    """A layer in one line, with the options that it does not print."""
    inner = next(layer.children(), layer) if type(layer).__name__.endswith("Adapter") else layer
    if not any(True for _ in inner.children()):
        return repr(inner)
    options = [
        f"{key}={value}"
        for key, value in vars(inner).items()
        if key[0] != "_" and isinstance(value, (bool, int)) and key != "training"
    ]
    return (
        f"{type(inner).__name__}({', '.join(options)}, {', '.join(key for key, _ in inner.named_parameters())})"
    )


def cases(examples: int) -> list[Case]:
    """What Opacus' tests draw, each once, and each again without samples.

    Args:
        examples: How many examples hypothesis draws for each test.
    """
    hypothesis.settings.register_profile(
        "cases",
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("cases")  # before the tests are imported, which start from it
    kept: dict[str, Case] = {}

    def keep(test: Any, x: Any, module: nn.Module, batch_first: bool = True, **options: Any) -> None:
        name = type(test).__name__.removesuffix("_test")
        case = Case(name, copy.deepcopy(module), x, batch_first, options.get("chunk_method", iter))
        for each in (case, case.without_samples()):
            if each is not None:
                kept.setdefault(each.name, each)

    common = importlib.import_module(f"{TESTS}.common")
    with mock.patch.object(common.GradSampleHooks_test, "run_test", keep):
        require_success(unittest.defaultTestLoader.discover(TESTS, "*_test.py"))
    return list(kept.values())


def norms_of_table(layer: nn.Embedding, inputs: list[Tensor], cotangents: Tensor) -> dict[Tensor, Tensor]:
    """Norms of samples' gradients of a table, as Opacus' function of this kind returns them."""
    packprop.extend(layer)
    with packprop.backpack(extensions.BatchL2Grad()), packprop.record():
        (layer(inputs[0]) * cotangents).sum().backward()
    return {layer.weight: layer.weight.batch_l2.sqrt()}


def require_norms_of_tables() -> int:
    """Run Opacus' tests of such norms with those of packprop; how many there are."""
    theirs = "opacus.grad_sample.embedding_norm_sample.compute_embedding_norm_sample"
    name = f"{TESTS}.embedding_norm_sample_test"
    with mock.patch(theirs, norms_of_table):
        return require_success(unittest.defaultTestLoader.loadTestsFromName(name))


def require_success(tests: unittest.TestSuite) -> int:
    """Run tests, none of which may fail; how many there are."""
    result = unittest.TestResult()
    tests.run(result)
    failed = [trace for _, trace in [*result.errors, *result.failures]]
    assert result.testsRun
    assert not failed, "\n".join(failed)
    return result.testsRun


def reference(case: Case, reduction: str) -> dict[str, Tensor]:
    """Gradients of samples' own losses, by autograd on one after the other; zeros where there is no entry."""
    if case.is_empty:
        return {key: p.new_zeros(case.samples, *p.shape) for key, p in case.layer.named_parameters()}
    batch = unpack_packedsequences(case.batch) if isinstance(case.batch, PackedSequence) else case.batch
    rows: dict[str, Tensor] = compute_microbatch_grad_sample(
        batch, case.layer, case.batch_first, reduction, case.chunks
    )
    return rows


def of_opacus(case: Case, reduction: str) -> dict[str, Tensor]:
    """Rows of Opacus itself, at the scale of the samples' own losses."""
    rows: dict[str, Tensor] = compute_opacus_grad_sample(case.batch, case.layer, case.batch_first, reduction)
    return rows


def of_packprop(case: Case, reduction: str) -> dict[str, Tensor]:
    """Rows of packprop at the same scale."""
    layer = run(case, reduction, packprop.backpack(extensions.BatchGrad()))
    rows: dict[str, Tensor] = {key: p.grad_batch for key, p in layer.named_parameters()}
    return {key: (len(value) if reduction == "mean" else 1) * value for key, value in rows.items()}


def require_clipped(case: Case, reduction: str, rows: dict[str, Tensor]) -> None:
    """Compare norms and sums of one clipped pass with those of the rows; without samples, with a plain pass."""
    context = packprop.clipped_gradients(max_norm=MAX_NORM, reduction=reduction)  # type: ignore[arg-type]
    layer = run(case, reduction, context)
    norms = torch.stack([row.flatten(1).norm(dim=1) for row in rows.values()]).norm(dim=0)
    assert_close(context.norms.double(), norms)
    factors = (MAX_NORM / norms).clamp(max=1) / (len(norms) if reduction == "mean" else 1)
    sums = {key: torch.einsum("n,n...->...", factors, row) for key, row in rows.items()}
    if case.is_empty:
        sums = {key: p.grad for key, p in run(case, reduction, contextlib.nullcontext()).named_parameters()}
    assert_close({key: p.grad for key, p in layer.named_parameters()}, sums, equal_nan=True)


def run(case: Case, reduction: str, context: AbstractContextManager[Any]) -> nn.Module:
    """One backward pass of a layer under the loss of Opacus' tests; the layer."""
    layer = copy.deepcopy(case.layer)
    packed = isinstance(case.batch, PackedSequence)
    packprop.extend(layer, sample_axis=None if case.batch_first or packed else 1)
    with context:
        of_layer(layer, case.batch, reduction).backward()
    return layer


def of_layer(layer: nn.Module, batch: Any, reduction: str) -> Tensor:
    """The absolute values of what a layer returns, as a sum or as a mean of means over samples.

    Whose rows are whose in packed data is said as users have to.
    """
    out = layer(*batch) if type(batch) is tuple else layer(batch)
    if isinstance(out, Tensor):
        with packprop.record():
            return F.l1_loss(out, torch.zeros_like(out), reduction=reduction)
    sequences = torch.cat(
        [torch.arange(int(size)) for size in out.batch_sizes]
    )  # by length, as Opacus has them
    with packprop.record(documents=sequences):
        if reduction == "sum":
            return F.l1_loss(out.data, torch.zeros_like(out.data), reduction="sum")
        lengths = sequences.bincount()
        terms = F.l1_loss(out.data, torch.zeros_like(out.data), reduction="none").mean(1)
        return (terms / lengths[sequences]).sum() / len(lengths)


def outcome(case: Case, reduction: str) -> tuple[str, str, str]:
    """State of packprop, the reason, and the state of Opacus."""
    try:
        of_layer(copy.deepcopy(case.layer), case.batch, reduction).backward()
    except Exception:
        return NOT_RUN, "", NOT_RUN
    rows = reference(case, reduction)
    state, detail = _state(lambda: assert_close(of_packprop(case, reduction), rows))
    if state == "right":
        state, detail = _state(lambda: require_clipped(case, reduction, rows))
    theirs, _ = _state(lambda: assert_close(of_opacus(case, reduction), rows))
    return state, detail, theirs


def _state(compare: Callable[[], None]) -> tuple[str, str]:
    """What came of a comparison, and why."""
    try:
        compare()
    except packprop.PackpropError as error:
        return "refused", str(error)
    except AssertionError as error:
        return "wrong", str(error)
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}"
    return "right", ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.opacus_cases", description=__doc__)
    parser.add_argument("--examples", type=int, default=100, help="drawn for each test (default 100)")
    parser.add_argument("--test", help="only tests with this in their name; writes nothing")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    described = environment(threads=1, rounds=1, processes=1)
    counts: dict[tuple[str, bool], collections.Counter[str]] = {}
    others: list[dict[str, str]] = []
    for case in cases(options.examples):
        if options.test and options.test not in case.test:
            continue
        of_test = counts.setdefault((case.test, case.is_empty), collections.Counter())
        for reduction in REDUCTIONS:
            state, detail, theirs = outcome(case, reduction)
            of_test.update([state, f"Opacus {theirs}"])
            if state not in ("right", NOT_RUN) or theirs not in ("right", NOT_RUN):
                others.append(
                    {"case": f"{case.name}, {reduction}", "state": state, "detail": detail, "opacus": theirs}
                )
                print(f"{state}, Opacus {theirs}: {others[-1]['case']}\n    {detail}", flush=True)
    print(f"norms of tables: {require_norms_of_tables()} right")
    for empty in (False, True):
        total = sum((own for (_, kind), own in counts.items() if kind is empty), collections.Counter[str]())
        for who in ("", "Opacus "):
            shown = ", ".join(f"{total[who + state]} {state}" for state in STATES)
            print(f"{'empty batches' if empty else 'batches'}, {who or 'packprop '}: {shown}")
    records = [{"test": test, "empty": empty, **own} for (test, empty), own in sorted(counts.items())]
    if not options.test:
        versions = {name: metadata.version(name) for name in ("opacus", "hypothesis")}
        write_results(
            "opacus_cases",
            described,
            versions=versions,
            examples=options.examples,
            records=records,
            others=others,
        )
    return int(any(row["state"] in ("wrong", "crashed") for row in others))


if __name__ == "__main__":
    raise SystemExit(main())
