"""Pure graph passes: a `torch.fx.GraphModule` goes in, the same object comes out rewritten.

Nothing here imports `torch.distributed`, reads an environment variable, a clock, a rank or a device. Whatever a
pass needs to know stands in the graph itself, as arguments of the operators of `ops`, or in the pass's own fields.
"""
