"""One stage of a pipeline: a part of a model's graph with the modules that it calls."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from meshwork.parallel.cuts import Cuts, attribute
from meshwork.parallel.units import alone


class _Edge(torch.autograd.Function):
    """A copy at an end of a cut: contiguous, no view, in both directions."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def edge(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """What enters a stage, or leaves it in the dtype that the next one expects."""
    return _Edge.apply(x if dtype is None else x.to(dtype))


class Stage(nn.Module):
    """One stage of a model: its modules and parameters under the names of the bare model.

    Called with the tensors that cross the cut before it (the first: the model's inputs), returns
    those that cross the cut behind it (the last: the model's output). metas: meta tensors of both,
    by training mode. leaves: names of the modules that it calls, in order. units: those of them
    that may be wrapped.
    """

    def __init__(
        self, model: nn.Module, number: int, train: Cuts, evaluate: Cuts, starts: Sequence[str]
    ):
        super().__init__()
        self.number, self.last = number, number == len(starts)
        self.metas: dict[bool, tuple[list[Tensor], list[Tensor]]] = {}
        self.forwards: dict[bool, Callable] = {}
        called: dict[str, None] = {}
        read: dict[str, None] = {}
        for training, cuts in ((True, train), (False, evaluate)):
            part, ins, outs = _part(cuts, number, starts)
            self.metas[training] = [_shape(t) for t in ins], [_shape(t) for t in outs]
            calls, reads = _targets(part, "call_module"), _targets(part, "get_attr")
            for target in [*_first_names(model, calls), *calls, *reads]:
                _attach(self, model, target)
            self.forwards[training] = type(fx.GraphModule(model, part)).forward
            called |= dict.fromkeys(calls)
            read |= dict.fromkeys(reads)
        self.leaves = tuple(called)
        unread = [n for n in called if not any(name.startswith(f"{n}.") for name in read)]
        self.units = tuple(alone(self, unread))
        if number == 0:  # what no stage uses still belongs to the model
            graphs = [
                (c.graph, op) for c in (train, evaluate) for op in ("call_module", "get_attr")
            ]
            names = {name for graph, op in graphs for name in _targets(graph, op)}
            used = {id(t) for name in names for t in _owned(model, name)}
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if id(tensor) not in used:
                    _attach(self, model, name)

    def forward(self, *inputs: Tensor) -> Any:
        return self.forwards[self.training](self, *inputs)


def _shape(value: Tensor) -> Tensor:
    """A meta tensor of a value's shape, contiguous as a cut makes it; nothing hangs on it."""
    given = {"dtype": value.dtype, "device": "meta", "requires_grad": value.requires_grad}
    return torch.empty(tuple(value.shape), **given)


def _first_names(model: nn.Module, targets: list[str]) -> list[str]:
    """Names of the modules of these targets in the model's order: where one stands in two places,
    the first gives its parameters their names."""
    called = [model.get_submodule(t) for t in targets]
    tops, inside = {id(m) for m in called}, {id(m) for c in called for m in c.modules()}
    names: list[str] = []
    for name, module in model.named_modules():
        covered = any(name.startswith(f"{n}.") for n in names)
        if id(module) in tops or (id(module) in inside and not covered):
            names.append(name)
    return names


def _targets(graph: fx.Graph, op: str) -> list[str]:
    return [n.target for n in graph.nodes if n.op == op]


def _owned(model: nn.Module, target: str) -> list[Tensor]:
    found = attribute(model, target)
    return [*found.parameters(), *found.buffers()] if isinstance(found, nn.Module) else [found]


def _attach(stage: nn.Module, model: nn.Module, target: str) -> None:
    """Put a module, parameter or buffer of the model at its own name into a stage."""
    path, _, name = target.rpartition(".")
    place, source = stage, model
    for part in path.split(".") if path else ():
        source = getattr(source, part)
        if not hasattr(place, part):
            place.add_module(part, nn.Module())
        place = getattr(place, part)
    if name in place._modules or name in place._parameters or name in place._buffers:
        return
    value = getattr(source, name)
    if isinstance(value, nn.Module):
        place.add_module(name, value)
    elif isinstance(value, nn.Parameter):
        place.register_parameter(name, value)
    else:
        kept = name in source._buffers and name not in source._non_persistent_buffers_set
        place.register_buffer(name, value, persistent=kept)


def _part(
    cuts: Cuts, number: int, starts: Sequence[str]
) -> tuple[fx.Graph, list[Tensor], list[Tensor]]:
    """The graph of one stage, with fake tensors of what enters and leaves it."""
    bounds = [0, *(cuts.first[s] for s in starts), len(cuts.nodes)]
    begin, end = bounds[number], bounds[number + 1]
    part, at = fx.Graph(), {}
    ins: list[Tensor] = []
    if number:
        for node in cuts.crossing(begin):
            value = node.meta["value"]
            at[node] = _entered(part, value, ins)

    def taken(node: fx.Node) -> Any:
        if node not in at:  # free: computed here again
            at[node] = part.node_copy(node, taken)
        return at[node]

    for node in cuts.nodes[begin:end]:
        if node.op == "placeholder":
            ins.append(node.meta["value"])
        if node.op == "output":
            part.output(fx.node.map_arg(node.args[0], taken))
        elif node not in cuts.free:
            at[node] = part.node_copy(node, taken)
    outs: list[Tensor] = []
    if end < len(cuts.nodes):
        sent = []
        for node in cuts.crossing(end):
            sent += _left(part, at[node], node.meta["value"], outs)
        pairs = zip(sent, outs, strict=True)
        part.output(tuple(part.call_function(edge, (n, v.dtype)) for n, v in pairs))
    else:
        outs = tree_leaves(fx.node.map_arg(cuts.nodes[-1].args[0], lambda n: n.meta["value"]))
    part.lint()
    return part, ins, outs


def _entered(part: fx.Graph, value: Any, ins: list[Tensor]) -> Any:
    """Placeholders for a value that crosses a cut; a list of tensors is a list of them."""
    if isinstance(value, (tuple, list)):
        return [_entered(part, v, ins) for v in value]
    node = part.placeholder(f"crossed_{len(ins)}")
    ins.append(value)
    return part.call_function(edge, (node,))


def _left(part: fx.Graph, node: Any, value: Any, outs: list[Tensor]) -> list[fx.Node]:
    """The tensors of a value that crosses a cut, one by one."""
    if not isinstance(value, (tuple, list)):
        outs.append(value)
        return [node]
    found = []
    for i, v in enumerate(value):
        item = (
            node[i] if isinstance(node, list) else part.call_function(operator.getitem, (node, i))
        )
        found += _left(part, item, v, outs)
    return found
