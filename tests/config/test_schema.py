"""The schema: every key is described and used, and every name that it offers is in a registry."""

import ast
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from tlt_jax.config import Config, ConfigError, base, load_config, run_sections, schema, stage_sections
from tlt_jax.config.load import all_keys

PACKAGE = Path(schema.__file__).parents[1]
# The method's own names, known to everyone.
SELF_EVIDENT = {"beta1", "beta2"}


def sections(section: type[BaseModel] = Config) -> set[type[BaseModel]]:
    found = {section}
    for field in section.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= sections(field.annotation)
    return found


def is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def test_every_key_says_what_it_is():
    silent = {
        f"{section.__name__}.{name}"
        for section in sections()
        for name, field in section.model_fields.items()
        if not field.description and not is_section(field.annotation) and name not in SELF_EVIDENT
    }
    assert silent == set()


def test_every_default_is_within_its_own_range():
    for section in sections():
        defaults = {n: field.default for n, field in section.model_fields.items() if not is_section(field.annotation)}
        assert section.model_validate(defaults) == section()


def names_used_outside_the_config() -> set[str]:
    """Attributes that are read, and strings: names that `getattr` may be given."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "config":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


def test_every_key_is_used():
    used = names_used_outside_the_config()
    assert [key for key in all_keys() if key.split(".")[-1] not in used] == []


def test_all_keys_are_the_leaves():
    keys = all_keys()
    assert len(keys) == len(set(keys))
    assert {
        "stages",
        "run.seed",
        "device.mesh.fsdp",
        "align.ppo.value_optimizer.beta2",
        "data.source.hub_token",
    } <= set(keys)
    assert not {"run", "device.mesh", "align.ppo.value_optimizer"} & set(keys)


def registries():
    from tlt_jax.data.sources import SOURCES
    from tlt_jax.decode.controller import CONTROLLERS
    from tlt_jax.decode.drafters import DRAFTERS
    from tlt_jax.decode.verify import VERIFIERS
    from tlt_jax.observe.trackers import TRACKERS
    from tlt_jax.rl.rewards import REWARDS
    from tlt_jax.stages.pipeline import STAGES
    from tlt_jax.train.optimizers import OPTIMIZERS

    return {
        "OptimizerName": OPTIMIZERS,
        "Drafter": [*DRAFTERS, "auto"],
        "Verification": VERIFIERS,
        "ControllerName": CONTROLLERS,
        "RewardName": REWARDS,
        "TrackerName": TRACKERS,
        "SourceKind": SOURCES,
        "Stage": STAGES,
    }


@pytest.mark.parametrize("literal", list(registries()))
def test_the_registry_holds_what_the_config_offers(literal):
    assert list(typing.get_args(getattr(base, literal))) == list(registries()[literal])


def test_every_reward_has_a_weight():
    assert list(stage_sections.RewardWeights.model_fields) == list(typing.get_args(base.RewardName))


def test_every_stage_has_a_share_and_a_section():
    for stage in typing.get_args(base.Stage):
        assert stage in run_sections.BudgetConfig.model_fields
        assert stage in Config.model_fields


def test_steps_to_profile_are_read_as_they_are_written():
    assert load_config(None, ["profile.steps=10:15"]).profile.span == (10, 15)  # which YAML 1.1 takes for 615
    assert load_config(None, ["profile.steps=7:7"]).profile.span == (7, 7)
    assert load_config(None, []).profile.span is None
    for wrong in ("15:10", "0:3", "10", "10-15", "1:2:3", "first:last"):
        with pytest.raises(ConfigError, match=rf"`profile.steps`: is '?{wrong}'?; expected"):
            load_config(None, [f"profile.steps={wrong}"])


@pytest.mark.parametrize(
    "drafting", [["speculation.drafter=ngram"], ["speculation.drafter=eagle", "speculation.eagle_stages=[pretrain]"]]
)
def test_a_distillation_of_nothing_is_refused(drafting):
    config = ["stages=[distill]", *drafting]
    with pytest.raises(ConfigError, match=r"distill would train nothing: speculation\.drafter is '(ngram|eagle)'"):
        load_config(None, config)
    assert load_config(None, [*config, "speculation.drafter=shallow"]).stages == ["distill"]
