"""Every page in a real browser: no error, no violation of the policy, no fault of access, no sideways scroll."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
from browser import AXE, NARROW, WIDE, Watch, axe_faults, settled
from page_addresses import ADDRESSES, EVERY
from playwright.sync_api import Page

from agentrl.dashboard.dashboard_parts import POLICY
from agentrl.dashboard.pages import page_list


def test_every_page_has_an_address() -> None:
    missing = [page.path for page in page_list.PAGES if page.path not in ADDRESSES]
    assert missing == [], "give these pages an address in page_addresses.py"


@pytest.mark.parametrize("address", EVERY)
def test_a_page_opens_without_faults_in_every_look(page: Page, site, address: str) -> None:
    watch = Watch.on(page)
    answer = page.goto(site.address(address))
    settled(page)
    assert answer.status == 200
    assert answer.headers["content-security-policy"] == POLICY
    for size in (WIDE, NARROW):
        page.set_viewport_size(size)
        wide, room = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide <= room, f"the page is {wide} px wide in a window of {room} px"
    assert watch.faults == []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert axe_faults(page) == [], scheme
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4,h5')].map((one) => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


@pytest.mark.parametrize("path", [page.path for page in page_list.PAGES if page.template is None])
def test_data_is_json(page: Page, site, path: str) -> None:
    answer = page.goto(site.address(ADDRESSES[path]))
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.json()


def test_axe_is_the_file_of_its_release() -> None:
    for line in AXE.with_name("axe.sha256").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256(AXE.with_name(name).read_bytes()).hexdigest() == digest
