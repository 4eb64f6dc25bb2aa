"""Results as data frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.sweeps.rows import DETAILS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import pyarrow as pa


def as_frame(
    table: pa.Table, *, axes: Sequence[str] = (), details: bool = False
) -> pd.DataFrame:
    """One row for each run.

    Args:
        table: with the columns of `moesim.sweeps.rows.row_schema`.
        axes: columns that come first; ``attrs["axes"]`` names them.
        details: keep the columns that only pages and statistics read.
    """
    names = [*axes, *(name for name in table.column_names if name not in axes)]
    if not details:
        names = [name for name in names if name not in DETAILS]
    frame: pd.DataFrame = table.select(names).to_pandas()
    frame.attrs["axes"] = list(axes)
    return frame
