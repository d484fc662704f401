"""The frame of every report: one HTML file without scripts, fonts or network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

import tpf
from tpf.files import write_whole

_STYLE = """
:root{--bg:#fff;--fg:#1c2024;--soft:#646b73;--line:#dfe3e8;--card:#f6f8fa;
--c0:#2066c4;--c1:#c8541b;--c2:#2b8a57;--c3:#8a4fbf;--c4:#b0851a;--c5:#c23b6e;--c6:#1a8a99;--c7:#6b7280}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e6e9ec;--soft:#9aa3ad;--line:#30363d;
--card:#1c2126;--c0:#6ea8fe;--c1:#f0915a;--c2:#63c490;--c3:#bb94e6;--c4:#dcb84f;--c5:#ee84ab;
--c6:#5cc3d1;--c7:#a3abb5}}
*{box-sizing:border-box}body{background:var(--bg);color:var(--fg);margin:0 auto;max-width:1340px;
padding:24px;font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:24px;margin:0 0 2px}h2{font-size:18px;margin:34px 0 10px}
.sub,.note,figcaption,.legend{color:var(--soft)}.note{max-width:80ch}
.cards{display:flex;flex-wrap:wrap;gap:10px;margin:18px 0}
.cards div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:9px 14px}
.cards b{display:block;font-size:19px;font-variant-numeric:tabular-nums}
.cards span{color:var(--soft);font-size:13px}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,430px),1fr));gap:16px}
figure{margin:0;border:1px solid var(--line);border-radius:8px;padding:10px 12px}
figcaption{font-size:13px;margin-bottom:4px}svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font-size:11px}.mid{text-anchor:middle}.end{text-anchor:end}
svg .grid{stroke:var(--line);stroke-width:1}svg .axis{stroke:var(--soft);stroke-width:1}
svg .mark{stroke:var(--soft);stroke-dasharray:3 3}svg .error{stroke:var(--fg);stroke-width:1.4}
.legend{font-size:13px;margin:4px 0 0;display:flex;flex-wrap:wrap;gap:4px 14px}
.legend i{display:inline-block;width:14px;height:3px;margin:0 5px 3px 0}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:14px;margin:6px 0}
th,td{padding:4px 12px 4px 0;border-bottom:1px solid var(--line);text-align:right;
font-variant-numeric:tabular-nums;white-space:nowrap}
th:first-child,td:first-child,.text{text-align:left}.text{white-space:normal}
th{color:var(--soft);font-weight:600}
"""

Cell = str | int | float | None


def page(title: str, subtitle: str, body: Sequence[str]) -> str:
    """Return a complete document."""
    stamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        "<meta name='color-scheme' content='light dark'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><div class='sub'>{escape(subtitle)}</div>"
        f"{''.join(body)}"
        f"<p class='note'>tpf {escape(tpf.__version__)}, written {stamp}</p></body></html>\n"
    )


def section(title: str, *parts: str, note: str = "") -> str:
    """Return a heading, an optional remark, and its content."""
    remark = f"<p class='note'>{escape(note)}</p>" if note else ""
    return f"<h2>{escape(title)}</h2>{remark}{''.join(parts)}"


def grid(figures: Sequence[str]) -> str:
    """Lay figures out side by side as the window allows."""
    return f"<div class='grid'>{''.join(figures)}</div>"


def cards(values: Mapping[str, Cell]) -> str:
    """Return a row of large numbers with captions."""
    items = "".join(
        f"<div><b>{escape(text(value))}</b><span>{escape(name)}</span></div>"
        for name, value in values.items()
    )
    return f"<div class='cards'>{items}</div>"


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]], text_columns: int = 1) -> str:
    """Return a table whose first ``text_columns`` columns are text, the others numbers."""

    def row(cells: Sequence[Cell], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=text' if k < text_columns else ''}>{escape(text(cell))}</{tag}>"
            for k, cell in enumerate(cells)
        )

    lines = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    head = f"<thead><tr>{row(header, 'th')}</tr></thead>"
    return f"<div class='scroll'><table>{head}<tbody>{lines}</tbody></table></div>"


def preformatted(content: str) -> str:
    """Return text that keeps its line breaks, closed until the reader opens it."""
    return f"<details><summary>show</summary><pre>{escape(content)}</pre></details>"


def text(value: Cell) -> str:
    """Return the text of a table cell: four digits, a dash for nothing."""
    if value is None:
        return "–"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.4g}"
    return str(value)


def write(path: Path, document: str) -> None:
    """Write a report whole or not at all."""
    write_whole(path, document.encode())
