"""The page /docs: every route, and nothing that a browser would load or run."""

from html.parser import HTMLParser
from typing import Any

import httpx

from agentrl.proxy.api_docs.docs_page import page
from agentrl.proxy.app import routes


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]


async def test_the_page_names_every_route_and_loads_nothing() -> None:
    app = routes()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as http:
        answer = await http.get("/docs")
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    found = Tags()
    found.feed(answer.text)
    assert "script" not in found.tags
    assert found.links == ["openapi.json"]
    assert "/redoc" not in {getattr(route, "path", "") for route in app.routes}
    schema: dict[str, Any] = app.openapi()
    assert len(schema["paths"]) > 30
    for path in schema["paths"]:
        assert f"<code>{path}</code>" in answer.text


def test_what_a_description_says_is_text() -> None:
    evil = "<script>alert(1)</script>"
    operation = {
        "summary": evil,
        "responses": {"200": {"description": evil}},
        "parameters": [{"name": evil, "in": "query", "schema": {"type": evil}}],
    }
    shown = "".join(page({"info": {"title": evil, "version": evil}, "paths": {evil: {"get": operation}}}))
    assert "<script" not in shown
