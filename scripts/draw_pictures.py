"""Draws the pictures in ``docs/pictures``: ``python scripts/draw_pictures.py``.

Each picture is one SVG that follows the reader's light or dark preference. The site embeds it in
the page, where ``docs/theme/site.css`` colours the same classes by the palette in use.
"""

from collections.abc import Callable
from pathlib import Path

from picture import Picture

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"


def overview() -> Picture:
    """Replicas, bucket and index."""
    p = Picture(
        960,
        430,
        "Replicas of vLLM save the KV of a prefix once to a bucket and an index, and all load it",
    )
    for number, (name, line) in enumerate(
        [("replica A", "computes the prefix"), ("replica B", "loads it"), ("replica C", "loads it")]
    ):
        y = 52 + number * 104
        p.box((24, y), (250, 84), "engine", [name, "vLLM + ObjKVConnector", line])
    p.text((149, 34), "a fleet of vLLM replicas", "quiet", 14, anchor="middle")
    p.text((800, 34), "what they share", "quiet", 14, anchor="middle")
    p.box(
        (650, 52),
        (286, 100),
        "hot",
        ["Redis or Valkey", "index: which chunks are stored", "hot: small, popular payloads"],
    )
    p.box(
        (650, 224),
        (286, 116),
        "bulk",
        [
            "S3-compatible bucket",
            "every chunk, written once,",
            "checksummed, self-describing:",
            "the source of truth",
        ],
    )
    p.arrow([(274, 80), (642, 80)], "hot")
    p.text((458, 70), "2  publish: “this prefix is stored”", "", 14, anchor="middle")
    p.arrow([(274, 112), (530, 112), (530, 250), (642, 250)], "bulk")
    p.text((290, 104), "1  save chunks of KV", "", 14)
    p.arrow([(650, 128), (570, 128), (570, 186), (282, 186)], "hot")
    p.text((290, 176), "3  look up the stored chunks", "", 14)
    p.arrow([(650, 290), (350, 290), (350, 212), (282, 212)], "bulk")
    p.arrow([(350, 290), (282, 290)], "bulk")
    p.text((458, 310), "4  load, verify every byte", "", 14, anchor="middle")
    p.text((458, 332), "on any fault, the model computes", "quiet", 13.5, anchor="middle")
    p.area((24, 374), (912, 40), "soft")
    p.text((44, 399), "objkv", "mono", 15, weight="600")
    p.text(
        (112, 399),
        "doctor · ls · audit · verify · sweep · rebuild · warm · top · exporter: "
        "inspect, check, maintain",
        "quiet",
        14,
    )
    return p


def lookup() -> Picture:
    """From a prompt to a plan."""
    p = Picture(
        960,
        372,
        "A prompt is cut into chunks, hashed, looked up in one round trip, and admitted or not",
    )
    p.text((24, 30), "1  the prompt, cut into chunks of 256 tokens", "", 15, weight="600")
    kinds = ["hot", "hot", "bulk", "bulk", "bulk", "soft"]
    for number, kind in enumerate(kinds):
        x = 24 + number * 130
        tail = number == 5
        p.area((x, 44), (90 if tail else 124, 40), kind, 5)
        name = "tail" if tail else f"{number * 256}–{(number + 1) * 256}"
        p.text((x + (45 if tail else 62), 69), name, "mono", 13.5, anchor="middle")
        if not tail:
            p.arrow([(x + 62, 88), (x + 62, 116)])
            p.text((x + 62, 136), f"h{number + 1}", "mono", 14, anchor="middle")
            if number:
                p.arrow([(x - 50, 131), (x + 44, 131)], dashed=True)
    p.text((700, 136), "2  each hash extends the last,", "", 14)
    p.text((722, 155), "so it names a whole prefix", "quiet", 13.5)
    p.arrow([(349, 150), (349, 186)], "hot")
    p.box((164, 190), (370, 56), "hot", ["index", "one round trip for the whole prompt"])
    p.text((560, 212), "3  stored: 1 to 4; the fifth is not.", "", 14)
    p.text((582, 231), "The match ends at token 1,024.", "quiet", 13.5)
    p.arrow([(349, 246), (349, 280)], "engine")
    p.box(
        (164, 284),
        (370, 62),
        "engine",
        ["admission", "does loading beat computing?"],
    )
    p.text((560, 308), "4  yes: a plan with names and numbers only.", "", 14)
    p.text((582, 327), "No: the model computes, and a counter counts it.", "quiet", 13.5)
    return p


def load() -> Picture:
    """The path of the bytes into the paged cache."""
    p = Picture(
        960, 330, "A payload goes from the socket into pinned memory, is verified, and copied"
    )
    p.box((24, 92), (150, 74), "hot", ["hot", "Redis, ≤ 1 MiB"])
    p.box((24, 196), (150, 74), "bulk", ["bulk", "S3 or a directory"])
    p.box(
        (286, 118),
        (190, 126),
        "soft",
        ["slab", "pinned memory, leased", "by one transfer", "no copy before it"],
    )
    p.arrow([(174, 129), (278, 160)], "hot")
    p.arrow([(174, 233), (278, 202)], "bulk")
    p.text((230, 120), "get", "mono", 14, anchor="middle")
    p.box(
        (556, 118),
        (170, 126),
        "soft",
        ["verify", "header, signature,", "then each layer", "as it arrives"],
    )
    p.arrow([(476, 181), (548, 181)])
    p.box((806, 118), (130, 126), "engine", ["paged KV", "blocks that", "vLLM allocated"])
    p.arrow([(726, 181), (798, 181)], "engine")
    p.text((762, 170), "lane", "mono", 14, anchor="middle")
    p.text((24, 36), "Layer by layer, while the rest is in transit", "", 16, weight="600")
    p.text((24, 60), "A block is loaded when its last byte is verified.", "quiet", 14)
    p.arrow([(641, 244), (641, 292), (806, 292)], "warn", dashed=True)
    p.text((816, 297), "computed instead", "", 14)
    p.text((630, 297), "wrong, late or missing: a miss", "quiet", 14, anchor="end")
    return p


def save() -> Picture:
    """The order of the writes."""
    p = Picture(
        960, 400, "A save takes a lease, puts the payload, then a hot copy, and publishes last"
    )
    for x, kind, name in [
        (24, "engine", "worker"),
        (390, "bulk", "bulk store"),
        (580, "hot", "hot store"),
        (770, "hot", "index"),
    ]:
        p.box((x, 20), (166, 48), kind, [name])
        p.arrow([(x + 83, 68), (x + 83, 284)], dashed=True)
    steps = [
        (853, "hot", "1  lease: one replica saves a new chunk"),
        (473, "bulk", "2  put_if_absent: the payload, once"),
        (663, "hot", "3  a copy, if it is small enough"),
        (853, "hot", "4  publish the record: always last"),
    ]
    for number, (x, kind, text) in enumerate(steps):
        y = 112 + number * 52
        p.arrow([(107, y), (x, y)], kind)
        p.text((120, y - 9), text, "", 14)
    p.text(
        (120, 316),
        "Killed between two arrows: at most an orphan, which the next save publishes.",
        "quiet",
        14,
    )
    p.text((120, 338), "A record never points to a payload that cannot be read.", "quiet", 14)
    p.text(
        (120, 366),
        "No free slab, a full queue or a deadline: the save is dropped, and no request waits.",
        "quiet",
        14,
    )
    return p


def sweep() -> Picture:
    """The states of stored data and the order of deletion."""
    p = Picture(
        960,
        400,
        "Index and bucket compared: chunks, ghosts, orphans, strangers and corrupt payloads",
    )
    for x, text in [
        (104, "in the index"),
        (294, "in the bucket"),
        (410, "name"),
        (512, "result"),
    ]:
        p.text((x, 34), text, "quiet", 14, anchor="middle" if x < 400 else "start")
    rows = [
        (True, "bulk", "chunk", "loaded until it expires"),
        (True, None, "ghost", "the record is forgotten"),
        (False, "bulk", "orphan", "published by the next save, or deleted when old"),
        (False, "soft", "stranger", "no identity document: deleted on request only"),
        (True, "warn", "corrupt", "rejected by every reader; quarantined by verify"),
    ]
    for number, (indexed, stored, name, what) in enumerate(rows):
        y = 52 + number * 54
        if indexed:
            p.box((24, y), (160, 40), "hot", ["record"])
        else:
            p.area((24, y), (160, 40), "arrow dashed")
        if stored is None:
            p.area((214, y), (160, 40), "arrow dashed")
        elif stored == "warn":
            p.box((214, y), (160, 40), "arrow warn", ["damaged"])
        else:
            p.box((214, y), (160, 40), stored, ["payload"])
        p.text((410, y + 26), name, "", 16, weight="600")
        p.text((512, y + 26), what, "quiet", 14)
    p.area((24, 334), (912, 50), "soft")
    p.text((44, 365), "Deletion:", "", 15, weight="600")
    p.text(
        (140, 365),
        "1 check again under the lease · 2 forget the record · 3 delete the payload",
        "quiet",
        14,
    )
    return p


def icon() -> Picture:
    """The site's icon."""
    p = Picture(64, 64, "objkv")
    for number, kind in enumerate(["hot", "engine", "bulk"]):
        p.area((8, 8 + number * 17), (48, 13), kind, 4)
    return p


def agent() -> Picture:
    """Who talks to whom on a node with an agent."""
    p = Picture(
        960, 330, "Workers lease payloads in the memory of their node's agent, which has the stores"
    )
    p.area((14, 14), (690, 302), "soft")
    p.text((30, 38), "one node", "quiet", 14)
    p.box((34, 56), (180, 66), "engine", ["scheduler", "lookups"])
    p.box((34, 140), (180, 66), "engine", ["worker", "copies, read-only"])
    p.box((34, 224), (180, 66), "engine", ["worker", "of another engine"])
    p.box((400, 56), (280, 66), "soft", ["objkv agent", "fetches, verifies, saves"])
    p.box((400, 160), (280, 130), "hot", ["arena", "verified payloads,", "under leases"])
    p.arrow([(214, 89), (392, 89)], "engine")
    p.text((303, 78), "Unix socket", "mono", 13, anchor="middle")
    p.arrow([(400, 190), (222, 175)], "hot")
    p.arrow([(400, 240), (222, 255)], "hot")
    p.arrow([(540, 122), (540, 152)])
    p.box((776, 56), (160, 66), "hot", ["index", "Redis"])
    p.box((776, 192), (160, 66), "bulk", ["bulk", "S3 or a directory"])
    p.arrow([(680, 89), (768, 89)], "hot")
    p.arrow([(776, 225), (688, 225)], "bulk")
    p.text((732, 214), "once", "mono", 13, anchor="middle")
    return p


PICTURES: dict[str, Callable[[], Picture]] = {
    "overview": overview,
    "lookup": lookup,
    "load": load,
    "save": save,
    "agent": agent,
    "sweep": sweep,
    "icon": icon,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())
