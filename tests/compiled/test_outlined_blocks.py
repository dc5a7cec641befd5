"""What Inductor makes of equal blocks: one function for all of them, with what the schedule and eager have."""

import copy
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_compile import fsdp_compile
from fsdp_compile.runtime.outlined_blocks import outlined, own_memory
from tests import ranks
from tests.compiled.test_generated_code import assert_keeps_the_order
from tests.passes.tiny import Chain

pytestmark = pytest.mark.usefixtures("four_ranks")
wait = torch.ops._c10d_functional.wait_tensor.default


class Layer(nn.Module):
    def __init__(self, width=32, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = dropout

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout)


def layers(num=5, **options):
    torch.manual_seed(0)
    return Chain(**{f"layer{index}": Layer(**options) for index in range(num)})


def step(model):
    torch.manual_seed(1)
    x = torch.randn(4, 32, requires_grad=True)
    return model(x).square().sum()


@functools.cache
def generated(lowering):
    model = fsdp_compile(layers(), collective_lowering=lowering)
    _, codes = run_fw_bw_and_get_code(lambda: step(model))
    return model.graphs[0], codes


def calls_of_blocks(code):
    return re.findall(r"= (block_\d+)\(\1_args\)", code)


@pytest.mark.parametrize("lowering", ["packed", "grouped"])
def test_equal_layers_are_one_function_in_the_order_of_the_schedule(lowering):
    graphs, codes = generated(lowering)
    for code in codes:
        called = calls_of_blocks(code)
        assert len(called) >= 2 and len(set(called)) < len(called)
        assert all(len(re.findall(rf"^def {name}\(", code, re.MULTILINE)) == 1 for name in called)
    assert_keeps_the_order(graphs, codes)


@pytest.mark.parametrize("lowering", ["packed", "grouped"])
def test_what_a_block_is_given_ends_with_its_last_use_inside(lowering):
    """The caller lets go of it before the call, and the function after what reads it last."""
    for code in generated(lowering)[1]:
        call = code[code.index("def call(") :]
        for found in re.finditer(r"^    (block_\d+)_args = \[(.*)\]\n((?:    del .*\n)*)", call, re.MULTILINE):
            name, arguments, frees = found.groups()
            last = {each for each in re.findall(r"\bbuf\d+\b", arguments) if not _is_read(each, call[found.end() :])}
            assert last <= set(re.findall(r"\w+", frees))
            body = re.search(rf"^def {name}\(args\):\n.*\n    args.clear\(\)\n((?: .*\n|\n)*)", code, re.MULTILINE)[1]
            given = set(re.findall(rf"\b{name}_arg\d+", body))
            assert given == set(re.findall(rf"del ({name}_arg\d+)", body)) and not re.search(r"\bargs\b", body)


@pytest.mark.parametrize("lowering", ["packed", "grouped"])
def test_a_block_writes_to_nothing_that_it_is_given(lowering):
    """Of what the forward saved, a backward may use the memory again; torch takes a function's arguments for that."""
    model = fsdp_compile(layers(), collective_lowering=lowering, reshard_after_forward=False)
    _, codes = run_fw_bw_and_get_code(lambda: step(model))
    assert calls_of_blocks(codes[1])
    assert [line for line in codes[1].splitlines() if re.search(r"block_\d+_arg\d+.*# reuse", line)] == []


def _is_read(name, code):
    return re.search(rf"\b{name}\b", code) is not None


@torch._functorch.config.patch(enable_autograd_cache=False)  # it does not know what is patched here
def test_random_numbers_are_those_of_the_graph_as_a_whole(monkeypatch):
    """Each call takes the seeds of its own layer."""
    losses, codes = [], []
    for fewest in (4, 10**6):
        monkeypatch.setattr("fsdp_compile.passes.outline_blocks._FEWEST", fewest)
        torch._dynamo.reset()
        model = fsdp_compile(layers(dropout=0.5))
        loss, code = run_and_get_code(step, model)
        losses.append(loss)
        codes.append(code[0])
    assert len(set(calls_of_blocks(codes[0]))) < len(calls_of_blocks(codes[0])) and not calls_of_blocks(codes[1])
    torch.testing.assert_close(*losses, rtol=0, atol=0)


def blocks(x):
    """Two blocks, each of which returns what it is given, and a value twice."""
    returned = []
    for _ in range(2):
        y = torch.tanh(torch.relu(x.sin() @ x) * 2.0)
        returned += [y, torch.ops.aten._unsafe_view(x, [64, 64]), torch.ops.aten._unsafe_view(y, [64, 64])]
        x = wait(y)
    return returned


def test_what_a_block_returns_is_in_memory_of_its_own():
    x = torch.randn(64, 64)
    gm = outlined(make_fx(blocks, tracing_mode="fake")(x))
    assert gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
    with own_memory():
        compiled = compile_fx_inner(gm, [x])
    returned, expected = compiled([x]), blocks(x)
    for value, wanted in zip(returned, expected, strict=True):
        torch.testing.assert_close(value, wanted)
        assert value.stride() == wanted.stride()
    assert len({value.data_ptr() for value in (x, *returned)}) == 1 + len(returned)


@torch.compiler.nested_compile_region
def region(x, size):
    return torch.tanh(torch.relu(x.sin()) * size)


class Nested(Chain):
    def forward(self, x):
        for layer in self.children():
            x = region(layer(x), x.shape[0])
        return x.sum()


@pytest.mark.parametrize("dynamic", [False, True])
def test_functions_of_users_are_left_as_they_are_given_values_and_sizes(dynamic):
    """By itself, torch would write to what the forward saved, here, too."""
    ranks.join_fake_group(1)
    torch.manual_seed(0)
    expected = Nested(**{f"layer{index}": nn.Linear(8, 8) for index in range(3)})
    model = fsdp_compile(copy.deepcopy(expected), dynamic=dynamic)
    x = torch.randn(4, 8)
    for each in (model, expected):
        each(x).backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_cpp_wrapper_compiles_the_graph_as_a_whole():
    gm = make_fx(blocks, tracing_mode="fake")(torch.randn(64, 64))
    assert "invoke_subgraph" in outlined(gm).code
    with torch._inductor.config.patch(cpp_wrapper=True):
        assert "invoke_subgraph" not in outlined(gm).code
    assert "invoke_subgraph" not in gm.code
