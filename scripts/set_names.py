"""Write the project's names and version into all files that have to spell them out.

    python scripts/set_names.py           write them
    python scripts/set_names.py --show    print name=value lines, which the release workflow reads

Names are in pyproject.toml, [project.urls] and [tool.objkv.release]; the version is in
objkv/__init__.py. Hosts of users' own servers, such as redis.example.com, are not names.
"""

import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("README.md", "Dockerfile", "mkdocs.yml", "docs", "examples", "terraform", "objkv")
SUFFIXES = ("", ".md", ".yaml", ".yml", ".toml", ".tf", ".sh", ".py", ".txt", ".tpl")
_IMAGE = r"(?<![\w./@:$~-])[\w-]+(?:\.[\w-]+)+(?::\d+)?(?:/[\w.-]+)*/"
_END = r"(?![\w./-])"
# Each finds its placeholder anywhere, and any other name where a file needs the right one. The
# address of the documents comes first, because it can begin with the repository's.
PATTERNS = {
    "documentation": r"https://example\.com/objkv/docs",
    "repository": r"https://example\.com/objkv(?!/docs)(?=\W|$)|(?<=git::)https://\S+(?=\.git//)"
    r"|(?:(?<=runbook_url: )|(?<=runbookUrl: ))https://\S+(?=/blob/HEAD/)"
    r"|(?<=image\.source=)https://\S+|(?<=^home: )https://\S+",
    "image": _IMAGE + "objkv" + _END,
    "replica_image": _IMAGE + "vllm-objkv" + _END,
    "charts": r"oci://registry\.example\.com/charts|oci://\S+(?=/objkv\b)",
}


def names(root: Path) -> dict[str, str]:
    """Every name. Raises ``SystemExit`` if an image's name would not be found again."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    urls, release = project["project"]["urls"], project["tool"]["objkv"]["release"]
    found = {"repository": urls["Repository"], "documentation": urls["Documentation"], **release}
    for image in ("image", "replica_image"):
        if not re.fullmatch(PATTERNS[image], found[image]):
            ending = PATTERNS[image].removeprefix(_IMAGE).removesuffix(_END)
            raise SystemExit(f"pyproject.toml: {image} must be HOST.NAME/.../{ending}")
    return found


def version(root: Path) -> str:
    """The version in the source."""
    found = re.search(r'^__version__ = "(.+)"$', (root / "objkv/__init__.py").read_text(), re.M)
    assert found is not None
    return found[1]


def rewritten(text: str, wanted: dict[str, str], number: str) -> str:
    """``text`` with the right names, and with the version in the tags of objkv's own image."""
    for name, pattern in PATTERNS.items():
        text = re.sub(pattern, wanted[name], text, flags=re.M)
    return re.sub(rf"(?<={re.escape(wanted['image'])}:)\d+\.\d+\.\d+\S*", number, text)


def files(root: Path) -> Iterator[Path]:
    """What may contain a name. Links lead to files that are listed anyway."""
    for place in PLACES:
        if (root / place).is_file():
            yield root / place
        for folder, inner, leaves in os.walk(root / place):
            inner[:] = [name for name in inner if not name.startswith((".", "__"))]
            paths = (Path(folder, leaf) for leaf in sorted(leaves))
            yield from (p for p in paths if p.suffix in SUFFIXES and not p.is_symlink())


def changes(root: Path) -> Iterator[tuple[Path, str]]:
    """Each file that needs other text, and that text."""
    wanted, number = names(root), version(root)
    for path in files(root):
        text = path.read_text()
        new = rewritten(text, wanted, number)
        if path.name == "Chart.yaml":  # Helm wants a semantic version: 0.2.0-dev0
            chart = re.sub(r"\.?((?:dev|rc|a|b)\d+)$", r"-\1", number)
            new = re.sub(r"^(appVersion: ).+$", rf"\g<1>{number}", new, flags=re.M)
            new = re.sub(r"^(version: ).+$", rf"\g<1>{chart}", new, flags=re.M)
        if new != text:
            yield path, new


if __name__ == "__main__":
    if sys.argv[1:] == ["--show"]:
        print("\n".join(f"{name}={value}" for name, value in names(ROOT).items()))
    else:
        for path, new in changes(ROOT):
            print(path.relative_to(ROOT))
            path.write_text(new)
