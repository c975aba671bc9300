"""Building blocks of a model: what is sharded, recomputed and compiled as one, and where it may be
cut."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
    return any(sum(_is_composite(m) for m in c.children()) >= 2 for c in containers)


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def called(model: nn.Module, names: Collection[str], run: Callable[[], object]) -> list[str]:
    """Those of the named modules that `run` calls, in the order of their first call.

    A module whose weights another one reads without calling it must stay a part of that one.
    """
    order: dict[str, None] = {}
    modules = dict(model.named_modules())
    hooks = [
        modules[name].register_forward_pre_hook(lambda *_, name=name: order.setdefault(name))
        for name in names
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return list(order)


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
