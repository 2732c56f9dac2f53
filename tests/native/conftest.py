from __future__ import annotations

from collections.abc import Iterator

import pytest

import sinks_family


@pytest.fixture(scope="module", autouse=True)
def family_with_sinks() -> Iterator[None]:
    with sinks_family.registered():
        yield
