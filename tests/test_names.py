"""Files spell names and version as pyproject.toml does, and one script changes all of them."""

import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NEW = {
    "repository": "https://code.test/acme/objkv",
    "documentation": "https://code.test/acme/objkv/blob/main/docs",
    "image": "images.test/acme/objkv",
    "replica_image": "images.test:5000/acme/vllm-objkv",
    "charts": "oci://images.test/acme/charts",
}
OTHER = {name: re.sub(r"(code|images)\.test", r"\1.other.test", NEW[name]) for name in NEW}
ALERT = "annotations:\n  runbook_url: https://example.com/objkv/docs/operations/runbook.md#x\n"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts/set_names.py"))


def copy(script: dict[str, Any], root: Path) -> Path:
    for file in [*script["files"](ROOT), ROOT / "pyproject.toml"]:
        target = root / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    (root / "examples/monitoring/more.yml").write_text(ALERT)
    (root / "docs/chart.md").write_text("helm pull oci://registry.example.com/charts/objkv\n")
    return root


def rename(script: dict[str, Any], root: Path, new: dict[str, str]) -> None:
    """As an owner does it: edit pyproject.toml, then run the script."""
    project = root / "pyproject.toml"
    text = project.read_text()
    for name, old in script["names"](root).items():
        text = text.replace(f'"{old}"', f'"{new[name]}"')
    project.write_text(text)
    for path, changed in script["changes"](root):
        path.write_text(changed)


def test_no_file_has_a_name_that_differs_from_pyproject(script: dict[str, Any]) -> None:
    stray = [str(path.relative_to(ROOT)) for path, _ in script["changes"](ROOT)]
    assert not stray, f"run python scripts/set_names.py: {stray}"


def test_an_owner_changes_all_names_in_one_place(script: dict[str, Any], tmp_path: Path) -> None:
    root = copy(script, tmp_path)
    for new, old in (
        (NEW, r"//example\.com/objkv|registry\.example"),
        (OTHER, r"(code|images)\.test"),
    ):
        rename(script, root, new)
        assert not list(script["changes"](root))
        texts = {path.relative_to(root): path.read_text() for path in script["files"](root)}
        assert not [path for path, text in texts.items() if re.search(old, text)]
        assert f"git::{new['repository']}.git//" in texts[Path("terraform/aws/README.md")]
        values = texts[Path("examples/kubernetes/chart/values.yaml")]
        assert f"repository: {new['image']}\n" in values
        assert "rediss://my-redis.example.com:6379/0" in values
        assert (
            f"image: {new['replica_image']}:v" in texts[Path("examples/kubernetes/replicas.yaml")]
        )
        assert f"home: {new['repository']}\n" in texts[Path("examples/kubernetes/chart/Chart.yaml")]
        assert f"image.source={new['repository']}\n" in texts[Path("Dockerfile")]
        runbook = f"runbook_url: {new['documentation']}/operations/runbook.md#x"
        assert runbook in texts[Path("examples/monitoring/more.yml")]
        assert texts[Path("docs/chart.md")] == f"helm pull {new['charts']}/objkv\n"


def test_a_new_version_reaches_chart_and_image_tags(script: dict[str, Any], tmp_path: Path) -> None:
    root = copy(script, tmp_path)
    source = root / "objkv/__init__.py"
    source.write_text(re.sub(r'__version__ = ".+"', '__version__ = "9.8.7"', source.read_text()))
    for path, changed in script["changes"](root):
        path.write_text(changed)
    chart = (root / "examples/kubernetes/chart/Chart.yaml").read_text()
    assert "\nversion: 9.8.7\nappVersion: 9.8.7\n" in chart
    assert "/objkv:9.8.7\n" in (root / "examples/kubernetes/warm.yaml").read_text()


def test_an_image_that_would_not_be_found_again_is_refused(
    script: dict[str, Any], tmp_path: Path
) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(re.sub(r'(?m)^image = ".+"', 'image = "kv"', text))
    with pytest.raises(SystemExit, match="image must be"):
        script["names"](tmp_path)
