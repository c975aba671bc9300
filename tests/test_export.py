"""A trained model, loaded from its run folder or exported for timm alone, gives the same logits."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from jobs import composed
from PIL import Image
from ranks import ROOT, train

import meshwork
from meshwork import build
from meshwork.checkpoint import read_model
from meshwork.checkpoint_files import newest
from meshwork.config import ConfigError

QUICK = ("logger=none", "data.workers=0", "data.num_samples=32", "data.val_samples=16")
QUICK += ("trainer.global_batch_size=8", "trainer.max_steps=2", "run.dir=run", "optimizer.lr=0.01")
RUNS = {
    "vit": (1, ("model.args={patch_size: 8, depth: 2}",)),
    "vit, averaged, under fsdp": (2, ("parallel=fsdp", "trainer.ema_decay=0.5")),
    "batchnorm": (1, ("model=resnet18", "trainer.ema_decay=0.5")),
}


@pytest.fixture(scope="module", params=list(RUNS))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    n, given = RUNS[request.param]
    folder = tmp_path_factory.mktemp("trained")
    ended = train(n, *QUICK, *given, cwd=folder)
    assert ended.codes == [0] * n, ended.all_err
    return folder / "run"


def digits(run: Path) -> tuple[list[Image.Image], torch.Tensor]:
    """Three images of the validation set, and as the validation of a run sees them."""
    name = "resnet18" if "resnet18" in (run / "config.yaml").read_text() else "test_vit"
    cfg = composed(f"model={name}")
    data = build.build_data(cfg)
    model, task = build.build_model(cfg, data), build.build_task(cfg, data)
    samples = build.build_samples(cfg, data.val, data, model, task, train=False)
    images = [data.val[i][0] for i in range(3)]
    return images, torch.stack([samples.transform(image) for image in images])


def test_a_loaded_model_is_the_trained_one(run: Path) -> None:
    model, transform, classes = meshwork.load(run)
    assert not model.training and classes == tuple("0123456789")
    images, seen = digits(run)
    assert torch.equal(torch.stack([transform(image) for image in images]), seen)
    path = newest(run)
    weights = read_model(path) | read_model(path, "ema")
    found = model.state_dict()
    assert weights.keys() == found.keys()
    assert all(torch.equal(weights[k], found[k]) for k in weights)
    assert all(torch.equal(a, b) for a, b in zip(
        meshwork.load(path)[0].state_dict().values(), found.values(), strict=True))  # fmt: skip
    best = json.loads((run / "checkpoints" / "best.json").read_text())["checkpoint"]
    averaged = read_model(run / "checkpoints" / best, "ema")
    for name, value in meshwork.load(run, which="best")[0].named_parameters():
        assert not averaged or torch.equal(value, averaged[name])


def test_timm_alone_gives_the_same_logits_from_an_exported_file(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    command = [sys.executable, str(ROOT / "scripts" / "export.py"), str(run), "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    facts = json.loads(file.with_suffix(".json").read_text())
    model = timm.create_model(facts["architecture"], checkpoint_path=str(file), **facts["args"])
    transform = timm.data.create_transform(**facts["transform"])
    loaded, ours, classes = meshwork.load(run)
    images = [image.resize((50, 44)) for image in digits(run)[0]]  # 32 x 32 we take as they are
    seen = torch.stack([ours(image) for image in images])
    batch = torch.stack([transform(image) for image in images])
    assert torch.allclose(batch, seen, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(model.eval()(seen), loaded(seen))
    assert facts["classes"] == list(classes)
    scope: dict = {}
    exec(done.stdout, scope)  # the lines that it prints
    with torch.no_grad():
        assert torch.equal(scope["model"](seen), loaded(seen))
    assert np.allclose(scope["transform"](images[0]), batch[0])


def test_wrong_paths_are_answered_by_a_sentence(run: Path, tmp_path: Path) -> None:
    for path, which, said in (
        (tmp_path / "nowhere", "last", "does not exist: expected a run folder"),
        (tmp_path, "last", "holds no complete checkpoint"),
        (newest(run), "best", "is one checkpoint"),
        (run, "newest", "expected last or best"),
    ):
        with pytest.raises(ConfigError, match=said):
            meshwork.load(path, which=which)


def test_a_config_that_would_run_something_else_is_refused(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    text = (copy / "config.yaml").read_text()
    marker = tmp_path / "marker"
    evil = text.replace("_target_: meshwork.models.timm_model", "_target_: os.system")
    assert evil != text
    (copy / "config.yaml").write_text(evil.replace("name: ", f"name: touch {marker} #", 1))
    with pytest.raises(ConfigError, match=r"os\.system"):
        meshwork.load(copy)
    assert not marker.exists()


def test_importing_the_package_stays_cheap() -> None:
    code = "import sys, meshwork; assert callable(meshwork.load) and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
