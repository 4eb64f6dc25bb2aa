"""Which moesim this is: the version, and the commit of a checkout."""

from __future__ import annotations

import functools
from pathlib import Path

__version__ = "0.1.0"

_ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def git_commit() -> str | None:
    """Commit of the checkout that this runs in; None outside one."""
    # An installed package may lie below a repository of its user, which is not ours.
    if not (_ROOT / ".git").exists():
        return None
    import subprocess  # noqa: PLC0415 - `import moesim` need not pay for it

    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],  # noqa: S607 - git is where the user has it
            cwd=_ROOT,
            capture_output=True,
            encoding="utf-8",
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
