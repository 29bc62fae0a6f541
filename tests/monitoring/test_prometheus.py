"""A real Prometheus scrapes a real exporter, and answers what the dashboard asks of it."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from objkv.index.redis.index import RedisIndex
from objkv.stores.local import LocalStore
from tests.monitoring.prometheus import Prometheus, need_prometheus, prometheus, serving
from tests.monitoring.queries import dashboard_queries, selectors
from tests.monitoring.replica import pages_of_a_replica
from tests.ops.world import IDENTITY, NAMESPACE, save, save_identity
from tests.support.servers.redis import valkey_server, wait_until

ANSWERS_S = 180.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    need_prometheus()
    folder = tmp_path_factory.mktemp("watched")
    with valkey_server(folder / "valkey", args=("--maxmemory", "64mb")) as valkey:
        store = LocalStore(folder / "chunks")
        save_identity(store)
        index = RedisIndex(valkey.client())
        save(store, index)
        index.close()  # tells its totals
        settings = {
            "OBJKV_BULK_URL": f"file://{folder}/chunks",
            "OBJKV_INDEX_URL": f"{valkey.url}/0",
            "OBJKV_QUOTA_BYTES": str(1 << 30),
        }
        own = {name: value for name, value in os.environ.items() if not name.startswith("OBJKV_")}
        command = [sys.executable, "-m", "objkv.cli", "exporter", "--port", "0", "--every", "1"]
        exporter = subprocess.Popen(
            [*command, "--scan-every", "60"],
            env=own | settings | {"XDG_CACHE_HOME": str(folder)},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert exporter.stdout is not None
            line = exporter.stdout.readline()
            address = line.removeprefix("serving http://").removesuffix("/metrics\n")
            with serving(pages_of_a_replica()) as replica:
                targets = {"vllm": [replica], "objkv": [address]}
                with prometheus(folder / "prometheus", targets) as started:
                    wait_until(
                        lambda: all(started.scraped(job, 3) for job in targets),
                        "scrapes",
                        bound_s=ANSWERS_S,
                    )
                    wait_until(
                        lambda: bool(started.query("objkv_scan_payloads")),
                        "a scan",
                        bound_s=ANSWERS_S,
                    )
                    yield started
        finally:
            exporter.terminate()
            exporter.wait(60)


def test_both_are_scraped_without_a_complaint(server: Prometheus) -> None:
    assert sorted(server.targets()) == [("objkv", "up", ""), ("vllm", "up", "")]


def test_what_is_stored_arrives_with_whose_it_is(server: Prometheus) -> None:
    (found,) = server.query("objkv_stored_payloads")
    whose = {"namespace": NAMESPACE, "tenant": IDENTITY.tenant, "model": IDENTITY.model}
    assert whose.items() <= found["metric"].items()
    assert found["value"][1] == "3"


OF_OBJKV = [
    (name, query)
    for name, query in dashboard_queries()
    # vLLM's own metrics are on the pages of real servers, see tests/engine/test_servers_http.py.
    if all("objkv" in (metric or pattern or "") for metric, pattern, _ in selectors(query))
]


@pytest.mark.parametrize("query", [q for _, q in OF_OBJKV], ids=[name for name, _ in OF_OBJKV])
def test_every_panel_has_something_to_show(server: Prometheus, query: str) -> None:
    found = server.query(query)
    assert found
    assert not [one for one in found if one["value"][1] == "NaN"]


def states(server: Prometheus) -> dict[str, tuple[str, str]]:
    """Health and state of every alert."""
    (group,) = server.get("rules")["groups"]
    return {rule["name"]: (rule["health"], rule["state"]) for rule in group["rules"]}


def test_the_one_alert_that_does_not_wait_fires(server: Prometheus) -> None:
    def evaluated() -> bool:
        found = states(server)
        return all(health == "ok" for health, _ in found.values()) and "firing" in {
            state for _, state in found.values()
        }

    wait_until(evaluated, "the rules to be evaluated", bound_s=ANSWERS_S)
    firing = [name for name, (_, state) in states(server).items() if state == "firing"]
    assert firing == ["ObjkvCorruptPayloads"]  # the replica told of one
