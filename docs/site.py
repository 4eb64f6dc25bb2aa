"""What `mkdocs.yml` cannot say: the order of the pages, and pages made by commands.

Made are a page for every public name (from docstrings), for every kind of policy
(`moesim list`), for all commands (`--help`) and for every notebook.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from typer.testing import CliRunner

from moesim import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
API = "reference/api"
GROUPS = {
    "Runs": "RunConfig MeasuredConfig load_config replay replay_cache"
    " Run",
    "Questions": "compare Comparison gap hit_rates quality search sensitivity",
    "Sweeps": "sweep results query ranking",
    "Answers and figures": "answer Answer Figure style write_perfetto",
    "Traces": "Trace open_trace record load_model import_trace export_trace synth"
    " predict Timeline",
    "Machines": "HardwareProfile list_profiles load_profile save_profile",
    "Policies": "list_policies register",
    "Advice": "advise Advice Job",
}
"""The names of ``moesim.__all__``; one without a group is an error."""

WRITING_POLICIES = (
    "CachePolicy AssignmentPolicy PrefetchPolicy RoutingPolicy Work MachineView Gate"
    " RunContext DelegatingCache DelegatingAssignment RankedCache OutscoringCache"
)
"""What a policy of one's own is made of, all in modules of ``moesim.policies``."""

POLICIES = {
    "assignment": "Assignment policies",
    "cache": "Cache policies",
    "prefetch": "Prefetch policies",
    "routing": "Routing policies",
    "systems": "Systems",
}
BOOSTS = {
    "how-to/add-a-policy.md": 8.0,
    "how-to": 4.0,
    "tutorial": 2.0,
    "reference": 2.0,
    "measurements": 0.25,
}
"""How much a page, or a folder's pages, count in a search; others 1."""

FOREIGN = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?https?:")
"""An element that asks another host for something as the page opens."""


def public_names() -> list[str]:
    """Names that ``moesim/__init__.py`` says are public."""
    source = (ROOT / "moesim" / "__init__.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return [name for name in names if not name.startswith("_")]
    raise ValueError("moesim/__init__.py has no __all__")


def module_of(name: str) -> str:
    """The module of ``moesim.policies`` that defines a class."""
    for path in sorted((ROOT / "policies").glob("*.py")):
        if re.search(
            rf"^class {name}\b", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            return f"moesim.policies.{path.stem}"
    raise ValueError(f"docs/site.py: no module of policies/ defines {name}")


def api_pages() -> Iterator[tuple[str, str]]:
    """A page for every public name, and an index of them."""
    grouped = [name for names in GROUPS.values() for name in names.split()]
    if sorted(grouped) != sorted(public_names()):
        odd = sorted(set(grouped) ^ set(public_names()))
        raise ValueError(f"docs/site.py: expected a group for each name, look at {odd}")

    homes = dict.fromkeys(grouped, "moesim")
    homes |= {name: module_of(name) for name in WRITING_POLICIES.split()}
    for name, home in homes.items():
        yield f"{API}/{name}.md", f"# {home}.{name}\n\n::: {home}.{name}\n"

    lines = ["# Python", "", "`import moesim` gives these names:", ""]
    for title, names in {**GROUPS, "Your own policy": WRITING_POLICIES}.items():
        links = ", ".join(f"[`{name}`]({name}.md)" for name in names.split())
        lines.append(f"- **{title}**: {links}")
    yield f"{API}/index.md", "\n".join([*lines, ""])


def printed(*arguments: str) -> str:
    """What a command of moesim prints."""
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "88"})
    if result.exit_code:
        raise PluginError(f"moesim {' '.join(arguments)}: {result.output}")
    return str(result.output)


def policy_pages() -> Iterator[tuple[str, str]]:
    """A page for every kind of policy: what each does, needs and takes."""
    for kind, title in POLICIES.items():
        lines = [f"# {title}", "", f"As `moesim list {kind}` prints them.", ""]
        for entry in json.loads(printed("list", kind, "--json"))[kind]:
            lines += [f"## {entry['name']}", "", entry["summary"], ""]
            lines += [
                f"- `{each['name']}={each['default']}`: {each['accepts']}"
                for each in entry.get("parameters", ())
            ]
            if entry.get("oracle"):
                lines.append("- Sees the future.")
            if entry.get("needs"):
                lines.append(f"- Needs {', '.join(entry['needs'])}.")
            lines.append("")
        yield f"reference/policies/{kind}.md", "\n".join(lines)


def commands(*group: str) -> Iterator[str]:
    """Every command of a group with its help; those of groups within it follow."""
    words = printed(*group, "--help")
    for word in re.findall(r"^  ([a-z][a-z-]+)  +\S", words, re.MULTILINE):
        text = printed(*group, word, "--help")
        yield f"## {' '.join(['moesim', *group, word])}\n\n```text\n{text}```\n"
        if "COMMAND [ARGS]" in text:
            yield from commands(*group, word)


def notebook_page(path: Path) -> str:
    """A notebook's cells, with the text and the pictures that they printed."""
    parts = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source.replace("](../docs/", "](../"))
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                source = data["image/png"].replace("\n", "")
                parts.append(f'<img alt="" src="data:image/png;base64,{source}">')
            elif text := output.get("text", data.get("text/plain")):
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join([*parts, ""])


def made_pages() -> dict[str, str]:
    """Every page that a command makes, by its path in the site."""
    notebooks = {
        f"notebooks/{path.stem}.md": notebook_page(path)
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
    }
    reference = {"reference/commands.md": "\n".join(["# Commands\n", *commands()])}
    return {**reference, **dict(policy_pages()), **dict(api_pages()), **notebooks}


def navigation(index: str, made: dict[str, str]) -> list[Any]:
    """The sections and links of ``docs/README.md`` in their order, made pages added."""
    sections: list[Any] = [{"Start": "README.md"}]
    for section in index.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        links = re.findall(r"\[([^\]]+)\]\(([\w/-]+\.md)\)", text)
        items: list[Any] = [
            {name[0].upper() + name[1:]: path} for name, path in dict.fromkeys(links)
        ]
        if title == "Tutorial":
            items += [path for path in made if path.startswith("notebooks/")]
        if title == "Reference":
            policies = [path for path in made if path.startswith("reference/policies/")]
            pages = [path for path in made if path.startswith(API)]
            names = [{Path(path).stem: path} for path in sorted(pages, key=str.lower)]
            items += [
                "reference/commands.md",
                {"Policies": policies},
                {"Python": names},
            ]
        sections.append({title: items})
    return sections


MADE = made_pages()


def on_config(config: MkDocsConfig, **_: Any) -> MkDocsConfig:
    """Put the navigation in the order of ``docs/README.md``."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    config.nav = navigation(index, MADE)
    return config


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages that are made to those of ``docs/``."""
    for path, text in MADE.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let answers come before measurements in a search."""
    path = page.file.src_uri
    boost = BOOSTS.get(path) or BOOSTS.get(path.partition("/")[0], 1.0)
    page.meta["search"] = {"boost": boost}
    return markdown


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Refuse a page that would ask another host for anything."""
    if foreign := FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri}: asks another host: {foreign[0]}")
    return output
