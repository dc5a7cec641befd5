"""Watching: a thread of the process that looks, for all its agreements, whether the ranks have parted."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch.distributed as dist

TICK = 1.0
"""Seconds between two looks of the thread."""


class Watched(Protocol):
    """An agreement, as the thread knows it."""

    store: Any

    @property
    def is_to_look(self) -> bool: ...

    def news(self) -> str: ...

    def look(self, news: str | None = None) -> None: ...


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(agreement: Watched) -> None:
    """From now on the thread looks after this agreement, too, as long as something else keeps it alive."""
    global _thread
    with _lock:
        _watched.add(agreement)
        if _thread is None or not _thread.is_alive():
            # Not a daemon: one that Python ends in the middle of a call takes the process with it.
            _thread = threading.Thread(target=_look_after_all, name="fsdp_compile", daemon=False)
            _thread.start()


def _look_after_all() -> None:
    main = threading.main_thread()
    while True:
        main.join(TICK)
        with _lock:
            watched = list(_watched)
        if not (main.is_alive() and watched and dist.is_initialized()):
            return
        _look_after(watched)
        del watched


def _look_after(watched: Iterable[Watched]) -> None:
    """One look of each, with one request for all of them while nothing happens."""
    news: dict[Any, str] = {}
    for agreement in watched:
        try:
            if agreement.is_to_look and agreement.store not in news:
                news[agreement.store] = agreement.news()
            agreement.look(news.get(agreement.store))
        except RuntimeError:  # the store is gone, and with it whoever could be told
            with _lock:
                _watched.discard(agreement)
