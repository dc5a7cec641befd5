"""What `explain()` says of casts that stay behind the gather of their parameter."""

import pytest
import torch

from fsdp_compile import ConfigError, rewrite
from fsdp_compile.costs import explain, formulas_of
from fsdp_compile.costs.wide_gathers import wide_gathers_of
from fsdp_compile.costs.work import Work
from tests.passes.test_commute_casts import WIDE, Part, Reader
from tests.passes.test_commute_scales import Float8

ROWS = torch.ones(3, 4, dtype=torch.bfloat16)


def graphs_of(model):
    return rewrite(model, ROWS, world_size=2, auto_wrap_policy=[model])


@pytest.mark.parametrize(
    ("model", "narrow", "reason"),
    [
        (Reader(WIDE["both"]), "bfloat16", "sum reads it as it is"),
        (Reader(WIDE["two"]), "bfloat16 and float16", "several dtypes are read"),
        (Part(1, 3), "bfloat16", "its bucket would not lose a quarter of its bytes"),
    ],
    ids=["both", "two", "part"],
)
def test_the_reason_is_said(model, narrow, reason):
    lines = [line for line in str(explain([graphs_of(model)])).splitlines() if "wide gather" in line]
    said = f" travels as float32, and is cast to {narrow} behind its gather, 32 B more than need be, because {reason}"
    assert lines and all(line.endswith(said) for line in lines)


def test_of_float8_too():
    for model, is_wide in ((Float8(), False), (Float8(lambda narrow, weight, scale: narrow + weight.sum()), True)):
        options = {"auto_wrap_policy": [], "reshard_after_forward": True}
        graphs = rewrite(model, torch.ones(3, 4), world_size=2, **options)
        lines = [line for line in str(explain([graphs])).splitlines() if "wide gather" in line]
        said = "cast to float8_e4m3fn behind its gather, 48 B more than need be, because more reads it than what scales"
        assert len(lines) == is_wide and all(said in line for line in lines)


def test_formulas_are_refused_for_what_is_gathered_in_float8():
    graphs = rewrite(Float8(), torch.ones(3, 4), world_size=2, auto_wrap_policy=[], reshard_after_forward=True)
    with pytest.raises(ConfigError, match="formulas have no weights that are gathered in float8, which root has"):
        formulas_of(graphs)


NARROW = Reader(lambda x, weight: x @ weight.bfloat16())


@pytest.mark.parametrize("model", [NARROW, Reader(WIDE["computed"]), Reader(WIDE["wider"]), Part(3, 1)])
def test_nothing_is_said_of_what_is_gathered_narrow_or_needed_wide(model):
    graphs = graphs_of(model)
    assert wide_gathers_of(Work.of(graphs, compiler="inductor")) == []
    assert "wide gather" not in str(explain([graphs]))


def test_the_largest_are_listed_and_the_others_counted():
    lines = [line for line in str(explain([graphs_of(Part(5, 20))])).splitlines() if "wide gather" in line]
    assert len(lines) == 4 and " more" in lines[-1]
