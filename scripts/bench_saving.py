"""What a safe checkpoint costs beside a bare torch.distributed.checkpoint call on the same tensors.

    make bench        (or: python scripts/bench_saving.py)

A model of 25 M parameters with AdamW's moments under fsdp on two ranks; checksums included. The
sides take turns, ratios are medians of the rounds.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]

from ranks import run_ranks  # noqa: E402

ROUNDS = 5
MODEL = ("model=timm", "model.name=vit_small_patch16_224", "model.args={depth: 14}")
RUN = ("data=synthetic", "data.image_size=32", "trainer.global_batch_size=4", "parallel=fsdp")


def measure(rank: int, root: str) -> dict[str, list[float]]:
    """Seconds of each side and round on this rank."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from jobs import composed, job_of, joined, steps
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

    from meshwork import checkpoint
    from meshwork.checkpoint import Position, Saver
    from meshwork.checkpoint_files import problem_together, read_state

    found: dict[str, list[float]] = {}

    def timed(name: str, function: Callable, world: object) -> object:
        dist.barrier(group=world.control)
        began = time.perf_counter()
        result = function()
        dist.barrier(group=world.control)
        found.setdefault(name, []).append(time.perf_counter() - began)
        return result

    with joined(dict(os.environ)) as world:
        job = job_of(composed(*MODEL, *RUN, "trainer.max_steps=9"), world, Path(root))
        steps(job, 1)
        engine, optimizer = job.engine, job.optimizer
        tensors = checkpoint._tensors(engine, optimizer, None, rank)
        found["parameters"] = [sum(s.numel() for s in engine.shapes.values())]
        ours = Saver(job.cfg.checkpoint, Path(root, "ours"), world)
        job.cfg.checkpoint.async_save = True
        behind = Saver(job.cfg.checkpoint, Path(root, "behind"), world)

        def one_round(bare: Path, position: Position) -> None:
            args = engine, optimizer, None, position, {}

            def save() -> Path:
                ours.save(*args)
                return ours.wait()

            def load() -> None:
                assert problem_together(path, world) is None
                checkpoint.load(path, read_state(path), engine, optimizer, None, world)

            sides = {"process_group": world.saving}
            writer, reader = FileSystemWriter(bare), FileSystemReader(bare)
            timed("bare save", lambda: dcp.save(tensors, storage_writer=writer, **sides), world)
            path = timed("save", save, world)
            timed("call of an asynchronous save", lambda: behind.save(*args), world)
            timed("until it is complete", behind.wait, world)
            target = {k: torch.empty_like(v) for k, v in tensors.items()}
            timed("bare load", lambda: dcp.load(target, storage_reader=reader, **sides), world)
            timed("load", load, world)
            dist.barrier(group=world.control)
            if rank == 0:
                shutil.rmtree(bare)

        for n in range(ROUNDS):
            one_round(Path(root, f"bare{n}"), Position(step=n + 1))
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        found = run_ranks(2, measure, root, timeout_s=500)[0]
    n = int(found.pop("parameters")[0])
    rows = (
        ("save", "bare save", "of a bare dcp.save"),
        ("load", "bare load", "of a bare dcp.load"),
        ("call of an asynchronous save", "save", "of a blocking save"),
        ("until it is complete", "save", "of a blocking save"),
    )
    for name, other, text in rows:
        pairs = list(zip(found[name], found[other], strict=True))[1:]  # the first warms up
        ratio = statistics.median(a / b for a, b in pairs)
        seconds = statistics.median(a for a, _ in pairs)
        print(
            f"saving   {name:<30} {ratio:6.3f} {text} ({seconds:.2f} s, {n / 1e6:.1f} M)",
            flush=True,
        )


if __name__ == "__main__":
    main()
