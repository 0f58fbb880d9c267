"""One proxy for the tests of a module; those of admission and whole stores override it."""

import pytest


@pytest.fixture
def proxy(shared_proxy):
    return shared_proxy
