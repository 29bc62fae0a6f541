"""What ``objkv.connector.bench.steps`` tells: plain values, as a JSON line."""

from pydantic import BaseModel, ConfigDict


class StepsAnswer(BaseModel):
    """Seconds of the scheduler's thread."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arrival_s: float
    """When a request arrives, the median over requests."""
    step_median_s: float
    step_p95_s: float
    """In one step, while the request's lookup is in flight."""
