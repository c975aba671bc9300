"""Run a model on shapes alone and leave no trace in it."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Whatever modules keep of a forward inside (modes, caches, counters) is forgotten."""
    kept = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules()]
    for module, _, buffers in kept:  # counters of one number would count
        module._buffers.update({k: b if b is None else b.clone() for k, b in buffers.items()})
    try:
        yield
    finally:
        for module, attributes, buffers in kept:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
