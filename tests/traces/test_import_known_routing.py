"""A known routing, written as each engine would, comes back equal or is refused."""

import pytest
from support.drawn_imports import ENGINES, outcome

from moesim.traces.importers import importers

DRAWS = 25
"""Of each importer."""


@pytest.mark.parametrize("importer", ENGINES)
def test_what_comes_back_is_what_was_routed(tmp_path, importer):
    refusals = []
    for seed in range(DRAWS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            refusals.append(outcome(importer, seed, folder))
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}")
    equal = refusals.count("")
    assert equal >= DRAWS / 2, f"refused: {sorted(set(filter(None, refusals)))}"


def test_every_importer_has_an_engine_here():
    assert ENGINES.keys() == importers().keys()
