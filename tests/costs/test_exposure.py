"""Which pass placed what is exposed, and why it shows: a picture of each reason."""

import torch
from torch import nn

from fsdp_compile import rewrite
from fsdp_compile.costs import explain
from tests.passes.tiny import rows, three_layers


def exposed_of(*call, **options):
    """What is exposed, and why."""
    lines = str(explain([rewrite(*call, world_size=8, **options)], "h100")).splitlines()
    texts = [line.strip().removeprefix("exposed").strip() for line in lines if line.strip().startswith("exposed")]
    return dict(text.partition(" for ")[2].split("; ", 1) for text in texts)


def test_the_first_gather_the_last_reduction_and_what_the_network_delays():
    assert exposed_of(three_layers(), rows()) == {
        "gathering low (in the forward)": "PrefetchAllGather: nothing is computed before it is needed",
        "reducing low (in the backward)": "DelayReduceScatterWait: nothing is computed after it",
        "reducing top (in the backward)": "DelayReduceScatterWait: it starts late, for its process group is gathering "
        "mid until then",
    }


def test_without_a_distance_nothing_starts_ahead_or_stays_under_way():
    assert exposed_of(three_layers(), rows(), forward_prefetch=0, backward_prefetch=0) == {
        "gathering mid (in the forward)": "PrefetchAllGather: it starts where it is needed, none ahead",
        "reducing low (in the backward)": "DelayReduceScatterWait: nothing is computed after it",
        "reducing top (in the backward)": "DelayReduceScatterWait: it is waited for where it starts, none stays under "
        "way",
    }


def test_what_is_computed_meanwhile_is_too_short():
    layers = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(3)))
    assert exposed_of(layers, torch.ones(256, 2048, device="meta"))["reducing 1 (in the backward)"] == (
        "DelayReduceScatterWait: it takes 0.0719 ms, and what is computed meanwhile 0.0168 ms"
    )
