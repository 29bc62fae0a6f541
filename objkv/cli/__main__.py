"""The entry point of the ``objkv`` command. An interrupt during its imports exits quietly too."""

import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command line, imported here so that an interrupt meanwhile is caught."""
    try:
        if sys.argv[1:2] == ["completion"] and len(sys.argv) == 3:
            # Shells run this at every start. To parse it, typer would import pydantic.
            from objkv.cli.completion import SCRIPTS, print_script

            if sys.argv[2] in SCRIPTS:
                sys.exit(print_script(sys.argv[2]))
        from objkv.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
