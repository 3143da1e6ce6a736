"""A pass that is traced as a graph, to be replayed on other values: it must not decide by values.

# NOTE [Traced passes]
A traced pass runs on real tensors, but its graph is replayed on others. So no value may decide. packprop takes
over the decisions that passes make by values from the pass before, which made them in the same order
(``decided``) on a batch of the same kind. Conditions that faulty data fulfil become outputs of the graph
(``note_fault``). packprop refuses whatever would be wrong in a replay (``NotTraceable``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from packprop.engine.tensors.setting import setting
from packprop.errors import PackpropError

Value = TypeVar("Value")

Decisions = list[tuple[Hashable, Any]]
"""The decisions of passes by values: each question, and its answer."""


class NotTraceable(PackpropError):
    """Raised if a pass does something that a replay of its graph would do wrongly."""


def not_traceable(where: str, why: str) -> NotTraceable:
    """Make the error for a pass that does something that no replay can do."""
    return NotTraceable(
        "A compiled step was asked for.",
        where,
        why,
        "use `with packprop.backpack(...)` around loss.backward(), which runs every pass anew",
    )


@dataclass
class Trace:
    """A pass while it is traced.

    Args:
        decisions: The decisions by values of the pass before.
        faults: Conditions of one entry that hold for faulty data.
    """

    decisions: Decisions
    faults: list[Tensor] = field(default_factory=list)
    taken: int = 0


_TRACE: ContextVar[Trace | None] = ContextVar("packprop_trace", default=None)
_NOTED: ContextVar[Decisions | None] = ContextVar("packprop_decisions", default=None)


def traced(decisions: Decisions) -> AbstractContextManager[Trace]:
    """Trace a pass inside, which takes over the decisions of the pass before."""
    return setting(_TRACE, Trace(decisions))


def noting_decisions() -> AbstractContextManager[Decisions]:
    """Note the decisions by values of the passes inside."""
    return setting(_NOTED, [])


def is_traced() -> bool:
    """Tell whether the running pass is traced."""
    return _TRACE.get() is not None


def require_untraced(asked: str) -> None:
    """Refuse to decide by values in a traced pass.

    Raises:
        NotTraceable: If the pass is traced.
    """
    if is_traced():
        raise not_traceable(
            asked,
            "every pass checks it, because values decide it: rows that data reorder, values that keep "
            "samples apart where other values would mix them, or losses and shapes that are new in each pass",
        )


def note_fault(condition: Tensor) -> bool:
    """Tell whether a pass is traced; if so, keep a condition of one entry, which is true for faulty data."""
    trace = _TRACE.get()
    if trace is not None:
        trace.faults.append(condition)
    return trace is not None


def note_undecided() -> None:
    """Note that values leave a question open in this pass, so that no other pass takes over the answer."""
    noted = _NOTED.get()
    if noted is not None:
        noted.append(("nothing", None))


def decided(asked: Hashable, decide: Callable[[], Value]) -> Value:
    """Return the answer that values give; in a traced pass, take it over from the pass before.

    Raises:
        NotTraceable: If the pass before decided something else at this point.
    """
    trace = _TRACE.get()
    if trace is None:
        answer = decide()
        noted = _NOTED.get()
        if noted is not None:
            noted.append((asked, answer))
        return answer
    known = trace.decisions[trace.taken] if trace.taken < len(trace.decisions) else None
    trace.taken += 1
    if known is None or known[0] != asked:
        raise not_traceable(str(asked), "values decide it, and the pass before did not have to decide it")
    taken_over: Value = known[1]
    return taken_over
