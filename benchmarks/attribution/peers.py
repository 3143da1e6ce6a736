"""The same by kronfluence, dattri, traker and curvlinops, where they are installed, as their pages show it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.attribution.methods import gradients, method
from benchmarks.attribution.problems import Data


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _of_terms(outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross entropies of all terms."""
    return F.cross_entropy(outputs.movedim(-1, 1), targets, reduction="sum")


def by_kronfluence(
    model: nn.Module,
    loss: nn.Module,
    data: Data,
    queries: Data,
    damping: float,
    batch: int = 128,
    told: Callable[[str], None] = lambda step: None,
) -> Tensor:
    """Products by EKFAC; ``told`` is called with the name of each step that is done."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Classification(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            outputs = model(batch[0])
            if not sample:
                return _of_terms(outputs, batch[1])
            with torch.no_grad():
                drawn = torch.multinomial(outputs.detach().softmax(-1).flatten(0, -2), 1)
            return _of_terms(outputs, drawn.view(outputs.shape[:-1]))

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return _of_terms(model(batch[0]), batch[1])

    task = Classification()
    prepared = prepare_model(model, task)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer("digits", prepared, task, cpu=True, output_dir=folder, disable_tqdm=True)
        train, asked = TensorDataset(*data), TensorDataset(*queries)
        options = FactorArguments(strategy="ekfac")
        analyzer.fit_all_factors("ekfac", train, factor_args=options, per_device_batch_size=batch)
        told("factors")
        terms = data[1].numel()
        analyzer.compute_pairwise_scores(
            "scores",
            "ekfac",
            query_dataset=asked,
            train_dataset=train,
            score_args=ScoreArguments(damping_factor=damping * (terms / len(data[0]))),
            per_device_query_batch_size=len(queries[0]),
            per_device_train_batch_size=batch,
        )
        found: Tensor = analyzer.load_pairwise_scores("scores")["all_modules"]
        told("scores")
    return found.double()


def _by_dattri_cg(model: nn.Module, loss: nn.Module, data: Data, queries: Data, damping: float) -> Tensor:
    from dattri.algorithm.influence_function import IFAttributorCG
    from dattri.task import AttributionTask

    dims = data[1].dim()

    def of_some(parameters: Any, given: Any) -> Tensor:
        x, y = given if given[1].dim() == dims else (given[0][None], given[1][None])  # one sample inside vmap
        return loss(torch.func.functional_call(model, parameters, (x,)), y)

    task = AttributionTask(of_some, model, model.state_dict())
    attributor = IFAttributorCG(task, max_iter=10, regularization=damping)
    whole = DataLoader(TensorDataset(*data), batch_size=len(data[0]))
    attributor.cache(whole)
    asked = DataLoader(TensorDataset(*queries), batch_size=len(queries[0]))
    quiet = contextlib.redirect_stderr(io.StringIO())  # bars of progress
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), quiet:
        return attributor.attribute(whole, asked).mT.double()


def _by_curvlinops(model: nn.Module, loss: nn.Module, data: Data, queries: Data, damping: float) -> Tensor:
    from curvlinops import EKFACLinearOperator, KFACInverseLinearOperator

    parameters = [*model.parameters()]
    batches = [(data[0][i : i + 128], data[1][i : i + 128]) for i in range(0, len(data[0]), 128)]
    operator = EKFACLinearOperator(model, nn.CrossEntropyLoss(), parameters, batches, fisher_type="type-2")
    inverse = KFACInverseLinearOperator(operator, damping=damping, use_exact_damping=True)
    rows, asked = gradients(model, loss, data), gradients(model, loss, queries)
    return (asked @ (inverse @ rows.mT)).double()


def _by_trak(model: nn.Module, loss: nn.Module, data: Data, queries: Data, damping: float) -> Tensor:
    """One checkpoint, where its authors recommend many; its matrix is a sum over samples."""
    from trak import TRAKer

    if data[1].dim() > 1:
        raise NotImplementedError("its task is the classification of images")
    count, asked = len(data[0]), len(queries[0])
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        made = TRAKer(
            model=model,
            task="image_classification",
            train_set_size=count,
            save_dir=folder,
            device="cpu",
            proj_dim=min(2048, sum(p.numel() for p in model.parameters())),
            use_half_precision=False,
            lambda_reg=damping * count,
            logging_level=50,
        )
        made.load_checkpoint(model.state_dict(), model_id=0)
        made.featurize(batch=[*data], num_samples=count)
        made.finalize_features()
        made.start_scoring_checkpoint("scores", model.state_dict(), model_id=0, num_targets=asked)
        made.score(batch=[*queries], num_samples=asked)
        return torch.tensor(made.finalize_scores("scores")).mT.double()


if _is_there("kronfluence"):
    method("kronfluence, EKFAC")(by_kronfluence)
if _is_there("dattri"):
    method("dattri, CG")(_by_dattri_cg)
if _is_there("trak"):
    method("traker, one checkpoint")(_by_trak)
if _is_there("curvlinops"):
    method("curvlinops, EKFAC exact")(_by_curvlinops)
