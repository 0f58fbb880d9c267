"""The description of the API is true: schemathesis asks every route for what it describes, and for what it does not."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from starlette.routing import Route
from thoroughness import examples

from agentrl.proxy.app import routes
from agentrl.store.audit import run_audit

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    ignored_auth,
    unsupported_method,
]


def test_every_model_route_is_described():
    app = routes()
    described = app.openapi()["paths"]
    served = [route for route in app.routes if isinstance(route, Route) and "/v1/" in route.path]
    served = [route for route in served if "/v1/v1/" not in route.path]  # a second address of a route
    assert len(served) >= 12
    for route in served:
        for method in (route.methods or set()) - {"HEAD"}:
            assert method.lower() in described[route.path], f"{method} {route.path}"
    chat = described["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatBody"}
    assert {"200", "400", "503"} <= set(chat["responses"])
    assert "422" not in chat["responses"]
    assert "500" not in chat["responses"]
    assert app.openapi()["components"]["schemas"]["ChatBody"]["required"] == ["messages"]


def test_a_start_of_a_session_describes_its_group():
    described = routes().openapi()
    fields = described["components"]["schemas"]["SessionBody"]["properties"]
    assert fields["group"]["anyOf"][0] == {"type": "string", "minLength": 1, "maxLength": 200}
    assert fields["group_size"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 1024}
    for code in ("group_full", "group_closed", "group_differs"):
        assert code in described["paths"]["/sessions"]["post"]["description"]


@pytest.fixture
def api(proxy):
    return schemathesis.openapi.from_url(proxy.url + "/openapi.json")


@pytest.mark.searches
def test_every_route_answers_as_it_is_described(proxy, api):
    for operation in (found.ok() for found in api.get_all_operations()):
        _examine(proxy, operation)
    with proxy.database.read() as conn:
        assert list(run_audit.scan(conn, proxy.run_id)) == []


def _examine(proxy, operation):
    session = proxy.session(sampling={"temperature": 1.0})
    named = "{session_id}" in operation.path

    @settings(
        max_examples=examples(4),
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def examine(data):
        mode = data.draw(st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE]))
        case = data.draw(operation.as_strategy(generation_mode=mode))
        likely = data.draw(st.booleans())  # that the call gets past its names
        if likely and named:
            case.path_parameters["session_id"] = session["session_id"]
        if likely and "/v1/" in operation.path:
            case.headers["x-session-id"] = session["session_id"]
            if isinstance(case.body, dict):
                case.body["model"] = "test"
        key = data.draw(st.sampled_from(["admin-key", "run-key", session["api_key"]]))
        case.call_and_validate(checks=CHECKS, headers={"Authorization": f"Bearer {key}"}, timeout=20)

    examine()
