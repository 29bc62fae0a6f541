"""What ``objkv.connector.bench.gpu`` tells: plain values, as a JSON line."""

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict


class GpuAnswer(BaseModel):
    """Seconds by side, one per round."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    nbytes: int
    """That each side moved in a round."""
    seconds: Mapping[str, Sequence[float]]
    """``to_device`` and ``to_host``, the limits; ``load``, ``gather``, ``compute``, and ``both``:
    load and compute at once."""
