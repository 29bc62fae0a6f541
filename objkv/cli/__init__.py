"""The ``objkv`` command: one file per subcommand, each parses, calls ops and prints."""
