"""A traced model seen as places to cut: what would cross, and whether a cut is allowed there."""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves


class Cuts:
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
                owned = [attribute(model, node.target)]
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


def attribute(model: nn.Module, target: str) -> Any:
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
    return isinstance(attribute(model, node.target), nn.Parameter)


def facts(nodes: list[fx.Node]) -> list[tuple]:
    values = (t for n in nodes for t in tree_leaves(n.meta["value"]))
    return [(tuple(t.shape), t.dtype) for t in values]


def size(nodes: list[fx.Node]) -> int:
    values = (t for n in nodes for t in tree_leaves(n.meta["value"]))
    return sum(t.numel() * t.element_size() for t in values)
