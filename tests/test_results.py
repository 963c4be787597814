"""The tables of README.md and docs/results come from the JSON that is published beside them."""

import json
import re

import pytest

from benchmarks import results

COMPARED = {
    "command": "octablox compare --recipes int8",
    "schedules": ["a and b: all 3 logged losses are equal to the last bit"],
    "rows": [
        {
            **dict.fromkeys(("gap_percent", "gap_half_interval", "passed", "worst_layer")),
            **{"variant": "bf16", "eval_loss": 2.0, "eval_loss_min": 1.9, "eval_loss_max": 2.1},
            **{"seeds": 3, "finished": 3, "verdict": "", "tokens_per_second": 1234.5},
            "peak_memory_bytes": 2**30,
        },
        {
            **{"variant": "int8", "eval_loss": 2.01, "eval_loss_min": 2.0, "eval_loss_max": 2.02},
            **{"gap_percent": 0.5, "gap_half_interval": 0.1, "passed": False},
            **{"seeds": 3, "finished": 3, "verdict": "int8: FAIL: more", "tokens_per_second": 1e3},
            **{"peak_memory_bytes": 2**31, "worst_layer": "layers.2", "sqnr_db_min": 31.0},
            **{"saturated_max": 0.0, "flushed_max": 0.01},
        },
    ],
}


@pytest.mark.parametrize("page", results.PAGES, ids=lambda page: page.parent.name)
def test_the_published_tables_are_those_of_the_json(page):
    text = page.read_text()
    names = re.findall(r"<!-- (\w+) table: begin -->", text)
    assert set(names) <= results.TABLES.keys() | {"demo"}
    assert [f"<!-- {name} table: end -->" in text for name in names] == [True] * len(names)
    assert results.with_tables(text, results.RESULTS) == text


def test_tables_are_written_between_their_marks(tmp_path):
    (tmp_path / "compare").mkdir()
    (tmp_path / "compare" / "compare.json").write_text(json.dumps(COMPARED))
    text = (
        "a\n<!-- gap table: begin -->\nold\n<!-- gap table: end -->\nb\n<!-- gmm table: begin -->\n"
    )
    assert results.with_tables(text, tmp_path) == (
        "a\n<!-- gap table: begin -->\n"
        "| variant | eval loss, nats | gap to bf16 | verdict |\n| --- | ---: | ---: | ---: |\n"
        "| bf16 | 2.0000 ± 0.1000 | – | reference |\n"
        "| int8 | 2.0100 ± 0.0100 | +0.50% ± 0.10 | FAIL |\n"
        "<!-- gap table: end -->\nb\n<!-- gmm table: begin -->\n"
    )
    whole = results.with_tables(
        "<!-- compare table: begin -->\n<!-- compare table: end -->", tmp_path
    )
    for part in (
        "2.00 GiB",
        "31.0 dB",
        "- int8: FAIL: more",
        "- a and b: all 3",
        "`octablox compare",
    ):
        assert part in whole
    with pytest.raises(SystemExit, match="after its begin, got none"):
        results.with_tables("<!-- gap table: begin -->\n", tmp_path)


def test_a_comparison_is_gathered_without_its_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    run = tmp_path / "runs" / "bf16-seed0"
    run.mkdir(parents=True)
    kept = {"report.html", "compare.json", "gap.png", "eval_loss.png"}
    for name in (*kept, "cost.png", "notes.txt"):
        (run.parent / name).write_text(name)
    (tmp_path / "results" / "compare").mkdir(parents=True)
    (tmp_path / "results" / "compare" / "old.png").write_text("")
    results.gather(run.parent)
    found = {path.name for path in (tmp_path / "results" / "compare").iterdir()}
    assert found == kept
