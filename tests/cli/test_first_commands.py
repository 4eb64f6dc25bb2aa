"""The first commands of a newcomer, with nothing on disk: what each imports, compiles
and loads is counted, and whoever waits is told what for.
"""

import json
import os
import shutil

import pytest
from support.processes import run_python

OWN_POLICY = '''
from moesim.policies.base import CachePolicy

class Mine(CachePolicy):
    """The first candidates leave."""

    def victims(self, incoming, candidates):
        return candidates[: len(incoming)]
'''
CODE = """
import json, sys
from moesim.machine_code import functions
words = sys.argv[1:]
try:
    if words[0] == "notebook":
        import moesim
        moesim.replay("tiny", "greedy", steps=3)
    else:
        from moesim.start import main
        main(words)
finally:
    library = sys.modules.get("moesim.machine_code.library")
    counts = [0, 0]
    if library is not None:
        counts = [len(library.compiled), len(library._loaded)]
    names = [n for n in sys.modules if n.startswith("moesim")]
    ours = len(names)
    print("COUNTED", json.dumps([*counts, ours, "llvmlite" in sys.modules]))
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Run a command on an empty cache folder, or on that of an earlier one."""
    empty = tmp_path_factory.mktemp("first")

    def run(*words, cache=None, **variables):
        folder = tmp_path_factory.mktemp("cache") if cache is None else cache
        folders = dict.fromkeys(("MOESIM_MACHINE_CODE", "XDG_CACHE_HOME"), str(folder))
        done = run_python(
            "-c", CODE, *words, cwd=empty, environment=folders | variables
        )
        *_, last = [x for x in done.stdout.splitlines() if x.startswith("COUNTED")]
        return done, json.loads(last.removeprefix("COUNTED"))

    (empty / "mine.py").write_text(OWN_POLICY, encoding="utf-8")
    return run


WITHOUT_MACHINE_CODE = (
    "--help", "list", "config", "model qwen3-30b-a3b", "trace info tiny",
    "advise qwen3-30b-a3b --gpu-memory", "replay tiny --policy gready",
    "replay tiny --cache lruu", "replay tinyy", "replay tiny --hw nosuch",
)  # fmt: skip


@pytest.mark.parametrize("words", WITHOUT_MACHINE_CODE)
def test_words_and_lists_need_no_machine_code(counted, words):
    done, (compiled, loaded, modules, has_llvm) = counted(*words.split())
    assert done.returncode in {0, 2}, done.stderr
    assert (compiled, loaded, has_llvm) == (0, 0, False)
    # A refusal looks words up; it does not import what would run.
    limit = 70 if done.returncode else 180
    assert modules <= limit


WITH_MACHINE_CODE = (
    "replay tiny --steps 3",
    "replay tiny --policy hybrimoe --steps 3",
    "replay tiny --cache mine.py --steps 3",
    "hits tiny",
    "compare tiny --steps 3 --jobs 1",
    "trace stats tiny",
    "notebook",
)


@pytest.fixture(scope="module")
def short_runs(counted, tmp_path_factory):
    """A short replay three times with one cache folder, and the files that the second
    one added: the engine.
    """
    folder = tmp_path_factory.mktemp("cache")
    runs = []
    files = []
    for _ in range(3):
        done, _ = counted("replay", "tiny", "--steps", "20", "--json", cache=folder)
        runs.append(done)
        files.append(set((folder / "machine-code").iterdir()))
    return runs, files[1] - files[0]


@pytest.mark.parametrize("words", WITH_MACHINE_CODE)
def test_whoever_waits_for_a_compiler_is_told(counted, short_runs, tmp_path, words):
    """Four functions take half a second; more are announced, terminal or not. The
    engine is there already: whether a run waits for it is another matter.
    """
    _, engine = short_runs
    (tmp_path / "machine-code").mkdir(mode=0o700)
    for file in engine:
        shutil.copy2(file, tmp_path / "machine-code")
    done, (compiled, _, _, _) = counted(*words.split(), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [x for x in done.stderr.splitlines() if x.startswith("compiling")]
    assert len(lines) == (compiled > 4)

    done, (compiled, _, _, _) = counted(*words.split(), cache=tmp_path)
    assert compiled == 0
    assert "compiling" not in done.stderr


def test_the_first_short_run_does_not_wait_for_the_engine(short_runs):
    """SimPy takes it, with the same answer; the second has the engine compiled."""
    engines, figures = [], []
    for done in short_runs[0]:
        answer = json.loads(done.stdout[: done.stdout.index("COUNTED")])
        engines.append(answer["config"].pop("engine"))
        reason = answer["config"].pop("engine_reason")
        assert (reason is None) == (engines[-1] == "fast")
        del answer["wall_s"]
        figures.append(answer)
    assert engines == ["simpy", "compiled", "compiled"]
    assert figures[0] == figures[1] == figures[2]


def test_a_warm_replay_loads_what_it_runs_and_compiles_nothing(counted):
    folder = os.environ["MOESIM_MACHINE_CODE"]
    done, (compiled, loaded, _, _) = counted("replay", "tiny", cache=folder)
    assert done.returncode == 0, done.stderr
    assert compiled == 0
    # The engine's four parts, what two policies bring, sums over tables, the bound.
    assert loaded <= 30


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
    done, (_, _, modules, _) = counted("run", "tiny", PYTHONPATH=path)
    assert done.returncode == 2
    assert "needs torch" in done.stderr
    assert modules <= 70
