"""Compiled graphs run below autograd: they have forward and backward apart, and nothing in them asks for gradients.

Each operator then goes to its kernel directly. torch's functional collectives have an autograd formula in Python, which
would take longer than starting them.

`_AutoDispatchBelowAutograd` is private, as of torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def below_autograd(compiled: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """What `compiled` does, which takes a list of arguments and may empty it."""

    def run(arguments: list[Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return compiled(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]  # so that AOTAutograd passes a list
    return run
