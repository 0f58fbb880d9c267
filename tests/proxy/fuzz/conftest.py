"""A proxy that is sent hostile requests."""

import httpx
import pytest

from .tried_calls import Fuzz


@pytest.fixture
def fuzz(proxy):
    proxy.http = httpx.Client(timeout=120)
    found = Fuzz(proxy)
    yield found
    found.done()
    proxy.http.close()
