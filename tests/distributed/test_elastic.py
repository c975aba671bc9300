"""Nodes come and go under torchrun: the run goes on, in its folder, with its numbers."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import Network, namespaces_work, wait_until
from ranks import train

RUN = ("data=synthetic", "data.workers=0", "data.num_samples=640", "trainer.precision=fp64")
RUN += ("trainer.global_batch_size=24", "trainer.log_every_n_steps=1", "logger.mode=offline")
RUN += ("checkpoint.every_n_epochs=null", "checkpoint.every_n_steps=10", "data.val_samples=24")
RUN += ("trainer.val_every_n_epochs=null", "model.args={patch_size: 8, depth: 4}")
AGREE = 1e-9  # of losses in float64 after each change


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    found = Network(tmp_path, namespaces_work())
    yield found
    found.close()


def lines(folder: Path) -> list[dict]:
    """metrics.jsonl of the only run, as far as it is written."""
    files = list(folder.glob("outputs/*_*/metrics.jsonl"))
    assert len(files) <= 1, files
    text = files[0].read_text().splitlines() if files else []
    return [line for line in map(json.loads, filter(complete_line, text)) if "train/loss" in line]


def complete_line(text: str) -> bool:
    return text.endswith("}")


def step_of(folder: Path) -> int:
    return max((line["step"] for line in lines(folder)), default=0)


def unbroken(folder: Path, *given: str) -> list[float]:
    whole = train(1, *RUN, *given, "run.dir=whole", "logger=none", cwd=folder, timeout_s=180)
    assert whole.codes == [0], whole.all_err
    return [line["train/loss"] for line in whole.lines("train/loss")]


def check(folder: Path, wanted: list[float], attempts: int) -> None:
    """Every step once or again, each with the loss of the unbroken run; one folder, one W&B run."""
    found = lines(folder)
    assert {line["step"] for line in found} == set(range(1, len(wanted) + 1))
    for line in found:
        assert line["train/loss"] == pytest.approx(wanted[line["step"] - 1], rel=AGREE), line
    assert {line["attempt"] for line in found} == set(range(1, attempts + 1))
    (run,) = folder.glob("outputs/*_*")
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    names = {p.name.rpartition("-")[2] for p in run.glob("wandb/offline-run-*")}
    assert len(names) == 1 and run.name.endswith(names.pop())


def attempt_of(folder: Path) -> int:
    return lines(folder)[-1]["attempt"]


def steps_of_attempt(folder: Path, attempt: int) -> list[int]:
    return [line["step"] for line in lines(folder) if line["attempt"] == attempt]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_four_ranks_become_two_become_three(layout: str, network: Network, tmp_path: Path) -> None:
    """A node is lost at once, then another one joins."""
    given = ("trainer.max_steps=300", f"parallel={layout}")
    wanted = unbroken(tmp_path, *given)
    first, second = network.node(2, *RUN, *given), network.node(2, *RUN, *given)
    wait_until(lambda: step_of(tmp_path) >= 15, 90, "step 15 on four ranks")
    assert len(first.workers()) == len(second.workers()) == 2
    second.kill()
    before = step_of(tmp_path)
    wait_until(lambda: attempt_of(tmp_path) == 2, 90, "a step without the second node")
    assert steps_of_attempt(tmp_path, 2)[0] > before - 10  # at most an interval is lost
    third = network.node(1, *RUN, *given)
    wait_until(lambda: attempt_of(tmp_path) == 3, 90, "a step with the third node")
    last = steps_of_attempt(tmp_path, 2)[-1]
    assert steps_of_attempt(tmp_path, 3)[0] == last + 1  # nothing is lost where a node joins
    for node in (first, third):
        assert node.ended(150) == 0, node.log.read_text()[-3000:]
    check(tmp_path, wanted, 3)


def test_a_worker_is_killed_and_a_node_leaves(network: Network, tmp_path: Path) -> None:
    """Pipeline and shards on four ranks, again on four, then on the two that stay."""
    given = ("trainer.max_steps=120", "parallel=pipeline_fsdp", "trainer.micro_batch_size=2")
    wanted = unbroken(tmp_path, *(o for o in given if not o.startswith("parallel")))
    first, second = network.node(2, *RUN, *given), network.node(2, *RUN, *given)
    wait_until(lambda: step_of(tmp_path) >= 15, 90, "step 15 on four ranks")
    os.kill(second.workers()[0], signal.SIGKILL)
    wait_until(lambda: attempt_of(tmp_path) == 2, 90, "a step after the kill")
    second.leave()
    wait_until(lambda: attempt_of(tmp_path) == 3, 90, "a step without the second node")
    last = steps_of_attempt(tmp_path, 2)[-1]
    assert steps_of_attempt(tmp_path, 3)[0] == last + 1
    assert first.ended(150) == 0, first.log.read_text()[-3000:]
    second.ended(30)
    check(tmp_path, wanted, 3)


def test_a_count_that_does_not_fit_is_refused_with_those_that_do(
    network: Network, tmp_path: Path
) -> None:
    node = network.node(3, *RUN, "parallel=pipeline_fsdp", "trainer.max_steps=5")
    wait_until(lambda: "WORLD_SIZE=3" in node.log.read_text(), 60, "the refusal")
    assert "start 2 or 4 processes" in node.log.read_text()
    assert not (tmp_path / "outputs").exists()
