"""The mesh's sizes and the table of sharding rules."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from support import tiny

from tlt_jax.config import ConfigError
from tlt_jax.config.device_sections import DeviceConfig, MeshConfig
from tlt_jax.models.declare import table
from tlt_jax.models.heads import ScalarHead, ShallowExit
from tlt_jax.models.transformer import Transformer
from tlt_jax.parallel.mesh import MESH_AXES, arrange, compute_dtype, fast_groups, make_mesh, mesh_shape, slow_shape
from tlt_jax.parallel.sharding import RULES, constrain, named_sharding, partition, put_batch, replicated


@pytest.mark.parametrize(
    ("sizes", "devices", "expected"),
    [
        ({}, 8, (8, 1, 1)),
        ({}, 1, (1, 1, 1)),
        ({"tensor": 2}, 8, (4, 1, 2)),
        ({"data": 1, "fsdp": -1, "tensor": 2}, 8, (1, 4, 2)),
        ({"data": 2, "fsdp": 2, "tensor": -1}, 12, (2, 2, 3)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 8, (2, 2, 2)),
    ],
)
def test_what_is_left_goes_to_the_open_axis(sizes, devices, expected):
    assert mesh_shape(MeshConfig(**sizes), devices) == expected


@pytest.mark.parametrize(
    ("sizes", "devices"),
    [
        ({"tensor": 3}, 8),
        ({"data": 4}, 8),
        ({"data": 16}, 8),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 4),
        ({"tensor": 16}, 8),
    ],
)
def test_sizes_that_do_not_fit_the_devices_are_an_error_that_says_both(sizes, devices):
    with pytest.raises(ConfigError) as caught:
        mesh_shape(MeshConfig(**sizes), devices)
    text = str(caught.value)
    assert "`device.mesh`" in text
    assert f"a product of {devices}" in text
    assert all(f"{axis} {size}" in text for axis, size in sizes.items())


def test_the_mesh_has_our_axes_in_auto_mode():
    mesh = make_mesh(MeshConfig())
    assert mesh.axis_names == MESH_AXES == ("data", "fsdp", "tensor")
    assert mesh.axis_types == (AxisType.Auto,) * 3


def machines(hosts: int, each: int, platform: str = "gpu") -> list[SimpleNamespace]:
    """Devices as JAX describes them: `slice_index` is the host of a GPU, the slice of a TPU; a CPU has none."""
    numbered = [
        SimpleNamespace(id=i, platform=platform, device_kind=platform, process_index=i // each)
        for i in range(hosts * each)
    ]
    for device in numbered if platform != "cpu" else ():
        device.slice_index = device.process_index
    return numbered


@pytest.mark.parametrize(
    ("sizes", "hosts", "each", "platform", "expected"),
    [
        # data over the hosts, what is left within them
        ({"data": 8, "fsdp": 8}, 8, 8, "gpu", (8, 1, 1)),
        ({"data": 2, "fsdp": 8, "tensor": 4}, 8, 8, "gpu", (2, 4, 1)),
        ({"data": 1, "fsdp": 16, "tensor": 4}, 8, 8, "gpu", (1, 8, 1)),
        ({"data": 2, "tensor": 2}, 2, 2, "cpu", (2, 1, 1)),
        ({"tensor": 4, "data": 1}, 2, 2, "cpu", (1, 1, 2)),
        ({"data": 4, "fsdp": 2}, 1, 8, "gpu", (1, 1, 1)),
    ],
)
def test_the_outer_axes_run_between_hosts(sizes, hosts, each, platform, expected):
    devices = machines(hosts, each, platform)
    assert fast_groups(devices) == hosts
    config = MeshConfig(**sizes)
    shape = mesh_shape(config, len(devices))
    assert slow_shape(shape, hosts) == expected
    arranged = arrange(config, devices)
    assert sorted(device.id for device in arranged.flat) == list(range(len(devices)))
    for axis, across in enumerate(expected):
        lines = np.moveaxis(arranged, axis, -1).reshape(-1, shape[axis])
        assert {len({device.process_index for device in line}) for line in lines} == {across}


def test_within_a_tpu_slice_all_hosts_are_near():
    devices = machines(4, 4, "tpu")
    for device in devices:
        device.slice_index = 0
    assert fast_groups(devices) == 1


def test_activations_are_float32_on_the_cpu_unless_asked():
    assert compute_dtype(DeviceConfig()) == jnp.float32
    assert compute_dtype(DeviceConfig(compute_dtype="bfloat16")) == jnp.bfloat16


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("embed", "heads", "head_dim"), P("fsdp", "tensor", None)),
        (("layers", "hidden", "embed"), P(None, "tensor", "fsdp")),
        (("vocab", "embed"), P("tensor", "fsdp")),
        (("batch", None, "vocab"), P(("data", "fsdp"), None, "tensor")),
        ((), P()),
    ],
)
def test_the_table_maps_logical_axes_to_the_meshs(axes, expected):
    assert partition(axes) == expected


def test_an_unknown_axis_is_our_own_mistake():
    with pytest.raises(KeyError, match="widht"):
        partition(("widht",))


def test_every_declared_axis_is_in_the_table():
    modules = (Transformer, ShallowExit, ScalarHead)
    axes = {
        axis
        for module in modules
        for spec in table(lambda d, m=module: m(tiny.SHAPE, d)).values()
        for axis in spec.axes
        if axis
    }
    assert axes <= RULES.keys()


MESH_222 = AbstractMesh((2, 2, 2), MESH_AXES)


def test_a_dimension_that_the_mesh_does_not_divide_is_an_error_that_names_the_array():
    assert named_sharding(MESH_222, ("embed", "kv_heads", None), (16, 2, 4), "key").spec == P("fsdp", "tensor", None)
    with pytest.raises(ConfigError) as caught:
        named_sharding(MESH_222, ("embed", "kv_heads", None), (16, 3, 4), "layers/attention/key")
    assert (
        str(caught.value)
        == "`device.mesh`: layers/attention/key has kv_heads = 3, which 2 devices (tensor) do not divide"
    )
    with pytest.raises(ConfigError, match=r"batch = 6, which 4 devices \(data, fsdp\)"):
        named_sharding(MESH_222, ("batch",), (6,))


def test_outside_a_mesh_a_constraint_does_nothing():
    x = jnp.ones((4, 3))
    assert constrain(x, "batch", None) is x


def test_batches_are_split_after_their_leading_axes():
    mesh = tiny.mesh()
    placed = put_batch(mesh, {"x": np.ones((3, 4, 2), np.float32)}, leading=1)["x"]
    assert placed.sharding.spec == P(None, ("data", "fsdp"))
    assert put_batch(mesh, np.ones(4)).sharding.spec == P(("data", "fsdp"))
    assert replicated(mesh).spec == P()
