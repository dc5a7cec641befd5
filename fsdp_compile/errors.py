"""The errors that users see. Every message names what was found, what was expected and what to do."""

from __future__ import annotations

from .passes.errors import PassError, VerifyError

__all__ = ["CaptureError", "ConfigError", "PassError", "RankError", "VerifyError"]


class ConfigError(ValueError):
    """The user asked for something impossible or unsupported. Nothing was changed."""


class CaptureError(RuntimeError):
    """The model could not be traced as one graph."""


class RankError(RuntimeError):
    """The ranks would not run the same collectives. Every rank raises it; it names who differs, and in what."""
