"""Models. A fork adds its own here: any callable that returns an nn.Module is a
`model._target_`."""

from meshwork.models.timm_model import timm_model

__all__ = ["timm_model"]
