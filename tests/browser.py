"""A real Chromium for the tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium, else the one that `playwright install` has fetched."""
    from playwright.sync_api import Error, sync_playwright

    own = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(executable_path=own, args=ARGUMENTS)
        except Error as error:
            if own is None:
                pytest.skip(f"needs Chromium ({str(error).splitlines()[0]})")
            raise
        yield browser
        browser.close()
