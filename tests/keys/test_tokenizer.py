from pathlib import Path

import pytest

from objkv.errors import ConfigError
from objkv.keys.tokenizer import Tokenizers


@pytest.mark.parametrize("model", ["..", "a/../..", "/", ".", "", "a\0b", "\ud800"])
def test_no_name_of_a_model_leads_out_of_the_folder(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(ConfigError, match="is not a folder below"):
        Tokenizers(folder).place_of(model)
