"""Tasks: joint tokenisation, limits, duplicates, files of pairs."""

import json

import numpy as np
import pytest
import tokenizers

from tlt_jax.config import ConfigError
from tlt_jax.config.data_sections import DataConfig, SourceConfig, TasksConfig
from tlt_jax.data.sources import Document
from tlt_jax.data.tasks import read_pairs, tokenize_pairs
from tlt_jax.text import load_tokenizer, train_tokenizer

CODE = 'def f{i}(x):\n    """Adds {i} <|end|>."""\n    return x + {i}\n'


def ignore(share):
    assert 0 <= share <= 1


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([CODE.format(i=i) for i in range(20)], 320)


@pytest.fixture(scope="module")
def merging(tmp_path_factory):
    """A tokenizer without BOS that merges "ab", whatever stands there."""
    folder = tmp_path_factory.mktemp("merging")
    model = tokenizers.models.BPE({"a": 0, "b": 1, "c": 2, "ab": 3, "</s>": 4}, [("a", "b")])
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["</s>"])
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def test_bos_first_and_exactly_one_eos_last(tokenizer):
    pairs = [(f'def f(x):\n    """A {i} <|end|>."""', "\n    return '<|end|>'") for i in range(3)]
    tasks, dropped = tokenize_pairs(pairs, tokenizer, 100, 100, ignore)
    assert len(tasks) == 3 and not any(dropped.values())
    for (prompt_text, body), prompt, completion in zip(pairs, tasks.prompts, tasks.completions, strict=True):
        assert prompt.dtype == completion.dtype == np.int32
        assert prompt[0] == tokenizer.bos_id and (prompt == tokenizer.bos_id).sum() == 1
        assert completion[-1] == tokenizer.eos_id and (completion == tokenizer.eos_id).sum() == 1
        assert tokenizer.eos_id not in prompt
        assert tokenizer.decode(prompt) == prompt_text and tokenizer.decode(completion) == body
        joint = tokenizer.encode(prompt_text + body)
        assert [*prompt[1:], *completion[:-1]] == joint


def test_a_token_across_the_boundary_is_the_completions(merging):
    tasks, _ = tokenize_pairs([("ca", "bc"), ("ab", "c")], merging, 9, 9, ignore)
    assert [p.tolist() for p in tasks.prompts] == [[2], [3]]
    assert [c.tolist() for c in tasks.completions] == [[3, 2, 4], [2, 4]]


def test_a_prompt_of_which_nothing_is_left_is_dropped(merging):
    tasks, dropped = tokenize_pairs([("a", "b")], merging, 9, 9, ignore)
    assert len(tasks) == 0 and dropped["dropped_empty_prompts"] == 1


def test_limits_count_bos_and_eos_and_nothing_is_cut(tokenizer):
    pairs = [("zq" * 3, "kj" * 2)]  # without merges: 6 and 4 tokens
    for limits, kept in {(7, 5): 1, (6, 5): 0, (7, 4): 0}.items():
        tasks, dropped = tokenize_pairs(pairs, tokenizer, *limits, ignore)
        assert len(tasks) == kept == 1 - sum(dropped.values())
    assert tokenize_pairs(pairs, tokenizer, 6, 5, ignore)[1]["dropped_long_prompts"] == 1
    assert tokenize_pairs(pairs, tokenizer, 7, 4, ignore)[1]["dropped_long_completions"] == 1


def test_no_pairs(tokenizer):
    tasks, dropped = tokenize_pairs([], tokenizer, 9, 9, ignore)
    assert len(tasks) == 0 and not any(dropped.values())


def test_functions_of_each_side_without_repeats():
    train = [Document("a.py", CODE.format(i=1) + CODE.format(i=2)), Document("b.py", CODE.format(i=1))]
    held_out = [Document("c.py", CODE.format(i=2) + CODE.format(i=3) * 2), Document("d.md", "# prose (")]
    train_pairs, held_out_pairs, counts = read_pairs(train, held_out, DataConfig(), 0, ignore)
    assert [prompt[:6] for prompt, _ in train_pairs] == ["def f1", "def f2"]
    assert [prompt[:6] for prompt, _ in held_out_pairs] == ["def f3"]
    assert counts == {"task_pairs": 6, "task_duplicates": 3}


def pairs_file(tmp_path, lines, on_bad_line="error", **settings):
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(
        b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\r\n" for line in lines)
    )
    tasks = TasksConfig(kind="jsonl", path=str(path), **settings)
    return DataConfig(tasks=tasks, source=SourceConfig(on_bad_line=on_bad_line), held_out_fraction=0.2)


def test_file_of_pairs_is_split_by_prompt(tmp_path):
    lines = [{"q": f"p{i % 50}", "a": f"c{i}"} for i in range(100)]
    config = pairs_file(tmp_path, lines, prompt_field="q", completion_field="a")
    train, held_out, counts = read_pairs([], [], config, 0, ignore)
    assert len(train) + len(held_out) == 100 and held_out
    assert not {prompt for prompt, _ in train} & {prompt for prompt, _ in held_out}
    assert counts["task_bad_lines"] == counts["task_duplicates"] == counts["task_empty"] == 0
    assert read_pairs([], [], config, 0, ignore)[:2] == (train, held_out)
    assert read_pairs([], [], config, 1, ignore)[1] != held_out


def test_bad_lines_of_pairs(tmp_path):
    good = [{"prompt": f"p{i}", "completion": "c"} for i in range(4)]
    lines = [*good, b"\n", {"prompt": "p"}, {"prompt": "p", "completion": None}, {"prompt": "", "completion": "c"}]
    with pytest.raises(
        ConfigError, match=r"pairs\.jsonl, line 6: no field 'completion' \(`data.tasks.completion_field`\); it"
    ):
        read_pairs([], [], pairs_file(tmp_path, lines), 0, ignore)
    train, held_out, counts = read_pairs([], [], pairs_file(tmp_path, lines, "skip"), 0, ignore)
    assert len(train) + len(held_out) == 4
    assert (counts["task_bad_lines"], counts["task_empty"]) == (2, 1)


def test_too_few_pairs_or_no_file(tmp_path):
    with pytest.raises(ConfigError, match="1 task prompts found; expected at least 2"):
        read_pairs([], [], pairs_file(tmp_path, [{"prompt": "p", "completion": "c"}]), 0, ignore)
    config = DataConfig(tasks=TasksConfig(kind="jsonl", path="no/such"))
    with pytest.raises(ConfigError, match=r"data\.tasks\.path is 'no/such'"):
        read_pairs([], [], config, 0, ignore)
