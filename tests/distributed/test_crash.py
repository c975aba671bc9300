"""kill -9 at any moment: the run goes on, and ends with the weights of one never killed."""

import random
import time
from pathlib import Path

import pytest
import torch
from ranks import Started, train

from meshwork.checkpoint import read_model
from meshwork.checkpoint_files import complete, newest, problem

RUN = ("logger=none", "data=synthetic", "data.workers=0", "data.num_samples=64", "parallel=fsdp")
RUN += ("data.val_samples=16", "trainer.global_batch_size=8", "model.drop_rate=0.1")
RUN += ("checkpoint.every_n_steps=1", "trainer.val_every_n_epochs=1", "trainer.ema_decay=0.9")
RUN += ("trainer.log_every_n_steps=1",)


def slow_parts(rank: int) -> None:
    """Every step takes a little, and every part of a save, so that kills hit each of them."""
    from meshwork import checkpoint, checkpoint_files, tensor_files
    from meshwork.parallel.engine import Engine

    def slowed(function: object, seconds: float) -> object:
        def slow(*given: object, **named: object) -> object:
            time.sleep(seconds)
            return function(*given, **named)

        return slow

    Engine.update = slowed(Engine.update, 0.03)
    tensor_files.write_from = slowed(tensor_files.write_from, 0.05)
    checkpoint_files._write_through = slowed(checkpoint_files._write_through, 0.03)
    checkpoint.tidy = slowed(checkpoint.tidy, 0.03)


def kill_in_a_save(started: Started, folder: Path, chance: random.Random) -> bool:
    """Kill all ranks while a checkpoint is being written; False where the run ended before."""
    skip = chance.randrange(4)
    seen: set[str] = set()
    while any(p.is_alive() for p in started.processes):
        found = {p.name for p in (folder / "checkpoints").glob(".step_*.partial")}
        seen |= found
        if found and len(seen) > skip:
            time.sleep(chance.uniform(0, 0.2))
            torn = bool(list((folder / "checkpoints").glob(".step_*")))
            started.kill()
            return torn
        time.sleep(0.001)
    return False


@pytest.mark.parametrize(
    ("rounds", "steps", "more"),
    [
        pytest.param(5, 32, (), id="five"),
        pytest.param(4, 32, ("checkpoint.async_save=true",), id="four in the background"),
        pytest.param(30, 160, (), id="thirty", marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment_a_run_ends_as_if_it_never_was(
    rounds: int, steps: int, more: tuple, tmp_path: Path
) -> None:
    chance, folder = random.Random(rounds), tmp_path / "run"
    given = (*RUN, *more, f"trainer.max_steps={steps}", "run.dir=run")
    whole = train(2, *given, "run.dir=whole", cwd=tmp_path, timeout_s=240)
    assert whole.codes == [0, 0], whole.all_err
    inside, reached, done = 0, 0, 0
    while done < rounds:
        started = Started(2, *given, cwd=tmp_path, before=slow_parts)
        if done % 3 == 0:  # start-up and training, and saves by chance
            time.sleep(chance.uniform(0, 5))
            torn = bool(list((folder / "checkpoints").glob(".step_*.partial")))
            started.kill()
        else:
            torn = kill_in_a_save(started, folder, chance)
        inside, done = inside + torn, done + 1
        good = [p for p in complete(folder) if problem(p) is None]
        now = int(good[-1].name[5:]) if good else 0
        assert now >= reached, (now, reached)  # what was complete stays
        assert good == complete(folder)
        reached = now
        if reached == steps:
            break
    assert inside * 2 >= done, (inside, done)
    ended = train(2, *given, cwd=tmp_path, timeout_s=240)
    assert ended.codes == [0, 0], ended.all_err
    for kind in ("model", "ema"):
        a, b = (read_model(newest(tmp_path / name), kind) for name in ("whole", "run"))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    steps_told = {line["step"] for line in ended.lines("train/loss")}
    assert steps_told == set(range(1, steps + 1))
