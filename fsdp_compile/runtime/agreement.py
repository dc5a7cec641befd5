"""Agreement: all ranks run the same collectives, or every rank raises an error that says where they differ.

What a rank is about to do is a statement, line by line. A statement that is new to a rank is compared with those of the
others before any of its collectives runs; one that was compared before costs nothing, whenever a rank comes back to it.
Statements go through the store of the process group, not through a collective: the comparison itself cannot hang.

A rank can also run what was agreed on while another one is about to run something new (a branch taken on one rank
only). It then stands in a collective that will never be complete. A thread of each process looks for that once a
second: how many graphs each rank has run says that it is so, without a time limit. A rank that raised something else
in its forward or backward, and does not come back, leaves the others in a collective as well; it says what it raised.
The thread ends the groups of this model, and what waits in them raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from ..errors import RankError, one_line
from . import gloo

_TICK = 1.0
"""Seconds between two looks of the thread."""

_LOST = "Connection closed by peer", "Connection reset by peer"
"""What gloo says (torch 2.11 to 2.13) when another process is gone."""

_LATE = "Timed out waiting"
"""What gloo says when a message does not come within the time limit of its group."""

_PATIENCE = 10.0
"""Seconds for which a rank waits for one that has raised, before it gives up."""


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


def agreement_of(mesh: DeviceMesh | None) -> Agreement | None:
    """Between the ranks of a mesh, for all models on them; None where there is nobody else."""
    if mesh is None or dist.get_backend(mesh.get_group(0)) == "fake":
        return None
    with unset_fake_temporarily():  # of the compilation that asks; private as of torch 2.11 to 2.13
        ranks = tuple(mesh.mesh.flatten().tolist())
    known = _agreements.setdefault(dist.group.WORLD, {})
    if ranks not in known:
        known[ranks] = Agreement(ranks, dist.get_rank(), distributed_c10d._get_default_store())
    return known[ranks]


class Agreement:
    """What some ranks have compared.

    Attributes:
        num_run: how many graphs with collectives this rank has begun to run.
        failure: why the ranks cannot go on together, once they cannot.
        limit: seconds that a rank waits for the others.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, store: Any) -> None:
        self.ranks, self.rank = ranks, rank
        self.num_run = 0
        self.failure: str | None = None
        self.limit: float = store.timeout.total_seconds()
        name = f"fsdp_compile/{hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}"
        self._store = distributed_c10d.PrefixStore(name, store)
        self._agreed: set[str] = set()
        self._num_compared = 0
        self._is_comparing = False
        self._groups: set[str] = set()
        self._running: Statement = ()
        self._num_entered = 0
        self._has_told = False
        self._waits_since: float | None = None

    def agree_on_graph(self, statement: Statement, groups: Iterable[str]) -> None:
        """Before a graph runs for the first time; `groups` are the names of the process groups of its collectives.

        Raises:
            RankError: another rank is about to run other collectives, or runs what was agreed on before.
        """
        self._raise_failure()
        self._groups.update(groups)
        _watch(self)
        if (digest := _digest(statement)) not in self._agreed:
            self.agree(statement)
            self._agreed.add(digest)

    def agree(self, statement: Statement) -> None:
        """Compare a statement that every rank makes, at this point of its program.

        Raises:
            RankError: it is not the same on all ranks, or a rank has not come within the time limit.
        """
        self._raise_failure()
        said, self._is_comparing = _Comparison(self._num_compared, self._store), True
        try:
            said.arrive(self.rank, self.num_run, statement, len(self.ranks))
            if self._wait_for(said, "result") != "same":
                said.name_the_first_difference(self.rank, statement)
                raise RankError(_difference(*said.first(), *_of_json(self._wait_for(said, "other"))))
        finally:
            self._num_compared += 1
            self._is_comparing = False

    @contextlib.contextmanager
    def running(self, statement: Statement = ()) -> Iterator[None]:
        """While a graph with collectives runs; its statement begins a forward.

        Raises:
            RankError: the ranks have parted, before this or meanwhile.
        """
        self._raise_failure()
        if self._has_told:
            self._store.delete_key(_key("raised", self.rank))
            self._has_told = False
        if statement:
            self._running = statement
            self.num_run += 1
        self._num_entered += 1
        try:
            yield
        except Exception as e:
            with contextlib.suppress(RuntimeError):  # the store may be gone, and that is not what is wrong
                self._listen()  # another rank may have ended the groups
                self.tell(e)
            if self.failure is not None:
                raise RankError(self.failure) from e
            if any(lost in str(e) for lost in _LOST):
                text = (
                    f"a rank that rank {self.rank} waits for has ended, or lost its connection: it says why, or had "
                    "fewer batches"
                )
                raise RankError(text) from e
            if _LATE in str(e):
                text = (
                    f"a rank that rank {self.rank} waits for has not come within the time limit of the process group: "
                    "all ranks have to call the model as often, and to go backward as often"
                )
                raise RankError(text) from e
            raise
        finally:
            self._num_entered -= 1

    def tell(self, error: Exception) -> None:
        """Say what this rank raised: others may wait for it.

        Raises:
            RuntimeError: the store is gone.
        """
        if self.failure is None and not self._has_told:
            self._has_told = True
            self._store.set(_key("raised", self.rank), json.dumps([self.num_run, one_line(error)]))
            self._store.set("raised", "")

    def look(self) -> None:
        """See whether the ranks have parted; called by the thread."""
        said, num_run, running = _Comparison(self._num_compared, self._store), self.num_run, self._running
        if self._is_comparing or self.failure is not None:
            return
        self._listen()
        if said.has("count"):
            behind = [rank for rank in self.ranks if said.has("run", rank) and said.num_run_of(rank) < num_run]
            # Still at the same comparison, this rank has run something else where others are about to run what is new.
            if behind and said.number == self._num_compared and not self._is_comparing:
                self._say_and_part(_difference(*said.first(), self.rank, running))
        self._look_for_the_absent()

    def _look_for_the_absent(self) -> None:
        """See whether this rank waits for one that has raised, which others may have done as well."""
        told = _told(self._store, self.ranks) if self._store.check(["raised"]) and not self._has_told else {}
        is_waiting = self._num_entered or self._is_comparing
        waits_for = {rank: text for rank, (num, text) in told.items() if is_waiting or num < self.num_run}
        if not waits_for:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = time.monotonic()
        elif time.monotonic() - self._waits_since > _PATIENCE:
            rank, text = min(waits_for.items())
            self._say_and_part(f"rank {rank} has not come back since it raised {text}")

    def _say_and_part(self, failure: str) -> None:
        self._store.set("failure", failure)
        self._part(failure)

    def _listen(self) -> None:
        """Part if another rank has said that the ranks have parted."""
        if self.failure is None and self._store.check(["failure"]):
            self._part(self._store.get("failure").decode())

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise RankError(self.failure)

    def _part(self, failure: str) -> None:
        """End the process groups: what waits in them raises, on this rank (NCCL) or on those it waits for (gloo)."""
        self.failure = failure
        for name in self._groups:
            with contextlib.suppress(RuntimeError):  # it has ended before
                torch._C._distributed_c10d._resolve_process_group(name).abort()  # type: ignore[arg-type]
            gloo.close(name)
        self._groups.clear()

    def _wait_for(self, said: _Comparison, name: str) -> str:
        deadline, pause = time.monotonic() + self.limit, 1e-3
        while not said.has(name):
            self._listen()
            self._look_for_the_absent()
            if self.failure is None and time.monotonic() > deadline:
                absent = ", ".join(str(rank) for rank in self.ranks if not said.has("run", rank))
                text = (
                    f"rank {absent} has not come to where rank {self.rank} is within {self.limit:.0f} s: all ranks "
                    "have to shard the same models and to call them as often (the time limit is that of the store of "
                    "the process group)"
                )
                self._say_and_part(text)
            self._raise_failure()
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return said.get(name)


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """The keys of one comparison in the store.

    The first rank to arrive says what its statement is. Of the others the store counts digests: whoever comes last
    knows whether all are the same. If they are not, the first that differs from the first one says its statement, too.
    """

    number: int
    store: Any

    def has(self, *names: object) -> bool:
        found: bool = self.store.check([self._key(*names)])
        return found

    def get(self, *names: object) -> str:
        return str(self.store.get(self._key(*names)).decode())

    def arrive(self, rank: int, num_run: int, statement: Statement, num_ranks: int) -> None:
        self.store.set(self._key("run", rank), str(num_run))
        if self.store.add(self._key("arrived"), 1) == 1:
            self.store.set(self._key("first"), _to_json(rank, statement))
        digest = self._key("digest", _digest(statement))
        self.store.add(digest, 1)
        if self.store.add(self._key("count"), 1) == num_ranks:  # all digests have been counted
            num_alike = self.store.add(digest, 0)
            self.store.set(self._key("result"), "same" if num_alike == num_ranks else "different")

    def num_run_of(self, rank: int) -> int:
        return int(self.get("run", rank))

    def first(self) -> tuple[int, Statement]:
        return _of_json(self.get("first"))

    def name_the_first_difference(self, rank: int, statement: Statement) -> None:
        if _digest(statement) != _digest(self.first()[1]) and self.store.add(self._key("others"), 1) == 1:
            self.store.set(self._key("other"), _to_json(rank, statement))

    def _key(self, *names: object) -> str:
        return _key(self.number, *names)


def _key(*names: object) -> str:
    return "/".join(map(str, names))


def _told(store: Any, ranks: Iterable[int]) -> dict[int, tuple[int, str]]:
    """How many graphs a rank had begun to run when it raised what."""
    return {rank: json.loads(store.get(_key("raised", rank))) for rank in ranks if store.check([_key("raised", rank)])}


def _digest(statement: Statement) -> str:
    return hashlib.sha256("\n".join(line.text for line in statement).encode()).hexdigest()


def _to_json(rank: int, statement: Statement) -> str:
    return json.dumps([rank, [[line.text, line.source] for line in statement]])


def _of_json(text: str | bytes) -> tuple[int, Statement]:
    rank, lines = json.loads(text)
    return rank, [Line(*line) for line in lines]


def _difference(first_rank: int, first: Statement, other_rank: int, other: Statement) -> str:
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


# ----------------------------------------------------------------------------------------------------------
# The thread
# ----------------------------------------------------------------------------------------------------------

_agreements: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Agreement]] = weakref.WeakKeyDictionary()
"""By the group of all ranks, and the ranks that agree."""

_watched: weakref.WeakSet[Agreement] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def _watch(agreement: Agreement) -> None:
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
        main.join(_TICK)
        with _lock:
            watched = list(_watched)
        if not (main.is_alive() and watched and dist.is_initialized()):
            return
        for agreement in watched:
            try:
                agreement.look()
            except RuntimeError:  # the store is gone, and with it whoever could be told
                with _lock:
                    _watched.discard(agreement)
        del agreement, watched
