"""Comparisons: what ranks are about to do, and the keys of a store in which they compare it.

The keys of a comparison have the same names whoever writes them, and are deleted when all ranks have read its result.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from ..errors import RankError

SAME = "same"
"""The result of a comparison without a difference."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a statement.

    Attributes:
        text: what has to be the same on all ranks.
        source: where in the user's code it comes from, if that is known.
    """

    text: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.text}, for {self.source}" if self.source else self.text


Statement = Sequence[Line]


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of some ranks in a store.

    Every method is one request, which does not wait for other ranks. No value is empty, or a question mark.
    """

    store: Any
    name: str

    def peek(self, key: str) -> str | None:
        """What the key holds; None if there is no such key. (`get` would wait for one.)"""
        found = self.store.compare_set(self._full(key), "?", "?").decode()
        return None if found == "?" else str(found)

    def put_first(self, key: str, value: str) -> str:
        """What the key holds, which from now on is `value` if there was no such key."""
        return str(self.store.compare_set(self._full(key), "", value).decode())

    def replace(self, key: str, expected: str, value: str) -> str:
        """What the key holds, which from now on is `value` if it was `expected`, or there was no such key for ""."""
        return str(self.store.compare_set(self._full(key), expected, value).decode())

    def put(self, key: str, value: str) -> None:
        self.store.set(self._full(key), value)

    def append(self, key: str, value: str) -> None:
        self.store.append(self._full(key), value)

    def add(self, key: str) -> int:
        """How often this has been called for the key."""
        return int(self.store.add(self._full(key), 1))

    def delete(self, key: str) -> None:
        self.store.delete_key(self._full(key))

    def news(self) -> str:
        found: str = self.store.compare_set("fsdp_compile/news", "?", "?").decode()
        return found

    def add_news(self) -> None:
        """After something was written that others have to know; it is no news to those that wait for it."""
        self.store.add("fsdp_compile/news", 1)

    def _full(self, key: str) -> str:
        return f"{self.name}/{key}"


@dataclasses.dataclass(frozen=True)
class Raised:
    """How many graphs a rank had begun to run when it raised what."""

    rank: int
    num_run: int
    text: str

    def to_json(self) -> str:
        return json.dumps([self.rank, self.num_run, self.text])

    @classmethod
    def from_json(cls, text: str | None) -> Raised | None:
        return None if text is None else cls(*json.loads(text))


@dataclasses.dataclass(frozen=True)
class Opened:
    """Which rank came to a comparison first, how many graphs it had begun to run, and the digest of its statement."""

    number: int
    rank: int
    num_run: int
    digest: str

    @property
    def statement(self) -> str:
        """The key of what it said."""
        return f"{self.number}/statement/{self.rank}"

    def to_json(self) -> str:
        return json.dumps(dataclasses.astuple(self))

    @classmethod
    def from_json(cls, text: str) -> Opened:
        return cls(*json.loads(text))


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a rank has decided for all, or the error that it raised, by name; of nobody where the ranks differ."""

    text: str
    error: str | None = None
    rank: int | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.astuple(self))

    @classmethod
    def from_json(cls, text: str) -> Decision:
        return cls(*json.loads(text))


@dataclasses.dataclass(frozen=True)
class ComparisonKeys:
    """The keys of one comparison in the store.

    `first` is who came first, with the digest of its statement; who comes with another digest writes to `result` how
    the statements differ. All are appended to `came`, and counted in `count`; the last of them knows
    that all have said the same, unless there is a result. Then `count` goes on with those that have read the result,
    and the last of these deletes the keys.

    Where something is to be decided, one of them writes a decision, and what they read is that, or how they differ.
    """

    number: int
    keys: Keys
    num_ranks: int

    def arrive(self, rank: int, num_run: int, statement: Statement) -> None:
        own = Opened(self.number, rank, num_run, digest_of(statement))
        first = self.opened() or self._open(own, statement)
        if first.digest != own.digest and (said := self.statement(first)) is not None:
            self.keys.put_first(self._key("result"), difference(first.rank, said, rank, statement))
        self.keys.append(self._key("came"), f"{rank} ")
        if self.keys.add(self._key("count")) == self.num_ranks:
            self.keys.put_first(self._key("result"), SAME)

    def _open(self, own: Opened, statement: Statement) -> Opened:
        """Who came first: this rank, or another that did so meanwhile."""
        self.keys.put(own.statement, _to_json(statement))  # before others know of it
        first = Opened.from_json(self.keys.put_first(self._key("first"), own.to_json()))
        if first == own:
            self.keys.add_news()
        else:
            self.keys.delete(own.statement)
        return first

    def opened(self) -> Opened | None:
        """By whom, if by anyone."""
        first = self.keys.peek(self._key("first"))
        return None if first is None else Opened.from_json(first)

    def statement(self, first: Opened) -> Statement | None:
        """Of the rank that came first; None once all ranks have left."""
        found = self.keys.peek(first.statement)
        return None if found is None else _of_json(found)

    def result(self) -> str | None:
        return self.keys.peek(self._key("result"))

    def absent(self, ranks: Iterable[int]) -> list[int]:
        came = {int(rank) for rank in (self.keys.peek(self._key("came")) or "").split()}
        return [rank for rank in ranks if rank not in came]

    def leave(self) -> None:
        """Once this rank has read the result."""
        if self.keys.add(self._key("count")) == 2 * self.num_ranks:
            if (first := self.opened()) is not None:
                self.keys.delete(first.statement)
            self._delete("first", "came", "result", "count", "decision")

    def decide(self, decision: Decision) -> None:
        self.keys.put_first(self._key("decision"), decision.to_json())

    def decision(self) -> Decision | None:
        """What was decided, once it was; that the statements differ, once that is known."""
        result = self.result()
        if result is not None and result != SAME:
            return Decision(result, RankError.__name__)
        found = self.keys.peek(self._key("decision"))
        return None if found is None else Decision.from_json(found)

    def _key(self, name: str) -> str:
        return f"{self.number}/{name}"

    def _delete(self, *names: str) -> None:
        for name in names:
            self.keys.delete(self._key(name))


def digest_of(statement: Statement) -> str:
    return hashlib.sha256("\n".join(line.text for line in statement).encode()).hexdigest()


def _to_json(statement: Statement) -> str:
    return json.dumps([[line.text, line.source] for line in statement])


def _of_json(text: str) -> Statement:
    return [Line(*line) for line in json.loads(text)]


def difference(first_rank: int, first: Statement, other_rank: int, other: Statement) -> str:
    """The first line in which two statements differ."""
    pairs = enumerate(itertools.zip_longest(first, other, fillvalue=Line("nothing")), 1)
    number, (line, other_line) = next((number, pair) for number, pair in pairs if pair[0].text != pair[1].text)
    lines = sorted([(first_rank, line), (other_rank, other_line)], key=itemgetter(0))
    return "\n".join(
        (
            " and ".join(f"rank {rank}" for rank, _ in lines) + f" differ, first in number {number}:",
            *(f"  rank {rank}: {line}" for rank, line in lines),
            "All ranks have to build the same model, to shard it alike, to train and to evaluate it together, and to "
            "take the same branches in its forward",
        )
    )
