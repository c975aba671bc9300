"""What `python train.py --help` prints: every option file and every key, read from conf/."""

import re
from pathlib import Path

from meshwork.config import option_files

USAGE = """\
usage: python train.py [GROUP=OPTION] [KEY=VALUE] ...
       torchrun --standalone --nproc-per-node=N train.py [GROUP=OPTION] [KEY=VALUE] ...
"""

FLAGS = """\
flags
  -m                                 a job for each combination of lists: optimizer.lr=0.1,0.01
  --cfg job --resolve                print the composed config and start nothing
  -sc install=bash                   eval "$(python train.py -sc install=bash)" completes keys and
                                     options when you press tab (also zsh and fish)"""


def help_text(conf: Path) -> str:
    """Every option file and every key with one line each, from the comments of conf/."""
    lines = [USAGE, "options"]
    for group, options in option_files(conf).items():
        for option in options:
            lines.append(_line(f"{group}={option}", description(conf / group / f"{option}.yaml")))
    lines += ["", "keys, with their defaults before options are applied"]
    lines += [_line(f"{key}={value}", text) for key, (value, text) in described_keys(conf).items()]
    return "\n".join([*lines, "", FLAGS])


def description(option: Path) -> str:
    """The first comment of an option file that is not Hydra's own."""
    lines = option.read_text(encoding="utf-8").splitlines()
    comments = (line[1:].strip() for line in lines if line.startswith("#"))
    return next((c for c in comments if not c.startswith("@")), "")


def described_keys(conf: Path) -> dict[str, tuple[str, str]]:
    """{dotted key: (default, description)} from conf/train.yaml, in its order."""
    found: dict[str, tuple[str, str]] = {}
    path: list[str] = []
    for line in (conf / "train.yaml").read_text(encoding="utf-8").splitlines():
        if not (match := re.match(r"( *)(\w+):(.*)$", line)):
            continue
        path = [*path[: len(match[1]) // 2], match[2]]
        value, _, text = match[3].partition("  # ")
        if text and path[0] not in ("defaults", "hydra"):
            found[".".join(path)] = (value.strip(), text.strip())
    return found


def _line(typed: str, text: str) -> str:
    return f"  {typed:<33}  {text}"
