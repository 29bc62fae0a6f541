"""The lines of vLLM's log, and which of them are objkv's."""

import re
from pathlib import Path

import objkv

PACKAGE = f"{Path(objkv.__file__).parent}/"
_LINE = re.compile(
    r"\([^()]+ pid=\d+\) (?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d "
    r"\[[^\[\]]+:\d+\] (?P<message>.*)"
)
"""``_FORMAT`` in ``vllm/logger.py``, without colours. It has a logger's file and not its name;
``objkv.connector.guard`` puts objkv's name in front of each message."""
_OWN = re.compile(r"objkv(: | |$)")
"""What objkv logged. A folder may be called objkv as well."""
_SHOWN = re.compile(rf'[ |]*(File "{re.escape(PACKAGE)}|objkv(\.\w+)+(: |$))')
"""A traceback's line with a frame in objkv's code, or an exception of objkv's, whoever logged it.
"""


def objkv_errors(log: str) -> list[str]:
    """What went wrong in objkv. Raises ValueError if the log has no line of objkv's: then it is in
    another format, or objkv did not run."""
    lines = [found for line in log.splitlines() if (found := _LINE.match(line))]
    if not any(_OWN.match(line["message"]) for line in lines):
        raise ValueError("no line of this log is objkv's")
    errors = [line["message"] for line in lines if line["level"] in ("ERROR", "CRITICAL")]
    return [message for message in errors if _OWN.match(message) or _SHOWN.match(message)]
