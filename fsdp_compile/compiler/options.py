"""Options of the compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch._inductor.config

from ..checks import check_bool, check_choice
from ..errors import ConfigError

_BACKENDS = ("inductor", "aot_eager")


@dataclasses.dataclass(frozen=True)
class CompileConfig:
    """What is passed on to torch.compile; `backend` is what compiles the rewritten graphs."""

    backend: str = "inductor"
    fullgraph: bool = False
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, _BACKENDS)
        check_bool("fullgraph", self.fullgraph)
        if self.dynamic is not None and not isinstance(self.dynamic, bool):
            raise ConfigError(f"dynamic is None or a bool, not {self.dynamic!r}")
        if self.options and self.backend != "inductor":
            raise ConfigError(f"options are Inductor's; backend={self.backend!r} has none")

    @property
    def records_cuda_graphs(self) -> bool:
        """Whether Inductor is to record what runs on a GPU: a replay runs the kernels, and no Python between them."""
        asked = (self.options or {}).get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs)
        return self.backend == "inductor" and bool(asked)
