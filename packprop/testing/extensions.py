"""``check_extension``: an extension's laws and values, on small problems or your own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from packprop.errors import BadInput
from packprop.testing.laws import check_laws
from packprop.testing.problem import Parts, Problem, double_precision
from packprop.testing.reference import Reference, check_reference
from packprop.testing.report import TOLERANCE, Ledger, Report
from packprop.types import Extension, check_extensions


def check_extension(
    extension: Extension,
    reference: Reference | None = None,
    *,
    on: Parts | None = None,
    tolerance: float = TOLERANCE,
) -> Report:
    """Check that an extension obeys the laws, and compare it with a function of per-sample gradients.

    The laws: the extension saves a value on every parameter; the value does not depend on how many samples or
    columns packprop takes at once; a second pass overwrites it; it scales with the loss as the rows' ``degree``
    says; batches of a data set merge to the value of one batch; ``subsampling``, if the extension has this
    argument, picks samples in the given order.

    Args:
        extension: An instance. The check makes its draws repeatable; ask for several draws, so that there are
            columns to merge.
        reference: A function from per-sample gradients ``[v, n, *p]`` of one parameter to the value.
            v is 1 for the gradient, otherwise the number of columns of the root of the loss's Hessian, or
            of draws. The function gets one such tensor for each different seed of the rows, except for
            inputs. The check also compares its derivatives with those of the extension under
            ``create_graph=True``.
        on: A small problem to test on, ``(model, loss, inputs, targets)``; by default three small problems
            that have every structure, 1 and 4 samples, mean and sum.
        tolerance: Largest relative error allowed.

    Returns:
        The report of all comparisons, which you can print.

    Raises:
        CheckFailed: An ``AssertionError`` that names law, parameter and largest relative error.
        BadInput: If ``extension`` is no instance of an extension, if every tensor has an attribute named as its
            ``savefield``, or if ``on`` has no samples or a loss that is not one number.
    """
    check_extensions("check_extension(...) was called.", extension)
    ledger = Ledger(f"check_extension({extension.name})", tolerance)
    if hasattr(nn.Parameter, extension.savefield):
        raise BadInput(
            f"{ledger.subject} was called.",
            f"savefield {extension.savefield!r}",
            "every tensor has an attribute of that name",
            "choose a name that torch.Tensor does not have",
        )
    with double_precision():
        for parts in _small_problems() if on is None else [on]:
            problem = Problem.of(parts)
            check_laws(ledger, problem, extension)
            if reference is not None:
                check_reference(ledger, problem, extension, reference)
    return ledger.report()


class _WordModel(nn.Module):
    """Look-ups, affine maps (plain, shared over positions, used twice), scales and shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.shared = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.rand(3) + 0.5)
        self.head = nn.Linear(3, 3)

    def forward(self, words: Tensor) -> Tensor:
        x = torch.tanh(self.shared(self.norm(self.table(words))))
        x = torch.tanh(self.shared(x)).mean(1) * self.scale
        scores: Tensor = self.head(x)
        return scores


def _small_problems() -> list[Parts]:
    pixels = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Sigmoid(), nn.Flatten(), nn.Linear(12, 2))
    plain = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2))
    words = torch.tensor([[0, 2, 2], [1, 4, 3], [3, 3, 3], [0, 1, 2]])
    return [
        (_WordModel(), nn.CrossEntropyLoss(), words, torch.tensor([0, 2, 1, 1])),
        (pixels, nn.MSELoss(), torch.randn(4, 2, 3, 3), torch.randn(4, 2)),
        (plain, nn.BCEWithLogitsLoss(reduction="sum"), torch.randn(1, 3), torch.rand(1, 2)),
    ]
