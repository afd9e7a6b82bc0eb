"""The report as a page that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ._report import Measure, Report, Side, ValueReport
from ._text import cosine, number, place, prompts_words, side_words, step_name, verdict

_STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfbf9; --ink: #1c1e21; --quiet: #5d636b; --line: #d9dbd6; --raised: #ffffff;
  --good: #1a7f4b; --bad: #c0281c;
  --c0: #f1f2ee; --c1: #d9ecdd; --c2: #b3dcc0; --c3: #7cc39a; --c4: #f3cf7a; --c5: #d63c2e;
  --on: #1c1e21; --on5: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16181b; --ink: #e7e8e6; --quiet: #9aa1a9; --line: #33373c; --raised: #1e2125;
    --good: #5cc98c; --bad: #ff7a6b;
    --c0: #24282c; --c1: #1f3a2b; --c2: #24553a; --c3: #266b45; --c4: #7a5d15; --c5: #c0392b;
    --on: #e7e8e6; --on5: #ffffff;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
main { max-width: 1200px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 1.05rem; margin: 36px 0 8px; }
p { margin: 0 0 8px; max-width: 76ch; }
.quiet { color: var(--quiet); }
.small { font-size: .85rem; }
.scroll + p { margin-top: 8px; }
.verdict {
  border-left: 4px solid var(--good); background: var(--raised); padding: 12px 16px;
  margin: 16px 0 0; overflow-wrap: anywhere;
}
.verdict.depart { border-color: var(--bad); }
.verdict strong { color: var(--good); letter-spacing: .04em; }
.verdict.depart strong { color: var(--bad); }
.verdict p:last-child { margin: 0; }
.sides { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); }
.side { background: var(--raised); border: 1px solid var(--line); padding: 12px 16px; }
.side h3 { margin: 0 0 6px; font-size: 1rem; }
dl { margin: 0; display: grid; grid-template-columns: max-content 1fr; gap: 2px 12px; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; border: 1px solid var(--line); background: var(--raised); }
.scroll:focus-visible { outline: 2px solid var(--ink); }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .85rem; }
th, td { padding: 4px 10px; text-align: right; white-space: nowrap; }
th { font-weight: 600; color: var(--quiet); }
tbody tr + tr td, tbody tr + tr th { border-top: 1px solid var(--line); }
thead th { border-bottom: 1px solid var(--line); vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
tbody th { color: var(--ink); font-weight: 500; position: sticky; left: 0; }
tbody th, thead th:first-child { background: var(--raised); }
td { font-variant-numeric: tabular-nums; }
tr.departs td:nth-child(2), tr.departs th { color: var(--bad); font-weight: 600; }
.map { width: auto; min-width: 100%; }
.map th, .map td { padding: 3px 6px; text-align: center; }
.map thead th { font-weight: 500; }
.map thead th span { writing-mode: vertical-rl; transform: rotate(180deg); }
.map tbody th { text-align: right; min-width: 2.6rem; z-index: 1; }
.map td { color: var(--on); min-width: 3.1rem; border: 1px solid var(--raised); }
.map .first { outline: 3px solid var(--ink); outline-offset: -3px; font-weight: 700; }
.c0 { background: var(--c0); } .c1 { background: var(--c1); } .c2 { background: var(--c2); }
.c3 { background: var(--c3); } .c4 { background: var(--c4); }
.map td.c5, .key .c5 { background: var(--c5); color: var(--on5); }
.key { display: flex; flex-wrap: wrap; gap: 6px 14px; margin: 8px 0 0; padding: 0; }
.key li { list-style: none; display: flex; align-items: center; gap: 6px; }
.key i { width: 18px; height: 14px; display: inline-block; border: 1px solid var(--line); }
ul { margin: 0; padding-left: 20px; } li { margin-bottom: 4px; overflow-wrap: anywhere; }
details { margin-top: 8px; } summary { cursor: pointer; }
code { font: .92em ui-monospace, SFMono-Regular, Menlo, monospace; overflow-wrap: anywhere; }
@media (max-width: 560px) {
  body { font-size: 14px; } main { padding: 16px 12px 40px; }
  h1 { font-size: 1.25rem; }
  .map th, .map td { padding: 3px 4px; }
}
"""

_KEY = (
    ("c0", "no difference"),
    ("c1", "under 1% of the bound"),
    ("c2", "under 10%"),
    ("c3", "within it"),
    ("c4", "within it, but the float32 runs differ by more than float32 explains"),
    ("c5", "beyond it: departs"),
)


def page(report: Report) -> str:
    """The whole report as one HTML document.

    Args:
        report: the comparison.
    """
    answer = "Agree" if report.agree else "Depart"
    title = f"{report.a.engine} {report.a.dtype} and {report.b.engine} {report.b.dtype}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="quiet">{escape(prompts_words(report))}</p>',
        _verdict(report, answer),
        "<h2>The two sides</h2>",
        f'<div class="sides">{_side("a", report.a)}{_side("b", report.b)}</div>',
        "<h2>Block by value</h2>",
        f"<p>{escape('Each cell is the largest difference of a row over the row. ' + _MAP)}</p>",
        _map(report),
        *_own(report),
        "<h2>Values of the blocks, where the two are furthest apart</h2>",
        _values(_worst_blocks(report), report),
        f'<p class="small quiet">{escape(_COLUMNS)} {escape(_sentence(report.rule))}</p>',
        "<h2>The next token</h2>",
        _logits(report),
        _prompts(report),
        *_unshared(report),
        *_notes(report),
        _versions(report),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{answer}: {escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        "<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


_MAP = "Its colour tells how near it is to what the dtypes explain. The first departure is framed."
_COLUMNS = (
    "Largest and rms: difference over the row's largest magnitude. Explained: the most that the "
    "dtypes account for. Cosine: the smallest of two rows."
)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _verdict(report: Report, answer: str) -> str:
    first = report.first
    faults = "".join(
        f"<p>Known fault: {escape(fault)}</p>" for fault in (first.faults if first else ())
    )
    kind = "verdict" if report.agree else "verdict depart"
    words = f"<p><strong>{answer}.</strong> {escape(verdict(report))}</p>"
    return f'<div class="{kind}">{words}{faults}</div>'


def _side(name: str, side: Side) -> str:
    rows = [("computes", side_words(side)), ("checkpoint", side.checkpoint)]
    if side.options:
        rows.append(("options", ", ".join(f"{key}={one}" for key, one in side.options.items())))
    rows.append(("blocks", str(side.layers)))
    items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in rows)
    return f'<section class="side"><h3>{name}: {escape(side.engine)}</h3><dl>{items}</dl></section>'


def _colour(measure: Measure) -> str:
    if measure.departs:
        return "c5"
    if measure.hidden:
        return "c4"
    if not measure.excess:
        return "c0"
    return "c1" if measure.excess < 0.01 else "c2" if measure.excess < 0.1 else "c3"


def _short(found: float) -> str:
    return number(found).replace("e-0", "e-").replace("e+0", "e+")


def _map(report: Report) -> str:
    blocks = [value for value in report.values if value.layer is not None]
    if not blocks:
        return ""
    names = list(dict.fromkeys(value.name for value in blocks))
    cells = {(value.layer, value.name): value for value in blocks}
    first = None if report.first is None else report.first.key
    head = "".join(
        f'<th scope="col"><span>{escape(name.rsplit(".", 1)[-1])}</span></th>' for name in names
    )
    rows = []
    for layer in sorted({value.layer for value in blocks if value.layer is not None}):
        row = "".join(_cell(cells.get((layer, name)), first) for name in names)
        rows.append(f'<tr><th scope="row">{layer}</th>{row}</tr>')
    key = "".join(f'<li><i class="{name}"></i>{text}</li>' for name, text in _KEY)
    return (
        f'<div class="scroll" tabindex="0"><table class="map"><thead><tr><th>block</th>{head}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
        f'<ul class="key small">{key}</ul>'
    )


def _cell(value: ValueReport | None, first: str | None) -> str:
    worst = None if value is None else value.worst()
    if value is None or worst is None:
        return "<td></td>"
    step, measure = worst
    kind = _colour(measure) + (" first" if value.key == first else "")
    told = (
        f"{value.key}, {step_name(step)}: off by {number(measure.error)}, "
        f"{number(measure.bound)} explained"
    )
    return f'<td class="{kind}" title="{escape(told)}">{_short(measure.error)}</td>'


def _worst_blocks(report: Report) -> list[ValueReport]:
    """Of each value of the blocks, the block where the two are furthest apart."""
    found: dict[str, ValueReport] = {}
    for value in report.values:
        worst = value.worst()
        if value.layer is None or worst is None:
            continue
        held = found[value.name].worst() if value.name in found else None
        if held is None or (worst[1].excess, worst[1].error) > (held[1].excess, held[1].error):
            found[value.name] = value
    return list(found.values())


def _own(report: Report) -> list[str]:
    values = [value for value in report.values if value.layer is None]
    return ["<h2>Values of the model</h2>", _values(values, report)] if values else []


def _values(values: Sequence[ValueReport], report: Report) -> str:
    narrow = any(
        measure is not None and measure.in_float32 is not None
        for value in report.values
        for measure in value.steps
    )
    heads = ["value", "largest", "explained", "rms", "cosine"]
    heads += ["in float32"] * narrow + ["dtypes", "shapes", "furthest apart at"]
    rows = []
    for value in values:
        worst = value.worst()
        if worst is None:
            continue
        step, measure = worst
        cells = [
            number(measure.error),
            number(measure.bound),
            number(measure.rms),
            cosine(measure.cosine),
        ]
        cells += [number(measure.in_float32)] * narrow
        cells += [_both(*value.dtypes), _both(*map(_shape, measure.shapes)), place(value, step)]
        kind = ' class="departs"' if measure.departs else ""
        rows.append(f"<tr{kind}><th scope='row'>{escape(value.name)}</th>{_cells(cells)}</tr>")
    return _table(heads, rows)


def _both(a: str, b: str) -> str:
    return a if a == b else f"{a}, {b}"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _cells(cells: Iterable[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in cells)


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{escape(one)}</th>' for one in heads)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _logits(report: Report) -> str:
    heads = [
        "step",
        "KL(a, b), largest",
        "mean",
        "same first choice",
        "of five, in both",
        "positions",
    ]
    rows = [
        f"<tr><th scope='row'>{step_name(step)}</th>"
        + _cells(
            [
                number(one.kl),
                number(one.kl_mean),
                f"{one.top1:.0%}",
                f"{one.top5:.0%}",
                str(one.positions),
            ]
        )
        + "</tr>"
        for step, one in enumerate(report.logits)
    ]
    return _table(heads, rows)


def _prompts(report: Report) -> str:
    items = []
    for prompt in report.prompts:
        words = "token ids" if prompt.text is None else f"“{prompt.text}”"
        ids = " ".join(map(str, prompt.ids))
        more = (
            ""
            if prompt.other_ids is None
            else " The other side makes other ids of it: " + " ".join(map(str, prompt.other_ids))
        )
        then = " ".join(map(str, prompt.continuation)) or "nothing"
        items.append(
            f"<li>{escape(words)}<br><code class='small quiet'>{ids}; then {then}{more}</code></li>"
        )
    return (
        f"<details><summary>The {len(items)} prompts and their ids</summary>"
        f"<ol>{''.join(items)}</ol></details>"
    )


def _unshared(report: Report) -> list[str]:
    if not report.unshared:
        return []
    items = "".join(
        f"<li><code>{escape(key)}</code>: {escape(reason)}</li>"
        for key, reason in report.unshared.items()
    )
    return ["<h2>Not on both</h2>", f"<ul>{items}</ul>"]


def _notes(report: Report) -> list[str]:
    if not report.notes:
        return []
    items = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return ["<h2>Notes</h2>", f"<ul>{items}</ul>"]


def _versions(report: Report) -> str:
    words = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return f'<p class="small quiet" style="margin-top:36px">{escape(words)}; {report.seconds} s</p>'
