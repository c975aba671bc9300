"""Tasks: what computes loss and metrics. Any object with a `loss(output, batch)` is one."""

from meshwork.tasks.classification import Classification

__all__ = ["Classification"]
