"""What is kept from one start to the next: text files in the user's cache, each whole or not there.

Nothing depends on them but time: where one cannot be read or written, what it would hold is found out again.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from .environment import user_cache


def path_of(name: str) -> Path:
    """Where the file of that name is, if there is one."""
    return user_cache() / name


def kept_text(name: str) -> str | None:
    """What was kept under that name; None if nothing was that can be read."""
    try:
        return path_of(name).read_text()
    except (OSError, UnicodeDecodeError):
        return None


def keep_text(name: str, text: str) -> None:
    """Keep a text under that name, where that is possible."""
    path = path_of(name)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            made.write_text(text)
            made.replace(path)
