"""The page of a sweep, in a real browser: a map of winners, the front, any run."""

import json
import re

import numpy as np
import pytest
from support.browser import browser, check_page, show
from support.small_trace import write_small_trace

import moesim
from moesim.questions.sweep_page import write_sweep
from moesim.runs.sweeps.rows import NEVER_USED

POLICIES = ["all-cpu", "on-demand", "greedy", "on-demand+belady"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    trace = write_small_trace(tmp_path_factory.mktemp("trace") / "<i>&.parquet")
    return moesim.sweep(
        trace,
        POLICIES,
        slots_per_layer=[1, 3, 6],
        hw=["rtx4060ti", "rtx3080ti"],
        batch=[1, 2],
        jobs=1,
        details=True,
    )


@pytest.fixture(scope="module")
def page(swept, tmp_path_factory):
    return write_sweep(swept, tmp_path_factory.mktemp("page") / "sweep.html")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


def data_of(page):
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_holds_every_run_and_loads_nothing(swept, page):
    text = page.read_text(encoding="utf-8")
    data = data_of(page)
    assert len(data["runs"]) == len(swept) == 48
    assert [run["s"] for run in data["runs"]] == swept["tpot_s"].tolist()
    assert "<i>" not in text
    assert re.findall(r"(?:src|href)=", text) == []
    assert "url(" not in text
    # The only address is the name of a language, which nothing fetches.
    assert set(re.findall(r"https?://[^\"']+", text)) == {"http://www.w3.org/2000/svg"}


def test_winners_are_the_shortest_runs_that_see_the_past_only(page):
    data = data_of(page)
    for cell in {run["cell"] for run in data["runs"]}:
        here = [run for run in data["runs"] if run["cell"] == cell]
        real = [run for run in here if not run["oracle"]]
        best_s = min(run["s"] for run in real)
        assert [run["s"] for run in here if run["wins"]] == [best_s]


def test_a_click_opens_lanes_and_placement(driver, page, swept):
    show(driver, page)
    index = next(
        i for i, run in enumerate(data_of(page)["runs"]) if run["policy"] == "greedy"
    )
    rows = driver.find_elements("css selector", "#runs tbody tr")
    button = rows[index].find_element("css selector", "th button")
    driver.execute_script("arguments[0].click()", button)
    wait(driver, "return document.querySelectorAll('#run canvas').length === 2")
    lanes = driver.find_elements("css selector", "#run tbody th")
    assert {lane.text for lane in lanes} >= {"cpu", "gpu0", "h2d0"}
    # The picture is painted from the row's own numbers: blue where the GPU computed.
    pixels = driver.execute_script(
        "const c = document.querySelector('#run canvas');"
        "return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data];"
    )
    shares = np.frombuffer(swept["placement"][index], np.uint8).reshape(2, 3, 8)[0]
    painted = np.array(pixels).reshape(3, 8, 4)
    assert ((painted[..., 3] == 0) == (shares == NEVER_USED)).all()
    used = shares != NEVER_USED
    order = np.argsort(shares[used], kind="stable")
    assert (np.diff(painted[..., 2][used][order].astype(int)) >= 0).all()


def wait(driver, condition):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 30).until(lambda driver: driver.execute_script(condition))


def choose(driver, place, number, value):
    from selenium.webdriver.support.ui import Select

    selects = driver.find_elements("css selector", f"{place} select")
    Select(selects[number]).select_by_value(value)


def test_the_map_has_the_axes_that_are_chosen(driver, page):
    show(driver, page)
    choose(driver, "#map-choices", 0, "slots_per_layer")
    choose(driver, "#map-choices", 1, "batch")
    heads = driver.find_elements("css selector", "#map thead th")
    assert [head.text for head in heads] == ["1", "3", "6"]
    rows = driver.find_elements("css selector", "#map tbody tr")
    assert [row.find_element("css selector", "th").text for row in rows] == ["1", "2"]
    data = data_of(page)
    place = rows[1].find_elements("css selector", "td")[2].text
    winners = [
        run["policy"]
        for run in data["runs"]
        if run["wins"]
        and run["at"]["slots_per_layer"] == "6"
        and run["at"]["batch"] == "2"
    ]
    assert place.split("\n")[0] in winners


def test_the_front_falls_and_its_points_open_runs(driver, page):
    show(driver, page)
    path = driver.find_element("css selector", "#front path").get_attribute("d")
    points = [tuple(map(float, each.split())) for each in path[1:].split("L")]
    assert points == sorted(points)
    # Downwards on a screen is a larger number: more memory, less time.
    heights = [y for _, y in points]
    assert heights == sorted(heights)
    driver.execute_script(
        "document.querySelector('#front circle').dispatchEvent(new Event('click'))"
    )
    wait(driver, "return document.querySelectorAll('#run canvas').length === 2")


def test_the_table_sorts_and_filters(driver, page):
    show(driver, page)
    field = driver.find_element("css selector", "#runs input[type=search]")
    field.send_keys("rtx3080ti greedy")
    rows = driver.find_elements("css selector", "#runs tbody tr")
    shown = [row.text for row in rows if row.is_displayed()]
    assert len(shown) == 6
    assert all("greedy" in row and "rtx3080ti" in row for row in shown)


def test_anybody_can_read_it(driver, page):
    check_page(driver, page)
    # With a run opened, too.
    driver.execute_script(
        "document.querySelector('#front circle').dispatchEvent(new Event('click'))"
    )
    wait(driver, "return document.querySelectorAll('#run canvas').length === 2")
    assert driver.execute_script(
        "return document.documentElement.scrollWidth <= window.innerWidth"
    )
    log = driver.get_log("browser")
    assert [line for line in log if line["level"] == "SEVERE"] == []
