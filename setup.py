"""Extensions: every Python file that has a `.pxd` beside it, compiled where there is a
C compiler. Without one the installation runs the same Python files.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
ROOMS = ("policies", "engine", "sim")
DIRECTIVES = {
    "language_level": 3,
    "annotation_typing": False,
    "infer_types": True,
    # Answers of policies are indices: nothing that a user writes may leave an array.
    "boundscheck": True,
    "wraparound": False,
    "initializedcheck": True,
    "nonecheck": True,
    # As Python divides, so that both ways of running agree.
    "cdivision": False,
}
FLAGS = ["-O2", "-g0"]
if sys.platform == "win32":
    FLAGS = ["/O2", "/fp:precise"]
else:
    # The same bits on every machine: no fused multiplication and addition.
    FLAGS += ["-ffp-contract=off", "-fno-fast-math"]


class OptionalBuild(build_ext):
    """Compiles what can be compiled; what cannot stays Python."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as problem:  # noqa: BLE001 - every compiler fails in its own way
            self._skip(problem)

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as problem:  # noqa: BLE001 - see above
            self._skip(problem)

    def copy_extensions_to_source(self) -> None:
        self.extensions = [
            ext
            for ext in self.extensions
            if Path(self.get_ext_fullpath_in_build(ext.name)).exists()
        ]
        super().copy_extensions_to_source()

    def get_ext_fullpath_in_build(self, name: str) -> str:
        return str(Path(self.build_lib) / self.get_ext_filename(name))

    def _skip(self, problem: Exception) -> None:
        print(f"moesim: runs uncompiled, about 40 times slower: {problem}")


def extensions() -> list[Extension]:
    """Modules with C types, under the names by which they are imported."""
    try:
        from Cython.Build import cythonize
    except ImportError:
        return []
    typed = sorted(
        path.with_suffix(".py")
        for room in ROOMS
        for path in (ROOT / room).rglob("*.pxd")
        if path.name != "__init__.pxd"
    )
    found = []
    for path in typed:
        inside = path.relative_to(ROOT).with_suffix("")
        name = ".".join(("moesim", *inside.parts))
        source = os.path.join("moesim", *inside.parts) + ".py"
        found.append(Extension(name, [source], extra_compile_args=FLAGS))
    shared = "moesim._cyutility"
    found.append(Extension(shared, ["moesim/_cyutility.c"], extra_compile_args=FLAGS))
    return cythonize(
        found,
        compiler_directives=DIRECTIVES,
        shared_utility_qualified_name=shared,
        annotate=bool(os.environ.get("MOESIM_ANNOTATE")),
        build_dir="build/cython",
        nthreads=0,
    )


setup(ext_modules=extensions(), cmdclass={"build_ext": OptionalBuild})
