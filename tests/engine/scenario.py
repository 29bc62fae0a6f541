"""What several tests of a file ask of replicas, run once: ``@scenario``."""

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from tests.support.agents import end_agents

P = ParamSpec("P")
Values = dict[str, Any]


def scenario(function: Callable[Concatenate[Path, P], Values]) -> Callable[P, Values]:
    """Call ``function`` with a fresh folder the first time that it is asked with some arguments.

    Each test that asks gets its values, or fails as the first one did. The folder stays if it
    raised: it has the logs.
    """
    known: dict[str, Values | Exception] = {}

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Values:
        name = json.dumps([args, kwargs])
        if name not in known:
            folder = Path(tempfile.mkdtemp(prefix=f"objkv-{function.__name__}-"))
            try:
                known[name] = function(folder, *args, **kwargs)
            except Exception as exc:
                exc.add_note(f"what the replicas left is in {folder}")
                known[name] = exc
            else:
                shutil.rmtree(folder, ignore_errors=True)  # one that was killed may yet write
            finally:
                end_agents(folder.name)
        found = known[name]
        if isinstance(found, Exception):
            raise found
        return found

    return call
