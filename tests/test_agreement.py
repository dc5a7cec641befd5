"""Comparisons of statements, by threads in the place of ranks."""

import threading
from datetime import timedelta

import torch.distributed as dist

from fsdp_compile import RankError
from fsdp_compile.runtime.agreement import Agreement, Line

NUM_RANKS = 4


def in_threads(function):
    """What `function(agreement)` returns, or raises, on each of the ranks at once."""
    store = dist.HashStore()
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
