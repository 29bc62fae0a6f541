"""A short soak passes, says what it did, and would find bytes that nobody verified."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
UNVERIFIED = """
import sys
import objkv.codec.payload, objkv.codec.payload, objkv.codec.sealing
for module in (objkv.codec.payload, objkv.codec.payload, objkv.codec.sealing):
    module.digest = lambda content: "0" * 32
from benchmarks.soak import main
sys.exit(main())
"""


def soak(*command: str) -> tuple[int, dict[str, Any]]:
    run = subprocess.run(
        [
            sys.executable,
            *command,
            "--engine",
            "none",
            "--seconds",
            "8",
            "--replicas",
            "2",
            "--json",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.stdout, run.stderr[-4000:]
    return run.returncode, json.loads(run.stdout)


def test_a_soak_passes_and_says_what_it_did() -> None:
    code, told = soak("benchmarks/soak.py")
    assert told["broken"] == []
    assert code == 0
    assert told["seconds"] >= 7
    assert (told["threads_left"], told["files_left"], told["logged_errors"]) == ([], 0, [])
    for name in ("chunks_loaded", "chunks_computed", "chunks_checked", "objkv_saves"):
        assert told["counts"][name] > 0, name
    assert sum(told["faults"].values()) >= 5
    assert {"rss_mib", "rss_growth_mib", "wrong", "stuck"} <= told.keys()


def test_a_soak_finds_bytes_that_nobody_verified() -> None:
    code, told = soak("-c", UNVERIFIED)
    assert code == 1
    assert any("is wrong, loaded" in text for text in told["broken"])
