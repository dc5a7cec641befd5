"""Interruption: a program that Ctrl-C ends says so in one line, on the first rank, and shows no page for each rank.

It concerns only what Python would print of a KeyboardInterrupt that nobody catches. Signals are handled as before until
then, and the exit status is what it would be. The traceback is logged, at DEBUG. Private torch API, as of torch 2.11 to
2.15: where Inductor keeps what it generates.
"""

from __future__ import annotations

import signal
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from ..environment import is_first_rank
from ..progress import LOGGER

_Hook = Any  # of sys.excepthook
_OURS = Path(__file__).parents[1]
_OTHERS = (str(_OURS), str(Path(torch.__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "purelib")))


def end_in_one_line() -> None:
    """From now on; where Python, or torch for its ranks, would print the traceback, and no hook of somebody else's."""
    is_ours = isinstance(sys.excepthook, _InOneLine)
    is_default = sys.excepthook is sys.__excepthook__ or sys.excepthook.__module__.startswith("torch.distributed")
    if is_default and not is_ours and not _is_interactive():
        sys.excepthook = _InOneLine(sys.excepthook)


class _InOneLine:
    """A hook for exceptions that nobody catches, in front of the one before."""

    def __init__(self, before: _Hook) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not _is_by_interrupt(error) or _is_interactive():
            self._before(kind, error, traceback)
            return
        in_main = threading.current_thread() is threading.main_thread()
        if in_main:  # torchrun sends a second one, and Python prints those that come while it ends
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        LOGGER.debug("interrupted", exc_info=(kind, error, traceback))
        if is_first_rank() and sys.stderr is not None:
            print(_line(error), file=sys.stderr, flush=True)
        if in_main:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # who asks again does not have to wait


def _is_by_interrupt(error: BaseException | None) -> bool:
    """Whether it is one, or was raised because of one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _line(error: BaseException) -> str:
    where = [f" at {place}" for place in _places(error.__traceback__)]
    return ", ".join([f"fsdp_compile: interrupted{''.join(where[-1:])}", *getattr(error, "__notes__", ())])


def _places(traceback: TracebackType | None) -> Iterator[str]:
    """Where it was in the user's code, the innermost last."""
    not_the_users = ("<", *_OTHERS, cache_dir())
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if not name.startswith(not_the_users):
            yield f"{name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next


def _is_interactive() -> bool:
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")
