"""The W&B run of a training: online, offline without a key or a network, never a prompt.

Imported with `meshwork.logger`, where the other loggers are; wandb itself is imported on first use.
"""

import contextlib
import importlib.util
import inspect
import logging
import netrc
import os
import shlex
import shutil
import sys
import threading
import time
from configparser import ConfigParser
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

from meshwork.config import ConfigError, Run
from meshwork.provenance import git_state, redact

log = logging.getLogger("meshwork")


def check_wandb(mode: str, args: dict | None = None) -> None:
    """Refuse what W&B cannot do, before anything heavy is imported.

    mode: logger.mode; args: logger.args. Raises ConfigError where the package is missing, where
    online is asked for without a key, and for arguments that wandb.init does not take.
    """
    mode = wandb_mode(mode)
    if mode == "disabled":
        return
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "logger=wandb, but the package wandb is not installed: pip install wandb, "
            "or set logger=none"
        )
    if mode == "online" and not has_key():
        raise ConfigError(
            "logger.mode=online, but no API key was found: set WANDB_API_KEY (or run "
            "`wandb login`), or set logger.mode=offline|disabled"
        )
    if args:
        import wandb

        known = inspect.signature(wandb.init).parameters
        wrong = [name for name in args if name not in known]
        if wrong:
            raise ConfigError(f"logger.args.{wrong[0]}: wandb.init takes {', '.join(known)}")


def wandb_mode(mode: str) -> str:
    """logger.mode as online, offline or disabled: auto asks WANDB_MODE, then for a key."""
    if mode != "auto":
        return mode
    asked = os.environ.get("WANDB_MODE", "").lower()
    if asked in ("online", "offline", "disabled"):
        return asked
    return "online" if has_key() else "offline"


def has_key() -> bool:
    """Whether this user has a W&B key or identity token in the environment, or a key in netrc.

    Asks neither network nor terminal.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = ConfigParser(interpolation=None)
    with contextlib.suppress(Exception):  # no such file, or one that cannot be read
        folder = os.environ.get("WANDB_CONFIG_DIR", os.path.expanduser("~/.config/wandb"))
        settings.read(os.path.join(folder, "settings"))
        typed = settings.get("default", "base_url", fallback="https://api.wandb.ai")
        host = urlsplit(os.environ.get("WANDB_BASE_URL", typed)).netloc
        keys = netrc.netrc(os.environ.get("NETRC", os.path.expanduser("~/.netrc")))
        return keys.authenticators(host) is not None
    return False


class WandbLogger:
    """One W&B run: online, offline, or nothing at all with mode=disabled.

    folder: the run folder; W&B writes into its wandb/. config: the resolved config as plain dicts.
    run_id: also W&B's id, so that a later attempt goes on in the same run; in a W&B sweep the
    agent's id is taken. timeout_s: seconds that the start and the end each wait for the network;
    what cannot be sent stays in the folder, and one line names the command that sends it later.
    args: further arguments of wandb.init. W&B's own console output, its capture of ours, and its
    copies of code and command line (which may hold secrets) are off or redacted.
    """

    def __init__(
        self,
        folder: Path,
        config: dict,
        run: Run,
        run_id: str,
        mode: str,
        project: str,
        entity: str | None,
        timeout_s: float,
        **args: Any,
    ):
        self.folder, self.run, self.unsent = Path(folder), None, False
        self.tables, self.timeout_s = [], timeout_s
        self.mode = wandb_mode(mode)
        if self.mode == "disabled":
            return
        # W&B would report errors home with their stack traces, and waits 20 s for that at the exit
        # where the network swallows packets.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self.wandb = wandb
        git = git_state() or {}
        settings = {
            "silent": True,
            "console": "off",
            "init_timeout": timeout_s,
            "login_timeout": timeout_s,
            "finish_timeout": timeout_s,
            "finish_timeout_raises": True,
            "x_graphql_timeout_seconds": timeout_s,
            # W&B would store the remote's address as it is, with a token where one is in it.
            "disable_git": True,
            "disable_code": True,
            "git_commit": git.get("sha"),
            "git_remote_url": git.get("remote"),
            **args.pop("settings", {}),
        }
        wanted = {
            "dir": self.folder,
            "config": config,
            "id": run_id,
            "resume": "allow",
            "project": project,
            "entity": entity,
            "name": run.name or self.folder.name,
            "group": run.group,
            "tags": list(run.tags) or None,
            "notes": run.notes,
            **args,
        }
        if os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID"):
            wanted |= {"id": os.environ["WANDB_RUN_ID"], "project": None, "entity": None}
        self.run = self._start(wanted, settings)
        if self.run is not None:
            self.url = self.run.url
            self.run.define_metric("*", step_metric="step")

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if self.run is not None:
            self.run.log({**metrics, "step": step})

    def image(self, name: str, image: Any, step: int) -> None:
        """image: a PIL image or a uint8 array [height, width, channels]."""
        if self.run is not None:
            self.run.log({name: self.wandb.Image(image), "step": step})

    def table(self, name: str, columns: list[str], rows: list[list], step: int) -> None:
        """rows: one list a row; a cell is a number, a text or a PIL image."""
        if self.run is not None:
            cells = [[self.wandb.Image(c) if hasattr(c, "getbbox") else c for c in r] for r in rows]
            line = {name: self.wandb.Table(columns=columns, data=cells), "step": step}
            # W&B asks its server before it takes a table, for 20 s where the network is gone.
            thread = threading.Thread(target=_try_log, args=(self.run, name, line), daemon=True)
            thread.start()
            self.tables.append(thread)

    def finish(self, exit_code: int) -> None:
        """Close the run, failed where exit_code is not 0, and end W&B's own process."""
        if self.run is None:
            return
        run, self.run = self.run, None
        end = time.monotonic() + self.timeout_s
        for thread in self.tables:
            thread.join(max(0.0, end - time.monotonic()))
        try:
            run.finish(exit_code=exit_code)
        except Exception as e:
            self.unsent = True
            log.warning(f"W&B did not get everything ({reason(e)}); send it by: {self._sync()}")
        with contextlib.suppress(Exception):
            self.wandb.teardown(exit_code)

    def commands(self) -> list[str]:
        """What a person may type next: see the run in the terminal, open or send it."""
        if not self._folders():
            return []
        look = f"wandb leet {shlex.quote(str(self._folders()[-1]))}"
        return [look, self._sync()] if self.mode == "offline" or self.unsent else [look, self.url]

    def _start(self, wanted: dict, settings: dict) -> Any:
        """The started run, offline where no network answers; None where even that fails."""
        self.wandb.setup(self.wandb.Settings(silent=True))
        before = self._folders()
        try:
            # W&B stores sys.argv as it is; there is no setting against it.
            with mock.patch.object(sys, "argv", [redact(word) for word in sys.argv]):
                typed = self.wandb.Settings(**settings)
                return self.wandb.init(**wanted, mode=self.mode, settings=typed)
        except Exception as e:
            if self.mode == "offline":
                log.warning(f"W&B does not start ({reason(e)}): this run is not logged there")
                return None
            # The run that never started keeps its id taken and has left a folder.
            self.wandb.teardown()
            for left in set(self._folders()) - set(before):
                shutil.rmtree(left, ignore_errors=True)
            self.mode, why = "offline", reason(e)
        run = self._start(wanted, settings)
        if run is not None:
            log.warning(f"W&B is offline for this run ({why}); send it later by: {self._sync()}")
        return run

    def _folders(self) -> list[Path]:
        """W&B's folders of this run, one an attempt, oldest first."""
        return sorted((self.folder / "wandb").glob("*run-*-*"), key=lambda p: p.stat().st_mtime)

    def _sync(self) -> str:
        # All attempts in one command: they have one id and are one run in W&B.
        return "wandb sync " + " ".join(shlex.quote(str(f)) for f in self._folders())


def _try_log(run: Any, name: str, line: dict) -> None:
    try:
        run.log(line)
    except Exception as e:
        log.warning(f"W&B does not take the table {name} ({reason(e)})")


def reason(error: Exception) -> str:
    lines = redact(str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__
