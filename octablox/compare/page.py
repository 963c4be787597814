"""The report of a comparison as one HTML file that needs nothing else."""

import base64
import html
from collections.abc import Iterable, Sequence
from typing import Any

import octablox
from octablox.compare.figures import Picture
from octablox.compare.results import Results, rows
from octablox.train.report import shown

# Below this width the narrow pictures are shown.
_NARROW_PIXELS = 700
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 1180px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.6rem; margin: .5rem 0; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
.verdict { border-left: 6px solid; padding: .4rem .8rem; margin: .4rem 0; background: #f6f6f6; }
.pass { border-color: #1b7f3b; } .fail { border-color: #b00020; }
.verdict b { text-transform: uppercase; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; white-space: nowrap; }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
figure { margin: 1.2rem 0; } img { max-width: 100%; height: auto; }
figcaption, .note { color: #555; font-size: .9rem; }
pre { background: #f6f6f6; padding: .7rem; overflow-x: auto; font-size: .85rem; }
"""
_TABLE_NOTE = (
    "Eval loss: mean over the seeds ± half their range. Gap: percent of the reference's eval loss, "
    "mean over the seeds with its 95% interval (Student). SQNR, saturated and flushed to zero: of "
    "the worst cast, median over the run."
)
# Column of the table -> key of `results.rows`, or what makes a text of the row.
_COLUMNS = {
    "variant": lambda row: row["variant"],
    "eval loss, nats": lambda row: _loss(row),
    "gap to bf16": lambda row: _gap(row),
    "verdict": lambda row: {True: "pass", False: "FAIL", None: "reference"}[row["passed"]],
    "tokens/s": lambda row: shown("tokens_per_second", row["tokens_per_second"]),
    "peak memory": lambda row: shown("peak_memory_bytes", row["peak_memory_bytes"]),
    "lowest SQNR": lambda row: _number(row.get("sqnr_db_min"), "{:.1f} dB"),
    "saturated": lambda row: _number(row.get("saturated_max"), "{:.3%}"),
    "flushed": lambda row: _number(row.get("flushed_max"), "{:.3%}"),
    "loses most in": lambda row: row["worst_layer"] or "–",
    "runs": lambda row: f"{row['finished']} of {row['seeds']}",
}


def table(of: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the table for people, from `results.rows`."""
    return list(_COLUMNS), [[text(row) for text in _COLUMNS.values()] for row in of]


def _number(value, form):
    return "–" if value is None else form.format(value)


def _loss(row):
    if row["eval_loss"] is None:
        return "–"
    spread = (row["eval_loss_max"] - row["eval_loss_min"]) / 2
    return f"{row['eval_loss']:.4f}" + (f" ± {spread:.4f}" if row["seeds"] > 1 else "")


def _gap(row):
    if row["gap_percent"] is None:
        return "–"
    half = row["gap_half_interval"]
    return f"{row['gap_percent']:+.2f}%" + ("" if half is None else f" ± {half:.2f}")


def render(results: Results, pictures: Iterable[Picture]) -> str:
    """The page: verdicts, table, pictures, which layer loses most, and how to make it again."""
    config = results.plan.runs[0].config
    seeds = ", ".join(map(str, results.plan.options.seeds))
    title = f"octablox compare: {config.model_name}, {config.run.steps:,} steps"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="note">Seeds {seeds}; runs of one seed begin with the same weights and read the '
        "same batches in the same order.</p>",
        *(_verdict(verdict.passed, verdict.line) for verdict in results.verdicts),
        *(f'<p class="note">{html.escape(text)}.</p>' for text in results.schedules),
        "<h2>What it costs, what it saves</h2>",
        _table(rows(results)),
        f'<p class="note">{_TABLE_NOTE}</p>',
        *map(_figure, pictures),
        *_losing(results),
        "<h2>Made by</h2>",
        f"<pre>{html.escape(results.plan.command)}</pre>",
        f'<p class="note">octablox {octablox.__version__}. Each run is an ordinary '
        "<code>octablox train</code>, in a folder beside this file.</p>",
    ]
    return _document(title, "\n".join(parts))


def _verdict(passed, line):
    name, _, rest = line.partition(": ")
    word, _, rest = rest.partition(": ")
    text = f"{html.escape(name)}: <b>{word}</b>: {html.escape(rest)}"
    return f'<p class="verdict {"pass" if passed else "fail"}">{text}</p>'


def _table(of):
    head, lines = table(of)
    cells = lambda tag, texts: "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)  # noqa: E731
    body = "\n".join(f"<tr>{cells('td', line)}</tr>" for line in lines)
    return (
        f'<div class="scroll"><table><thead><tr>{cells("th", head)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _figure(picture: Picture) -> str:
    wide, narrow = (
        f"data:image/png;base64,{base64.b64encode(png).decode()}"
        for png in (picture.wide, picture.narrow)
    )
    title = html.escape(picture.title, quote=True)
    return (
        f"<figure><picture>"
        f'<source media="(max-width: {_NARROW_PIXELS}px)" srcset="{narrow}">'
        f'<img src="{wide}" alt="{title}"></picture>'
        f"<figcaption>{html.escape(picture.caption)}</figcaption></figure>"
    )


def _losing(results: Results):
    """For each variant with casts, its layers by their noise."""
    for result in results.variants:
        if not result.casts:
            continue
        layers = result.losses_by_layer()
        yield f"<h2>Which layer loses most: {html.escape(result.variant.name)}</h2>"
        first = layers[0]
        yield (
            f"<p>{html.escape(first[0])}: the noise of its casts is {first[1]:.1f}% of the signal, "
            f"most of it in {html.escape(first[2])}.</p>"
        )
        items = "".join(
            f"<li>{html.escape(layer)}: {percent:.1f}%, most in {html.escape(cast)}</li>"
            for layer, percent, cast in layers[:5]
        )
        yield f"<ol>{items}</ol>"


def _document(title, body):
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{body}</body></html>\n"
    )
