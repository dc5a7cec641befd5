import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_compile.passes import ops
from fsdp_compile.passes.outline_blocks import OutlineBlocks
from fsdp_compile.passes.printer import print_graph
from tests.passes.tiny import Chain, linear, rows
from tests.passes.tracing import Graph, Pictures, trace

invoke = torch.ops.higher_order.invoke_subgraph
wait = torch.ops._c10d_functional.wait_tensor.default


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return torch.tanh(x @ self.weight) * 2 + x


def outlined(function, *inputs, tracing_mode="fake"):
    """The graph of a function, in which waits stand for communication, with its blocks outlined."""
    gm = make_fx(function, tracing_mode=tracing_mode)(*inputs)
    OutlineBlocks()(gm)
    gm.graph.lint()
    gm.recompile()
    return gm


def num_calls(gm):
    return len(gm.graph.find_nodes(op="call_function", target=invoke))


def steps(*factors, then=wait):
    """A function of as many blocks as there are factors."""

    def function(x):
        for factor in factors:
            x = then(torch.tanh(torch.relu(x.sin() @ x) * factor))
        return x

    return function


class TestOutlineBlocks(Pictures):
    def test_equal_layers_are_one_function(self):
        with torch.no_grad():
            graphs = trace(Chain(a=Layer(), b=Layer(), c=Layer(), d=linear(4, 2)), rows()).graphs
        graph = Graph("forward", graphs.lowered.forward).then(OutlineBlocks())
        self.assertExpectedInline(
            str(graph),
            """\
forward(arg0_1: f32[8], arg1_1: f32[3,4], arg2_1: f32[8], arg3_1: f32[8], arg4_1: f32[4])
  all_gather_into_tensor_default: f32[16] = _c10d_functional.all_gather_into_tensor(arg0_1, 2, shard)
  all_gather_into_tensor_default_1: f32[16] = _c10d_functional.all_gather_into_tensor(arg2_1, 2, shard)
  wait_tensor_default: f32[16] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
  block_0 = get_attr[block_0]()
  invoke_subgraph = invoke_subgraph(block_0, block_0, arg1_1, wait_tensor_default)
  getitem: f32[3,4] = getitem(invoke_subgraph, 0)
  all_gather_into_tensor_default_2: f32[16] = _c10d_functional.all_gather_into_tensor(arg3_1, 2, shard)
  wait_tensor_default_1: f32[16] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_1)
  invoke_subgraph_1 = invoke_subgraph(block_0, block_0, getitem, wait_tensor_default_1)
  getitem_1: f32[3,4] = getitem(invoke_subgraph_1, 0)
  all_gather_into_tensor_default_3: f32[8] = _c10d_functional.all_gather_into_tensor(arg4_1, 2, shard)
  wait_tensor_default_2: f32[16] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_2)
  invoke_subgraph_2 = invoke_subgraph(block_0, block_0, getitem_1, wait_tensor_default_2)
  getitem_2: f32[3,4] = getitem(invoke_subgraph_2, 0)
  wait_tensor_default_3: f32[8] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_3)
  view_default_3: f32[2,4] = view(wait_tensor_default_3, [2, 4])
  permute: f32[4,2] = permute(view_default_3, [1, 0])
  mm_3: f32[3,2] = mm(getitem_2, permute)
  return [mm_3]""",
        )
        self.assertExpectedInline(
            print_graph(graph.gm.block_0, "block_0"),
            """\
block_0(arg0: f32[3,4], arg1: f32[16])
  view_default: f32[4,4] = view(arg1, [4, 4])
  mm: f32[3,4] = mm(arg0, view_default)
  tanh: f32[3,4] = tanh(mm)
  mul: f32[3,4] = mul(tanh, 2)
  add: f32[3,4] = add(mul, arg0)
  return [add]""",
        )

    def test_what_it_computes_stays_the_same(self):
        x = torch.randn(4, 4)
        gm = outlined(steps(2.0, 2.0, 2.0), x)
        self.assertEqual(num_calls(gm), 3)
        torch.testing.assert_close(gm(x), steps(2.0, 2.0, 2.0)(x), rtol=0, atol=0)

    def test_blocks_with_other_constants_are_others(self):
        gm = outlined(steps(2.0, 3.0, 2.0, 3.0, 4.0), torch.randn(4, 4))
        self.assertEqual([node.args[1] for node in gm.graph.nodes if node.target is invoke], ["block_0", "block_1"] * 2)

    def test_blocks_of_other_shapes_or_strides_are_others(self):
        square, wide = torch.randn(4, 4), torch.randn(6, 6)
        several = lambda x, y: (steps(2.0)(x), steps(2.0)(y))  # noqa: E731
        for other, calls in ((square, 2), (wide, 0), (square.t(), 0), (square.double(), 0)):
            gm = outlined(lambda x, y: several(wait(x), wait(y)), square, other)
            self.assertEqual(num_calls(gm), calls)

    def test_every_reader_has_its_own_views(self):
        """A block takes and returns what is in memory of its own: the buffer, not the view of it that is read."""

        def function(x):
            for _ in range(2):
                x = wait(x).view(16).view(4, 4).t()
                x = torch.tanh(torch.relu(x.sin() @ x) + 1)
            return x.view(16)

        gm = outlined(function, torch.randn(4, 4))
        taken = [node.args[2:] for node in gm.graph.nodes if node.target is invoke]
        self.assertEqual([[node.target for node in each] for each in taken], [[wait], [wait]])
        self.assertEqual(gm.graph.output_node().args[0].target, torch.ops.aten.view.default)

    def test_what_is_stored_is_returned_once(self):
        """The next block and the graph read what is stored, and not the value besides."""

        def function(x):
            returned = []
            for _ in range(2):
                y = torch.tanh(torch.relu(x.sin() @ x) + 1)
                x = wait(torch.ops.fsdp.store(y))
                returned.append(y.view(16))
            return returned

        gm = outlined(function, torch.randn(4, 4))
        (returned,) = gm.block_0.graph.output_node().args
        self.assertEqual([node.target for node in returned], [ops.STORE])

    def test_a_store_stays_where_it_is(self):
        """What a block that stands alone stores is not left to who reads it."""

        def function(x):
            alone = torch.ops.fsdp.store(torch.tanh(torch.relu(x.sin() @ x).cos()))
            wait(x)
            return steps(2.0, 2.0)(alone)

        gm = outlined(function, torch.randn(4, 4))
        self.assertEqual(num_calls(gm), 2)
        [store] = gm.graph.find_nodes(op="call_function", target=ops.STORE)
        self.assertEqual(store.next.target, wait)

    def test_sizes_that_vary_stay_outside(self):
        self.assertEqual(num_calls(outlined(steps(2.0, 2.0), torch.randn(4, 4), tracing_mode="symbolic")), 0)

    def test_a_few_operators_stay_outside(self):
        function = lambda x: wait(wait(x.sin().cos()).sin().cos())  # noqa: E731
        self.assertEqual(num_calls(outlined(function, torch.randn(4, 4))), 0)

    def test_writes_stay_outside(self):
        x, buffer = torch.randn(4, 4), torch.zeros(4, 4)

        def function(x, buffer):
            for _ in range(2):
                x = torch.tanh(torch.relu(x.sin() @ x) * 2.0)
                buffer.copy_(x)
            return x

        gm = outlined(function, x, buffer)
        self.assertEqual(num_calls(gm), 2)
        self.assertEqual(len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)), 2)

    def test_what_others_read_decides(self):
        """Of the first block the matmul is read, too."""

        def function(x):
            product = x.sin() @ x
            y = wait(torch.tanh(torch.relu(product) * 2.0))
            return steps(2.0, 2.0)(y), product

        gm = outlined(function, torch.randn(4, 4))
        self.assertEqual(num_calls(gm), 2)

    def test_a_seed_is_a_view_of_all(self):
        def function(x):
            seeds = torch.ops.prims.inductor_seeds(2, x.device)
            for index in range(2):
                seed = torch.ops.prims.inductor_lookup_seed(seeds, index)
                noise = torch.ops.prims.inductor_random([4, 4], seed, "rand")
                x = wait(torch.tanh(torch.relu(x.sin() @ x) * noise))
            return x

        gm = outlined(function, torch.randn(4, 4))
        selects = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.select.int)
        self.assertEqual([node.args[1:] for node in selects], [(0, 0), (0, 1)])
        self.assertEqual(num_calls(gm), 2)
