"""Parity with transformers on PyTorch: models that both sides hold, and the real one that lies in the shared folder."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.config.device_sections import MeshConfig
from tlt_jax.models.declare import Declare, table, unflatten
from tlt_jax.models.transformer import Transformer, hidden_states, logits
from tlt_jax.parallel.mesh import make_mesh

STORIES = Path(__file__).resolve().parents[3] / "shared" / "data" / "stories260k" / "hf"


@pytest.fixture
def stories():
    if not STORIES.is_dir():
        pytest.skip("the shared folder with the real model stories260k is absent")
    return STORIES


@pytest.fixture
def mesh():
    return make_mesh(MeshConfig())


@pytest.fixture
def random_arrays():
    """make(shape, cls=Transformer, seed=0) -> {path: float32 array}, norms off 1 so that a mix-up shows."""

    def make(s, cls=Transformer, seed=0):
        rng = np.random.default_rng(seed)
        arrays = {}
        for path, spec in table(lambda declare: cls(s, declare)).items():
            scale = spec.init if isinstance(spec.init, float) else 0.1
            arrays[path] = ((spec.init == "ones") + scale * rng.normal(size=spec.shape)).astype(np.float32)
        return arrays

    return make


@pytest.fixture
def as_module():
    """make(shape, arrays, cls=Transformer) -> the module that holds the arrays."""

    def make(s, arrays, cls=Transformer):
        like = cls(s, Declare(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32)))
        return unflatten(like, {path: jnp.asarray(array) for path, array in arrays.items()})

    return make


@pytest.fixture
def our_logits():
    """logits(model, ids [S]) -> [S, V]."""

    @jax.jit
    def whole(model, tokens_BS):
        positions = jnp.arange(tokens_BS.shape[1])[None]
        _, x = hidden_states(model, tokens_BS, jnp.ones_like(tokens_BS), positions, dtype=jnp.float32)
        return logits(model, x)[0]

    return lambda model, ids: np.asarray(whole(model, jnp.asarray([ids], jnp.int32)))
