"""The server of ``warm --model``, with a program in place of vLLM."""

import tempfile
from pathlib import Path

import httpx
import pytest

from objkv.errors import ConfigError, StoreUnavailable
from objkv.ops.warm.server import serving

ROOT = Path(__file__).resolve().parents[3]
FAKE = "tests.ops.warm.fake_server"
SETTINGS = {"OBJKV_BULK_URL": "file:///x"}


@pytest.fixture(autouse=True)
def log_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_answers_within_the_block_asks_for_no_key_and_ends_in_order(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "fleet")
    with serving("tiny", SETTINGS, ["--enforce-eager", "--seed=1"], module=FAKE) as socket:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket))) as http:
            assert http.get("http://localhost/health").is_success
        [log] = log_folder.glob("*.log")
        said = log.read_text()
    assert "--enforce-eager --seed=1 file:///x" in said
    assert '"kv_connector": "ObjKVConnector"' in said
    assert "asks for the key" not in said
    assert list(log_folder.iterdir()) == []


def test_one_that_does_not_start_says_so_and_its_log_stays(log_folder: Path) -> None:
    with (
        pytest.raises(StoreUnavailable, match=r"server of broken ended .*; its log is") as raised,
        serving("broken", SETTINGS, [], module=FAKE),
    ):
        pytest.fail("it did not start")
    assert "no such model" in Path(str(raised.value).rpartition(" ")[2]).read_text()


def test_without_vllm_it_is_named() -> None:
    with (
        pytest.raises(ConfigError, match=r"--model needs vLLM, .* or use --endpoint"),
        serving("tiny", SETTINGS, [], module="vlllm.no"),
    ):
        pytest.fail("it did not start")
