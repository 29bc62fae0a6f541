"""The entry point of the ``objkv`` command. An interrupt during its imports exits quietly too."""

import os
import sys
from io import TextIOWrapper

_INTERRUPTED = 130
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def _open_streams() -> None:
    """Make the standard streams usable: what the caller has closed leads nowhere, or the next file
    would get its number, and characters that an encoding lacks are escaped."""
    for name, mode in _STREAMS:
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, TextIOWrapper):  # commands refuse input that is not text
        sys.stdin.reconfigure(errors="surrogateescape")


def main() -> None:
    """Run the command line, imported here so that an interrupt meanwhile is caught."""
    _open_streams()
    try:
        from objkv.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
