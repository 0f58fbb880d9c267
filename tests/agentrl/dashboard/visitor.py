"""A visitor of the dashboard without a browser: signs in, opens pages, follows links."""

from __future__ import annotations

from html.parser import HTMLParser

from starlette.testclient import TestClient

from agentrl.dashboard import own_server
from agentrl.store import Database

KEY = "arl-ui-of-a-test"


class _Links(HTMLParser):
    """The links of a page with their text, and all its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[int] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self._open.append(len(self.links))
            self.links.append((dict(attrs).get("href") or "", ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "a" and self._open:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        for at in self._open:
            href, text = self.links[at]
            self.links[at] = (href, text + data)


class Visitor:
    """Signed in to the dashboard of a database. `page` is the HTML of the page that is open."""

    def __init__(self, database: Database) -> None:
        self.client = TestClient(own_server.application(database, KEY), base_url="http://127.0.0.1")
        assert self.client.post("/ui/sign-in", data={"key": KEY}, follow_redirects=False).status_code == 303
        self.address, self.page, self.clicks = "", "", -1

    def open(self, address: str, status: int = 200) -> str:
        """Open a page; returns its HTML."""
        answer = self.client.get(address, headers={"accept": "text/html"})
        assert answer.status_code == status, (address, answer.status_code, answer.text[:500])
        self.address, self.page, self.clicks = address, answer.text, self.clicks + 1
        return self.page

    def follow(self, text: str) -> str:
        """Click on the first link whose text or address contains `text`; returns the new page's HTML."""
        found = [href for href, shown in _Links(self.page).links if text in shown or text in href]
        assert found, f"no link {text!r} on {self.address}"
        return self.open(found[0].partition("#")[0])

    @property
    def text(self) -> str:
        """The text of the page."""
        return " ".join(_Links(self.page).text.split())
