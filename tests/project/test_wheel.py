"""The wheel: built from the sources, installed elsewhere, used outside the checkout."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from support.small_trace import write_small_trace

ROOT = Path(__file__).parents[2]
ROOMS = ("engine", "hwprofiles", "policies", "runtime", "sim", "traces")
PACKAGES = ("moesim", *(f"moesim.{room}" for room in ROOMS))


def run(*command, cwd, **environment):
    inherited = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    ).stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which the wheel was installed without its dependencies, which the
    tests' own Python has.
    """
    work = tmp_path_factory.mktemp("wheel")
    sources = work / "sources"
    for name in ("moesim", *ROOMS):
        shutil.copytree(
            ROOT / name,
            sources / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "*.so", "_extensions.json"),
        )
    # With their dates: what was compiled for the checkout is not compiled again.
    if (ROOT / "build").is_dir():
        shutil.copytree(ROOT / "build", sources / "build")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    build = ("-m", "build", "--wheel", "--no-isolation", "--outdir")
    run(sys.executable, *build, work, sources, cwd=work)
    (wheel,) = work.glob("moesim-*.whl")
    target = work / "installed"
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    words = (sys.executable, *pip, target, wheel)
    run(*words, cwd=work, PIP_DISABLE_PIP_VERSION_CHECK="1")
    return target


@pytest.fixture
def moesim(installed, tmp_path):
    """Run the installed command in an empty folder."""

    def run_installed(*words):
        command = (installed / "bin" / "moesim", *words)
        return run(*command, cwd=tmp_path, PYTHONPATH=str(installed))

    return run_installed


def test_pinned_packages_take_the_oldest_python_that_is_promised():
    """Else `make demo` ends with a conflict on systems whose Python is 3.11.2."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    asked = {
        f"{each.name}=={each.version}": each.metadata.get("Requires-Python", "")
        for each in distributions()
    }
    assert len(asked.keys() & set(pins)) > 50
    refusing = [pin for pin in pins if oldest not in SpecifierSet(asked.get(pin, ""))]
    assert refusing == []


def test_code_comes_from_the_wheel(installed, tmp_path):
    code = (
        f"import {', '.join(PACKAGES)};"
        f" print({', '.join(f'{name}.__file__' for name in PACKAGES)}, sep='\\n')"
    )
    places = run(
        sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(installed)
    ).splitlines()
    assert [Path(place).is_relative_to(installed) for place in places] == [True] * len(
        PACKAGES
    )


def test_every_file_that_is_not_code_is_shipped(installed):
    """Profiles, model shapes, the tiny model, templates of pages, compiled modules:
    what is in the sources is in the wheel.
    """
    for package in ("moesim", *ROOMS):
        source = ROOT / package
        extra = {
            p.relative_to(ROOT)
            for p in source.rglob("*")
            if p.is_file() and p.suffix != ".py" and "__pycache__" not in p.parts
        }
        assert {
            str(name)
            for name in extra
            if not (
                (installed / name).is_file() or (installed / "moesim" / name).is_file()
            )
        } == set()
    for shipped in ("traces/data/models.yaml", "reporting/templates/page.html"):
        assert (installed / "moesim" / shipped).is_file()


def test_help_list_and_replay_work_outside_the_checkout(moesim, tmp_path):
    assert "Replay a trace" in moesim("--help")
    assert "rtx3090-epyc7532" in moesim("list", "machines")
    assert "greedy" in moesim("list", "assignment")
    trace = write_small_trace(tmp_path / "small.parquet")
    found = json.loads(moesim("replay", trace, "--policy", "greedy", "--json"))
    assert found["accesses"] > 0
    assert found["config"]["git_commit"] is None
