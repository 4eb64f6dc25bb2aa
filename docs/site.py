"""What `mkdocs.yml` cannot say: a page for every public name, made from docstrings.

Names are those of ``moesim.__all__``, grouped by what they are for. A name without a
group is an error, so that none is left out.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

FOLDER = "reference/api"
GROUPS = {
    "Runs": "RunConfig MemoryOptions MeasuredConfig load_config replay replay_cache"
    " Run",
    "Questions": "compare compare_cells gap hit_rates quality search sensitivity",
    "Sweeps": "sweep results query ranking",
    "Text, charts and pages": "run_text comparison_text cells_text gap_text sweep_text"
    " placement_figure step_figure comparison_figure cells_figure hits_figure"
    " sweep_figure line_figure Chart write_run write_sweep write_perfetto",
    "Traces": "Trace open_trace record load_model import_trace export_trace synth"
    " predict Timeline",
    "Machines": "HardwareProfile list_profiles load_profile save_profile",
    "Policies": "list_policies register",
    "Advice": "advise Advice Job",
}


def public_names() -> list[str]:
    """What ``moesim/__init__.py`` says is public, without importing it."""
    source = Path(__file__).parents[1] / "moesim" / "__init__.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return [name for name in names if not name.startswith("_")]
    raise ValueError("moesim/__init__.py has no __all__")


def pages() -> dict[str, str]:
    """The pages of the reference, by their paths in the site."""
    grouped = [name for names in GROUPS.values() for name in names.split()]
    if sorted(grouped) != sorted(public_names()):
        odd = sorted(set(grouped) ^ set(public_names()))
        raise ValueError(f"docs/site.py: expected a group for each name, look at {odd}")
    made = {
        f"{FOLDER}/{name}.md": f"# moesim.{name}\n\n::: moesim.{name}\n"
        for name in grouped
    }
    lines = ["# Python", "", "`import moesim` gives these names.", ""]
    for title, names in GROUPS.items():
        links = ", ".join(f"[`{name}`]({name}.md)" for name in names.split())
        lines += [f"- **{title}**: {links}"]
    return {f"{FOLDER}/index.md": "\n".join([*lines, ""]), **made}


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages to those of ``docs/``."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - only the site needs it

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
