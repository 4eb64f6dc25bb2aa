"""Machine code of the project, made before the test processes start: each of them would
compile all of it at once, on a fresh checkout.
"""

from __future__ import annotations

import importlib
import pkgutil
from concurrent.futures import ProcessPoolExecutor, wait

# What takes longest comes first.
FIRST = "moesim.sim.compiled.engine"
PACKAGES = (
    "moesim.policies.assignment",
    "moesim.policies.cache",
    "moesim.policies.prefetch",
    "moesim.traces",
)


def compile_ahead(processes: int) -> None:
    """Import every module that compiles something; the machine code stays on disk."""
    modules = [FIRST]
    for name in PACKAGES:
        package = importlib.import_module(name)
        found = pkgutil.walk_packages(package.__path__, f"{name}.")
        modules += [module.name for module in found]
    with ProcessPoolExecutor(processes) as pool:
        # A module that cannot be imported is for the tests to say.
        wait([pool.submit(importlib.import_module, name) for name in modules])
