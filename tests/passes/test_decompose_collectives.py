"""Collectives of the model in pieces: the graphs, and what they compute on all ranks at once."""

from functools import partial

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_compile.passes import ops
from fsdp_compile.passes.decompose_collectives import DecomposeCollectives
from fsdp_compile.passes.printer import print_graph
from fsdp_compile.passes.verifier import STAGES, verify
from tests.passes.tracing import Pictures, copy_of

_c10d = torch.ops._c10d_functional


def gathered(x, dim, order):
    """What ranks have parts of along `dim`, as DTensor gathers it, where they come in this order."""
    full = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x, len(order), "tp"))
    return full if dim == 0 else torch.cat(in_order(torch.chunk(full, len(order)), order), dim)


def in_order(parts, order):
    return [parts[rank] for rank in order]


def scattered(x, dim, order):
    """A rank's part along `dim` of the sum of all, as DTensor reduces it, where they come in this order."""
    parts = x if dim == 0 else torch.cat(in_order(torch.chunk(x, len(order), dim), order))
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(parts, "sum", len(order), "tp"))


def summed(x):
    return _c10d.wait_tensor(_c10d.all_reduce(x, "sum", "tp"))


def traced(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def in_pieces(gm, pieces):
    DecomposeCollectives(pieces)(gm)
    verify(gm, STAGES[0])
    return gm


def layer(dim, order):
    """Two linear layers that are split, the first by columns and the second by rows."""

    def run(x, up, gate, down):
        full = gathered(x, dim, order)
        hidden = (full @ up) * (full @ gate)
        return [scattered(hidden @ down, dim, order)]

    return run


class TestDecomposeCollectives(Pictures):
    def test_what_is_gathered_is_multiplied_and_what_is_multiplied_is_reduced_piece_by_piece(self):
        gm = traced(layer(0, (0, 1)), torch.ones(4, 3), torch.ones(3, 5), torch.ones(3, 5), torch.ones(5, 3))
        self.assertExpectedInline(
            print_graph(gm, "before"),
            """\
before(x_1: f32[4,3], up_1: f32[3,5], gate_1: f32[3,5], down_1: f32[5,3])
  all_gather_into_tensor: f32[8,3] = _c10d_functional.all_gather_into_tensor(x_1, 2, tp)
  wait_tensor: f32[8,3] = _c10d_functional.wait_tensor(all_gather_into_tensor)
  mm: f32[8,5] = mm(wait_tensor, up_1)
  mm_1: f32[8,5] = mm(wait_tensor, gate_1)
  mul: f32[8,5] = mul(mm, mm_1)
  mm_2: f32[8,3] = mm(mul, down_1)
  reduce_scatter_tensor: f32[4,3] = _c10d_functional.reduce_scatter_tensor(mm_2, sum, 2, tp)
  wait_tensor_1: f32[4,3] = _c10d_functional.wait_tensor(reduce_scatter_tensor)
  return [wait_tensor_1]""",
        )
        self.assertExpectedInline(
            print_graph(in_pieces(gm, 2), "after"),
            """\
after(x_1: f32[4,3], up_1: f32[3,5], gate_1: f32[3,5], down_1: f32[5,3])
  slice_tensor: f32[2,3] = slice(x_1, 0, 0, 2)
  all_gather_into_tensor_default: f32[4,3] = _c10d_functional.all_gather_into_tensor(slice_tensor, 2, tp)
  slice_tensor_1: f32[2,3] = slice(x_1, 0, 2, 4)
  all_gather_into_tensor_default_1: f32[4,3] = _c10d_functional.all_gather_into_tensor(slice_tensor_1, 2, tp)
  wait_tensor_default: f32[4,3] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
  view_default: f32[4,3] = view(wait_tensor_default, [-1, 3])
  mm_default: f32[4,5] = mm(view_default, up_1)
  mm_default_1: f32[4,5] = mm(view_default, gate_1)
  wait_tensor_default_1: f32[4,3] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_1)
  view_default_1: f32[4,3] = view(wait_tensor_default_1, [-1, 3])
  mm_default_2: f32[4,5] = mm(view_default_1, up_1)
  mm_default_3: f32[4,5] = mm(view_default_1, gate_1)
  view_default_2: f32[2,2,5] = view(mm_default, [2, -1, 5])
  view_default_3: f32[2,2,5] = view(mm_default_2, [2, -1, 5])
  cat_default: f32[2,4,5] = cat([view_default_2, view_default_3], 1)
  view_default_4: f32[8,5] = view(cat_default, [8, 5])
  view_default_5: f32[2,2,5] = view(mm_default_1, [2, -1, 5])
  view_default_6: f32[2,2,5] = view(mm_default_3, [2, -1, 5])
  cat_default_1: f32[2,4,5] = cat([view_default_5, view_default_6], 1)
  view_default_7: f32[8,5] = view(cat_default_1, [8, 5])
  mul: f32[8,5] = mul(view_default_4, view_default_7)
  view_default_8: f32[2,4,5] = view(mul, [2, 4, 5])
  slice_tensor_2: f32[2,2,5] = slice(view_default_8, 1, 0, 2)
  clone_default: f32[2,2,5] = clone(slice_tensor_2, memory_format=torch.contiguous_format)
  view_default_9: f32[4,5] = view(clone_default, [-1, 5])
  mm_default_4: f32[4,3] = mm(view_default_9, down_1)
  view_default_10: f32[4,3] = view(mm_default_4, [4, 3])
  reduce_scatter_tensor_default: f32[2,3] = _c10d_functional.reduce_scatter_tensor(view_default_10, sum, 2, tp)
  view_default_11: f32[2,4,5] = view(mul, [2, 4, 5])
  slice_tensor_3: f32[2,2,5] = slice(view_default_11, 1, 2, 4)
  clone_default_1: f32[2,2,5] = clone(slice_tensor_3, memory_format=torch.contiguous_format)
  view_default_12: f32[4,5] = view(clone_default_1, [-1, 5])
  mm_default_5: f32[4,3] = mm(view_default_12, down_1)
  view_default_13: f32[4,3] = view(mm_default_5, [4, 3])
  reduce_scatter_tensor_default_1: f32[2,3] = _c10d_functional.reduce_scatter_tensor(view_default_13, sum, 2, tp)
  wait_tensor_default_2: f32[2,3] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
  wait_tensor_default_3: f32[2,3] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default_1)
  cat_default_2: f32[4,3] = cat([wait_tensor_default_2, wait_tensor_default_3], 0)
  return [cat_default_2]""",
        )

    def test_parts_of_another_dimension_are_put_in_order_after_they_were_multiplied(self):
        gm = traced(lambda x, w: [gathered(x, 1, (0, 1)) @ w], torch.ones(2, 4, 3), torch.ones(3, 5))
        self.assertExpectedInline(
            print_graph(in_pieces(gm, 2), "after"),
            """\
after(x_1: f32[2,4,3], w_1: f32[3,5])
  slice_tensor: f32[2,2,3] = slice(x_1, 1, 0, 2)
  clone_default: f32[2,2,3] = clone(slice_tensor, memory_format=torch.contiguous_format)
  all_gather_into_tensor_default: f32[4,2,3] = _c10d_functional.all_gather_into_tensor(clone_default, 2, tp)
  slice_tensor_1: f32[2,2,3] = slice(x_1, 1, 2, 4)
  clone_default_1: f32[2,2,3] = clone(slice_tensor_1, memory_format=torch.contiguous_format)
  all_gather_into_tensor_default_1: f32[4,2,3] = _c10d_functional.all_gather_into_tensor(clone_default_1, 2, tp)
  wait_tensor_default: f32[4,2,3] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
  view_default: f32[8,3] = view(wait_tensor_default, [-1, 3])
  mm_default: f32[8,5] = mm(view_default, w_1)
  wait_tensor_default_1: f32[4,2,3] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_1)
  view_default_1: f32[8,3] = view(wait_tensor_default_1, [-1, 3])
  mm_default_1: f32[8,5] = mm(view_default_1, w_1)
  view_default_2: f32[2,2,2,5] = view(mm_default, [2, 2, -1, 5])
  permute_default: f32[2,2,2,5] = permute(view_default_2, [1, 0, 2, 3])
  view_default_3: f32[2,2,2,5] = view(mm_default_1, [2, 2, -1, 5])
  permute_default_1: f32[2,2,2,5] = permute(view_default_3, [1, 0, 2, 3])
  cat_default: f32[2,2,4,5] = cat([permute_default, permute_default_1], 2)
  view_default_4: f32[16,5] = view(cat_default, [16, 5])
  _unsafe_view: f32[2,8,5] = _unsafe_view(view_default_4, [2, 8, 5])
  return [_unsafe_view]""",
        )


def numbers(*shape):
    """Small whole numbers, whose sums are exact in any order."""
    return torch.randint(-3, 4, shape).double()


def running(gm, inputs):
    """Runs a rank's graph: yields what it sends, with the collective, takes what it receives, returns the results."""
    values = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in gm.graph.nodes:
        if node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if ops.is_functional_collective(node):
                values[node] = yield node.target, args[0]
            else:
                values[node] = args[0] if ops.is_functional_wait(node) else node.target(*args, **kwargs)
    return torch.fx.map_arg(gm.graph.output_node().args[0], values.__getitem__)


def on_all_ranks(graphs, inputs):
    """What every rank returns; they have to send the same at the same time."""
    ranks = list(map(running, graphs, inputs))
    answers = [None] * len(ranks)
    while True:
        calls, results = [], []
        for rank, answer in zip(ranks, answers, strict=True):
            try:
                calls.append(rank.send(answer))
            except StopIteration as e:
                results.append(e.value)
        if not calls:
            return results
        assert len({(target, sent.shape) for target, sent in calls}) == 1 and len(calls) == len(ranks)
        answers = received(calls[0][0], [sent for _, sent in calls])


def received(collective, sent):
    """By each rank."""
    if collective is _c10d.all_gather_into_tensor.default:
        return [torch.cat(sent)] * len(sent)
    return [sum(sent)] * len(sent) if collective is _c10d.all_reduce.default else sum(sent).chunk(len(sent))


@settings(max_examples=50)
@given(
    data=st.data(),
    ranks=st.integers(2, 3),
    pieces=st.integers(2, 4),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_ranks_compute_the_same(data, ranks, pieces, shape, seed):
    """Whatever is read of what is gathered, and added up and reduced; the last rank may pad what others do not."""
    torch.manual_seed(seed)
    dim = data.draw(st.integers(0, len(shape)), label="dim")  # the last one is that of columns
    order = data.draw(st.permutations(range(ranks)))
    reads = data.draw(st.lists(st.sampled_from(["product", "biased", "rows", "itself"]), min_size=1, max_size=3))
    added = data.draw(st.integers(1, 3), label="products in a sum")
    ending = data.draw(st.sampled_from(["scattered", "summed"]))
    is_even = data.draw(st.booleans(), label="whether all ranks have as many columns")

    def run(is_short, x, weight, bias, *weights):
        full = gathered(x, dim, order)[..., :3] if dim == len(shape) else gathered(x, dim, order)
        if is_short:
            full, weight = full[..., :-1], weight[:-1]
        rows = full.reshape(-1, full.shape[-1])
        readers = {
            "product": lambda: rows @ weight,
            "biased": lambda: torch.addmm(bias, rows, weight),
            "rows": lambda: rows.T @ rows,
            "itself": lambda: full * 2,
        }
        hidden = (full @ weight).relu()
        products = [F.pad(hidden @ each[:, :-1], (0, 1)) if is_short else hidden @ each for each in weights]
        total = sum(products[1:], start=products[0])
        result = scattered(total, dim, order) if ending == "scattered" else summed(total)
        return [result, *(readers[each]() for each in reads)]

    inputs = [
        (numbers(*shape, 3), numbers(3, 2), numbers(2), *(numbers(2, 6) for _ in range(added))) for _ in range(ranks)
    ]
    graphs = [traced(partial(run, not is_even and each == ranks - 1), *inputs[0]) for each in range(ranks)]
    expected = on_all_ranks(graphs, inputs)
    found = on_all_ranks([in_pieces(copy_of(gm), pieces) for gm in graphs], inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    full = [size * ranks if each == dim else size for each, size in enumerate(shape)]
    reduced = shape if ending == "scattered" else full
    sent = sum(map(ops.is_functional_collective, in_pieces(graphs[0], pieces).graph.nodes))
    assert sent == min(pieces, max(shape)) + min(pieces, max(reduced))
