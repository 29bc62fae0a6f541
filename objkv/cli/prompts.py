"""Options that name a prompt: token ids or text with a tokenizer, the namespace, salt, adapter."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from objkv.cli.options import Namespace, read_text
from objkv.errors import ConfigError
from objkv.keys.prefix import PromptExtras
from objkv.keys.tokenizer import Tokenizers
from objkv.ops.match import parse_tokens


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """The options of commands that take a prompt."""

    tokens: Annotated[
        Path | None,
        typer.Option(
            help="File of token ids: a JSON list, or ids separated by spaces or commas. - is "
            "stdin.",
            metavar="FILE",
        ),
    ] = None
    text: Annotated[
        str | None, typer.Option(help="Prompt as text. Needs --tokenizer.", metavar="TEXT")
    ] = None
    text_file: Annotated[
        Path | None,
        typer.Option(help="File with the prompt as text. Needs --tokenizer.", metavar="FILE"),
    ] = None
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json or its directory.", metavar="PATH")
    ] = None
    namespace: Namespace = None
    cache_salt: Annotated[
        str | None, typer.Option(help="cache_salt of the request.", metavar="TEXT")
    ] = None
    lora_digest: Annotated[
        str | None,
        typer.Option(help="Content digest of the LoRA adapter in hex digits.", metavar="HEX"),
    ] = None

    @property
    def is_given(self) -> bool:
        """Whether an option names the prompt, so that it is not read from standard input."""
        return (self.tokens, self.text, self.text_file, self.tokenizer) != (None,) * 4

    def read(self) -> tuple[list[int], PromptExtras]:
        """Return the token ids, by default from standard input, and what else names their KV.
        Raises ``ConfigError``."""
        if [self.tokens, self.text, self.text_file].count(None) < 2:
            raise ConfigError("give only one of --tokens, --text and --text-file")
        if (self.text is None and self.text_file is None) != (self.tokenizer is None):
            raise ConfigError(
                "--text and --text-file need --tokenizer, and --tokenizer one of them"
            )
        if self.tokenizer is not None:
            given = _read(self.text_file) if self.text is None else self.text
            prompt = Tokenizers(None).tokens(given, self.tokenizer)
        else:
            prompt = parse_tokens(_read(self.tokens))
        if not prompt:
            raise ConfigError("the prompt is empty (no token ids)")
        return prompt, self.extras()

    def extras(self) -> PromptExtras:
        """Return the salt and the adapter. Raises ``ConfigError``."""
        try:
            digest = None if self.lora_digest is None else bytes.fromhex(self.lora_digest)
        except ValueError as exc:
            raise ConfigError(f"--lora-digest {self.lora_digest!r}: not hex digits") from exc
        return PromptExtras(lora_digest=digest, salt=self.cache_salt)


def _read(path: Path | None) -> str:
    if path is None or str(path) == "-":
        if sys.stdin.isatty():
            raise ConfigError("no prompt given; use --tokens FILE or pipe token ids to stdin")
        return sys.stdin.read()
    return read_text(path)
