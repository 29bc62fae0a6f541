"""Which devices there is a lane for."""

import pytest
import torch

from objkv.errors import ConfigError
from objkv.transfer.lanes import HostLane, open_lane


def test_a_device_that_nothing_is_known_of_is_refused() -> None:
    """Otherwise each chunk of each prompt would fail by itself, for ever."""
    assert isinstance(open_lane(torch.device("cpu")), HostLane)
    with pytest.raises(ConfigError, match="xpu"):
        open_lane(torch.device("xpu"))
