"""A service with one job and its two workers, in the event loop of the test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def call(tmp_path: Path) -> AsyncIterator[object]:
    from support.calling import playing  # needs FastAPI, without which no test asks for this

    async with playing(tmp_path) as caller:
        yield caller
