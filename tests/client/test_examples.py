"""The programs for users of the client run, on made-up stores."""

import re
import runpy
import sys
from array import array
from pathlib import Path

import matplotlib as mpl
import pytest

import objkv
from tests.contracts.sample import SamplePrompt, save_sample
from tests.examples.places import EXAMPLES, ROOT

FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
TOKENS = list(range(1_000, 2_000))


def configured(monkeypatch: pytest.MonkeyPatch, urls: dict[str, str]) -> None:
    for name, value in urls.items():
        monkeypatch.setenv(f"OBJKV_{name.upper()}", value)


def test_a_sample_is_like_stores_of_replicas(urls: dict[str, str]) -> None:
    prompts = [
        SamplePrompt(array("I", TOKENS), hits=2, age_s=86_400),
        SamplePrompt(TOKENS, cache_salt="a", tenant="other"),
    ]
    assert save_sample(prompts, **urls) == 6
    assert save_sample(prompts[:1], **urls) == 0
    with objkv.open(**urls) as client:
        report = client.audit()
        assert [one.count for one in report.findings.counts if one.count] == []
        assert (report.totals.chunks, report.totals.tenants, report.totals.hits) == (6, 2, 12)
        assert client.match(TOKENS, namespace="other/sample", cache_salt="a").chunks == 3
        assert client.match(TOKENS, namespace="other/sample").end == "missing"


def test_the_page_for_routers_runs(
    urls: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OBJKV_AGENT_TOKEN", "s" * 16)
    page = (ROOT / "docs" / "routers.md").read_text()
    fences = [fence for fence in FENCED.findall(page) if fence.startswith("```python\n")]
    blocks = [fence[len("```python\n") : -3] for fence in fences if "from vllm" not in fence]
    sample = blocks.pop().replace("/tmp/sample", str(tmp_path))  # noqa: S108  # the page's own
    exec(sample)  # noqa: S102  # the page's code is what is tested
    given = {"s3://bucket/prefix": urls["bulk_url"]}
    given["rediss://redis.example.com:6379/0"] = urls["index_url"]
    program = "\n".join(blocks)
    for there, here in given.items():
        assert there in program
        program = program.replace(there, here)
    names: dict[str, object] = {"token_ids": TOKENS}
    exec(program, names)  # noqa: S102  # the page's code is what is tested
    assert capsys.readouterr().out.startswith("768 tokens are stored, 0 of them in the hot store")
    prefetch, choose = names["prefetch"], names["choose"]
    assert callable(prefetch)
    assert prefetch("127.0.0.1", "a", TOKENS, 100) == 0, "there is no agent"
    assert callable(choose)
    assert choose(TOKENS, {"a": 0, "b": 256}, {"a": 0.0, "b": 0.0}) == "b"
    assert choose(TOKENS, {"a": 0, "b": 256}, {"a": 0.0, "b": 900.0}) == "a"


def test_the_match_example_prints_each_namespace(
    urls: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configured(monkeypatch, urls)
    monkeypatch.setattr(sys, "argv", ["match.py", *map(str, TOKENS)])
    runpy.run_path(str(EXAMPLES / "match" / "match.py"), run_name="__main__")
    assert capsys.readouterr().out == "nothing is stored yet\n"
    save_sample([SamplePrompt(TOKENS)], **urls)
    runpy.run_path(str(EXAMPLES / "match" / "match.py"), run_name="__main__")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("acme/sample ")
    assert first.endswith(": 768 of 1000 tokens")
    assert "its last 232 do not fill a chunk" in second


@pytest.mark.slow
def test_the_notebook_audits_a_sample_or_what_is_stored(
    urls: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    configured(monkeypatch, urls)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    mpl.use("Agg")
    runpy.run_path(str(EXAMPLES / "notebook.py"))
    out = capsys.readouterr().out
    assert "here is a sample" in out
    assert "acme/sample-70b research" in out
    picture = tmp_path / "objkv-audit.png"
    assert picture.stat().st_size > 10_000
    picture.unlink()
    save_sample([SamplePrompt(TOKENS, model="acme/own")], **urls)
    runpy.run_path(str(EXAMPLES / "notebook.py"))
    out = capsys.readouterr().out
    assert "acme/own default" in out
    assert "sample" not in out
    assert picture.exists()
