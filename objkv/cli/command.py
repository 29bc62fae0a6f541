"""The shared parts of all commands: options, settings, backends and exit codes.

Settings, stores and the index are imported when a command first uses them: ``COMMAND --help`` needs
none of them, and they take most of a second.
"""

import inspect
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import typer

from objkv.cli.options import CommonOptions
from objkv.errors import (
    ConfigError,
    NotStored,
    ObjkvError,
    PayloadError,
    StoreDenied,
    StoreError,
    UnclearName,
)
from objkv.ops.formats import printable
from objkv.redact import without_secrets
from objkv.telemetry import NullRecorder

if TYPE_CHECKING:
    from objkv.assembly.backends import Backends
    from objkv.cli.output import Printer
    from objkv.config import Config, Resolved


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP run the same clean-up as Ctrl-C."""

    def end(number: int, _frame: Any) -> None:
        sys.exit(128 + number)

    old = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


class EndSignal:
    """Set by a signal, and then for ever. Not an ``Event``: its lock may be held by the very thread
    that the signal interrupts."""

    def __init__(self, fd: int) -> None:
        """``fd``: an eventfd, which the caller closes."""
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def wait(self, timeout: float | None = None, /) -> bool:
        """Wait for it, for at most ``timeout`` seconds. Returns whether it has come."""
        return bool(self._poll.poll(None if timeout is None else 1000 * timeout))


@contextmanager
def end_signals() -> Iterator[EndSignal]:
    """What SIGTERM (Kubernetes, systemd) and Ctrl-C set. An ignored SIGINT stays ignored."""
    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        numbers.append(signal.SIGINT)

    def end(*_: object) -> None:
        os.eventfd_write(fd, 1)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield EndSignal(fd)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(fd)


FINE: Final = 0
FOUND: Final = 1
WRONG_USAGE: Final = 2
UNREACHABLE: Final = 3
BUG: Final = 70
INTERRUPTED: Final = 130
NO_READER: Final = 141
"""128 and SIGPIPE, as in other programs whose reader closes the pipe."""


@dataclass(frozen=True, slots=True)
class Session:
    """The settings and the output of one command."""

    resolved: "Resolved"
    out: "Printer"

    @property
    def config(self) -> "Config":
        return self.resolved.config

    def backends(self, *, may_lack_bulk: bool = False) -> "Backends":
        """Open the stores and the index, to be closed. Connects to neither: the first call does.
        Raises ``ConfigError`` as ``has_bulk``, unless the folder ``may_lack_bulk``."""
        from objkv.assembly.backends import open_backends

        if not may_lack_bulk:
            self.has_bulk()
        return open_backends(self.config, NullRecorder())

    def has_bulk(self) -> bool:
        """Return False while the default folder does not exist. Raises ``ConfigError`` if another
        folder is configured and missing: only agents and ``doctor`` create it."""
        from objkv.config import local_path

        url = self.config.bulk_url
        if not url.startswith("file:") or local_path(url).is_dir():
            return True
        if self.resolved.sources["bulk_url"] != "default":
            raise ConfigError(f"no such folder: bulk_url {url}")
        return False


def require_role(session: Session, doing: str, typed: str = "") -> None:
    """Raise ``ConfigError``, which names the right role, if ``role`` may not do ``doing``, a key of
    ``COMMAND_ROLES``; ``typed``: what the user typed. In a user's own folders everything is allowed
    unless a role is set: the file system decides there."""
    from objkv.ops.doctor.access import COMMAND_ROLES

    config, roles = session.config, COMMAND_ROLES[doing]
    is_shared = config.bulk_url.startswith("s3:") or config.index_url.startswith("redis")
    is_set = session.resolved.sources["role"] != "default"
    if config.role in roles or not (is_shared or is_set):
        return
    raise ConfigError(
        f"{typed or doing} needs the role {roles[0]}, and role is {config.role}: set "
        f"OBJKV_ROLE={roles[0]}, with the rights that objkv access --role {roles[0]} prints"
    )


def command(work: Callable[..., int]) -> Callable[..., None]:
    """Turn ``work(session, its own options…)``, which returns an exit code, into a command. Adds
    the common options. A parameter whose type is a dataclass stands for the options that are its
    fields. An error becomes one sentence on standard error and an exit code."""
    own = list(inspect.signature(work).parameters.values())[1:]
    keyword = inspect.Parameter.KEYWORD_ONLY
    own.append(inspect.Parameter("common", keyword, annotation=CommonOptions))
    groups: dict[str, Any] = {p.name: p.annotation for p in own if is_dataclass(p.annotation)}
    parameters = list[inspect.Parameter]()
    for one in own:
        group = groups.get(one.name)
        every = [one] if group is None else inspect.signature(group).parameters.values()
        parameters += [p.replace(kind=keyword) for p in every]

    @wraps(work)
    def called(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{one.name: values.pop(one.name) for one in fields(kind)})
        common: CommonOptions = values.pop("common")
        raise typer.Exit(guarded(lambda: work(_session(common), **values), debug=common.debug))

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    return called


def guarded(work: Callable[[], int], *, debug: bool) -> int:
    """Run ``work`` and return its exit code. An exception becomes one sentence and a code."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        if sys.stderr.isatty():  # the terminal has echoed ^C on the current line
            sys.stderr.write("\n")
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Python flushes the buffer once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except (typer.Exit, typer.BadParameter):
        raise
    # The outermost frame: any other exception is a bug, reported in one sentence.
    except Exception as exc:
        if debug:
            for line in without_secrets(traceback.format_exc()).splitlines():
                sys.stderr.write(f"{printable(line)}\n")
        if isinstance(exc, ObjkvError):
            code = exit_code(exc)
            hint = "; objkv doctor shows what works" if code == UNREACHABLE else ""
            hint *= not str(exc).endswith("?")  # which is a hint itself
            if str(exc).endswith(" namespaces; choose one"):  # none was named
                hint = " with --namespace"
            _say(f"{str(exc).rstrip('.')}{hint}".removeprefix("objkv "), code)
            for choice in exc.choices if isinstance(exc, UnclearName) else ():
                sys.stderr.write(f"  {printable(choice)}\n")
            return code
        if isinstance(exc, OSError) and not isinstance(exc, ConnectionError | TimeoutError):
            # The machine refused, as with a full disk or a folder of another user: no bug.
            place = f"{exc.filename}: " if exc.filename else ""
            return _say(f"{place}{exc.strerror or exc}", WRONG_USAGE)
        sentence = f"a bug in objkv: {type(exc).__name__}: {exc}; --debug shows where"
        return _say(sentence, BUG)


def exit_code(error: ObjkvError) -> int:
    """The exit code of a command that ended with ``error``."""
    if isinstance(error, NotStored):
        return FOUND
    if isinstance(error, ConfigError | StoreDenied):
        return WRONG_USAGE
    if isinstance(error, StoreError):
        return UNREACHABLE
    return FOUND if isinstance(error, PayloadError) else BUG


def _session(options: CommonOptions) -> Session:
    from objkv.cli.output import Printer
    from objkv.config import resolve_config

    given = {"bulk_url": options.bulk_url, "index_url": options.index_url}
    overrides = {name: value for name, value in given.items() if value is not None}
    resolved = resolve_config(overrides, file=options.config)
    form = options.form
    return Session(resolved, Printer(machine=form == "json", wide=form == "wide"))


def _say(sentence: str, code: int) -> int:
    sys.stderr.write(f"objkv: {printable(without_secrets(sentence))}\n")
    return code
