"""Progress: what takes long while something is compiled, said on the first rank.

    with phase("tracing", of="GPT"):
        with phase("planning"):

A line that lives in a terminal, and lines elsewhere: to the logger `fsdp_compile` if somebody listens to it, else to
stderr. What ends within half a second is not mentioned. A level above INFO on that logger makes all of it silent; at
DEBUG every rank logs every phase as it ends.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from .environment import is_first_rank

LOGGER = logging.getLogger("fsdp_compile")

_UNMENTIONED = 0.5
"""Seconds that something may take without being mentioned."""

_SILENCE = 4.0
"""Seconds from one line to the next."""

_WORTH_IT = 0.5  # seconds of a phase that the last line names
_TICK = 0.2


class Phase:
    """What `phase` gives.

    Attributes:
        remark: is put behind its seconds in the end.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.remark = ""


class Account:
    """What one thread is at, and how many seconds it has spent on each phase, without those inside it."""

    def __init__(self, of: str, clock: Any = time.monotonic) -> None:
        self.of, self.clock = of, clock
        self.failed = False
        self._begin = self._since = clock()
        self._open: list[Phase] = []
        self._spent: dict[str, float] = {}
        self._remarks: dict[str, str] = {}
        self._lock = threading.Lock()

    def enter(self, phase: Phase) -> None:
        with self._lock:
            self._settle()
            self._open.append(phase)
            self._spent.setdefault(phase.label, 0.0)

    def leave(self) -> None:
        with self._lock:
            self._settle()
            phase = self._open.pop()
            if phase.remark:
                self._remarks[phase.label] = phase.remark

    def _settle(self) -> None:
        now = self.clock()
        if self._open:
            self._spent[self._open[-1].label] += now - self._since
        self._since = now

    @property
    def is_over(self) -> bool:
        return not self._open

    @property
    def seconds(self) -> float:
        return float(self.clock() - self._begin)

    def now(self) -> str:
        """The phase that it is in, and for how long."""
        with self._lock:
            self._settle()
            label = self._open[-1].label if self._open else ""
            return f"{self._title}{label}, {self._spent.get(label, 0.0):.0f} s"

    def in_all(self) -> str:
        """All phases, when they are over."""
        return f"{self.so_far()}; {self.seconds:.0f} s in all"

    def so_far(self) -> str:
        """All phases, in the order in which they began."""
        with self._lock:
            self._settle()
            shown = self._open[-1].label if self._open else max(self._spent, key=self._spent.__getitem__)
            spent = [
                f"{label} {seconds:.0f} s{self._remarks.get(label, '')}"
                for label, seconds in self._spent.items()
                if seconds >= _WORTH_IT or label == shown
            ]
        return f"{self._title}{', '.join(spent)}"

    @property
    def _title(self) -> str:
        return f"{self.of}: " if self.of else ""


class _Here(threading.local):
    account: Account | None = None
    reporter: _Reporter | None = None


_here = _Here()


@contextlib.contextmanager
def phase(label: str, *, of: str = "") -> Iterator[Phase]:
    """While this thread is at something that may take long, in words that go with seconds: "tracing".

    Args:
        of: the model, in the outermost phase.
    """
    entered = begin(label, of=of)
    try:
        yield entered
    except BaseException as e:
        end(e)
        raise
    end()


def begin(label: str, *, of: str = "") -> Phase:
    """What `phase` does at its beginning, where no context can be."""
    entered = Phase(label)
    if (account := _here.account) is not None:
        account.enter(entered)
        return entered
    account = _here.account = Account(of)
    account.enter(entered)
    _here.reporter = _Reporter(account) if _is_shown() else None
    return entered


def end(error: BaseException | None = None) -> None:
    """What `phase` does at its end. A KeyboardInterrupt is told what it has interrupted."""
    account = _here.account
    assert account is not None, "a phase ends that has not begun"
    account.failed |= error is not None
    if isinstance(error, KeyboardInterrupt) and not hasattr(error, "__notes__"):
        error.add_note(f"while {account.now()}")
    account.leave()
    if not account.is_over:
        return
    reporter, _here.account, _here.reporter = _here.reporter, None, None
    if reporter is not None:
        reporter.end()
    LOGGER.debug(account.in_all())


def _is_shown() -> bool:
    return LOGGER.level <= logging.INFO and is_first_rank()


class _Display(Protocol):
    def show(self, account: Account) -> None: ...

    def close(self, account: Account) -> None: ...


class _Reporter:
    """A thread that says what an account is at, from its first half second on until it is over."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._ended = threading.Event()
        self._display: _Display | None = None
        self._thread = threading.Thread(target=self._report, name="fsdp_compile progress", daemon=True)
        self._thread.start()

    def _report(self) -> None:
        if self._ended.wait(_UNMENTIONED):
            return
        self._display = _display()
        while self._display is not None:
            try:
                self._display.show(self._account)
            except (OSError, ValueError):  # stderr was closed: there is nobody to tell
                self._display = None
            if self._ended.wait(_TICK):
                return

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        if self._display is not None:
            with contextlib.suppress(OSError, ValueError):
                self._display.close(self._account)


def _display() -> _Display | None:
    stderr: Any = sys.stderr
    if LOGGER.isEnabledFor(logging.INFO) and LOGGER.hasHandlers():
        return _Lines(LOGGER.info)
    if stderr is None or stderr.closed:
        return None
    # A line that lives is for who has the terminal alone: rich puts a proxy there while another one does.
    if stderr.isatty() and not isinstance(stderr, FileProxy) and not (console := Console(stderr=True)).is_dumb_terminal:
        return _LiveLine(console)
    return _Lines(_to_stderr)


def _to_stderr(text: str) -> None:
    if (stderr := sys.stderr) is not None:
        stderr.write(f"fsdp_compile: {text}\n")
        stderr.flush()


class _Lines:
    """A line at once, one for each further phase that takes more than a second, and one for every few seconds of it."""

    def __init__(self, write: Any) -> None:
        self._write, self._said_at, self._said = write, time.monotonic() - _UNMENTIONED, ""

    def show(self, account: Account) -> None:
        text, now = account.now(), time.monotonic()
        label, _, seconds = text.rpartition(", ")
        is_new = label != self._said and (not self._said or int(seconds.split()[0]) >= _UNMENTIONED)
        if is_new or now - self._said_at >= _SILENCE:
            self._write(text)
            self._said, self._said_at = label, now

    def close(self, account: Account) -> None:
        if not account.failed:
            self._write(account.in_all())


class _LiveLine:
    """All phases so far in one line of a terminal, which the last text takes the place of."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spinner = Spinner("dots")
        self._live = Live(
            self._spinner,
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # these are the user's
            redirect_stderr=False,
        )
        self._live.start()

    def show(self, account: Account) -> None:
        self._spinner.update(text=Text(f"fsdp_compile: {account.so_far()}", overflow="ellipsis", no_wrap=True))
        self._live.refresh()

    def close(self, account: Account) -> None:
        self._live.stop()
        if not account.failed:
            self._console.print(Text(f"fsdp_compile: {account.in_all()}"), soft_wrap=True)
