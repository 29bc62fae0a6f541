"""The fresh process of ``objkv bench lookup``: ``python -m objkv.cli.bench_fresh URL CHUNKS``."""

import sys

from objkv.assembly.backends import open_index
from objkv.ops.bench.lookup_fresh import ask_fresh
from objkv.ops.bench.servers import local_config
from objkv.telemetry import NullRecorder


def main() -> None:
    """Ask once, and print what it took."""
    url, chunks = sys.argv[1], int(sys.argv[2])
    index = open_index(local_config(index_url=f"{url}/0"), NullRecorder())
    print(ask_fresh(index, url, chunks).model_dump_json())
    index.close()


if __name__ == "__main__":
    main()
