"""All targets."""

from tests.fuzz import agents, payloads, records, settings, wires
from tests.fuzz.target import Target

TARGETS: tuple[Target, ...] = (
    *payloads.TARGETS,
    *records.TARGETS,
    *wires.TARGETS,
    *settings.TARGETS,
    *agents.TARGETS,
)
