"""The heat map: one cell for each value of each block."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ._report import Report


def heat_map(report: Report, path: Path) -> None:
    """Write the largest difference of every value as a PNG, layer by value.

    Values of the model itself stand in rows of their own, above and below the blocks. What departs
    has a red frame, the first of it a thick one.

    Args:
        report: the comparison.
        path: the file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError('a heat map needs matplotlib: pip install "nnterp-core[plot]"') from error

    blocks = [value for value in report.values if value.layer is not None]
    names = list(dict.fromkeys(value.name for value in blocks))
    alone = [value for value in report.values if value.layer is None]
    layers = sorted({value.layer for value in blocks if value.layer is not None})
    height = max(2.6, 0.24 * len(layers) + 1.9)
    figure: Any = Figure(
        figsize=(max(6.0, 0.5 * (len(names) + len(alone)) + 2.5), height),
        dpi=150,
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[max(1, len(names)), max(1, len(alone))])
    norm, colours = LogNorm(1e-8, 1), "viridis"
    first = None if report.first is None else report.first.key

    def fill(axes: Any, columns: list[str], rows: list[str], cells: dict[Any, Any]) -> Any:
        grid = [[math.nan] * len(columns) for _ in rows]
        for (row, column), value in cells.items():
            worst = value.worst()
            if worst is None:
                continue
            # A value without any difference is shown as the smallest.
            grid[row][column] = min(1.0, max(1e-8, worst[1].error))
            if value.departs:
                wide = 2.4 if value.key == first else 0.8
                frame = Rectangle(
                    (column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=wide
                )
                axes.add_patch(frame)
        image = axes.imshow(grid, norm=norm, cmap=colours, aspect="auto")
        axes.set_xticks(range(len(columns)), columns, rotation=60, ha="right", fontsize=7)
        axes.set_yticks(range(len(rows)), rows, fontsize=7)
        return image

    image = fill(
        left,
        [name.rsplit(".", 1)[-1] for name in names],
        [str(layer) for layer in layers],
        {
            (layers.index(value.layer), names.index(value.name)): value
            for value in blocks
            if value.layer is not None
        },
    )
    left.set_ylabel("block")
    # A model has some ten blocks at least; every row of the scale cannot be named.
    step = max(1, len(layers) // 24)
    left.set_yticks(range(0, len(layers), step), [str(one) for one in layers[::step]], fontsize=7)
    fill(
        right,
        [value.key for value in alone],
        ["model"],
        {(0, column): value for column, value in enumerate(alone)},
    )
    bar = figure.colorbar(image, ax=[left, right], fraction=0.04, pad=0.02)
    bar.set_label("largest difference of a row", fontsize=7)
    bar.ax.tick_params(labelsize=7)
    outcome = "agree" if report.agree else f"depart from {first} on"
    figure.suptitle(
        f"{report.a.engine} {report.a.dtype} and {report.b.engine} {report.b.dtype}: {outcome}",
        fontsize=9,
    )
    figure.savefig(path)
