"""What a person sees while something is compiled, when something is odd, and after Ctrl-C."""

import contextlib
import functools
import io
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_compile import progress
from fsdp_compile.progress import Account, Phase, phase

ROOT = Path(__file__).parents[1]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "_UNMENTIONED", 0.05)
    monkeypatch.setattr(progress, "_SILENCE", 0.1)
    monkeypatch.setattr(progress, "_TICK", 0.01)


@pytest.fixture
def stderr(monkeypatch, capsys):
    monkeypatch.setattr(progress.LOGGER, "hasHandlers", lambda: False)  # pytest listens to every logger
    return lambda: capsys.readouterr().err.splitlines()


def test_seconds_of_a_phase_are_without_those_inside_it():
    account = Account("GPT", clock := Clock())
    account.enter(Phase("tracing"))
    clock.now = 3
    account.enter(compiling := Phase("compiling the forward"))
    clock.now = 15
    assert account.now() == "GPT: compiling the forward, 12 s"
    compiling.remark = " (cached for next time)"
    account.leave()
    clock.now = 16
    account.leave()
    assert account.in_all() == "GPT: tracing 4 s, compiling the forward 12 s (cached for next time); 16 s in all"


def test_what_is_short_is_not_mentioned(stderr):
    with phase("tracing", of="GPT"):
        pass
    assert stderr() == []


def test_lines_where_there_is_no_terminal(impatient, stderr):
    with phase("tracing", of="GPT"):
        time.sleep(0.4)
    *during, last = stderr()
    assert len(during) >= 2 and set(during) == {"fsdp_compile: GPT: tracing, 0 s"}
    assert last == "fsdp_compile: GPT: tracing 0 s; 0 s in all"


def test_other_ranks_and_loggers_that_are_quiet_say_nothing(impatient, stderr, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        with phase("tracing"):
            time.sleep(0.2)
    monkeypatch.setattr(progress.LOGGER, "level", logging.WARNING)
    with phase("tracing"):
        time.sleep(0.2)
    assert stderr() == []


def test_who_listens_to_the_logger_is_told_there(impatient, caplog, capsys):
    with caplog.at_level(logging.DEBUG, "fsdp_compile"), phase("tracing", of="GPT"):
        time.sleep(0.2)
    said = [(record.levelname, record.message) for record in caplog.records]
    assert said[0] == ("INFO", "GPT: tracing, 0 s") and said[-1][0] == "DEBUG"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("closed", [True, None])
def test_without_stderr_nothing_is_said(impatient, monkeypatch, closed):
    monkeypatch.setattr(progress.LOGGER, "hasHandlers", lambda: False)
    monkeypatch.setattr(sys, "stderr", None if closed is None else io.StringIO())
    if closed:
        sys.stderr.close()
    with phase("tracing"):
        time.sleep(0.2)


def test_an_error_ends_it_without_a_last_line(impatient, stderr):
    with pytest.raises(ValueError), phase("tracing"):
        time.sleep(0.2)
        raise ValueError("no")
    assert all("in all" not in line for line in stderr())
    assert progress._here.account is None


def on_terminal(program):
    """What a program prints on a terminal."""
    main, side = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=side, stderr=side, env=environment()):
        os.close(side)
        said = b""
        while data := read(main):
            said += data
    return said.decode()


def read(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:  # nobody has it open any more
        return b""


def environment(**variables):
    return {**os.environ, "TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": str(ROOT), **variables}


def test_a_line_lives_in_a_terminal():
    said = on_terminal(
        "import time\n"
        "from fsdp_compile.progress import phase\n"
        "with phase('tracing', of='GPT'):\n"
        "    time.sleep(2.2)\n"
        "    with phase('compiling the forward'): time.sleep(1)\n"
        "print('done')\n"
    )
    lines = said.split("\r\n")
    assert re.search(r"fsdp_compile: GPT: tracing 1 s\r\x1b\[2K", lines[0])  # and the next takes its place
    *_, last, done, rest = lines
    assert last.endswith("fsdp_compile: GPT: tracing 2 s, compiling the forward 1 s; 3 s in all")
    assert (done, rest) == ("done", "")


STEPS = """
import time
import torch
from torch import nn
from fsdp_compile import fsdp_compile, progress

progress._UNMENTIONED = 0.0
model = fsdp_compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), backend="aot_eager")
loss = model(torch.ones(2, 4)).sum()
loss.backward()
print("first step", flush=True)
begin = time.monotonic()
while time.monotonic() < begin + 60:
    model(torch.ones(2, 4)).sum().backward()
"""


def test_the_first_step_is_told_and_ctrl_c_ends_a_later_one_in_one_line(tmp_path):
    (tmp_path / "train.py").write_text(STEPS)
    command = [sys.executable, tmp_path / "train.py"]
    pipe = subprocess.PIPE
    # A shell's jobs in the background ignore the signal, and what they start does, too.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment(), preexec_fn=heard) as run:
        assert run.stdout.readline() == "first step\n"
        said, num_pressed = None, 0
        while said is None:  # a guard of Dynamo takes what a signal raises inside it for a reason to compile again
            run.send_signal(signal.SIGINT)
            num_pressed += 1
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, said = run.communicate(timeout=5)
    *told, last = said.splitlines()
    assert run.returncode == -signal.SIGINT
    # Anywhere from the line that said "first step" on: the signal may come before that line has returned.
    assert re.fullmatch(rf"fsdp_compile: interrupted at {tmp_path}/train.py:1[1-4]", last)
    assert told and (num_pressed > 1 or all(line.startswith("fsdp_compile: Sequential: ") for line in told))
    assert any(line.endswith("s in all") and "tracing" in line for line in told)


def test_an_interrupt_says_what_it_has_interrupted():
    with pytest.raises(KeyboardInterrupt) as raised, phase("compiling the forward", of="GPT"):
        raise KeyboardInterrupt
    assert raised.value.__notes__ == ["while GPT: compiling the forward, 0 s"]


def test_torch_logs_takes_the_name_of_the_package():
    program = "from fsdp_compile.progress import phase\nwith phase('tracing', of='GPT'): pass"
    command = [sys.executable, "-c", program]
    found = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment(TORCH_LOGS="+fsdp_compile")
    )
    assert found.stderr.count("GPT: tracing 0 s; 0 s in all") == 1


MANUALS = [[], ["plan"], ["build"], ["emulate"], ["report"], ["calibrate"], ["doctor"]]


@pytest.mark.parametrize("command", MANUALS, ids=" ".join)
def test_a_manual_needs_no_torch(command):
    program = (
        "import sys\n"
        "from fsdp_compile.cli.main import main\n"
        "try: main([*sys.argv[1:], '--help'])\n"
        "finally: assert 'torch' not in sys.modules and 'rich' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_the_manuals_have_every_name():
    from fsdp_compile.cli import names
    from fsdp_compile.costs import HARDWARE, OPTIMIZERS

    assert (*HARDWARE,) == names.HARDWARE and (*OPTIMIZERS,) == names.OPTIMIZERS
