"""The options that all commands share, and options that take a duration.

Settings are imported when an option is parsed: ``--help`` needs none of them.
"""

import math
import tempfile
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path
from socket import gethostname
from typing import Annotated, Any, Literal

import typer

from objkv.errors import ConfigError

Output = Literal["table", "json", "wide"]
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        help="Namespace: its hex digits, MODEL or TENANT/MODEL, or a beginning. Default: all, or "
        "for one prompt the only one.",
        metavar="NS",
    ),
]


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """The options of every command."""

    bulk_url: Annotated[
        str | None, typer.Option(help="Bulk store; overrides OBJKV_BULK_URL.", metavar="URL")
    ] = None
    index_url: Annotated[
        str | None, typer.Option(help="Index; overrides OBJKV_INDEX_URL.", metavar="URL")
    ] = None
    config: Annotated[
        Path | None, typer.Option(help="TOML file; overrides OBJKV_CONFIG_FILE.", metavar="FILE")
    ] = None
    output: Annotated[
        Output | None,
        typer.Option(
            "--output",
            "-o",
            help="table fits the terminal, wide cuts nothing, json is one document.",
        ),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show where errors come from.")] = False

    def __post_init__(self) -> None:
        if self.json and self.output not in (None, "json"):
            raise typer.BadParameter(f"--json and -o {self.output} exclude each other")

    @property
    def form(self) -> Output:
        return "json" if self.json else self.output or "table"


def time_option(
    text: str, *names: str, least: float = 0.0, most: float = math.inf, shown: str = ""
) -> Any:
    """Return an option that takes a duration, as ``float`` seconds. ``least`` and ``most`` are in
    seconds. ``text`` has no full stop. ``shown``: the default as the help shows it."""

    def parse(given: str | float) -> float:
        from objkv.config.units import parse_duration

        if not isinstance(given, str):  # the default
            return given
        try:
            value = float(parse_duration(given))
        except ValueError as exc:
            raise typer.BadParameter(str(exc)) from exc
        if not least <= value <= most:
            bounds = f"at least {least:g} s" if most == math.inf else f"{least:g} to {most:g} s"
            raise typer.BadParameter(f"{given}: must be {bounds}")
        return value

    default = f" Default: {shown}." if shown else ""
    return typer.Option(
        *names,
        help=f"{text} (30s, 2h, 7d; a plain number is seconds).{default}",
        metavar="TIME",
        parser=parse,
        show_default=False,
    )


def socket_option(text: str, *names: str) -> Any:
    """Return an option for the path of a socket, also as in the setting ``agent``."""
    return typer.Option(
        *names, help=text, metavar="PATH", parser=lambda path: Path(path.removeprefix("unix://"))
    )


def read_text(file: Path) -> str:
    """Return the text of ``file``. Raises ``ConfigError``."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as exc:
        raise ConfigError(f"{file}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{file}: not UTF-8 text") from exc


def check_file(option: str, file: Path) -> None:
    """Raise ``ConfigError`` unless ``file`` can be written; before a long run."""
    folder = file.absolute().parent
    if file.is_dir() or not folder.is_dir():
        raise ConfigError(f"{option} {file}: give a file name in an existing directory")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        raise ConfigError(f"{option} {file}: cannot write to {folder}: {exc.strerror}") from exc


def this_user() -> str:
    """USER@HOST of this shell; the host alone for a user without a name, as in containers."""
    try:
        return f"{getuser()}@{gethostname()}"
    except (KeyError, OSError):
        return gethostname()
