"""HTML parts of the report: document, tables, line charts, images.

The page contains all its data; its content security policy blocks all network requests.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence

import cv2
import numpy as np
from matplotlib.ticker import MaxNLocator

POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)

STYLE = """
:root { color-scheme: light dark; --ink: #1b2028; --paper: #fff; --soft: #f1f3f6; --line: #d5dae2;
  --quiet: #5d6675; --accent: #b35900; --a: #1f6fb2; --b: #c2410c; --heat: 194, 65, 12; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaf0; --paper: #14171c; --soft: #1f242c;
  --line: #39414e; --quiet: #9aa4b5; --accent: #ffab57; --a: #6bb3f2; --b: #ff9159;
  --heat: 255, 125, 60; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
p { margin: .4rem 0; } .quiet { color: var(--quiet); font-size: .9rem; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .6rem;
  margin: 1rem 0; }
.tile { background: var(--soft); border-radius: .5rem; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.4rem; }
.tile span { color: var(--quiet); font-size: .85rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr));
  gap: 1rem; }
figure { margin: 0; } figcaption { font-size: .9rem; color: var(--quiet); }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--quiet); font-size: 11px; }
.wide { overflow-x: auto; -webkit-overflow-scrolling: touch; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th, td { padding: .3rem .55rem; border-bottom: 1px solid var(--line); text-align: left; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid var(--accent); }
th[aria-sort=ascending] button::after { content: " \\25b2"; }
th[aria-sort=descending] button::after { content: " \\25bc"; }
input { font: inherit; width: 100%; max-width: 24rem; padding: .4rem .6rem; margin: 0 0 .6rem;
  color: inherit; background: var(--soft); border: 1px solid var(--line); border-radius: .4rem; }
.matrix td { text-align: center; min-width: 2.2rem; border: 1px solid var(--line); }
.matrix { width: auto; } .matrix th { font-weight: 400; white-space: nowrap; }
.matrix thead th { writing-mode: vertical-rl; transform: rotate(180deg); max-height: 12rem; }
.pixels { image-rendering: pixelated; width: 100%; max-width: 40rem; }
.errors { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr));
  gap: 1rem; }
.error { background: var(--soft); border-radius: .5rem; padding: .6rem; }
.error img { width: 100%; border-radius: .3rem; }
.missing { display: grid; place-items: center; aspect-ratio: 4; color: var(--quiet);
  border: 1px dashed var(--line); border-radius: .3rem; }
pre { background: var(--soft); padding: .8rem; border-radius: .5rem; overflow-x: auto;
  font-size: .8rem; }
"""

SCRIPT = """
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => {
    const text = row.cells[column].dataset.value ?? row.cells[column].textContent;
    const number = Number(text);
    return text !== "" && !Number.isNaN(number) ? number : text;
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number"
    ? a - b : String(a).localeCompare(String(b));
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const rows = [...body.rows].sort((a, b) =>
      (up ? 1 : -1) * compare(value(a, column), value(b, column)));
    body.append(...rows);
  }));
}
for (const input of document.querySelectorAll("input[data-for]")) {
  const rows = [...document.getElementById(input.dataset.for).tBodies[0].rows];
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\\s+/);
    for (const row of rows)
      row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
  });
}
"""


def escape(value: object) -> str:
    return html.escape(str(value), quote=True)


def document(title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head>
<body>
{body}
<script>{SCRIPT}</script>
</body></html>
"""


def tile(value: str, meaning: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(meaning)}</span></div>'


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, name: str = "") -> str:
    """An HTML table. If `name` (its HTML id) is not "", readers can sort and search the table."""
    rows = [list(row) for row in rows]
    classes = [
        "n" if rows and all(isinstance(row[i], (int, float)) for row in rows) else ""
        for i in range(len(columns))
    ]
    wrap = "<button>{}</button>" if name else "{}"
    head = "".join(
        f'<th class="{css}">{wrap.format(escape(title))}</th>'
        for title, css in zip(columns, classes)
    )
    body = "".join("<tr>" + "".join(map(_cell, row, classes)) + "</tr>\n" for row in rows)
    search = attributes = ""
    if name:
        search = (
            f'<input type="search" data-for="{escape(name)}" placeholder="search" '
            'aria-label="search the table">'
        )
        attributes = f' class="sortable" id="{escape(name)}"'
    return (
        f'{search}<div class="wide"><table{attributes}><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(value: object, css: str) -> str:
    if isinstance(value, float):
        return f'<td class="{css}" data-value="{value!r}">{value:.1f}</td>'
    return f'<td class="{css}">{escape(value)}</td>'


def chart(title: str, lines: dict[str, list[tuple[float, float]]]) -> str:
    """A line chart (SVG) of at most two named lines, given as (epoch, value) points.

    Returns "" if no line has points.
    """
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return ""
    width, height, left, right, top, bottom = 400, 230, 48, 10, 8, 30
    xs, ys = ([point[i] for points in lines.values() for point in points] for i in (0, 1))
    locator = MaxNLocator(5, steps=[1, 2, 5, 10])
    x_ticks, y_ticks = (
        locator.tick_values(min(0.0, *values), max(values) or 1.0) for values in (xs, ys)
    )

    def to_svg(x: float, y: float) -> tuple[float, float]:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        plot_height = height - top - bottom
        return left + across * (width - left - right), height - bottom - up * plot_height

    marks = []
    for tick in y_ticks:
        y = to_svg(x_ticks[0], tick)[1]
        marks.append(
            f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="var(--line)"/><text x="{left - 5}" y="{y + 4:.1f}" '
            f'text-anchor="end">{tick:g}</text>'
        )
    for tick in x_ticks:
        x = to_svg(tick, y_ticks[0])[0]
        marks.append(f'<text x="{x:.1f}" y="{height - 14}" text-anchor="middle">{tick:g}</text>')
    marks.append(f'<text x="{width - right}" y="{height - 3}" text-anchor="end">epoch</text>')
    legend = []
    for colour, (name, points) in zip(("var(--a)", "var(--b)"), lines.items()):
        path = [to_svg(*point) for point in points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
        marks.append(
            f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        if len(path) < 40:
            marks += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in path
            ]
        legend.append(f'<span style="color:{colour}">&#9632; {escape(name)}</span>')
    return (
        f'<figure><svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(marks)}</svg><figcaption>{escape(title)}: {' '.join(legend)}</figcaption>"
        "</figure>"
    )


def embedded_image(image: np.ndarray, suffix: str, alt: str, css: str = "") -> str:
    """An <img> element that contains an RGB image as a data URL; `suffix` is .jpg or .png."""
    _, data = cv2.imencode(suffix, image[..., ::-1])
    mime = {".jpg": "image/jpeg", ".png": "image/png"}[suffix]
    text = base64.b64encode(data.tobytes()).decode()
    source = f"data:{mime};base64,{text}"
    return f'<img src="{source}" alt="{escape(alt)}" class="{css}" loading="lazy">'
