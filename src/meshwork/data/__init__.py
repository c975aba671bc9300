"""Data: data sets, the order of their samples, transforms and the loader."""

from meshwork.data.digits import digits
from meshwork.data.imagefolder import imagefolder
from meshwork.data.splits import Splits, Subset, subset
from meshwork.data.synthetic import synthetic

__all__ = ["Splits", "Subset", "digits", "imagefolder", "subset", "synthetic"]
