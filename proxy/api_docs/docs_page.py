"""`/docs`: the routes of `/openapi.json` as one page of HTML, without scripts and other servers."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

from agentrl.domain.schemas import Json

router = APIRouter(include_in_schema=False)
HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'", "referrer-policy": "no-referrer"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c2430; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #d5dae1; }
details { margin: .4rem 0; } summary { cursor: pointer; }
code { font: 13px ui-monospace, monospace; } .method { display: inline-block; min-width: 4.5rem; font-weight: 600; }
.about { color: #55606e; } dt { font-family: ui-monospace, monospace; font-size: 13px; }
dd { margin: 0 0 .3rem 1.5rem; }
"""


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """Every route with its parameters, its body's fields and its errors."""
    return HTMLResponse("".join(page(request.app.openapi())), headers=HEADERS)


def page(schema: Json) -> Iterator[str]:
    """The HTML of an OpenAPI description, in parts."""
    title = escape(f"{schema['info']['title']} {schema['info']['version']}")
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    yield f'<h1>{title}</h1><p>Machine-readable: <a href="openapi.json">openapi.json</a></p>'
    for tag, operations in _by_tag(schema).items():
        yield f"<h2>{escape(tag)}</h2>"
        for method, path, operation in operations:
            yield from _operation(schema, method, path, operation)
    yield "</html>"


def _by_tag(schema: Json) -> dict[str, list[tuple[str, str, Json]]]:
    found: dict[str, list[tuple[str, str, Json]]] = {}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            found.setdefault(operation.get("tags", ["other"])[0], []).append((method.upper(), path, operation))
    return found


def _operation(schema: Json, method: str, path: str, operation: Json) -> Iterator[str]:
    about = operation.get("description") or operation.get("summary", "")
    yield f'<details><summary><span class="method">{method}</span><code>{escape(path)}</code> '
    yield f'<span class="about">{escape(about)}</span></summary><dl>'
    for parameter in operation.get("parameters", []):
        yield _field(parameter["name"], parameter["schema"], parameter["in"], parameter.get("description", ""))
    for name, field in _body(schema, operation).items():
        yield _field(name, field, "body", field.get("description", ""))
    for status, answer in operation["responses"].items():
        yield f"<dt>{escape(status)}</dt><dd>{escape(answer['description'])}</dd>"
    yield "</dl></details>"


def _body(schema: Json, operation: Json) -> Json:
    content = operation.get("requestBody", {}).get("content", {})
    shape = content.get("application/json", {}).get("schema", {})
    if "$ref" in shape:
        shape = schema["components"]["schemas"][shape["$ref"].rpartition("/")[2]]
    fields: Json = shape.get("properties", {})
    return fields


def _field(name: str, shape: Json, where: str, about: str) -> str:
    kinds = [str(one.get("type") or one.get("$ref", "").rpartition("/")[2] or "value") for one in _choices(shape)]
    said = " · ".join(part for part in (where, " or ".join(dict.fromkeys(kinds)), about) if part)
    return f"<dt>{escape(name)}</dt><dd>{escape(said)}</dd>"


def _choices(shape: Json) -> list[Json]:
    choices: list[Json] = shape.get("anyOf", [shape])
    return choices
