"""A research template for training any timm model under any parallel layout."""

__version__ = "0.1.0"
