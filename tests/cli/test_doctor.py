"""``objkv doctor``."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.support.agents import agent_folder
from tests.support.servers.redis import valkey_server


def test_the_default_works_on_a_fresh_machine(run: Run, home: Path) -> None:
    ran = run("doctor")
    assert ran.code == 0
    assert ran.out.splitlines()[0] == "works"
    assert f"file://{home}/objkv/chunks" in ran.out
    assert "load_threads" not in ran.out
    assert [line.split()[:2] for line in ran.out.splitlines()[2:6]] == [
        ["ok", area] for area in ("agent", "bulk", "index", "engine")
    ]
    shown = run("doctor", "--all").out
    assert "load_threads" in shown
    assert "bulk: get into buffer" in shown


def test_failures_come_first_with_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with agent_folder() as folder:
        monkeypatch.setenv("OBJKV_AGENT", f"unix://{folder}/s")
        ran = run("doctor")
    lines = ran.out.splitlines()
    assert (ran.code, lines[0]) == (3, "does not work: 1 check failed; 2 things not checked")
    assert lines[2].startswith("unreachable  agent: socket")
    assert f"objkv agent --socket {folder}/s" in lines[3]
    assert lines[4].startswith("not checked  agent: its stores")
    assert "bulk_url" not in ran.out, "a replica uses no store of its own"


def test_a_bulk_store_that_is_no_folder_is_2(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = run("doctor", "--json", "--bulk-url", f"file://{tmp_path}/file/sub")
    assert ran.code == 2
    assert ran.document["verdict"] == "denied"
    assert "remove the file whose path must be a folder" in ran.out


@pytest.mark.slow
def test_a_real_server_is_explained_and_its_refusals_too(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OBJKV_LOOKUP_DEADLINE_MS", "20000")  # a busy machine is no dead server
    with valkey_server(tmp_path / "valkey") as server:
        rights = ["on", ">pw", "~objkv:*", "+@connection"]
        client: Any = server.client()
        client.execute_command("ACL", "SETUSER", "reader", *rights, "+@read")
        may = ("+@read", "+@write", "+@scripting", "-info", "-time")
        client.execute_command("ACL", "SETUSER", "replica", *rights, *may)
        client.close()

        ran = run("doctor", "--json", "--index-url", server.url)
        checks = {(check["area"], check["name"]): check for check in ran.document["checks"]}
        assert (ran.code, ran.document["verdict"]) == (0, "warnings")
        assert checks["index", "memory policy"]["fix"].startswith("set maxmemory")
        assert checks["hot", "get range"]["status"] == "ok"

        place = server.url.removeprefix("redis://")
        (tmp_path / "b").mkdir()
        ends = ("--index-url", f"redis://replica:pw@{place}", "--bulk-url", f"file://{tmp_path}/b")
        ran = run("doctor", "--json", *ends)
        assert (ran.code, ran.document["verdict"]) == (0, "ok")
        assert ran.document["summary"] == "works; 3 things not checked"
        for user, words in (
            ("reader:pw", "`objkv access` prints"),
            ("replica:no", "redis_password"),
        ):
            ran = run("doctor", "--json", "--index-url", f"redis://{user}@{place}")
            assert (ran.code, ran.document["verdict"]) == (2, "denied")
            assert words in ran.out


MODELS = Path(__file__).parents[1] / "models"


def test_a_model_is_judged_without_a_store(run: Run, home: Path) -> None:
    ran = run("doctor", "--model", str(MODELS / "qwen3-next-80b-a3b"), "--tp", "4")
    assert ran.code == 0
    assert ran.out.splitlines()[0] == "qwen3-next-80b-a3b: supported"
    assert "36 with states, 12 with full attention" in ran.out
    assert "pipeline parallelism, DCP, drafts; see docs/models.md" in " ".join(ran.out.split())
    assert not (home / "objkv").exists()


def test_a_refused_model_is_1_with_the_connectors_sentence(run: Run) -> None:
    ran = run("doctor", "--json", "--model", str(MODELS / "whisper-large-v3"))
    assert ran.code == 1
    verdict = ran.document
    assert verdict["use"] == "tier"
    assert "(CrossAttentionSpec): run it without the objkv connector" in verdict["refused"]
    assert verdict["layers"] == {"full attention": 32, "cross attention": 32}


def test_a_model_is_judged_without_vllm_and_torch(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom objkv.cli.app import app\n"
        "app(standalone_mode=False)\n"
        "print([name for name in ('vllm', 'torch', 'transformers') if name in sys.modules])"
    )
    arguments = ["doctor", "--model", str(MODELS / "gemma-3-27b")]
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.splitlines()[-1] == "[]", ran.stderr
