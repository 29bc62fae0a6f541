"""Makes both sides of the encoder cache from vLLM's configuration, settings and backends."""

from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform

from objkv.assembly.backends import Backends
from objkv.config import Config
from objkv.connector.encoder_fetch import EncoderFetcher, FetchLimits
from objkv.connector.encoder_identity import read_encoder_identity, read_form
from objkv.connector.encoder_read import OutputReader
from objkv.connector.encoder_saver import EncoderSaveLimits, EncoderSaver
from objkv.connector.encoder_scheduler import EncoderRoles, EncoderSchedulerSide
from objkv.connector.encoder_worker import EncoderWorkerSide
from objkv.connector.role import saves
from objkv.connector.sides import open_cache
from objkv.connector.translate import tell_of_sudden_end, tensor_rank
from objkv.telemetry import MemoryRecorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HELD_BYTES_MAX = 256 << 20
"""Of outputs held for requests that wait, and again of those waiting to be saved. Of 7 MiB, what a
model of 3,584 makes of a photo in 1,024 rows of bfloat16, it is 36."""
ITEM_BYTES_MAX = HELD_BYTES_MAX // 4
"""An output crosses to the workers in one message; see ``docs/decisions/0013-encoder-cache.md``."""


def open_encoder_scheduler(
    vllm_config: "VllmConfig",
    config: Config,
    backends: Backends,
    writer: str,
    recorder: MemoryRecorder,
) -> EncoderSchedulerSide:
    """Reads the model's files. Raises ``ConfigError`` for what is not supported."""
    transfer = vllm_config.ec_transfer_config
    assert transfer is not None
    form = read_form(vllm_config, item_bytes_max=ITEM_BYTES_MAX)
    identity = read_encoder_identity(vllm_config, config)
    saving = saves(config, producer=transfer.is_ec_producer, consumer=transfer.is_ec_consumer)
    if saving:
        tell_of_sudden_end(vllm_config)
    roles = EncoderRoles(
        loads=transfer.is_ec_consumer and config.admission != "never",
        saves=saving,
        steps_overlap=vllm_config.max_concurrent_batches > 1,
    )
    reader = OutputReader(open_cache(config, backends, writer, recorder), recorder)
    limits = FetchLimits(
        deadline_s=config.encoder_deadline_ms / 1000,
        queue_max=config.lookup_queue_max,
        held_bytes_max=HELD_BYTES_MAX,
        ttl_s=config.ttl_s,
    )
    fetcher = EncoderFetcher(reader, backends.index, limits, recorder)
    return EncoderSchedulerSide(
        roles, form, identity, fetcher, bulk=backends.bulk, recorder=recorder
    )


def open_encoder_worker(
    vllm_config: "VllmConfig",
    config: Config,
    backends: Backends,
    writer: str,
    recorder: MemoryRecorder,
) -> EncoderWorkerSide:
    """On the thread that runs the model. Raises ``ConfigError`` for what is not supported."""
    transfer = vllm_config.ec_transfer_config
    assert transfer is not None
    form = read_form(vllm_config, item_bytes_max=ITEM_BYTES_MAX)
    saver = None
    saving = saves(config, producer=transfer.is_ec_producer, consumer=transfer.is_ec_consumer)
    if saving and tensor_rank(vllm_config) == 0:
        limits = EncoderSaveLimits(
            queue_max=config.save_queue_max,
            held_bytes_max=HELD_BYTES_MAX,
            item_bytes_max=form.item_bytes_max,
            deadline_s=config.save_deadline_ms / 1000,
            # Outputs are small, and little of them can be compressed away.
            codec="none" if config.codec == "auto" else config.codec,
            writer=writer,
        )
        saver = EncoderSaver(open_cache(config, backends, writer, recorder), limits, recorder)
    return EncoderWorkerSide(
        _device(), form.dtype, saver, recorder, drain_s=config.drain_deadline_ms / 1000
    )


def _device() -> torch.device:
    """Where vLLM's encoder cache is: this worker's own device, not the first."""
    kind = current_platform.device_type
    if current_platform.is_cuda_alike():
        return torch.device(kind, torch.cuda.current_device())
    return torch.device(kind)
