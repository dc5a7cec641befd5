"""The verifier against illegal edits of good graphs: each kind, at random places."""

from random import Random

import pytest
import torch
import torch.fx
from hypothesis import settings

from fsdp_compile import CommunicationDtype, rewrite
from fsdp_compile.passes import analysis, ops
from fsdp_compile.passes.errors import VerifyError
from fsdp_compile.passes.insert_free import InsertFree
from fsdp_compile.passes.partition_joint import PartitionJoint
from fsdp_compile.passes.verifier import Signature, verify, verify_crossing
from tests.models import build
from tests.passes.tiny import biased, rows, three_layers
from tests.passes.tracing import STAGE_AFTER, copy_of, trace

# Profiles are in tests/conftest.py.
PLACES = 100 if settings.get_current_profile_name() == "thorough" else 25
SIN = torch.ops.aten.sin.default


class NoRoom(Exception):
    """The graph has nothing to edit this way."""


def choose(random, nodes):
    nodes = list(nodes)
    if not nodes:
        raise NoRoom
    return random.choice(nodes)


def calls(graph, *targets):
    return [node for node in graph.nodes if ops.is_call(node, *targets)]


def inserted(graph, before, target, *args):
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    if args and isinstance(args[0], torch.fx.Node):
        node.meta["val"] = args[0].meta.get("val")
    return node


# ----------------------------------------------------------------------------------------------------------
# Edits of one graph: (graph, random)
# ----------------------------------------------------------------------------------------------------------


def drop_a_wait(graph, random):
    wait = choose(random, (node for node in calls(graph, ops.WAIT) if any(user.op != "output" for user in node.users)))
    wait.replace_all_uses_with(wait.args[0], delete_user_cb=lambda user: user is not wait)
    graph.erase_node(wait)


def wait_twice(graph, random):
    wait = choose(random, calls(graph, ops.WAIT))
    inserted(graph, wait.next, ops.WAIT, wait.args[0])


def read_what_is_pending(graph, random):
    collective = choose(random, filter(ops.is_collective, graph.nodes))
    inserted(graph, collective.next, SIN, collective)


def gather_for_nobody(graph, random):
    gather = choose(random, filter(ops.is_all_gather, graph.nodes))
    with graph.inserting_before(gather):
        graph.node_copy(gather)


def exchange_two_gathers(graph, random):
    """The earlier of two gathers that are under way at once starts after the later one."""
    position = analysis.positions(graph)
    found = list(filter(ops.is_all_gather, graph.nodes))
    pairs = [
        (first, second)
        for first, second in zip(found, found[1:], strict=False)
        if position[second] < position[next(iter(first.users))]
    ]
    first, second = choose(random, pairs)
    second.append(first)


def exchange_two_waits(graph, random):
    waits = [node for node in calls(graph, ops.WAIT) if ops.is_all_gather(node.args[0])]
    position = analysis.positions(graph)
    pairs = [
        (first, second)
        for first, second in zip(waits, waits[1:], strict=False)
        if position[second.args[0]] < position[first]
    ]
    first, second = choose(random, pairs)
    first.prepend(second)


def wait_before_the_start(graph, random):
    wait = choose(random, calls(graph, ops.WAIT))
    wait.args[0].prepend(wait)


def free_early(graph, random):
    free = choose(random, calls(graph, ops.FREE))
    uses = [node for node in analysis.uses(free.args[0]) if node not in (free, free.args[0])]
    choose(random, uses).prepend(free)


def free_late(graph, random):
    free = choose(random, calls(graph, ops.FREE))
    position = analysis.positions(graph)
    last = graph.output_node()
    later = [
        node
        for node in graph.nodes
        if position[node] > position[free] and node is not last and not ops.is_call(node, ops.FREE, ops.STORE)
    ]
    choose(random, later).append(free)


def free_never(graph, random):
    graph.erase_node(choose(random, calls(graph, ops.FREE)))


def free_twice(graph, random):
    free = choose(random, calls(graph, ops.FREE))
    inserted(graph, free.next, ops.FREE, free.args[0])


def free_a_view(graph, random):
    full = set(analysis.full_buffers(graph))
    views = [alias for buffer in full for alias in analysis.aliases(buffer) if alias not in full]
    view = choose(random, views)
    inserted(graph, view.next, ops.FREE, view)


def free_something_else(graph, random):
    full = {alias for buffer in analysis.full_buffers(graph) for alias in analysis.aliases(buffer)}
    node = choose(random, (n for n in graph.nodes if n.op == "call_function" and n not in full and "val" in n.meta))
    inserted(graph, node.next, ops.FREE, node)


def read_what_is_freed(graph, random):
    free = choose(random, calls(graph, ops.FREE))
    buffer = choose(random, analysis.aliases(free.args[0]))
    inserted(graph, free.next, SIN, buffer)


def use_before_definition(graph, random):
    node = choose(random, (node for node in graph.nodes if node.op == "call_function" and node.all_input_nodes))
    source = choose(random, node.all_input_nodes)
    source.prepend(node)


def forget_a_value(graph, random):
    del choose(random, (node for node in graph.nodes if ops.is_dialect(node) and "val" in node.meta)).meta["val"]


def drop_an_output(graph, random):
    output = graph.output_node()
    values = list(output.args[0])
    if not values:
        raise NoRoom
    del values[random.randrange(len(values))]
    output.args = (tuple(values),)


def return_another_dtype(graph, random):
    output = graph.output_node()
    values = list(output.args[0])
    index = choose(
        random, (i for i, value in enumerate(values) if isinstance(value, torch.fx.Node) and is_float(value))
    )
    value = values[index]
    with graph.inserting_before(output):
        values[index] = graph.call_function(torch.ops.prims.convert_element_type.default, (value, torch.float64))
    values[index].meta["val"] = value.meta["val"].to(torch.float64)
    output.args = (tuple(values),)


def is_float(node):
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def add_an_input(graph, random):
    first = choose(random, graph.nodes)
    with graph.inserting_before(first):
        graph.placeholder("another").meta["val"] = torch.empty(3)


def reduce_to_another_size(graph, random):
    node = choose(random, calls(graph, ops.REDUCE_SCATTER, ops.REDUCE_SCATTER_GROUPED))
    node.meta["val"] = node.meta["val"].new_empty(node.meta["val"].numel() + random.choice([-1, 1]))


def keep_never(graph, random):
    graph.erase_node(choose(random, calls(graph, ops.KEEP)))


def keep_what_another_message_loses(graph, random):
    remainder = choose(random, calls(graph, ops.REMAINDER))
    gradients, *others = remainder.args
    remainder.args = (list(reversed(gradients)), *others)


EDITS = [
    drop_a_wait,
    wait_twice,
    read_what_is_pending,
    gather_for_nobody,
    exchange_two_gathers,
    exchange_two_waits,
    wait_before_the_start,
    free_early,
    free_late,
    free_never,
    free_twice,
    free_a_view,
    free_something_else,
    read_what_is_freed,
    use_before_definition,
    forget_a_value,
    drop_an_output,
    return_another_dtype,
    add_an_input,
    reduce_to_another_size,
    keep_never,
    keep_what_another_message_loses,
]


@pytest.fixture(scope="module")
def graphs():
    """Forwards and backwards, packed and grouped, that have several units under way."""
    found = []
    fed_back = CommunicationDtype(reduce="int8", error_feedback=True)
    for grouped in (False, True):
        traced = trace(biased(), rows(), grouped=grouped).graphs
        model = build("gpt")
        lowering = "grouped" if grouped else "packed"
        options = {"collective_lowering": lowering, "forward_prefetch": 2, "backward_prefetch": 2}
        pairs = [
            rewrite(model, *model.inputs(4, 0), world_size=4, communication_dtype=sent, **options)
            for sent in ("auto", fed_back)
        ]
        found += [side.module for pair in (traced, *pairs) for side in (pair.forward, pair.backward)]
    return found


def test_the_graphs_are_good(graphs):
    for gm in graphs:
        verify(gm, STAGE_AFTER[InsertFree], signature=Signature.of(gm), freed=True)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_every_illegal_edit_is_caught(graphs, edit):
    random, num_edited = Random(edit.__name__), 0
    for _ in range(20 * PLACES):
        gm = random.choice(graphs)
        signature = Signature.of(gm)
        edited = copy_of(gm)
        try:
            edit(edited.graph, random)
        except NoRoom:
            continue
        with pytest.raises(VerifyError):
            verify(edited, STAGE_AFTER[InsertFree], signature=signature, freed=True)
        num_edited += 1
        if num_edited == PLACES:
            return
    pytest.fail(f"{edit.__name__} found room {num_edited} times only")


def test_every_full_parameter_that_is_saved_is_caught():
    """One of the values that follow from full parameters alone, in the place of one that the forward saves."""
    found, random = trace(three_layers(), rows()), Random("save a full parameter")
    backward = found.after(PartitionJoint, "backward").gm
    for _ in range(PLACES):
        forward = copy_of(found.after(PartitionJoint).gm)
        unshards = {node for node in forward.graph.nodes if ops.is_call(node, ops.UNSHARD)}
        output = forward.graph.output_node()
        values = list(output.args[0])
        full = analysis.parameter_only(forward.graph, unshards) - set(values)
        values[random.randrange(1, len(values))] = choose(random, sorted(full, key=lambda node: node.name))
        output.args = (tuple(values),)
        with pytest.raises(VerifyError):
            verify_crossing(forward, backward, 1)
