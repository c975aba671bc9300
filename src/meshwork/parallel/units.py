"""Building blocks of a model: what is sharded, recomputed and compiled as one, and where it may be
cut."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from meshwork.models.unchanged import unchanged

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def units(model: nn.Module) -> dict[str, nn.Module]:
    """Building blocks by name, in the order in which the model defines them.

    Walks down from the root: steps through containers, and into a module that itself holds a
    container of two or more composite children (a stage of blocks). Everything else that owns
    parameters is a unit.
    """
    return dict(_walk(model, ""))


def stepped_into(model: nn.Module) -> set[str]:
    """Names of the modules above the units; the root's is empty."""
    names = {""}
    for name in units(model):
        while name := name.rpartition(".")[0]:
            names.add(name)
    return names


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if not any(True for _ in child.parameters()):
            continue
        if isinstance(child, CONTAINERS) or _holds_blocks(child):
            yield from _walk(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _holds_blocks(module: nn.Module) -> bool:
    containers = (c for c in module.children() if isinstance(c, CONTAINERS))
    return any(sum(is_composite(m) for m in c.children()) >= 2 for c in containers)


def is_composite(module: nn.Module) -> bool:
    """Whether a module has children."""
    return any(True for _ in module.children())


class Calls(TorchFunctionMode):
    """Watches the named modules while a model runs: `called`, in the order of their first call, and
    `read`, those whose parameters an operation takes while they do not run themselves."""

    def __init__(self, model: nn.Module, names: Collection[str]):
        super().__init__()
        self.called: dict[str, None] = {}
        self.read: set[str] = set()
        self.modules = {name: model.get_submodule(name) for name in names}
        self.running: list[str] = []
        self.owners: dict[int, list[str]] = {}
        for name, module in self.modules.items():
            for parameter in module.parameters():
                self.owners.setdefault(id(parameter), []).append(name)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", None) != "__get__":  # a shape or dtype alone is no read
            for value in tree_leaves((args, kwargs)):
                owners = self.owners.get(id(value), ()) if torch.is_tensor(value) else ()
                self.read.update(name for name in owners if name not in self.running)
        return func(*args, **(kwargs or {}))

    def run(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Run the model once in evaluation mode; it is left as it was."""
        hooks = []
        for name, module in self.modules.items():

            def enters(*_: object, name: str = name) -> None:
                self.called.setdefault(name)
                self.running.append(name)

            def leaves(*_: object) -> None:
                self.running.pop()

            hooks.append(module.register_forward_pre_hook(enters))
            hooks.append(module.register_forward_hook(leaves, always_call=True))
        try:
            with unchanged(model), self:
                model.eval()
                model(*inputs)
        finally:
            for hook in hooks:
                hook.remove()


def wrappable(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[str, ...]:
    """Units that may be wrapped, in the order of their calls: called as a whole, read by no other
    module, sharing nothing."""
    calls = Calls(model, alone(model, units(model)))
    with torch.no_grad():
        calls.run(model, inputs)
    return tuple(name for name in calls.called if name not in calls.read)


def alone(model: nn.Module, names: Collection[str]) -> list[str]:
    """Those of the named modules that share no parameter with anything outside of them."""
    owners: dict[Tensor, set[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        unit = next((n for n in names if path == n or path.startswith(f"{n}.")), "")
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(unit)
    shared = {unit for found in owners.values() if len(found) > 1 for unit in found}
    return [n for n in names if n not in shared]


def recompute(unit: nn.Module, again: Callable[[], AbstractContextManager]) -> None:
    """Keep no activations inside a unit: its forward runs once more in the backward.

    again: gives a context that is entered around the second run. The names of parameters stay
    (https://pytorch.org/docs/stable/checkpoint.html).
    """
    forward = unit.forward

    def recomputed(*args: object, **kwargs: object) -> object:
        if not (unit.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        contexts = {"context_fn": lambda: (nullcontext(), again())}
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    unit.forward = recomputed


def compile_unit(unit: nn.Module) -> None:
    """torch.compile for the forward of one unit; hooks around it stay outside."""
    unit.forward = torch.compile(unit.forward)
