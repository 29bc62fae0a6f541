"""The ``objkv`` command. A new subcommand is one line here and one file beside this one."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from objkv import __version__
from objkv.cli.access import access
from objkv.cli.audit import audit
from objkv.cli.bench import bench
from objkv.cli.completion import completion
from objkv.cli.demo import demo
from objkv.cli.diff import diff
from objkv.cli.doctor import doctor
from objkv.cli.export import export
from objkv.cli.exporter import exporter
from objkv.cli.import_ import import_
from objkv.cli.ls import ls
from objkv.cli.match import match
from objkv.cli.pin import pin, unpin
from objkv.cli.rebuild import rebuild
from objkv.cli.show import show
from objkv.cli.size import size
from objkv.cli.sweep import sweep
from objkv.cli.top import top
from objkv.cli.verify import verify
from objkv.cli.warm import warm


class Commands(TyperGroup):
    """All commands; what one types wrongly is told without the names of libraries."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as exc:
            exc.message = exc.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    name="objkv",
    cls=Commands,
    # ``objkv completion`` is the one way to that.
    add_completion=False,
    help="One shared KV cache for a fleet of vLLM replicas: look into it, and check it.",
    epilog="Exit codes: 0 fine, 1 the check found something, 2 wrong usage or settings, "
    "3 a store is unreachable.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    # Plain usage errors: a box drawn around a sentence helps nobody who greps a log.
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"objkv {__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show where errors come from.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Keep what all commands need to know."""
    ctx.obj = debug


app.command("access")(access)
app.command("audit", short_help="Tell what is stored, for whom, of what use, and what is wrong.")(
    audit
)
app.add_typer(bench)
app.command("completion")(completion)
app.command("demo")(demo)
app.command("doctor")(doctor)
app.command("exporter")(exporter)
app.command("ls")(ls)
app.command("show")(show)
app.command("size")(size)
app.command("top")(top)
app.command("match")(match)
app.command("export", short_help="Write chunks as plain safetensors files.")(export)
app.command("import", short_help="Bring what objkv export wrote into this cache.")(import_)
app.command("pin")(pin)
app.command("unpin")(unpin)
app.command("warm", short_help="Compute and save prompts before anybody asks for them.")(warm)
app.command("diff")(diff)
app.command("verify")(verify)
app.command("sweep")(sweep)
app.command("rebuild")(rebuild)


def main() -> None:
    """The console script."""
    app()
