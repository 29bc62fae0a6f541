"""The lines of vLLM's log, and which of them are objkv's."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import objkv

PACKAGE = f"{Path(objkv.__file__).parent}/"
_LINE = re.compile(
    r"\((?P<process>[^()]+) pid=(?P<pid>\d+)\) (?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d "
    r"\[(?P<file>[^\[\]]+):\d+\] (?P<message>.*)"
)
"""``_FORMAT`` in ``vllm/logger.py``, without colours. It has a logger's file and not its name;
``objkv.connector.guard`` puts objkv's name in front of each message."""
_OWN = re.compile(r"objkv(: | |$)")
_EXCEPTION = re.compile(r"objkv(\.\w+)+(: |$)")


@dataclass(frozen=True)
class VllmLine:
    """One line of a log. A message of several lines, such as a traceback, is several of these."""

    process: str
    pid: int
    level: str
    file: str
    message: str

    @property
    def is_error(self) -> bool:
        """Whether its level is ERROR or above."""
        return self.level in ("ERROR", "CRITICAL")

    @property
    def is_from_objkv(self) -> bool:
        """Whether objkv logged it. A folder may be called objkv as well."""
        return _OWN.match(self.message) is not None

    @property
    def shows_objkv(self) -> bool:
        """Whether it is a traceback's line with a frame in objkv's code or an exception of objkv's,
        whatever logged it."""
        message = self.message.lstrip(" |")
        return message.startswith(f'File "{PACKAGE}') or _EXCEPTION.match(message) is not None


def parse(log: str) -> Iterator[VllmLine]:
    """The lines in vLLM's format; what libraries print in other ways is left out."""
    for line in log.splitlines():
        if found := _LINE.match(line):
            fields = found.groupdict()
            yield VllmLine(**(fields | {"pid": int(fields["pid"])}))


def objkv_errors(log: str) -> list[str]:
    """What went wrong in objkv. Raises ValueError if the log has no line of objkv's: then it is in
    another format, or objkv did not run."""
    lines = list(parse(log))
    if not any(line.is_from_objkv for line in lines):
        raise ValueError("no line of this log is objkv's")
    return [
        line.message for line in lines if line.is_error and (line.is_from_objkv or line.shows_objkv)
    ]
