"""The edits that break guarantees still fit the code; ``python -m tests.guarantees`` tries them."""

from tests.guarantees import __main__ as guarantees


def findings() -> list[str]:
    """Each edit that fits no more, and each test that is gone."""
    return [f"tests/guarantees: {one}" for one in guarantees.stale(guarantees.guarantees())]
