"""The ``objkv`` command line: the table of subcommands, each imported when it is first used.

A new subcommand is one line in ``GROUPS`` and one module in this folder. Importing all of them
takes ten times longer than printing the list.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_group

from objkv import __version__

GROUPS: Final = {
    "Inspect": {
        "ls": ("ls:ls", "List namespaces, or the prefixes stored in one."),
        "show": ("show:show", "Show the payloads of one chunk and verify every byte."),
        "match": ("match:match", "Show how much of a prompt is stored and would be served."),
        "diff": ("diff:diff", "Explain why two namespaces or replicas do not share KV."),
        "audit": ("audit:audit", "Report stored chunks: owner, age, usage, cost and faults."),
        "top": ("top:top", "Show live hit rates, traffic and errors of a fleet."),
        "size": ("size:size", "Estimate a fleet's storage, request rate and cost."),
    },
    "Operate": {
        "sweep": ("sweep:sweep", "Find unreachable and evictable data; delete it with --apply."),
        "rebuild": ("rebuild:rebuild", "Rebuild the index from the bulk store."),
        "verify": ("verify:verify", "Verify stored payloads and their index records."),
        "pin": ("pin:pin", "Protect a stored prefix from eviction until a date."),
        "unpin": ("pin:unpin", "Remove a pin; normal expiry applies again."),
        "warm": ("warm:warm", "Compute and save prompts before users send them."),
        "admission": (
            "admission:admission",
            "Switch loads off or on in running replicas, for a limited time.",
        ),
        "access": (
            "access:access",
            "Print the least-privilege IAM policy and Redis ACL for a role.",
        ),
        "exporter": ("exporter:exporter", "Serve store and index metrics to Prometheus."),
    },
    "Node": {
        "agent": (
            "agent:agent",
            "Run the node agent, which loads and saves for all replicas of a machine.",
        ),
        "prefetch": ("prefetch:prefetch", "Fetch a stored prompt into this node's memory."),
    },
    "Check": {
        "doctor": ("doctor:doctor", "Check settings, agent, stores and index, and suggest fixes."),
        "bench": ("bench:bench", "Measure your stores, index and node agent from this machine."),
        "demo": ("demo:demo", "Show one replica reusing KV that another one computed."),
        "gpu-check": (
            "demo:gpu_check",
            "Check on this machine's GPU that replicas share KV and give the same answers.",
        ),
    },
}
"""By group: each subcommand's module and function, and the first sentence of its help."""
COMMANDS: Final = {name: entry for group in GROUPS.values() for name, entry in group.items()}


class Commands(TyperGroup):
    """The group of all subcommands. A command's module is imported when the command is used."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: dict[str, Any] = dict.fromkeys(COMMANDS)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the Click command; None if there is none of this name."""
        if cmd_name in COMMANDS and self.commands[cmd_name] is None:
            module, _, attribute = COMMANDS[cmd_name][0].partition(":")
            found = getattr(import_module(f"objkv.cli.{module}"), attribute)
            group = typer.Typer(add_completion=False, rich_markup_mode=None)
            group.command(cmd_name)(found)
            self.commands[cmd_name] = get_group(group).commands[cmd_name]
        return self.commands.get(cmd_name)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the name of a subcommand without importing any."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        from typer._click.shell_completion import CompletionItem

        return [
            CompletionItem(name, help=sentence)
            for name, (_, sentence) in COMMANDS.items()
            if name.startswith(incomplete)
        ]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of subcommands without importing them."""
        width = max(map(len, COMMANDS))
        for group, entries in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl(
                    [(name.ljust(width), sentence) for name, (_, sentence) in entries.items()]
                )

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read ``objkv``'s own options; not to complete a word: that would import pydantic."""
        if not ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        ctx._opt_prefixes.update(("-", "--"))
        ctx._protected_args, ctx.args = args[:1], args[1:]
        return ctx.args

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """``objkv help [COMMAND]`` and ``objkv version`` are the options of that name."""
        if ctx.resilient_parsing:  # a word is completed: after help, the name of a command
            return super().resolve_command(ctx, args)
        if args[0] == "version":
            _print_version(True)
        if args[0] == "help":
            args = [*(args[1:2] or [""]), "--help"]
            if not args[0]:
                typer.echo(ctx.get_help())
                ctx.exit()
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand. Usage errors do not show pydantic's prefix."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as exc:
            exc.message = exc.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    name="objkv",
    cls=Commands,
    help="Inspect, check and maintain one shared KV cache for a fleet of vLLM replicas.",
    epilog="Exit codes: 0 success, 1 not what you asked for, 2 wrong usage or settings, "
    "3 a store is unreachable, 70 a bug in objkv, 130 interrupted, 141 standard output was closed.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    # Usage errors are plain lines: a box around them is in the way of grep.
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"objkv {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Do nothing: the subcommand does."""


def all_commands() -> Iterator[tuple[str, Any]]:
    """Yield ``objkv`` and each command, by name. Imports every module of the command line."""
    group = get_group(app)
    assert isinstance(group, Commands)
    yield "objkv", group
    for name in COMMANDS:
        yield f"objkv {name}", group.get_command(None, name)


def main() -> None:
    """Run the command line of the current process."""
    app()
