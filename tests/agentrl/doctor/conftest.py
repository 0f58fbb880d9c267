"""A real proxy, as in tests/proxy; only the model is scripted."""

from __future__ import annotations

from borrowed import proxy_fixtures

_shared = proxy_fixtures("doctor_proxy_conftest")
database_kind, run_config, store_url, proxy, second = (
    getattr(_shared, name) for name in ("database_kind", "run_config", "store_url", "proxy", "second")
)
