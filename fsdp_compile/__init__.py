"""Fully sharded data parallelism as a compiler pass: `fsdp_compile(model)`.

A name is imported when it is first asked for: the command line shows its manuals without torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import fsdp_compile, rewrite, shard
    from .errors import CaptureError, CompilationWarning, ConfigError, NonFiniteError, PassError, RankError, VerifyError
    from .graphs import RewrittenGraph, RewrittenGraphs
    from .layout.communication import CommunicationDtype
    from .layout.parts import unwrap_tensor_subclasses
    from .module.communication_state import CommunicationState
    from .module.sharded_module import register_fsdp_forward_method

__all__ = [
    "CaptureError",
    "CommunicationDtype",
    "CommunicationState",
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
    "unwrap_tensor_subclasses",
]

_FILE_OF_NAME = {
    "CommunicationDtype": "layout.communication",
    "CommunicationState": "module.communication_state",
    "RewrittenGraph": "graphs",
    "RewrittenGraphs": "graphs",
    "fsdp_compile": "api",
    "register_fsdp_forward_method": "module.sharded_module",
    "rewrite": "api",
    "shard": "api",
    "unwrap_tensor_subclasses": "layout.parts",
}
"""Of those in `__all__` that are no errors."""


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        importlib.import_module(".api", __name__)  # operators are registered, and the rooms are there as attributes
    if name in __all__:
        found = getattr(importlib.import_module(f".{_FILE_OF_NAME.get(name, 'errors')}", __name__), name)
    elif (found := sys.modules.get(f"{__name__}.{name}")) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
