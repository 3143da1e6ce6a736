"""Checks of your own additions, and of your models: the engine against loops over samples.

``check_use`` checks a function and its rule, ``check_extension`` an extension, ``check_model`` a model with its
loss. Each compares, in double precision, the engine's values with plain autograd on one sample at a time. If
they differ, it raises ``CheckFailed``, an ``AssertionError``; otherwise it returns a ``Report``, which you can
print.
"""

from packprop.testing.extensions import check_extension
from packprop.testing.models import check_model
from packprop.testing.report import CheckFailed, Comparison, Report
from packprop.testing.uses import check_use

__all__ = ["CheckFailed", "Comparison", "Report", "check_extension", "check_model", "check_use"]
