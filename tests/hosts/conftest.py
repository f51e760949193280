"""What the tests of a host share: a server of forks that has the hosts, and the bodies of a module, run once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support import forks

if TYPE_CHECKING:
    from support.hosts import Found


@pytest.fixture(scope="session", autouse=True)
def hosts_are_loaded() -> None:
    """Ranks find the hosts imported."""
    forks.load(*forks.HOSTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, folder: str) -> Found:
    """What each body that is marked ``@together`` in the module returned on three ranks."""
    from support.hosts import run_bodies

    return run_bodies(3, request.module.together, folder)
