"""Run a model and leave no trace in it."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Whatever modules keep of a forward inside (modes, caches, counters) is forgotten."""
    kept = [(vars(m), dict(vars(m))) for m in model.modules()]
    kept += [(v, v.copy()) for _, held in kept for v in held.values() if type(v) is dict]
    for module in model.modules():  # counters of one number would count
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for held, before in kept:
            held.clear()
            held.update(before)
