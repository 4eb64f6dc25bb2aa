"""Says in one line when the links of a checkout are text files."""

from pathlib import Path

ROOMS = ("policies", "engine", "sim", "runtime", "traces", "hwprofiles")


def check_links(package: Path) -> None:
    """Refuse a checkout without symbolic links.

    Args:
        package: folder of moesim.

    Raises:
        ImportError: a link was checked out as a text.
    """
    for room in ROOMS:
        if (package / room).is_file():
            raise ImportError(
                f"{package / room}: expected a link to the folder {room}, found a text:"
                " this checkout has no symbolic links; on Windows turn on Developer"
                " Mode, then `git config core.symlinks true` and `git checkout --"
                f" {package}`, or install a wheel"
            )
