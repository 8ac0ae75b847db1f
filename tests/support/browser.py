"""A page of this machine in headless Chromium, with all that it said and asked for."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)"
)
TIMEOUT_MS = 1_800_000  # on a busy machine


@dataclass
class Visit:
    """An opened page. `console`: its messages and errors; `requests`: addresses; `dialogs`:
    alerts."""

    page: Page
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the installed Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=TIMEOUT_MS
        )
        yield browser
        browser.close()


def visit(browser: Browser, path: Path, *, width: int = 1280, scheme: Any = "light") -> Visit:
    """Open the file at `path` in a window `width` pixels wide."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    context.set_default_timeout(TIMEOUT_MS)
    visited = Visit(context.new_page())
    visited.page.on("console", lambda message: visited.console.append(message.text))
    visited.page.on("pageerror", lambda error: visited.console.append(str(error)))
    visited.page.on("request", lambda request: visited.requests.append(request.url))
    visited.page.on(
        "dialog", lambda dialog: (visited.dialogs.append(dialog.message), dialog.dismiss())
    )
    visited.page.goto(path.as_uri())
    return visited
