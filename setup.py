"""Extensions: every Python file that has a `.pxd` beside it, compiled where there is a
C compiler. Without one the installation runs the same Python files.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
ROOMS = ("policies", "engine", "sim", "traces", "moesim/runs")
SHARED = "moesim._cyutility"
"""What all extensions have in common, once."""

DIRECTIVES = {
    "language_level": 3,
    # Types stand in the `.pxd`; annotations are for people and type checkers.
    "annotation_typing": False,
    "infer_types": True,
    # Answers of policies are indices: nothing that a user writes may leave an array.
    "boundscheck": True,
    "initializedcheck": True,
    "nonecheck": True,
    "wraparound": False,
    # As Python divides, so that both ways of running agree.
    "cdivision": False,
}
if sys.platform == "win32":
    FLAGS = ["/O2", "/fp:precise"]
else:
    # The same bits on every machine: no fused multiplication and addition.
    FLAGS = ["-O2", "-g0", "-ffp-contract=off", "-fno-fast-math"]


def typed_files() -> list[Path]:
    """Python files with C types beside them."""
    # Rooms are linked into the package; a glob does not follow links.
    return sorted(
        path.with_suffix(".py")
        for room in ROOMS
        for path in (ROOT / room).rglob("*.pxd")
        if path.name != "__init__.pxd"
    )


def name_of(path: Path) -> str:
    """The name under which a file is imported."""
    inside = path.relative_to(ROOT).with_suffix("")
    package = () if inside.parts[0] == "moesim" else ("moesim",)
    return ".".join((*package, *inside.parts))


def loaded(name: str) -> Any:
    """A module of `moesim.base`, which imports nothing of ours."""
    where = ROOT / "moesim" / "base" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, where)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class OptionalBuild(build_ext):
    """Compiles what can be compiled; what cannot stays Python."""

    def run(self) -> None:
        """Build all extensions or none, and note what they were made of."""
        notes = "moesim/_extensions.json"
        places = [Path(self.build_lib) / notes]
        if self.inplace:
            places = [ROOT / notes]
        for place in places:
            place.unlink(missing_ok=True)
        self.parallel = self.parallel or os.cpu_count()
        try:
            super().run()
        except Exception as problem:  # noqa: BLE001 - each compiler fails in its own way
            print(f"moesim: runs uncompiled, about 40 times slower: {problem}")
            self.extensions = []
            return
        for place in places:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(json.dumps(self._digests(), indent=1), encoding="utf-8")

    def _digests(self) -> dict[str, str]:
        digest_of = loaded("extensions").digest_of
        return {name_of(path): digest_of(path) for path in typed_files()}


def extensions() -> list[Extension]:
    """Modules with C types, under the names by which they are imported."""
    try:
        from Cython.Build import cythonize
    except ImportError:
        return []
    found = []
    for path in typed_files():
        name = name_of(path)
        source = os.path.join(*name.split(".")) + ".py"
        found.append(Extension(name, [source], extra_compile_args=FLAGS))
    source = os.path.join(*SHARED.split(".")) + ".c"
    found.append(Extension(SHARED, [source], extra_compile_args=FLAGS))
    return cythonize(
        found,
        compiler_directives=DIRECTIVES,
        shared_utility_qualified_name=SHARED,
        annotate=bool(os.environ.get("MOESIM_ANNOTATE")),
        build_dir="build/cython",
        quiet=True,
        show_all_warnings=False,
    )


try:
    loaded("extensions").check_links(ROOT / "moesim")
except ImportError as problem:
    sys.exit(f"error: {problem}")
setup(ext_modules=extensions(), cmdclass={"build_ext": OptionalBuild})
