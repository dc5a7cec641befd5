"""What is registered on modules anywhere in the process, by the hooks that torch has for it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.nn as nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from .wrappers import refuse_registration


@dataclasses.dataclass
class Registrations:
    """How many parameters and modules were registered since `registrations` was first called.

    What a traced forward registers, as the slice of a container does, is of no model: counted, it would be guarded on,
    and the forward compiled again whenever anything is registered.
    """

    count: int = 0

    def note(self, module: nn.Module, name: str, registered: Any) -> None:
        if not torch.compiler.is_compiling():
            self.count += 1


@functools.cache
def registrations() -> Registrations:
    """Those of this process. From the first call on, wrappers that take a sharded module are refused."""
    found = Registrations()
    register_module_parameter_registration_hook(found.note)
    register_module_module_registration_hook(found.note)
    register_module_module_registration_hook(refuse_registration)
    return found
