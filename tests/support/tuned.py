"""objkv's command line in which constants have other values, for tests that cannot wait as long as
users can: ``python -m tests.support.tuned '{"objkv.agent.core.NAME": 1}' agent ...``. A function
that is named returns the value, or has the keywords that a mapping gives. Processes that it starts
have the usual ones."""

import json
import runpy
import sys
from functools import partial
from importlib import import_module
from unittest.mock import Mock

if __name__ == "__main__":
    for place, value in json.loads(sys.argv[1]).items():
        name, _, constant = place.rpartition(".")
        module = import_module(name)
        usual = getattr(module, constant)
        if isinstance(value, dict):
            value = partial(usual, **value)
        elif callable(usual):
            value = Mock(return_value=value)
        setattr(module, constant, value)
    del sys.argv[1]
    runpy.run_module("objkv", run_name="__main__", alter_sys=True)
