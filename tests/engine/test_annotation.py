"""No line of a hot function falls back to Python unnoticed: an untyped local is legal,
and slow.
"""

import ast
import html
import re
from pathlib import Path

import pytest

compiler = pytest.importorskip("Cython.Compiler.Main", reason="no Cython: runs plain")

ROOT = Path(__file__).parents[2]

COLD = {
    "__init__": "once for a run",
    "fill": "once for a memory",
    "machine_of": "once for a run",
    "block_of": "once for a forward pass of a real run",
    "by_key": "once for a run",
    "put": "once for a block",
    "_look_costs_up": "when more tokens come than ever before",
    "_by_size": "likewise",
    "_make_memories": "once for a run",
    "_make_work": "once for a run",
    "_make": "when routing is answered in another shape",
    "_reorder": "of caches that sort what enters",
    "_tell_plan": "of a planner that somebody observes",
    "used_routing": "of altered routing in real runs",
    "evaluations": "once for a run",
}
GENERIC = re.compile(
    r"__Pyx_PyObject_GetAttrStr|PyNumber_\w+|__Pyx_PyNumber_\w+|__Pyx_PyInt_\w+ObjC"
    r"|PyObject_RichCompare|GetModuleGlobalName"
)
"""What C calls where it knows no type: attributes by name, numbers as objects."""

LINE = re.compile(
    r'<pre class="cython line score-\d+"[^>]*>.*?<span class="">(\d+)</span>.*?</pre>\n'
    r"(?:<pre class='cython code score-\d+ '>(.*?)</pre>)?",
    re.DOTALL,
)


def generic_lines(name, folder):
    """Line -> what it asks Python for, by the compiler's own annotation."""
    directives = {
        "language_level": 3,
        "annotation_typing": False,
        "infer_types": True,
        "wraparound": False,
        "cdivision": False,
    }
    options = compiler.CompilationOptions(
        compiler.default_options,
        annotate="default",
        output_file=str(folder / f"{name}.c"),
        include_path=[str(ROOT)],
        compiler_directives=directives,
    )
    source = ROOT / "moesim" / "engine" / f"{name}.py"
    compiler.compile_single(
        str(source), options, full_module_name=f"moesim.engine.{name}"
    )
    page = (folder / f"{name}.html").read_text(encoding="utf-8")
    found = {}
    for number, code in LINE.findall(page):
        asked = set(GENERIC.findall(html.unescape(re.sub(r"<[^>]+>", "", code))))
        if asked:
            found[int(number)] = asked
    return found


def hot_lines(name):
    """Line -> function, without definitions, asserts, and what raises."""
    tree = ast.parse((ROOT / "engine" / f"{name}.py").read_text(encoding="utf-8"))
    hot = {}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name in COLD:
            continue
        if any(ast.unparse(each) == "property" for each in function.decorator_list):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                if hasattr(node, "lineno"):
                    hot.setdefault(node.lineno, function.name)
        for node in ast.walk(function):
            if isinstance(node, ast.Raise | ast.Assert):
                for line in range(node.lineno, node.end_lineno + 1):
                    hot.pop(line, None)
    return hot


@pytest.mark.parametrize(
    "name", ["host", "layer_step", "memory", "operations", "planner", "transfers"]
)
def test_hot_functions_know_the_types_of_what_they_use(name, tmp_path):
    hot = hot_lines(name)
    slow = {
        f"{hot[line]}, line {line}: {sorted(asked)}"
        for line, asked in generic_lines(name, tmp_path).items()
        if line in hot
    }
    assert not slow


def test_an_untyped_local_is_found(tmp_path):
    """Cold functions ask Python by name all the time: that is what would be found."""
    assert generic_lines("host", tmp_path)
