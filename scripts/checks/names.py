"""Files spell the project's names and its version as ``pyproject.toml`` and the package do, and
name the same versions of vLLM."""

import re
from collections.abc import Iterator

from objkv.ops.doctor.settings import VERSION_END, VERSION_MIN
from scripts.checks import ROOT, name_of
from scripts.set_names import changes


def findings() -> Iterator[str]:
    """Each file to write again."""
    for path, _ in changes(ROOT):
        yield f"{name_of(path)}:1: differs from pyproject.toml: run python scripts/set_names.py"
    (major, least), (_, end) = VERSION_MIN, VERSION_END
    window = f"vllm>={major}.{least},<{major}.{end}"
    if f'"{window}"' not in (ROOT / "pyproject.toml").read_text():
        yield f"pyproject.toml:1: the extra vllm is not {window}, which objkv doctor accepts"
    page = (ROOT / "docs" / "operations" / "upgrade.md").read_text()
    told = re.findall(r"^\| (\d+\.\d+) \| yes \|", page, re.MULTILINE)
    if told != [f"{major}.{minor}" for minor in range(least, end)]:
        yield f"docs/operations/upgrade.md:1: vLLM {', '.join(told)} instead of {window}"
