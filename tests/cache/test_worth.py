"""What is put, by what it costs and what it saves."""

import math
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fleet.costs import read_costs
from objkv.cache.worth import ALL_BELOW, REUSED_ABOVE, ChunkCost, PutRule, Puts
from objkv.config import load_config
from objkv.config.prices import LIST_PRICES

S3 = {"bulk_url": "s3://bucket/kv", "index_url": "sqlite:///dev/null/i"}
CHUNK_TOKENS = 256
PROMPT_TOKENS = 2048
COSTS = read_costs()
SHARES = st.floats(0, 2)


def rule(**settings: str) -> PutRule:
    return PutRule.of(load_config(S3 | settings, environ={}))


def chunk(model: str, puts: int = 1) -> ChunkCost:
    """A chunk of one of the simulation's models."""
    known = COSTS.models[model]
    gpu_s = known.gpus * known.prefill_s(0, PROMPT_TOKENS) * CHUNK_TOKENS / PROMPT_TOKENS
    return ChunkCost(puts, known.token_bytes * CHUNK_TOKENS, gpu_s)


def costing(share: float) -> ChunkCost:
    """A chunk that pays if this share of all is read again."""
    base = chunk("llama-3.1-8b")
    known = rule().break_even(base)
    assert known is not None
    assert base.gpu_s is not None
    return replace(base, gpu_s=base.gpu_s * known / share if share else math.inf)


@pytest.mark.parametrize(
    ("model", "puts", "share", "decided"),
    [
        ("llama-3.1-70b", 4, 0.46, "reused"),
        ("llama-3.1-70b", 1, 0.245, "all"),
        ("qwen3-32b", 1, 0.50, "reused"),
        ("llama-3.1-8b", 1, 1.36, "reused"),
    ],
)
def test_large_models_pay_at_s3_list_prices_with_one_put_a_chunk(
    model: str, puts: int, share: float, decided: Puts
) -> None:
    known, one = rule(), chunk(model, puts)
    found = known.decide(one)
    assert found.break_even == pytest.approx(share, abs=0.01)
    assert found.puts == decided
    at_limit = replace(one, gpu_s=known.gpu_s_for_all(one))
    assert known.break_even(at_limit) == pytest.approx(ALL_BELOW)


@pytest.mark.parametrize("model", COSTS.models)
def test_all_is_put_where_a_bucket_has_no_price(model: str) -> None:
    for settings in (
        {"s3_endpoint_url": "https://10.0.0.7:9000"},
        {"price_gb_month": "0", "price_puts": "0"},
        {"bulk_url": "file:///dev/null/kv"},
        {"s3_endpoint_url": "https://minio:9000", "agent_disk_url": "file:///disk"},
    ):
        found = rule(**settings).decide(replace(chunk(model), gpu_s=None))
        assert (found.puts, found.break_even) == ("all", 0.0)


def test_nothing_is_put_at_once_before_the_gpu_time_is_known_or_beside_a_disk() -> None:
    cheap = costing(0.01)
    assert rule().decide(cheap).puts == "all"
    assert rule().decide(replace(cheap, gpu_s=None), "all").puts == "reused"
    assert rule(agent_disk_url="file:///disk").decide(cheap, "all").puts == "reused"


@pytest.mark.parametrize("setting", ["all", "reused"])
def test_the_setting_decides_if_it_is_not_auto(setting: Puts) -> None:
    for share in (0.01, 100):
        assert rule(save_to_bucket=setting).decide(costing(share)).puts == setting


@given(shares=st.lists(SHARES, min_size=1), start=st.sampled_from(["all", "reused"]))
def test_between_the_limits_nothing_changes(
    shares: list[float], start: Literal["all", "reused"]
) -> None:
    now = start
    for share in shares:
        found = rule().decide(costing(share), now)
        assert found.break_even == pytest.approx(share)
        if ALL_BELOW <= share <= REUSED_ABOVE and abs(share - ALL_BELOW) > 1e-9:
            if abs(share - REUSED_ABOVE) > 1e-9:
                assert found.puts == now
        elif share < ALL_BELOW - 1e-9:
            assert found.puts == "all"
        elif share > REUSED_ABOVE + 1e-9:
            assert found.puts == "reused"
        now = found.puts


def test_longer_lives_and_cheaper_gpus_make_puts_pay_less() -> None:
    one = chunk("llama-3.1-70b")
    usual = rule().break_even(one)
    assert usual is not None
    for settings in ({"ttl_s": "1d"}, {"price_gpu_hour": "2"}, {"price_puts": "0.01"}):
        found = rule(**settings).break_even(one)
        assert found is not None
        assert found > usual
    assert rule(ttl_s="1h").break_even(one) == usual, "sweeps keep what is young"
    found = rule(ttl_s="1h", sweep_grace_s="1h").break_even(one)
    assert found is not None
    assert found < usual
    assert rule(price_gpu_hour="0").break_even(one) == math.inf
    assert rule(price_gpu_hour="0").decide(one).puts == "reused"


def test_express_charges_for_the_bytes_too() -> None:
    express = rule(bulk_url="s3://kv--usw2-az1--x-s3")
    one = ChunkCost(1, 1_000_000_000, 1.0)
    storage = 0.11 * 4.5 / 730
    assert express.cost_usd(one) == pytest.approx(0.00113e-3 + 0.0032 + storage, rel=1e-6)
    assert LIST_PRICES.put_gb == 0
