"""The completion scripts in ``objkv/cli/completions``, from the command line itself."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any, Literal, get_args, get_origin

from objkv.cli.app import all_commands
from objkv.codec.payload import CODECS
from objkv.ops.size.model import DTYPES
from objkv.ops.sweep.remove import CATEGORIES

FOLDER = Path(__file__).parents[1] / "objkv" / "cli" / "completions"
NOTE = "Written by scripts/write_completion.py in a clone of the project: change it there."
CHOICES = {
    "CATEGORY": tuple(CATEGORIES),
    "CODEC": tuple(CODECS),
    "DTYPE": ("auto", *DTYPES),
}
"""The values of options and arguments that are plain text to typer."""
FOLDERS = {"DIR", "FOLDER"}
FILES = {"A", "B", "FILE", "FILES", "PATH"}


@dataclass(frozen=True)
class Value:
    """The values that an option or an argument takes. Without choices or paths: free text."""

    choices: tuple[str, ...] = ()
    paths: Literal["", "files", "folders"] = ""


@dataclass(frozen=True)
class Choice:
    """One candidate and its help."""

    name: str
    help: str
    value: Value | None = None
    """None for a flag and for a command."""


@dataclass(frozen=True)
class Spec:
    """The candidates after one command."""

    path: str
    commands: tuple[Choice, ...]
    options: tuple[Choice, ...]
    arguments: Value | None


@cache
def specs() -> tuple[Spec, ...]:
    """The candidates after each command."""
    return tuple(spec_of(path, command) for path, command in all_commands())


def spec_of(path: str, command: Any) -> Spec:
    """The candidates after one command."""
    inner = getattr(command, "commands", {})
    commands = tuple(
        Choice(name, sentence(inner[name].help)) for name in inner if not inner[name].hidden
    )
    options = []
    arguments = set()
    for parameter in command.params:
        value = None if getattr(parameter, "is_flag", False) else value_of(parameter)
        if not hasattr(parameter, "is_flag"):
            arguments.add(value)
        elif not parameter.hidden:
            text = sentence(parameter.help)
            options += [Choice(name, text, value) for name in parameter.opts]
    options.append(Choice("--help", "Show this message and exit."))
    assert len(arguments) <= 1, f"{path}: arguments of two kinds"
    return Spec(path, commands, tuple(options), next(iter(arguments), None))


def value_of(parameter: Any) -> Value:
    """The values that ``parameter`` takes."""
    annotation = parameter.type_descriptor.annotation
    if get_origin(annotation) is Literal:
        return Value(get_args(annotation))
    if parameter.metavar in CHOICES:
        return Value(CHOICES[parameter.metavar])
    if parameter.metavar in FOLDERS:
        return Value(paths="folders")
    return Value(paths="files" if parameter.metavar in FILES or annotation is Path else "")


def sentence(text: str | None) -> str:
    """The first sentence of a help text, on one line, without its period."""
    line = " ".join((text or "").split("\n\n")[0].split()).replace("``", "")
    return re.split(r"(?<=\w)\. ", line)[0].removesuffix(".")


def bash() -> str:
    """The script for bash: ``COMPREPLY`` from three ``case`` tables."""
    return f"""# Completion of objkv for bash. {NOTE}

_objkv_words() {{ # candidates after a command: $1 the command, $2 commands, options or arguments
    case "$1/$2" in
{words_table(bash_choices, bash_value)}
    esac
}}

_objkv_value() {{ # candidates of an option: $1 the command, $2 the option; false for a flag
    case "$1 $2" in
{values_table(bash_value)}
    *) return 1 ;;
    esac
}}

_objkv_reply() {{ # $1 the candidates, or @files or @folders; $2 the beginning; $3 goes before each
    local line
    COMPREPLY=()
    case "$1" in
    @files) compopt -o filenames 2>/dev/null; set -- "$(compgen -f -- "$2")" "$3" ;;
    @folders) compopt -o filenames 2>/dev/null; set -- "$(compgen -d -- "$2")" "$3" ;;
    *) set -- "$(compgen -W "$1" -- "$2")" "$3" ;;
    esac
    while IFS= read -r line; do
        [[ -z $line ]] || COMPREPLY+=("$2$line")
    done <<<"$1"
}}

_objkv_completion() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before="" path=objkv option="" dashes="" word i
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${{COMP_WORDS[i]}}
        [[ $word != -- ]] || dashes=yes
        case "$word ${{COMP_WORDS[i - 1]}}" in # bash splits values at = and :
        -* | [=:]\\ * | *\\ [=:]) continue ;;
        esac
        [[ -z $(_objkv_words "$path" commands) ]] ||
            _objkv_value "$path" "${{COMP_WORDS[i - 1]}}" >/dev/null || path="$path $word"
    done
    word=${{COMP_WORDS[COMP_CWORD - 1]}}
    if [[ -z $dashes ]]; then
        if [[ $current == "=" ]]; then # bash splits --option=value at the sign
            option=$word current=""
        elif [[ $word == "=" ]]; then
            option=${{COMP_WORDS[COMP_CWORD - 2]}}
        elif [[ $current == --*=* ]]; then
            option=${{current%%=*}} before=${{current%%=*}}= current=${{current#*=}}
        else
            option=$word
        fi
        if word=$(_objkv_value "$path" "$option"); then
            _objkv_reply "$word" "$current" "$before"
            return
        fi
        if [[ -n $before || $option != "${{COMP_WORDS[COMP_CWORD - 1]}}" ]]; then
            COMPREPLY=() # a flag takes no value
            return
        fi
    fi
    if [[ -z $dashes && $current == -* ]]; then
        _objkv_reply "$(_objkv_words "$path" options)" "$current" ""
    else
        word=$(_objkv_words "$path" commands)$(_objkv_words "$path" arguments)
        _objkv_reply "$word" "$current" ""
    fi
}}

complete -F _objkv_completion objkv
"""


def bash_choices(choices: tuple[Choice, ...]) -> str:
    """A command of bash that prints the names."""
    return f'echo "{" ".join(choice.name for choice in choices)}"'


def bash_value(value: Value) -> str:
    """A command of bash that prints the candidates."""
    if value == Value():
        return ":"
    return f"echo @{value.paths}" if value.paths else f'echo "{" ".join(value.choices)}"'


def zsh() -> str:
    """The script for zsh, which also works as a file of ``$fpath``."""
    return f"""#compdef objkv
# Completion of objkv for zsh. {NOTE}

_objkv_spec() {{ # sets names, helps and kind: $1 the command, $2 commands, options or arguments
    names=() kind=""
    case "$1/$2" in
{words_table(zsh_choices, zsh_value)}
    esac
}}

_objkv_value() {{ # sets names and kind: $1 the command, $2 the option; false for a flag
    names=() kind=""
    case "$1 $2" in
{values_table(zsh_value)}
    *) return 1 ;;
    esac
}}

_objkv_offer() {{
    case $kind in
    files) _files ;;
    folders) _files -/ ;;
    *) (( ! $#names )) || _describe objkv names ;;
    esac
}}

_objkv() {{
    local place=objkv previous word kind dashes
    local -a names
    for word in "${{(@)words[2,CURRENT-1]}}"; do
        [[ $word != -- ]] || dashes=yes
        if ! _objkv_value "$place" "$previous"; then
            _objkv_spec "$place" commands
            [[ $word == -* ]] || (( ! $#names )) || place="$place $word"
        fi
        previous=$word
    done
    if [[ -z $dashes ]]; then
        word=$words[CURRENT]
        if [[ $word == --*=* ]]; then
            compset -P 1 '*='
            _objkv_value "$place" "${{word%%=*}}" && _objkv_offer
            return
        fi
        if _objkv_value "$place" "$words[CURRENT-1]"; then
            _objkv_offer
            return
        fi
        if [[ $word == -* ]]; then
            _objkv_spec "$place" options
            _objkv_offer
            return
        fi
    fi
    _objkv_spec "$place" commands
    (( $#names )) || _objkv_spec "$place" arguments
    _objkv_offer
}}

if [[ $funcstack[1] == _objkv ]]; then
    _objkv "$@"
else
    compdef _objkv objkv
fi
"""


def zsh_choices(choices: tuple[Choice, ...]) -> str:
    """Assignments of zsh for candidates with their help, in the form that ``_describe`` reads."""
    return f"names=({' '.join(quote(f'{c.name}:{c.help}') for c in choices)})"


def zsh_value(value: Value) -> str:
    """Assignments of zsh for a value's candidates."""
    if value == Value():
        return ":"
    return f"kind={value.paths}" if value.paths else f"names=({' '.join(value.choices)})"


def fish() -> str:
    """The script for fish: one line for each candidate."""
    written = []
    for spec in specs():
        at = f"complete -c objkv -n {quote(f'__objkv_at {spec.path}')}"
        written.append("")
        written += [f"{at} -f -a {c.name} -d {fish_quote(c.help)}" for c in spec.commands]
        if spec.arguments is not None:
            written.append(f"{at} {fish_value(spec.arguments, needs=False)}")
        for option in spec.options:
            name = option.name.lstrip("-")
            kind = "-l" if option.name.startswith("--") else "-s"
            value = "" if option.value is None else f" {fish_value(option.value, needs=True)}"
            written.append(f"{at} {kind} {name}{value} -d {fish_quote(option.help)}")
    groups = " ".join(quote(spec.path) for spec in specs() if spec.commands)
    valued = " ".join(
        option.name for spec in specs() if spec.commands for option in spec.options if option.value
    )
    body = "\n".join(written)
    return f"""# Completion of objkv for fish. {NOTE}

function __objkv_at # whether the words before the cursor are of this command
    set -l place objkv
    set -l previous
    for word in (commandline -opc)[2..-1]
        if not string match -q -- '-*' $word; and contains -- "$place" {groups}
            and not contains -- "$previous" {valued}
            set place "$place $word"
        end
        set previous $word
    end
    test "$place" = "$argv"
end

complete -c objkv -f
{body}
"""


def fish_value(value: Value, *, needs: bool) -> str:
    """Options of fish's ``complete`` for a value's candidates."""
    required = "-r " if needs else ""
    if value.paths == "files":
        return f"{required}-F"
    if value.paths == "folders":
        return f"{required}-f -a '(__fish_complete_directories)'"
    return f"{required}-f" + (f" -a {fish_quote(' '.join(value.choices))}" if value.choices else "")


def fish_quote(text: str) -> str:
    """``text`` as one word of fish."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def words_table(choices: Callable[[tuple[Choice, ...]], str], value: Callable[[Value], str]) -> str:
    """The lines of a ``case`` on ``COMMAND/commands``, ``/options`` and ``/arguments``."""
    found = []
    for spec in specs():
        if spec.commands:
            found.append((f"{spec.path}/commands", choices(spec.commands)))
        found.append((f"{spec.path}/options", choices(spec.options)))
        if spec.arguments is not None:
            found.append((f"{spec.path}/arguments", value(spec.arguments)))
    return "\n".join(f"    {quote(key)}) {written} ;;" for key, written in found)


def values_table(value: Callable[[Value], str]) -> str:
    """The lines of a ``case`` on ``COMMAND OPTION``, for all options that take a value."""
    found: dict[str, list[str]] = {}
    for spec in specs():
        for option in spec.options:
            if option.value is not None:
                found.setdefault(value(option.value), []).append(f"{spec.path} {option.name}")
    joined = {written: "|".join(map(quote, keys)) for written, keys in found.items()}
    return "\n".join(f"    {keys}) {written} ;;" for written, keys in joined.items())


def scripts() -> dict[str, str]:
    """Each shell's script."""
    return {"bash": bash(), "zsh": zsh(), "fish": fish()}
