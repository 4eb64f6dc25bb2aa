"""`moesim list`: what can be named on the command line."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim.cli import options

if TYPE_CHECKING:
    from moesim.policies.parameters import Parameter

POLICY_KINDS = ("assignment", "cache", "prefetch", "routing")
KINDS = (*POLICY_KINDS, "systems", "hardware", "models")


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="|".join(KINDS),
            parser=options.one_of(*KINDS),
            help="One kind; all without it.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """List policies with their parameters, systems, machines or models.

    \b
    Examples:
      moesim list
      moesim list cache
    """
    found = {name: _entries(name) for name in ([kind] if kind else KINDS)}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    from moesim.reporting.tables import facts_lines

    blocks = []
    for name, entries in found.items():
        lines = facts_lines(
            ((entry["name"], _line(entry)) for entry in entries), indent=2
        )
        blocks.append("\n".join([f"{name}:", *lines]))
    print("\n\n".join(blocks))


def _entries(kind: str) -> list[dict[str, Any]]:
    if kind == "systems":
        return _systems()
    if kind == "hardware":
        return _machines()
    return _models() if kind == "models" else _policies(kind)


def _line(entry: dict[str, Any]) -> str:
    """One line of words: the summary, then what else a user must know to name it."""
    words = [entry["summary"]]
    if entry.get("parameters"):
        words.append(
            "["
            + ", ".join(
                f"{p['name']}={p['default']}: {p['accepts']}"
                for p in entry["parameters"]
            )
            + "]"
        )
    if entry.get("oracle"):
        words.append("(oracle: sees the future)")
    if entry.get("needs"):
        words.append(f"(needs {', '.join(entry['needs'])})")
    return " ".join(filter(None, words))


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
    plain = default is None or isinstance(default, bool | int | float | str)
    return {
        "name": parameter.name,
        "accepts": parameter.type_label,
        "default": "?" if default is REQUIRED else default if plain else str(default),
    }


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
    from moesim.hwprofiles.profile import list_profiles, load_profile

    machines = [load_profile(name) for name in list_profiles()]
    return [
        {
            "name": machine.name,
            "summary": f"{machine.kind}: {machine.description}",
            "kind": machine.kind,
        }
        for machine in machines
    ]


def _models() -> list[dict[str, Any]]:
    from moesim.traces.models import known_models, model_shape

    found = []
    for name in known_models():
        shape = model_shape(name)
        summary = (
            f"{shape.layers} MoE layers x {shape.experts} experts, top {shape.top_k},"
            f" hidden {shape.hidden},"
        )
        summary += f" expert intermediate {shape.expert_intermediate}"
        found.append({"name": name, "summary": summary})
    return found
