"""A headless browser from the system's packages, for tests that look at what a page draws.

It opens files alone and asks no network: its own background requests are switched off.
"""

import shutil
from contextlib import contextmanager

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--force-device-scale-factor=1"),
)
PATIENCE_S = 300  # for one command; a loaded machine takes seconds for the first page


@contextmanager
def headless_browser(folder):
    """Start a browser with a fresh profile in `folder`. Skips the test if this machine has none."""
    browser = next((found for name in NAMES if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    # What the page's script reports, its errors above all.
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # With both paths given, selenium looks for no driver and downloads none.
    made = webdriver.Chrome(options, Service(driver))
    made.set_page_load_timeout(PATIENCE_S)
    try:
        yield made
    finally:
        made.quit()
