"""Pages that follow their run, and the way from a band of the picture down to a session and back."""

from __future__ import annotations

import pytest
from browser import Watch, settled, until
from playwright.sync_api import Browser, Page, expect


def samples(page: Page) -> int:
    label = page.locator("#live-samples svg.picture").get_attribute("aria-label")
    return int(label.split()[1].replace(",", ""))


def test_a_change_appears_on_an_open_page_without_a_reload(browser: Browser, own_site) -> None:
    context = own_site.served.signed_in(browser)
    page = context.new_page()
    watch = Watch.on(page)
    page.goto(f"{own_site.url}/ui/runs/test")
    settled(page)
    page.evaluate("window.same = true")
    before = samples(page)
    own_site.history.train(1)  # at once: perhaps before the page listens, and while its copy is shared
    expect(page.locator("#live-facts")).to_contain_text("4 of 1000")
    assert samples(page) > before
    own_site.history.group()
    now = samples(page)
    until(page, f"!document.querySelector('#live-samples svg').getAttribute('aria-label').includes(' {now} ')")
    assert page.evaluate("window.same")
    assert watch.faults == []
    context.close()


@pytest.mark.long
def test_two_open_pages_cost_one_watcher(browser: Browser, own_site) -> None:
    context = own_site.served.signed_in(browser)
    live = own_site.served.parts.live
    pages = [context.new_page() for _ in range(2)]
    for page in pages:
        with page.expect_response(lambda answer: "/live" in answer.url):
            page.goto(f"{own_site.url}/ui/runs/test")
    assert (live.watchers, live.listeners) == (1, 2)
    own_site.history.train(1)
    for page in pages:
        page.bring_to_front()
        expect(page.locator("#live-facts")).to_contain_text("4 of 1000")
    assert (live.watchers, live.listeners) == (1, 2)
    context.close()


def test_from_a_band_to_its_samples_to_a_session_and_back(page: Page, site) -> None:
    page.goto(f"{site.url}/ui/runs/test")
    band = page.locator("#live-samples svg a[href*='band=trained']").first
    band.focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{site.url}/ui/runs/test/samples?band=trained")
    expect(page.get_by_role("heading", level=1)).to_have_text("Samples: trained")
    link = page.locator(f"a[href='/ui/sessions/{site.session_id}']").first
    with page.expect_response(lambda answer: answer.url.endswith(site.session_id)) as opened:
        link.click()
    assert opened.value.status == 200
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("Samples: trained")
    page.go_back()
    expect(page.locator("#live-samples svg")).to_be_visible()
    page.mouse.move(0, 0)
    page.locator("#live-samples svg a[href*='band=trained'] rect").click()
    expect(page).to_have_url(f"{site.url}/ui/runs/test/samples?band=trained")


@pytest.mark.parametrize("address", ["/runs/test", "/compare?run=test&run=second"])
def test_any_metric_is_drawn_by_its_name(page: Page, site, address: str) -> None:
    page.goto(f"{site.url}/ui{address}")
    settled(page)
    until(page, "[...document.querySelectorAll('#metrics option')].some((one) => one.value === 'loss')")
    page.get_by_label("Another metric").fill("loss")
    page.keyboard.press("Enter")
    expect(page.locator("#others figure[data-chart='loss'] canvas")).to_be_visible()
