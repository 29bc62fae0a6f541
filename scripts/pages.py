"""The files that are written from the code, in whole or in part: ``python -m scripts.pages`` writes
them all, and ``python -m scripts.checks pages`` finds those that are stale.

Of most pages only blocks are written, each between ``<!-- NAME -->`` and ``<!-- end of NAME -->``;
the words around them are the page's own.
"""

import os
import re
from pathlib import Path

os.environ.pop("XDG_CACHE_HOME", None)  # Defaults on the pages are those below ~.

from scripts import (
    write_api,
    write_cli,
    write_configuration,
    write_metrics,
    write_models,
    write_rights,
)

IN_PART = (write_api, write_cli, write_metrics, write_models, write_rights)
ENDS = re.compile(r"<!-- end of (.+) -->")


def filled(path: Path, blocks: dict[str, str]) -> str:
    """The text of a page with these blocks. Raises ``SystemExit`` if it has others."""
    text = path.read_text(encoding="utf-8")
    wrong = set(ENDS.findall(text)) ^ blocks.keys()
    for name in blocks:
        begins, ends = (text.split(f"<!-- {one} -->\n") for one in (name, f"end of {name}"))
        if (len(begins), len(ends)) != (2, 2) or len(begins[0]) > len(ends[0]):
            wrong.add(name)
    if wrong:
        names = ", ".join(sorted(wrong))
        raise SystemExit(f"{path}: mend the two comments around these blocks: {names}")
    for name, block in blocks.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{block.rstrip()}\n\n{end}{rest.partition(end)[2]}"
    return text


def files() -> dict[Path, str]:
    """Each file with the text that it should have."""
    whole = {
        write_rights.FILE: write_rights.text(),
        write_configuration.PAGE: write_configuration.page(),
        write_configuration.CHART_SCHEMA: write_configuration.chart_schema(),
    }
    return whole | {one.PAGE: filled(one.PAGE, one.blocks()) for one in IN_PART}


if __name__ == "__main__":
    for path, text in files().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
