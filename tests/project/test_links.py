"""A checkout without symbolic links says so in one line."""

import shutil

from support.processes import ROOT, run_python


def test_links_that_are_texts_are_told(tmp_path):
    """As git makes them on Windows, unless it is told otherwise."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("base", "cli"):
        shutil.copytree(
            ROOT / "moesim" / name, tmp_path / "moesim" / name, ignore=ignored
        )
    for name in ("__init__.py", "__main__.py", "start.py"):
        shutil.copy(ROOT / "moesim" / name, tmp_path / "moesim" / name)
    (tmp_path / "moesim" / "policies").write_text("../policies")
    shutil.copy(ROOT / "setup.py", tmp_path)
    paths = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}

    def said(*words):
        ended = run_python(*words, cwd=tmp_path, environment=paths)
        assert ended.returncode
        return ended.stderr

    expected = "policies: expected a link to the folder policies, found a text: "
    command = said("-m", "moesim", "replay", "tiny")
    assert command.startswith("error: ")
    assert expected in command
    assert command.count("\n") == 1
    assert expected in said("-c", "import moesim; moesim.replay").splitlines()[-1]
    installed = said("setup.py", "build")
    assert expected in installed
    assert installed.count("\n") == 1
