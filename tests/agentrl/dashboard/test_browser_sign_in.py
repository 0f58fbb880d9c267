"""Signing in and out in a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import KEY, Watch
from playwright.sync_api import Browser, BrowserContext, Page, expect

from agentrl.dashboard.sign_in import COOKIE


@pytest.fixture
def profile(browser: Browser) -> Iterator[BrowserContext]:
    """A profile that has not signed in."""
    context = browser.new_context()
    yield context
    context.close()


def enter(page: Page, key: str) -> None:
    page.get_by_label("Key").fill(key)
    page.get_by_role("button", name="Sign in").click()


def test_a_page_asks_for_a_key_and_is_shown_after_it(page: Page, site, profile: BrowserContext) -> None:
    watch = Watch.on(page)
    page.goto(f"{site.url}/ui/runs/test/search?text=say")
    expect(page).to_have_url(f"{site.url}/ui/sign-in?next=/ui/runs/test/search%3Ftext%3Dsay")
    expect(page.get_by_label("Key")).to_be_focused()
    enter(page, KEY)
    expect(page).to_have_url(f"{site.url}/ui/runs/test/search?text=say")
    (cookie,) = profile.cookies()
    assert (cookie["name"], cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (COOKIE, True, "Strict", "/ui")
    assert KEY not in cookie["value"]
    assert page.evaluate("document.cookie") == ""
    assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 0]
    assert watch.faults == []


def test_a_wrong_key_is_refused_with_a_reason(page: Page, site, profile: BrowserContext) -> None:
    page.goto(f"{site.url}/ui/runs/test")
    enter(page, "not the key")
    expect(page.get_by_role("alert")).to_have_text("this key is not the one of the printed link")
    assert profile.cookies() == []
    enter(page, KEY)  # and the page that was asked for is not forgotten
    expect(page).to_have_url(f"{site.url}/ui/runs/test")


def test_a_link_signs_in_and_leaves_no_key_in_the_history(page: Page, site) -> None:
    page.goto(f"{site.url}/ui/sign-in?next=/ui/runs/test#{KEY}")
    expect(page).to_have_url(f"{site.url}/ui/runs/test")
    page.go_back()
    page.wait_for_load_state()
    assert KEY not in page.url


def test_signing_out_forgets_the_cookie(page: Page, site, profile: BrowserContext) -> None:
    page.goto(f"{site.url}/ui/sign-in#{KEY}")
    page.get_by_role("button", name="Sign out").click()
    expect(page).to_have_url(f"{site.url}/ui/sign-in")
    assert profile.cookies() == []
    page.goto(f"{site.url}/ui/")
    expect(page.get_by_label("Key")).to_be_visible()


@pytest.mark.parametrize(
    "after",
    [
        pytest.param("https://evil.example/", marks=pytest.mark.long),
        "//evil.example/",
        pytest.param("/\\evil.example/", marks=pytest.mark.long),
        pytest.param("/ui/\\evil", marks=pytest.mark.long),
        "javascript:document.title='owned'",
        pytest.param("/ui\t//evil.example", marks=pytest.mark.long),
        pytest.param("/ui/%0d%0aset-cookie:x", marks=pytest.mark.long),
        "",
    ],
)
def test_the_page_after_the_sign_in_is_ours(page: Page, site, after: str) -> None:
    page.goto(f"{site.url}/ui/sign-in")
    page.locator("[name=next]").evaluate("(field, value) => { field.value = value; }", after)
    enter(page, KEY)
    page.wait_for_url(f"{site.url}/ui/**")
    assert page.evaluate("location.origin") == site.url
    assert "owned" not in page.title()


def test_a_form_of_another_site_changes_nothing(page: Page, site, profile: BrowserContext) -> None:
    page.goto(f"{site.url}/ui/sign-in#{KEY}")
    expect(page).to_have_url(f"{site.url}/ui/")
    form = f"<form method=post action='{site.url}/ui/sign-out'></form><script>document.forms[0].submit()</script>"
    page.route("http://localhost:9/**", lambda route: route.fulfill(body=form, content_type="text/html"))
    with page.expect_response("**/ui/sign-out") as answered:
        page.goto("http://localhost:9/")
    assert answered.value.status == 403
    assert [cookie["name"] for cookie in profile.cookies()] == [COOKIE]
