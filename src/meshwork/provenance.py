"""Where a run came from: code, packages, machine and command, without secrets.

Nothing here fails or takes long: what cannot be found out is left empty.
"""

import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from meshwork.keys import is_secret

HERE = Path(__file__).parent
GIT_TIMEOUT_S = 5.0
DIFF_CHARACTERS = 1_000_000
HIDDEN = "***"

URL_USER = re.compile(r"\b([a-z][a-z0-9+.-]*://)[^/\s?#]*@", re.I)
# key=value, '--key value' and a quoted "key": "value"; the key decides whether the value is hidden.
PAIRS = (
    re.compile(r"""([\w.+~/-]+)(=)("[^"]*"|'[^']*'|[^\s,&;)}\]]+)"""),
    re.compile(r"""(--[\w.-]+)(\s+)("[^"]*"|'[^']*'|[^\s-]\S*)"""),
    re.compile(r"""["']([\w.-]+)(["']\s*:\s*)("[^"]*"|'[^']*')"""),
)


def redact(text: str) -> str:
    """The text without secrets.

    User info leaves URLs. The value behind a key that names a secret becomes ***, and so does the
    value of each environment variable whose name does.
    """
    text = URL_USER.sub(r"\1", text)
    for pair in PAIRS:
        text = pair.sub(_hide, text)
    for name, value in os.environ.items():
        if is_secret(name) and len(value) >= 8:
            text = text.replace(value, HIDDEN)
    return text


def collect(argv: list[str], ranks: Any, device: Any) -> dict:
    """What provenance.json holds: plain values, whatever cannot be found out is None.

    argv: as sys.argv has it. ranks: the Ranks of this process. device: where it computes.
    """
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": [redact(word) for word in argv],
        "folder": os.getcwd(),
        "user": os.environ.get("USER", str(os.getuid())),
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "device": str(device),
        "devices": _devices(),
        "ranks": asdict(ranks),
        "git": git_state(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": _packages(),
    }


def git_state(where: Path = HERE) -> dict | None:
    """sha, branch, remote without user info, and dirty: not all is committed; None outside git."""
    if _git("rev-parse", "--git-dir", where=where) is None:
        return None
    remote = _git("config", "--get", "remote.origin.url", where=where)
    status = _git("status", "--porcelain", where=where)
    return {
        "sha": _git("rev-parse", "--verify", "HEAD", where=where),
        "branch": _git("symbolic-ref", "--short", "HEAD", where=where),
        "remote": remote and redact(remote),
        "dirty": None if status is None else bool(status),
    }


def git_diff(where: Path = HERE) -> str:
    """The patch from the last commit, up to 1 MB, and the untracked names; "" outside git."""
    top = _git("rev-parse", "--show-toplevel", where=where)
    if not top:
        return ""
    patch = _git("diff", "HEAD", "--no-color", "--no-ext-diff", where=Path(top)) or ""
    if len(patch) > DIFF_CHARACTERS:
        patch = f"{patch[:DIFF_CHARACTERS]}\n# cut here, after {DIFF_CHARACTERS:,} characters"
    names = _git("ls-files", "--others", "--exclude-standard", where=Path(top)) or ""
    untracked = "".join(f"# untracked: {name}\n" for name in names.splitlines()[:1000])
    return "\n".join(part for part in (patch, untracked) if part)


def _hide(pair: re.Match) -> str:
    shown = pair[0].removesuffix(pair[3])
    return shown + HIDDEN if is_secret(pair[1].lstrip("+~-")) else pair[0]


def _git(*args: str, where: Path) -> str | None:
    """What a git command prints; None where it fails or takes too long."""
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    command = ["git", "-C", str(where), *args]
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.decode(errors="replace").strip("\n")


def _devices() -> list[str]:
    import torch

    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in found]


def _packages() -> dict[str, str]:
    """By the names of their folders: reading what is inside takes a tenth of a second."""
    folders = (f for place in sys.path if place for f in Path(place).glob("*-*.dist-info"))
    found = (f.name.removesuffix(".dist-info").split("-", 1) for f in folders)
    return dict(sorted((name, version) for name, version in found))
