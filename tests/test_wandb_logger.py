import json
import os
import shlex
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from meshwork.config import ConfigError, Run
from meshwork.logger import WandbLogger, check_wandb
from meshwork.wandb_logger import has_key, wandb_mode

RUN = Run(
    id=None, name=None, dir=None, reopen=None, root="outputs", group="g", tags=["a"], notes="why"
)
KEY = "canary0123456789abcdef0123456789abcdef01"
CANARY = "canary"


@pytest.fixture(autouse=True)
def no_account(tmp_path, monkeypatch):
    """A machine without W&B key, settings or project."""
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    # Set where it would otherwise be set by the first W&B run of this process.
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NETRC", raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)


def wandb_run(folder, mode="offline", run=RUN, config=None, timeout_s=2.0, **args):
    config = config or {"optimizer": {"lr": 1e-3}}
    return WandbLogger(folder, config, run, "run1", mode, "digits", None, timeout_s, **args)


def read_back(folder: Path) -> dict:
    """What W&B's own tool reads in a folder."""
    tool = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(folder)]
    found = subprocess.run(tool, capture_output=True, text=True, timeout=30)
    return json.loads(found.stdout)


def test_mode_auto_is_online_with_a_key_and_offline_without(monkeypatch):
    assert wandb_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert wandb_mode("auto") == "online" and wandb_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("auto") == "disabled" and wandb_mode("online") == "online"


def test_a_key_is_found_in_netrc_for_the_server_of_the_settings(tmp_path, monkeypatch):
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text("machine github.com login me password other\n")
    assert not has_key()
    netrc.write_text(f"machine api.wandb.ai login user password {KEY}\n")
    netrc.chmod(0o600)
    assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    assert not has_key()
    (tmp_path / "home/.config/wandb").mkdir(parents=True)
    settings = tmp_path / "home/.config/wandb/settings"
    settings.write_text("[default]\nbase_url = https://api.wandb.ai\n")
    assert not has_key()
    monkeypatch.delenv("WANDB_BASE_URL")
    assert has_key()
    settings.write_text("[default]\nbase_url = https://wandb.example.com\n")
    assert not has_key()


def test_online_without_a_key_is_refused_with_what_to_change(monkeypatch):
    with pytest.raises(ConfigError, match=r"WANDB_API_KEY.*logger.mode=offline\|disabled"):
        check_wandb("online")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    check_wandb("online")
    check_wandb("auto")


def test_a_missing_package_is_named_unless_wandb_is_disabled(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install wandb.*logger=none"):
        check_wandb("auto")
    check_wandb("disabled")


def test_an_argument_that_wandb_does_not_take_is_named():
    with pytest.raises(ConfigError, match=r"logger.args.job_typ: wandb.init takes .*job_type"):
        check_wandb("offline", {"job_typ": "x"})
    check_wandb("offline", {"job_type": "x"})


def test_disabled_neither_imports_wandb_nor_writes(tmp_path):
    code = (
        "import sys; from meshwork.logger import WandbLogger; from meshwork.config import Run;"
        "w = WandbLogger('.', {}, Run(*[None] * 8), 'a', 'disabled', 'p', None, 1.0);"
        "w.log({'x': 1}, 1); w.image('i', None, 1); w.table('t', [], [], 1); w.finish(0);"
        "assert w.commands() == [] and 'wandb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=60)
    assert [p.name for p in tmp_path.iterdir()] == ["home"]


def test_an_offline_run_is_read_back_by_wandbs_own_tool(tmp_path):
    logger = wandb_run(tmp_path, job_type="test")
    for step in (10, 20, 30):
        logger.log({"train/loss": 1 / step, "val/top1": 0.9}, step)
    logger.image("batch", np.zeros((4, 4, 3), np.uint8), 30)
    logger.table("worst", ["image", "loss"], [[Image.new("L", (4, 4)), 0.5]], 30)
    logger.finish(3)
    found = json.dumps(read_back(tmp_path / "wandb"))
    folders = list((tmp_path / "wandb").glob("offline-run-*-run1"))
    assert len(folders) == 1
    for wanted in ('"train/loss": 0.0333333', '"val/top1": 0.9', '"step": 30', "digits", "lr"):
        assert wanted in found
    assert "failed" in found and '"batch"' in found and '"worst"' in found
    assert logger.commands() == [f"wandb {verb} {folders[0]}" for verb in ("leet", "sync")]


def test_a_later_attempt_is_the_same_run_and_synced_by_one_command(tmp_path):
    for step in (1, 2):
        logger = wandb_run(tmp_path)
        logger.log({"x": step}, step)
        logger.finish(0)
    attempts = [f for f in (tmp_path / "wandb").iterdir() if f.name.startswith("offline-run")]
    assert len(attempts) == 2 and all((f / "run-run1.wandb").exists() for f in attempts)
    _, sync = logger.commands()
    assert sorted(shlex.split(sync)[2:]) == sorted(map(str, attempts))


def test_runs_one_after_another_in_one_process_stay_apart(tmp_path):
    for i in range(2):
        folder = tmp_path / str(i)
        folder.mkdir()
        logger = wandb_run(folder, config={"seed": i})
        logger.log({"x": i}, 1)
        logger.finish(i)
    for i, state in enumerate(("finished", "failed")):
        found = json.dumps(read_back(tmp_path / str(i) / "wandb"))
        assert state in found and f'"x": {i}' in found


def test_a_sweep_agents_run_id_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    monkeypatch.setenv("WANDB_RUN_ID", "r1")
    wandb_run(tmp_path).finish(0)
    assert len(list((tmp_path / "wandb").glob("offline-run-*-r1/run-r1.wandb"))) == 1


def test_a_refused_network_ends_offline_in_time_with_one_warning(
    tmp_path, monkeypatch, caplog, capfd
):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    begin = time.monotonic()
    logger = wandb_run(tmp_path, mode="online", timeout_s=1.0)
    assert time.monotonic() - begin < 10
    logger.log({"x": 7}, 1)
    logger.finish(0)
    folders = list((tmp_path / "wandb").glob("*run-*"))
    assert [f.name.split("-2")[0] for f in folders if not f.is_symlink()] == ["offline-run"]
    warnings = [r.getMessage() for r in caplog.records if r.name == "meshwork"]
    assert len(warnings) == 1 and logger.commands()[1] in warnings[0]
    assert capfd.readouterr() == ("", "")
    assert '"x": 7' in json.dumps(read_back(tmp_path / "wandb"))


def test_no_secret_and_no_code_gets_into_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    argv = ["train.py", f"data.root=https://user:{CANARY}@host/x", f"api_key={CANARY}", KEY]
    monkeypatch.setattr(sys, "argv", argv)
    logger = wandb_run(tmp_path)
    assert sys.argv is argv
    logger.log({"x": 1}, 1)
    print(f"a line on the console with {CANARY}")
    logger.finish(0)
    files = [p for p in (tmp_path / "wandb").rglob("*") if p.is_file()]
    assert len(files) >= 3
    assert [p for p in files if CANARY.encode() in p.read_bytes()] == []
    assert [p for p in files if p.suffix == ".py" or p.name == "diff.patch"] == []
    assert b"data.root=https://host/x" in b"".join(p.read_bytes() for p in files)


def test_wandbs_own_process_ends_with_the_run(tmp_path):
    def services():
        table = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True).stdout
        rows = [row.split(None, 1) for row in table.splitlines()]
        return [row for row in rows if row[0] == str(os.getpid()) and "wandb-core" in row[1]]

    logger = wandb_run(tmp_path)
    assert len(services()) == 1
    logger.finish(0)
    end = time.monotonic() + 5
    while services() and time.monotonic() < end:
        time.sleep(0.05)
    assert services() == []


class Server(BaseHTTPRequestHandler):
    """As much of W&B's server as a run needs to start; each answer closes its connection."""

    def do_POST(self):
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        project = {"id": "p", "name": "digits", "entity": {"id": "e", "name": "me"}}
        bucket = {"id": "x", "name": "run1", "displayName": "d", "config": "{}", "project": project}
        answer = {"data": {}}
        if b"upsertBucket" in text:
            answer = {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if b"createRunFiles" in text:
            files = {"runID": "x", "uploadHeaders": [], "files": []}
            answer = {"data": {"createRunFiles": files}}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_losing_the_network_neither_blocks_nor_ends_a_run(tmp_path, monkeypatch, caplog):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    logger = wandb_run(tmp_path, mode="auto", timeout_s=3.0)
    assert logger.mode == "online" and logger.url.endswith("/me/digits/runs/run1")
    logger.log({"x": 1}, 1)
    server.shutdown()
    server.server_close()
    begin = time.monotonic()
    for step in range(2, 200):
        logger.log({"x": step}, step)
    logger.image("batch", np.zeros((4, 4, 3), np.uint8), 200)
    logger.table("worst", ["loss"], [[0.5]], 200)
    assert time.monotonic() - begin < 1
    logger.finish(0)
    assert time.monotonic() - begin < 12
    assert '"x": 199' in json.dumps(read_back(tmp_path / "wandb"))
    assert logger.commands()[1].startswith("wandb sync ")
    assert "send it by: wandb sync" in caplog.text
