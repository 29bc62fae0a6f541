"""Settings: one strict schema for the TOML file, environment, vLLM's extra config and options.

Later sources win: defaults, the TOML file (``OBJKV_CONFIG_FILE``), the environment (``OBJKV_*``),
then ``kv_connector_extra_config`` in the engine or options on the command line.
"""

from objkv.config.schema import Config as Config
from objkv.config.schema import LoadMode as LoadMode
from objkv.config.schema import Role as Role
from objkv.config.sources import ENV_PREFIX as ENV_PREFIX
from objkv.config.sources import Resolved as Resolved
from objkv.config.sources import load_config as load_config
from objkv.config.sources import resolve_config as resolve_config
from objkv.config.urls import Url as Url
from objkv.config.urls import cache_folder as cache_folder
from objkv.config.urls import is_directory_bucket as is_directory_bucket
from objkv.config.urls import is_this_machine as is_this_machine
from objkv.config.urls import local_path as local_path
from objkv.config.urls import make_private as make_private
from objkv.config.urls import parse_url as parse_url
