"""How quickly pages answer, measured in a browser; ``python -m benchmarks.pages``.

A timeline of a hundred thousand operations and a sweep of ten thousand runs are moved
and zoomed frame by frame; the time of each frame is that from setting the view to the
end of its drawing. Beside it stands the processor's time of a frame, which a busy
machine does not lengthen. Needs Debian's ``chromium`` and ``chromium-driver``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import moesim

FRAMES = 60

MEASURE = """
const [source, frames, done] = arguments;
(async () => {
  const { charts } = await window.page;
  const part = charts.find((each) => each.data[source]);
  const times = [];
  for (let frame = 0; frame < frames; frame += 1) {
    await new Promise((next) => requestAnimationFrame(next));
    const begin = performance.now();
    ACT
    await part.view.runAsync();
    times.push(performance.now() - begin);
  }
  return times;
})().then(done, (error) => done(String(error.stack)));
"""

ZOOM = "await part.show([frame, frame + 20000 * 1000 ** (-frame / frames)]);"
"""From twenty seconds to twenty milliseconds."""

MOVE = """
    part.view.signal("zoom_gib", [frame / 200, 1 + frame / 60]);
    part.view.signal("zoom_seconds", [0, 2 + frame / 60]);
"""


def long_timeline(path: Path, operations: int) -> Path:
    """Write the page of a real run with at least so many operations, cut off there."""
    steps = 10
    while True:
        run = moesim.replay(
            "gpt-oss-20b-like",
            "greedy",
            hw="rtx4060ti",
            gpu_memory="8GiB",
            steps=steps,
        )
        count = len(run.timeline.frame())
        if count >= operations:
            break
        steps = int(steps * operations / count * 1.1) + 1
    return moesim.answer(run).write(path)


def large_sweep(path: Path, rows: int) -> Path:
    """Write the page of a sweep with so many rows: a real one, repeated with other
    memories and slightly other times.
    """
    real = moesim.sweep(
        "tiny",
        ["all-cpu", "on-demand", "greedy", "fiddler", "llama.cpp"],
        cache_ratio=[0.1, 0.25, 0.5],
        hw=["rtx4060ti", "rtx3080ti"],
        steps=4,
        jobs=1,
        details=True,
    )
    copies = -(-rows // len(real))
    draw = np.random.default_rng(0)
    parts = []
    for copy in range(copies):
        part = real.copy()
        scale = np.exp(draw.normal(0, 0.2, len(part)))
        part["seed"] = copy
        for name in ("tpot_s", "ttft_s", "makespan_s"):
            part[name] = part[name] * scale
        part["gpu_bytes"] = (part["gpu_bytes"] * draw.uniform(0.5, 2)).astype(int)
        parts.append(part)
    frame = pd.concat(parts, ignore_index=True).iloc[:rows]
    frame.attrs["axes"] = ["policy", "cache_ratio", "hw", "seed"]
    return moesim.answer(frame).write(path)


def measure() -> dict[str, Any]:
    """Sizes of the pages, and seconds of a frame: median and 95th percentile."""
    sys.path.insert(0, "tests")
    from support.browser import browser, opened

    answer = {}
    with tempfile.TemporaryDirectory() as name, browser(Path(name) / "user") as driver:
        driver.set_script_timeout(300)
        timeline = long_timeline(Path(name) / "timeline.html", 100_000)
        sweep = large_sweep(Path(name) / "sweep.html", 10_000)
        for page, source, act in ((timeline, "spans", ZOOM), (sweep, "runs", MOVE)):
            opened(driver, page)
            script = MEASURE.replace("ACT", act)
            before_s = _task_s(driver)
            times_ms = driver.execute_async_script(script, source, FRAMES)
            assert not isinstance(times_ms, str), times_ms
            cpu_ms = 1e3 * (_task_s(driver) - before_s) / FRAMES
            answer[page.stem] = {
                "MB": round(page.stat().st_size / 1e6, 2),
                "ms per frame, median": round(float(np.median(times_ms)), 1),
                "ms per frame, 95 %": round(float(np.percentile(times_ms, 95)), 1),
                "CPU ms per frame": round(cpu_ms, 1),
            }
    return answer


def _task_s(driver: Any) -> float:
    """Seconds of the processor that the page's thread has taken."""
    driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return next(each["value"] for each in metrics if each["name"] == "TaskDuration")


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
