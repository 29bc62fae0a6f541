"""Replicas with an encoder cache but without an engine: both sides, asked in vLLM's order."""

import pickle
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch

from objkv.agent.client import AgentCalls, AgentConnection
from objkv.agent.payloads import PayloadReader, PayloadWriter
from objkv.codec.seal import Seal
from objkv.config import Config
from objkv.connector.encoder.fetch import EncoderFetcher
from objkv.connector.encoder.items import EncoderPlan, OutputForm
from objkv.connector.encoder.scheduler import EncoderSchedulerSide
from objkv.connector.encoder.worker import EncoderWorkerSide, OutputCopies
from objkv.connector.pacing import EmptySteps
from objkv.keys.encoder import EncoderIdentity
from objkv.stores.base import WriteStore
from objkv.telemetry import MemoryRecorder
from tests.agent.world import Node
from tests.contracts.clock import ManualClock
from tests.contracts.flaky import FlakyStore
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.index.flaky_index import FlakyIndex

EMBEDS, WIDTH = 4, 16
IDENTITY = EncoderIdentity("m", "w", 0, "default", "p", None, "bfloat16")
FORM = OutputForm(
    "BF16", lambda modality: WIDTH, item_bytes_max=1 << 20, media_named=True, tower_lora=False
)
ANSWERS_S = 120.0
_NONE = torch.empty(0)
ARENA_BYTES, _OUTBOX_BYTES = 4 << 20, 1 << 20


@dataclass(frozen=True)
class Limits:
    deadline_s: float = 60.0
    held_bytes_max: int = 1 << 20
    save_held_bytes_max: int = 1 << 20
    save_deadline_s: float = 60.0
    codec: str = "none"

    def config(self) -> Config:
        return Config(
            bulk_url="file:///nowhere",
            index_url="sqlite:///nowhere",
            encoder_deadline_ms=round(1000 * self.deadline_s),
            save_deadline_ms=round(1000 * self.save_deadline_s),
            drain_deadline_ms=round(1000 * ANSWERS_S),
        )


@dataclass
class Place:
    store: FlakyStore = field(default_factory=lambda: FlakyStore(MemoryStore()))
    index: FlakyIndex = field(default_factory=lambda: FlakyIndex(MemoryIndex()))

    def payloads(self) -> list[str]:
        names = (entry.key for entry in self.store.scan(""))
        return [name for name in names if name.endswith(".safetensors")]


def request(name: str, *identifiers: str, embeds: int = EMBEDS, **more: Any) -> Any:
    """vLLM's ``Request``, whose images follow each other."""
    plain: dict[str, Any] = {"request_id": name, "cache_salt": None, "resumable": False}
    plain |= {"lora_request": None, "get_num_encoder_embeds": lambda index: embeds}
    places = [SimpleNamespace(offset=2 + 8 * i, length=7) for i in range(len(identifiers))]
    features = [
        SimpleNamespace(identifier=one, mm_position=place, modality="image")
        for one, place in zip(identifiers, places, strict=True)
    ]
    return SimpleNamespace(**(plain | {"mm_features": features} | more))


def output_of(identifier: str, rows: int = EMBEDS, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(identifier.encode()))
    return torch.randn(rows, width, generator=generator).to(torch.bfloat16)


class Replica:
    """Both sides, vLLM's own encoder cache on the worker, and an agent on a node of its own."""

    def __init__(
        self,
        place: Place,
        *,
        limits: Limits | None = None,
        form: OutputForm = FORM,
        seal: Seal | None = None,
        device: str = "cpu",
        loads: bool = True,
        holds_back: bool = False,
    ) -> None:
        """``loads``: whether it has a language model. ``holds_back``: whether its agent does."""
        limits = limits or Limits()
        config = limits.config()
        self.copies = OutputCopies(torch.device(device))
        self.clock = ManualClock()
        self.recorder = MemoryRecorder()
        self.worker_recorder = MemoryRecorder()
        self.place = place
        self._node: dict[str, Any] = {
            "memory": ARENA_BYTES,
            "store": place.store,
            "index": place.index,
            "seal": seal,
            "codec": limits.codec,
            "holds_back": holds_back,
        }
        self.node = Node(**self._node).listen()
        connect = partial(self._connect, wants_arena=False)
        self.calls = AgentCalls(connect, clock=self.clock)
        reader = PayloadReader(self._connect, "outputs", clock=self.clock)
        self.fetcher = EncoderFetcher(
            self.calls,
            reader if loads else None,
            config,
            self.recorder,
            held_bytes_max=limits.held_bytes_max,
            clock=self.clock,
        )
        self.reader, self._loads, self._is_closed = reader, loads, False
        self.side = EncoderSchedulerSide(
            form,
            IDENTITY,
            self.fetcher,
            loads=loads,
            saves=True,
            steps=EmptySteps(1),
            bulk=cast("WriteStore", self.calls),
            admission="always",
            recorder=self.recorder,
        )
        self.worker = EncoderWorkerSide(
            self.copies,
            PayloadWriter(
                connect,
                _OUTBOX_BYTES,
                "outputs",
                writer="w",
                begin=self.copies.adopt_thread,
                clock=self.clock,
            ),
            config,
            self.worker_recorder,
            form.item_bytes_max,
            limits.save_held_bytes_max,
            clock=self.clock,
        )
        self.cache: dict[str, torch.Tensor] = {}
        self.encoded: list[str] = []

    def restart_node(self) -> None:
        """Another agent takes the place of the one that is running, which ends at once."""
        self.node.close()
        self.node = Node(**self._node).listen()

    def _connect(self, **more: Any) -> AgentConnection:
        return self.node.connect(**more)

    def wait(self, seen: Any, computed: int = 0) -> None:
        """Ask until the request is ready, as empty steps do."""
        while not self.side.is_ready(seen, computed):
            assert self.step() is None

    def see(self, seen: Any, computed: int = 0) -> list[str]:
        """One request's prefill, from arrival to the step that needs its images; what was
        encoded."""
        self.wait(seen, computed)
        before = len(self.encoded)
        self.step(seen)
        self.drain()
        return self.encoded[before:]

    def drain(self) -> None:
        assert self.worker.writer is not None
        assert self.worker.writer.drain(ANSWERS_S)
        assert self.node.saves.drain(ANSWERS_S)

    def dropped(self, *identifiers: str) -> None:
        """vLLM needs the place of these."""
        self.plan(1, freed=identifiers)
        for name in identifiers:
            del self.cache[name]

    def step(self, seen: Any = None, *, tokens: int | None = None) -> None:
        """A step with the images of ``seen``, those to encode first, as vLLM has it."""
        loads: list[int] = []
        encodes: list[int] = []
        for index, feature in enumerate(seen.mm_features if seen else ()):
            if feature.identifier in self.cache:
                continue
            (loads if self.side.has_item(feature.identifier) else encodes).append(index)
        for index in (*encodes, *loads):
            self.side.allocate(seen, index)
        plan = self.plan(tokens if tokens is not None else int(seen is not None))
        self.worker.load(plan, self.cache)
        for index in encodes:
            name = seen.mm_features[index].identifier
            self.encoded.append(name)
            self.cache[name] = output_of(name)
            self.worker.save(plan, self.cache, name)
        if not self._loads:  # nothing reads what vLLM takes for loaded
            self.cache |= {seen.mm_features[index].identifier: _NONE for index in loads}
        for feature in seen.mm_features if seen else ():
            assert feature.identifier in self.cache, "Encoder cache miss: the engine would be dead"

    def plan(self, tokens: int, freed: tuple[str, ...] = ()) -> EncoderPlan:
        """The step's plan as a worker in another process has it."""
        output: Any = SimpleNamespace(
            total_num_scheduled_tokens=tokens, free_encoder_mm_hashes=list(freed)
        )
        sent: list[pickle.PickleBuffer] = []
        message = pickle.dumps(self.side.plan_step(output), 5, buffer_callback=sent.append)
        plan: EncoderPlan = pickle.loads(message, buffers=[bytes(one.raw()) for one in sent])
        return plan

    def count(self, name: str) -> float:
        return self.recorder.value(name) + self.worker_recorder.value(name)

    @property
    def saved(self) -> int:
        return int(self.node.recorder.value("saves"))

    def close(self) -> None:
        """End both sides, then the agent. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            for one in (self.side, self.worker, self.calls, self.reader, self.node):
                one.close()


def replica(place: Place, **more: Any) -> AbstractContextManager[Replica]:
    return closing(Replica(place, **more))


def formed(**changes: Any) -> OutputForm:
    return replace(FORM, **changes)


def saved(place: Place, *identifiers: str, **more: Any) -> None:
    """Have a replica save these, and end."""
    with replica(place) as first:
        assert first.see(request("saver", *identifiers, **more)) == list(identifiers)
    assert len(place.payloads()) == len(set(identifiers))
