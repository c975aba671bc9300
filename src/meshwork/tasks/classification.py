"""One label an image: cross-entropy, top-1 and top-5, a confusion matrix."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwork.batch import Batch

MAX_CONFUSION = 50


class Classification:
    """Cross-entropy (or another criterion) on class labels.

    classes: names in the order of the labels. criterion: called with (output [n, classes],
    target int64 [n]), returns a loss [n].
    """

    objective = ("val/top1", "max")

    def __init__(
        self,
        classes: tuple[str, ...] = (),
        label_smoothing: float = 0.0,
        criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
    ):
        self.classes = classes
        self.label_smoothing = label_smoothing
        self.criterion = criterion

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """output: [n, classes]. Returns float [n], unreduced."""
        if self.criterion is not None:
            return self.criterion(output, batch.target)
        return F.cross_entropy(
            output, batch.target, reduction="none", label_smoothing=self.label_smoothing
        )

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Sums over the rows: hits among the first and the first five, and the confusion matrix.

        confusion: [classes, classes], rows are true labels; up to 50 classes.
        """
        n = output.shape[1]
        best = output.topk(min(5, n)).indices
        hits = best == batch.target[:, None]
        sums = {"top1": hits[:, 0].sum(), "top5": hits.sum()}
        if n <= MAX_CONFUSION:
            cell = batch.target * n + best[:, 0]
            sums["confusion"] = torch.bincount(cell, minlength=n * n).reshape(n, n)
        return sums
