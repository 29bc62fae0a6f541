"""What a replica saved leaves its cache as plain files, and another one loads it elsewhere."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cache import Values, scenario
from tests.engine.fleet import CHUNK, SharedStore, one_by_one
from tests.engine.harness import ROOT, run_replica
from tests.engine.prompts import prompt_of

pytestmark = pytest.mark.wide
PROMPT = prompt_of(3 * CHUNK + 9, seed=3)


def objkv(store: SharedStore, *arguments: str, stdin: str = "") -> list[Any]:
    """Exit code and document of the command, as users run it."""
    ends = (f"--bulk-url=file://{store.bulk}", f"--index-url=sqlite://{store.index_file}")
    command = [sys.executable, "-m", "objkv.cli", *arguments, *ends, "--json"]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, input=stdin
    )
    assert ran.stdout, ran.stderr
    return [ran.returncode, json.loads(ran.stdout)]


@scenario
def exported_and_imported(folder: Path) -> Values:
    first, second = SharedStore(folder / "first"), SharedStore(folder / "second")
    second.bulk.mkdir(parents=True)
    prompt = json.dumps(PROMPT.tokens)
    saved = run_replica(first.job(*one_by_one([PROMPT]), codec="zstd"), folder)
    values: Values = {"saved": saved}
    out = str(folder / "out")
    values["export"] = objkv(first, "export", "--out", out, "--tokens", "-", stdin=prompt)
    values["import"] = objkv(second, "import", out, "--apply")
    values["loaded"] = run_replica(second.job(*one_by_one([PROMPT])), folder)
    second.payload(PROMPT, 1).unlink()
    values["why"] = objkv(second, "match", "--explain", stdin=prompt)
    return values


def test_all_that_the_first_saved_is_brought_over() -> None:
    code, document = exported_and_imported()["export"]
    assert (code, document["exported"], document["corrupt"]) == (0, 3, 0)
    code, document = exported_and_imported()["import"]
    assert (code, document["added"], document["refused"]) == (0, 3, 0)


def test_another_replica_loads_it_and_generates_the_same() -> None:
    values = exported_and_imported()
    assert values["saved"].cached == [0]
    assert values["loaded"].cached == [3 * CHUNK]
    assert values["loaded"].tokens == values["saved"].tokens


def test_a_payload_that_is_deleted_there_explains_why_the_match_ends() -> None:
    code, document = exported_and_imported()["why"]
    assert code == 0
    why = document["explanation"]
    assert (why["cause"], why["chunk"], why["served_tokens"]) == ("ghost", 1, CHUNK)
