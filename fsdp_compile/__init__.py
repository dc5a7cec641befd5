"""Fully sharded data parallelism as a compiler pass: `fsdp_compile(model)`.

A name is imported when it is first asked for: the command line shows its manuals without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import fsdp_compile, rewrite, shard
    from .errors import CaptureError, CompilationWarning, ConfigError, NonFiniteError, PassError, RankError, VerifyError
    from .graphs import RewrittenGraph, RewrittenGraphs
    from .module.sharded_module import register_fsdp_forward_method

__all__ = [
    "CaptureError",
    "CompilationWarning",
    "ConfigError",
    "NonFiniteError",
    "PassError",
    "RankError",
    "RewrittenGraph",
    "RewrittenGraphs",
    "VerifyError",
    "fsdp_compile",
    "register_fsdp_forward_method",
    "rewrite",
    "shard",
]

_FILE_OF_NAME = {
    "RewrittenGraph": "graphs",
    "RewrittenGraphs": "graphs",
    "fsdp_compile": "api",
    "register_fsdp_forward_method": "module.sharded_module",
    "rewrite": "api",
    "shard": "api",
}
"""Of those in `__all__` that are no errors."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(".api", __name__)  # whatever is asked for first, operators are registered and rooms loaded
    found = getattr(importlib.import_module(f".{_FILE_OF_NAME.get(name, 'errors')}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
