"""One Ray for all tests of this folder, kept small and quiet."""

import logging

import pytest


@pytest.fixture(scope="session")
def cluster():
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=200 * 2**20,
    )
    yield ray
    ray.shutdown()
