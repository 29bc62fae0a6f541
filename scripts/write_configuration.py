"""``docs/configuration.md``, and the names of settings in the chart's schema, from the schema of
settings."""

import re
import textwrap
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from objkv.config import Config
from objkv.config.schema import SECRET_SETTINGS
from objkv.config.sources import CONFIG_FILE_VARIABLE, ENV_PREFIX

CHART_SCHEMA = Path(__file__).parents[1] / "examples/kubernetes/chart/values.schema.json"
PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = f"""# Configuration

<!-- Written by scripts/write_configuration.py from objkv/config/schema.py: change it there. -->

A setting can be set in three places. Later ones win:

1. a TOML file whose path is in `{CONFIG_FILE_VARIABLE}`: `load_threads = 16`
2. an environment variable with the prefix `{ENV_PREFIX}`: `{ENV_PREFIX}LOAD_THREADS=16`
3. `kv_connector_extra_config` in vLLM's `--kv-transfer-config`: `{{"load_threads": 16}}`

An unknown name is an error, and the message shows the nearest known name. `objkv doctor` prints
every setting with its source. AWS's own variables (`AWS_PROFILE`, `AWS_REGION`,
`AWS_ENDPOINT_URL_S3` and others) apply to settings that are unset here. A name that ends in `_ms`,
`_s` or `_bytes` gives the unit of a bare number: milliseconds, seconds or bytes. Text may also be
`2h` or `10GiB`.
"""
COLUMNS = """
| Setting | Type | Default | Meaning |
|---|---|---|---|
"""

BASIC = frozenset(
    {
        *("bulk_url", "index_url", "allow_plaintext", "tenant", "role", "ttl_s", "quota_bytes"),
        *("s3_endpoint_url", "s3_region", "s3_addressing"),
        *("s3_access_key_id", "s3_secret_access_key", "redis_username", "redis_password"),
        *("chunk_tokens", "codec", "load_mode", "save_decode", "pinned_bytes_max", "admission"),
    }
)
"""The settings that a new operator reads first. All others are advanced."""
TOPICS = {
    "s3_ca_bundle": "Bulk store",
    "redis_ca_file": "Redis",
    "hot_save_bytes_max": "Hot store",
    "model_id": "Model and weights",
    "sweep_grace_s": "Eviction",
    "agent": "Node agent",
    "lookup_deadline_ms": "Deadlines",
    "load_threads": "Threads",
    "at_start": "Failures",
    "store_tokens": "Audits, signatures and encryption",
}
"""Headings for the advanced settings. Each applies from the named setting up to the next heading,
in the order of ``Config``."""


def shown_type(annotation: Any) -> str:
    """Return the type in an operator's words. Alternatives are listed by name; None is omitted."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        return " \\| ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return ", ".join(shown_type(a) for a in get_args(annotation) if a is not type(None))
    return {"str": "text", "int": "integer", "bool": "true, false", "Path": "path"}.get(
        annotation.__name__, annotation.__name__
    )


def shown_default(name: str, field: FieldInfo) -> str:
    """Return the default. The user's home directory is shown as ``~``."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "unset"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    shown = f"`{text.replace(str(Path.home()), '~')}`"
    for bits, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if "_bytes" in name and value >> bits:
            return f"{shown} ({value >> bits} {unit})"
    return shown


def table(names: Iterable[str]) -> str:
    """A table with one row per setting."""
    fields = Config.model_fields
    return COLUMNS + "".join(
        f"| `{name}` | {shown_type(fields[name].annotation)} | "
        f"{shown_default(name, fields[name])} | "
        f"{' '.join((fields[name].description or '').split()).replace('``', '`')} |\n"
        for name in names
    )


def advanced() -> dict[str, list[str]]:
    """The names of the advanced settings by topic, in the order of the schema."""
    topics: dict[str, list[str]] = {}
    topic = ""
    for name in Config.model_fields:
        topic = TOPICS.get(name, topic)
        if name not in BASIC:
            topics.setdefault(topic, []).append(name)
    return topics


def page() -> str:
    """The whole page."""
    parts = [
        HEAD,
        "\n## Basic settings\n",
        table(name for name in Config.model_fields if name in BASIC),
        "\n## Advanced settings\n",
        *(f"\n### {topic}\n{table(names)}" for topic, names in advanced().items()),
    ]
    return "".join(parts)


def chart_schema() -> str:
    """The chart's schema, whose users set all settings but secrets and what the chart sets."""
    others = {*SECRET_SETTINGS, "role", "redis_prefix"}
    names = ", ".join(f'"OBJKV_{n.upper()}"' for n in Config.model_fields if n not in others)
    enum = textwrap.indent(textwrap.fill(names, 100), " " * 12)
    pattern = r'\{"enum": \[[^\]]*"OBJKV_TTL_S"[^\]]*\]\}'
    text = CHART_SCHEMA.read_text(encoding="utf-8")
    return re.sub(pattern, f'{{"enum": [\n{enum}\n          ]}}', text)
