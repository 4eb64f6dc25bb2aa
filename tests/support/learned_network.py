"""A network for FlashMoE's learned cache, really trained: on the shipped calibration
trace, in a tenth of a second.

It was trained for the shipped model; other shapes get its first layers and experts, or
these again and again. What every policy promises must hold for it there too; what it
learned is judged in `test_flashmoe`, on its own model only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np

DATA = Path(__file__).parents[2] / "traces" / "data"


class Artefacts(Mapping[str, dict[str, np.ndarray]]):
    """What policies find among their artefacts; the network is trained when it is first
    asked for.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.layers = layers
        self.experts = experts

    def __getitem__(self, name: str) -> dict[str, np.ndarray]:
        """Train, if need be."""
        if name != "flashmoe":
            raise KeyError(name)
        return network(self.layers, self.experts)

    def __iter__(self) -> Iterator[str]:
        """The one name."""
        return iter(["flashmoe"])

    def __len__(self) -> int:
        """One."""
        return 1


@cache
def trained():
    """The network of the shipped model."""
    from moesim.runtime.train_cache import train
    from moesim.traces.format.batch import compose
    from moesim.traces.format.reader import open_trace

    calibration = open_trace(DATA / "tiny_calibration.parquet")
    training = train(list(compose(calibration)), calibration.shape, hidden=16, epochs=8)
    assert (
        training.facts["validation_loss_best"] < training.facts["validation_loss_first"]
    )
    return training.network


@cache
def network(layers: int, experts: int) -> dict[str, np.ndarray]:
    """Its arrays for a model of `layers` x `experts`."""
    network_of_shipped = trained()
    layer = np.arange(layers) % network_of_shipped.layers
    expert = np.arange(experts) % network_of_shipped.experts
    inputs = np.concatenate((expert, network_of_shipped.experts + expert))
    return {
        "w1": network_of_shipped.w1[layer][:, :, inputs],
        "b1": network_of_shipped.b1[layer],
        "w2": network_of_shipped.w2[layer],
        "b2": network_of_shipped.b2[layer],
        "w3": network_of_shipped.w3[layer][:, expert],
        "b3": network_of_shipped.b3[layer][:, expert],
    }


def write(folder: Path, layers: int, experts: int) -> Path:
    """Save it as `--artefacts` takes it; returns the folder."""
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    arrays = {
        name: np.ascontiguousarray(array)
        for name, array in network(layers, experts).items()
    }
    save_file(arrays, folder / "flashmoe.safetensors")
    return folder
