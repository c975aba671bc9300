"""What each layout gives on two ranks: speed against ddp, a pipeline's idle time, bytes a rank.

    make bench        (or: python scripts/bench_layouts.py [speed] [bubble] [bytes])

Two ranks of one thread each, the sides in turn within one run; only ratios are worth keeping. A
pipeline is idle for 1 - busy / total of a step: busy is the time that its ranks spend inside the
forward, loss and backward calls of their stages, total what passes on all of them between a barrier
before the step and one after it, so that stages of unequal work and communication count as idle.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]

from ranks import run_ranks  # noqa: E402

WHAT = ("speed", "bubble", "bytes")
ROUNDS = 7
LIMIT_S = 1800
PIXELS = ("data=synthetic", "data.image_size=64", "data.num_samples=512", "data.val_samples=8")
BATCH = "trainer.global_batch_size=32"
MODELS = {  # overrides, steps a round
    "test_vit 64": ((BATCH,), 20),
    "vit_tiny 64": (  # ViT-Tiny has three heads, which two ranks cannot split
        ("model=vit_tiny", "model.args={num_heads: 4}", BATCH),
        3,
    ),
    "convnext_atto 64": (  # with linear layers, which is what tensor parallelism splits
        ("model=timm", "model.name=convnext_atto", "model.args={conv_mlp: false}", BATCH),
        3,
    ),
}
DDP = ("parallel=ddp",)
SIDES = {
    "fsdp": ("parallel=fsdp",),
    "tensor": ("parallel=tensor",),
    "1F1B": ("parallel=pipeline",),
    "Interleaved1F1B": ("parallel=pipeline", "parallel.schedule=Interleaved1F1B"),
    "ZBVZeroBubble": ("parallel=pipeline", "parallel.schedule=ZBVZeroBubble"),
}
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
MICRO = 4  # samples of a micro-batch where idle time is measured


def batches_of(job: Any, n: int = 4) -> list:
    """The first n batches of a job's rank, ready to be used again and again."""
    from meshwork.trainer import Position, train_batches

    job.engine.train()
    taken = islice(train_batches(job, Position()), n)
    return [batch.to(job.world.device, job.engine.dtype) for batch in taken]


def timed(job: Any, batches: list) -> float:
    """Seconds from a barrier before steps on these batches to one after them."""
    import torch.distributed as dist

    dist.barrier(group=job.world.control)
    began = time.perf_counter()
    for batch in batches:
        job.engine.step(batch)
        job.engine.update(job.optimizer)
    dist.barrier(group=job.world.control)
    return time.perf_counter() - began


def rates(rank: int, given: list[str], sides: dict, steps: int, rounds: int) -> dict:
    """Seconds of so many steps, by side and round."""
    from jobs import composed, job_of, joined

    with joined(dict(os.environ)) as world:
        jobs = {k: job_of(composed(*given, *more), world) for k, more in sides.items()}
        source = {k: list(islice(cycle(batches_of(j)), steps)) for k, j in jobs.items()}
        for k, job in jobs.items():
            timed(job, source[k][:2])
        found: dict[str, list[float]] = {k: [] for k in sides}
        for _ in range(rounds):
            for k, job in jobs.items():
                found[k].append(timed(job, source[k]))
    return found


def bench_speed(rounds: int) -> None:
    """Samples a second against ddp on as many ranks: the median of the rounds' ratios."""
    for name, (given, steps) in MODELS.items():
        sides = {"ddp": DDP, **SIDES}
        args = ([*PIXELS, *given], sides, steps, rounds)
        seconds = run_ranks(2, rates, *args, timeout_s=LIMIT_S)[0]
        each = statistics.median(seconds["ddp"]) / steps * 1e3
        for side in SIDES:
            pairs = zip(seconds["ddp"], seconds[side], strict=True)
            ratios = sorted(ddp / own for ddp, own in pairs)
            ratio = statistics.median(ratios)
            print(
                f"speed    {name:<16} {side:<15} {ratio:6.3f} of ddp's samples/s "
                f"({ratios[0]:.3f} to {ratios[-1]:.3f}; ddp {each:,.1f} ms a step)",
                flush=True,
            )


def clocked(call: Callable, busy: list[float]) -> Callable:
    """The call, its seconds added to busy."""

    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            busy.append(time.perf_counter() - began)

    return run


def clock(schedule: Any) -> list[float]:
    """The list to which each compute call of a schedule of torch will add its seconds."""
    busy: list[float] = []
    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            setattr(stage, name, clocked(getattr(stage, name), busy))
    schedule._loss_fn = clocked(schedule._loss_fn, busy)
    return busy


def idle(rank: int, cases: dict, rounds: int) -> dict:
    """(busy seconds, seconds of the step) of this rank, by case and round."""
    from jobs import composed, job_of, joined

    found: dict[Any, list] = {k: [] for k in cases}
    with joined(dict(os.environ)) as world:
        jobs = {k: job_of(composed(*given), world) for k, given in cases.items()}
        source = {k: batches_of(job, 1) for k, job in jobs.items()}
        clocks = {k: clock(job.engine.schedule) for k, job in jobs.items()}
        for _ in range(rounds + 1):  # the first is not counted
            for k, job in jobs.items():
                clocks[k].clear()
                seconds = timed(job, source[k])
                found[k].append((sum(clocks[k]), seconds))
    return {k: v[1:] for k, v in found.items()}


def bench_bubble(rounds: int) -> None:
    """The idle share of a pipeline's step, in the median round, beside the schedule's formula."""
    from meshwork.overview import bubble_of

    given = [*PIXELS, *MODELS["vit_tiny 64"][0], "parallel=pipeline", "optimizer=sgd"]
    given.append(f"trainer.micro_batch_size={MICRO}")
    cases = {
        (s, m): (*given, f"parallel.schedule={s}", f"trainer.global_batch_size={m * MICRO}")
        for s in SCHEDULES
        for m in (4, 16)
    }
    ranks = run_ranks(2, idle, cases, rounds, timeout_s=LIMIT_S)
    for schedule, m in cases:
        steps = list(zip(*(r[schedule, m] for r in ranks), strict=True))
        shares = [[1 - busy / seconds for busy, seconds in step] for step in steps]
        middle = sorted(shares, key=statistics.mean)[len(shares) // 2]
        share = statistics.mean(middle)
        each = ", ".join(f"{s:.3f}" for s in middle)
        print(
            f"bubble   {schedule:<21} m={m:<3} {share:6.3f} of the time idle "
            f"({bubble_of(schedule, 2, m):.3f} by the formula; ranks {each})",
            flush=True,
        )


def held(rank: int, cases: dict) -> dict:
    """Bytes of this rank's parameters, reduced gradients and optimizer states, by case."""
    import torch
    from jobs import composed, job_of, joined

    from meshwork.parallel.fsdp import local

    def size(tensors: list) -> int:
        return sum(local(t).numel() * t.element_size() for t in tensors)

    alone = os.environ["WORLD_SIZE"] == "1"
    found = {}
    with joined(None if alone else dict(os.environ)) as world:
        for name, given in cases.items():
            job = job_of(composed(*given), world)
            (batch,) = batches_of(job, 1)
            job.engine.step(batch)
            parameters = [p for _, p in job.engine.named_parameters()]
            gradients = [p.grad for p in parameters if p.grad is not None]
            found[name] = {"parameters": size(parameters), "gradients": size(gradients)}
            job.engine.update(job.optimizer)
            state = [t for values in job.optimizer.state.values() for t in values.values()]
            found[name]["optimizer"] = size([t for t in state if torch.is_tensor(t) and t.ndim])
    return found


def bench_bytes() -> None:
    """Bytes of the rank that holds most, between steps, beside the half of one process."""
    layouts = ("fsdp", "pipeline", "tensor")
    cases = {
        (name, layout): (*PIXELS, *given, f"parallel={layout}")
        for name, (given, _) in MODELS.items()
        for layout in layouts
    }
    whole = {name: (*PIXELS, *given) for name, (given, _) in MODELS.items()}
    one = run_ranks(1, held, whole, timeout_s=LIMIT_S)[0]
    ranks = run_ranks(2, held, cases, timeout_s=LIMIT_S)
    for name, layout in cases:
        most = max((r[name, layout] for r in ranks), key=lambda kinds: sum(kinds.values()))
        kinds = ", ".join(f"{k} {v / one[name][k]:.3f}" for k, v in most.items())
        total = sum(most.values())
        share = total / sum(one[name].values())
        print(
            f"bytes    {name:<16} {layout:<15} {share:6.3f} of one process "
            f"(0.5 is ideal; {kinds}; {total / 2**20:.1f} MiB)",
            flush=True,
        )


def main(what: tuple[str, ...] = WHAT, rounds: int = ROUNDS) -> None:
    if "speed" in what:
        bench_speed(rounds)
    if "bubble" in what:
        bench_bubble(rounds)
    if "bytes" in what:
        bench_bytes()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=WHAT)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    main(**vars(parser.parse_args()))
