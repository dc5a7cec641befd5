"""The errors that users see. Every message names what was found, what was expected and what to do."""

from __future__ import annotations

from .passes.errors import PassError, VerifyError

__all__ = [
    "CaptureError",
    "CompilationWarning",
    "ConfigError",
    "NonFiniteError",
    "PassError",
    "RankError",
    "VerifyError",
]


def one_line(error: BaseException) -> str:
    """Its type, and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


class ConfigError(ValueError):
    """The user asked for something impossible or unsupported. Nothing was changed."""


class CaptureError(RuntimeError):
    """The model could not be traced as one graph."""


class NonFiniteError(RuntimeError):
    """A gradient is infinite or NaN. Every rank raises it, and gradients are left as they are; it names parameters."""


class CompilationWarning(UserWarning):
    """Something was compiled that makes steps slow: a graph that breaks, or one that was compiled again."""


class RankError(RuntimeError):
    """The ranks would not run the same collectives. Every rank raises it; it names who differs, and in what."""
