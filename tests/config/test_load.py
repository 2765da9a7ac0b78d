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


def test_every_error_of_a_config_is_told_one_line_each():
    lines = message("model.widht=1", "run.seed=-1", "speculation.drafter=none").splitlines()
    assert len(lines) == 3
    assert all(any(key in line for line in lines) for key in ("`model.widht`", "`run.seed`", "`speculation.drafter`"))


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


@pytest.mark.parametrize("pattern", ["**/*.md", "*.txt", "%x", "@x"])
def test_a_pattern_of_files_needs_no_quotes(pattern):
    assert load_config(None, [f"data.source.pattern={pattern}"]).data.source.pattern == pattern


def test_a_number_of_thousands_of_digits_is_refused():
    with pytest.raises(ConfigError, match=r"`model.width` is a number of thousands of digits"):
        load_config(None, ["model.width=0x" + "f" * 5000])
