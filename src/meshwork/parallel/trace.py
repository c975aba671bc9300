"""A model as a graph of calls with its units as leaves; sizes are numbers, nothing is computed."""

import operator
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from meshwork.models.hub import first_line
from meshwork.models.unchanged import unchanged


class Untraceable(Exception):
    """The forward of a model depends on values, or does what a graph cannot hold."""


class _Known(fx.Proxy):
    """A proxy that knows the shape of its value: what is no tensor is answered at once."""

    @property
    def value(self) -> Any:
        return self.node.meta["value"]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.value, name)
        if callable(found) or _holds_tensor(found):
            return super().__getattr__(name)
        return found

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Any:
        return iter([self[i] for i in range(len(self))])

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    __int__ = __index__


class _Tracer(fx.Tracer):
    """Traces with fake tensors; each node's `meta` has value, and work in operations."""

    proxy_buffer_attributes = True

    def __init__(self, into: Collection[str], inputs: tuple[Tensor, ...], autocast: Callable):
        super().__init__()
        self.into, self.inputs, self.autocast = into, inputs, autocast
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.counter = FlopCounterMode(display=False)
        self.running = False

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None):
        self.root_inputs = iter(self.inputs)
        names = (f"input_{i}" for i in range(len(self.inputs)))
        return root_fn, [self.root, *(self.create_proxy("placeholder", n, (), {}) for n in names)]

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return name not in self.into

    def call_module(self, module: nn.Module, forward: Any, args: tuple, kwargs: dict) -> Any:
        if self.running:  # inside of a leaf that is being run
            return forward(*args, **kwargs)
        return super().call_module(module, forward, args, kwargs)

    def getattr(self, attr: str, value: Any, cache: dict) -> Any:
        return value if self.running else super().getattr(attr, value, cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Known(node, self)

    def create_proxy(self, kind: str, target: Any, args: tuple, kwargs: dict, *a: Any, **k: Any):
        made = super().create_proxy(kind, target, args, kwargs, *a, **k)
        node = made.node
        self.running = True
        try:
            with self.mode, self.counter, self.autocast():
                value = self._value(node)
        finally:
            self.running = False
        if not _holds_tensor(value):
            self.graph.erase_node(node)
            return value
        node.meta["value"] = value
        # Multiplications count; the rest is memory, some ten operations a value written.
        written = sum(t.numel() for t in tree_leaves(value) if torch.is_tensor(t))
        own = written if kind in ("call_module", "call_function", "call_method") else 0
        node.meta["work"] = self.counter.get_total_flops() + 10 * own
        return made

    def _value(self, node: fx.Node) -> Any:
        args = fx.node.map_arg(node.args, lambda n: n.meta["value"])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: n.meta["value"])
        if node.op == "placeholder":
            return self.mode.from_tensor(next(self.root_inputs))
        if node.op == "get_attr":
            return self.mode.from_tensor(operator.attrgetter(node.target)(self.root))
        if node.op == "call_module":
            return self.root.get_submodule(node.target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        return node.target(*args, **kwargs)


def _holds_tensor(value: Any) -> bool:
    return any(torch.is_tensor(leaf) for leaf in tree_leaves(value))


def trace(
    model: nn.Module,
    into: Collection[str],
    inputs: tuple[Tensor, ...],
    training: bool,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> fx.Graph:
    """The graph of a forward for inputs of these shapes; the model is left as it was.

    into: names of modules to step into; all others are leaves. Each node has meta["value"], a fake
    tensor or a tuple or list of them, and meta["work"]. Raises Untraceable.
    """
    with unchanged(model), torch.set_grad_enabled(True):
        model.train(training)
        try:
            graph = _Tracer(into, inputs, autocast).trace(model)
        except Exception as e:
            raise Untraceable(first_line(e)) from e
    return graph
