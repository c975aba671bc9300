import subprocess
import time

import pytest

from meshwork import provenance
from meshwork.provenance import collect, git_diff, git_state, redact
from meshwork.ranks import Ranks


@pytest.fixture
def repository(tmp_path):
    def git(*args):
        name = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", "-C", tmp_path, *name, *args], check=True, capture_output=True)

    git("init", "-b", "work")
    (tmp_path / "a.py").write_text("one\n")
    git("add", "a.py")
    git("commit", "-m", "first")
    git("remote", "add", "origin", "https://ghp_canary:pw@example.com/team/code.git")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("git clone https://user:pw@host/x", "git clone https://host/x"),
        ("https://ghp_token@host:80/x?a=b@c", "https://host:80/x?a=b@c"),
        ("logger.args.api_key=abc optimizer.lr=1e-3", "logger.args.api_key=*** optimizer.lr=1e-3"),
        ("+x.hf_token='a b' seed=1", "+x.hf_token=*** seed=1"),
        ("--api-key=abc", "--api-key=***"),
        ("train.py --password hunter2 -m", "train.py --password *** -m"),
        ('{"password": "hunter2", "seed": 1}', '{"password": ***, "seed": 1}'),
        ("model.args.use_cls_token=true", "model.args.use_cls_token=true"),
        ("data.root=/a/b=c,d", "data.root=/a/b=c,d"),
    ],
)
def test_secrets_leave_a_text_and_nothing_else_does(text, clean):
    assert redact(text) == clean


def test_the_value_of_a_secret_variable_leaves_a_text_wherever_it_stands(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary0123456789")
    assert redact("run.notes=my canary0123456789!") == "run.notes=my ***!"


def test_git_state_names_commit_branch_and_whether_it_is_dirty(repository):
    state = git_state(repository)
    assert state["branch"] == "work" and len(state["sha"]) == 40 and state["dirty"] is False
    assert state["remote"] == "https://example.com/team/code.git"
    (repository / "a.py").write_text("two\n")
    assert git_state(repository)["dirty"] is True


def test_git_diff_holds_changes_and_names_of_untracked_files(repository):
    (repository / "a.py").write_text("two\n")
    (repository / "new file.py").write_text("secret content")
    diff = git_diff(repository)
    assert "-one\n+two" in diff and "# untracked: new file.py" in diff
    assert "secret content" not in diff


def test_git_diff_is_cut_at_its_limit(repository):
    (repository / "a.py").write_text("line\n" * 400_000)
    diff = git_diff(repository)
    assert 1_000_000 <= len(diff) < 1_001_000 and "cut here" in diff


def test_a_folder_outside_git_has_no_state_and_no_diff(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None and git_diff(tmp_path) == ""


def test_a_git_that_hangs_or_is_missing_costs_seconds_and_no_error(tmp_path, monkeypatch):
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setattr(provenance, "GIT_TIMEOUT_S", 0.3)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    begin = time.monotonic()
    assert git_state(tmp_path) is None
    assert time.monotonic() - begin < 2
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert git_state(tmp_path) is None and git_diff(tmp_path) == ""


def test_collect_says_where_a_run_came_from_without_its_secrets():
    argv = ["train.py", "seed=1", "x.api_key=canary"]
    found = collect(argv, Ranks(rank=0, world_size=2), "cpu")
    assert found["command"] == ["train.py", "seed=1", "x.api_key=***"]
    assert found["packages"]["torch"] and found["python"].startswith("3.")
    assert found["ranks"]["world_size"] == 2 and found["device"] == "cpu"
    assert {"git", "host", "platform", "cpus", "devices", "user", "started"} <= set(found)
