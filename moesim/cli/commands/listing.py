"""`moesim list`: what can be named on the command line.

The module is not called ``list``, which would hide the built-in type beside it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moesim.base.options import JsonOptions, option
from moesim.cli import output
from moesim.cli.options import from_dataclass

if TYPE_CHECKING:
    from moesim.policies.parameters import Parameter


POLICY_KINDS = ("assignment", "cache", "prefetch", "routing")
KINDS = (*POLICY_KINDS, "systems", "machines", "models")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions(JsonOptions):
    """What is listed."""

    kind: str | None = option(
        None, "One kind; all without it.", argument=True, choices=KINDS
    )


@from_dataclass(from_file=False)
def list_(options: ListOptions) -> None:
    """List policies with their parameters, systems, machines or models.

    \b
    Examples:
      moesim list
      moesim list cache
    """
    kinds = [options.kind] if options.kind else KINDS
    entries_by_kind = {name: _entries(name) for name in kinds}
    from moesim.reporting.tables import facts_lines

    blocks = []
    for name, entries in entries_by_kind.items():
        # Names of one kind are read as a column.
        facts = [(entry["name"], _line(entry)) for entry in entries]
        blocks.append("\n".join([f"{name}:", *facts_lines(facts, indent=2)]))
    output.tell(options, entries_by_kind, ["\n\n".join(blocks)])


def _entries(kind: str) -> list[dict[str, Any]]:
    # Kinds of policies come last: they share one way to be listed.
    if kind == "systems":
        return _systems()
    if kind == "machines":
        return _machines()
    return _models() if kind == "models" else _policies(kind)


def _line(entry: dict[str, Any]) -> str:
    """One line: the summary, then what else a user must know to name it."""
    parts = [entry["summary"]]
    if entry.get("parameters"):
        parameters = [
            f"{p['name']}={p['default']}: {p['accepts']}" for p in entry["parameters"]
        ]
        parts.append(f"[{', '.join(parameters)}]")
    if entry.get("oracle"):
        parts.append("(oracle: sees the future)")
    if entry.get("needs"):
        parts.append(f"(needs {', '.join(entry['needs'])})")
    return " ".join(filter(None, parts))


def _policies(kind: str) -> list[dict[str, Any]]:
    from moesim.policies.registry import describe

    return [
        {
            "name": info.name,
            "summary": info.summary,
            "parameters": [_parameter(parameter) for parameter in info.parameters],
            "oracle": info.oracle,
            "needs": list(info.needs),
        }
        for info in describe(kind)
    ]


def _parameter(parameter: "Parameter") -> dict[str, Any]:
    from moesim.policies.parameters import REQUIRED

    default = parameter.default
    is_plain = default is None or isinstance(default, bool | int | float | str)
    if default is REQUIRED:
        default = "?"
    elif not is_plain:
        # JSON has no word for it, but people can read it.
        default = str(default)
    return {"name": parameter.name, "accepts": parameter.type_label, "default": default}


def _systems() -> list[dict[str, Any]]:
    from moesim.policies.systems import SYSTEMS

    return [
        {
            "name": name,
            "summary": (
                f"{system.assignment} + {system.cache} + {system.prefetch} +"
                f" {system.routing}; {system.note}"
            ),
            "assignment": system.assignment,
            "cache": system.cache,
            "prefetch": system.prefetch,
            "routing": system.routing,
        }
        for name, system in sorted(SYSTEMS.items())
    ]


def _machines() -> list[dict[str, Any]]:
    from moesim.hwprofiles.profile import shipped_heads

    return [
        {
            "name": name,
            "summary": f"{head['kind']}: {head['description']}",
            "kind": head["kind"],
        }
        for name, head in shipped_heads().items()
    ]


def _models() -> list[dict[str, Any]]:
    from moesim.traces.models import known_models, model_shape

    entries = []
    for name in known_models():
        shape = model_shape(name)
        summary = (
            f"{shape.layers} MoE layers x {shape.experts} experts, top {shape.top_k},"
            f" hidden {shape.hidden},"
            f" expert intermediate {shape.expert_intermediate}"
        )
        entries.append({"name": name, "summary": summary})
    return entries


@from_dataclass(from_file=False)
def config() -> None:
    """Print a TOML file with every option that runs share, what it means, and its
    default; for --config.

    \b
    Example:
      moesim config > exp.toml
    """
    from moesim.runs.config_file import toml_template

    # Made from the fields, so it cannot be out of date.
    print(toml_template(), end="")
