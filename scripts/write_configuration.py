"""Writes ``docs/configuration.md`` from the settings themselves, so that it cannot drift.

python scripts/write_configuration.py; ``tests/test_docs.py`` fails when the page is stale.
"""

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from objkv.config import CONFIG_FILE_VARIABLE, ENV_PREFIX, Config

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = f"""# Configuration

<!-- Written by scripts/write_configuration.py from objkv/config/schema.py: change it there. -->

Every setting may stand in three places; later ones win:

1. a TOML file, named by `{CONFIG_FILE_VARIABLE}`: `load_threads = 16`;
2. the environment, with the prefix `{ENV_PREFIX}`: `{ENV_PREFIX}LOAD_THREADS=16`;
3. `kv_connector_extra_config` inside vLLM's `--kv-transfer-config`: `{{"load_threads": 16}}`.

Unknown names are refused, with the nearest known one. `objkv doctor` prints what was resolved and
from where. AWS's own variables (`AWS_PROFILE`, `AWS_REGION`, `AWS_ENDPOINT_URL_S3`, ...) count
where nothing is set here. What ends in `_ms`, `_s` and `_bytes` is in that unit.

| Setting | Type | Default | Meaning |
|---|---|---|---|
"""


def shown_type(annotation: Any) -> str:
    """The annotation as an operator reads it: alternatives by name, nothing about None."""
    if get_origin(annotation) is Literal:
        return " \\| ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return ", ".join(shown_type(a) for a in get_args(annotation) if a is not type(None))
    return {"str": "text", "int": "integer", "bool": "true, false", "Path": "path"}.get(
        annotation.__name__, annotation.__name__
    )


def shown_default(field: FieldInfo) -> str:
    """The default; paths below the user's home as such."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "unset"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text.replace(str(Path.home()), '~')}`"


def rows() -> list[str]:
    """One row of the table per setting, in the order of the schema."""
    return [
        f"| `{name}` | {shown_type(field.annotation)} | {shown_default(field)} | "
        f"{' '.join((field.description or '').split()).replace('``', '`')} |"
        for name, field in Config.model_fields.items()
    ]


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join(rows()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
