"""The text of the audit's HTML page: its contents, and what it must never contain."""

import json
import re
from dataclasses import replace
from html import unescape

import pytest

from objkv.ops.audit.html.page import html_report
from objkv.ops.formats import (
    age,
    brief,
    dollars,
    noun,
    printable,
    sentence,
    share,
    size,
    span,
    with_commands,
)
from tests.support.audit import sample_report

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u202e\u2028\x07'\"&"


def data_of(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="tree-data">(.*?)</script>', page, re.S)
    assert found is not None
    document = json.loads(found[1])
    assert isinstance(document, dict)
    return document


def test_the_page_asks_for_nothing_outside_itself() -> None:
    page = html_report(sample_report())
    policy = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    assert unescape(policy[0]).startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy[0]
    outside = re.findall(r"""(?:src|href|action|url)\s*[=(]\s*["']?([^"'\s)>]+)""", page)
    assert {one for one in outside if not one.startswith(("#", "data:"))} == set()
    assert "@import" not in page
    assert " style=" not in page
    assert re.findall(r"\son[a-z]+=", page.split("<main")[1].split("<script")[0]) == []


def test_whatever_others_wrote_is_text() -> None:
    report = sample_report()
    space = replace(report.namespaces[0], model=HOSTILE, tenant=HOSTILE, kv_dtype=HOSTILE)
    page = html_report(
        replace(
            report,
            bulk_url=HOSTILE,
            index_url=HOSTILE,
            problems=(HOSTILE,),
            namespaces=(replace(space, problem=HOSTILE, is_known=False), *report.namespaces[1:]),
            tenants=(replace(report.tenants[0], tenant=HOSTILE),),
            pins=(replace(report.pins[0], by=HOSTILE),),
        )
    )
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert "<img" not in page
    for char in ("\u202e", "\u2028", "\x07"):
        assert char not in page
    spaces = data_of(page)["spaces"]
    assert isinstance(spaces, list)
    assert spaces[0]["model"].startswith("</script><script>alert(1)")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (size(None), "–"),
        (size(1536), "1.5 KiB"),
        (size(3 << 60), "3072 PiB"),
        (brief(999), "999"),
        (brief(12_345), "12.3 k"),
        (brief(None), "–"),
        (share(1, 0), "–"),
        (share(1, 1000), "< 1 %"),
        (share(999, 1000), "> 99 %"),
        (dollars(None), "–"),
        (dollars(0.0), "$0"),
        (dollars(0.0099), "<$0.01"),
        (dollars(1234.5), "$1,234.50"),
        (noun(1, "prefix", "prefixes"), "prefix"),
        (noun(2, "prefix", "prefixes"), "prefixes"),
        (span(-5), "0 s"),
        (span(90_000), "1 d"),
        (age(None), "–"),
        (age(99_000, 100_000), "16 min"),
        (printable("a\x00b"), "a\N{REPLACEMENT CHARACTER}b"),
        (sentence("too old: objkv sweep"), "Too old: objkv sweep."),
        (sentence("objkv sweep does"), "objkv sweep does."),
        (
            with_commands("<b> objkv sweep --apply, now"),
            "&lt;b&gt; <code>objkv sweep --apply</code>, now",
        ),
    ],
)
def test_figures_read_well(shown: str, expected: str) -> None:
    assert shown == expected
