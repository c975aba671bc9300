"""One override of the command line: checked, and made fit for Hydra's grammar. No torch."""

import difflib
import re
import shlex
from typing import Any, Optional, get_origin

from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString, ValueType
from hydra.errors import HydraException

from meshwork import foreign
from meshwork.config import ConfigError, absolute
from meshwork.keys import is_open, is_secret, schema_keys, secret_key, secrets_in, unknown_key
from meshwork.schema import OPEN, PATHS


def for_hydra(text: str, groups: dict[str, list[str]], multirun: bool) -> tuple[str, str | None]:
    """An override fit for Hydra, and the same with the first value where it is a sweep (None where
    only the sweep knows it).

    Raises ConfigError where it has a problem that can be told without composing.
    """
    sign, name, equals, value = re.fullmatch(r"([+~]*)([^=]*)(=?)(.*)", text, re.DOTALL).groups()
    _refuse_secrets(name, value)
    if sign.startswith("~"):
        return _deletion(text, name, groups), text
    if not equals:
        raise ConfigError(f"{text} is not an override: expected key=value")
    if name in PATHS:
        value = _path_value(name, value, multirun)
    parsed = _parse(f"{name}={value}")
    if parsed is None:
        raise ConfigError(
            f"{text} is not an override that Hydra can read: quote a value that holds special "
            f"characters: {_to_type(name, value)}"
        )
    key, kind = parsed.key_or_group, schema_keys().get(parsed.key_or_group)
    is_text = kind in (str, Optional[str])  # so that `run.id=12e4` is those characters, no number
    _check_key(key, groups, value)
    sweep = parsed.is_sweep_override()
    if sweep and not multirun:
        problem = f"{text} is several values: add -m to run one job for each"
        if is_text:
            problem += f", or quote a text that holds a comma: {_to_type(name, value)}"
        elif get_origin(kind) is list or is_open(name):
            problem += f", or give one list: {shlex.quote(f'{name}=[{value}]')}"
        raise ConfigError(problem)
    if key in groups:
        _check_options(key, parsed, groups[key])
    if is_text and isinstance(parsed.value(), (bool, int, float)):
        value = quoted(value)
    if key not in groups and (is_open(key) or isinstance(parsed.value(), dict)):
        sign = "++"  # merges what is new below a key, too
    elif not key.startswith(("hydra.", "hydra/")):
        sign = ""
    override = f"{sign}{name}={value}"
    if sweep and (not parsed.is_discrete_sweep() or isinstance(parsed.value(), Glob)):
        return override, None
    return override, f"{sign}{name}={next(parsed.sweep_string_iterator())}" if sweep else override


def quoted(value: str, mark: str = "'") -> str:
    """A text as a quoted value of Hydra's grammar."""
    return QuotedString(value, Quote.single if mark == "'" else Quote.double).with_quotes()


def as_typed(override: str) -> str:
    """An override of a path as a person types it, without the quotes of Hydra's grammar."""
    name, _, _ = override.partition("=")
    parsed = _parse(override) if name in PATHS else None
    value = parsed.value() if parsed is not None else None
    return f"{name}={value}" if isinstance(value, str) else override


def _refuse_secrets(name: str, value: str) -> None:
    """Before anything else, so that no other sentence shows a secret's value."""
    inside = re.findall(r"([\w-]+)['\"]?\s*:", value) if "{" in value else []
    secrets = [k for k in (name, *(f"{name}.{k}" for k in inside)) if is_secret(k)]
    if secrets := secrets or list(secrets_in(value, name)):
        raise ConfigError(secret_key(secrets[0]))


def _deletion(text: str, name: str, groups: dict[str, list[str]]) -> str:
    if name in schema_keys():
        raise ConfigError(f"{text}: a key is not deleted but set, to null for example: {name}=null")
    if not is_open(name):
        _check_key(name.split("@")[0], groups)
    return text


def _parse(override: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException:
        return None


def _path_value(key: str, value: str, multirun: bool) -> str:
    """The value of a path key, quoted: `~`, `=`, blanks and brackets are part of a path.

    So is a comma, except in a sweep, where it parts one path from the next.
    """
    parsed = _parse(f"{key}={value}")
    if parsed is None:
        paths = value.split(",") if multirun else [value]
    elif not parsed.is_sweep_override():
        paths = [parsed.value()]
    elif not multirun:
        paths = [value]
    elif parsed.value_type == ValueType.SIMPLE_CHOICE_SWEEP:
        paths = [str(_text(path)) for path in parsed.value().list]
    else:
        return value
    return ",".join(_path(key, path, value) for path in paths)


def _path(key: str, path: Any, typed: str) -> str:
    if path is None:
        return "null"
    text = path if isinstance(path, str) else typed  # a number or a list to Hydra
    if not text:
        raise ConfigError(f"{key}= has no value: type a path, or null where there is none")
    if text == "???":
        return text
    return quoted(text if text in PATHS[key] or "${" in text else absolute(text))


def _text(parsed: Any) -> Any:
    return parsed.text if isinstance(parsed, QuotedString) else parsed


def _to_type(name: str, value: str) -> str:
    """What to type in a shell for a text: 'run.notes="a=b"'."""
    text = quoted(value, mark='"')
    return shlex.quote(f"{name}={text}")


def _check_key(key: str, groups: dict[str, list[str]], value: str = "") -> None:
    """Raises ConfigError for a key that is neither in the schema nor a group nor one of Hydra's."""
    if key == "hydra.run.dir":
        raise ConfigError(
            f"{key} is not used: run.dir is the exact run folder, run.root where they are made"
        )
    if key.startswith("hydra/") or key in groups or key in OPEN or is_open(key):
        return
    if key.startswith("hydra."):
        known = schema_keys(HydraConf, "hydra.")
        below = any(key.startswith(f"{k}.") for k in known)  # a launcher's or logging's own
    else:
        known, below = schema_keys(), False
    if below or key in known or any(k.startswith(f"{key}.") for k in known):
        return
    home = next((g for g in groups if value in groups[g]), None)
    if home and key not in foreign.KEYS:
        raise ConfigError(f"no key {key}: did you mean {home}={value}?")
    raise ConfigError(unknown_key(key, [*known, *groups]))


def _check_options(group: str, parsed: Override, options: list[str]) -> None:
    """Raises ConfigError for an option without a file."""
    value = parsed.value()
    if parsed.is_sweep_override():
        if parsed.value_type != ValueType.SIMPLE_CHOICE_SWEEP:
            return  # choice() and glob() are Hydra's to expand
        value = value.list
    for option in value if isinstance(value, list) else [value]:
        option = _text(option)
        if isinstance(option, dict):
            raise ConfigError(
                f"{group}={{...}}: {group} is a group: name one option, {', '.join(options)}, "
                f"or type its keys one by one, {group}.KEY=VALUE"
            )
        if option is not None and option not in options:
            raise ConfigError(_no_option(group, str(option), options))


def _no_option(group: str, option: str, options: list[str]) -> str:
    home = foreign.OPTIONS.get((group, option), "")
    if home.split(" ")[0] in options:
        return f"no option {group}={option}: meshwork says {group}={home}"
    near = difflib.get_close_matches(option, options, 1)
    hint = f"did you mean {group}={near[0]}? " if near else ""
    return f"no option {group}={option}: {hint}options are {', '.join(options)}"
