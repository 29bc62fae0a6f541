"""Settings: which source wins, what is refused, what messages say, what is kept secret."""

import os
import pwd
import shutil
import traceback
from pathlib import Path

import pytest

from objkv.assembly.backends import open_backends
from objkv.config import (
    Config,
    load_config,
    local_path,
    make_private,
    node,
    resolve_config,
)
from objkv.config.sources import _SERVICE_LINK
from objkv.connector.model.weights import local_folder
from objkv.errors import ConfigError
from objkv.ops.demo import DemoFolder
from objkv.redact import without_secrets
from objkv.telemetry import NullRecorder
from scripts.write_configuration import BASIC, TOPICS


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "objkv.toml"
    path.write_text('chunk_tokens = 1\nload_threads = 1\nttl_s = 1\ncodec = "lz4"\n')
    return path


def test_later_sources_win_and_each_setting_knows_its_source(file: Path) -> None:
    environ = {"OBJKV_LOAD_THREADS": "2", "OBJKV_TTL_S": "2"}
    resolved = resolve_config({"ttl_s": 3}, environ=environ, file=file)
    config, sources = resolved.config, resolved.sources
    assert (config.chunk_tokens, config.load_threads, config.ttl_s) == (1, 2, 3)
    assert sources["chunk_tokens"] == "file"
    assert sources["load_threads"] == "environment"
    assert sources["ttl_s"] == "option"
    assert sources["tenant"] == "default"
    assert set(sources) == set(Config.model_fields)


def test_a_given_file_replaces_the_one_that_the_environment_names(file: Path) -> None:
    environ = {"OBJKV_CONFIG_FILE": str(file)}
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # a byte order mark
    assert load_config(environ=environ).codec == "lz4"
    environ["OBJKV_CONFIG_FILE"] = "/nowhere.toml"
    assert resolve_config(environ=environ, file=file).config.codec == "lz4"


def test_without_a_home_only_what_lies_there_by_default_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container whose user id has no entry in passwd."""

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(ConfigError, match="has no home folder: set HOME or XDG_CACHE_HOME"):
        load_config(environ={})
    given = {"OBJKV_BULK_URL": f"file://{tmp_path}"}
    config = load_config(environ=given | {"OBJKV_INDEX_URL": "bulk:"})
    with open_backends(config, NullRecorder()) as backends:
        assert backends.bulk.get("none") is None
    assert local_folder("~somebody/model", None) is None


@pytest.mark.parametrize(
    ("given", "index_url"),
    [
        ({"bulk_url": "file:///shared"}, "bulk:"),
        ({"bulk_url": " file:///shared "}, "bulk:"),
        (
            {"bulk_url": "file:///shared", "index_url": "sqlite:///dev/null/i"},
            "sqlite:///dev/null/i",
        ),
        ({"bulk_url": "s3://bucket"}, "sqlite://"),
        ({}, "sqlite://"),
    ],
)
def test_a_folder_that_is_given_alone_is_its_own_index(
    given: dict[str, str], index_url: str
) -> None:
    environ = {f"OBJKV_{name.upper()}": value for name, value in given.items()}
    assert load_config(environ=environ).index_url.startswith(index_url)
    assert load_config(given, environ={}).index_url.startswith(index_url)


def test_only_a_folder_can_be_its_own_index() -> None:
    with pytest.raises(ConfigError, match="only a folder"):
        load_config({"bulk_url": "s3://bucket", "index_url": "bulk:"}, environ={})
    with pytest.raises(ConfigError, match="write bulk:"):
        load_config({"bulk_url": "file:///x", "index_url": "bulk:///y"}, environ={})


@pytest.mark.parametrize(
    ("overrides", "environ", "wanted"),
    [
        ({"bulk_urll": "x"}, {}, "'bulk_urll' in kv_connector_extra_config; did you mean 'bulk_u"),
        ({}, {"OBJKV_BULK_ULR": "x"}, "'OBJKV_BULK_ULR' in the environment; did you mean 'OBJKV_B"),
        ({}, {"OBJKV_AGENT": "foo"}, "OBJKV_AGENT in the environment: it must be auto, private,"),
        ({"agent_token": "short"}, {}, "agent_token in kv_connector_extra_config: it must have at"),
        (
            {"tenant": "a b"},
            {},
            "tenant in kv_connector_extra_config: it must have 1 to 64 letters",
        ),
        ({"xyzzy": 1}, {}, "unknown key 'xyzzy' in kv_connector_extra_config"),
        ({"load_threads": 0}, {}, "load_threads in kv_connector_extra_config: it must be great"),
        ({}, {"OBJKV_TTL_S": "abc"}, "OBJKV_TTL_S in the environment: 'abc' is not an integer"),
        ({"ttl_s": 1.5}, {}, "ttl_s in kv_connector_extra_config: 1.5 is not an integer"),
        ({}, {"OBJKV_STORE_TOKENS": "si"}, "'si' is not true or false"),
        ({}, {"OBJKV_TTL_S": "a secret in the wrong place"}, "the value is not an integer"),
        ({"bulk_url": "s3://b/p#red"}, {}, "bulk_url: a fragment (#...) is not used"),
        ({}, {"OBJKV_CONFIG_FILE": "/nowhere.toml"}, "/nowhere.toml: No such file"),
    ],
)
def test_what_is_refused_is_named_with_its_source(
    overrides: dict[str, object], environ: dict[str, str], wanted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, environ=environ)
    assert wanted in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not toml at all", r"c\.toml is not valid TOML"),
        (b"x = '\xff'", r"c\.toml is not valid TOML"),
        (b"load_thread = 3\n", r"'load_thread' in .*c\.toml; did you mean 'load_thr"),
    ],
)
def test_what_a_file_has_that_is_no_toml_or_no_setting_is_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        resolve_config(environ={}, file=path)


def test_an_empty_variable_counts_as_unset() -> None:
    assert load_config(environ={"OBJKV_S3_REGION": "", "OBJKV_CODEC": ""}).s3_region is None


def test_variables_that_kubernetes_makes_of_a_service_named_objkv_are_not_settings() -> None:
    made = ("PORT", "REDIS_SERVICE_PORT_TLS", "REDIS_PORT_6379_TCP", "REDIS_PORT_6379_TCP_ADDR")
    load_config(environ={f"OBJKV_{name}": "tcp://10.0.0.1" for name in ("SERVICE_HOST", *made)})
    names = [f"OBJKV_{name.upper()}" for name in Config.model_fields]
    assert [name for name in names if _SERVICE_LINK.fullmatch(name)] == []


def test_every_setting_is_documented_and_basic_ones_and_topics_are_settings() -> None:
    assert all(field.description for field in Config.model_fields.values())
    assert set(Config.model_fields) >= BASIC
    assert set(Config.model_fields) - BASIC >= set(TOPICS)
    advanced = [name for name in Config.model_fields if name not in BASIC]
    assert advanced[0] in TOPICS


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(environ={}).codec = "blosc"


def test_secrets_are_masked_wherever_settings_are_shown() -> None:
    names = ("s3_access_key_id", "s3_secret_access_key", "redis_password")
    given = {"index_url": "rediss://me:hunter2@host:6379/0", **dict.fromkeys(names, "hunter2")}
    shown = load_config(given, environ={}).public()
    assert "hunter2" not in str(shown)
    assert shown["index_url"] == "rediss://***@host:6379/0"
    assert shown["redis_password"] == "***"


def test_a_common_word_that_is_an_access_key_id_is_masked_as_the_setting_only() -> None:
    """Unless it is a secret, too."""
    keys = {"s3_access_key_id": "objkv", "s3_secret_access_key": "bucket"}
    shown = load_config(keys, environ={}).public()
    assert (shown["s3_access_key_id"], shown["s3_secret_access_key"]) == ("***", "***")
    assert without_secrets("objkv audit: no such bucket") == "objkv audit: no such ***"
    load_config({"s3_access_key_id": "AKIA5OBJ"}, environ={})
    assert without_secrets("of AKIA5OBJ: denied") == "of ***: denied"
    load_config({"s3_access_key_id": "minio", "s3_secret_access_key": "minio"}, environ={})
    assert without_secrets("denied: minio") == "denied: ***"


def test_an_error_never_carries_a_secret_along() -> None:
    values = {"redis_password": "hunter2", "index_url": "redis://:hunter2@", "codec": "hunter3"}
    with pytest.raises(ConfigError) as caught:
        load_config(values, environ={})
    assert "hunter" not in "".join(traceback.format_exception(caught.value))


def test_the_default_folder_has_a_quota_and_no_other_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "not" / "there" / "yet"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    config, fifth = load_config({}, environ={}), shutil.disk_usage(tmp_path).total // 5
    assert local_path(config.bulk_url) == cache / "objkv" / "chunks"
    assert local_path(config.index_url) == cache / "objkv" / "index.sqlite"
    assert config.quota_bytes == min(50 << 30, fifth)
    assert load_config({"quota_bytes": 0}, environ={}).quota_bytes == 0
    assert load_config({"quota_bytes": 7}, environ={}).quota_bytes == 7
    assert load_config({"bulk_url": "s3://b/x"}, environ={}).quota_bytes == 0


def test_folders_below_the_cache_are_private_whichever_part_of_objkv_comes_first(
    tmp_path: Path,
) -> None:
    def modes(folder: Path) -> set[int]:
        return {
            path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*")) if path.is_dir()
        }

    there = tmp_path / "there"
    there.mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        make_private(there / "cache" / "objkv" / "made")
        make_private(there / "cache" / "objkv" / "made")
        with DemoFolder(tmp_path / "demo" / "objkv" / "demo").prepared(()):
            pass
    finally:
        os.umask(before)
    assert there.stat().st_mode & 0o777 == 0o755  # what is there keeps its mode
    assert modes(there / "cache") == {0o700}
    assert (tmp_path / "demo" / "objkv").stat().st_mode & 0o777 == 0o700


TOKEN = "sixteen-or-more-characters"


def test_an_agent_listens_with_a_long_token_and_beyond_loopback_only_on_purpose() -> None:
    for address in ("127.0.0.1:9410", "[::1]:9410", "localhost:9410"):
        shown = load_config({"agent_listen": address, "agent_token": TOKEN}, environ={})
        assert shown.agent_listen == address
        assert TOKEN not in f"{shown!r} {shown.public()}"
        with pytest.raises(ConfigError, match="agent_listen is set: set agent_token too"):
            load_config({"agent_listen": address}, environ={})
    with pytest.raises(ConfigError, match="an IPv6 address in brackets"):
        load_config({"agent_listen": "::1:9", "agent_token": TOKEN}, environ={})

    given = {"agent_listen": "0.0.0.0:9410", "agent_token": TOKEN}
    with pytest.raises(ConfigError, match="unencrypted"):
        load_config(given, environ={})
    load_config(given | {"allow_plaintext": "agent"}, environ={})
    for token in ("short", "sixteen and more characters", "sechzehn-Zeichen-ü"):
        with pytest.raises(ConfigError, match="agent_token") as caught:
            load_config({"agent_token": token}, environ={})
        assert token not in str(caught.value)


@pytest.mark.parametrize("own", ["0::/a/b", "9:name=systemd:/a\n4:memory:/a/b\n0::/"])
@pytest.mark.parametrize("limited", ["a/b", "a", "."])
def test_the_memory_of_this_machine_is_what_its_control_groups_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, limited: str
) -> None:
    """In both versions, and if the limit is that of a group of groups."""
    file, version = tmp_path / "own", tmp_path / "memory" if "memory" in own else tmp_path
    file.write_text(own)
    (version / "a/b").mkdir(parents=True)
    for folder in (version / "a/b", version / "a"):
        (folder / "memory.max").write_text("max")
    name = "memory.limit_in_bytes" if "memory" in own else "memory.max"
    (version / limited / name).write_text("4096")
    monkeypatch.setattr(node, "_CGROUPS", tmp_path)
    monkeypatch.setattr(node, "_OWN_CGROUPS", file)
    assert node.host_bytes() == 4096
    (version / limited / name).unlink()
    assert node.host_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
