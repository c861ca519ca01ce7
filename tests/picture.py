"""Draw what a terminal shows of a recorded run, as an SVG that moves.

    python tests/picture.py .farandole/.plays/NAME/TIME docs/validate.svg --still -1 --command "farandole validate"

Every line is what the viewer makes of the run's own events. `--still -1` draws the end alone.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from rich.console import Console
from rich.text import Text

from farandole.watch.durations import load
from farandole.watch.events import DURATIONS, EVENTS, LOG, Reader, parse
from farandole.watch.viewer import THEME, shown
from farandole.watch.watched import Watched, seconds

LETTER, LINE, MARGIN = 7.3, 17.5, 16
COLOURS = {
    "red": "#f47067", "green": "#6bbf6d", "yellow": "#daaa3f", "cyan": "#56b6c2", "bright_black": "#7d8590",
    "": "#d4d7dd",
}  # fmt: skip
FONT = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


@dataclass
class Drawing:
    """Rows of text, each of which is drawn once and used wherever it is shown."""

    columns: int
    rows: int
    known: dict[str, str] = field(default_factory=dict)
    frames: list[str] = field(default_factory=list)
    console: Console = field(default_factory=lambda: Console(theme=THEME, color_system="standard"))

    def add(self, lines: Sequence[Text]) -> None:
        """Add a screen full of lines; those that are too long take several."""
        parts = [part for line in lines for part in line.divide(range(self.columns, len(line), self.columns))]
        uses = (
            f'<use href="#{self._row(line)}" y="{number * LINE:g}"/>'
            for number, line in enumerate(parts[-self.rows :])
            if line.plain.strip()
        )
        self.frames.append("".join(uses))

    def _row(self, line: Text) -> str:
        at, parts = 0, []
        for piece in line.render(self.console):
            if piece.text.strip():
                start = at + len(piece.text) - len(piece.text.lstrip())
                text = piece.text.strip("\n").strip()
                colour = piece.style.color.name if piece.style and piece.style.color else ""
                bold = ' font-weight="bold"' if piece.style and piece.style.bold else ""
                parts.append(
                    f'<text x="{MARGIN + start * LETTER:.1f}" textLength="{len(text) * LETTER:.1f}" '
                    f'fill="{COLOURS.get(colour, COLOURS[""])}"{bold} xml:space="preserve">{escape(text)}</text>'
                )
            at += len(piece.text)
        return self.known.setdefault("".join(parts), f"r{len(self.known)}")

    def svg(self, label: str, duration: float) -> str:
        """The whole picture; whoever wants no motion sees the end."""
        width, height = 2 * MARGIN + self.columns * LETTER, 2 * MARGIN + self.rows * LINE
        share = 100 / len(self.frames)
        style = (
            f"g.f{{visibility:hidden;animation:f {duration:g}s step-end infinite}}"
            f"@keyframes f{{0%{{visibility:visible}}{share:.3f}%{{visibility:hidden}}}}"
            "@media(prefers-reduced-motion:reduce){g.f{animation:none}g.f:last-of-type{visibility:visible}}"
        )
        moves = len(self.frames) > 1
        frames = "\n".join(
            f'<g class="f" style="animation-delay:{number * duration / len(self.frames):.2f}s">{frame}</g>'
            if moves else f"<g>{frame}</g>"
            for number, frame in enumerate(self.frames)
        )  # fmt: skip
        defs = "\n".join(f'<g id="{name}">{text}</g>' for text, name in self.known.items())
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
            f'aria-label="{escape(label)}">\n<style>{style if moves else ""}</style>\n'
            f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#16181d"/>\n'
            f"<defs>\n{defs}\n</defs>\n"
            f'<g font-family="{FONT}" font-size="12.1" transform="translate(0 {MARGIN + 13})">\n'
            f"{frames}\n</g>\n</svg>\n"
        )


def screens(folder: Path, command: str, columns: int, step: float) -> Iterator[list[Text]]:
    """What the terminal shows, every so many seconds and at the end."""
    watched = Watched(last=load(folder.parent / DURATIONS))
    stay = [Text(f"$ {command}", "bold")]
    events = [event for raw in Reader(folder / EVENTS).lines() if (event := parse(raw))]
    due = seconds(events[0])
    for event in events:
        while seconds(event) > due:
            yield [*stay, *watched.picture(due, columns, 12)]
            due += step
        stay += [line for line in watched.see(event) if line.style != "play"]
    first, *rest = watched.closing()
    yield [*stay, first, Text(f"log: {shown(folder.resolve() / LOG)}", "bright_black"), *rest]


def main() -> None:
    """Draw a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of the run")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--command", default="farandole apply -i inventory/mine")
    parser.add_argument("--label", default="farandole apply, from bare nodes to a cluster")
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--step", type=float, default=3, help="seconds of the run between two frames")
    parser.add_argument("--frame", type=float, default=0.5, help="seconds for which each is shown")
    parser.add_argument("--still", type=int, help="draw only the frame of this number; -1 is the end")
    arguments = parser.parse_args()
    drawing = Drawing(arguments.columns, arguments.rows)
    every = [*screens(arguments.run, arguments.command, arguments.columns, arguments.step)]
    # The end stays for a while.
    chosen = [every[arguments.still]] if arguments.still is not None else every + every[-1:] * int(4 / arguments.frame)
    for lines in chosen:
        drawing.add(lines)
    arguments.picture.write_text(drawing.svg(arguments.label, len(drawing.frames) * arguments.frame))


if __name__ == "__main__":
    main()
