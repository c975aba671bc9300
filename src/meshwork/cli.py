"""The command line: every override checked at once and made fit for Hydra's grammar. No torch.

Texts that are paths are taken as typed, keys below `args` need no plus sign, flags may stand
anywhere.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.utils import get_args_parser

from meshwork.config import ConfigError, option_files
from meshwork.helptext import help_text as help_text
from meshwork.keys import is_open, is_secret, schema_keys, secret_key, unknown_key
from meshwork.overrides import for_hydra
from meshwork.reopen import reopened


@dataclass(frozen=True)
class Typed:
    """The command line, ready for Hydra.

    argv: flags, then all overrides, fit for Hydra. good: the overrides without a problem, those of
    a sweep as its first job has them, for hydra.compose. problems: one sentence for each of the
    others. multirun: whether it is a sweep.
    """

    argv: list[str]
    good: list[str]
    problems: list[str]
    multirun: bool


def read(argv: list[str], conf: Path) -> Typed:
    """Read the command line.

    argv: without the program's name. conf: the folder of the options.
    A `--local-rank=N` that old launchers add is dropped: the environment says it too.
    """
    if "-sc" in argv or "--shell-completion" in argv:
        return Typed(argv, [], [], False)
    flags, overrides, problems = _split(argv)
    multirun = "-m" in flags or "--multirun" in flags
    groups = option_files(conf)
    try:
        out, overrides = reopened(overrides)
    except ConfigError as e:
        out, problems = [], [*problems, *e.problems]
    good = list(out)
    if out and multirun:
        problems.append("run.reopen goes on with one run: leave out -m")
    for text in overrides:
        try:
            override, first = for_hydra(text, groups, multirun)
        except ConfigError as e:
            problems += e.problems
        else:
            out.append(override)
            good += [first] if first else []
    return Typed(flags + out, good, problems, multirun)


def wants_help(argv: list[str]) -> bool:
    return "-h" in argv or "--help" in argv


def complain(problems: list[str]) -> None:
    """Print the sentences a person is to read, one a line, to stderr."""
    print("\n".join(f"error: {p}" for p in problems), file=sys.stderr, flush=True)


def _split(argv: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Hydra's flags with their values, overrides, and a sentence for each flag that is none."""
    takes = {o: a.nargs != 0 for a in get_args_parser()._actions for o in a.option_strings}
    flags, overrides, problems = [], [], []
    rest = [a for a in argv if not re.fullmatch(r"--local[-_]rank=\d+", a)]
    while rest:
        arg = rest.pop(0)
        name, equals, _ = arg.partition("=")
        if not arg.startswith("-"):
            overrides.append(arg)
            continue
        alone = equals or not rest or "=" in rest[0] or rest[0].startswith("-")
        value = [] if alone or not takes.get(name, True) else [rest.pop(0)]
        if name in takes:
            flags += [arg, *value]
        else:
            problems.append(_dashed(arg))
    return flags, overrides, problems


def _dashed(arg: str) -> str:
    """The sentence for a flag that is none; its value is shown only where it is no secret."""
    flag, key = arg.split("=", 1)[0], arg.lstrip("-").split("=", 1)[0].replace("-", "_")
    if is_secret(key):
        return secret_key(key)
    if key in schema_keys() or is_open(key):
        return f"{arg}: overrides have no dashes: {arg.lstrip('-')}"
    return f"{flag}: overrides are typed key=value, without dashes, and {unknown_key(key)}"
