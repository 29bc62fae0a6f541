"""Pictures of the documents: what was shown by a terminal is in its picture, and nothing in it can
act; lines of the dashboard are named as Grafana does."""

import importlib.util
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from scripts.draw_dashboard import named

ROOT = Path(__file__).parents[1]
SIZE = (40, 4)


@pytest.fixture(scope="module")
def recorder() -> Any:
    spec = importlib.util.spec_from_file_location(
        "record_terminal", ROOT / "scripts" / "record_terminal.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def shown(frame: Any) -> list[str]:
    return ["".join(cell[0] for cell in line).rstrip() for line in frame.lines]


def test_what_a_command_shows_is_recorded_with_its_colours(recorder: Any) -> None:
    command = ["/bin/sh", "-c", "printf '\\033[1;32mgreen\\033[0m <b>&'; read line; echo $line"]
    frames = recorder.record(command, SIZE, seconds=60, keys={0.5: b"typed\r"})
    assert shown(frames[0])[0] == "green <b>&"
    assert frames[0].lines[0][0] == ("g", "#7fd88f", "", True)
    assert "typed" in shown(frames[-1])[1]


def test_the_picture_is_valid_and_holds_every_frame(recorder: Any) -> None:
    blank = (" ", "#d7dae0", "", False)

    def line(text: str) -> Any:
        return tuple((char, "#d7dae0", "", False) for char in text.ljust(SIZE[0]))

    empty = (blank,) * SIZE[0]
    frames = [
        recorder.Frame(0.0, (line("one <script>"), empty, empty, empty)),
        recorder.Frame(1.0, (line("one <script>"), line("two"), empty, empty)),
    ]
    svg = recorder.picture(frames, SIZE, 'a "title"')
    root = ET.fromstring(svg)  # noqa: S314  # made here
    names = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert "script" not in names
    assert "".join(root.itertext()).count("one <script>") == 1, "equal lines are drawn once"
    uses = [element for element in root.iter() if element.tag.endswith("}use")]
    assert len(uses) == 3
    assert "prefers-reduced-motion" in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_pauses_are_cut_and_haste_is_thinned(recorder: Any) -> None:
    frames = [recorder.Frame(at_s, ((),)) for at_s in (0.0, 0.5, 0.55, 9.0)]
    kept = recorder.thinned(frames, idle_s=1.0, apart_s=0.2)
    assert [frame.at_s for frame in kept] == pytest.approx([0.0, 0.5, 1.5])


def test_a_spinner_is_no_change_but_the_end_always_stays(recorder: Any) -> None:
    def frame(at_s: float, text: str) -> Any:
        return recorder.Frame(at_s, (tuple((char, "", "", False) for char in text),))

    frames = [frame(0, "- wait"), frame(1, "/ wait"), frame(2, "x done"), frame(3, "y done")]
    assert recorder.calm(frames, least=3) == [frames[0], frames[2], frames[3]]
    assert recorder.calm(frames, least=1) == frames


def test_what_is_of_this_machine_only_is_left_out(recorder: Any) -> None:
    def line(text: str) -> Any:
        return tuple((char, "", "", False) for char in text)

    frame = recorder.Frame(0, (line("told"), line("here"), line("path")))
    [kept] = recorder.cropped([frame], "here")
    assert shown(kept) == ["told", "", ""]
    assert recorder.cropped([frame], "elsewhere") == [frame]


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "images").glob("*.svg")))
def test_recordings_in_the_docs_can_be_drawn(picture: Path) -> None:
    root = ET.fromstring(picture.read_text())  # noqa: S314  # of this repository
    assert root.tag.endswith("}svg")
    assert not [element for element in root.iter() if element.tag.endswith("}script")]


def test_labels_that_a_line_of_the_dashboard_lacks_are_left_out() -> None:
    labels = {"model": "llama", "tenant": "acme"}
    assert named("{{model}} {{tenant}}", labels) == "llama acme"
    assert named("{{model}} {{tenant}}", {"model": "llama"}) == "llama"
    assert named("{{ model }} {{tenant}}", {"tenant": "acme"}) == "acme"
    assert named("{{tenant}}", {}) == ""
    assert named("p99", labels) == "p99"
    assert named("{{model}}", {"model": "{{tenant}}", "tenant": "acme"}) == "{{tenant}}"
