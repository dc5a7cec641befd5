"""What formulas need beyond + - * /: the same code computes with numbers, and with sympy's expressions (`formulas`)."""

from __future__ import annotations

from typing import Any

import sympy


def largest(*values: Any) -> Any:
    """The largest of numbers, or sympy's Max where one of them is an expression."""
    return sympy.Max(*values) if _is_symbolic(*values) else max(values)


def smallest(*values: Any) -> Any:
    """The smallest of numbers, or sympy's Min where one of them is an expression."""
    return sympy.Min(*values) if _is_symbolic(*values) else min(values)


def equal(a: Any, b: Any) -> Any:
    """Whether two values are equal; a condition for `select` where that depends on symbols."""
    return sympy.Eq(a, b) if _is_symbolic(a, b) else a == b


def select(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where the condition holds, else `no`; sympy's Piecewise where that depends on symbols."""
    if _is_symbolic(condition):
        return sympy.Piecewise((yes, condition), (no, True))
    return yes if condition else no


def _is_symbolic(*values: Any) -> bool:
    return any(isinstance(value, sympy.Basic) for value in values)
