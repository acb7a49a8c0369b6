"""Line charts of Markdown tables as SVG, with the same bytes for the same table."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#1f6fb4", "#d9730d", "#2f9e44", "#c92a2a", "#7048c6")
WIDTH, HEIGHT, LEGEND = 300, 240, 150  # of a panel's axes in pixels, and of the names beside them
LEFT, TOP, BOTTOM = 56, 34, 34
TEXT = 'font-family="sans-serif" font-size="11" fill="#222"'
Series = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Panel:
    """One chart of a table, whose rows are places on the x axis and whose columns are lines.

    - `row`: a pattern of the names of rows that are drawn; its first group is the place.
    - `is_transposed`: columns are places, and rows are lines.
    - `is_log`: both axes show ratios, otherwise differences.
    """

    title: str
    row: str
    is_transposed: bool = False
    is_log: bool = True


def drawing(panels: Sequence[tuple[Panel, str]]) -> str:
    """Draw tables side by side."""
    width, height = LEFT + WIDTH + LEGEND, TOP + HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * len(panels)}" height="{height}">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, (panel, table) in enumerate(panels):
        parts += [f'<g transform="translate({index * width + LEFT} {TOP})">', *_panel(panel, table), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def series_of(panel: Panel, table: str) -> Series:
    """Read the lines of a table. A cell without a number has no point."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    rows.pop(1)
    if panel.is_transposed:
        rows = [list(column) for column in zip(*rows, strict=True)]
    found: Series = {name: [] for name in rows[0][1:]}
    for place, *cells in rows[1:]:
        if (shown := re.fullmatch(panel.row, place)) is None:
            continue
        for name, cell in zip(found, cells, strict=True):
            if number := re.match(r"[\d.]+", cell):
                found[name].append((float(shown[1]), float(number[0])))
    return found


def _panel(panel: Panel, table: str) -> list[str]:
    series = series_of(panel, table)
    places = sorted({x for line in series.values() for x, _ in line})
    most = max(y for line in series.values() for _, y in line)
    least = min(y for line in series.values() for _, y in line) if panel.is_log else 0.0
    marks = (
        [10.0**power * step for power in range(9) for step in (1, 2, 5)]
        if panel.is_log
        else range(0, 101, 20)
    )
    shown = [mark for mark in marks if least <= mark <= most]

    def share(value: float, low: float, high: float) -> float:
        if panel.is_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / (high - low)

    def across(x: float) -> float:
        return WIDTH * share(x, places[0], places[-1])

    def down(y: float) -> float:
        return HEIGHT * (1 - share(y, least, most))

    parts = [f'<text x="0" y="-14" font-weight="bold" {TEXT}>{escape(panel.title)}</text>']
    for mark in shown:
        y = f"{down(mark):.1f}"
        parts.append(f'<line x1="0" x2="{WIDTH}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="-6" y="{y}" dy="4" text-anchor="end" {TEXT}>{mark:g}</text>')
    for place in places:
        parts.append(
            f'<text x="{across(place):.1f}" y="{HEIGHT + 18}" text-anchor="middle" {TEXT}>{place:g}</text>'
        )
    parts.append(f'<path d="M0 0V{HEIGHT}H{WIDTH}" fill="none" stroke="#888"/>')
    for index, (name, line) in enumerate(series.items()):
        points = [f"{across(x):.1f},{down(y):.1f}" for x, y in line]
        colour, middle = COLOURS[index % len(COLOURS)], 8 + 18 * index
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        dots = (point.split(",") for point in points)
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in dots]
        parts.append(f'<rect x="{WIDTH + 12}" y="{middle - 5}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH + 27}" y="{middle}" dy="4" {TEXT}>{escape(name)}</text>')
    return parts
