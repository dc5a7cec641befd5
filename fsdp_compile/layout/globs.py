"""Globs over names of units and modules."""

from __future__ import annotations

from fnmatch import fnmatchcase


def is_named(name: str, glob: str) -> bool:
    """Whether `glob` matches the name, or is the name itself, whatever characters that has."""
    return name == glob or fnmatchcase(name, glob)
