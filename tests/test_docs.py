"""What the pages promise: examples run, tables are complete, links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from small_trace import write_small_trace

import moesim
from moesim import cli

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text, language):
    return re.findall(
        rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL
    )


def console(block):
    """Commands of a console block, each with the output printed below it."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def test_every_metric_is_defined_once(tmp_path):
    run = moesim.replay(
        write_small_trace(tmp_path / "small.parquet"), "greedy", hw="rtx3090-epyc7532"
    )
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    cells = [
        cell
        for row in re.findall(r"^\| (`.*?) \|", page, flags=re.MULTILINE)
        for cell in re.findall(r"`(\w+)`", row)
    ]
    assert sorted(cells) == sorted(run.to_json())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(
        r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")
    ):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    """`room/file.py` in a page is a file of the checkout."""
    for name in re.findall(
        r"`((?:traces|hwprofiles|policies|sim|runtime|moesim|tests)/[\w/]+\.py)`",
        page.read_text(encoding="utf-8"),
    ):
        assert (
            (ROOT / name).exists()
            or "your" in name
            or name.endswith(("/x.py", "/mru.py"))
        ), name


def test_every_room_of_the_architecture_page_exists():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*? \| (.*?) \|$", page, flags=re.MULTILINE)[2:]
    for row in rows:
        for name in re.findall(r"`([\w/]+\.py)`", row):
            assert (ROOT / name).is_file() or name.endswith("/x.py"), name


@pytest.mark.skipif(
    not SHARED.is_dir(),
    reason="other people's traces, no part of the project: ../shared is not here",
)
def test_commands_of_the_readme_print_what_it_says(tmp_path, monkeypatch, capsys):
    """Line by line, in order, in one folder; notes on standard error stand below the
    results.

    `MOESIM_UPDATE_README=1` writes what is printed now into the page instead, for a
    reader to judge.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    page = README
    ran = 0
    for block in blocks(README, "console"):
        printed = ""
        for command, _ in console(block):
            with pytest.raises(SystemExit) as end:
                cli.main(shlex.split(command.replace("../shared", str(SHARED)))[1:])
            streams = capsys.readouterr()
            assert not end.value.code, f"{command}: {streams.err}"
            printed += f"$ {command}\n{(streams.out + streams.err).rstrip()}\n"
            ran += 1
        page = page.replace(block, printed)
    if os.environ.get("MOESIM_UPDATE_README"):
        (ROOT / "README.md").write_text(page, encoding="utf-8")
    assert ran >= 2
    assert page == README


def test_python_of_the_readme_runs(tmp_path):
    """The five lines, on a trace under the name they use."""
    write_small_trace(tmp_path / "q.parquet")
    (code,) = blocks(README, "python")
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2
