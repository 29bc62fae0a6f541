"""What the examples give to vLLM, as vLLM itself reads it: no engine is started."""

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.examples.places import EXAMPLES, GIVEN, compose, container

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def parser(model: Path) -> Any:
    """The parser of vLLM's server, which is not at the same place in every version."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    places = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
    found = next(name for name in places if _is_there(name))
    return importlib.import_module(found).make_arg_parser(FlexibleArgumentParser())


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even what it is in
        return False


def test_the_server_takes_the_arguments_of_compose_and_kubernetes(parser: Any) -> None:
    for told in (
        compose(**GIVEN)["services"]["replica-1"]["command"],
        container("Deployment vllm")["args"],
    ):
        read = parser.parse_args(told)
        assert read.kv_transfer_config.kv_connector == "ObjKVConnector"
        assert read.enable_prompt_tokens_details
        assert read.shutdown_timeout == 30


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_connectors_of_prefill_and_decode_are_those_of_vllm(role: str, model: Path) -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from objkv.connector.plugin import register

    register()
    told = json.loads((EXAMPLES / "nixl" / f"{role}.json").read_text())
    outer = KVTransferConfig(**told)
    assert outer.kv_load_failure_policy == "recompute"
    assert outer.kv_role == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
    inner = [KVTransferConfig(**one) for one in told["kv_connector_extra_config"]["connectors"]]
    classes = [KVConnectorFactory.get_connector_class(one).__name__ for one in inner]
    # vLLM 0.32 made NixlConnector another name of NixlPullConnector.
    assert classes[0] in ("NixlConnector", "NixlPullConnector")
    assert classes[1:] == ["ObjKVConnector"]
    assert [one.kv_role for one in inner] == [outer.kv_role, "kv_both"]
    # vLLM keeps groups of layers apart only if all connectors can.
    multi: Any = KVConnectorFactory.get_connector_class(outer)
    assert multi.all_children_support_hma(outer)
