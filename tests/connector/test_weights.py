"""Models with equal weights are told apart by the configuration that lies beside them."""

from pathlib import Path

import pytest

from objkv.connector.weights import weights_digest


@pytest.mark.parametrize("name", ["config.json", "params.json"])
def test_another_configuration_makes_another_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "consolidated.safetensors").write_bytes(b"weights")
    digests = {weights_digest(tmp_path)}
    for theta in (10_000, 500_000):
        (tmp_path / name).write_text(f'{{"rope_theta": {theta}}}')
        digests.add(weights_digest(tmp_path))
    assert len(digests) == 3
