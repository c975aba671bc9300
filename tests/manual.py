"""README.md as tests read it: its commands, the files that it tells to write, its tables."""

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = next(ROOT.glob("src/*/schema.py")).parent.name


@dataclass
class Section:
    """A section: its shell commands, and {path: text} of the files that it shows.

    loose: code that stands below no path.
    """

    title: str
    commands: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    loose: list[str] = field(default_factory=list)


def text() -> str:
    """README.md; in a renamed fork docs/TEMPLATE.md, with the fork's name in it."""
    template = ROOT / "docs" / "TEMPLATE.md"
    found = (template if template.exists() else ROOT / "README.md").read_text(encoding="utf-8")
    return found.replace(found.split()[1], PACKAGE)


def sections() -> list[Section]:
    """Sections with code, in order. Code follows "`path`:" on its own line, or is a command."""
    found, fence, path = [Section("")], None, None
    for line in text().splitlines():
        if fence is None and (opened := re.fullmatch(r"```(\w+)", line)):
            fence, code = opened[1], []
        elif fence is not None and line == "```":
            _put(found[-1], fence, path, "".join(f"{c}\n" for c in code))
            fence = path = None
        elif fence is not None:
            code.append(line)
        elif heading := re.match(r"#+ (.*)", line):
            found.append(Section(heading[1]))
        elif line:
            named = re.fullmatch(r"`(\S+)`:", line)
            path = named and named[1]
    return [s for s in found if s.commands or s.files or s.loose]


def _put(section: Section, kind: str, path: str | None, code: str) -> None:
    if path:
        section.files[path] = code
    elif kind == "sh":
        section.commands += re.sub(r"\\\n *", "", code).splitlines()
    elif kind != "text":
        section.loose.append(code)


def table(title: str) -> list[tuple[str, ...]]:
    """Rows of the first table of a section, without its head."""
    part = re.search(rf"^#+ {re.escape(title)}$(.*?)(?=^#|\Z)", text(), re.M | re.S)[1]
    rows = [line for line in part.splitlines() if line.startswith("|")]
    return [tuple(c.strip() for c in row.strip("|").split(" | ")) for row in rows[2:]]


def tree() -> str:
    """The layout tree."""
    return re.search(r"^## Layout\n\n```text\n(.*?)^```$", text(), re.M | re.S)[1]
