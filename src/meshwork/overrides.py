"""One override of the command line: checked, and made fit for Hydra's grammar. No torch."""

import difflib
import re
import shlex
from dataclasses import is_dataclass
from typing import Any, Optional, get_origin, get_type_hints

from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString, ValueType
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
    if name in PATHS and equals:
        value = _path_value(name, value, multirun)
    parsed = _parse(f"{name}{equals}{value}")
    if parsed is None:
        raise ConfigError(_not_an_override(text, name, equals, value))
    key, kind = parsed.key_or_group, schema_keys().get(parsed.key_or_group)
    _check_key(key, groups, value)
    if parsed.is_sweep_override() and not multirun:
        raise ConfigError(_list_of_values(text, name, value, kind))
    if key in groups:
        _check_options(key, parsed, groups[key])
    if _is_text(kind) and isinstance(parsed.value(), (bool, int, float)):
        value = quoted(value)
    if key not in groups and (is_open(key) or isinstance(parsed.value(), dict)):
        sign = "++"  # merges what is new below a key, too
    elif not key.startswith(("hydra.", "hydra/")):
        sign = ""
    override = f"{sign}{name}={value}"
    if not parsed.is_sweep_override():
        return override, override
    if not parsed.is_discrete_sweep() or isinstance(parsed.value(), Glob):
        return override, None
    return override, f"{sign}{name}={next(parsed.sweep_string_iterator())}"


def quoted(value: str, mark: str = "'") -> str:
    """A text as a quoted value of Hydra's grammar.

    Backslashes count only before a mark: there each is doubled, and a mark inside gets its own.
    """

    def escaped(match: re.Match) -> str:
        return match[1] * 2 + (f"\\{mark}" if match[2] else "")

    return mark + re.sub(rf"(\\*)({mark}|$)", escaped, value) + mark


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
    if multirun and parsed is not None and parsed.is_sweep_override():
        if parsed.value_type != ValueType.SIMPLE_CHOICE_SWEEP:
            return value
        return ",".join(_path(key, str(_text(v, str(v)))) for v in parsed.value().list)
    if multirun and parsed is None:
        return ",".join(_path(key, part) for part in value.split(","))
    if parsed is None or parsed.is_sweep_override():
        return _path(key, value)
    return "null" if parsed.value() is None else _path(key, _text(parsed.value(), value))


def _text(parsed: Any, typed: str) -> str:
    """A parsed value without quotes and escapes; what is no text to Hydra is taken as typed."""
    if isinstance(parsed, QuotedString):
        return parsed.text
    return parsed if isinstance(parsed, str) else typed


def _path(key: str, text: str) -> str:
    if not text:
        raise ConfigError(f"{key}= has no value: type a path, or null where there is none")
    if text == "???":
        return text
    return quoted(text if text in PATHS[key] or "${" in text else absolute(text))


def _is_text(kind: Any) -> bool:
    """Whether a key holds text, so that `run.id=12e4` is those four characters and no number."""
    return kind in (str, Optional[str])


def _not_an_override(text: str, name: str, equals: str, value: str) -> str:
    if not equals:
        return f"{text} is not an override: expected key=value"
    return (
        f"{text} is not an override that Hydra can read: quote a value that holds special "
        f"characters: {_to_type(name, value)}"
    )


def _list_of_values(text: str, name: str, value: str, kind: Any) -> str:
    other = ""
    if _is_text(kind):
        other = f", or quote a text that holds a comma: {_to_type(name, value)}"
    elif get_origin(kind) is list or is_open(name):
        other = f", or give one list: {shlex.quote(f'{name}=[{value}]')}"
    return f"{text} is several values: add -m to run one job for each{other}"


def _to_type(name: str, value: str) -> str:
    """What to type in a shell for a text: 'run.notes="a=b"'."""
    text = quoted(value, mark='"')
    return shlex.quote(f"{name}={text}")


def _check_key(key: str, groups: dict[str, list[str]], value: str = "") -> None:
    """Raises ConfigError for a key that is neither in the schema nor a group nor one of Hydra's."""
    known = schema_keys()
    if key.startswith("hydra."):
        _check_hydra_key(key)
    elif key.startswith("hydra/") or key in groups or key in OPEN or is_open(key):
        return
    elif key not in known and not any(k.startswith(f"{key}.") for k in known):
        home = next((g for g in groups if value in groups[g]), None)
        if home and key not in foreign.KEYS:
            raise ConfigError(f"no key {key}: did you mean {home}={value}?")
        raise ConfigError(unknown_key(key, groups))


def _check_hydra_key(key: str) -> None:
    if key == "hydra.run.dir":
        raise ConfigError(
            f"{key} is not used: run.dir is the exact run folder, run.root where they are made"
        )
    kind, path = HydraConf, "hydra"
    for part in key.split(".")[1:]:
        if not is_dataclass(kind):
            return
        known = get_type_hints(kind)
        if part not in known:
            near = difflib.get_close_matches(part, known, 1)
            raise ConfigError(
                f"no key {key}: "
                + (f"did you mean {path}.{near[0]}?" if near else f"{path} has {', '.join(known)}")
            )
        kind, path = known[part], f"{path}.{part}"


def _check_options(group: str, parsed: Override, options: list[str]) -> None:
    """Raises ConfigError for an option without a file."""
    if parsed.is_sweep_override():
        if parsed.value_type != ValueType.SIMPLE_CHOICE_SWEEP:
            return  # choice() and glob() are Hydra's to expand
        wanted = parsed.value().list
    else:
        wanted = parsed.value() if isinstance(parsed.value(), list) else [parsed.value()]
    for option in wanted:
        if option is None or _text(option, "") in options:
            continue
        if isinstance(option, dict):
            raise ConfigError(
                f"{group}={{...}}: {group} is a group: name one option, {', '.join(options)}, "
                f"or type its keys one by one, {group}.KEY=VALUE"
            )
        raise ConfigError(_no_option(group, _text(option, str(option)), options))


def _no_option(group: str, option: str, options: list[str]) -> str:
    home = foreign.OPTIONS.get((group, option))
    if home in options:
        remark = foreign.REMARKS.get((group, option))
        tail = f" ({remark})" if remark else ""
        return f"no option {group}={option}: meshwork says {group}={home}{tail}"
    near = difflib.get_close_matches(option, options, 1)
    hint = f"did you mean {group}={near[0]}? " if near else ""
    return f"no option {group}={option}: {hint}options are {', '.join(options)}"
