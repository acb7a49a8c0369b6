"""What a real browser draws from the page of a run: curves, axes, values below the pointer, and nothing from a hostile name.

The expected places of points are computed from the metrics and the marks on the axes, never read from the page's script.
"""

import json
import shutil
from itertools import pairwise
from math import log

import pytest
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from tests.support.step_records import ENGINE, write_run
from torchround.observe.record import PromptSample
from torchround.observe.run_page import write_page

WIDTH, HEIGHT = 1300, 1400
NARROW = 400  # pixels, the width of a telephone
PANELS = ["loss", "lr", "grad_norm", "tokens_per_s", "bubble", "device_memory", "host_memory"]


NAMES = ("chromium", "chromium-browser", "google-chrome")
# It opens files alone and asks no network: its own background requests are switched off.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--force-device-scale-factor=1"),
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found, driver = next(filter(None, map(shutil.which, NAMES)), None), shutil.which("chromedriver")
    if found is None or driver is None:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = found
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    # What the page's script reports, its errors above all.
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # With both paths given, selenium looks for no driver and downloads none.
    made = webdriver.Chrome(options, Service(driver))
    made.set_page_load_timeout(300)  # a loaded machine takes seconds for the first page
    yield made
    made.quit()


@pytest.fixture(autouse=True)
def wide(browser):
    browser.set_window_size(WIDTH, HEIGHT)


def show(browser, page):
    browser.get(page.as_uri())
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def one_run(folder):
    write_run(folder / "run", range(1, 9), validated=(4, 8), **ENGINE)
    write_page([folder / "run"], folder / "page.html")
    return folder / "page.html"


def panel(browser, key):
    return browser.find_element(By.ID, f"panel-{key}")


def curves(where):
    found = {}
    for line in where.find_elements(By.CSS_SELECTOR, "path.curve"):
        corners = (line.get_attribute("d") or "").replace("M", "").split("L")
        points = [tuple(map(float, corner.split(","))) for corner in corners]
        found[line.get_attribute("data-name") or ""] = [(x, y) for x, y in points]
    return found


def marks(where, axis):
    texts = where.find_elements(By.CSS_SELECTOR, f"text.{axis}")
    found = [(float(text.get_attribute(axis) or ""), _value(text.text)) for text in texts]
    return sorted(found, key=lambda mark: mark[1])


def _value(text):
    for ending, factor in ((" %", 0.01), ("K", 1e3), ("M", 1e6)):
        if text.endswith(ending):
            return float(text.removesuffix(ending)) * factor
    return float(text)


def read_off(places, of_marks):
    (first, low), (last, high) = of_marks[0], of_marks[-1]
    return [low + (place - first) / (last - first) * (high - low) for place in places]


def metrics(run, key):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def test_each_panel_draws_the_values_of_the_metrics_at_their_places(browser, tmp_path):
    show(browser, one_run(tmp_path))
    figures = browser.find_elements(By.TAG_NAME, "figure")
    assert [one.get_attribute("id") for one in figures] == [f"panel-{key}" for key in PANELS]
    for key, name, metric in (
        ("loss", "training", "loss"),
        ("loss", "validation", "validation_loss"),
        ("tokens_per_s", "Tokens per second", "tokens_per_s"),
    ):
        where = panel(browser, key)
        expected, drawn = metrics(tmp_path / "run", metric), curves(where)[name]
        across, up = marks(where, "x"), marks(where, "y")
        up = [(place - 4, value) for place, value in up]  # a number is centred on its line
        # Places are written to a tenth of a pixel: a value is as exact as a pixel of its axis.
        step_error, value_error = (
            abs((b[1] - a[1]) / (b[0] - a[0])) for a, b in ((across[0], across[-1]), (up[0], up[-1]))
        )
        assert read_off([x for x, _ in drawn], across) == pytest.approx([x for x, _ in expected], abs=step_error)
        assert read_off([y for _, y in drawn], up) == pytest.approx([y for _, y in expected], abs=value_error)


def test_the_pointer_shows_the_values_of_the_nearest_step(browser, tmp_path):
    show(browser, one_run(tmp_path))
    where = panel(browser, "loss")
    tip = where.find_element(By.CLASS_NAME, "tip")
    assert not tip.is_displayed()
    drawing = where.find_element(By.TAG_NAME, "svg")
    x = curves(where)["training"][4][0]  # step 5
    offset = x * drawing.size["width"] / float((drawing.get_dom_attribute("viewBox") or "").split()[2])
    ActionChains(browser).move_to_element_with_offset(drawing, round(offset - drawing.size["width"] / 2), 0).perform()
    assert tip.text.split("\n") == ["step 5", "training 2", "validation 2.75, step 4"]  # 10 / 5 and 11 / 4
    inside, figure = tip.rect, where.rect
    assert figure["y"] < inside["y"] and inside["y"] + inside["height"] < figure["y"] + figure["height"]
    assert figure["x"] < inside["x"] and inside["x"] + inside["width"] < figure["x"] + figure["width"]
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert not tip.is_displayed()


@pytest.mark.nightly
def test_several_runs_share_each_panel_and_the_table_switches_them(browser, tmp_path):
    first = write_run(tmp_path / "first", range(1, 9), **ENGINE)
    second = write_run(tmp_path / "second", range(1, 13), validated=(6, 12), **ENGINE)
    write_page([first, second], tmp_path / "page.html")
    show(browser, tmp_path / "page.html")
    assert browser.title == "2 runs"
    loss = panel(browser, "loss")
    assert list(curves(loss)) == ["first: training", "second: training", "second: validation"]
    assert loss.find_element(By.CLASS_NAME, "legend").text.split() == ["first", "second", "validation"]
    colours = [line.value_of_css_property("stroke") for line in loss.find_elements(By.CSS_SELECTOR, "path.curve")]
    assert colours[0] != colours[1] == colours[2]
    assert len(curves(panel(browser, "bubble"))) == 4
    assert marks(loss, "x")[-1][1] == 12
    browser.find_elements(By.CSS_SELECTOR, "#runs input")[1].click()
    assert list(curves(loss)) == ["first: training"]
    assert marks(loss, "x")[-1][1] == 8  # the axis ends at the last step that is left
    rows = [" ".join(row.text.split()) for row in browser.find_elements(By.CSS_SELECTOR, "#runs tbody tr")]
    assert rows[1].startswith("second 12 – 0.83333 0.91667 (step 12)")


@pytest.mark.nightly
def test_smoothing_and_logarithms_change_the_curves_and_not_the_values(browser, tmp_path):
    show(browser, one_run(tmp_path))
    loss = panel(browser, "loss")
    plain = curves(loss)
    browser.execute_script(
        "const range = document.getElementById('smoothing'); range.value = 0.9;range.dispatchEvent(new Event('input'));"
    )
    smooth = curves(loss)
    # The loss falls, so a mean with the steps before is higher, and higher on a screen is a lower y. The first is alone.
    assert smooth["training"][0] == plain["training"][0]
    assert all(
        after[1] < before[1] for before, after in zip(plain["training"][1:], smooth["training"][1:], strict=True)
    )
    assert smooth["validation"] == plain["validation"]
    assert len(loss.find_elements(By.CSS_SELECTOR, "path.raw")) == 1
    browser.find_element(By.ID, "log").click()
    up = marks(loss, "y")
    # Marks of a logarithmic axis are as far apart as their logarithms.
    pixels = [(below[0] - above[0]) / log(above[1] / below[1]) for below, above in pairwise(up)]
    assert len(pixels) > 1 and pixels == pytest.approx([pixels[0]] * len(pixels))


def test_continuations_are_shown_as_text_below_the_panels(browser, tmp_path):
    hostile = "<img src=x onerror=document.title=1> and\nanother line"
    for name in ("first", "second"):
        write_run(tmp_path / name, range(1, 3), samples=(PromptSample(f"of {name}", hostile),))
    write_run(tmp_path / "third", range(1, 3))
    write_page([tmp_path / name for name in ("first", "second", "third")], tmp_path / "page.html")
    show(browser, tmp_path / "page.html")
    headings = browser.find_elements(By.CSS_SELECTOR, "#samples h2")
    assert [heading.text for heading in headings] == ["first, step 2", "second, step 2"]
    shown = browser.find_element(By.CSS_SELECTOR, "#samples p")
    assert shown.text == f"of first{hostile}" and not browser.find_elements(By.TAG_NAME, "img")
    browser.set_window_size(NARROW, HEIGHT)
    assert shown.rect["width"] <= browser.execute_script("return document.documentElement.clientWidth")
