"""Costs: what a rewritten graph takes of a described machine, in seconds and in bytes.

`predict` is the way in: kernels (`nodes`) and messages (`collectives`) of the described `hardware` on one `timeline`,
and what is in `memory` meanwhile. `explain` puts it into words, `formulas` into expressions.
"""

from .explain import Explanation, explain
from .formulas import DEFINITIONS, Formula, formulas_of
from .hardware import HARDWARE, Hardware, Link, find_hardware
from .optimizers import OPTIMIZERS
from .predict import Prediction, predict

__all__ = [
    "DEFINITIONS",
    "HARDWARE",
    "OPTIMIZERS",
    "Explanation",
    "Formula",
    "Hardware",
    "Link",
    "Prediction",
    "explain",
    "find_hardware",
    "formulas_of",
    "predict",
]
