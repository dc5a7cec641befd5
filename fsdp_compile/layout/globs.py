"""Names of units and modules: globs over them, and which module holds what."""

from __future__ import annotations

from collections.abc import Container
from fnmatch import fnmatchcase


def is_named(name: str, glob: str) -> bool:
    """Whether `glob` matches the name, or is the name itself, whatever characters that has."""
    return name == glob or fnmatchcase(name, glob)


def innermost(name: str, modules: Container[str]) -> str | None:
    """The name of the innermost of these modules that is `name` or holds it; the root's is ""."""
    while name not in modules:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name
