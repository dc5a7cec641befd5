"""Python's garbage collector while graphs are made, which are many small objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_is_frozen = False
"""Whether objects are frozen: by `set_aside`, or by the user, once that was seen. To count them takes long."""


@contextmanager
def set_aside() -> Iterator[None]:
    """Inside, the collector does not look again and again through what is there before."""
    global _is_frozen
    if _is_frozen or gc.get_freeze_count():
        _is_frozen = True
        yield
        return
    gc.freeze()
    _is_frozen = True
    try:
        yield
    finally:
        gc.unfreeze()
        _is_frozen = False


@contextmanager
def postponed() -> Iterator[None]:
    """Inside, nothing is collected: of what is made there, nearly all lives on."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
