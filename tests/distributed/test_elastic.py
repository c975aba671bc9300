"""Nodes come and go under torchrun: the run goes on, in its folder, with its numbers."""

import json
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


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_four_ranks_become_two_become_three(layout: str, network: Network, tmp_path: Path) -> None:
    """A node is lost, then another one joins; a worker is killed on the way."""
    given = ("trainer.max_steps=600", f"parallel={layout}")
    wanted = unbroken(tmp_path, *given)
    first, second = network.node(2, *RUN, *given), network.node(2, *RUN, *given)
    wait_until(lambda: step_of(tmp_path) >= 25, 90, "step 25 on four ranks")
    assert len(first.workers()) == len(second.workers()) == 2
    second.kill()
    before = step_of(tmp_path)
    wait_until(lambda: lines(tmp_path)[-1]["attempt"] == 2, 90, "a step without the second node")
    assert lines(tmp_path)[-1]["step"] > before // 10 * 10 - 10  # at most an interval lost
    network.node(1, *RUN, *given)
    wait_until(lambda: lines(tmp_path)[-1]["attempt"] == 3, 90, "a step with the third node")
    joined = [line for line in lines(tmp_path) if line["attempt"] == 3]
    last = [line["step"] for line in lines(tmp_path) if line["attempt"] == 2][-1]
    assert joined[0]["step"] == last + 1  # nothing is lost where a node joins
    for node in network.nodes[::2]:
        assert node.ended(150) == 0, node.log.read_text()[-3000:]
    check(tmp_path, wanted, 3)
