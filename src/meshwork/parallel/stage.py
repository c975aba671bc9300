"""One stage of a pipeline: a part of a model's graph with the modules that it calls."""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from meshwork.parallel.cuts import Cuts


class _Edge(torch.autograd.Function):
    """A copy at an end of a cut: contiguous, no view, in both directions."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def edge(x: Tensor) -> Tensor:
    """What enters or leaves a stage."""
    return _Edge.apply(x)


class Stage(nn.Module):
    """One stage of a model: its modules and parameters under the names of the bare model.

    Called with the tensors that cross the cut before it (the first: the model's inputs), returns
    those that cross the cut behind it (the last: the model's output).
    """

    def __init__(
        self,
        model: nn.Module,
        number: int,
        train: fx.Graph,
        evaluate: fx.Graph,
        starts: tuple[str, ...] | list[str],
    ):
        super().__init__()
        self.number, self.last = number, number == len(starts)
        self.metas: dict[bool, tuple[list[Tensor], list[Tensor]]] = {}
        self.forwards: dict[bool, Callable] = {}
        for training, graph in ((True, train), (False, evaluate)):
            part, ins, outs = _part(model, graph, number, starts)
            self.metas[training] = ins, outs
            targets = [n.target for n in part.nodes if n.op in ("call_module", "get_attr")]
            for target in [*_first_names(model, targets), *targets]:
                _attach(self, model, target)
            self.forwards[training] = type(fx.GraphModule(model, part)).forward
        if number == 0:  # what no stage uses still belongs to the model
            used = {id(t) for name in _used(train, evaluate) for t in _owned(model, name)}
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if id(tensor) not in used:
                    _attach(self, model, name)

    def forward(self, *inputs: Tensor) -> Any:
        return self.forwards[self.training](self, *inputs)


def _first_names(model: nn.Module, targets: list[str]) -> list[str]:
    """Names of the modules of these targets in the model's order: where one stands in two places,
    the first gives its parameters their names."""
    called = [m for t in targets if isinstance(m := operator.attrgetter(t)(model), nn.Module)]
    tops, inside = {id(m) for m in called}, {id(m) for c in called for m in c.modules()}
    names: list[str] = []
    for name, module in model.named_modules():
        covered = any(name.startswith(f"{n}.") for n in names)
        if id(module) in tops or (id(module) in inside and not covered):
            names.append(name)
    return names


def _used(*graphs: fx.Graph) -> set[str]:
    return {n.target for g in graphs for n in g.nodes if n.op in ("call_module", "get_attr")}


def _owned(model: nn.Module, target: str) -> list[Tensor]:
    found = operator.attrgetter(target)(model)
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
    model: nn.Module, graph: fx.Graph, number: int, starts: Iterable[str]
) -> tuple[fx.Graph, list[Tensor], list[Tensor]]:
    """The graph of one stage, with fake tensors of what enters and leaves it."""
    cuts = Cuts(model, graph)
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
        part.output(tuple(part.call_function(edge, (n,)) for n in sent))
    else:
        outs = tree_leaves(cuts.nodes[-1].args and _value_of(cuts.nodes[-1]))
    part.lint()
    return part, ins, outs


def _value_of(output: fx.Node) -> Any:
    return fx.node.map_arg(output.args[0], lambda n: n.meta["value"])


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
        item = node[i] if isinstance(node, list) else part.call_function(_item, (node, i))
        found += _left(part, item, v, outs)
    return found


def _item(values: Any, i: int) -> Any:
    return values[i]
