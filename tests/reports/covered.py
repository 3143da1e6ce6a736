"""A coverage table of a small model."""

from __future__ import annotations

from typing import Any

from torch import nn

from packprop.applications.reports.coverage import coverage
from packprop.applications.reports.coverage_values import Coverage
from tests.cases import BY_NAME

SIZE = 3


def covered(name: str) -> Coverage:
    problem = BY_NAME[name].problem(SIZE)
    return coverage(problem.model, (problem.inputs, problem.targets))


def of(found: Coverage, name: str) -> list[tuple[str, str]]:
    return [(use.function, use.structure) for use in found.parameters[name].uses]


def family(found: Coverage, name: str) -> Any:
    return next(family for family in found.families if family.name == name)


def linear_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
