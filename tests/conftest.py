"""One compilation cache for a test session, shared by its workers and by the processes that its tests start; and in
which order the tests run."""

import os

import jax
import pytest

# Modules that take minutes. They begin first, so that the workers, who take whole modules, end at about the same time.
LONGEST = ("test_program.py", "test_eight_devices.py", "test_lossless.py", "test_step.py", "test_readme.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = str(shared / "compiled")
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    os.environ["TLT_JAX_TEST_COMPILED"] = folder
    return folder
