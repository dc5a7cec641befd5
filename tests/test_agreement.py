"""Comparisons of statements, by threads in the place of ranks."""

import contextlib
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import CaptureError, ConfigError, RankError, rewrite
from fsdp_compile.compiler.statements import statement_of_graphs
from fsdp_compile.runtime.agreement import Agreement
from fsdp_compile.runtime.comparison import Line

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from agreement import phases

NUM_RANKS = 4


def in_threads(function, store=None):
    """What `function(agreement)` returns, or raises, on each of the ranks at once."""
    store = dist.HashStore() if store is None else store
    store.set_timeout(timedelta(seconds=60))
    results = {}

    def run(rank):
        try:
            results[rank] = function(Agreement(tuple(range(NUM_RANKS)), rank, store))
        except Exception as e:
            results[rank] = e

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(NUM_RANKS)]


def test_ranks_that_say_the_same_agree_in_whatever_order_they_come():
    def agree_often(agreement):
        for number in range(300):
            agreement.agree([Line(f"statement {number}")])
        return "agreed"

    assert in_threads(agree_often) == ["agreed"] * NUM_RANKS


def test_after_a_difference_the_next_comparison_is_another():
    def differ_in_turns(agreement):
        texts = []
        for number in range(100):
            try:
                differs = number % NUM_RANKS == agreement.rank
                agreement.agree([Line("the same"), Line("other" if differs else "alike", f"model.py:{agreement.rank}")])
            except RankError as e:
                texts.append(str(e))
            agreement.agree([Line("together again")])
        return texts

    first, *others = in_threads(differ_in_turns)
    assert others == [first] * (NUM_RANKS - 1)
    assert len(first) == 100
    for number, text in enumerate(first):
        assert f"rank {number % NUM_RANKS}: other, for model.py:{number % NUM_RANKS}" in text
        assert "differ, first in number 2" in text


def test_a_statement_may_be_longer_on_one_rank():
    def say_more(agreement):
        agreement.agree([Line("common")] + [Line("more")] * (agreement.rank == 3))

    for error in in_threads(say_more):
        assert isinstance(error, RankError)
        assert "rank 3: more" in str(error) and ": nothing" in str(error)


STORES = {
    "tcp": lambda path: dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False),
    "prefix": lambda path: dist.PrefixStore("some", dist.PrefixStore("name", dist.HashStore())),
    "file": lambda path: dist.FileStore(str(path / "store"), NUM_RANKS),
}


@pytest.mark.parametrize("kind", STORES)
def test_a_long_loop_leaves_a_bounded_number_of_keys(tmp_path, kind):
    """Statements that are the same, that differ, decisions, refusals, and errors that ranks come back from."""

    def go_on(agreement, numbers):
        refused = 0
        for number in numbers:
            agreement.agree([Line(f"statement {number}")])
            with contextlib.suppress(RankError):
                agreement.agree([Line("other" if agreement.rank == number % NUM_RANKS else "alike")])
            try:
                made = agreement.decided_by_first([Line("a number")], lambda number=number: decide(number))
                assert made == f"made {number}"
            except ConfigError as e:
                assert str(e) == f"no plan for {number}"
                refused += 1
            agreement.tell(ValueError("bad rows"))
            agreement.look()
        return refused

    def decide(number):
        if number % 3 == 0:
            raise ConfigError(f"no plan for {number}")
        return f"made {number}"

    store, num_keys = STORES[kind](tmp_path), []
    agreements = {}
    for numbers in (range(3), range(3, 15)):

        def again(agreement, numbers=numbers):
            return go_on(agreements.setdefault(agreement.rank, agreement), numbers)

        assert in_threads(again, store) == [len(numbers) // 3] * NUM_RANKS
        num_keys.append(store.num_keys())
    assert num_keys[0] == num_keys[1] <= 4  # the news and an error that was raised last, and what a kind has of its own


@pytest.mark.parametrize(
    ("error", "on_others", "text"),
    [
        (ConfigError("one"), ConfigError, "one"),
        (CaptureError("two"), CaptureError, "two"),
        (OSError("three"), RankError, "rank 0, which decides for all, raised OSError: three"),
    ],
)
def test_what_the_first_rank_fails_with_is_told_to_the_others(error, on_others, text):
    def fail():
        raise error

    first, *others = in_threads(lambda agreement: agreement.decided_by_first([Line("a number")], fail))
    assert first is error
    for told in others:
        assert type(told) is on_others and text in str(told)


def test_who_compiles_what_the_first_rank_waits_for_decides_in_its_place():
    is_decided = threading.Event()

    def decide(agreement):
        def make():
            is_decided.set()
            return f"by {agreement.rank}"

        call = "another" if agreement.rank == 1 else "the same"
        agreement.await_compiled(call)
        if agreement.rank == 0:
            assert is_decided.wait(60)  # as long as another compiles
            return agreement.decided_by_first([Line("a number")], make)
        with agreement.compiling(None if agreement.rank == 3 else call):
            return agreement.decided_by_first([Line("a number")], make)

    assert in_threads(decide) == ["by 2"] * NUM_RANKS


def test_the_first_rank_goes_first_if_it_comes_soon():
    came = []

    def come(agreement, seconds):
        if agreement.rank == 0:
            time.sleep(seconds)
        agreement.await_compiled(f"a call after {seconds} s")
        came.append(agreement.rank)

    in_threads(lambda agreement: come(agreement, 0.2))
    in_threads(lambda agreement: come(agreement, 2))
    assert came[0] == 0 and came[-1] == 0


def test_a_rank_that_decides_otherwise_stops_the_others():
    def decide(agreement):
        statement = [Line("another number" if agreement.rank == 2 else "a number")]
        return agreement.decided_by_first(statement, lambda: time.sleep(0.5) or "1")

    for error in in_threads(decide):
        assert isinstance(error, RankError)
        assert "rank 2: another number" in str(error)


def test_a_rank_that_does_not_decide_stops_the_others():
    def decide(agreement):
        if agreement.rank == 2:
            agreement.agree([Line("something else")])
        else:
            agreement.decided_by_first([Line("a number")], lambda: "1")

    for error in in_threads(decide):
        assert isinstance(error, RankError)
        assert "rank 2: something else" in str(error)


def test_of_many_ranks_that_do_not_come_some_are_named():
    agreement = Agreement(tuple(range(100)), 3, dist.HashStore())
    agreement.limit = 0.1
    with pytest.raises(RankError, match="ranks 0, 1, 2, 4, 5, 6, 7, 8 and 91 more have not come to where rank 3 is"):
        agreement.agree([Line("a statement")])


def test_a_rank_that_comes_back_makes_place_for_one_that_does_not(monkeypatch):
    monkeypatch.setattr("fsdp_compile.runtime.agreement._PATIENCE", 0.1)
    store = dist.HashStore()
    first, second, third = (Agreement((0, 1, 2), rank, store) for rank in range(3))
    first.tell(ValueError("one"))
    second.tell(ValueError("two"))
    with first.running([Line("a forward")]), third.running([Line("a forward")]):
        for _ in range(3):
            for agreement in (first, second, third):
                agreement.look()
            time.sleep(0.1)
        text = "rank 1 has not come back since it raised ValueError: two"
        assert [agreement.failure for agreement in (first, second, third)] == [text] * 3


class Interleaved:
    """A store in which something happens before, or after, one request for what has been raised."""

    def __init__(self, store, before=None, after=None):
        self.store, self.before, self.after = store, before, after

    def __getattr__(self, name):
        return getattr(self.store, name)

    def compare_set(self, key, expected, value):
        is_it = key.endswith("/raised")
        if is_it and expected == "" and self.before is not None:
            happens, self.before = self.before, None
            happens()
        found = self.store.compare_set(key, expected, value)
        if is_it and expected == "?" and self.after is not None:
            happens, self.after = self.after, None
            happens()
        return found


def started(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join(0.5)  # it may have to wait for who starts it
    return thread


def raised(agreement):
    return agreement._keys.peek("raised")


def test_a_rank_that_comes_back_while_its_thread_looks_has_come_back():
    store = Interleaved(dist.HashStore())
    agreement, threads = Agreement((0, 1), 0, store), []
    agreement.tell(ValueError("one"))
    store.before = lambda: threads.append(started(agreement.come_back))
    agreement.look("news")
    for thread in threads:
        thread.join()
    assert threads and raised(agreement) is None


def test_a_rank_that_comes_back_while_another_does_has_come_back():
    store = dist.HashStore()
    interleaved, threads = Interleaved(store), []
    first, second = Agreement((0, 1), 0, store), Agreement((0, 1), 1, interleaved)
    first.tell(ValueError("one"))
    second.tell(ValueError("two"))

    def come_back_and_look():
        first.come_back()
        threads.append(started(second.look))

    interleaved.after = come_back_and_look
    second.come_back()
    for thread in threads:
        thread.join()
    assert threads and raised(first) is None


def test_nothing_is_left_of_what_ranks_raise_often_and_come_back_from():
    """While the threads of all of them look as often as they can."""

    def raise_often(agreement):
        is_over = threading.Event()

        def look():
            while not is_over.is_set():
                agreement.look()

        looking = threading.Thread(target=look)
        looking.start()
        for number in range(300):
            agreement.tell(ValueError(str(number)))
            agreement.come_back()
        is_over.set()
        looking.join()
        return agreement

    assert raised(in_threads(raise_often)[0]) is None


def test_a_rank_that_has_run_what_another_has_not_parts_all_of_them():
    store = dist.HashStore()
    first, second, third = (Agreement((0, 1, 2), rank, store) for rank in range(3))

    def compare():
        with pytest.raises(RankError, match="rank 0: something new"):
            first.agree([Line("something new")])

    comparing = threading.Thread(target=compare)
    comparing.start()
    while store.num_keys() < 5:
        time.sleep(0.01)
    second.look()
    assert second.failure is None
    with pytest.raises(RankError, match="rank 1: a forward"), second.running([Line("a forward")]):
        second.look()
        raise RuntimeError("closed")
    third.look()
    comparing.join()
    assert first.failure == second.failure == third.failure


def test_a_statement_names_the_parameters_that_travel_alone():
    class Part(nn.Module):
        def __init__(self, reads_bias):
            super().__init__()
            self.linear, self.reads_bias = nn.Linear(4, 4), reads_bias

        def forward(self, x):
            return nn.functional.linear(x, self.linear.weight, self.linear.bias if self.reads_bias else None).sum()

    def statement(reads_bias, lowering):
        graphs = rewrite(Part(reads_bias), torch.ones(2, 4), world_size=2, collective_lowering=lowering)
        return [line.text for line in statement_of_graphs(graphs)]

    assert statement(True, "packed")[1].startswith("all_gather of root in the forward")
    assert statement(True, "grouped")[1].startswith("all_gather_grouped of root (linear.weight, linear.bias) in the ")
    assert statement(False, "grouped")[1].startswith("all_gather_grouped of root (linear.weight) in the forward")
    assert statement(False, "grouped")[-1].startswith("reduce_scatter_grouped of root (linear.weight) in the backward")


def test_requests_do_not_grow_with_the_number_of_ranks():
    """Those of a rank, in the phases of benchmarks/agreement.py, all of which end."""
    few, many = phases(6, 2.0), phases(24, 2.0)
    for phase, of_many in zip(few, many, strict=True):
        assert of_many.mean < 1.5 * phase.mean + 1, phase.name
    assert len(many[-1].to_error) == 24
    assert max(many[-1].to_error) < 30
