"""A data set read by the real `datasets` library, from a local folder."""

import json

import pytest

from tlt_jax.config import ConfigError
from tlt_jax.config.data_sections import SourceConfig
from tlt_jax.data.sources import read_documents

pytestmark = pytest.mark.hub


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for split, texts in {"train": ["one", "two"], "validation": ["three"]}.items():
        lines = [json.dumps({"body": text, "other": 1}) for text in texts]
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / f"{split}.jsonl").write_text("\n".join(lines))
    return tmp_path / "set"


@pytest.mark.parametrize(("split", "texts"), [("train", ["one", "two"]), ("validation", ["three"])])
def test_a_local_folder_is_read_by_split(folder, split, texts):
    source = SourceConfig(kind="hub", hub_name=str(folder), hub_split=split, text_field="body")
    documents, skipped = read_documents(source)
    assert [document.text for document in documents] == texts
    assert not any(skipped.values())


def test_a_set_that_is_not_there_is_the_users_error(folder):
    with pytest.raises(ConfigError, match=r"hub_name is .*nowhere"):
        read_documents(SourceConfig(kind="hub", hub_name=str(folder / "nowhere")))
