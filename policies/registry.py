"""Finds policies by name and makes them from specifications such as ``lfu:decay=0.9``.

A policy is one file in one of the folders `routing`, `assignment`, `prefetch`, `cache`;
the file's name, underscores as hyphens, is the policy's name. Listing the names imports
nothing; asking for a policy imports its file only. Other people's packages add theirs
under the entry-point group `moesim.policies` as ``kind.name`` (``"cache.mine" =
"package.module:Class"``), notebooks call `register`, and a path such as ``./mine.py``
works wherever a name does. Names in our own folders come first.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moesim.base.files import sha256
from moesim.base.text import one_expected, unknown
from moesim.policies.answers import with_checks
from moesim.policies.base import (
    AssignmentPolicy,
    CachePolicy,
    Policy,
    PolicyError,
    PrefetchPolicy,
    RoutingPolicy,
)
from moesim.policies.parameters import (
    REQUIRED,
    Parameter,
    parameters,
    source_file,
    split,
    typed,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

KINDS: dict[str, type[Policy]] = {
    "assignment": AssignmentPolicy,
    "cache": CachePolicy,
    "prefetch": PrefetchPolicy,
    "routing": RoutingPolicy,
}
"""The four kinds of policy and their base classes."""

_MUST_ANSWER = {
    "assignment": "assign",
    "cache": "victims",
    "prefetch": "prefetch",
    "routing": "route",
}
"""The one question of each kind without a default."""

GROUP = "moesim.policies"
"""Entry-point group of other people's policies."""

# A Windows path may hold a colon too, so everything up to `.py` is the name.
_SPEC = re.compile(r"(?P<name>.+?\.py|[^:]*)(?::(?P<parameters>.*))?")

_registered: dict[tuple[str, str], type[Policy]] = {}
_names: dict[type[Policy], str] = {}
_scanned: dict[str, dict[str, str]] = {}


class PolicyInfo(NamedTuple):
    """What `moesim list` prints about a policy.

    Attributes:
        kind, name: how it is found.
        summary: first sentence of its docstring, on one line.
        parameters: what it can be told.
        oracle: whether it sees the future.
        needs: trace columns that it reads with its default parameters.
    """

    kind: str
    name: str
    summary: str
    parameters: tuple[Parameter, ...]
    oracle: bool
    needs: tuple[str, ...]


def names(kind: str) -> list[str]:
    """All known names of one kind, sorted.

    Raises:
        PolicyError: there is no such kind.
    """
    registered = {
        name for registered_kind, name in _registered if registered_kind == kind
    }
    return sorted(_files(kind).keys() | _entry_points(kind).keys() | registered)


def knows(name: str, kind: str) -> bool:
    """Whether a name is one of `names`; packages are searched only for what is not
    ours.
    """
    return (
        _module(name, kind) is not None
        or (kind, name) in _registered
        or name in _entry_points(kind)
    )


def find(name: str, kind: str) -> type[Policy]:
    """The class behind a name, or the one policy in a ``.py`` file.

    Raises:
        PolicyError: unknown name, or a file that does not hold exactly one policy of
            this kind.
    """
    # Ours first, so that no package can change what a published name means.
    path = _module(name, kind)
    if path is not None:
        return _named(_only_policy(importlib.import_module(path), kind, path), name)

    if (kind, name) in _registered:
        return _registered[kind, name]

    points = _entry_points(kind)
    if name in points:
        return _named(_load(points[name], kind), name)

    # A path comes last: no registered name may end in `.py`.
    if name.endswith(".py"):
        return _named(_from_file(Path(name), kind), name)

    raise _unknown(name, kind)


def check_name(spec: str, kind: str) -> None:
    """Check that there is a policy of a specification's name, without importing it.

    Raises:
        PolicyError: unknown name.
    """
    name = name_in(spec)
    if not (knows(name, kind) or name.endswith(".py")):
        raise _unknown(name, kind)


def _unknown(name: str, kind: str) -> PolicyError:
    message = unknown(f"{kind} policy", name, names(kind), f"list {kind}")
    return PolicyError(f"{message}{one_expected(name, 'policy')}")


def resolve(spec: str, kind: str, values: Mapping[str, Any] | None = None) -> Policy:
    """Make a policy from a spec such as ``lfu:decay=0.9,variant=perfect``.

    Args:
        spec: a name or the path of a Python file, then optional parameters.
        kind: ``assignment``, ``cache``, ``prefetch`` or ``routing``.
        values: more parameters, already typed (from TOML); those in `spec` win.

    Raises:
        PolicyError: unknown policy or parameter, or a value that does not fit; one line
            that names the policy.
    """
    name, cls, arguments = _read(spec, kind, values)
    where = f"{kind} policy {name!r}"
    missing = _MUST_ANSWER[kind]
    if getattr(cls, missing) is getattr(KINDS[kind], missing):
        raise PolicyError(
            f"{where}: expected {cls.__name__} to define {missing}, found no such"
            " method; policies/base.py describes it"
        )

    try:
        policy = cls(**arguments)
    except PolicyError as error:
        raise PolicyError(f"{where}: {error}") from None
    return policy if _is_ours(cls) else with_checks(policy, where)


def settings(
    spec: str,
    kind: str,
    values: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The effective configuration of a spec: ``name`` and every parameter, defaults
    included; ``file`` and ``sha256`` of a policy that is none of ours.

    Raises:
        PolicyError: as `resolve`, except for what only the constructor checks.
    """
    name, cls, arguments = _read(spec, kind, values)
    effective = {p.name: arguments.get(p.name, p.default) for p in parameters(cls)}
    return {"name": name} | effective | source_of(cls)


def source_of(cls: type[Policy]) -> dict[str, str]:
    """File of a policy that is none of ours, and its SHA-256: what a name cannot say.

    Returns:
        ``file`` and ``sha256``; the digest of its lines alone where it was written into
        a notebook; nothing for our own policies, and where no source is known.
    """
    if _is_ours(cls):
        return {}
    module = sys.modules.get(cls.__module__)
    if module is not None and getattr(module, "__file__", None):
        file = source_file(module)
        if file.is_file():
            return {"file": str(file.absolute()), "sha256": sha256(file)}
    try:
        lines = inspect.getsource(cls)
    except (OSError, TypeError):
        return {}
    return {"sha256": hashlib.sha256(lines.encode()).hexdigest()}


def classes(kind: str) -> dict[str, type[Policy]]:
    """The class of each name of this kind, sorted by name; imports them all."""
    return {name: find(name, kind) for name in names(kind)}


def names_with(kind: str, attribute: str) -> list[str]:
    """Names of this kind whose class has a true `attribute`, such as ``oracle``."""
    return [name for name, cls in classes(kind).items() if getattr(cls, attribute)]


def references(kind: str) -> tuple[str, ...]:
    """Specifications that analyses hold other policies of this kind against: all
    `Policy.reference` texts, sorted by name.
    """
    specs: list[str] = []
    for name, cls in classes(kind).items():
        # Not inherited: a variant of a reference policy is no reference by itself.
        texts = vars(cls).get("reference", ())
        specs += [f"{name}:{text}" if text else name for text in texts]
    return tuple(specs)


def describe(kind: str | None = None) -> list[PolicyInfo]:
    """One entry for each name of this kind, sorted by name; None takes all kinds.
    Imports them all.
    """
    kinds = KINDS if kind is None else (kind,)
    return [
        _info(each, name, cls) for each in kinds for name, cls in classes(each).items()
    ]


def register(kind: str, name: str, cls: type[Policy]) -> None:
    """Make `cls` known under `name` in this process, as a notebook cell does; a second
    call replaces the first.

    Raises:
        PolicyError: no such kind, not a policy of that kind, or the name of a policy of
            ours.
    """
    if _module(name, kind) is not None:
        raise PolicyError(f"{kind} policy {name!r} exists already; choose another name")

    # A colon, comma or path separator in a name could not be told from a parameter or
    # a file on the command line.
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name) or name.endswith(".py"):
        raise PolicyError(
            "policy name: expected lower-case letters, digits, hyphens and dots, got"
            f" {name!r}"
        )
    checked = _checked(cls, kind, f"{kind} policy {name!r}")
    _registered[kind, name] = _named(checked, name)


def registered() -> dict[tuple[str, str], type[Policy]]:
    """Policies that `register` made known in this process, by kind and name."""
    return dict(_registered)


def restore(policies: Mapping[tuple[str, str], type[Policy]]) -> None:
    """Make the policies of another process, as `registered` returned them there, known
    in this one.
    """
    _registered.update(policies)


def name_in(spec: str) -> str:
    """The name or path in a spec, without its parameters."""
    return _parts(spec)[0]


def name_of(policy: Policy | type[Policy]) -> str:
    """The name by which a policy, or its class, was found; empty for one that was never
    looked up.
    """
    cls = policy if isinstance(policy, type) else type(policy)
    return _names.get(cls, "")


def _parts(spec: str) -> tuple[str, str | None]:
    """Name and text of the parameters of a spec; None for no parameters."""
    match = _SPEC.fullmatch(spec.strip())
    if match is None:
        return spec, None
    return match["name"], match["parameters"]


def _read(
    spec: str,
    kind: str,
    values: Mapping[str, Any] | None,
) -> tuple[str, type[Policy], dict[str, Any]]:
    """Name, class and checked constructor arguments of a spec."""
    name, text = _parts(spec)
    cls = find(name, kind)

    try:
        given = split(text) if text else {}
        arguments = typed(cls, {**(values or {}), **given})
    except PolicyError as error:
        raise PolicyError(f"{kind} policy {name!r}: {error}") from None
    return name, cls, arguments


def _is_ours(cls: type[Policy]) -> bool:
    return cls.__module__.startswith("moesim.")


def _named(cls: type[Policy], name: str) -> type[Policy]:
    """Note the registered name of a class; compiled ones have no room for it."""
    _names[cls] = name
    return cls


def _info(kind: str, name: str, cls: type[Policy]) -> PolicyInfo:
    arguments = parameters(cls)

    # Parameters may change what is needed, so an instance is asked. One that cannot be
    # made without arguments is described by its class.
    required = any(p.default is REQUIRED for p in arguments)
    needs = cls.needs if required else cls().needs
    return PolicyInfo(
        kind=kind,
        name=name,
        summary=_first_sentence(cls.__doc__ or ""),
        parameters=arguments,
        oracle=cls.oracle,
        needs=tuple(needs),
    )


def _first_sentence(docstring: str) -> str:
    """First sentence of the first paragraph, without line breaks."""
    paragraph = " ".join(docstring.strip().partition("\n\n")[0].split())
    sentence, stop, _ = paragraph.partition(". ")
    return sentence + "." if stop else sentence


def _module(name: str, kind: str) -> str | None:
    """The module of one of our own policies; None for a name that is none of ours."""
    known = _scanned.get(kind)
    # Runs resolve dozens of names: only an unknown one may be a file just added.
    if known is None or name not in known:
        known = _files(kind)
    return known.get(name)


def _files(kind: str) -> dict[str, str]:
    """Name -> module of every file in the kind's folder; names with a leading
    underscore are helpers.
    """
    if kind not in KINDS:
        raise PolicyError(f"unknown kind of policy {kind!r}; known: {', '.join(KINDS)}")
    folder = importlib.import_module(f"moesim.policies.{kind}")
    # By their sources: a compiled module may outlive its own.
    modules = (
        path.stem for place in folder.__path__ for path in Path(place).glob("*.py")
    )
    _scanned[kind] = {
        name.replace("_", "-"): f"moesim.policies.{kind}.{name}"
        for name in modules
        if not name.startswith("_")
    }
    return _scanned[kind]


def _entry_points(kind: str) -> dict[str, EntryPoint]:
    prefix = f"{kind}."
    return {
        point.name.removeprefix(prefix): point
        for point in entry_points(group=GROUP)
        if point.name.startswith(prefix)
    }


def _load(point: EntryPoint, kind: str) -> type[Policy]:
    """The class that another package's entry point names."""
    where = f"entry point {point.name!r} ({point.value})"
    try:
        cls = point.load()
    except Exception as error:
        # Any failure of foreign code becomes one line that names its package.
        raise PolicyError(f"{where}: {type(error).__name__}: {error}") from error
    return _checked(cls, kind, where)


def _from_file(path: Path, kind: str) -> type[Policy]:
    """The one policy in a user's file, which is imported under a name of ours."""
    if not path.is_file():
        raise PolicyError(
            f"{path}: no such file; expected a Python file with one {kind} policy"
        )
    name = f"moesim_policy_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)

    # Registered before it runs: dataclasses and type hints look their module up there.
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise PolicyError(f"{path}: {type(error).__name__}: {error}") from error
    return _only_policy(module, kind, str(path))


@functools.lru_cache(maxsize=512)
def _only_policy(module: ModuleType, kind: str, where: str) -> type[Policy]:
    """The single public policy that a module defines.

    Raises:
        PolicyError: there is none, or more than one.
    """
    base = KINDS[kind]

    # Classes that were only imported, such as base classes, belong to other modules.
    defined = [
        value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, base)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]
    if len(defined) != 1:
        listed = ", ".join(cls.__name__ for cls in defined) or "none"
        raise PolicyError(
            f"{where}: expected one public subclass of {base.__name__}, found {listed}"
        )
    return defined[0]


def _checked(cls: Any, kind: str, where: str) -> type[Policy]:
    """`cls`, if it is a policy of this kind.

    Raises:
        PolicyError: it is not, or there is no such kind.
    """
    if kind not in KINDS:
        raise PolicyError(f"unknown kind of policy {kind!r}; known: {', '.join(KINDS)}")
    if not (isinstance(cls, type) and issubclass(cls, KINDS[kind])):
        raise PolicyError(
            f"{where}: expected a subclass of {KINDS[kind].__name__}, got {cls!r}"
        )
    return cls
