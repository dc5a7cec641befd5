"""Places: where a rank is in the sequence of its collectives, which has to be the same on all ranks of a process group.

A compiled forward, a compiled backward, and a collective outside of graphs are a place each. A rank numbers the places
that it comes to with the others of a group, and chains their digests: two ranks with the same chain at a number have
run the same up to there. Nothing of this needs the store while ranks move on. A rank that stands still says in the
store where it is, if no other one has come further, and compares itself with what is there: one request, however many
ranks there are. What was run does not change any more, so that a difference is certain, whenever it was said; and
whoever is not further than what it has compared itself with has nothing more to ask.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import json
import linecache
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

_KEPT = 64
"""Places that a rank remembers, to compare them with those of others."""

_SAID = 16
"""Places that a rank says in the store: those behind it, for ranks that have not come as far."""

_NOT_USERS = (
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
    contextlib.__file__,
    "<",
)
"""How the paths of code begin that no user has written."""

_MASK = (1 << 64) - 1


@dataclasses.dataclass(frozen=True)
class Place:
    """One side of a compiled graph, or a collective outside of graphs.

    Attributes:
        text: what it is, for people.
        digest: of all that has to be the same on all ranks.
        groups: the names of the process groups of its collectives.
        source: where in the user's code it comes from, if that is known.
    """

    text: str
    digest: int
    groups: tuple[str, ...]
    source: str = ""

    @classmethod
    def of(cls, text: str, groups: Iterable[str], *, same: Iterable[str] = (), source: str = "") -> Place:
        """A place with this text, which other ranks take for the same if `same` is, too."""
        digest = hashlib.sha256("\n".join([text, *same]).encode()).digest()
        return cls(text, int.from_bytes(digest[:8], "big"), tuple(groups), source)


@functools.lru_cache(maxsize=1 << 14)
def outside_of_graphs(what: str, *groups: str, same: str = "") -> Place:
    """The place of collectives that no compiled graph has; another one where another text has to be the same."""
    return Place.of(f"{what}, outside of compiled graphs", groups, same=[same] if same else [])


def chained(chain: int, number: int) -> int:
    """A chain of 64 bits, with one more number."""
    mixed = ((chain ^ number) * 0x9E3779B97F4A7C15 + 1) & _MASK
    return mixed ^ (mixed >> 29)


_running: contextvars.ContextVar[int] = contextvars.ContextVar("fsdp_compile_place", default=0)


@contextlib.contextmanager
def at(place: Place) -> Iterator[None]:
    """Collectives that begin inside belong to this place."""
    token = _running.set(place.digest)
    try:
        yield
    finally:
        _running.reset(token)


def running_digest() -> int:
    """Of the place that this thread is at; 0 outside of all."""
    return _running.get()


@dataclasses.dataclass(frozen=True)
class Visit:
    """A rank's coming to a place.

    Attributes:
        line: file and number, where the place does not say which.
    """

    place: Place
    line: tuple[str, int] | None

    @classmethod
    def of(cls, place: Place) -> Visit:
        return cls(place, None if place.source else _line_of_user())

    def __str__(self) -> str:
        source = self.place.source
        if self.line is not None:
            path, number = self.line
            source = f"{path}:{number}: {linecache.getline(path, number).strip()}"
        return f"{self.place.text}, for {source}" if source else self.place.text


class _Entry(NamedTuple):
    number: int
    chain: int
    visit: Visit


@dataclasses.dataclass(frozen=True)
class _Said:
    """What a rank has said: number, chain and text of the last places that it has come to."""

    rank: int
    steps: list[tuple[int, int, str]]

    @classmethod
    def from_json(cls, text: str) -> _Said:
        return cls(*json.loads(text)) if text else cls(0, [])

    @property
    def number(self) -> int:
        return self.steps[-1][0] if self.steps else 0


class Track:
    """The places that a rank has come to with the others of a group, and their comparison with those of the others."""

    def __init__(self, rank: int, replace: Callable[[str, str], str]) -> None:
        """`replace` (expected, value) writes what is said by one rank of the group, as `compare_set` of a store."""
        self._rank, self._replace = rank, replace
        self._steps: deque[_Entry] = deque(maxlen=_KEPT)
        self._number = self._chain = 0
        self._number_seen = self._number_compared = 0
        self._said = ""

    def come_to(self, visit: Visit) -> None:
        """Note that this rank begins what is at a place."""
        self._chain = chained(self._chain, visit.place.digest)
        self._steps.append(_Entry(self._number + 1, self._chain, visit))
        self._number += 1

    def difference(self) -> str | None:
        """Where this rank and another one have parted, if they are known to have. The thread asks once a tick.

        The store is asked once a place, at which this rank has stood since the last tick.
        """
        number, before, self._number_seen = self._number, self._number_seen, self._number
        if number != before or number == self._number_compared:
            return None
        steps = list(self._steps)
        ours = json.dumps([self._rank, [[step.number, step.chain, str(step.visit)] for step in steps[-_SAID:]]])
        while True:
            said = _Said.from_json(self._said)
            if (difference := self._difference_from(said, steps)) is not None:
                return difference
            if said.number >= steps[-1].number:
                self._number_compared = number
                return None
            self._said = self._replace(self._said, ours)

    def _difference_from(self, said: _Said, steps: list[_Entry]) -> str | None:
        step_of_number = {step.number: step for step in steps}
        for number, chain, text in said.steps:
            ours = step_of_number.get(number)
            if ours is not None and ours.chain != chain:
                return parted({said.rank: text, self._rank: str(ours.visit)})
        return None


def parted(text_of_rank: dict[int, str]) -> str:
    """What two ranks run that should run the same."""
    ranks = sorted(text_of_rank)
    return "\n".join(
        (
            " and ".join(f"rank {rank}" for rank in ranks) + " have parted: each waits for the other in what that one "
            "does not run:",
            *(f"  rank {rank}: {text_of_rank[rank]}" for rank in ranks),
            "All ranks have to call the same models in the same order, to go backward through the same of these calls, "
            "and to read the same parameters where nothing is compiled",
        )
    )


def _line_of_user() -> tuple[str, int] | None:
    """The innermost line that runs and is neither torch's nor ours."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_NOT_USERS):
            return path, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None
