"""Where the ``objkv`` command begins: an interrupt while it still imports ends it quietly too."""

import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command line. Imports it here, because that takes most of a second."""
    try:
        from objkv.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
