"""Every test runs with strict dtype promotion, no silent rank promotion, and eight virtual CPU devices."""

import os

if "JMOE_TEST_GPU" not in os.environ:  # the GPU suite (tests/gpu) sets this and sees the real devices
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import hypothesis
import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in every run; JMOE_TEST_RANDOM=1 searches for new ones.
hypothesis.settings.register_profile("jmoe", derandomize="JMOE_TEST_RANDOM" not in os.environ)
hypothesis.settings.load_profile("jmoe")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def key():
    return jax.random.key(0)


def pytest_collection_modifyitems(config, items):
    has_gpu = any(d.platform == "gpu" for d in jax.devices())
    if not has_gpu:
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU; run `JMOE_TEST_GPU=1 pytest tests/gpu` on one")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
