"""Small models with random values everywhere, norms included, so that no mistake hides behind ones and zeros."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.models.declare import Declare, flatten, table, unflatten
from tlt_jax.models.heads import ShallowExit
from tlt_jax.models.transformer import ModelShape, Transformer

STORIES = Path(__file__).resolve().parents[3] / "shared" / "data" / "stories260k" / "hf"
# No two sizes are equal, so that a wrong axis is a wrong shape.
SHAPE = ModelShape(
    vocab=61,
    width=24,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=10,
    hidden=34,
    exit_layer=2,
    exit_rank=5,
    rope_theta=5_000.0,
    norm_eps=3e-6,
    tied=False,
)


@pytest.fixture
def stories():
    if not STORIES.is_dir():
        pytest.skip("the shared folder with the real model stories260k is absent")
    return STORIES


@pytest.fixture
def shape():
    """make(**changes) -> ModelShape."""
    return lambda **changes: replace(SHAPE, **changes)


@pytest.fixture
def random_module():
    """make(shape, cls=Transformer, seed=0) -> the module with random arrays."""

    def make(s, cls=Transformer, seed=0):
        rng = np.random.default_rng(seed)
        arrays = {}
        for path, spec in table(lambda declare: cls(s, declare)).items():
            noise = rng.normal(size=spec.shape).astype(np.float32)
            scale = spec.init if isinstance(spec.init, float) else 0.2
            arrays[path] = jnp.asarray((spec.init == "ones") + scale * noise, jnp.float32)
        like = cls(s, Declare(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32)))
        return unflatten(like, arrays)

    return make


@pytest.fixture
def numpy_weights(random_module):
    """make(shape, cls=Transformer, seed=0) -> {path: array}."""

    def make(s, cls=Transformer, seed=0):
        return {path: np.asarray(a) for path, a in flatten(random_module(s, cls, seed)).items()}

    return make


@pytest.fixture
def numpy_drafter(numpy_weights):
    """make(shape) -> {path: array} of a drafter."""
    return lambda s: numpy_weights(s, ShallowExit, 7)
