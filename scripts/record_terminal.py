"""Records a command in a real terminal as an animated picture (SVG) that needs no script to play.

    python scripts/record_terminal.py --out x.svg --size 100x30 --seconds 20 -- COMMAND...

The command runs in a pseudo terminal, an emulator draws it, and each state of its screen is a
frame. Pauses are cut to ``--idle`` seconds; what changes less than ``--least`` characters, as a
spinner does, is no change. Nothing is shown from a line that says ``--crop`` on.
``--keys 5:s,9:q`` presses keys at those seconds.
"""

import argparse
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from html import escape
from pathlib import Path

import pyte

_CELL = (8.4, 18.0)
"""Width and height of a character, in the units of the picture."""
_MARGIN = 14
_BAR = 26
_LAST_S = 8.0
"""How long the last frame stays."""
_FRAME_S = 0.1
_COLORS = {
    "default": "#d7dae0", "black": "#5c6370", "red": "#ff6b6b", "green": "#7fd88f",
    "brown": "#e5c07b", "blue": "#6cb6ff", "magenta": "#d2a8ff", "cyan": "#76d9e6",
    "white": "#f0f3f6", "brightblack": "#8b949e", "brightred": "#ff7b72",
    "brightgreen": "#7ee787", "brightbrown": "#f2cc60", "brightblue": "#79c0ff",
    "brightmagenta": "#d2a8ff", "brightcyan": "#a5f3fc", "brightwhite": "#ffffff",
}  # fmt: skip
_GROUND = "#161b22"

Cell = tuple[str, str, str, bool]
"""Character, colour, ground, whether bold."""
Line = tuple[Cell, ...]


@dataclass(frozen=True)
class Frame:
    """The screen from a moment on."""

    at_s: float
    lines: tuple[Line, ...]


def record(
    command: Sequence[str],
    size: tuple[int, int],
    *,
    seconds: float,
    keys: Mapping[float, bytes],
) -> list[Frame]:
    """What the screen showed; the command is ended after so many seconds."""
    columns, rows = size
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    primary, secondary = pty.openpty()
    ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environ = os.environ | {"TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
    environ = {name: value for name, value in environ.items() if value}
    process = subprocess.Popen(
        command, env=environ, stdin=secondary, stdout=secondary, stderr=secondary,
        start_new_session=True,
    )  # fmt: skip
    os.close(secondary)
    began, frames, waiting = time.monotonic(), [], dict(sorted(keys.items()))
    try:
        while (now := time.monotonic() - began) < seconds:
            for at_s in [at for at in waiting if at <= now]:
                os.write(primary, waiting.pop(at_s))
            ready, _, _ = select.select([primary], [], [], _FRAME_S)
            if ready:
                try:
                    content = os.read(primary, 1 << 16)
                except OSError:  # the command has ended
                    break
                stream.feed(content)
                lines = _lines(screen)
                if not frames or frames[-1].lines != lines:
                    frames.append(Frame(now, lines))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(primary)
    return frames


def _lines(screen: pyte.Screen) -> tuple[Line, ...]:
    found = []
    for row in range(screen.lines):
        cells = [screen.buffer[row][column] for column in range(screen.columns)]
        found.append(tuple((c.data, _color(c.fg), _ground(c), c.bold) for c in cells))
    return tuple(found)


def _color(name: str) -> str:
    if name in _COLORS:
        return _COLORS[name]
    return f"#{name}" if len(name) == 6 else _COLORS["default"]


def _ground(cell: "pyte.screens.Char") -> str:
    name = cell.fg if cell.reverse else cell.bg
    return "" if name == "default" and not cell.reverse else _color(name)


def changed(one: Frame, other: Frame) -> int:
    """How many characters differ."""
    pairs = zip(one.lines, other.lines, strict=True)
    return sum(a[0] != b[0] for old, new in pairs for a, b in zip(old, new, strict=True))


def calm(frames: Sequence[Frame], *, least: int) -> list[Frame]:
    """Without frames that differ by less than ``least`` characters from the one before: a spinner
    would keep every pause from being cut. The last one stays."""
    kept = list(frames[:1])
    for frame in frames[1:]:
        if frame is frames[-1] or changed(kept[-1], frame) >= least:
            kept.append(frame)
    return kept


def cropped(frames: Sequence[Frame], words: str) -> list[Frame]:
    """Blank from the line that says ``words`` on: what comes then is of this machine only."""
    shown = []
    for frame in frames:
        text = ["".join(cell[0] for cell in line) for line in frame.lines]
        end = next((row for row, line in enumerate(text) if words in line), len(text))
        blank = tuple((" ", _COLORS["default"], "", False) for _ in frame.lines[0])
        shown.append(Frame(frame.at_s, frame.lines[:end] + (blank,) * (len(text) - end)))
    return shown


def thinned(frames: Sequence[Frame], *, idle_s: float, apart_s: float) -> list[Frame]:
    """Frames at least ``apart_s`` apart (the last of those that are closer), pauses cut."""
    kept: list[Frame] = []
    for frame in frames:
        if kept and frame.at_s - kept[-1].at_s < apart_s and len(kept) > 1:
            kept[-1] = Frame(kept[-1].at_s, frame.lines)
        else:
            kept.append(frame)
    shown: list[Frame] = []
    cut = 0.0
    for number, frame in enumerate(kept):
        if number:
            pause = frame.at_s - kept[number - 1].at_s
            cut += max(0.0, pause - idle_s)
        shown.append(Frame(frame.at_s - cut, frame.lines))
    return shown


def picture(frames: Sequence[Frame], size: tuple[int, int], title: str) -> str:
    """The animated SVG. Who prefers no motion, or cannot show any, sees the last
    frame."""
    columns, rows = size
    width, height = columns * _CELL[0] + 2 * _MARGIN, rows * _CELL[1] + 2 * _MARGIN + _BAR
    total = frames[-1].at_s - frames[0].at_s + _LAST_S
    step = round(width) + 20
    known: dict[Line, str] = {}
    shots = []
    for number, frame in enumerate(frames):
        uses = []
        for row, line in enumerate(frame.lines):
            drawn = _text(line)
            if drawn:
                name = known.setdefault(line, f"l{len(known)}")
                uses.append(f'<use href="#{name}" y="{row * _CELL[1]:g}"/>')
        shots.append(f'<g transform="translate({number * step} 0)">{"".join(uses)}</g>')
    defs = "".join(f'<g id="{name}">{_text(line)}</g>' for line, name in known.items())
    stops = "".join(
        f"{100 * (frame.at_s - frames[0].at_s) / total:.3f}%"
        f"{{transform:translateX({-number * step}px)}}"
        for number, frame in enumerate(frames)
    )
    last = -(len(frames) - 1) * step
    style = (
        f"@keyframes play{{{stops}100%{{transform:translateX({last}px)}}}}"
        f".film{{transform:translateX({last}px);animation:play {total:.2f}s steps(1,end) infinite}}"
        "@media(prefers-reduced-motion:reduce)"
        "{.film{animation:none}}"
        "text{font:14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        "white-space:pre}.b{font-weight:700}"
    )
    dots = "".join(
        f'<circle cx="{20 + 18 * n}" cy="18" r="5.5" fill="{color}"/>'
        for n, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><style>{style}</style><defs>{defs}</defs>"
        f'<rect width="100%" height="100%" rx="10" fill="{_GROUND}"/>{dots}'
        f'<svg x="{_MARGIN}" y="{_MARGIN + _BAR}" width="{width - 2 * _MARGIN:g}" '
        f'height="{rows * _CELL[1]:g}"><g class="film">{"".join(shots)}</g></svg></svg>\n'
    )


def _text(line: Line) -> str:
    """One line; runs of one style are one element, placed by their column."""
    parts, column = [], 0
    while column < len(line):
        _, color, ground, bold = line[column]
        end = column
        while end < len(line) and line[end][1:] == (color, ground, bold):
            end += 1
        text = "".join(cell[0] for cell in line[column:end])
        x, length = column * _CELL[0], (end - column) * _CELL[0]
        if ground:
            parts.append(
                f'<rect x="{x:g}" width="{length:g}" height="{_CELL[1]:g}" fill="{ground}"/>'
            )
        if text.strip():
            kept = text.rstrip()
            length = len(kept) * _CELL[0]
            weight = ' class="b"' if bold else ""
            parts.append(
                f'<text x="{x:g}" y="13" textLength="{length:g}" fill="{color}"{weight}>'
                f"{escape(kept)}</text>"
            )
        column = end
    return "".join(parts)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", default="110x30")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--idle", type=float, default=1.5)
    parser.add_argument("--apart", type=float, default=0.25)
    parser.add_argument("--least", type=int, default=1)
    parser.add_argument("--crop", default="")
    parser.add_argument("--keys", default="")
    parser.add_argument("--title", default="a terminal")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    columns, rows = map(int, given.size.split("x"))
    keys = dict(pair.split(":") for pair in given.keys.split(",") if pair)
    frames = record(
        given.command,
        (columns, rows),
        seconds=given.seconds,
        keys={float(at_s): key.encode() for at_s, key in keys.items()},
    )
    if not frames:
        sys.exit("the command showed nothing")
    if given.crop:
        frames = cropped(frames, given.crop)
    shown = thinned(calm(frames, least=given.least), idle_s=given.idle, apart_s=given.apart)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(picture(shown, (columns, rows), given.title), encoding="utf-8")
    print(f"{given.out}: {len(shown)} frames, {given.out.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
