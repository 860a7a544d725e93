"""A real Chromium for the tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def installed() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def software_gpu(page: Page) -> Iterator[Browser]:
    """A second Chromium by the driver of `page`, whose WebGPU computes in software."""
    assert page.context.browser is not None
    words = [word for word in ARGUMENTS if word != "--disable-gpu"]
    browser = page.context.browser.browser_type.launch(
        executable_path=installed(), args=[*words, "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]
    )
    yield browser
    browser.close()


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium, else the one that `playwright install` has fetched."""
    from playwright.sync_api import Error, sync_playwright

    own = installed()
    with sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(executable_path=own, args=ARGUMENTS)
        except Error as error:
            if own is None:
                pytest.skip(f"needs Chromium ({str(error).splitlines()[0]})")
            raise
        yield browser
        browser.close()
