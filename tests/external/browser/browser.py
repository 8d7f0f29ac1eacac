"""A headless browser: Debian's ``chromium`` and ``chromium-driver``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Timeout in s for a page to show what is expected.
PATIENCE = 30


def make_browser(mode: str, width: int) -> Any:
    """Start a browser; the caller calls ``quit``.

    :param mode: ``light`` or ``dark``.
    :param width: of the window, in pixels.
    """
    # Imported in the function: the module must be importable without selenium.
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
    ):
        options.add_argument(f"--{argument}")
    options.binary_location = "/usr/bin/chromium"
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, Service("/usr/bin/chromedriver"))
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": mode}]},
    )
    return browser


def wait_until(browser: Any, check: Callable[[Any], object]) -> None:
    """Wait until ``check`` returns a true value for the browser."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, PATIENCE).until(check)
