"""Agreement: all ranks run the same collectives, or every rank raises an error that says where they differ.

What a rank is about to do is a statement, line by line. A statement that is new to a rank is compared with those of the
others before any of its collectives runs; one that was compared before costs nothing, whenever a rank comes back to it.
Statements go through the store of the process group, not through a collective: the comparison itself cannot hang. What
one rank decides for all (`decided_by_first`) is told in the same way.

A rank can also run what was agreed on while another one is about to run something new (a branch taken on one rank
only), or runs something else that was agreed on (a backward that another rank leaves out), or reads a parameter outside
of graphs that the others do not read. It then stands in a collective that will never be complete. A thread of each
process (`watching.py`) looks for that once a second: how many places each rank has come to, and which (`places`), says
that it is so, without a time limit. A rank that raised something else in its forward or backward, and does not come
back, leaves the others in a collective as well; it says what it raised. The thread ends the groups of this model, and
what waits in them raises.

What a rank asks of the store does not depend on how many ranks there are. While nothing happens, a process asks for one
key a second, for all its agreements: the news, a number that grows with every event. Only when it has grown, a rank
asks what happened, and finds it in keys that have the same names whoever wrote them. The keys of a comparison are
deleted when all ranks have read its result.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from ..errors import CaptureError, ConfigError, RankError, one_line
from ..progress import phase
from . import gloo
from .comparison import SAME, ComparisonKeys, Decision, Keys, Opened, Raised, Statement, difference, digest_of
from .places import Place, Track, Visit, at, parted
from .ranks import all_ranks
from .watching import TICK, watch

T = TypeVar("T")

_LONGEST_PAUSE = 2.0
"""Seconds between two looks of a rank that waits for others, at most; at first it looks more often."""

_LOOKS_OF_ALL = 1000.0
"""Looks a second of all ranks that wait, at most: few ranks look more often than many."""

_HEARS = 4.0
"""Seconds between two times that a rank which waits for others asks for news."""

_LOST = "Connection closed by peer", "Connection reset by peer"
"""What gloo says (torch 2.11 to 2.15) when another process is gone."""

_LATE = "Timed out waiting"
"""What gloo says when a message does not come within the time limit of its group."""

_COURTESY = 1.0
"""Seconds for which a rank lets the first go first."""

_PATIENCE = 10.0
"""Seconds for which a rank waits for one that has raised, before it gives up."""

_MOST_NAMED = 8
"""Ranks that an error names."""


def agreement_of(mesh: DeviceMesh | None) -> Agreement | None:
    """Between the ranks of a mesh, for all models on them; None where there is nobody else."""
    if mesh is None or dist.get_backend(mesh.get_group(0)) == "fake":
        return None
    ranks = all_ranks(mesh)
    known = _agreements.setdefault(dist.group.WORLD, {})
    if ranks not in known:
        known[ranks] = Agreement(ranks, dist.get_rank(), distributed_c10d._get_default_store())
    return known[ranks]


def any_has_raised() -> bool:
    """Whether this rank has not come back to an agreement since it raised; cheap enough for every call of a model."""
    return bool(_not_back)


class Agreement:
    """What some ranks have compared.

    Attributes:
        num_run: how many forwards and backwards with collectives, and collectives outside of graphs, this rank has
            begun to run.
        failure: why the ranks cannot go on together, once they cannot.
        limit: seconds that a rank waits for the others.
        store: of the process group.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, store: Any) -> None:
        self.ranks, self.rank, self.store = ranks, rank, store
        self.num_run = 0
        self.failure: str | None = None
        self.limit: float = store.timeout.total_seconds()
        name = f"fsdp_compile/{hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}"
        self._keys = Keys(store, name)
        self._agreed: set[str] = set()
        self._num_compared = 0
        self._is_comparing = False
        self._groups: set[str] = set()
        self._running: Statement = ()
        self._num_entered = 0
        self._told: str | None = None
        self._telling = threading.Lock()
        self._heard: str | None = None
        self._saw_opened: tuple[str, int] | None = None
        self._raised: Raised | None = None
        self._opened: Opened | None = None
        self._waits_since: float | None = None
        self._visit: Visit | None = None
        self._tracks: dict[str, Track] = {}
        self._compiled: str | None = None
        self._decided: list[ComparisonKeys] = []

    @cached_property
    def job(self) -> str:
        """Another for the same ranks in another job."""
        return self._keys.put_first("job", uuid.uuid4().hex)

    def agree_on_graph(self, statement: Statement, groups: Iterable[str]) -> None:
        """Before a graph runs for the first time; `groups` are the names of the process groups of its collectives.

        Raises:
            RankError: another rank is about to run other collectives, or runs what was agreed on before.
        """
        self._compare_what_was_decided()
        self._raise_failure()
        self._groups.update(groups)
        watch(self)
        if (digest := digest_of(statement)) not in self._agreed:
            self.agree(statement)
            self._agreed.add(digest)

    def agree(self, statement: Statement) -> None:
        """Compare a statement that every rank makes, at this point of its program.

        Raises:
            RankError: it is not the same on all ranks, or a rank has not come within the time limit.
        """
        self._compare_what_was_decided()
        self.come_back()
        with self._comparing() as said:
            said.arrive(self.rank, self.num_run, statement)
            self._await_all(said)

    def _await_all(self, said: ComparisonKeys) -> None:
        result = self._wait_for(said.result, lambda: _absent_text(said.absent(self.ranks), self.rank))
        said.leave()
        if result != SAME:
            raise RankError(result)

    def decided_by_first(self, statement: Statement, make: Callable[[], str]) -> str:
        """What `make` returns on the first rank. The others do not call it: they wait, and are told.

        A rank that compiles what others may wait for waits for nobody but the first, and decides in its place if that
        waits for the same: the ranks compare their statements when it is compiled.

        Args:
            statement: what is to be decided. Every rank makes it, at this point of its program.

        Raises:
            RankError: as `agree`; or, on the other ranks, `make` has raised another error than the following.
            ConfigError, CaptureError: `make` raised it.
        """
        self.come_back()
        with self._comparing() as said:
            said.arrive(self.rank, self.num_run, statement)
            by = f"rank {self.ranks[0]}, which decides for all,"
            told = self._wait_for(
                lambda: said.decision() or (_UNDECIDED if self._decides() else None),
                lambda: f"{by} has not come to a decision",
            )
            raised = None
            if told is _UNDECIDED:
                told, raised = self._decide(said, make)
            self._decided.append(said)
        if self._compiled is None:
            self._compare_what_was_decided()
        if raised is not None:
            raise raised
        if told.error is None:
            return told.text
        if told.error in _ERRORS:
            raise _ERRORS[told.error](told.text)
        raise RankError(f"rank {told.rank}, which decides for all, raised {told.error}: {told.text}")

    def _decides(self) -> bool:
        if self.rank == self.ranks[0]:
            return True
        return self._compiled is not None and self._keys.peek("awaited") == self._compiled

    def _decide(self, said: ComparisonKeys, make: Callable[[], str]) -> tuple[Decision, Exception | None]:
        """What this rank decides, and what it has raised over that; the others wait for an answer, whatever it is."""
        raised = None
        try:
            made = Decision(make(), rank=self.rank)
        except BaseException as e:
            made = Decision(str(e), type(e).__name__, self.rank)
            if not isinstance(e, Exception):
                raise
            raised = e
        finally:
            said.decide(made)
        return made, raised

    def _compare_what_was_decided(self) -> None:
        while self._decided:
            self._is_comparing = True
            try:
                self._await_all(self._decided.pop())
            finally:
                self._is_comparing = False

    def await_compiled(self, call: str) -> None:
        """Before this rank may wait for one that compiles a call of this name, and decides for the first in it.

        The first rank goes first, if it comes soon: it is the one whose progress and logs are looked at.
        """
        if self.rank == self.ranks[0]:
            self._keys.put("awaited", call)
            return
        begin = time.monotonic()
        while self._keys.peek("awaited") != call and time.monotonic() - begin < _COURTESY:
            time.sleep(0.01)

    @contextlib.contextmanager
    def compiling(self, call: str | None) -> Iterator[None]:
        """While this rank compiles a call that others may wait for; None: they do not."""
        before, self._compiled = self._compiled, call
        try:
            yield
        finally:
            self._compiled = before

    @contextlib.contextmanager
    def running(self, statement: Statement = (), place: Place | None = None) -> Iterator[None]:
        """While a graph with collectives runs, or a collective outside of graphs.

        Args:
            statement: of the graph, if it is a forward.
            place: where its collectives are, if it has any: a forward may leave them to its backward.

        Raises:
            RankError: the ranks have parted, before this or meanwhile.
        """
        self.come_back()
        if statement or place is not None:
            self._running = statement
            self.num_run += 1
        if place is not None:
            self._come_to(place)
        self._num_entered += 1
        try:
            with at(place) if place is not None else contextlib.nullcontext():
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
                    f"fewer batches; rank {self.rank} is in {self._visit}"
                )
                raise RankError(text) from e
            if _LATE in str(e):
                text = (
                    f"a rank that rank {self.rank} waits for has not come within the time limit of the process group: "
                    "all ranks have to call the model as often, and to go backward as often; "
                    f"rank {self.rank} is in {self._visit}"
                )
                raise RankError(text) from e
            raise
        finally:
            self._num_entered -= 1

    def _come_to(self, place: Place) -> None:
        self._visit = Visit.of(place)
        for group in place.groups:
            if (track := self._tracks.get(group)) is None:
                track = self._tracks[group] = Track(self.rank, partial(self._keys.replace, f"place/{group}"))
                self._groups.add(group)
                watch(self)
            track.come_to(self._visit)

    def tell(self, error: Exception) -> None:
        """Say what this rank raised: others may wait for it. One rank's error is enough for them.

        Raises:
            RuntimeError: the store is gone.
        """
        if self.failure is None and self._told is None:
            watch(self)
            self._told = Raised(self.rank, self.num_run, one_line(error)).to_json()
            _not_back.add(self)
            self._tell_if_nobody_else_does()

    def come_back(self) -> None:
        """Before this rank takes part again: what it raised is no longer what others wait for.

        Raises:
            RankError: the ranks have parted.
        """
        self._raise_failure()
        if self._told is not None:
            with self._telling:
                is_what_others_see = self._keys.peek("raised") == self._told
                self._told = None
                _not_back.discard(self)
                if is_what_others_see:
                    self._keys.delete("raised")
                    self._keys.add_news()  # who has raised as well takes the place

    def look(self, news: str | None = None) -> None:
        """See whether the ranks have parted; called by the thread.

        Args:
            news: if they have been asked for, for several agreements.
        """
        number, num_run, running = self._num_compared, self.num_run, self._running
        if not self.is_to_look:
            return
        self._hear(self.news() if news is None else news, number)
        opened = self._opened
        if opened is not None and opened.number == number and opened.num_run < num_run:
            # Still at the same comparison, this rank has run something else where others are about to run what is new.
            self._listen()  # others may have found the same
            statement = None if self.failure else self._comparison_number(number).statement(opened)
            if statement is not None and self._num_compared == number and not self._is_comparing:
                self._say_and_part(self._difference_from(opened.rank, statement, running))
        for track in list(self._tracks.values()):
            if (difference := track.difference()) is not None:
                self._say_and_part(difference)
        self._look_for_the_absent()

    def _difference_from(self, rank: int, statement: Statement, running: Statement) -> str:
        """Of what another rank is about to run from what this one is running."""
        if running or self._visit is None:
            return difference(rank, statement, self.rank, running)
        begins = f"about to begin what it has not run before: {'; '.join(map(str, statement[:2]))}"
        return parted({rank: begins, self.rank: str(self._visit)})

    @property
    def is_to_look(self) -> bool:
        """Whether the thread has to look: a rank that compares does so itself."""
        return not self._is_comparing and self.failure is None

    def news(self) -> str:
        """How much has happened; the same key for all agreements of a store."""
        return self._keys.news()

    def _hear(self, news: str, number: int) -> None:
        """If something has happened since, ask what."""
        if news != self._heard:
            self._listen()
            if self.failure is not None:
                return
            self._tell_if_nobody_else_does()
            self._raised = Raised.from_json(self._keys.peek("raised"))
            self._heard = news
        if (news, number) != self._saw_opened and not self._is_comparing:
            self._opened = self._comparison_number(number).opened()
            self._saw_opened = news, number

    def _tell_if_nobody_else_does(self) -> None:
        with self._telling:  # the thread would say again what this rank has just come back from
            if self._told is not None and self._keys.put_first("raised", self._told) == self._told:
                self._keys.add_news()

    def _look_for_the_absent(self) -> None:
        """See whether this rank waits for one that has raised, which this one may have done as well."""
        raised, is_waiting = self._raised, self._num_entered or self._is_comparing
        waits = raised is not None and self._told is None and (is_waiting or raised.num_run < self.num_run)
        if raised is None or not waits:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = time.monotonic()
        elif time.monotonic() - self._waits_since > _PATIENCE and self._keys.peek("raised") == raised.to_json():
            self._say_and_part(f"rank {raised.rank} has not come back since it raised {raised.text}")

    def _say_and_part(self, failure: str) -> None:
        """Part, for this reason or one that another rank has found before."""
        failure = self._keys.put_first("failure", failure)
        self._keys.add_news()
        self._part(failure)

    def _listen(self) -> None:
        """Part if another rank has said that the ranks have parted."""
        if self.failure is None and (failure := self._keys.peek("failure")) is not None:
            self._part(failure)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise RankError(self.failure)

    def _part(self, failure: str) -> None:
        """End the process groups: what waits in them raises."""
        self.failure = failure
        for name in self._groups:
            with contextlib.suppress(RuntimeError):  # it has ended before
                torch._C._distributed_c10d._resolve_process_group(name).abort()  # type: ignore[arg-type]
            gloo.close(name)
        self._groups.clear()

    def _comparison_number(self, number: int) -> ComparisonKeys:
        return ComparisonKeys(number, self._keys, len(self.ranks))

    @contextlib.contextmanager
    def _comparing(self) -> Iterator[ComparisonKeys]:
        """While this rank waits for others in the next comparison."""
        self._raise_failure()
        said, self._is_comparing = self._comparison_number(self._num_compared), True
        try:
            yield said
        finally:
            self._num_compared += 1
            self._is_comparing = False

    def _wait_for(self, ask: Callable[[], T | None], what_is_wrong: Callable[[], str]) -> T:
        """What `ask` returns, as soon as that is not None.

        A store's own waiting is not used: it keeps other threads from the store, and each time limit is printed.

        Args:
            what_is_wrong: what to say when time is over.
        """
        with phase("waiting for the other ranks"):
            return self._asked_until_told(ask, what_is_wrong)

    def _asked_until_told(self, ask: Callable[[], T | None], what_is_wrong: Callable[[], str]) -> T:
        begin, hears_at = time.monotonic(), TICK
        longest_pause = min(max(len(self.ranks) / _LOOKS_OF_ALL, 0.02), _LONGEST_PAUSE)
        while (found := ask()) is None:
            waited = time.monotonic() - begin
            if waited >= min(hears_at, self.limit):
                hears_at = waited + _HEARS
                self._hear(self.news(), self._num_compared)
            if self.failure is None:
                self._look_for_the_absent()
            if self.failure is None and waited > self.limit:
                self._say_and_part(
                    f"{what_is_wrong()} within {self.limit:.0f} s: all ranks have to shard the same models and to call "
                    "them as often (the time limit is that of the store of the process group)"
                )
            self._raise_failure()
            time.sleep(min(max(waited * 2 / 3, 4e-3), longest_pause))
        return found


_ERRORS: dict[str, type[Exception]] = {each.__name__: each for each in (ConfigError, CaptureError, RankError)}
"""What a rank may raise for all."""

_UNDECIDED = Decision("")
"""What is to be decided by the rank that asks."""


def _absent_text(absent: Sequence[int], rank: int) -> str:
    named = ", ".join(map(str, absent[:_MOST_NAMED]))
    if len(absent) > _MOST_NAMED:
        named += f" and {len(absent) - _MOST_NAMED} more"
    have = f"rank {named} has" if len(absent) == 1 else f"ranks {named} have"
    return f"{have} not come to where rank {rank} is"


_not_back: weakref.WeakSet[Agreement] = weakref.WeakSet()
"""Those that this rank has told what it raised, and not come back to since."""

_agreements: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Agreement]] = weakref.WeakKeyDictionary()
"""By the group of all ranks, and the ranks that agree."""
