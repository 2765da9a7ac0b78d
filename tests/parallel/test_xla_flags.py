"""XLA's flags: presets that this XLA knows, and what a user gives."""

import json
import logging
import os
import subprocess
import sys

import jax
import pytest
from pydantic import ValidationError

from tlt_jax.config import ConfigError
from tlt_jax.config.device_sections import DeviceConfig, flag_words
from tlt_jax.parallel import xla_flags
from tlt_jax.parallel.mesh import set_up_devices
from tlt_jax.parallel.xla_flags import PRESETS, platform_of, refuse_late, set_flags, unknown

STRANGE = "--xla_of_another_age=true"


@pytest.fixture
def variables(monkeypatch):
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")  # so that what the test leaves there is taken away
        monkeypatch.delenv(name)
    return monkeypatch


def test_this_xla_knows_every_preset(tmp_path):
    """In one trial: a name that is not known would be said."""
    every = tuple(flag for preset in PRESETS.values() for flag in preset)
    assert unknown((*every, STRANGE), tmp_path) == {STRANGE}


def test_what_was_found_is_kept_and_not_tried_again(tmp_path, monkeypatch):
    folder = tmp_path / "compiled"
    assert unknown((STRANGE,), folder) == {STRANGE}
    (kept,) = folder.iterdir()
    assert json.loads(kept.read_text()) == {"unknown": [STRANGE]}
    monkeypatch.setattr(xla_flags, "_try", lambda flags: pytest.fail("tried again"))
    assert unknown((STRANGE,), folder) == {STRANGE}


@pytest.mark.parametrize("content", ["{", "[]", '{"unknown": 3}'])
def test_what_somebody_wrote_there_is_found_anew(tmp_path, monkeypatch, content):
    monkeypatch.setattr(xla_flags, "_try", lambda flags: {STRANGE})
    unknown((STRANGE,), tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_text(content)
    assert unknown((STRANGE,), tmp_path) == {STRANGE}


def test_the_preset_is_set_but_for_what_xla_does_not_know_and_what_stands_there(variables, monkeypatch, caplog):
    monkeypatch.setitem(PRESETS, "gpu", ("--xla_a=1", "--xla_b=1", STRANGE))
    monkeypatch.setattr(xla_flags, "_try", lambda flags: {flag for flag in flags if flag == STRANGE})
    variables.setenv("XLA_FLAGS", "--xla_b=2")
    with caplog.at_level(logging.WARNING, "tlt_jax"):
        set_flags(DeviceConfig(platform="gpu", compilation_cache=""))
    assert os.environ["XLA_FLAGS"] == "--xla_b=2 --xla_a=1"
    assert STRANGE in caplog.text


def test_a_cpu_needs_none_and_tries_none(variables, monkeypatch):
    monkeypatch.setattr(xla_flags, "_try", lambda flags: pytest.fail("nothing is there to try"))
    set_flags(DeviceConfig(platform="cpu"))
    assert "XLA_FLAGS" not in os.environ


@pytest.mark.parametrize(
    ("variable", "key", "where"), [(STRANGE, "auto", "the variable XLA_FLAGS"), ("", STRANGE, "`device.xla_flags`")]
)
def test_a_users_flag_that_xla_does_not_know_is_refused(variables, tmp_path, variable, key, where):
    if variable:
        variables.setenv("XLA_FLAGS", variable)
    with pytest.raises(ConfigError, match=f"{where}.*unknown: {STRANGE}"):
        set_flags(DeviceConfig(platform="cpu", xla_flags=key, compilation_cache=str(tmp_path)))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--xla_cpu_enable_fast_math=maybe", "Couldn't interpret value maybe"),
        ("a_file_of_flags", 'Could not open file "a_file_of_flags"'),
    ],
)
def test_a_users_flags_that_xla_cannot_read_are_refused(variables, tmp_path, flags, said):
    """XLA would end the process for them."""
    variables.setenv("XLA_FLAGS", flags)
    with pytest.raises(ConfigError, match=f"the variable XLA_FLAGS is '{flags}'.*{said}"):
        set_flags(DeviceConfig(platform="cpu", compilation_cache=str(tmp_path)))


def test_words_that_are_no_flags_are_refused_by_the_config():
    with pytest.raises(ValidationError, match=r"xla_flags has 'xla_b=2'; expected 'auto', or words"):
        DeviceConfig(xla_flags="--xla_a=1 xla_b=2")


def test_flags_that_come_too_late_are_refused(variables):
    """JAX runs in this process."""
    config = DeviceConfig(platform="cpu", cpu_devices=jax.local_device_count(), xla_flags="--xla_a=1 --xla_b=2")
    with pytest.raises(ConfigError, match=r"before JAX began to run .* \(not there: --xla_a=1 --xla_b=2\)"):
        set_up_devices(config)
    variables.setenv("XLA_FLAGS", "--xla_b=2 --xla_a=2")  # which wins
    refuse_late(config)
    refuse_late(DeviceConfig())


def test_flags_that_come_with_a_second_run_are_refused(tmp_path):
    """In a process of its own: what JAX was told when it began is not told again."""
    lines = [
        "import jax",
        "from tlt_jax.config.device_sections import DeviceConfig",
        "from tlt_jax.parallel.mesh import set_up_devices",
        "set_up_devices(DeviceConfig(platform='cpu', cpu_devices=2, compilation_cache=''))",
        "assert jax.device_count() == 2",
        "set_up_devices(DeviceConfig(platform='cpu', cpu_devices=2, compilation_cache=''))",
        "set_up_devices(DeviceConfig(platform='cpu', cpu_devices=2, compilation_cache='', xla_flags='--xla_a=1'))",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ConfigError: `device.xla_flags` is '--xla_a=1'" in done.stderr.splitlines()[-1]


def test_a_preset_that_xla_refuses_is_left_out(variables, monkeypatch, caplog):
    def refuse(flags):
        raise ValueError("Illegal value")

    monkeypatch.setattr(xla_flags, "_try", refuse)
    set_flags(DeviceConfig(platform="gpu", compilation_cache=""))
    assert "XLA_FLAGS" not in os.environ
    assert "left out: this jaxlib does not take them (Illegal value)" in caplog.text


def test_a_trial_that_fails_without_flags_too_says_nothing_of_them(variables, monkeypatch, tmp_path):
    monkeypatch.setattr(xla_flags, "TRIAL", "import sys; sys.exit(3)")
    variables.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    set_flags(DeviceConfig(platform="cpu", compilation_cache=str(tmp_path)))
    assert os.environ["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=true"


def test_to_a_file_of_flags_none_are_added(variables, monkeypatch, tmp_path, caplog):
    (tmp_path / "flags").write_text("--xla_cpu_enable_fast_math=false")
    variables.setenv("XLA_FLAGS", f"{tmp_path}/flags")
    monkeypatch.setattr(xla_flags, "_try", lambda flags: set())
    set_flags(DeviceConfig(platform="gpu", compilation_cache=""))
    assert os.environ["XLA_FLAGS"] == f"{tmp_path}/flags"
    assert "the preset is left out" in caplog.text
    with pytest.raises(ConfigError, match=r"`device.xla_flags` is '--xla_a=1'; expected 'auto' or '' where"):
        set_flags(DeviceConfig(platform="cpu", xla_flags="--xla_a=1", compilation_cache=""))


def test_quoted_values_may_have_spaces():
    assert flag_words("--xla_dump_to='a b'  --xla_c=3") == ["--xla_dump_to='a b'", "--xla_c=3"]
    DeviceConfig(xla_flags='--xla_dump_to="a b"')


def test_a_users_flags_stand_in_the_place_of_the_preset(variables, monkeypatch):
    monkeypatch.setattr(xla_flags, "_try", lambda flags: set())
    set_flags(DeviceConfig(platform="gpu", xla_flags="--xla_c=3", compilation_cache=""))
    assert os.environ["XLA_FLAGS"] == "--xla_c=3"


@pytest.mark.parametrize(
    ("platform", "variable", "expected"),
    [
        ("gpu", "", "gpu"),
        ("auto", "cpu", "cpu"),
        ("auto", "cuda,cpu", "gpu"),
        ("auto", "tpu", "tpu"),
        ("tpu", "cpu", "tpu"),
    ],
)
def test_the_platform_is_the_configs_or_the_variables(variables, platform, variable, expected):
    variables.setenv("JAX_PLATFORMS", variable)
    assert platform_of(DeviceConfig(platform=platform)) == expected
