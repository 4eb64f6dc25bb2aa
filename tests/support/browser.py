"""A real browser for tests of pages, where this machine has one."""

import base64
import importlib.util
import json
import re
import shutil
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Pages may ask this machine only.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def _program(*names):
    return next(filter(None, map(shutil.which, names)), None)


def missing():
    """Why no browser can be driven here; None where one can."""
    for package in ("selenium", "axe_core_python"):
        if importlib.util.find_spec(package) is None:
            return f"needs {package} (pip install 'moesim[dev]')"
    if _program(*BROWSERS) is None:
        return "needs a browser such as Debian's chromium"
    if _program("chromedriver") is None:
        return "needs a driver such as Debian's chromium-driver"
    return None


@contextmanager
def browser(user_folder):
    """A browser without a window, with an empty profile in `user_folder`."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = _program(*BROWSERS)
    for switch in (*SWITCHES, f"--user-data-dir={user_folder}"):
        options.add_argument(switch)
    service = webdriver.ChromeService(_program("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


SCREENS = (("light", 1280), ("light", 390), ("dark", 1280), ("dark", 390))


def opened(driver, page, *, width=1280, height=900, scheme="light"):
    """Open a page, or an address, on a screen of this width in a colour scheme, and
    wait until it is drawn.
    """
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
    )
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    driver.get(page if isinstance(page, str) else Path(page).absolute().as_uri())
    # On a busy machine a page counts as loaded before its script has run.
    wait(driver, "return window.page !== undefined")
    error = driver.execute_async_script(
        "const done = arguments[0];"
        "window.page.then(() => done(''), (error) => done(String(error.stack)))"
    )
    assert not error, error


def data_of(page):
    """What the script of a page reads."""
    text = page.read_text(encoding="utf-8")
    packed = re.search(r'id="data">(.*?)</script>', text)[1]
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def wait(driver, condition):
    """Until a line of script answers yes."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 30).until(lambda driver: driver.execute_script(condition))


def errors_of(driver):
    """What the console says."""
    return [line["message"] for line in driver.get_log("browser")]


def violations(driver):
    """What axe finds wrong with the page that is open, one line for each rule."""
    import axe_core_python

    script = Path(axe_core_python.__file__).with_name("axe.min.js")
    driver.execute_script(script.read_text(encoding="utf-8"))
    found = driver.execute_async_script(
        "const done = arguments[0]; axe.run().then(r => done(r.violations));"
    )
    return [
        f"{each['id']} ({each['impact']}): {json.dumps(each['nodes'][0]['html'])[:200]}"
        for each in found
    ]


def check_page(driver, page, folder=None):
    """Anybody can read a page, on each of `SCREENS`; it is silent and asks for nothing
    else. Pictures of all of it are kept in `folder`, where one is given.
    """
    errors_of(driver)
    for scheme, width in SCREENS:
        opened(driver, page, width=width, scheme=scheme)
        assert violations(driver) == []
        # What is wider than the screen scrolls by itself, never the page.
        assert driver.execute_script(
            "return document.documentElement.scrollWidth <= window.innerWidth"
        )
        asked = driver.execute_script(
            "return performance.getEntriesByType('resource').map((each) => each.name)"
        )
        assert [name for name in asked if not name.startswith(("data:", "blob:"))] == []

        if folder is not None:
            height = driver.execute_script("return document.body.scrollHeight")
            opened(driver, page, width=width, height=min(height, 4000), scheme=scheme)
            Path(folder).mkdir(parents=True, exist_ok=True)
            picture = Path(folder) / f"{page.stem}-{scheme}-{width}.png"
            picture.write_bytes(driver.get_screenshot_as_png())
    said = errors_of(driver)
    assert said == [], said
