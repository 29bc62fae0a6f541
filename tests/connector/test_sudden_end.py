"""vLLM kills the workers of a server that is told to end, unless it was started with patience."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from objkv.connector.model.identity import tell_of_sudden_end


@pytest.mark.parametrize(("seconds", "told"), [(0, True), (15, False)])
def test_says_what_to_set_where_saves_would_be_lost(
    seconds: int, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        tell_of_sudden_end(cast("Any", SimpleNamespace(shutdown_timeout=seconds)))
    assert ("--shutdown-timeout" in caplog.text) is told
