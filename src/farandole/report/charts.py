"""Line charts as SVG. All colours are CSS variables of the page, so that they follow dark mode and print."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 380, 230
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 34


@dataclass(frozen=True)
class Line:
    """Points with a name; its style is the class of the SVG elements."""

    name: str
    style: str
    points: Sequence[Sequence[float]]
    # Points by themselves, not joined.
    dots: bool = False


@dataclass(frozen=True)
class Axis:
    """The words and the range of an axis."""

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def share(self, value: float) -> float:
        """How far along the axis a value is, from 0 to 1."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return (at - low) / ((high - low) or 1)


def nice(high: float) -> Axis:
    """A linear axis from 0, with four or five round ticks."""
    high = high if high > 0 else 1
    step = 10 ** math.floor(math.log10(high))
    step = next(factor * step for factor in (0.2, 0.25, 0.5, 1, 2) if high / (factor * step) <= 5)
    top = math.ceil(high / step - 1e-9) * step
    return Axis("", 0, top, [(step * number, f"{step * number:,.4g}") for number in range(round(top / step) + 1)])


def decades(values: Sequence[float]) -> Axis:
    """A logarithmic axis from power of ten to power of ten."""
    known = [value for value in values if value > 0] or [1]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known) * 1.0001))
    ticks = [(10.0**power, f"{10.0**power:,.6g}") for power in range(low, high + 1)]
    return Axis("", 10.0**low, 10.0**high, ticks, log=True)


def chart(lines: Sequence[Line], x: Axis, y: Axis, title: str, limit: tuple[float, str] | None = None) -> Markup:
    """Lines over each other, with a dashed limit if there is one."""

    def at(point: Sequence[float]) -> tuple[float, float]:
        across = LEFT + x.share(point[0]) * (WIDTH - LEFT - RIGHT)
        return round(across, 1), round(HEIGHT - BOTTOM - y.share(point[1]) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for value, label in y.ticks:
        _, up = at((x.low, value))
        parts.append(f'<path class="grid" d="M{LEFT} {up}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{up + 3.5}" text-anchor="end">{escape(label)}</text>')
    for value, label in x.ticks:
        across, _ = at((value, y.low))
        end = "end" if across > WIDTH - 24 else "middle"
        parts.append(f'<text class="tick" x="{across}" y="{HEIGHT - 18}" text-anchor="{end}">{escape(label)}</text>')
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{escape(x.label)}</text>')
    if limit:
        _, up = at((x.low, limit[0]))
        above = up - 5 if up > TOP + 16 else up + 13
        parts.append(f'<path class="limit" d="M{LEFT} {up}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="limit-words" x="{LEFT + 4}" y="{above}">{escape(limit[1])}</text>')
    for line in lines:
        places = [at(point) for point in line.points]
        if not line.dots and len(places) > 1:
            path = "L".join(f"{across} {up}" for across, up in places)
            parts.append(f'<path class="line {line.style}" d="M{path}"/>')
        if line.dots or len(places) < 12:
            parts += [_mark(line.style, across, up) for across, up in places]
    return Markup("".join([*parts, "</svg>"]))  # noqa: S704, its parts are escaped


def _mark(style: str, across: float, up: float) -> str:
    """A square for the second line, so that colour is not the only difference."""
    if style == "b":
        return f'<rect class="mark b" x="{across - 3:.1f}" y="{up - 3:.1f}" width="6" height="6"/>'
    return f'<circle class="mark {style}" cx="{across}" cy="{up}" r="{4.5 if style == "measured" else 3}"/>'
