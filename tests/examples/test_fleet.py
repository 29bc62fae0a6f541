"""The Compose example as it would run, and on it what the other examples do to a fleet."""

import hashlib
import json
import re
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.engine.model import make_adapter
from tests.engine.scenario import Values, scenario
from tests.examples.fleet import Fleet, running
from tests.examples.places import EXAMPLES, ROOT, container

CHUNK = 256
pytestmark = pytest.mark.wide
STORED_MIN = 20
"""Payloads: fewer than what the examples save."""
TENANTS = ("acme", "zenith")
SHARED = re.compile(r"(\d+) of (\d+)")


def source() -> str:
    """A digest of what is run: a change of an example is a new run."""
    folders = ("compose", "kubernetes", "kubernetes/chart", "kubernetes/chart/templates")
    folders += ("lora-tenants", "match", "offline-batch", "two-replicas")
    files = [file for folder in folders for file in sorted((EXAMPLES / folder).iterdir())]
    files += [ROOT / "tests" / "examples" / name for name in ("fleet.py", "tiny.py")]
    run = [file.read_bytes() for file in files if file.suffix in (".py", ".yaml", ".txt")]
    return hashlib.sha256(b"".join(run)).hexdigest()[:16]


SOURCE = source()


def shares(out: str) -> list[tuple[int, int]]:
    """(tokens not computed, all tokens) of each line that tells them."""
    return [(int(a), int(b)) for a, b in SHARED.findall(out)]


def whole(tokens: int) -> int:
    return tokens // CHUNK * CHUNK


@scenario
def one_fleet(folder: Path, model: str, _source: str) -> Values:
    adapters = {name: make_adapter(folder / name, seed=seed) for seed, name in enumerate(TENANTS)}
    with running(folder / "fleet", Path(model), adapters) as fleet:
        values: Values = {"replicas": _run(fleet, "two-replicas/ask.py", *fleet.urls)}
        values["lora"] = _run(fleet, "lora-tenants/ask.py", *fleet.urls, "--adapters", *TENANTS)
        values["stored"] = json.loads(fleet.objkv("ls", "--json"))
        values["match"] = _match(fleet, model)
        values["warm"] = [_warm(fleet, folder) for _ in range(2)]
        values["exporter"] = _exported(fleet)
        values["sweep"] = _sweep(fleet)
        values["doctor"] = json.loads(fleet.objkv("doctor", "--json"))
    return values


def stored_payloads(page: str) -> int:
    found = re.findall(r"^objkv_stored_payloads\{.*\} (\d+)", page, re.MULTILINE)
    return sum(map(int, found))


def _exported(fleet: Fleet) -> str:
    """The exporter's page once it has read the totals that the last saves left, or its last one."""
    ends_s = time.monotonic() + 180
    while True:
        page = httpx.get(f"{fleet.exporter}/metrics", timeout=60).text
        if stored_payloads(page) > STORED_MIN or time.monotonic() > ends_s:
            return page
        time.sleep(0.5)


def _run(fleet: Fleet, script: str, *arguments: str) -> str:
    return fleet.run(sys.executable, str(EXAMPLES / script), *arguments)


def _match(fleet: Fleet, model: str) -> str:
    """The example's script, given a prompt of which a replica was asked the beginning."""
    from transformers import AutoTokenizer

    document = " ".join(f"Shelf {shelf} holds {shelf * 7 % 90} boxes." for shelf in range(300))
    tokens = AutoTokenizer.from_pretrained(model)(f"{document}\n\nAnother question?")["input_ids"]
    return _run(fleet, "match/match.py", *map(str, tokens))


def _warm(fleet: Fleet, folder: Path) -> dict[str, object]:
    """What the Job runs, twice: the second finds everything stored."""
    prompts = folder / "prompts.jsonl"
    texts = [file.read_text() for file in sorted((EXAMPLES / "offline-batch").glob("*.txt"))]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    told = container("Job objkv-warm")["args"]
    here = {"/prompts/prompts.jsonl": str(prompts), "http://vllm:8000": fleet.urls[0]}
    words = [here.get(word, word) for word in told]
    assert words != told
    out = fleet.objkv(*words, "--json", OBJKV_ROLE="reader")
    answer: dict[str, object] = json.loads(out)
    return answer


def _sweep(fleet: Fleet) -> dict[str, object]:
    """What the CronJob runs."""
    out = fleet.objkv(*container("CronJob objkv-sweep")["args"], OBJKV_ROLE="sweeper")
    answer: dict[str, object] = json.loads(out)
    return answer


def test_the_second_replica_loads_what_the_first_computed(model: Path) -> None:
    first, second = shares(one_fleet(str(model), SOURCE)["replicas"])
    assert first[0] == 0
    assert second[0] == whole(second[1]) > 1024


def test_adapters_share_with_themselves_and_salts_with_themselves(model: Path) -> None:
    out = one_fleet(str(model), SOURCE)["lora"]
    told = shares(out)
    assert len(told) == 2 * 2 * len(TENANTS)
    for first, second in zip(told[::2], told[1::2], strict=True):
        assert first[0] == 0
        assert second[0] == whole(second[1]) > 1024


def test_everything_is_in_one_namespace_of_the_bucket(model: Path) -> None:
    stored = one_fleet(str(model), SOURCE)["stored"]
    (namespace,) = stored["namespaces"]
    # Each tenant's adapter, each tenant's salt, and the document, which share no chunk.
    assert namespace["chunks"] > 2 * len(TENANTS) * 1024 // CHUNK


def test_a_router_finds_out_from_python(model: Path) -> None:
    ((found, asked),) = shares(one_fleet(str(model), SOURCE)["match"])
    assert 1024 < found <= whole(asked)


def test_the_job_warms_and_then_has_nothing_left_to_do(model: Path) -> None:
    first, second = one_fleet(str(model), SOURCE)["warm"]
    assert (first["prompts"], first["warmed"], first["failed"]) == (2, 2, 0)
    assert first["saved_chunks"] > 0
    assert (second["stored_before"], second["warmed"], second["asked_tokens"]) == (2, 0, 0)


def test_the_exporter_tells_what_is_stored(model: Path) -> None:
    page = one_fleet(str(model), SOURCE)["exporter"]
    assert re.search(r'^objkv_up\{end="bulk"\} 1', page, re.MULTILINE)
    assert re.search(r'^objkv_up\{end="index"\} 1', page, re.MULTILINE)
    assert stored_payloads(page) > STORED_MIN


def test_the_sweep_of_the_night_removes_nothing_that_is_in_use(model: Path) -> None:
    sweep = one_fleet(str(model), SOURCE)["sweep"]
    assert (sweep["applied"], sweep["complete"], sweep["removed"]) == (True, True, 0)


def test_the_doctor_finds_nothing_wrong(model: Path) -> None:
    doctor = one_fleet(str(model), SOURCE)["doctor"]
    assert doctor["verdict"] == "ok"
