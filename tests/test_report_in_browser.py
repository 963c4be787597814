"""The report of a comparison in a real browser, without a network; skipped where there is none."""

import functools
import json
import re
import shutil
import subprocess

import pytest
from test_compare import arguments, written_run

from octablox.compare import figures, page, plan, results
from octablox.fp8 import recipe_from_config
from octablox.health import OPERANDS

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on this machine; CI installs from package registries only"
)
# Written into the page's title, from where --dump-dom brings it here.
MEASURE = """
<script>addEventListener("load", () => {
  const images = [...document.images];
  document.title = JSON.stringify({
    page: document.documentElement.scrollWidth,
    window: innerWidth,
    images: images.map(i => [i.complete && i.naturalWidth, i.getBoundingClientRect().width]),
    untitled: images.filter(i => !i.alt).length,
    small: [...document.querySelectorAll("p, td, figcaption, li")]
      .filter(e => parseFloat(getComputedStyle(e).fontSize) < 13).length,
    fetched: performance.getEntriesByType("resource")
      .filter(e => !e.name.startsWith("data:")).length,
  });
});</script></body>
"""


@functools.cache
def written_page(folder):
    """A report of made-up runs: of a page's layout, the numbers are not tested here."""
    line = "--recipes all --seeds 2 --variant"
    args = [*line.split(), "a-variant-with-a-rather-long-name quantization=fp8_full steps=20"]
    made = plan.make([*args, *(a.replace("steps=12", "steps=20") for a in arguments(folder))])
    for n, run in enumerate(made.runs):
        losses = 2 + 0.01 * n, 1 + 0.003 * n
        written_run(run, losses, tokens_per_second=1000 + n, peak_memory_bytes=2**30)
        casts = {
            f"layers.{layer}.{gemm}.{operand}.{figure}": value + 0.1 * layer
            for layer in range(2)
            for gemm in ("gate_up", "down")
            for operand in OPERANDS
            if getattr(recipe_from_config(run.config.quantization), operand)
            for figure, value in (("sqnr_db", 30), ("amax", 1), ("saturated", 0), ("flushed", 0.01))
        }
        if casts:
            with (run.folder / "metrics.jsonl").open("a") as file:
                for step in (1, 10, 20):
                    file.write(json.dumps({"step": step, "kind": "health", **casts}) + "\n")
    found = results.read(made)
    text = page.render(found, figures.draw(found))
    path = folder / "page.html"
    path.write_text(text.replace("</body>", MEASURE))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("report")


@pytest.mark.parametrize("width", [1280, 500])  # 500 is the least that a headless window takes
def test_the_report_reads_well(width, folder):
    """Nothing is wider than the window, every picture is there, sharp and described."""
    flags = f"--headless=new --no-sandbox --disable-gpu --user-data-dir={folder}/profile"
    flags += f" --window-size={width},900 --host-resolver-rules=MAP\x00*\x00~NOTFOUND"
    flags += " --virtual-time-budget=10000 --dump-dom"
    words = [flag.replace("\x00", " ") for flag in flags.split(" ")]
    page_url = written_page(folder).as_uri()
    done = subprocess.run([BROWSER, *words, page_url], capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title, done.stderr[-500:]
    found = json.loads(title[1].replace("&quot;", '"'))
    assert found["page"] <= found["window"] <= width
    assert len(found["images"]) == 4 + 2 * 6  # 6 variants with casts
    wide = width > 700
    for natural, shown in found["images"]:
        assert natural and (natural > 1200) == wide
        assert shown <= found["window"] and natural >= shown
    assert found["untitled"] == found["small"] == found["fetched"] == 0
