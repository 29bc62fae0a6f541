"""What ``objkv verify``, ``sweep``, ``rebuild`` and ``ls`` say where they look at the wrong place,
or are interrupted before they have begun."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from objkv.assembly.backends import Backends, open_backends
from objkv.config import load_config
from objkv.index.shapes import SHAPES_HASH
from objkv.telemetry import NullRecorder
from objkv.testing.damage import DamagedStore, Defects, main
from tests.cli.conftest import Run
from tests.cli.upkeep_story import NAMESPACE

LONG = ("verify", "sweep", "rebuild")


@pytest.fixture
def ends(home: Path) -> Any:
    with open_backends(load_config({}), NullRecorder()) as opened:
        yield opened


@pytest.mark.parametrize("command", LONG)
def test_a_namespace_is_named_by_its_beginning(run: Run, ends: Backends, command: str) -> None:
    DamagedStore(ends).plant(Defects(good=4))
    options = ("--all",) if command == "verify" else ()
    ran = run(command, *options, "--json", "--namespace", NAMESPACE[:6])
    assert (ran.code, ran.document["complete"]) == (0, True)
    if command == "verify":
        assert ran.document["checked"] == 4
    absent = "0" if NAMESPACE[0] != "0" else "1"
    for name in (absent, absent * 32):
        assert run(command, *options, "--namespace", name).code == 2
    assert "no such namespace" in run(command, "--namespace", absent * 32).err


@pytest.mark.parametrize("options", [("--all",), ()])
def test_an_index_that_knows_little_is_no_fine_one(
    run: Run, ends: Backends, options: tuple[str, ...]
) -> None:
    DamagedStore(ends).plant(Defects(good=8))
    assert run("verify", *options).code == 0
    for record in list(ends.index.scan(NAMESPACE)):
        if record.prefix_hash != SHAPES_HASH:
            ends.admin.drop(NAMESPACE, record.prefix_hash)
    ran = run("verify", *options)
    assert (ran.code, "objkv rebuild" in ran.out) == (1, True)
    assert "8 more have no record" in ran.out
    assert run("rebuild").code == 0
    assert run("verify", *options).code == 0


@pytest.mark.parametrize("command", [("verify", "--all"), ("sweep",), ("rebuild",), ("ls",)])
def test_what_reads_makes_no_folder(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    index = ("--index-url", f"sqlite://{tmp_path}/index.sqlite")
    ran = run(*command, "--bulk-url", f"file://{tmp_path}/none/zz", *index)
    assert (ran.code, "no such folder" in ran.err) == (2, True), ran.out
    assert not (tmp_path / "none").exists()
    assert run(*command).code == 0
    assert not (tmp_path / "objkv" / "chunks").exists()


@pytest.mark.parametrize(
    ("command", "first"),
    [("verify", "_places"), ("sweep", "survey"), ("rebuild", "stored_namespaces")],
)
def test_an_interrupt_before_the_first_unit_shows_what_was_done(
    run: Run, ends: Backends, monkeypatch: pytest.MonkeyPatch, command: str, first: str
) -> None:
    DamagedStore(ends).plant(Defects(good=4))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"objkv.cli.{command}.{first}", interrupted)
    ran = run(command)
    assert ran.code == 130
    assert "not complete, interrupted" in ran.out


def test_the_script_that_plants_defects_says_what_each_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    for one in fields(Defects):
        assert f"--{one.name.replace('_', '-')} N {one.metadata['help']}" in told
