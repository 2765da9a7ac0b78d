"""The tokenizer: round trips, special tokens that text cannot make, offsets, determinism, files."""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tokenizers

from tlt_jax.config import ConfigError
from tlt_jax.text import load_tokenizer, train_tokenizer
from tlt_jax.text import tokenizer as tokenizer_module

ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT.parent / "shared" / "data" / "stories260k" / "hf"
TEXTS = ['def f(x):\n    """Doc <|end|> string."""\n    return x + 1\n', "for i in range(10):\n    print(i)\n"] * 20
ODD = "tab\t nul\0 é 日本 \U0001f600 \r\n  <|end|><|begin|> x"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


@pytest.fixture
def stories():
    if not STORIES.is_dir():
        pytest.skip("the shared folder with the real tokenizer is absent")
    return load_tokenizer(STORIES / "tokenizer.json")


def test_round_trip_of_any_text(tokenizer):
    for text in [*TEXTS[:2], ODD, "", " ", "\n\n"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_named_and_first(tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.token(0) == "<|begin|>" and tokenizer.token(1) == "<|end|>"
    assert 258 < tokenizer.vocab_size <= 300
    assert train_tokenizer(["abc"], 5000).vocab_size < 300  # too little text for more merges


def test_text_never_becomes_a_special_token(tokenizer):
    text = 'print("<|end|>", "<|begin|>")'
    for ids in [tokenizer.encode(text), tokenizer.encode_many([text])[0], tokenizer.encode_with_offsets(text)[0]]:
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
        assert tokenizer.decode(ids) == text


def test_special_ids_are_left_out_of_decoded_text(tokenizer):
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("hi"), tokenizer.eos_id]) == "hi"


def test_invalid_utf8_becomes_replacement_characters(tokenizer):
    ids = tokenizer.encode("日")
    assert len(ids) == 3
    assert tokenizer.decode(ids[:1]) == "\ufffd"


def test_many_equals_one_by_one(tokenizer):
    texts = [*TEXTS[:2], ODD, ""]
    assert tokenizer.encode_many(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_many_with_offsets(texts) == [tokenizer.encode_with_offsets(text) for text in texts]


def test_offsets_are_in_characters_and_cover_the_text(tokenizer):
    text = "é =  日x\n"
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert len(ids) == len(offsets)
    assert {c for start, end in offsets for c in range(start, end)} == set(range(len(text)))
    assert [offset for offset in offsets if offset == (5, 6)] == [(5, 6)] * 3  # three bytes of one character


def test_training_is_the_same_in_every_process(tokenizer):
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]; from test_tokenizer import *;"
        "print(hashlib.sha256(train_tokenizer(TEXTS, 300).json.encode()).hexdigest())"
    )
    expected = hashlib.sha256(tokenizer.json.encode()).hexdigest()
    for hash_seed, threads in [("1", "1"), ("2", "2")]:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "RAYON_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.vocab_size is 100"):
        train_tokenizer(TEXTS, 100)


def test_words_without_end_are_learnt_from_in_parts(monkeypatch):
    """Training takes the square of a word's length: whole, these would take hours."""
    texts = ["x" * 10**6 + " and more", "so  " + "\n" * 10**6 + "on", "abc" * 400_000]
    begun = time.monotonic()
    trained = train_tokenizer(texts, 300)
    assert time.monotonic() - begun < 30
    assert all(trained.decode(trained.encode(text)) == text for text in texts)
    monkeypatch.setattr(tokenizer_module, "LONGEST_WORD", 4)
    monkeypatch.setattr(tokenizer_module, "_LONG", re.compile(r"\S{5,}|\s{5,}"))
    assert list(tokenizer_module._with_short_words(["abcd 12345678, x      y", ""])) == [
        "abcd 1234", "5678", ", x    ", "  y", "",
    ]  # fmt: skip


def test_saved_and_loaded_again_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "out")
    again = load_tokenizer(tmp_path / "out")
    assert again.json == tokenizer.json
    assert (again.bos_id, again.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert again.encode(ODD) == tokenizer.encode(ODD)
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (config["bos_token"], config["eos_token"]) == ("<|begin|>", "<|end|>")


def test_exported_file_puts_bos_first_for_other_readers_but_never_for_us(tokenizer):
    theirs = tokenizers.Tokenizer.from_str(tokenizer.json).encode("hi").ids
    assert theirs == [tokenizer.bos_id, *tokenizer.encode("hi")]


@pytest.mark.torch
def test_transformers_reads_what_we_save(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra `parity`")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    for text in TEXTS[:2]:
        # Ours never makes a special token out of text; theirs has to be told.
        ids = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ids == tokenizer.encode(text)
    whole = theirs(TEXTS[1], split_special_tokens=True)["input_ids"]
    assert whole == [tokenizer.bos_id, *tokenizer.encode(TEXTS[1])]


def test_settings_in_the_file_that_would_change_ids_are_undone(tokenizer, tmp_path):
    backend = tokenizers.Tokenizer.from_str(tokenizer.json)
    backend.enable_truncation(2)
    backend.enable_padding(length=9, pad_id=1)
    tree = json.loads(backend.to_str())
    tree["model"]["dropout"] = 0.9
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    assert loaded.encode_many(["a", TEXTS[0]]) == tokenizer.encode_many(["a", TEXTS[0]])


def test_offsets_keep_whitespace_though_the_file_would_trim_it(tokenizer, tmp_path):
    backend = tokenizers.Tokenizer.from_str(tokenizer.json)
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    assert load_tokenizer(tmp_path).encode_with_offsets("x  \n y") == tokenizer.encode_with_offsets("x  \n y")


def write(folder, tokenizer, **files):
    (folder / "tokenizer.json").write_text(tokenizer.json)
    for name, tree in files.items():
        (folder / f"{name}.json").write_text(json.dumps(tree))
    return load_tokenizer(folder / "tokenizer.json")


def test_where_special_ids_come_from(tokenizer, tmp_path):
    assert write(tmp_path, tokenizer).eos_id == 1  # a well-known name
    assert write(tmp_path, tokenizer, config={"eos_token_id": [0, 7], "bos_token_id": 0}).eos_id == 0
    loaded = write(tmp_path, tokenizer, tokenizer_config={"eos_token": {"content": "<|end|>"}, "bos_token": None})
    assert (loaded.bos_id, loaded.eos_id) == (None, 1)  # names go before ids; null says that there is no BOS
    loaded = write(tmp_path, tokenizer, tokenizer_config={"eos_token": None}, config={"eos_token_id": 1})
    assert loaded.eos_id == 1


def test_no_eos_is_refused(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        load_tokenizer(tmp_path)


def test_eos_that_plain_text_turns_into_is_refused(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "[UNK]": 1}, "[UNK]"))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="plain text"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [None, "", "{", '{"a": 1}'])
def test_files_that_are_no_tokenizer_are_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_real_tokenizer(stories):
    assert (stories.bos_id, stories.eos_id, stories.vocab_size) == (1, 2, 512)
    ids = stories.encode("Once upon a time </s> <s> é")
    assert not {1, 2} & set(ids)
    assert stories.decode(ids) == "Once upon a time </s> <s> é"
    assert stories.decode([1, *ids, 2]) == "Once upon a time </s> <s> é"


@pytest.mark.parametrize("value", [-1, 10**20, 5.0, True, "1"])
def test_ids_that_are_none_are_not_taken(tokenizer, tmp_path, value):
    if type(value) is int:  # none of the vocabulary's: the well-known name is found
        assert write(tmp_path, tokenizer, config={"eos_token_id": value}).eos_id == 1
    else:
        with pytest.raises(ConfigError, match="`eos_token_id` is"):
            write(tmp_path, tokenizer, config={"eos_token_id": value})


def test_a_tokenizer_that_cannot_encode_every_text_is_refused(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}))
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="cannot encode every text"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_with_a_huge_gap_is_refused(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 10**6}, unk_token="<unk>"))
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="an id of 1000000"):
        load_tokenizer(tmp_path)


def test_a_completion_keeps_the_space_that_it_starts_with(tokenizer, stories):
    for each in (tokenizer, stories):
        prompt, text = each.encode("once upon"), " a time"
        whole = each.encode("once upon a time")
        assert whole[: len(prompt)] == prompt
        assert each.decode_after(prompt, whole[len(prompt) :]) == text
    character = tokenizer.encode("日")  # three tokens: what a prompt that ends inside it adds cannot be told
    assert tokenizer.decode_after(character[:1], character[1:]) == tokenizer.decode(character[1:])
