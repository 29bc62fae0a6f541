"""Renders an audit as one HTML file that loads nothing else.

Names, labels and texts are hostile: they are escaped everywhere, control characters are masked,
and the page's content security policy allows only its own script.
"""

import base64
import hashlib
import json
from dataclasses import asdict
from functools import cache
from importlib import resources
from typing import Any, Final

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from objkv.ops import formats
from objkv.ops.audit.report import AuditReport, verdict
from objkv.ops.inventory.findings import FAULTS, MEANINGS

_BADGES: Final = {
    "corrupt": "Corrupt payloads", "faults": "Faults found", "fine": "No faults",
}  # fmt: skip
_FORMATS: Final = (
    "ago", "brief", "count", "dollars", "duration", "moment", "noun", "sentence", "share", "size",
    "with_commands",
)  # fmt: skip
# These would end the script element around the data or start another element.
_UNSAFE: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028"}


def html_report(report: AuditReport) -> str:
    """Return the page, to be encoded as UTF-8: about 70 KiB, plus up to 1 KiB per row and box. The
    same report renders the same page. Raises nothing, whatever a store contains."""
    style, script = _resource("report.css"), _resource("report.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
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
            verdict=verdict(report),
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_resource),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_masked,
    )
    environment.globals.update({name: getattr(formats, name) for name in _FORMATS})
    environment.globals.update(badges=_BADGES, meanings=MEANINGS, fault_kinds=FAULTS)
    return environment


def _masked(value: Any) -> Any:
    """Return texts without control characters, and markup and other values unchanged."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return formats.printable(value)
    return value


@cache
def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _data(value: Any) -> Markup:
    """Return JSON that is safe in a script element, whatever its texts contain."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for char, escape in _UNSAFE.items():
        text = text.replace(char, escape)
    return Markup(text)  # noqa: S704  # all markup characters are escaped


def _tree(report: AuditReport) -> dict[str, Any]:
    """Return the values from which the script draws the tree."""
    return {
        "made": report.made_s,
        "spaces": [
            {
                "name": one.namespace,
                "model": _masked(one.model),
                "tenant": _masked(one.tenant),
                "roots": one.roots,
                "chunks": one.chunks,
                "bytes": one.nbytes,
            }
            for one in report.namespaces
        ],
        "nodes": [asdict(one) for one in report.tree],
    }
