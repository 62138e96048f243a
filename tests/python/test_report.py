"""The report: rows, totals, the printed table, JSON, and an HTML page that needs and runs nothing else."""

import html.parser
import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import rarefy
from rarefy import Report
from rarefy.report_data import COLUMNS, LayerRow
from rarefy.timing import Times, Timing
from tiny import FEED, Tiny

EVIL = "a<script>alert(1)</script>&\"'"


def times(dense: float, sparse: float, waited: float = 0.0) -> Times:
    return Times(
        *(Timing(ms, ms * 0.9, ms * 1.2, 9) for ms in (dense, sparse)), (dense / sparse,) * 3, waited
    )


def made_up() -> Report:
    """One layer that is twice as fast, one that is slower and larger, one that stays, one unmatched."""
    fast = LayerRow(
        "fast", ["alias"], (8, 6), format="block:2x2", density=0.5, dense_bytes=192, sparse_bytes=130
    )
    fast.times = times(3.0, 1.5)
    slow = LayerRow(EVIL, [], (8, 6), format="block:1x1", density=1.0, dense_bytes=192, sparse_bytes=420)
    slow.times = times(1.0, 4.0)
    stays = LayerRow("stays", [], (3, 2), reason="its weight is tied to <wte>")
    other = LayerRow("other", [], None, matched=False, reason="no pattern matches")
    return Report([fast, slow, stays, other], tokens=64, environment={"cpu": "<cpu>", "torch": "2.x"})


class Page(html.parser.HTMLParser):
    """Collects tags with their attributes and text; checks that tags close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_rows_by_any_name_and_totals():
    report = made_up()
    assert len(report) == 4 and [row.name for row in report] == ["fast", EVIL, "stays", "other"]
    assert report["alias"] is report["fast"]
    with pytest.raises(KeyError):
        report["nothing"]
    assert [row.name for row in report.replaced] == ["fast", EVIL]
    assert [row.name for row in report.skipped] == ["stays"]
    assert (report.dense_bytes, report.sparse_bytes) == (384, 550)
    assert report["fast"].speedup == 2 and report[EVIL].speedup == 0.25 and report["stays"].speedup is None


def test_the_table_says_what_happened_to_each_matched_layer():
    text = str(made_up())
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert re.search(
        r"fast = alias +8x6 +block:2x2 +0\.500 +2\.00x +3\.000 +1\.500 +0\.2 +0\.1$", lines["fast"]
    )
    assert "its weight is tied to <wte>" in lines["stays"] and "other" not in lines
    (slow,) = (line for line in text.splitlines() if line.startswith(EVIL))
    assert slow.endswith("slower than dense; larger than dense")
    assert f"Slower than dense at 64 tokens: {EVIL}." in text
    assert f"Larger than dense, for the index: {EVIL}." in text


def test_json_has_every_row_and_reads_back(tmp_path):
    made_up().write_json(tmp_path / "r.json")
    read = json.loads((tmp_path / "r.json").read_text())
    assert read == made_up().to_dict()
    assert [row["name"] for row in read["layers"]] == ["fast", EVIL, "stays", "other"]
    assert read["layers"][0]["dense_ms"] == 3 and read["layers"][0]["speedup"] == 2
    assert read["layers"][2]["skipped"] == "its weight is tied to <wte>"
    assert read["tokens"] == 64 and read["total"]["dense_bytes"] == 384


def test_the_page_is_self_contained_and_escapes_every_name(tmp_path):
    made_up().write_html(tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert text.lower().startswith("<!doctype html>")
    page = Page(text)
    tags = [tag for tag, _ in page.tags]
    assert not {"script", "link", "img", "iframe", "object", "wte", "cpu"} & set(tags)
    assert "http" not in text and "url(" not in text and "@import" not in text
    for _, attributes in page.tags:
        assert not any(key.startswith("on") or key in ("src", "href") for key in attributes)
    shown = "".join(page.texts)
    assert all(part in shown for part in (EVIL, "stays", "its weight is tied to <wte>", "<cpu>", "2.00x"))


def test_the_plots_have_a_bar_for_each_figure(tmp_path):
    made_up().write_html(tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    assert [tag for tag, _ in page.tags].count("svg") == 2
    widths = [float(attributes["width"]) for tag, attributes in page.tags if tag == "rect"]
    assert len(widths) == 2 + 4
    assert math.isclose(widths[0] / widths[1], 2 / 0.25, rel_tol=0.01)
    assert math.isclose(widths[2] / widths[5], 192 / 420, rel_tol=0.01)


def test_reports_without_figures_are_written_too(tmp_path):
    for report in (Report([]), Report([LayerRow("stays", [], None, reason="why not")], dry_run=True)):
        report.write_html(tmp_path / "r.html")
        Page((tmp_path / "r.html").read_text())
        report.write_json(tmp_path / "r.json")
        assert str(report)


def test_a_real_report_is_measured_and_counts_bytes_as_the_file_does(tmp_path, device):
    model = Tiny().eval().to(device)
    report = rarefy.sparsify(model, {FEED: "block:4x4@0.5", "head": "block:4x4@0.5"}, tokens=16)
    row = report["encoder.layer.0.intermediate.dense"]
    assert row.shape == (32, 16) and row.density == 0.5 and row.format == "block:4x4"
    assert row.dense_bytes == 32 * 16 * 4
    assert row.sparse_bytes == 16 * 16 * 4 + 4 * (9 + 16)
    for row in report.replaced:
        times = (row.dense_time, row.sparse_time)
        assert all(0 < t.lower <= t.median <= t.upper and t.rounds >= 9 for t in times)
        assert row.noise or row.speedup == times[0].median / times[1].median
        stored = model.get_submodule(row.name).weight.state_dict().values()
        assert row.sparse_bytes == sum(t.numel() * t.element_size() for t in stored)
    facts = report.to_dict()["environment"]
    assert facts["torch"] == torch.__version__ and facts["threads"] == torch.get_num_threads()
    assert facts["load"] >= 0 and 1 <= facts["processors"] <= os.cpu_count()
    report.write_html(tmp_path / "r.html")
    Page((tmp_path / "r.html").read_text())


def test_noise_is_admitted_and_gives_no_speedup(tmp_path):
    assert "noise" not in str(made_up())
    report = made_up()
    report.environment |= {"load": 3.21, "processors": 2}
    report["fast"].times = times(3.0, 1.5, waited=0.4)
    row, text = report["fast"].to_dict(), str(report)
    assert row["speedup"] is None and row["noise"] == "threads waited 40% of the time for a processor"
    assert (row["dense_ms"], row["sparse_ms"], row["waited"]) == (3.0, 1.5, 0.4)
    assert "Times of 1 layers are noise (load 3.2 on 2 processors): measure again on an idle" in text
    assert re.search(r"^fast.* noise +3\.000 +1\.500 .*threads waited 40% of the time", text, re.MULTILINE)
    assert "2.00x" not in text
    report.write_html(tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    assert ("tr", {"class": "noise"}) in page.tags and "2.00x" not in "".join(page.texts)


def test_layers_that_grew_stand_out_on_the_page(tmp_path):
    made_up().write_html(tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    assert ("tr", {"class": "slower larger"}) in page.tags
    bars = [attributes["class"] for tag, attributes in page.tags if tag == "rect"]
    assert bars == ["sparse", "slow", "dense", "sparse", "dense", "slow"]


def test_the_page_fits_small_screens(tmp_path):
    made_up().write_html(tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    heads = [text for text in page.texts if text in COLUMNS]
    assert heads[: heads.index("speedup")] == ["layer", "shape", "format", "density"]  # before the bytes


def test_notebooks_show_the_report():
    text = made_up()._repr_html_()
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("svg") == 2 and page.tags[0][0] == "style"
    assert "<html" not in text and "script" not in {tag for tag, _ in page.tags}
    shown = "".join(page.texts)
    assert EVIL in shown and "2.00x" in shown
    # The style reaches nothing outside the report.
    rules = re.findall(r"(?m)^([^{}]+)\{", re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1])
    assert all(part.strip().startswith((".rarefy", "body.rarefy")) for r in rules for part in selectors(r))


def selectors(rule: str) -> list[str]:
    """The parts of a list of selectors; commas inside :is() do not count."""
    return re.sub(r"\([^()]*(\([^()]*\)[^()]*)*\)", "", rule).split(",")


def test_modules_of_the_report_import_one_another_one_way():
    source = Path(rarefy.__file__).parent
    data, html = ((source / f"{name}.py").read_text() for name in ("report_data", "report_html"))
    assert not re.search(r"^ *from \.(report|report_html) |import report", data, re.MULTILINE)
    assert not re.search(r"^ *from \.report |import report\b", html, re.MULTILINE)


def test_unmeasured_rows_have_no_times():
    report = rarefy.sparsify(nn.Sequential(nn.Linear(8, 8)), {"0": "block:4x4@0.5"}, measure=False)
    row = report.to_dict()["layers"][0]
    assert row["dense_ms"] is None and row["sparse_ms"] is None and row["speedup"] is None
    assert "ms" in str(report).splitlines()[0]
