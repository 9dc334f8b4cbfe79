"""Report pages in a real browser: Debian's Chromium through Playwright. ``make browser`` installs both and runs these.

They are collected where the command line names this folder only: ``make test`` does without a browser.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from partitioner.pictures.page import render_page
from tests.support.made_reports import hostile_report, made_report, two_reports

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

REPORTS = {
    "small": made_report,
    "large": lambda: made_report(stages=8, layers=80, ops_in_a_layer=125, microbatches=32),
    "many_stages": lambda: made_report(stages=20, layers=40),
    "hostile": hostile_report,
    "two": two_reports,
}
WIDTH, HEIGHT = 1400, 900
READY_MS = 10_000
"""A page that is not drawn after this long hangs; the tests of times ask for far less."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if any("browser" in argument for argument in config.args) else True


@dataclass
class Opened:
    """One open page, and what it asked for or complained about."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def box(self, name: str) -> Any:
        """Find the first box of the graph that a screen reader would read beginning with ``name``."""
        return self.page.locator(f'#graph .box[aria-label^="{name}"]').first

    def boxes(self) -> int:
        return self.page.locator("#graph .box").count()

    def details(self) -> str:
        return str(self.page.locator(".graph-details").first.inner_text())


class Opener:
    """Opens report pages from files, and keeps what they complain about."""

    def __init__(self, browser: Browser, folder: Path) -> None:
        self.browser, self.folder, self.opened = browser, folder, list[Opened]()

    def __call__(self, name: str, theme: str = "light", width: int = WIDTH) -> Opened:
        path = self.folder / f"{name}.html"
        if not path.exists():
            path.write_text(render_page(REPORTS[name]()), encoding="utf-8")
        return self.file(path, theme, width)

    def data(self, data: Mapping[str, Any]) -> Opened:
        """Open the page of any data."""
        path = self.folder / f"data-{len(self.opened)}.html"
        path.write_text(render_page(data), encoding="utf-8")
        return self.file(path)

    def file(self, path: Path, theme: str = "light", width: int = WIDTH) -> Opened:
        """Open a page that exists already and wait until it has drawn everything."""
        page = self.browser.new_page(
            viewport={"width": width, "height": HEIGHT}, color_scheme="dark" if theme == "dark" else "light"
        )
        opened = Opened(page)
        page.on("request", lambda request: opened.requests.append(request.url))
        page.on("console", lambda message: opened.complaints.append(message.text))
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached", timeout=READY_MS)
        self.opened.append(opened)
        return opened


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    assert program, "no Chromium found: `make browser` installs it"
    with sync_playwright() as playwright:
        # Chromium refuses its sandbox to root, and CI runs as root. The only pages it opens are ours.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture
def open_page(browser: Browser, pages: Path) -> Iterator[Opener]:
    """Open pages; afterwards none of them may have asked for anything but itself, or complained."""
    opener = Opener(browser, pages)
    yield opener
    for opened in opener.opened:
        opened.page.close()
        assert opened.complaints == []
        assert [url for url in opened.requests if not url.startswith("file://")] == []
        assert len(opened.requests) == 1
