"""Records ``objkv top`` on two real replicas that share a Valkey and a bucket: docs/images/top.svg.

python scripts/record_top.py [--seconds 40]; takes a minute more than it records. It starts what
``objkv demo --fleet`` starts, asks both servers questions about a few documents again and again,
and films what the command shows.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a script finds the repository only from here on: E402

from objkv.ops.demo.fleet import (  # noqa: E402
    Fleet,
    Server,
    running_fleet,
)
from objkv.ops.demo.job import SCALES, VOCABULARY, Prompt  # noqa: E402
from objkv.ops.demo.replicas import Place, prepared  # noqa: E402
from objkv.ops.programs import ProgramFailed  # noqa: E402
from scripts.record_terminal import picture, record, thinned  # noqa: E402

SIZE = (148, 26)
DOCUMENTS = 6
PICTURE = ROOT / "docs" / "images" / "top.svg"
TITLE = "objkv top: two replicas share what they computed"


def ask_on(server: Server, seed: int, ended: Event) -> None:
    """Ask questions about documents, the first of them most often, until told to end."""
    drawn = random.Random(seed)  # noqa: S311  # the same questions every time
    length = SCALES["small"].documents[1]
    while not ended.is_set():
        document = min(drawn.randrange(DOCUMENTS), drawn.randrange(DOCUMENTS))
        tokens = random.Random(document).choices(range(3, VOCABULARY), k=length)  # noqa: S311  # not a secret
        question = drawn.choices(range(3, VOCABULARY), k=60)
        prompt = Prompt(name="question", tokens=(*tokens, *question), asked_before=False)
        try:
            server.ask(prompt)
        except ProgramFailed:
            return


def film(fleet: Fleet, seconds: float) -> str:
    """The picture."""
    os.environ.update(fleet.settings)
    ended = Event()
    servers = (fleet.first, fleet.second)
    askers = [
        Thread(target=ask_on, args=(server, seed, ended)) for seed, server in enumerate(servers)
    ]
    for asker in askers:
        asker.start()
    time.sleep(5)
    command = [str(Path(sys.executable).with_name("objkv")), "top", "--every", "2"]
    for server in servers:
        command += ["--endpoint", server.url]
    try:
        frames = record(command, SIZE, seconds=seconds, keys={seconds - 2: b"q"})
    finally:
        ended.set()
        for asker in askers:
            asker.join()
    # What is left when the command has ended is a terminal without it.
    shown = [frame for frame in frames if any(cell[0] != " " for cell in frame.lines[0])]
    return picture(thinned(shown, idle_s=2.5, apart_s=1.0), SIZE, TITLE)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        with prepared(place, ()), running_fleet("small", place, lambda *_: None) as fleet:
            svg = film(fleet, seconds)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(svg, encoding="utf-8")
    print(f"{PICTURE}: {len(svg) >> 10} KiB")


if __name__ == "__main__":
    main()
