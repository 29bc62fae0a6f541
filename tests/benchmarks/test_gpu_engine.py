"""The program that runs engines on a GPU, as far as a machine without one can run it."""

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_engine import read
from scripts.gpu_engine.bundle import ELF, ENTRY, MAGIC, fatbins, trim
from tests.support.agents import ROOT

PTX = 1


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    head = struct.calcsize(ENTRY)
    return struct.pack(ENTRY, kind, 0, head, len(code), 0, 0, 0, 0, architecture, 0, 0, 0) + code


def fatbin(*entries: bytes) -> bytes:
    body = b"".join(entries)
    whole = struct.pack("<IHHQ", MAGIC, 1, 16, len(body)) + body
    return whole.ljust((len(whole) + 7) // 8 * 8, b"\0")


def test_only_code_for_one_gpu_is_kept_and_every_fatbin_stays_in_its_place() -> None:
    right, other = entry(ELF, 90, b"right kernel"), entry(ELF, 80, b"older " * 9)
    first = fatbin(other, right, entry(PTX, 90, b"text"))
    second = fatbin(other)
    third = fatbin(entry(ELF, 90, b"a kernel that no model needs"))
    data = bytearray(b"file" * 2 + first + second + third + bytes(64))
    whole = len(data)
    foreign = entry(ELF, 75, b"x")
    trim(data, 8, whole, foreign, re.compile(b"right"))
    assert len(data) == whole
    found = list(fatbins(data, 8, whole))
    places = [8, 8 + len(first), 8 + len(first) + len(second)]
    assert [one.start for one in found] == places
    kept = [[bytes(data[c.start : c.end]) for c in one.cubins] for one in found]
    assert kept == [[right], [foreign], [foreign]]
    assert b"older" not in data
    assert b"text" not in data


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_engines_answer_the_same_with_and_without_objkv(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    command = [sys.executable, "-m", "scripts.gpu_engine", "--cpu", "--stages", "base,auto"]
    command += ["--lengths", "512", "--out", str(tmp_path / "out"), "--work", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    rows = read(tmp_path / "out" / "results.jsonl")
    assert not [row for row in rows if row["kind"] in ("error", "skipped")]
    assert [row["served"] for row in rows if row["kind"] == "loaded"] == [[512] * 4]
    assert [row["cached"] for row in rows if row["kind"] == "equal"] == [[True] * 4]
