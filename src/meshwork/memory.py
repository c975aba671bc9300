"""Out of memory, as a sentence: the next smaller micro-batch to type."""

import torch

from meshwork.batch import BatchPlan
from meshwork.config import ConfigError


def out_of_memory(error: BaseException, plan: BatchPlan) -> ConfigError | None:
    """The sentence for an error that is a lack of memory, else None."""
    text = str(error)
    on_cpu = "DefaultCPUAllocator" in text or "can't allocate memory" in text
    if not isinstance(error, torch.OutOfMemoryError) and not on_cpu:
        cause = error.__cause__  # a pipeline's schedule raises errors of its own from others
        return None if cause is None else out_of_memory(cause, plan)
    where = "the host" if on_cpu else "the GPU"
    smaller = (plan.micro + 1) // 2 if plan.micro > 1 else 0
    if plan.coupled:
        smaller = next((s for s in range(plan.micro // 2, 0, -1) if plan.global_batch % s == 0), 0)
    if smaller == 0:
        return ConfigError(
            f"out of memory on {where} with one sample at a time ({text.splitlines()[0]}): "
            "choose a smaller model or data.image_size"
        )
    same = "BatchNorm then sees fewer samples" if plan.coupled else "the results stay the same"
    return ConfigError(
        f"out of memory on {where} with micro-batches of {plan.micro}: type "
        f"trainer.micro_batch_size={smaller} ({same}; trainer.global_batch_size stays "
        f"{plan.global_batch})"
    )
