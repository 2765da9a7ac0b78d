"""Several processes as one program: joining, what all agree on, and what crosses between them and the host.

In one process every function here is what it looks like, at no cost.
"""

import hashlib
import json
import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tlt_jax import __version__
from tlt_jax.config import ConfigError
from tlt_jax.config.device_sections import DeviceConfig
from tlt_jax.parallel.peers import Alone, Peers, meet, split_address

Company = Alone | Peers
LOSS_SECONDS = 5.0  # how long after an error a peer's loss may become known
REFUSED = 2  # the exit code for what the user can mend
failed = threading.Event()  # this process has left the others: JAX would wait for them when it ends by itself


class Together(Exception):
    """An end before the end that all processes reach together, so that they can part in peace."""


@contextmanager
def join(config: DeviceConfig, agreed: Any) -> Iterator[Company]:
    """Joins the other processes of the run, if the config names a coordinator, before JAX touches a device; parts from
    them at the end, or tells them why this one fails.

    `agreed` (plain values) must be the same in all. Raises ConfigError where they cannot come together.
    """
    if config.coordinator is None:
        yield Alone()
        return
    process = config.process
    assert process is not None
    token = hashlib.sha256(json.dumps([agreed, __version__, jax.__version__, config.processes]).encode()).hexdigest()
    peers = meet(config.coordinator, config.processes, process, token, config.join_seconds)
    try:
        host, port = split_address(config.coordinator)
        jax.distributed.initialize(
            config.coordinator,
            config.processes,
            process,
            cluster_detection_method="deactivate",
            coordinator_bind_address=f"{socket.gethostbyname(host)}:{port}",
            initialization_timeout=math.ceil(config.join_seconds),
            shutdown_timeout_seconds=math.ceil(config.join_seconds),
        )
        yield peers
    except Together:
        _part(peers)
        raise
    except BaseException as error:
        # A collective that fails is often the first sign that a peer is lost: the watch then knows better what to say.
        if isinstance(error, ConfigError):
            peers.fail(str(error), REFUSED)
        elif peers.wait_for_loss(LOSS_SECONDS) is None:
            peers.fail(" ".join(f"{type(error).__name__}: {error}".split())[:500])
        failed.set()
        raise
    _part(peers)


def _part(peers: Peers) -> None:
    peers.agree("the end", None)
    jax.distributed.shutdown()
    peers.close()


def to_host(tree: Any) -> Any:
    """The whole arrays of `tree` as NumPy's, in every process; all must ask together."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(_whole, tree)


def _whole(array: Any) -> np.ndarray:
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def put(tree: Any, shardings: Any) -> Any:
    """Host arrays, the same in every process, laid out by `shardings`; each process copies its own part alone."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def one(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(lambda array: one(array, shardings), tree)
    return jax.tree.map(one, tree, shardings)
