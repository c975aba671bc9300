"""Pipeline parallelism: where a model is cut, what crosses a cut, and the stages between cuts."""

import operator
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from meshwork.config import ConfigError
from meshwork.parallel.trace import Untraceable, trace
from meshwork.parallel.units import stepped_into

# Stages a rank holds under each schedule, and how many micro-batches it asks for.
STAGES_PER_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
}
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble")
BYTE = 50  # operations that take as long as sending one byte
REFINE = 12  # units that may be taken apart in search of a balance


@dataclass(frozen=True)
class StagePlan:
    """How a model is cut.

    starts: the leaf each stage but the first begins with. work: share of each stage. crossing:
    bytes of one micro-batch that leave each stage but the last. into: modules that the graph steps
    into. train, evaluate: the graphs. leaves: named modules that each stage calls. parameters: how
    many each stage holds. held: their names.
    """

    starts: tuple[str, ...]
    work: tuple[float, ...]
    crossing: tuple[int, ...]
    into: frozenset[str]
    train: fx.Graph
    evaluate: fx.Graph
    leaves: tuple[tuple[str, ...], ...]
    parameters: tuple[int, ...]
    held: tuple[frozenset[str], ...]
    schedule: str

    def rank_of(self, stage: int, pp: int) -> int:
        """The pipeline rank that holds a stage: in turn, or there and back (V schedules)."""
        there, back = divmod(stage, pp)
        return pp - 1 - back if self.schedule == "ZBVZeroBubble" and there % 2 else back

    def of_rank(self, rank: int, pp: int) -> list[int]:
        """The stages of a pipeline rank."""
        return [s for s in range(len(self.work)) if self.rank_of(s, pp) == rank]


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


class _Cuts:
    """A traced graph with what is needed to judge a cut before any of its nodes."""

    def __init__(self, model: nn.Module, graph: fx.Graph):
        self.graph, self.nodes = graph, list(graph.nodes)
        self.at = {n: i for i, n in enumerate(self.nodes)}
        self.free = _free(model, self.nodes)
        self.first: dict[str, int] = {}  # the first call of each leaf
        spans: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            if node.op == "call_module":
                self.first.setdefault(node.target, i)
                uses = [i]
                owned: Iterable[Tensor] = model.get_submodule(node.target).parameters()
            elif node.op == "get_attr":
                uses = [self.at[u] for u in node.users]
                owned = [_attribute(model, node.target)]
            else:
                continue
            for tensor in owned:
                if isinstance(tensor, nn.Parameter):
                    spans.setdefault(id(tensor), []).extend(uses)
        self.spans = [(min(s), max(s)) for s in spans.values() if s]

    def crossing(self, i: int) -> list[fx.Node] | None:
        """Values that a cut before node i sends on; None where it may not be cut."""
        if any(a < i <= b for a, b in self.spans) or all(a >= i for a, _ in self.spans):
            return None  # a parameter would lie on both sides, or none on the first
        sent = []
        for node in self.nodes[:i]:
            if node not in self.free and any(self.at[u] >= i for u in node.users):
                leaves = tree_leaves(node.meta["value"])
                if not all(torch.is_tensor(t) for t in leaves):
                    return None
                sent.append(node)
        return sent

    def work(self) -> list[float]:
        return [n.meta.get("work", 0) for n in self.nodes]


def _attribute(model: nn.Module, target: str) -> Any:
    return operator.attrgetter(target)(model)


def _free(model: nn.Module, nodes: list[fx.Node]) -> set[fx.Node]:
    """Nodes that follow from no input and no trained value: each stage computes them itself.

    A parameter that is only read stands where it is used, so it is free as well.
    """
    free: set[fx.Node] = set()
    for node in nodes:
        if node.op == "get_attr":
            free.add(node)
        elif node.op.startswith("call"):
            owns = node.op == "call_module" and any(
                True for _ in model.get_submodule(node.target).parameters()
            )
            read = (n.op == "get_attr" and _is_parameter(model, n) for n in node.all_input_nodes)
            if not owns and not any(read) and all(n in free for n in node.all_input_nodes):
                free.add(node)
    return free


def _is_parameter(model: nn.Module, node: fx.Node) -> bool:
    return isinstance(_attribute(model, node.target), nn.Parameter)


def _facts(nodes: list[fx.Node]) -> list[tuple]:
    values = (t for n in nodes for t in tree_leaves(n.meta["value"]))
    return [(tuple(t.shape), t.dtype) for t in values]


def _size(nodes: list[fx.Node]) -> int:
    values = (t for n in nodes for t in tree_leaves(n.meta["value"]))
    return sum(t.numel() * t.element_size() for t in values)


def stage_plan(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    n_stages: int,
    schedule: str,
    asked: list[str] | None = None,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    keep: Collection[str] = (),
) -> StagePlan:
    """Cut a model into stages of balanced work, with few bytes between them.

    inputs: of one micro-batch. asked: names of the modules that start a stage (but the first).
    keep: names of modules that are not taken apart.
    Raises ConfigError where the model cannot be traced or has too few places to cut.
    """
    kind, into = type(model).__name__, set(stepped_into(model))
    tried = set(keep)
    found = None
    while True:
        try:
            train, evaluate = (trace(model, into, inputs, t, autocast) for t in (True, False))
        except Untraceable as e:
            if found is None:
                raise ConfigError(
                    f"parallel.pp: {kind} cannot be cut into stages, its forward cannot be traced "
                    f"({e}): use parallel=fsdp"
                ) from e
            break
        cuts = _Cuts(model, train), _Cuts(model, evaluate)
        places = _places(*cuts)
        best = _balanced(cuts[0], places, n_stages) if asked is None else _asked(asked, places)
        if best is not None and (found is None or best[0] < found[0]):
            found = (*best, cuts, places, frozenset(into))
        largest = _too_large(model, cuts[0], tried, n_stages)
        enough = found is not None and found[0] < 1.1 / n_stages
        if asked is not None or enough or largest is None or len(tried - set(keep)) >= REFINE:
            break
        tried.add(largest)
        into.add(largest)
    if found is None:
        most = len(places) + 1
        raise ConfigError(
            f"parallel.pp: {kind} has {most} parts that can be stages, {n_stages} are asked for "
            f"({schedule}): use parallel.pp={max(1, most // STAGES_PER_RANK[schedule])} or less, "
            "or parallel=fsdp"
        )
    return _plan(model, found, schedule)


def _places(train: _Cuts, evaluate: _Cuts) -> dict[str, tuple[int, list[fx.Node]]]:
    """Leaves before which both graphs may be cut alike: {name: (node, what crosses)}."""
    found = {}
    for name, i in sorted(train.first.items(), key=lambda item: item[1]):
        if i == 0 or name not in evaluate.first:
            continue
        a, b = train.crossing(i), evaluate.crossing(evaluate.first[name])
        differ = a is None or b is None or not a or _facts(a) != _facts(b)
        if not differ and all(dtype.is_floating_point for _, dtype in _facts(a)):
            found[name] = (i, a)
    return found


def _balanced(
    cuts: _Cuts, places: dict[str, tuple[int, list[fx.Node]]], n_stages: int
) -> tuple[float, list[str]] | None:
    """(largest share, starts): the cuts whose heaviest stage is lightest, bytes counted as work."""
    names = list(places)
    if len(names) < n_stages - 1:
        return None
    work = torch.tensor(cuts.work(), dtype=torch.float64).cumsum(0).tolist()
    ends = [work[places[n][0] - 1] for n in names] + [work[-1]]
    sent = [BYTE * _size(places[n][1]) for n in names] + [0]
    begins = [0.0, *ends[:-1]]
    pays = [0, *sent[:-1]]
    # best[j]: (cost, total of bytes, cuts) of the parts up to the j-th end in k stages
    best = [(ends[j] + sent[j], sent[j], ()) for j in range(len(ends))]
    for _ in range(n_stages - 1):
        new: list[Any] = [None] * len(ends)
        for j in range(len(ends)):
            options = (
                (
                    max(best[i][0], ends[j] - begins[i + 1] + pays[i + 1] + sent[j]),
                    best[i][1] + sent[j],
                    (*best[i][2], i),
                )
                for i in range(j)
                if best[i] is not None
            )
            new[j] = min(options, default=None)
        best = new
    cost, _, chosen = best[-1]
    return cost / work[-1], [names[i] for i in chosen]


def _asked(asked: list[str], places: dict) -> tuple[float, list[str]]:
    wrong = [name for name in asked if name not in places]
    if wrong:
        raise ConfigError(
            f"parallel.stages: {', '.join(wrong)} cannot start a stage: choose among "
            f"{', '.join(places)}"
        )
    return 0.0, sorted(asked, key=lambda name: places[name][0])


def _too_large(model: nn.Module, cuts: _Cuts, tried: set[str], n_stages: int) -> str | None:
    """The heaviest leaf that has children and is more than half of a fair share."""
    total = sum(cuts.work())
    heavy = {
        n.target: n.meta["work"]
        for n in cuts.nodes
        if n.op == "call_module"
        and n.target not in tried
        and n.meta["work"] > 0.5 * total / n_stages
        and any(True for _ in model.get_submodule(n.target).children())
    }
    return max(heavy, key=heavy.get, default=None)


def _plan(model: nn.Module, found: tuple, schedule: str) -> StagePlan:
    _, starts, (train, evaluate), places, into = found
    bounds = [0, *(places[s][0] for s in starts), len(train.nodes)]
    work, total = train.work(), sum(train.work())
    parts = [train.nodes[a:b] for a, b in pairwise(bounds)]
    leaves = tuple(
        tuple(dict.fromkeys(n.target for n in part if n.op == "call_module")) for part in parts
    )
    stages = [Stage(model, i, train.graph, evaluate.graph, starts) for i in range(len(parts))]
    return StagePlan(
        tuple(starts),
        tuple(sum(work[a:b]) / total for a, b in pairwise(bounds)),
        tuple(_size(places[s][1]) for s in starts),
        into,
        train.graph,
        evaluate.graph,
        leaves,
        tuple(sum(p.numel() for p in s.parameters()) for s in stages),
        tuple(frozenset(n for n, _ in s.named_parameters()) for s in stages),
        schedule,
    )


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
    cuts = _Cuts(model, graph)
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
