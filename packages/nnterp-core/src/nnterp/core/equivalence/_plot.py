"""The heat map: one cell for each value of each block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._report import Report, ValueReport

# What is smaller is drawn as this, no difference at all too.
_SMALLEST = 1e-8


def heat_map(report: Report, path: Path) -> None:
    """Write the largest difference of every value as a PNG, layer by value.

    Values of the model itself stand beside the blocks: at the top what comes before them, at the
    bottom what comes after. What departs has a red frame, the first of it a thick one.

    Args:
        report: the comparison.
        path: the file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('a heat map needs matplotlib: pip install "nnterp-core[plot]"') from error

    blocks = [value for value in report.values if value.layer is not None]
    names = list(dict.fromkeys(value.name for value in blocks))
    layers = sorted({value.layer for value in blocks if value.layer is not None})
    alone = _beside(report, len(layers))
    rows = max([len(layers), *(row + 1 for row in alone)])
    figure: Any = Figure(
        figsize=(0.55 * len(names) + 4.5, 0.22 * rows + 2.2), dpi=150, layout="constrained"
    )
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[max(1, len(names)), 1])

    cells = {
        (layers.index(value.layer), names.index(value.name)): value
        for value in blocks
        if value.layer is not None
    }
    image = _drawn(left, cells, len(layers), len(names), report)
    short = [name.rsplit(".", 1)[-1] for name in names]
    left.set_xticks(range(len(names)), short, rotation=50, ha="right", fontsize=7)
    shown = range(0, len(layers), max(1, len(layers) // 30))
    left.set_yticks(list(shown), [str(layers[row]) for row in shown], fontsize=7)
    left.set_ylabel("block", fontsize=8)

    _drawn(right, {(row, 0): value for row, value in alone.items()}, rows, 1, report)
    right.set_xticks([])
    right.set_yticks(list(alone), [value.key for value in alone.values()], fontsize=7)
    right.yaxis.tick_right()
    right.spines[:].set_visible(False)

    bar = figure.colorbar(image, ax=[left, right], fraction=0.04, pad=0.02)
    bar.set_label("largest difference of a row, over the row", fontsize=7)
    bar.ax.tick_params(labelsize=7)
    outcome = "agree" if report.first is None else f"depart first at {report.first.key}"
    figure.suptitle(
        f"{report.a.engine} {report.a.dtype} and {report.b.engine} {report.b.dtype}: {outcome}",
        fontsize=9,
    )
    figure.savefig(path)


def _beside(report: Report, layers: int) -> dict[int, ValueReport]:
    """The rows of the model's own values, in a column that is as high as the blocks."""
    keys = [value.key for value in report.values]
    first = next((i for i, key in enumerate(keys) if key.startswith("layers.")), len(keys))
    alone = [(i, value) for i, value in enumerate(report.values) if value.layer is None]
    before = [value for i, value in alone if i < first]
    after = [value for i, value in alone if i > first]
    start = max(layers - len(after), len(before))
    return {
        **dict(enumerate(before)),
        **{start + i: value for i, value in enumerate(after)},
    }


def _drawn(
    axes: Any, cells: Mapping[tuple[int, int], ValueReport], rows: int, columns: int, report: Report
) -> Any:
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    grid = [[math.nan] * max(1, columns) for _ in range(max(1, rows))]
    for (row, column), value in cells.items():
        worst = value.worst()
        if worst is None:
            continue
        grid[row][column] = min(1.0, max(_SMALLEST, worst[1].error))
        if value.departs:
            first = report.first is not None and value.key == report.first.key
            corner = (column - 0.46, row - 0.46)
            width = 2.4 if first else 0.7
            axes.add_patch(
                Rectangle(corner, 0.92, 0.92, fill=False, edgecolor="red", linewidth=width)
            )
    return axes.imshow(grid, norm=LogNorm(_SMALLEST, 1), cmap="viridis", aspect="auto")
