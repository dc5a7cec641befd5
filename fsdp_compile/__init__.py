"""Fully sharded data parallelism as a compiler pass: `fsdp_compile(model)`."""

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
