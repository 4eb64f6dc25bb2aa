"""Pages, as text and in a real browser: everybody can read them, and they answer when
they are touched.
"""

import html
import json
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from support.browser import browser, check_page, data_of, errors_of, opened, wait
from support.small_trace import write_small_trace, write_trace

import moesim
from moesim.questions.timeline import KINDS, spans_of
from moesim.reporting.answers import Answer
from moesim.reporting.figures import Axis, Figure
from moesim.reporting.interactive import interactive
from moesim.reporting.pages import STATIC_ROWS
from moesim.reporting.parts import Choice, Facts, Listing, Section, Shown

POLICIES = ["all-cpu", "on-demand", "greedy", "on-demand+belady"]
MACHINE = {"hw": "rtx4060ti", "slots_per_layer": 3}


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Its name would break a page that does not escape it."""
    return write_small_trace(tmp_path_factory.mktemp("trace") / "<i>&.parquet")


@pytest.fixture(scope="module")
def compared(trace):
    return moesim.compare(trace, POLICIES, **MACHINE)


@pytest.fixture(scope="module")
def swept(trace):
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
def pages(trace, compared, swept, tmp_path_factory):
    """One page of each kind, but for those that real runs and other machines make."""
    folder = tmp_path_factory.mktemp("pages")
    machines = ["rtx4060ti", "rtx3080ti"]
    rates = moesim.hit_rates(trace, ["lru", "belady"], [0.25, 0.5])
    answers = {
        "run": moesim.answer(compared.runs["greedy"]),
        "comparison": compared.answer(),
        "cells": moesim.compare(trace, ["all-cpu"], hw=machines, keep=False).answer(),
        "sweep": moesim.answer(swept),
        "gap": moesim.answer(moesim.gap(trace, "on-demand", steps=3, **MACHINE)),
        "hits": moesim.answer(rates),
        "trace": moesim.answer(moesim.open_trace(trace)),
    }
    return {
        kind: answer.write(folder / f"{kind}.html") for kind, answer in answers.items()
    }


KINDS_OF_PAGES = ("run", "comparison", "cells", "sweep", "gap", "hits", "trace")
EACH = pytest.mark.parametrize("kind", KINDS_OF_PAGES)


def text_of(page):
    return page.read_text(encoding="utf-8")


class Outline(HTMLParser):
    """Tags with their attributes, in order; and which are still open at the end."""

    EMPTY = frozenset({"meta", "br", "input"})

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def named(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


# As text.


@EACH
def test_a_page_has_language_landmarks_and_heads_with_scope(pages, kind):
    outline = Outline(text_of(pages[kind]))
    assert outline.open == []
    assert outline.named("html") == [{"lang": "en"}]
    metas = {attrs["name"]: attrs for attrs in outline.named("meta") if "name" in attrs}
    assert "width=device-width" in metas["viewport"]["content"]
    assert metas["color-scheme"]["content"] == "light dark"
    assert len(outline.named("main")) == len(outline.named("h1")) == 1
    assert {attrs.get("scope") for attrs in outline.named("th")} <= {"col", "row"}
    wide = [a for a in outline.named("div") if "wide" in a.get("class", "")]
    assert wide
    assert all(attrs["aria-label"] and attrs["tabindex"] == "0" for attrs in wide)


@EACH
def test_the_head_names_model_machine_and_where_the_figures_come_from(pages, kind):
    text = text_of(pages[kind])
    title = re.search("<title>(.*)</title>", text)[1]
    setting = "".join(re.findall('<p class="setting">(.*)</p>', text))
    assert title.startswith("small")
    machine = "no machine" if kind in ("hits", "trace") else "rtx4060ti"
    assert machine in title
    if machine == "rtx4060ti" and kind != "cells":
        assert machine in setting
    head = text.partition("</header>")[0]
    assert "&lt;i&gt;&amp;.parquet, SHA-256 " in head
    assert "a call from Python" in head
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC by moesim ", head)


@EACH
def test_a_page_is_one_file_that_loads_nothing(pages, kind):
    text = text_of(pages[kind])
    outline = Outline(text)
    names = {tag for tag, _ in outline.tags}
    assert names.isdisjoint({"link", "img", "iframe", "object", "svg"})
    assert all("src" not in attrs for attrs in outline.named("script"))
    assert not any("href" in attrs for _, attrs in outline.tags)
    # Outside scripts, where text that names an address fetches nothing.
    prose = re.sub("<script.*?</script>", "", text, flags=re.DOTALL)
    assert "<i>" not in prose
    assert "@import" not in prose
    assert "url(" not in prose
    assert len(text) < 5_000_000


def test_the_command_stands_in_the_head_with_a_button(command, tmp_path, monkeypatch):
    page = tmp_path / "a b.html"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert command("trace", "stats", "tiny", "--html", page)[0] == 0
    head = text_of(page).partition("</header>")[0]
    # As a shell takes it: the name has a space.
    line = html.escape(f"moesim trace stats tiny --html '{page}'", quote=True)
    line = line.replace("&#x27;", "&#39;")
    assert f'<code>{line}</code><button type="button" class="copy"' in head
    assert "1970-01-02 00:00 UTC" in head


def test_a_trace_of_a_prompt_alone_has_a_page(tmp_path, tiny_shape):
    path = write_trace(tmp_path / "p.parquet", tiny_shape, ((9, 0),))
    page = moesim.answer(moesim.open_trace(path)).write(tmp_path / "p.html")
    assert Outline(text_of(page)).open == []


def test_a_sweep_holds_every_run_and_its_command(swept, pages):
    parts = [part for part in data_of(pages["sweep"])["parts"] if part]
    (facts,) = [part for part in parts if "names" in part]
    assert facts["choice"] == "run"
    assert len(facts["values"]) == len(swept) == 48
    command = facts["values"]["47"][-1]
    assert command.startswith("$ moesim replay ")
    for words in ("--slots-per-layer 6", "--hw rtx3080ti", "--batch 2"):
        assert words in command
    assert "--policy on-demand+belady" in command


def test_winners_are_the_shortest_runs_that_see_the_past_only(swept, pages):
    """And the page opens on the shortest of them."""
    winners = re.search(r'data-opens="([\d ]+)"', text_of(pages["sweep"]))[1]
    causal = swept[~swept["oracle"]]
    best = causal.groupby(["hw", "slots_per_layer", "batch"], sort=False)["tpot_s"]
    assert list(map(int, winners.split())) == best.idxmin().tolist()
    assert chosen_on(pages["sweep"], "run") == str(causal["tpot_s"].idxmin())


def test_a_page_holds_every_line_to_compare_with():
    """Of three it drew the last one three times."""
    axes = (Axis("x", "x"), Axis("y", "y"))
    lines = [((0, 1), (0, at), f"line {at}") for at in (1, 2, 3)]
    figure = Figure(pd.DataFrame({"x": [1], "y": [1]}), *axes, "", lines=lines)
    spec = interactive(Shown(figure))["spec"]
    held = [spec["datasets"][each["data"]["name"]] for each in spec["layer"][1:]]
    assert [[row["y"] for row in rows] for rows in held] == [[0, 1], [0, 2], [0, 3]]


def test_bars_and_their_intervals_share_an_axis():
    rows = pd.DataFrame({"n": [0, 1], "v": [1.0, 2.0], "low": 0.5, "high": 2.5})
    n, v = Axis("n", "n", integer=True), Axis("v", "v")
    bars = Figure(rows, n, v, "", mark="bar", low="low", high="high")
    layers = interactive(Shown(bars))["spec"]["layer"]
    assert {each["encoding"]["x"]["type"] for each in layers} == {"ordinal"}


def test_a_click_on_a_name_hides_its_marks():
    rows = pd.DataFrame({"x": [1, 1], "y": [1, 2], "of": ["a", "b"]})
    figure = Figure(rows, Axis("x", "x"), Axis("y", "y"), "", series="of")
    spec = interactive(Shown(figure))["spec"]
    (hidden,) = [each for each in spec["params"] if each.get("bind") == "legend"]
    assert hidden["select"]["fields"] == ["of"]
    assert {"filter": {"not": {"param": hidden["name"], "empty": False}}} in (
        spec["layer"][0]["transform"]
    )


# What a timeline says.


def test_spans_say_why_and_what_they_waited_for(compared):
    """By the tables: copies end where the compute that needed them begins."""
    spans = spans_of(compared.runs["on-demand"])
    caused = spans[spans["cause"] > 0]
    causes = spans.loc[caused.index - caused["cause"]]
    assert (
        np.abs(caused["start_s"].to_numpy() - causes["end_s"].to_numpy()).max() < 1e-9
    )
    missing = "its weights were missing"
    compute = caused[(caused["kind"] == "compute") & (caused["reason"] == missing)]
    copies = spans.loc[compute.index - compute["cause"]]
    waited = (copies["kind"] == "fetch").to_numpy()
    assert waited.any()
    same = compute["expert"].to_numpy() == copies["expert"].to_numpy()
    assert same[waited].all()


# In a real browser.


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@EACH
def test_anybody_can_read_every_page(driver, pages, kind, screenshots):
    """Light and dark, 390 and 1,280 px: axe finds nothing, the console stays empty, and
    nothing is fetched. ``--screenshots FOLDER`` keeps pictures.
    """
    check_page(driver, pages[kind], screenshots)


def choose(driver, name, value):
    from selenium.webdriver.support.ui import Select

    place = driver.find_element("css selector", f"select[data-choice={name}]")
    Select(place).select_by_value(value)


def domain(driver):
    """What the first timeline shows, in milliseconds."""
    return json.loads(
        driver.execute_script(
            "return new URLSearchParams(location.hash.slice(1)).get('when_start')"
        )
    )


TIMELINES = "(await window.page).charts.filter((part) => part.runs)"


def run_script(driver, body):
    return driver.execute_async_script(
        "const done = arguments[0];"
        f"(async () => {{ {body} }})().then(done, (error) => done(String(error)))"
    )


def rows_of(driver, number=0):
    return run_script(
        driver,
        f"return ({TIMELINES})[{number}].view.data('spans').map(({{ at, lane, start,"
        " end }) => ({ at, lane, start, end }))",
    )


def test_zoom_to_one_operation_and_read_it(driver, pages, compared):
    from selenium.webdriver.support.ui import WebDriverWait

    opened(driver, pages["run"])
    place = driver.find_element("css selector", ".spans")
    place.send_keys("n")
    caption = driver.find_element("css selector", ".spans + figcaption")
    words = caption.text
    lanes = compared.runs["greedy"].timeline.lanes
    kind, lane = words.split("\n")[0].rsplit(", on ", 1)
    assert lane in lanes
    assert any(kind.startswith(name) for name in KINDS)
    # Zooming in with the keyboard leaves what lies there, and the address says where.
    for _ in range(4):
        place.send_keys("+")
    wait(driver, "return location.hash.includes('when_start')")
    low, high = domain(driver)
    assert high - low < 0.1 * compared.runs["greedy"].metrics["makespan_s"] * 1e3

    def only_what_is_shown(driver):
        return all(
            row["end"] >= low and row["start"] <= high for row in rows_of(driver)
        )

    WebDriverWait(driver, 30).until(only_what_is_shown)


def test_hovering_an_operation_shows_its_words(driver, pages):
    from selenium.webdriver import ActionChains

    opened(driver, pages["run"])
    place = driver.find_element("css selector", ".spans canvas")
    driver.execute_script("arguments[0].scrollIntoView({ block: 'center' })", place)
    target = run_script(
        driver,
        f"const part = ({TIMELINES})[0];"
        "const [x, y] = ['x', 'y'].map((name) => part.view.scale(name));"
        "const [left, top] = part.view.origin();"
        "const [low, high] = x.domain();"
        "const rows = part.view.data('spans').filter("
        "(row) => row.at >= 0 && row.start >= low && row.end <= high);"
        "rows.sort((a, b) => b.end - b.start - a.end + a.start);"
        "return [left + x((rows[0].start + rows[0].end) / 2),"
        " top + y(rows[0].lane) + y.bandwidth() / 2, part.words(rows[0])];",
    )
    across, down, words = target
    size = place.rect
    ActionChains(driver).move_to_element_with_offset(
        place, round(across - size["width"] / 2), round(down - size["height"] / 2)
    ).perform()
    wait(driver, "return !!document.querySelector('#vg-tooltip-element.visible')")
    tooltip = driver.find_element("css selector", "#vg-tooltip-element").text
    assert tooltip.split("\n")[0] == words.split("\n")[0]


def chosen_on(page, name):
    """What a page opens on."""
    return re.search(
        rf'data-choice="{name}".*?value="([^"]+)" selected', text_of(page), re.DOTALL
    )[1]


def test_another_policy_in_both_timelines_and_a_copied_address(driver, pages):
    opened(driver, pages["comparison"])
    first = rows_of(driver, 1)
    choose(driver, "other", "all-cpu")
    wait(driver, "return location.hash.includes('other=all-cpu')")
    second = rows_of(driver, 1)
    assert {row["lane"] for row in second} != {row["lane"] for row in first}
    run_script(driver, "(await window.page).choose('when_start', [1, 2])")
    address = driver.current_url

    driver.get("about:blank")
    opened(driver, address)
    chosen = driver.execute_script(
        "return ['policy', 'other'].map((name) =>"
        " document.querySelector(`select[data-choice=${name}]`).value)"
    )
    assert chosen == [chosen_on(pages["comparison"], "policy"), "all-cpu"]
    signals = run_script(
        driver,
        f"return ({TIMELINES}).map((part) => [...part.view.signal('when_start')])",
    )
    assert signals == [[1, 2], [1, 2]]


def test_a_row_opens_its_run(driver, pages, swept):
    opened(driver, pages["sweep"])
    buttons = driver.find_elements("css selector", f"{EVERY_RUN} button")
    assert len(buttons) == 48
    driver.execute_script("arguments[0].click()", buttons[5])
    wait(driver, "return location.hash.includes('run=5')")
    facts = driver.find_element("css selector", ".facts").text
    assert swept["digest"][5] in facts


EVERY_RUN = "[data-opens][aria-label='Every run'] tbody"
TOOLS = "document.querySelector('figure:has(.chart:not(.spans)) .tools')"


def test_another_measure_and_a_logarithmic_axis_stand_in_the_address(driver, pages):
    """Drawn from the same rows: the axis says what it shows."""
    from selenium.webdriver.support.ui import Select

    opened(driver, pages["sweep"])
    tools = driver.execute_script(f"return {TOOLS}")
    Select(tools.find_element("css selector", "select")).select_by_value("ttft_s")
    box = tools.find_element("css selector", "input[type=checkbox]")
    driver.execute_script("arguments[0].click()", box)
    wait(driver, "return location.hash.includes('shows=ttft_s')")
    address = driver.current_url
    assert "log=true" in address
    driver.get("about:blank")
    opened(driver, address)
    tools = driver.execute_script(f"return {TOOLS}")
    shown = Select(tools.find_element("css selector", "select")).first_selected_option
    assert shown.text == "first token, ms"
    assert errors_of(driver) == []


def test_a_chart_and_its_data_can_be_saved(driver, pages):
    opened(driver, pages["comparison"])
    saved = run_script(
        driver,
        "const found = [];"
        "HTMLAnchorElement.prototype.click = function () {"
        " found.push([this.download, this.href.slice(0, 22)]); };"
        f"for (const button of {TOOLS}.querySelectorAll('button')) button.click();"
        "await new Promise((done) => setTimeout(done, 1500));"
        "return found.sort();",
    )
    assert [name.rpartition(".")[2] for name, _ in saved] == ["csv", "png", "svg"]
    assert saved[1][1].startswith("data:image/png")


WORDS = (
    "const found = [];"
    "const walk = (item, x, role) => {"
    " if (typeof item.text === 'string' || typeof item.text === 'number')"
    "  found.push([role, String(item.text), x + item.bounds.x2]);"
    " for (const each of item.items ?? [])"
    "  walk(each, x + (item.marktype ? 0 : item.x ?? 0), item.role ?? role); };"
    "for (const { view } of (await window.page).charts)"
    " walk(view.scenegraph().root, view.origin()[0], '');"
    "return found;"
)
"""What stands in charts: role of each text, itself, and where it ends, in pixels."""


@pytest.mark.parametrize("kind", ["run", "comparison", "sweep", "trace"])
def test_charts_say_what_tables_say_and_cut_no_word(driver, pages, kind):
    """There is no layer -1, and per cent are written alike everywhere."""
    opened(driver, pages[kind], width=390)
    found = run_script(driver, WORDS)
    ticks = [text for role, text, _ in found if role == "axis-label"]
    assert ticks
    odd = re.compile(r"\N{MINUS SIGN}|.*\d%")
    assert list(filter(odd.match, ticks)) == []
    width = driver.execute_script("return document.querySelector('.chart').clientWidth")
    assert max(end for *_, end in found) <= width


def test_the_filter_stands_in_the_address(driver, pages):
    opened(driver, pages["sweep"])
    field = driver.find_element("css selector", "input[aria-label$='Every run']")
    field.send_keys("rtx3080ti greedy")
    rows = driver.find_elements("css selector", f"{EVERY_RUN} tr")
    assert len(rows) == 6
    assert all("greedy" in row.text and "rtx3080ti" in row.text for row in rows)
    address = driver.current_url
    driver.get("about:blank")
    opened(driver, address)
    assert len(driver.find_elements("css selector", f"{EVERY_RUN} tr")) == 6


def test_everything_can_be_reached_with_the_keyboard(driver, pages):
    """Tabbing through a page comes past every control and every chart."""
    from selenium.webdriver import ActionChains, Keys

    opened(driver, pages["comparison"])
    wanted = driver.execute_script(
        "return document.querySelectorAll("
        "'main button, main select, main input, main [tabindex]').length"
    )
    seen = set()
    for _ in range(wanted + 5):
        ActionChains(driver).send_keys(Keys.TAB).perform()
        seen.add(driver.switch_to.active_element.id)
    assert len(seen) >= wanted


# Tables.


def table_page(folder, rows):
    answer = Answer(
        question="q", subject="s", tables=[Listing.of(["name", "value"], rows)]
    )
    return answer.write(folder / "table.html")


def column(driver, position):
    """The cells of one column of the first table, from top to bottom."""
    return driver.execute_script(
        "return [...document.querySelector('table').tBodies[0].rows]"
        f".map(row => row.cells[{position}].textContent)"
    )


def test_a_click_on_a_head_sorts_by_value(driver, tmp_path):
    """900 ms are less than 1.2 s, and a cell without a value stands last either way;
    words sort as people sort them.
    """
    rows = [["a 10", "1.2 s"], ["a 9", "-"], ["c", "900 ms"], ["A 1", "1,050 ms"]]
    opened(driver, table_page(tmp_path, rows))
    by_word, by_value = driver.find_elements("css selector", "thead button")
    by_value.click()
    assert column(driver, 0) == ["c", "A 1", "a 10", "a 9"]
    by_value.click()
    assert column(driver, 0) == ["a 10", "A 1", "c", "a 9"]
    by_word.click()
    assert column(driver, 0) == ["A 1", "a 9", "a 10", "c"]


def test_a_very_long_table_is_made_as_it_is_needed(driver, tmp_path):
    rows = [[f"<b>{n}", f"{n} ms"] for n in range(STATIC_ROWS + 1)]
    page = table_page(tmp_path, rows)
    assert "<td>" not in text_of(page)
    opened(driver, page)
    assert column(driver, 0) == [f"<b>{n}" for n in range(200)]
    driver.find_element("css selector", "button.more").click()
    assert len(column(driver, 0)) == len(rows)
    field = driver.find_element("css selector", "input[type=search]")
    field.send_keys("299 ms")
    assert column(driver, 1) == ["299 ms"]


def test_commands_of_what_is_chosen_can_be_copied(driver, tmp_path):
    options = [("0", "first"), ("1", "second")]
    facts = Facts("which", Listing.of(["again"], [["$ run a"], ["$ run b"]]))
    section = Section("", [Choice("which", "which", options, "0"), facts])
    answer = Answer(question="q", subject="s", on_page=lambda: [section])
    opened(driver, answer.write(tmp_path / "t.html"))
    choose(driver, "which", "1")
    button = driver.find_element("css selector", ".facts button.copy")
    assert button.get_attribute("data-copy") == "run b"
    button.click()
    wait(driver, "return document.querySelector('.facts .copy').textContent != 'copy'")


# Speed, where no clock of ours is asserted: the browser counts what it draws.


def test_a_long_timeline_draws_only_what_can_be_seen(driver, tmp_path):
    """100,000 operations: a few thousand marks at any zoom."""
    from benchmarks.pages import long_timeline

    opened(driver, long_timeline(tmp_path / "long.html", 100_000))
    assert (tmp_path / "long.html").stat().st_size < 5_000_000
    for span in ([0, 2000], [100, 200], [100, 101]):
        run_script(driver, f"(await window.page).choose('when_start', {span})")
        wait(driver, "return new Promise((done) => setTimeout(() => done(true), 60))")
        assert len(rows_of(driver)) < 8_000
    assert errors_of(driver) == []
