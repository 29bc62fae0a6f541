"""Puts the page together: template, style, script and data in one file that asks nobody for more.

What others wrote, such as names, labels and texts, is hostile: it is escaped wherever it stands,
control characters are masked, and the page's policy lets nothing run but its own script.
"""

import base64
import hashlib
import json
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any, Final

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from objkv.ops.audit.html import figures, plots, tables
from objkv.ops.audit.html.remarks import KINDS, TO_MEND, is_of_now, name_of, remarks
from objkv.ops.audit.report import AuditReport, TreeNode

_ENDINGS: Final = {
    "complete": "Complete",
    "interrupted": "Interrupted",
    "deadline": "Out of time",
}
# What would end the element that the data stand in, or begin another one.
_UNSAFE: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028"}


def html_report(report: AuditReport) -> str:
    """The page, to be written as UTF-8; some 70 KiB, and up to 1 KiB more for each row and box.

    The same report makes the same page. Raises nothing for what a store may hold.
    """
    style, script = _resource("report.css"), _resource("report.js")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src '{_digest(style)}'",
            f"script-src '{_digest(script)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return (
        _environment()
        .get_template("template.html")
        .render(
            report=report,
            policy=policy,
            style=Markup(style),  # noqa: S704  # a file of this package
            script=Markup(script),  # noqa: S704  # a file of this package
            tree=_data(_tree(report)),
            endings=_ENDINGS,
            kinds=KINDS,
            to_mend=TO_MEND,
            name_of=name_of,
            remarks=remarks(report),
            is_of_now=is_of_now(report),
            plots=plots,
            tables=tables,
            **_filters(),
        )
    )


def _filters() -> dict[str, Any]:
    names = (
        "ago",
        "brief",
        "count",
        "dollars",
        "moment",
        "noun",
        "sentence",
        "share",
        "size",
        "with_commands",
    )
    return {name: getattr(figures, name) for name in names}


@cache
def _environment() -> Environment:
    return Environment(
        loader=FunctionLoader(_resource),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_masked,
    )


def _masked(value: Any) -> Any:
    """What the template shows of anything: texts without control characters."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return figures.printable(value)
    return value


@cache
def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _data(value: Any) -> Markup:
    """JSON that can stand in a script element, whatever its texts hold."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for char, escape in _UNSAFE.items():
        text = text.replace(char, escape)
    return Markup(text)  # noqa: S704  # nothing of it can be markup now


def _tree(report: AuditReport) -> dict[str, Any]:
    """What the script draws the tree from."""
    return {
        "made": report.made_s,
        "spaces": [
            {
                "name": one.namespace,
                "model": _text(one.model),
                "tenant": _text(one.tenant),
                "known": one.is_known,
            }
            for one in report.namespaces
        ],
        "nodes": list(_nodes(report.tree)),
    }


def _nodes(tree: Iterable[TreeNode]) -> Iterable[dict[str, Any]]:
    for node in tree:
        yield {
            "id": node.id,
            "parent": node.parent,
            "other": node.kind == "other",
            "space": node.namespace,
            "hash": node.hash,
            "start": node.token_start,
            "end": node.token_end,
            "depth": node.depth,
            "chunks": node.chunks,
            "bytes": node.nbytes,
            "hits": node.hits,
            "top": node.hits_max,
            "used": node.last_used_s,
            "new": node.newest_s,
            "leaves": node.leaves,
            "ways": node.children,
            "folded": node.folded,
            "label": _text(node.label),
            "text": _text(node.text),
        }


def _text(text: str | None) -> str | None:
    return None if text is None else figures.printable(text)
