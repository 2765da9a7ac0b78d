"""Loading, overrides, redaction and the errors of a config."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tlt_jax.config import Config, ConfigError, dump_config, load_config, redacted

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


def written(tmp_path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def message(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


# Each bad override, and what its one message must say: the key (or the keys at odds) and the value.
BAD = {
    # unknown keys
    "model.widht=64": ["`model.widht`", "64", "did you mean `model.width`"],
    "speculations.draft_length=3": ["`speculations`", "did you mean `speculation`"],
    "learning_rate=0.1": ["`learning_rate`", "0.1", "did you mean `pretrain.optimizer.learning_rate`"],
    "run.sead=3": ["`run.sead`", "3", "did you mean `run.seed`"],
    "pretrain.optimizer.lr=0.1": ["`pretrain.optimizer.lr`", "0.1"],
    "align.ppo.optimizer.betta1=0.5": [
        "`align.ppo.optimizer.betta1`",
        "0.5",
        "did you mean `align.ppo.optimizer.beta1`",
    ],
    "zzz=1": ["`zzz`", "1", "known here", "speculation"],
    # types
    "model.width=wide": ["`model.width`", "'wide'", "str", "integer"],
    "model.width=64.5": ["`model.width`", "64.5", "float", "integer"],
    "model.width=64.0": ["`model.width`", "64.0", "float", "integer"],
    "model.width='64'": ["`model.width`", "'64'", "str", "integer"],
    "model.width=null": ["`model.width`", "None", "integer"],
    "model.width=": ["`model.width`", "''", "integer"],
    "model.tied=1": ["`model.tied`", "1", "int", "boolean"],
    "run.seed=true": ["`run.seed`", "True", "bool", "integer"],
    "run.name=3": ["`run.name`", "3", "int", "string"],
    "sampling.temperature=hot": ["`sampling.temperature`", "'hot'", "number"],
    "stages=align": ["`stages`", "'align'", "list"],
    "model=5": ["`model`", "5", "a section"],
    "model=null": ["`model`", "None", "a section"],
    "model.init_from=3": ["`model.init_from`", "3", "string"],
    "data.max_documents=many": ["`data.max_documents`", "'many'", "integer"],
    "data.source.hub_token=3": ["`data.source.hub_token`", "3", "string"],
    # ranges
    "run.name=''": ["`run.name`", "''", "letters, digits"],
    "run.seed=-1": ["`run.seed`", "-1", "greater than or equal to 0"],
    "run.seed=2147483648": ["`run.seed`", "2147483648", "less than or equal to 2147483647"],
    "model.layers=0": ["`model.layers`", "0", "greater than or equal to 1"],
    "model.head_dim=31": ["`model.head_dim`", "31", "multiple of 2"],
    "sampling.temperature=0": ["`sampling.temperature`", "0", "greater than 0"],
    "sampling.top_p=1.5": ["`sampling.top_p`", "1.5", "less than or equal to 1"],
    "sampling.top_p=0": ["`sampling.top_p`", "0", "greater than 0"],
    "speculation.draft_length=17": ["`speculation.draft_length`", "17", "less than or equal to 16"],
    "finetune.policy.group_size=1": ["`finetune.policy.group_size`", "1", "greater than or equal to 2"],
    "finetune.policy.clip_low=1.0": ["`finetune.policy.clip_low`", "1.0", "less than 1"],
    "pretrain.optimizer.warmup_fraction=1.2": [
        "`pretrain.optimizer.warmup_fraction`",
        "1.2",
        "less than or equal to 1",
    ],
    "pretrain.optimizer.learning_rate=0": ["`pretrain.optimizer.learning_rate`", "0", "greater than 0"],
    "pretrain.optimizer.learning_rate=.nan": ["`pretrain.optimizer.learning_rate`", "nan"],
    "pretrain.optimizer.learning_rate=.inf": ["`pretrain.optimizer.learning_rate`", "inf"],
    "align.ppo.truncated_reward=.nan": ["`align.ppo.truncated_reward`", "nan"],
    "budget.total=.inf": ["`budget.total`", "inf"],
    "data.held_out_fraction=0": ["`data.held_out_fraction`", "0", "greater than 0"],
    "data.tokenizer.vocab_size=259": ["`data.tokenizer.vocab_size`", "259", "260"],
    "checkpoint.every_seconds=0": ["`checkpoint.every_seconds`", "0", "greater than 0"],
    "stages=[]": ["`stages`", "[]", "a list with at least one entry"],
    "stages=pretrain": ["`stages`", "'pretrain'", "a list"],
    "model.width=4294967296": ["`model.width`", "4294967296", "2147483647"],
    # paths that no system can look for
    "run.output_dir=''": ["`run.output_dir`", "''", "a path"],
    "model.init_from=~nobody-of-that-name/x": ["`model.init_from`", "~nobody-of-that-name/x", "home directory"],
    'data.cache_dir="a\\0b"': ["`data.cache_dir`", "zero bytes"],
    # names
    "speculation.drafter=shalow": [
        "`speculation.drafter`",
        "'shalow'",
        "shallow, ngram, off",
        "did you mean 'shallow'",
    ],
    "pretrain.optimizer.name=adam": [
        "`pretrain.optimizer.name`",
        "'adam'",
        "adamw, lion, muon",
        "did you mean 'adamw'",
    ],
    "stages=[pretrian]": ["`stages.0`", "'pretrian'", "pretrain, finetune, align", "did you mean 'pretrain'"],
    "run.trackers=[wandbi]": ["`run.trackers.0`", "'wandbi'", "tensorboard", "did you mean 'wandb'"],
    "tracking.mlflow.tracking_uri=https://me:hunter2@there": [
        "`tracking.mlflow.tracking_uri`",
        "MLFLOW_TRACKING_PASSWORD",
    ],
    "device.platform=cuda": ["`device.platform`", "'cuda'", "auto, cpu, gpu, tpu"],
    "budget.unit=hours": ["`budget.unit`", "'hours'", "steps, tokens, seconds"],
    # keys at odds with each other
    "model.kv_heads=3": ["`model`", "kv_heads (3)", "heads (4)"],
    "model.width=130": ["`model`", "heads (4)", "width (130)"],
    "model.exit_layer=4": ["`model`", "exit_layer (4)", "layers (4)"],
    "pretrain.accumulation=5": ["pretrain.accumulation (5)", "pretrain.batch_size (32)"],
    "finetune.warmup.accumulation=5": ["finetune.warmup.accumulation (5)", "finetune.warmup.batch_size (32)"],
    "finetune.policy.minibatches=5": ["finetune.policy.minibatches (5)", "finetune.policy.prompts * group_size (128)"],
    "align.ppo.minibatches=5": ["align.ppo.minibatches (5)", "align.ppo.prompts (64)"],
    "speculation.exit_stride=3": ["speculation.exit_stride (3)", "data.context_length (128)"],
    "speculation.ngram_min=5": ["`speculation`", "ngram_min (5)", "ngram_max (4)"],
    "data.source.kind=jsonl": ["`data.source`", "'jsonl'", "`path`"],
    "data.source.kind=directory": ["`data.source`", "'directory'", "`path`"],
    "data.source.kind=hub": ["`data.source`", "'hub'", "`hub_name`"],
    "align.ppo.kl_horizon=10": ["`align.ppo`", "kl_horizon (10)", "prompts (64)"],
    "data.tasks.kind=jsonl": ["`data.tasks`", "'jsonl'", "`path`"],
    "data.tasks.path=pairs.jsonl": ["`data.tasks`", "'python_functions'", "'pairs.jsonl'", "kind jsonl"],
    "device.mesh={data: 1, tensor: 4}": ["device.mesh.tensor (4)", "model.kv_heads (2)"],
    "device.mesh={data: 1, fsdp: 3}": ["device.mesh.fsdp (3)", "model.width (128)"],
    "device.mesh.data=0": ["`device.mesh`", "0", "positive"],
    "device.mesh.fsdp=-1": ["`device.mesh`", "-1", "one axis at most"],
    "device.mesh.tensor=-2": ["`device.mesh`", "-2", "positive"],
    "budget.total=1e308": ["`budget.total`", "1e+308", "1000000000000000"],
    "budget.pretrain=1e308": ["`budget.pretrain`", "1e+308", "1000000"],
    "device.cpu_devices=100000": ["`device.cpu_devices`", "100000", "1024"],
    "device.processes=2": ["`device`", "need `coordinator`"],
    "device={coordinator: 'a:1', processes: 2, process: 2}": ["`device`", "`process` is 2", "0 to 1"],
    "device={coordinator: 'a:1', processes: 2}": ["`device`", "`process` is None", "0 to 1"],
    "stages=[align, pretrain]": ["stages", "['align', 'pretrain']", "in the order pretrain, finetune, align"],
    "stages=[align, align]": ["stages", "['align', 'align']", "at most once"],
    # overrides that are none
    "model.width": ["'model.width'", "key.sub=value"],
    "=3": ["'=3'", "key.sub=value"],
    "run.name=[a": ["'run.name=[a'", "'[a'", "not a YAML value"],
    "run={seed: 1, seed: 2}": ["'seed'", "twice"],
}


@pytest.mark.parametrize("override", BAD)
def test_a_bad_input_gives_one_message_with_key_value_and_what_was_expected(override):
    text = message(override)
    assert "\n" not in text
    for part in BAD[override]:
        assert part in text, text


def test_shares_that_add_up_to_nothing_are_refused():
    text = message("budget.pretrain=0", "stages=[pretrain]")
    assert "\n" not in text
    assert "budget" in text
    assert "add up to 0" in text


def test_every_error_of_a_config_is_told_one_line_each():
    lines = message("model.widht=1", "run.seed=-1", "speculation.drafter=none").splitlines()
    assert len(lines) == 3
    assert all(any(key in line for line in lines) for key in ("`model.widht`", "`run.seed`", "`speculation.drafter`"))


def test_overrides_below_a_value_are_refused(tmp_path):
    text = message("run.name.first=a", path=written(tmp_path, "run: {name: b}"))
    assert "'run.name.first=a'" in text
    assert "`run.name` is a value, not a section" in text


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path):
    written(tmp_path, "")
    text = message(path=tmp_path / "confg.yaml")
    assert str(tmp_path / "confg.yaml") in text
    assert "did you mean 'config.yaml'" in text


@pytest.mark.parametrize("content", ["- a\n- b\n", "just words", "3"])
def test_a_file_without_keys_is_refused(tmp_path, content):
    assert "expected `key: value` pairs" in message(path=written(tmp_path, content))


@pytest.mark.parametrize(
    "content", ["a: [1\n", "a: b: c\n", "run: !!python/object/apply:os.system [ls]\n", "? [a, b]\n: 1\n", "\tx: 1"]
)
def test_what_is_not_safe_yaml_is_refused_in_one_line(tmp_path, content):
    path = written(tmp_path, content)
    text = message(path=path)
    assert str(path) in text
    assert "cannot be read as YAML" in text
    assert "\n" not in text


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"run: {name: \xff\xfe}\n")
    assert "cannot be read as YAML" in message(path=path)


def test_a_key_that_stands_twice_is_refused(tmp_path):
    text = message(path=written(tmp_path, "run: {seed: 1}\nmodel:\n  width: 1\n  layers: 2\n  width: 3\n"))
    assert "'width'" in text
    assert "twice" in text
    assert "line 3" in text


def test_an_empty_file_is_the_default_config(tmp_path):
    assert load_config(written(tmp_path, "")) == load_config(None) == Config()


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1E-4", 1e-4), ("4e3", 4000.0), ("2.5e-3", 2.5e-3), ("1.e+2", 100.0), ("3", 3.0)],
)
def test_numbers_in_scientific_notation_are_numbers(tmp_path, text, value):
    from_file = load_config(written(tmp_path, f"pretrain: {{optimizer: {{learning_rate: {text}}}}}"))
    from_override = load_config(None, [f"pretrain.optimizer.learning_rate={text}"])
    assert from_file.pretrain.optimizer.learning_rate == from_override.pretrain.optimizer.learning_rate == value


@pytest.mark.parametrize("text", ["1e4x", "e5", "1e", "12e-3b"])
def test_words_that_look_like_numbers_stay_words(text):
    assert load_config(None, [f"run.name={text}"]).run.name == text


def test_an_explicit_zero_stays(tmp_path):
    path = written(
        tmp_path, "run: {seed: 0, samples: 0}\npretrain: {exit_weight: 0}\nfinetune: {policy: {kl_coef: 0.0}}\n"
    )
    config = load_config(
        path, ["pretrain.optimizer.warmup_fraction=0", "pretrain.optimizer.beta1=0.0", "align.ppo.kl_coef=0"]
    )
    assert (config.run.seed, config.run.samples, config.pretrain.exit_weight, config.finetune.policy.kl_coef) == (
        0,
        0,
        0.0,
        0.0,
    )
    assert (config.pretrain.optimizer.warmup_fraction, config.pretrain.optimizer.beta1, config.align.ppo.kl_coef) == (
        0.0,
        0.0,
        0.0,
    )


def test_overrides_take_lists_mappings_null_and_nothing(tmp_path):
    path = written(tmp_path, "checkpoint: {every_seconds: 5.0}\nmodel: {layers: 6}\ndata: {max_documents: 7}\n")
    config = load_config(
        path,
        [
            "stages=[pretrain, align]",
            "run.trackers=[]",
            "model={layers: 3, exit_layer: 1}",
            "checkpoint.every_seconds=null",
            "data.max_documents=~",
            "device.compilation_cache=",
            "run.output_dir=a=b",
            "run.seed=1",
            "run.seed=2",
        ],
    )
    assert config.stages == ["pretrain", "align"]
    assert config.run.trackers == []
    assert (config.model.layers, config.model.exit_layer) == (3, 1)  # a mapping replaces the section
    assert config.checkpoint.every_seconds is None
    assert config.data.max_documents is None
    assert config.device.compilation_cache == ""
    assert config.run.output_dir == "a=b"
    assert config.run.seed == 2  # the last one wins


def test_an_override_keeps_its_neighbours(tmp_path):
    config = load_config(written(tmp_path, "model: {layers: 6, exit_layer: 3}"), ["model.layers=5"])
    assert (config.model.layers, config.model.exit_layer) == (5, 3)


def test_with_init_from_the_shape_is_not_checked():
    assert load_config(None, ["model.init_from=somewhere", "model.exit_layer=40"]).model.exit_layer == 40


def test_secrets_are_redacted_everywhere():
    config = load_config(None, ["data.source.hub_token=hf_secret"])
    assert config.data.source.hub_token.get_secret_value() == "hf_secret"
    for text in (dump_config(config), repr(redacted(config)), repr(config), str(config)):
        assert "hf_secret" not in text
    assert yaml.safe_load(dump_config(config))["data"]["source"]["hub_token"] == "<redacted>"
    assert redacted(Config())["data"]["source"]["hub_token"] is None


@pytest.mark.parametrize("path", [None, *SHIPPED], ids=lambda p: getattr(p, "name", "defaults"))
def test_a_dumped_config_loads_to_an_equal_one(tmp_path, path):
    config = load_config(
        path, ["run.name=größe", "pretrain.optimizer.learning_rate=1e-5", "checkpoint.every_seconds=null"]
    )
    assert load_config(written(tmp_path, dump_config(config))) == config


def test_a_config_does_not_change():
    config = Config()
    with pytest.raises(ValueError, match="frozen"):
        config.model.width = 3


def test_the_shipped_configs_validate_without_jax():
    assert {"quickstart.yaml", "tiny.yaml"} <= {path.name for path in SHIPPED}
    code = (
        "import sys\nfrom tlt_jax.main import main\n"
        "codes = [main(['validate', '--config', path]) for path in sys.argv[1:]]\n"
        "sys.exit(any(codes) or 10 * ('jax' in sys.modules or 'numpy' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, SHIPPED)], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_alias_bomb_ends_with_a_short_message(tmp_path):
    levels = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))
    text = message(path=written(tmp_path, f"a0: &a0 [x, x]\n{levels}\nrun: {{name: *a11}}\n"))
    assert "`run.name`" in text
    assert len(text) < 4000


def test_merge_keys_are_merged(tmp_path):
    path = written(
        tmp_path,
        """
pretrain: {optimizer: &slow {learning_rate: 1e-5, beta2: 0.9}}
finetune: {warmup: {optimizer: {<<: *slow, beta2: 0.8}}}
""",
    )
    optimizer = load_config(path).finetune.warmup.optimizer
    assert (optimizer.learning_rate, optimizer.beta2) == (1e-5, 0.8)


def test_a_name_too_long_for_a_file_is_refused():
    text = message(path="x" * 300)
    assert "cannot be looked for" in text
    assert "\n" not in text
