"""Settings: one strict schema for the TOML file, environment, vLLM's extra config and options.

Later sources win: defaults, the TOML file (``OBJKV_CONFIG_FILE``), the environment (``OBJKV_*``),
then ``kv_connector_extra_config`` in the engine or options on the command line.
"""

from objkv.config.schema import CodecName, Config, LoadMode, Role
from objkv.config.sources import (
    CONFIG_FILE_VARIABLE,
    ENV_PREFIX,
    Resolved,
    Source,
    load_config,
    resolve_config,
)
from objkv.config.urls import (
    Url,
    cache_folder,
    is_directory_bucket,
    is_this_machine,
    local_path,
    make_private,
    parse_url,
    refuse_clear,
)

__all__ = [
    "CONFIG_FILE_VARIABLE",
    "ENV_PREFIX",
    "CodecName",
    "Config",
    "LoadMode",
    "Resolved",
    "Role",
    "Source",
    "Url",
    "cache_folder",
    "is_directory_bucket",
    "is_this_machine",
    "load_config",
    "local_path",
    "make_private",
    "parse_url",
    "refuse_clear",
    "resolve_config",
]
