"""The one list of cases: models, losses and data that every extension is tested on.

Each file here yields the cases of one subject. Nothing here knows packprop.
"""

from __future__ import annotations

from tests.cases import (
    affine,
    complex_numbers,
    convolution,
    lookup,
    loss_uses,
    losses,
    metadata,
    modules,
    networks,
    normalisation,
    raw,
)
from tests.cases.case import Case, Functional, along, call, map_tensors

__all__ = ["BY_NAME", "CASES", "ONE_OF_EACH", "Case", "Functional", "along", "call", "map_tensors"]

CASES: list[Case] = [
    *affine.cases(),
    *convolution.cases(),
    *normalisation.cases(),
    *lookup.cases(),
    *raw.cases(),
    *complex_numbers.cases(),
    *metadata.cases(),
    *modules.cases(),
    *networks.cases(),
    *losses.cases(),
    *loss_uses.cases(),
]
BY_NAME: dict[str, Case] = {case.name: case for case in CASES}

# One case for each function that takes parameters, for each way of meeting them, and for each loss: what costs
# too much for every case is compared with a reference on these.
ONE_OF_EACH: list[Case] = [
    BY_NAME[name]
    for name in (
        *("linear-2d", "matmul-x-w", "mm", "mv", "addmm", "einsum-ni-io-no", "bmm-heads-first", "bilinear"),
        *("baddbmm-heads-first", "rsub", "logaddexp", "solve"),
        *("conv1d", "conv2d", "conv3d", "convtranspose1d", "convtranspose2d", "convtranspose3d"),
        *("batchnorm1d-2d", "layernorm", "groupnorm", "instancenorm1d", "rmsnorm", "prelu-one"),
        *(
            "embedding",
            "embedding-bag-sum",
            "add",
            "subtract",
            "multiply",
            "divide",
            "divide-reversed",
            "embedding-by-index",
            "embedding-index-select",
            "class-token",
            "tensordot",
        ),
        *("vision-transformer-library", "rnn", "rnn-relu", "gru", "lstm"),
        *("rnn-cell-loop", "rnn-relu-cell-loop", "lstm-cell-loop", "gru-cell-loop", "experts-grouped"),
        *("weight-norm", "tied-transpose", "module-twice", "checkpoint"),
        *("ce-plain", "linear-alone", "bce-vector", "l1", "smooth-l1", "huber", "nll", "bce-of-probabilities"),
        *("gaussian-nll", "poisson", "soft-margin", "multi-margin", "multilabel-margin", "hinge-embedding"),
        "ctc",
        *("multilabel-soft-margin", "kl-divergence", "own-convex", "function-of-own", "two-losses-one-output"),
    )
]
