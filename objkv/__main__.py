"""``python -m objkv``: the ``objkv`` command."""

from objkv.cli.__main__ import main

if __name__ == "__main__":
    main()
