"""docs/how-to/extending.md, done: each extension in a copy of the project, and nothing
else.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.doc_examples import examples, lines_of

from moesim.traces.timeline.metrics import METRICS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "extending.md"
ROOMS = ("hwprofiles", "policies", "engine", "runtime", "sim", "traces")
SECTIONS = {
    title: body
    for title, _, body in (
        section.partition("\n")
        for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    )
}
LANE = "A kind of lane"
COPIES = "A rule about copies"
RUN = [
    title
    for title, body in SECTIONS.items()
    if "```sh" in body and title not in (LANE, COPIES)
]


@pytest.fixture
def project(tmp_path):
    """A copy of the sources as they are installed: rooms below `moesim`. What is compiled
    comes along, as compiling anew would only cost time.
    """
    ignored = shutil.ignore_patterns("*.pyc", "*.tmp.*")
    shutil.copytree(ROOT / "moesim", tmp_path / "moesim", ignore=ignored)
    shutil.copytree(ROOT / "docs" / "reference", tmp_path / "docs" / "reference")
    return tmp_path


def place(project, name):
    """Where a file of the checkout is in the copy."""
    room = name.partition("/")[0]
    return project / "moesim" / name if room in ROOMS else project / name


def apply(project, section):
    """Write the files and make the changes of a section; the names of both."""
    names = []
    for example in examples(section):
        first, _, body = example.text.partition("\n")
        named = re.fullmatch(r"# ([\w/.-]+)", first)
        if named is None:
            continue
        path = place(project, named[1])
        names.append(named[1])
        if example.language == "diff":
            change(path, body.splitlines())
            continue
        assert not path.exists(), f"{named[1]} is there already"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body.lstrip("\n"), encoding="utf-8")
    return names


def change(path, lines):
    """Replace the one place of a file that holds the lines without ``+``."""
    before = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " -")
    after = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " +")
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{path}: {before!r}"
    path.write_text(text.replace(before, after), encoding="utf-8")


def moesim(project, command):
    """Run a command of the page in the copy."""
    words = shlex.split(command, comments=True)
    assert words[0] == "moesim"
    environment = {
        **os.environ,
        "PYTHONPATH": str(project),
        "XDG_CONFIG_HOME": str(project),
    }
    done = subprocess.run(
        [sys.executable, "-m", "moesim", *words[1:]],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def run_commands(project, section):
    """Run what a section shows; what it printed."""
    return "".join(
        moesim(project, command)
        for example in examples(section)
        if example.language == "sh"
        for command in lines_of(example.text)
    )


@pytest.mark.parametrize("title", RUN)
def test_an_extension_is_the_files_that_the_page_shows(project, title):
    """Written into a copy, they work at once: every command of the section succeeds."""
    section = SECTIONS[title]
    names = apply(project, section)
    code = {name for name in names if name.endswith(".py")}
    if "moesim/runs/config.py" in code:
        assert len(code) == 2, "an option that all runs share is two files"
        run_commands(project, section)
        for run in ("first", "second"):
            config = json.loads((project / run / "run.json").read_text())["config"]
            assert config["label"] == "quiet"
        return
    assert len(code) == 1
    (added,) = code
    stem = Path(added).stem.replace("_", "-")
    printed = run_commands(project, section)
    if added.startswith("policies/"):
        assert stem in printed
    if added.startswith("traces/importers/"):
        assert "wrote plain.parquet" in printed
        assert "plain_lines.txt" in printed
    if added.endswith("metrics.py"):
        (name,) = json.loads(printed).keys() & {"miss_rate"}
        assert name not in METRICS
        page = place(project, "docs/reference/metrics.md").read_text(encoding="utf-8")
        assert f"`{name}`" in page
    if added.endswith("questions.py"):
        assert "belady" in printed
        assert "lru" not in printed


def test_a_rule_about_copies_is_one_file(project):
    """Both clocks follow it alike, and it changes something."""
    commands = [
        command
        for example in examples(SECTIONS[COPIES])
        if example.language == "sh"
        for command in lines_of(example.text)
    ]
    before, _ = _makespans_s(project, commands)
    assert len(set(apply(project, SECTIONS[COPIES]))) == 1
    simpy, fast = _makespans_s(project, commands)
    assert simpy == fast != before


def _makespans_s(project, commands):
    return [json.loads(moesim(project, line))["makespan_s"] for line in commands]


def test_a_kind_of_lane_is_two_files_in_the_simulator(project):
    """The entry, and its operation."""
    names = apply(project, SECTIONS[LANE])
    assert set(names) == {"hwprofiles/lanes.py", "engine/durations.py"}
    busy_s = json.loads(run_commands(project, SECTIONS[LANE]))["busy_s"]
    assert busy_s["npu0"] > 0.0


def test_a_profile_decides_who_serves_a_new_lane(project):
    """Unnamed, it takes the GPU's time; with a worker of its own it runs beside it."""
    apply(project, SECTIONS[LANE])
    command = "moesim replay tiny --prefetch partial-hidden --steps 4 --hw {} --json"
    text = (project / "moesim/hwprofiles/data/rtx4060ti.toml").read_text()
    own = project / "own.toml"
    own.write_text(text.replace("[workers]\n", '[workers]\npredictor = ["npu0"]\n'))

    shared = json.loads(moesim(project, command.format("rtx4060ti")))
    apart = json.loads(moesim(project, command.format(own)))
    assert apart["busy_s"]["npu0"] == pytest.approx(shared["busy_s"]["npu0"])
    assert apart["makespan_s"] < shared["makespan_s"]
