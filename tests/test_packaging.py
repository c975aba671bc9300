"""The ways to install agree, and make uses the environment that is active."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIRED = PROJECT["dependencies"] + EXTRAS["dev"] + EXTRAS["tensorboard"]


def canonical(requirement: str) -> str:
    """The name of a package as pip compares it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), "every line is name==version"
    return {canonical(name): version for name, version in pairs}


def test_environment_yml_lists_what_pyproject_lists():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip,) = (d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert [p for p in pip if not p.startswith("-")] == REQUIRED
    assert [p for p in pip if p.startswith("-")] == ["-c constraints.txt", "-e ."]
    assert environment["name"] == PROJECT["name"]
    assert "python=3.11" in environment["dependencies"]
    assert PROJECT["requires-python"] == ">=3.11,<3.14"


def test_constraints_fix_every_required_package_and_no_build_of_torch():
    fixed = constraints()
    assert {canonical(r) for r in REQUIRED} <= set(fixed)
    assert not [n for n in fixed if n.startswith(("nvidia-", "cuda-")) or n == "triton"]
    assert not [v for v in fixed.values() if "+" in v]
    assert "://" not in (ROOT / "constraints.txt").read_text()


def test_constraints_satisfy_pyproject():
    requirements = pytest.importorskip("packaging.requirements")
    fixed = constraints()
    for line in REQUIRED:
        requirement = requirements.Requirement(line)
        assert fixed[canonical(line)] in requirement.specifier, line


def make(*args: str, **env: str) -> str:
    """What make prints, in an environment without an active one but for `env`."""
    hidden = ("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "MAKEFLAGS", "MAKELEVEL")
    clean = {k: v for k, v in os.environ.items() if k not in hidden}
    command = ["make", *args]
    run = subprocess.run(
        command, cwd=ROOT, env=clean | env, capture_output=True, text=True, timeout=20
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture
def prefix(tmp_path) -> str:
    """An environment as far as make looks."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    return str(tmp_path)


def environments(prefix: str) -> list[tuple[dict[str, str], str]]:
    """(variables, environment that make uses) of each situation."""
    return [
        ({}, ".venv"),
        ({"VIRTUAL_ENV": ""}, ".venv"),
        ({"VIRTUAL_ENV": prefix}, prefix),
        ({"CONDA_PREFIX": "/opt/conda", "CONDA_DEFAULT_ENV": "base"}, ".venv"),
        ({"CONDA_PREFIX": prefix, "CONDA_DEFAULT_ENV": "torch"}, prefix),
        ({"VIRTUAL_ENV": prefix, "CONDA_PREFIX": "/x", "CONDA_DEFAULT_ENV": "base"}, prefix),
    ]


@pytest.mark.parametrize("case", range(6))
def test_make_trains_in_the_active_environment_else_in_venv(prefix, case):
    variables, expected = environments(prefix)[case]
    printed = make("-n", "train", "NPROC=3", "ARGS=seed=1", **variables).splitlines()
    assert printed[-1] == (
        "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "
        f"{expected}/bin/torchrun --standalone --nproc-per-node=3 train.py seed=1"
    )


def test_make_installs_once_until_pyproject_or_constraints_change(prefix):
    install = f"{prefix}/bin/python -m pip install -e '.[dev,tensorboard]' -c constraints.txt"
    assert install in make("-n", "test", VIRTUAL_ENV=prefix)
    stamp = Path(prefix) / f".{PROJECT['name']}-installed"
    stamp.touch()
    assert install not in make("-n", "test", VIRTUAL_ENV=prefix)
    os.utime(stamp, (0, 0))
    assert install in make("-n", "test", VIRTUAL_ENV=prefix)


def test_make_test_leaves_out_the_slow_tests(prefix):
    assert f"{prefix}/bin/python -m pytest -m 'not slow'" in make("-n", "test", VIRTUAL_ENV=prefix)


def test_make_alone_lists_the_targets():
    targets = [line.split()[0] for line in make().splitlines()[:-1]]
    assert targets == [
        "help",
        "install",
        "train",
        "test",
        "lint",
        "format",
        "survey",
        "presets",
        "bench",
        "clean",
    ]


@pytest.mark.parametrize(("gpus", "nproc"), [("", 2), ("GPU 0: a\nGPU 1: b\nGPU 2: c", 3)])
def test_make_train_takes_every_gpu_else_two_processes(tmp_path, prefix, gpus, nproc):
    (fake := tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{gpus}'\n")
    fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert f"--nproc-per-node={nproc} " in make("-n", "train", VIRTUAL_ENV=prefix, PATH=path)


def test_continuous_integration_runs_lint_and_tests():
    run = ROOT / ".ci" / "run"
    assert os.access(run, os.X_OK)
    assert run.read_text().splitlines()[-2:] == ["make lint", "make test"]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    commands = [step.get("run") for step in workflow["jobs"]["test"]["steps"]]
    assert commands[-2:] == ["make lint", "make test"]
