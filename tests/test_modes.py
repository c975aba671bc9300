"""What is done with a trained model: validate, test, predict."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from jobs import composed, job_of, joined
from PIL import Image
from ranks import Ended, train

from meshwork import build
from meshwork.checkpoint import read_model
from meshwork.checkpoint_files import newest

CLASSES = ["cat", "dog", "ähm, fish"]
TINY = ["model.args={patch_size: 8, depth: 1}", "logger=none", "data.workers=0"]
TRAIN = ["trainer.global_batch_size=8", "trainer.max_steps=2", "trainer.micro_batch_size=4"]


def fill(folder: Path, n: int, draw: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    for i in range(n):
        pixels = draw.integers(0, 255, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}, größer.png")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes, to train on, to validate and to test; and a tree without labels."""
    root, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, n in (("train", 4), ("val", 3), ("test", 2)):
        for name in CLASSES:
            fill(root / "set" / split / name, n, draw)
    fill(root / "unlabelled" / "a" / "b", 4, draw)
    fill(root / "unlabelled" / "c", 3, draw)
    broken = root / "unlabelled" / "c" / "broken.png"
    broken.write_bytes(b"not an image")
    return root


@pytest.fixture(scope="module")
def trained(images: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Ended]:
    """What was typed for a run on the images, and how it ended."""
    folder = tmp_path_factory.mktemp("trained")
    given = ["data=imagefolder", f"data.root={images / 'set'}", "data.image_size=32", *TINY, *TRAIN]
    ended = train(1, *given, f"run.dir={folder / 'run'}", cwd=folder)
    assert ended.codes == [0], ended.all_err
    return given, ended


def look(n: int, trained: tuple, mode: str, cwd: Path, *more: str) -> Ended:
    given, ended = trained
    resume = f"checkpoint.resume={ended.folder}"
    found = train(n, *given, f"mode={mode}", resume, *more, cwd=cwd)
    assert found.codes == [0] * n, found.all_err
    return found


@pytest.mark.parametrize("n", [1, 2])
def test_validate_gives_what_training_ended_with(n: int, trained: tuple, tmp_path: Path) -> None:
    found = look(n, trained, "validate", tmp_path)
    wanted = trained[1].result()["final"]
    for name in ("val/loss", "val/top1", "val/top5", "val/count"):
        assert found.result()["final"][name] == pytest.approx(wanted[name], rel=1e-6)
    assert found.result()["final"]["val/count"] == 9
    assert found.folder != trained[1].folder
    assert (found.folder / "confusion.png").exists() and (found.folder / "worst.png").exists()


@pytest.mark.parametrize("n", [1, 2])
def test_test_looks_at_the_test_set(n: int, trained: tuple, images: Path, tmp_path: Path) -> None:
    """All of it and no other: more ranks than a micro-batch needs change nothing."""
    found = look(n, trained, "test", tmp_path)
    paths, scores = forward(trained, sorted_files(images / "set" / "test"))
    labels = torch.tensor([CLASSES.index(p.parent.name) for p in paths])
    wanted = torch.nn.functional.cross_entropy(scores, labels).item()
    final = found.result()["final"]
    assert final["test/count"] == 6
    assert final["test/loss"] == pytest.approx(wanted, rel=1e-5)
    assert final["test/top1"] == pytest.approx((scores.argmax(1) == labels).float().mean().item())
    assert not any(k.startswith("val/") for k in final)


def sorted_files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*.png") if p.name != "broken.png")


def forward(trained: tuple, paths: list[Path]) -> tuple[list[Path], torch.Tensor]:
    """The scores of files, read and put through the saved weights one after another."""
    given, ended = trained
    with joined() as world:
        job = job_of(composed(*given), world)
        module = job.engine.module
        module.load_state_dict(read_model(newest(ended.folder)))
        module.eval()
        samples = build.build_samples(job.cfg, job.data.val, job.data, module, None, False)
        images = [samples.transform(Image.open(p).convert("RGB")) for p in paths]
        with torch.no_grad():
            return paths, torch.cat([module(image[None]) for image in images])


def predictions(ended: Ended) -> tuple[list[str], list[list[str]]]:
    with open(ended.folder / "predictions.csv", newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    return header, rows


def assert_right(trained: tuple, ended: Ended, files: list[Path]) -> None:
    header, rows = predictions(ended)
    assert header == ["path", "label", *CLASSES]
    assert [row[0] for row in rows] == [str(p) for p in files]
    _, scores = forward(trained, files)
    wanted = scores.softmax(1)
    found = torch.tensor([[float(x) for x in row[2:]] for row in rows])
    assert torch.allclose(found, wanted, atol=1e-5)
    assert [row[1] for row in rows] == [CLASSES[i] for i in wanted.argmax(1)]
    assert not list(ended.folder.glob(".predictions*"))


@pytest.mark.parametrize("n", [1, 2])
def test_predict_writes_the_probabilities_of_every_class_in_order(
    n: int, trained: tuple, images: Path, tmp_path: Path
) -> None:
    found = look(n, trained, "predict", tmp_path)
    assert_right(trained, found, sorted_files(images / "set" / "test"))
    assert f"6 predictions in {found.folder / 'predictions.csv'}" in found.all_out


@pytest.mark.parametrize("n", [1, 2])
def test_predict_takes_a_tree_without_labels_and_leaves_bad_images_out(
    n: int, trained: tuple, images: Path, tmp_path: Path
) -> None:
    tree = images / "unlabelled"
    more = (f"data.predict_root={tree}", "data.on_bad_image=skip")
    found = look(n, trained, "predict", tmp_path, *more)
    assert_right(trained, found, sorted_files(tree))
    listed = "".join(p.read_text() for p in (found.folder / "logs").glob("bad_images*"))
    assert str(tree / "c" / "broken.png") in listed
    assert "skipped" in found.all_out and "broken.png" in found.all_out


def test_predict_names_a_bad_image_that_it_may_not_skip(
    trained: tuple, images: Path, tmp_path: Path
) -> None:
    given, ended = trained
    more = [f"data.predict_root={images / 'unlabelled'}", f"checkpoint.resume={ended.folder}"]
    found = train(2, *given, "mode=predict", *more, cwd=tmp_path)
    assert 0 not in found.codes and found.all_err.count("broken.png") == 1
    assert "data.on_bad_image=skip" in found.all_err


def test_predict_numbers_samples_that_are_no_files(tmp_path: Path) -> None:
    """Also of a part of a data set; weights that nobody trained are called so."""
    ended = train(1, *TINY, "mode=predict", "data.val_samples=5", cwd=tmp_path)
    assert ended.codes == [0], ended.all_err
    header, rows = predictions(ended)
    assert header == ["path", "label", *"0123456789"]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4"]
    assert "these weights are untrained" in ended.all_out


def test_a_set_that_is_not_there_is_said(tmp_path: Path) -> None:
    ended = train(1, *TINY, "mode=test", cwd=tmp_path)
    assert ended.codes == [2]
    assert "mode=test: this data has no test set" in ended.all_err


def test_looking_needs_nothing_that_only_training_needs(trained: tuple, tmp_path: Path) -> None:
    """A batch of training that does not divide or fill, a warm-up longer than the data."""
    more = ("trainer.global_batch_size=64", "scheduler.warmup_steps=100", "trainer.max_steps=50")
    found = look(2, trained, "validate", tmp_path, *more)
    assert found.result()["final"]["val/count"] == 9
    norm = ["model=timm", "model.name=test_resnet", "trainer.global_batch_size=32", *TINY[1:]]
    found = train(3, *norm, "mode=validate", cwd=tmp_path)
    assert found.codes == [0, 0, 0], found.all_err
    assert found.result()["final"]["val/count"] == 359
