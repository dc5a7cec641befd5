"""Meshes that a joint graph returns: they are those that the forward is called with."""

import torch.fx
from torch._library.fake_class_registry import FakeScriptObject

from fsdp_compile.compiler.partitioner import return_what_is_given


class Mesh:
    """Equal to others of its name."""

    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return self.name == other.name

    def __hash__(self):
        return hash(self.name)


def joint(name_of_input):
    """The forward returns an input, and the object of a tangent; the backward returns both tangents."""
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1", "tangents_2")]
    for node, name in zip(inputs, [None, name_of_input, None, "tp"], strict=True):
        node.meta["val"] = torch.empty(2) if name is None else FakeScriptObject(None, "DeviceMesh", Mesh(name))
    graph.output([inputs[0], inputs[3], inputs[2], inputs[3]])
    return graph


def returned(graph):
    return [node.name for node in graph.output_node().args[0]]


def test_the_forward_returns_the_equal_mesh_of_its_inputs():
    graph = joint("tp")
    return_what_is_given(graph, 2)
    assert returned(graph) == ["primals_1", "primals_2", "tangents_1", "tangents_2"]


def test_another_mesh_is_not_taken_for_it():
    graph = joint("dp")
    return_what_is_given(graph, 2)
    assert returned(graph) == ["primals_1", "tangents_2", "tangents_1", "tangents_2"]
