"""Sign-in and sign-out: forms that set and forget the cookie."""

from __future__ import annotations

from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from agentrl.dashboard import page_rendering
from agentrl.dashboard.dashboard_parts import HEADERS, ROOT, dashboard_of
from agentrl.dashboard.sign_in import COOKIE, LASTS_S
from agentrl.errors import RequestError
from agentrl.store.db.codec import hash_key

FORM_BYTES, FORM_FIELDS = 4096, 4


async def sign_in_form(request: Request) -> Response:
    """The page that asks for a key."""
    return sign_in_page(page_after(request.query_params.get("next")))


async def sign_in(request: Request) -> Response:
    """Check a key and set the cookie."""
    _refuse_other_sites(request)
    form = _fields(await _body(request))
    key, after = form.get("key", [""])[0].strip(), page_after(form.get("next", [""])[0])
    dashboard = dashboard_of(request)
    try:
        await dashboard.door.find(hash_key(key))
    except RequestError as error:
        return sign_in_page(after, str(error), error.status)
    response = RedirectResponse(after, 303, headers=HEADERS)
    secure = dashboard.secure or request.url.scheme == "https"
    response.set_cookie(
        COOKIE,
        dashboard.signer.cookie(key),
        max_age=LASTS_S,
        path=ROOT,
        httponly=True,
        samesite="strict",
        secure=secure,
    )
    return response


async def sign_out(request: Request) -> Response:
    """Forget the cookie."""
    _refuse_other_sites(request)
    response = RedirectResponse(f"{ROOT}/sign-in", 303, headers=HEADERS)
    response.delete_cookie(COOKIE, path=ROOT, httponly=True, samesite="strict")
    return response


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > FORM_BYTES:
            raise RequestError(413, "the form is too large", code="too_large")
    return body


def _fields(body: bytes) -> dict[str, list[str]]:
    """The fields of a form. Raises RequestError 400 for more than a sign-in has."""
    try:
        return parse_qs(body.decode("utf-8", "replace"), max_num_fields=FORM_FIELDS)
    except ValueError as error:
        raise RequestError(400, "the form has too many fields", code="invalid_form") from error


def _refuse_other_sites(request: Request) -> None:
    """Raise RequestError 403 for a form that another site's page has sent."""
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):  # "null": a sandboxed frame
        raise RequestError(403, "this form is on another site", code="forbidden")
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise RequestError(403, "this form is on another site", code="forbidden")


def page_after(asked: str | None) -> str:
    """Where to go after the sign-in: a page of ours."""
    fits = asked is not None and asked.startswith(f"{ROOT}/") and asked.isascii() and asked.isprintable()
    return asked if fits and asked is not None and "\\" not in asked else f"{ROOT}/"


def sign_in_page(after: str, problem: str | None = None, status: int = 200) -> Response:
    """The page that asks for a key, perhaps because of a problem with another one."""
    body = page_rendering.render("sign_in.html", after=after, problem=problem, run=None, title="Sign in")
    return Response(body, status, media_type="text/html", headers=HEADERS)
