"""Where the demo keeps its model, logs and store: one folder, one demo at a time."""

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from objkv.errors import ConfigError
from objkv.ops.demo.job import Prompt


@dataclass(frozen=True, slots=True)
class Place:
    """Folders below the user's cache folder."""

    root: Path

    @property
    def models(self) -> Path:
        """Kept from demo to demo."""
        return self.root / "models"

    @property
    def logs(self) -> Path:
        """Of the last demo."""
        return self.root / "logs"

    @property
    def prompts(self) -> Path:
        """Token ids of the last demo's prompts, one file each."""
        return self.root / "prompts"

    @property
    def store(self) -> Path:
        """Chunks and index of the last demo that needed no servers."""
        return self.root / "store"

    @property
    def settings(self) -> dict[str, str]:
        """Environment variables that lead to ``store``."""
        return {
            "OBJKV_BULK_URL": f"file://{self.store / 'chunks'}",
            "OBJKV_INDEX_URL": f"sqlite://{self.store / 'index.sqlite'}",
        }

    def prompt_file(self, prompt: Prompt) -> Path:
        """For ``objkv match --tokens``."""
        return self.prompts / f"{prompt.name.replace(', ', '-').replace(' ', '-')}.json"


@contextmanager
def prepared(place: Place, prompts: tuple[Prompt, ...]) -> Iterator[None]:
    """Empty the place of what the last demo left, but for the model, and keep others out.

    Raises ``ConfigError`` while another demo runs there.
    """
    place.root.mkdir(parents=True, exist_ok=True)
    with (place.root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise ConfigError(f"another demo is running in {place.root}: wait for it") from exc
        for folder in (place.logs, place.prompts, place.store):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        for prompt in prompts:
            place.prompt_file(prompt).write_text(json.dumps(prompt.tokens))
        yield
