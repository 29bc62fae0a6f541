"""The options that all commands share, and options that take a duration or a size.

Settings are imported when an option is parsed: ``--help`` needs none of them.
"""

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from objkv.errors import ConfigError

if TYPE_CHECKING:
    from objkv.config import Config
    from objkv.config.prices import Prices

_PRICE_MAX = 1e6
Output = Literal["table", "json", "wide"]


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
        """The form of the result."""
        return "json" if self.json else self.output or "table"


def time_option(
    text: str, *names: str, least: float = 0.0, most: float = math.inf, shown: str = ""
) -> Any:
    """Return an option that takes a duration, as ``float`` seconds. ``least`` and ``most`` are in
    seconds. ``text`` has no full stop. ``shown``: the default as the help shows it."""

    def parse(given: str | float) -> float:
        from objkv.config.units import parse_duration

        value = _parsed(lambda text: float(parse_duration(text)), given)
        if not least <= value <= most:
            bounds = f"at least {least:g} s" if most == math.inf else f"{least:g} to {most:g} s"
            raise typer.BadParameter(f"{given}: must be {bounds}")
        return value

    return typer.Option(
        *names,
        help=f"{text} (30s, 2h, 7d; a plain number is seconds).{_default(shown)}",
        metavar="TIME",
        parser=parse,
        show_default=False,
    )


def size_option(text: str, *names: str, least: int = 0, shown: str = "") -> Any:
    """Return an option that takes a size, as ``int`` bytes. ``text`` and ``shown`` as above."""

    def parse(given: str | float) -> int:
        from objkv.config.units import parse_size

        value = int(_parsed(parse_size, given))
        if value < least:
            raise typer.BadParameter(f"{given}: must be at least {least} bytes")
        return value

    return typer.Option(
        *names,
        help=f"{text} (512MiB, 10GiB; a plain number is bytes).{_default(shown)}",
        metavar="SIZE",
        parser=parse,
        show_default=False,
    )


PriceGbMonth = Annotated[
    float | None,
    typer.Option(min=0, help="Price of 10^9 bytes for a month, not price_gb_month.", metavar="USD"),
]
PricePuts = Annotated[
    float | None,
    typer.Option(min=0, help="Price of 1,000 PUT requests, not price_puts.", metavar="USD"),
]
PriceGets = Annotated[
    float | None,
    typer.Option(
        min=0, help="Price of 1,000 GET requests, not the provider's list price.", metavar="USD"
    ),
]


def priced(
    config: "Config", gb_month: float | None, puts: float | None, gets: float | None
) -> "Prices":
    """Return the prices of the configured bucket, or of S3 Standard without one; those that are
    given replace them. Raises ``ConfigError``."""
    from objkv.config.prices import LIST_PRICES, prices_of

    known = prices_of(config)
    if not config.bulk_url.startswith("s3:"):
        known = replace(LIST_PRICES, gpu_hour=known.gpu_hour)
    given = {"gb_month": gb_month, "per_1000_puts": puts, "per_1000_gets": gets}
    own = {name: price for name, price in given.items() if price is not None}
    if not all(0 <= price < _PRICE_MAX for price in own.values()):
        raise ConfigError("a price must be at least 0 and less than 1,000,000 dollars")
    source = "options" if len(own) == len(given) else known.source
    return replace(known, **own, source=source)


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


def _default(shown: str) -> str:
    return f" Default: {shown}." if shown else ""


def _parsed(parse: Callable[[str], float], given: str | float) -> float:
    if not isinstance(given, str):  # the default
        return given
    try:
        return parse(given)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
