"""What the template costs: its loop against a hand-written one, its sample path, its start.

    make bench        (or: python scripts/bench.py [loop] [samples] [start] [layouts] [saving])

Everything is measured in one run, the two sides in turn, on one thread; only ratios are worth
keeping. Losses of both loops are compared, so that both do the same work. `layouts` is all of
bench_layouts.py.
"""

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, default_collate  # noqa: E402

from meshwork import build, config, optim, trainer  # noqa: E402
from meshwork.batch import Batch  # noqa: E402
from meshwork.checkpoint import Saver  # noqa: E402
from meshwork.data.loader import Samples, loader, train_steps  # noqa: E402
from meshwork.data.splits import Splits  # noqa: E402
from meshwork.distributed import World  # noqa: E402
from meshwork.job import Job  # noqa: E402
from meshwork.mesh import Layout  # noqa: E402
from meshwork.parallel.check import check  # noqa: E402
from meshwork.parallel.parallelize import parallelize  # noqa: E402
from meshwork.ranks import Ranks  # noqa: E402
from meshwork.report import Report  # noqa: E402
from meshwork.rundir import RunDir  # noqa: E402
from meshwork.stopping import Stop  # noqa: E402

LOG_EVERY = 50
ROUNDS = 5


def configure(*overrides: str) -> config.Config:
    """A config of conf/ as train.py composes it."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return config.load(compose("train", list(overrides)))


def batches(n: int, size: int, shape: tuple[int, ...], classes: int) -> list[Batch]:
    """n collated batches of random inputs and labels."""
    generator = torch.Generator().manual_seed(0)
    return [
        Batch(
            (torch.randn(size, *shape, generator=generator),),
            torch.randint(classes, (size,), generator=generator),
            torch.ones(size),
            size,
            uniform=True,
        )
        for _ in range(n)
    ]


def whole(batch: Batch) -> Batch:
    """Collation for batches that are collated already."""
    return batch


class Quiet(Report):
    """The template's report with its lines in metrics.jsonl alone."""

    def begin(self, total: int, start: int) -> None:
        self.progress = type("Silent", (), {"train": lambda *_: None, "note": lambda *_: None})()

    def batch_picture(self, batch: Batch) -> None:
        pass


def ours(model: nn.Module, source: DataLoader, cfg: config.Config, folder: Path) -> tuple:
    """The template's own loop; returns the logged losses and the seconds of the loop alone."""
    world = World(Ranks(), torch.device("cpu"), hosts=("bench",))
    data = Splits(train=range(10**9), classes=tuple("0123456789"), in_chans=3, image_size=64)
    task = build.build_task(cfg, data)
    layout = Layout()
    plan, split = check(cfg, model, task, layout, world.device, None)
    horizon, options = optim.check(cfg, model, data, plan)
    run = RunDir(folder, "bench", 1)
    engine = parallelize(model, task, cfg, layout, plan, split, world)
    optimizer = optim.build_optimizer(cfg.optimizer, engine.named_parameters(), options)
    schedule = optim.Schedule(cfg.scheduler, optimizer, horizon)
    report = Quiet(cfg, run, world, [], data, model, task)
    saver, stop = Saver(cfg.checkpoint, run.checkpoints, world), Stop(world, folder)
    parts = engine, plan, horizon, data, optimizer, schedule, report, saver, stop
    job = Job(cfg, world, run, *parts)
    began = time.perf_counter()
    trainer.fit(job)
    seconds = time.perf_counter() - began
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train/loss"] for line in lines], seconds


def by_hand(model: nn.Module, source: DataLoader, cfg: config.Config, folder: Path) -> tuple:
    """What a researcher writes without a template: the same work, no more."""
    steps = cfg.trainer.max_steps
    data = Splits(train=range(10**9))
    plan, _ = check(cfg, model, None, Layout(), torch.device("cpu"), None)
    _, options = optim.check(cfg, model, data, plan)
    optimizer = optim.build_optimizer(cfg.optimizer, model.named_parameters(), options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: optim.cosine(s / steps))
    losses, gathered, since = [], 0.0, 0
    model.train()
    began = time.perf_counter()
    with open(folder / "metrics.jsonl", "w") as file:
        for step, batch in enumerate(source, 1):
            loss = nn.functional.cross_entropy(model(batch.inputs[0]), batch.target)
            loss.backward()
            if step % LOG_EVERY == 0 or step in (1, steps):
                norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            gathered += loss.detach()
            since += 1
            if step % LOG_EVERY == 0 or step in (1, steps):
                losses.append(gathered.item() / since)
                line = {"step": step, "loss": losses[-1], "norm": norm.item(), "time": time.time()}
                file.write(json.dumps(line) + "\n")
                file.flush()
                gathered, since = 0.0, 0
    return losses, time.perf_counter() - began


def bench_loop(name: str, make: Any, shape: tuple[int, ...], size: int, steps: int) -> float:
    """Median over rounds of (template's seconds / hand-written seconds)."""
    overrides = [
        "data.workers=0",
        f"trainer.max_steps={steps}",
        f"trainer.global_batch_size={size}",
    ]
    overrides += ["checkpoint.every_n_epochs=null", "logger=none", "optimizer.weight_decay=0.0"]
    cfg = configure(*overrides, f"trainer.log_every_n_steps={LOG_EVERY}")
    made = batches(min(steps, 64), size, shape, 10)
    source = DataLoader(
        [made[i % len(made)] for i in range(steps)], batch_size=None, collate_fn=whole
    )
    trainer.train_batches = lambda job, position: iter(source)
    trainer.save = lambda *_: None  # saving is measured by itself
    ratios = []
    for _ in range(ROUNDS):
        seconds, losses = {}, {}
        for side in (by_hand, ours):
            torch.manual_seed(0)
            model = make()
            with tempfile.TemporaryDirectory() as folder:
                losses[side], seconds[side] = side(model, source, cfg, Path(folder))
        for a, b in zip(losses[by_hand], losses[ours], strict=True):
            assert abs(a - b) <= 1e-4 * abs(a), f"{name}: the loops part: {a} and {b}"
        ratios.append(seconds[ours] / seconds[by_hand])
    ratio = statistics.median(ratios)
    each = seconds[by_hand] / steps * 1e6
    print(
        f"loop     {name:<16} {ratio:6.3f} of a hand-written loop ({each:,.0f} us a step)",
        flush=True,
    )
    return ratio


class Plain(torch.utils.data.Dataset):
    """A data set with its transform, as one writes it without a template."""

    def __init__(self, dataset: Any, transform: Any):
        self.dataset, self.transform = dataset, transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple:
        image, label = self.dataset[index]
        return self.transform(image), label


def bench_samples(name: str, *overrides: str) -> float:
    """Median ratio of seconds a sample: order, seed, transform, collate against a plain
    DataLoader."""
    cfg = configure("data.workers=0", *overrides)
    data = build.build_data(cfg)
    task = build.build_task(cfg, data)
    model = build.build_model(cfg, data)
    samples: Samples = build.build_samples(cfg, data.train, data, model, task, True)
    plan, _ = check(cfg, model, task, Layout(), torch.device("cpu"), None)
    n_steps = max(1, min(20, len(samples) // plan.global_batch))
    ratios = []
    for _ in range(ROUNDS):
        steps = train_steps(len(samples), plan, 0, 0, 0, 0, True)
        mine = iter(loader(samples, steps, 0, torch.device("cpu")))
        theirs = iter(
            DataLoader(
                Plain(data.train, samples.transform),
                plan.global_batch,
                shuffle=True,
                collate_fn=default_collate,
            )
        )
        seconds = []
        for source in (theirs, mine):
            began = time.perf_counter()
            for _ in range(n_steps):
                next(source)
            seconds.append((time.perf_counter() - began) / (n_steps * plan.global_batch))
        ratios.append((seconds[1] / seconds[0], *seconds))
    ratio, theirs_s, mine_s = sorted(ratios)[len(ratios) // 2]
    print(
        f"samples  {name:<16} {ratio:6.3f} of a plain DataLoader "
        f"({mine_s * 1e6:,.0f} against {theirs_s * 1e6:,.0f} us a sample)",
        flush=True,
    )
    return ratio


BARE = """
import torch, timm
model = timm.create_model("test_vit", num_classes=10, img_size=32, patch_size=8)
optimizer = torch.optim.AdamW(model.parameters())
loss = torch.nn.functional.cross_entropy(model(torch.randn(64, 3, 32, 32)), torch.zeros(64).long())
loss.backward()
optimizer.step()
print("step 1/1", flush=True)
"""


def bench_start() -> dict[str, float]:
    """Median seconds from the command to the end of the first step, as ratios to a bare script."""
    found: dict[str, list[float]] = {}
    quick = ["data=synthetic", "logger=none", "data.workers=0"]
    with tempfile.TemporaryDirectory() as folder:
        one = [sys.executable, str(ROOT / "train.py"), "trainer.max_steps=1"]
        one += ["checkpoint.every_n_epochs=null", f"run.root={folder}"]
        sides = {"bare": [sys.executable, "-c", BARE], "quick": one + quick, "default": one}
        for _ in range(ROUNDS):
            for name, command in sides.items():
                found.setdefault(name, []).append(_to_first_step(command))
    ratios = {n: statistics.median(v) / statistics.median(found["bare"]) for n, v in found.items()}
    print(
        f"start    logger=none data=synthetic {ratios['quick']:6.3f} of a bare script", flush=True
    )
    print(
        f"start    default                    {ratios['default']:6.3f} of a bare script", flush=True
    )
    return ratios


def _to_first_step(command: list[str]) -> float:
    """Seconds from the start of a process to the line of its first step."""
    began, seconds = time.perf_counter(), None
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 1/") and seconds is None:
            seconds = time.perf_counter() - began
    error = process.stderr.read()
    assert process.wait() == 0 and seconds is not None, error
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "what", nargs="*", default=["loop", "samples", "start", "layouts", "saving"]
    )
    what = parser.parse_args().what
    torch.set_num_threads(1)
    import timm

    if "loop" in what:
        bench_loop("linear", lambda: nn.Linear(8, 10), (8,), 32, 3000)
        vit = dict(img_size=64, num_classes=10)
        bench_loop("test_vit 64", lambda: timm.create_model("test_vit", **vit), (3, 64, 64), 32, 60)
        bench_loop(
            "resnet18 64",
            lambda: timm.create_model("resnet18", num_classes=10),
            (3, 64, 64),
            32,
            20,
        )
    if "samples" in what:
        bench_samples("digits")
        bench_samples("synthetic", "data=synthetic", "data.augment.hflip=0.5")
    if "start" in what:
        bench_start()
    for name in ("layouts", "saving"):
        if name in what:
            importlib.import_module(f"bench_{name}").main()


if __name__ == "__main__":
    main()
