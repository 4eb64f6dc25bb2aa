"""What the pages promise: examples run, tables are complete, links lead somewhere."""

import ast
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from matplotlib import image
from support import bench_files as bench
from support import foreign_files as files
from support.doc_examples import LANGUAGES, REASONS, PageRun, examples
from support.small_trace import write_small_trace

import moesim
from moesim.policies import registry
from moesim.traces.format.schema import OPTIONAL_COLUMNS, REQUIRED_COLUMNS
from moesim.traces.timeline.metrics import REQUEST_METRICS, ROW_METRICS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ALL = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
PAGES = [page for page in ALL if page.parent != DOCS / "measurements"]
"""Measurements quote commands and figures of their day; nothing in them is run."""

MARKED = Counter(
    {
        "needs a model": 3,
        "takes minutes": 8,
        "needs a network": 4,
        "needs an interruption": 1,
        "needs your trace": 1,
        "needs a GPU": 1,
    }
)
"""How many examples do not run, by reason: a new one is a decision, no accident."""

PROSE = "def double(x):\n    return 2 * x\n\nimport os\n\nfor line in open(name):\n"


def make_prompts(folder):
    (folder / "prompts.txt").write_text(PROSE)
    (folder / "other.txt").write_text(PROSE[::-1])


def make_dumps(folder):
    files.llama_cpp(folder / "moe_trace.csv", files.routing(((4, 36),)))
    files.moesim_unordered(folder / "unsorted.parquet", files.routing())


def make_profile(folder):
    """A machine like the one that the tests pretend to be, instead of measuring it."""
    shutil.copy(ROOT / "hwprofiles" / "data" / "two-core-host.toml", folder / "hw.toml")


def make_config(folder):
    page = (DOCS / "how-to" / "configuration.md").read_text(encoding="utf-8")
    (toml,) = [block.text for block in examples(page) if block.language == "toml"]
    (folder / "exp.toml").write_text(toml, encoding="utf-8")


def make_sweep(folder):
    page = (DOCS / "how-to" / "sweeps.md").read_text(encoding="utf-8")
    (toml,) = [block.text for block in examples(page) if block.language == "toml"]
    (folder / "sweep.toml").write_text(toml, encoding="utf-8")


def make_rows(folder):
    """Two rows that the author of moe-speed-of-light measured, as llama-bench has them.

    Source: harshithkantamneni/moe-speed-of-light, host 5090_9950X3D_A.
    """
    machine = {
        "cpu_info": "AMD Ryzen 9 9950X3D 16-Core Processor",
        "gpu_info": "NVIDIA GeForce RTX 5090",
        "model_filename": "gpt-oss-120b-MXFP4.gguf",
        "model_type": "gpt-oss 120B MXFP4 MoE",
        "n_threads": 16,
        "spread": 0.002,
    }
    rows = [
        bench.row("tg", 128, 44.5, n_cpu_moe=22, **machine),
        bench.row("tg", 128, 31.7, n_cpu_moe=32, **machine),
    ]
    (folder / "rows.jsonl").write_text(bench.as_jsonl(rows) + "\n")


def make_policy(folder):
    page = (DOCS / "how-to" / "add-a-policy.md").read_text(encoding="utf-8")
    (folder / "mru.py").write_text(examples(page)[0].text, encoding="utf-8")


SETUP = {
    "add-a-policy.md": make_policy,
    "advise.md": make_rows,
    "configuration.md": make_config,
    "import.md": make_dumps,
    "recording.md": make_prompts,
    "runtime.md": make_prompts,
    "sweeps.md": make_sweep,
}
"""Files that the examples of a page take for granted, by the name of the page."""

WITH_REAL_RUNS = {"questions.md", "runtime.md"}


def name_of(page):
    return str(page.relative_to(ROOT))


def text_of(page):
    return page.read_text(encoding="utf-8")


WITH_EXAMPLES = [
    page
    for page in PAGES
    if any(
        example.language not in {"text", "diff"} and example.mark is None
        for example in examples(text_of(page))
    )
    # That page adds files to moesim itself; tests/project/test_extending.py does so in a copy.
    and page.name != "extending.md"
]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_examples_run_and_print_what_the_page_says(page, tmp_path, monkeypatch, capsys):
    """In order, in one empty folder for each page, as a new user would.

    `MOESIM_UPDATE_README=1` writes what is printed now into the page instead, for a
    reader to judge.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(registry, "_registered", {})
    if page.name in WITH_REAL_RUNS:
        make_profile(tmp_path)
    SETUP.get(page.name, lambda folder: None)(tmp_path)
    run = PageRun(text_of(page), capsys)
    run.run()
    assert run.ran
    if os.environ.get("MOESIM_UPDATE_README"):
        page.write_text(run.page, encoding="utf-8")
    assert run.page == text_of(page)
    for kept in re.findall(r"\((\S+/images/\S+)\)", run.page):
        # Drawn by a command of the page, if that names it.
        if (drawn := tmp_path / Path(kept).name).exists():
            old, new = map(image.imread, (page.parent / kept, drawn))
            assert old.shape == new.shape, kept
            assert abs(old - new).mean() < 0.002, kept


def test_examples_that_do_not_run_are_marked_and_counted():
    found = Counter(
        example.mark
        for page in PAGES
        for example in examples(text_of(page))
        if example.mark is not None
    )
    assert set(found) <= REASONS
    assert found == MARKED


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_command_hides_in_another_kind_of_block(page):
    """Every fence says what is in it, so nothing escapes the test above."""
    text = text_of(page)
    blocks = examples(text)
    assert len(blocks) == len(re.findall(r"^ *```", text, flags=re.MULTILINE)) / 2
    for example in blocks:
        assert example.language in LANGUAGES, example.text
        if example.language in {"text", "diff"}:
            command = re.search(
                r"^(\$ |moesim |pip |make )", example.text, re.MULTILINE
            )
            assert command is None, example.text


# Tables and lists.


def test_every_metric_is_defined_once(tmp_path):
    run = moesim.replay(
        write_small_trace(tmp_path / "small.parquet"), "greedy", hw="rtx3090-epyc7532"
    )
    page = text_of(DOCS / "reference" / "metrics.md")
    cells = [
        cell
        for row in re.findall(r"^\| (`.*?) \|", page, flags=re.MULTILINE)
        for cell in re.findall(r"`(\w+)`", row)
    ]
    # Rows of sweeps, and runs with arrivals, have figures of their own.
    others = REQUEST_METRICS.keys() | ROW_METRICS.keys()
    assert sorted(cells) == sorted(run.to_json().keys() | others)


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial/first-comparison.md"])
def test_headlines_compare_systems_as_their_authors_start_them(page):
    """Without --warm two of them hold the lowest ids: 43 % ahead where 4.5 % is so."""
    lines = re.findall(
        r"^(?:\$ )?moesim compare .*", text_of(ROOT / page), re.MULTILINE
    )
    assert lines
    assert all(" --warm " in line for line in lines)


def test_every_column_of_a_trace_is_described_once():
    page = text_of(DOCS / "reference" / "files.md")
    table = page.partition("## Trace")[2].partition("\n## ")[0]
    cells = [
        cell
        for row in re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
        for cell in re.findall(r"`(\w+)`", row)
    ]
    assert sorted(cells) == sorted([*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS])


def test_the_index_leads_to_every_page():
    index = text_of(DOCS / "README.md")
    linked = {
        (DOCS / target).resolve() for target in re.findall(r"\]\(([^)#]+\.md)", index)
    }
    inner = {page for page in DOCS.rglob("*.md") if page != DOCS / "README.md"}
    assert {name_of(page) for page in inner - linked} == set()


# Links and names.


def anchors(page):
    """Anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_links_lead_somewhere(page):
    """Files exist, and so do the headings that are linked to."""
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text_of(page)):
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), f"{target}#{anchor}"


ROOMS = "traces|hwprofiles|policies|engine|sim|runtime|moesim|tests|benchmarks|docs"


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_files_that_are_named_exist(page):
    """`room/file.py` in a page is a file of the checkout."""
    text = text_of(page)
    examples_of_page = set(re.findall(r"^# ([\w/.-]+)$", text, flags=re.MULTILINE))
    for name in re.findall(rf"`((?:{ROOMS})/[\w/-]+\.(?:py|md|yaml))`", text):
        # `x` stands for any policy; files that a page's own example adds come to be.
        known = (ROOT / name).exists() or name.endswith(("/x.py", "/mru.py"))
        assert known or name in examples_of_page or page.name == "CHANGELOG.md", name


def defined(path):
    """Functions, classes and methods (`Class.method`) of a file, and its constants."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef)
            }
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return names


STEP = r"`([\w/]+\.py)`,\s+`([\w.]+)`"
"""One hop of the tour: a file, and a name in it."""


def test_the_strangers_tour_leads_to_functions_that_exist():
    """Ten questions, each answered by files and names in them."""
    page = text_of(DOCS / "explanation" / "architecture.md")
    tour = page.partition("## A stranger's tour")[2].partition("\n## ")[0]
    steps = re.findall(STEP, tour)
    questions = re.findall(r"^\d+\. \*\*(.*?)\*\*", tour, flags=re.MULTILINE)
    assert len(questions) >= 10
    assert len(steps) >= len(questions)
    for file, name in steps:
        assert name in defined(ROOT / file), f"{file}: {name}"
    for answer in re.split(r"^\d+\. ", tour, flags=re.MULTILINE)[1:]:
        assert re.search(STEP, answer), answer.partition("\n")[0]
