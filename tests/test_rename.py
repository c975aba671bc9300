"""One command gives a fork its own name, and the fork's quick tests pass."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OLD = next(p.parent.name for p in ROOT.glob("src/*/schema.py"))
NEW = "birdsong"


def call(folder: Path, *command: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def rename(folder: Path, *args: str) -> subprocess.CompletedProcess:
    return call(folder, sys.executable, "scripts/rename.py", *args)


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """A committed copy of this tree, without what git ignores."""
    folder = tmp_path_factory.mktemp("fork")
    listed = call(ROOT, "git", "ls-files", "-co", "--exclude-standard", "-z")
    if listed.returncode != 0:
        pytest.skip("not in a git repository")
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "template"]):
        assert call(folder, "git", *command).returncode == 0
    return folder


@pytest.fixture
def fork(template, tmp_path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "fork", symlinks=True))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("2birds", "no package name"),
        ("bird-song", "no package name"),
        ("Birds", "no package name"),
        ("class", "no package name"),
        ("torch", "something else"),
        ("json", "something else"),
        ("tests", "something else"),
        (OLD, "already"),
    ],
)
def test_a_name_that_would_not_work_is_refused_in_a_sentence(template, name, words):
    run = rename(template, name)
    assert run.returncode == 2
    assert run.stderr.startswith(f"error: {name} is ") and words in run.stderr
    assert call(template, "git", "status", "--porcelain").stdout == ""


def test_uncommitted_changes_are_refused_unless_forced(fork):
    (fork / "notes.txt").write_text(f"{OLD} {OLD.upper()}_RUN_ID\n")
    run = rename(fork, NEW)
    assert run.returncode == 2 and "1 files have uncommitted changes" in run.stderr
    assert rename(fork, NEW, "--force").returncode == 0
    assert (fork / "notes.txt").read_text() == f"{NEW} {NEW.upper()}_RUN_ID\n"


def test_a_renamed_fork_holds_the_old_name_nowhere_and_passes_its_quick_tests(fork):
    readme = (fork / "README.md").read_bytes() if (fork / "README.md").exists() else None
    run = rename(fork, NEW)
    assert run.returncode == 0, run.stderr
    kept = {"LICENSE", "docs/TEMPLATE.md"}
    files = {p for p in fork.rglob("*") if p.is_file() and ".git" not in p.parts}
    left = {str(p.relative_to(fork)) for p in files if OLD.encode() in p.read_bytes().lower()}
    assert left <= kept
    assert not [p for p in fork.rglob(f"*{OLD}*") if ".git" not in p.parts]
    assert (fork / "README.md").read_text().startswith(f"# {NEW}\n")
    if readme is not None:
        assert (fork / "docs" / "TEMPLATE.md").read_bytes() == readme
    tests = call(fork, sys.executable, "-m", "pytest", "-m", "quick", "-p", "no:cacheprovider")
    assert tests.returncode == 0, tests.stdout[-3000:]


def test_a_fork_may_be_renamed_again(fork):
    assert rename(fork, NEW).returncode == 0
    (fork / "README.md").write_text("mine\n")
    assert rename(fork, "nightjar", "--force").returncode == 0
    assert (fork / "README.md").read_text() == "mine\n"
    assert (fork / "src" / "nightjar" / "config.py").exists()
