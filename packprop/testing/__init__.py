"""Checks of what users register, and of their models: the engine against loops over samples.

``check_use`` for a function and its rule, ``check_extension`` for a row of the catalogue,
``check_model`` for a model with its loss. Each compares in double precision what the engine says
with what plain autograd says of one sample at a time, raises ``CheckFailed``, an
``AssertionError``, where they differ, and returns a ``Report`` that prints.
"""

from packprop.testing.extensions import check_extension
from packprop.testing.models import check_model
from packprop.testing.report import CheckFailed, Comparison, Report
from packprop.testing.uses import check_use

__all__ = ["CheckFailed", "Comparison", "Report", "check_extension", "check_model", "check_use"]
