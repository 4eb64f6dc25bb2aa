"""The first commands of a newcomer, with nothing on disk: what each imports is counted."""

import json
import os

import pytest
from support.processes import run_python

CODE = """
import json, sys
from moesim.start import main
try:
    main(sys.argv[1:])
finally:
    print("COUNTED", len([n for n in sys.modules if n.startswith("moesim")]))
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Run a command in an empty folder, and count the modules of ours that it takes."""
    empty = tmp_path_factory.mktemp("first")

    def run(*words, **variables):
        folders = {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
        done = run_python(
            "-c", CODE, *words, cwd=empty, environment=folders | variables
        )
        *_, last = [x for x in done.stdout.splitlines() if x.startswith("COUNTED")]
        return done, json.loads(last.removeprefix("COUNTED"))

    return run


@pytest.mark.parametrize(
    "words",
    [
        "--help", "list", "config", "model qwen3-30b-a3b", "trace info tiny",
        "advise qwen3-30b-a3b --gpu-memory", "replay tiny --policy gready",
        "replay tiny --cache lruu", "replay tinyy", "replay tiny --hw nosuch",
    ],
)  # fmt: skip
def test_words_and_lists_import_little(counted, words):
    done, modules = counted(*words.split())
    assert done.returncode in {0, 2}, done.stderr
    assert modules <= 180


def test_what_needs_torch_says_so_before_anything_else(counted, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(name, name='torch')\n"
        "sys.meta_path.insert(0, Finder())\n",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done, modules = counted("run", "tiny", PYTHONPATH=path)
    assert done.returncode == 2
    assert "needs torch" in done.stderr
    assert modules <= 70
