"""Bad data, tokenizers and models: rows of the table of bad inputs (tests/cli/test_bad_inputs.py)."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file

from support.broken import Broken, Row, cut, each, nothing, remove, run, write, write_rows

CORPUS = [f"Text number {i} says that {i * i} is the square of {i}, and {i} its root." for i in range(24)]


def data_row(content: bytes | str, said: list[str], name: str = "other.jsonl", *overrides: str) -> Row:
    return Row(write(name, content), run("run.name=new", f"data.source.path={name}", *overrides), said)


GOOD, ALSO = '{"text": "one that is good"}\n', '{"text": "and one more"}\n'
DATA = {
    "no such file": Row(nothing, run("data.source.path=nowhere.jsonl"), ["data.source.path is", "'nowhere.jsonl'"]),
    "an empty file": data_row("", ["data.source", "no document found", "other.jsonl"]),
    "blank lines alone": data_row("\n  \n\r\n", ["data.source", "no document found", "other.jsonl"]),
    "documents of whitespace": data_row('{"text": " "}\n' * 3, ["no document found", "'empty': 3"]),
    "one document": data_row(GOOD, ["1 documents found", "at least 2"]),
    "the same document twice": data_row(GOOD * 2, ["1 documents found", "at least 2"]),
    "a line that is cut": data_row(GOOD + '{"text": "x', ["other.jsonl, line 2", "not JSON", "on_bad_line=skip"]),
    "a line that is a list": data_row(GOOD + '["text"]\n', ["line 2", "expected an object, got list"]),
    "another field": data_row(GOOD + '{"body": "x"}\n', ["line 2", "no field 'text'", "`data.source.text_field`"]),
    "a null": data_row('{"text": null}\n' + GOOD, ["line 1", "`data.source.text_field`) is null"]),
    "a number": data_row(GOOD + ALSO + '{"text": 3}\n', ["line 3", "is int; expected text"]),
    "bytes that are no UTF-8": data_row(b'{"text": "\xff"}\n', ["line 1", "not JSON"]),
    "UTF-16": data_row(GOOD.encode("utf-16"), ["line 1", "not JSON"]),
    "half a surrogate pair": data_row(GOOD + '{"text": "\\ud800"}\n', ["line 2", "lone surrogate"]),
    "a line too deep": data_row(GOOD + "[" * 100_000 + "\n", ["line 2", "not JSON"]),
    "a huge line that is no JSON": data_row(GOOD + "x" * 10_000_000 + "\n", ["line 2", "not JSON"]),
    "no gzip": data_row("not gzip", ["other.jsonl.gz", "cannot be read"], "other.jsonl.gz"),
    "a gzip that is cut": data_row(gzip.compress(GOOD.encode())[:-9], ["cannot be read"], "other.jsonl.gz"),
    "a folder for a file": Row(nothing, run("data.source.path=runs"), ["data.source.path", "'runs'", "file"]),
    "a file for a folder": Row(
        nothing, run("data.source={kind: directory, path: corpus.jsonl}"), ["data.source.path", "expected a folder"]
    ),
    "no such folder": Row(
        nothing, run("data.source={kind: directory, path: nowhere}"), ["data.source.path", "'nowhere'"]
    ),
    "an empty folder": Row(
        lambda _: Path("empty").mkdir(), run("data.source={kind: directory, path: empty}"), ["no document found"]
    ),
    "a folder of binaries": Row(
        write("bin/a.bin", b"a\0b"), run("data.source={kind: directory, path: bin}"), ["no document", "'binary': 1"]
    ),
    "a pattern from the root": Row(
        nothing, run("data.source={kind: directory, path: runs, pattern: /etc}"), ["data.source.pattern", "'/etc'"]
    ),
    "no tasks for finetune": Row(nothing, run("stages=[finetune]", "run.name=new"), ["`data.tasks`", "no tasks"]),
    "no file of tasks": Row(nothing, run("data.tasks={kind: jsonl, path: nowhere}"), ["data.tasks.path", "'nowhere'"]),
    "a task without completion": Row(
        write("tasks.jsonl", '{"prompt": "a"}\n'),
        run("data.tasks={kind: jsonl, path: tasks.jsonl}"),
        ["tasks.jsonl, line 1", "no field 'completion'", "`data.tasks.completion_field`"],
    ),
    "one task": Row(
        write("tasks.jsonl", '{"prompt": "a", "completion": "b"}\n'),
        run("data.tasks={kind: jsonl, path: tasks.jsonl}"),
        ["1 task prompts found", "at least 2"],
    ),
    "tasks that are all too long": Row(
        lambda _: write_rows("tasks.jsonl", [{"prompt": f"{i} " * 50, "completion": "c"} for i in range(9)]),
        run(
            "stages=[finetune]",
            "run.name=new",
            "data.tasks={kind: jsonl, path: tasks.jsonl, max_prompt_tokens: 4, max_completion_tokens: 4}",
        ),
        ["`data.tasks`", "no tasks within its limits"],
    ),
    "a file for the cache": Row(nothing, run("data.cache_dir=corpus.jsonl"), ["data.cache_dir is", "folder"]),
}


def tokenizer_row(content: Callable[[Broken], object], said: list[str]) -> Row:
    return Row(content, run("run.name=new", "data.tokenizer.path=tok/tokenizer.json"), ["tok/tokenizer.json", *said])


def saved(model, special: list[str] | None = None) -> Callable[[Broken], object]:
    def breaks(_: Broken) -> None:
        backend = tokenizers.Tokenizer(model)
        backend.add_special_tokens(special or [])
        Path("tok").mkdir()
        backend.save("tok/tokenizer.json")

    return breaks


WORDS = tokenizers.models.WordLevel
TOKENIZERS = {
    "not there": Row(nothing, run("data.tokenizer.path=nowhere"), ["'nowhere'", "tokenizer.json"]),
    "a folder without one": Row(nothing, run("data.tokenizer.path=data"), ["data", "tokenizer.json"]),
    "empty": tokenizer_row(write("tok/tokenizer.json", ""), ["is not a Hugging Face tokenizer.json"]),
    "no JSON": tokenizer_row(write("tok/tokenizer.json", "{"), ["is not a Hugging Face tokenizer.json"]),
    "no UTF-8": tokenizer_row(write("tok/tokenizer.json", b"\xff"), ["is not a Hugging Face tokenizer.json"]),
    "another JSON": tokenizer_row(write("tok/tokenizer.json", '{"a": 1}'), ["is not a Hugging Face tokenizer.json"]),
    "no end of sequence": tokenizer_row(saved(WORDS({"a": 0, "[UNK]": 1}, "[UNK]")), ["no end-of-sequence token"]),
    "an end that text turns into": tokenizer_row(saved(WORDS({"</s>": 0, "[UNK]": 1}, "[UNK]")), ["plain text"]),
    "text that it cannot encode": tokenizer_row(saved(WORDS({"a": 0, "</s>": 1}), ["</s>"]), ["cannot encode every"]),
    "a huge gap": tokenizer_row(saved(WORDS({"a": 0, "<unk>": 10**6}, "<unk>"), ["</s>"]), ["an id of 1000000"]),
    "a file beside it that is no JSON": Row(
        each(lambda _: shutil.copytree("model", "tok"), write("tok/tokenizer_config.json", "{")),
        run("run.name=new", "data.tokenizer.path=tok"),
        ["tok/tokenizer_config.json", "is not JSON"],
    ),
    "an id that is text": Row(
        each(
            lambda _: shutil.copytree("model", "tok"),
            remove("tok/tokenizer_config.json"),
            write("tok/generation_config.json", '{"eos_token_id": "1"}'),
        ),
        run("run.name=new", "data.tokenizer.path=tok"),
        ["tok/generation_config.json", "`eos_token_id` is '1'"],
    ),
}


def model_row(breaks: Callable[[Broken], object], *said: str) -> Row:
    return Row(breaks, run("run.name=new", "model.init_from=model"), list(said))


def edit(name: str, **changes: object) -> Callable[[Broken], object]:
    """Changes keys of a JSON file."""
    return lambda _: Path(name).write_text(json.dumps(json.loads(Path(name).read_text()) | changes))


def rewrite(change: Callable[[dict], object]) -> Callable[[Broken], object]:
    """Changes the tensors of the model."""

    def breaks(_: Broken) -> None:
        arrays = load_file("model/model.safetensors")
        change(arrays)
        save_file(arrays, "model/model.safetensors")

    return breaks


def a_shard_is_missing(_: Broken) -> None:
    names = sorted(load_file("model/model.safetensors"))
    index = {"weight_map": {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}}
    Path("model/model.safetensors.index.json").write_text(json.dumps(index))
    Path("model/model.safetensors").rename("model/model-00001-of-00002.safetensors")


CONFIG, WEIGHTS = "model/config.json", "model/model.safetensors"
NORM = "model.norm.weight"
MODELS = {
    "no such folder": Row(nothing, run("model.init_from=nowhere"), ["`model.init_from`", "'nowhere'"]),
    "a folder of something else": Row(nothing, run("model.init_from=data"), ["`model.init_from`", "'data'"]),
    "config.json no JSON": model_row(write(CONFIG, "{"), CONFIG, "is not JSON"),
    "config.json a list": model_row(write(CONFIG, "[1]"), CONFIG, "holds a list"),
    "another architecture": model_row(edit(CONFIG, architectures=["GPT2LMHeadModel"]), CONFIG, "GPT2LMHeadModel"),
    "a scaled rotary embedding": model_row(edit(CONFIG, rope_scaling={"type": "linear"}), CONFIG, "rope_scaling"),
    "no width": model_row(edit(CONFIG, hidden_size=None), CONFIG, "`hidden_size` is None"),
    "heads that do not fit": model_row(edit(CONFIG, num_key_value_heads=3), CONFIG, "num_key_value_heads", "divisor"),
    "quantised": model_row(edit(CONFIG, quantization_config={"bits": 4}), CONFIG, "quantised weights"),
    "fewer layers than the exit": model_row(edit(CONFIG, num_hidden_layers=1), "model.exit_layer", "1 layers"),
    "no weights": model_row(remove(WEIGHTS), "'model'", "holds no weights"),
    "weights of another format": model_row(
        lambda _: Path(WEIGHTS).rename("model/pytorch_model.bin"), "pytorch_model.bin", "only safetensors are read"
    ),
    "weights that are cut": model_row(cut(WEIGHTS, 10), WEIGHTS, "cannot be read as safetensors"),
    "weights that are empty": model_row(write(WEIGHTS, ""), WEIGHTS, "cannot be read as safetensors"),
    "a shard that is missing": model_row(a_shard_is_missing, "model-00001-of-00002.safetensors"),
    "a tensor that is missing": model_row(rewrite(lambda a: a.pop(NORM)), "'model'", f"{NORM} is missing"),
    "a tensor too many": model_row(rewrite(lambda a: a.update(more=a[NORM])), "'model'", "more is unexpected"),
    "a tensor of another shape": model_row(
        rewrite(lambda a: a.update({NORM: np.zeros(5, np.float32)})), f"{NORM} is [5], expected [16]"
    ),
    "a tensor of another type": model_row(
        rewrite(lambda a: a.update({NORM: np.zeros(16, np.int64)})), f"{NORM} is of type I64"
    ),
    "a drafter that is cut": model_row(cut("model/drafter.safetensors", 9), "model/drafter.safetensors"),
    "no tokenizer": model_row(remove("model/tokenizer.json"), "model/tokenizer.json", "does not exist"),
    "a vocabulary below its tokenizer's": model_row(
        each(
            edit(CONFIG, vocab_size=100),
            rewrite(lambda a: a.update({"model.embed_tokens.weight": a["model.embed_tokens.weight"][:100]})),
        ),
        "`model.init_from` has a vocabulary of 100, its tokenizer one of 300",
    ),
    "a run without checkpoints": Row(
        remove("runs/standing/checkpoints"), run("run.name=new", "model.init_from=runs/standing"), ["runs/standing"]
    ),
}
