"""Renderings of a report: tables in every format, Markdown, strict JSON."""

import dataclasses
import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tabulate import tabulate_formats
from torch.export import ExportedProgram
from torch.fx import GraphModule

import graphquant as gq
from graphquant.errors import ConfigError
from graphquant.evaluation import ModelResult
from graphquant.numerics import ErrorSums
from tests.tiny import tiny_batches

GOLDEN = Path(__file__).with_name("report.txt")
EVALUATION = gq.Evaluation(
    results={
        "original": ModelResult(perplexity=19.69142, kl=0.0, top1_percent=100.0, tokens=2040),
        "converted": ModelResult(perplexity=19.70251, kl=0.00123456, top1_percent=97.34567, tokens=2040),
    },
    reference="original",
    tokens=2040,
)


@pytest.fixture(scope="module")
def prepared(tiny_program: ExportedProgram) -> GraphModule:
    module = gq.prepare(tiny_program, gq.preset("int8-kv-attn-head"))
    gq.calibrate(module, tiny_batches(), progress=False)
    return module


@pytest.fixture(scope="module")
def converted(prepared: GraphModule) -> ExportedProgram:
    return gq.convert(prepared)


@pytest.fixture(scope="module")
def measured(prepared: GraphModule) -> gq.Measurement:
    return gq.measure(prepared, tiny_batches())


def test_golden(converted: ExportedProgram, measured: gq.Measurement) -> None:
    assert str(gq.report(converted, measured, EVALUATION)) + "\n" == GOLDEN.read_text(encoding="utf-8")


def test_worst_first_and_limit(converted: ExportedProgram, measured: gq.Measurement) -> None:
    report = gq.report(converted, measured)
    by_sqnr = sorted(report.rows, key=lambda row: row.sqnr_db or 0.0)
    assert by_sqnr != list(report.rows)
    assert sites(report.table("tsv", worst_first=True), report) == [row.site for row in by_sqnr]
    assert sites(report.table("tsv"), report) == [row.site for row in report.rows]

    short = report.table(worst_first=True, limit=3)
    assert short.endswith("\n\n1 of 4 rows left out")
    assert sites(short, report) == [row.site for row in by_sqnr[:3]]
    assert report.table(limit=4) == report.table(limit=9) == report.table()


def sites(table: str, report: gq.Report) -> list[str]:
    known = {row.site for row in report.rows}
    return [word for word in table.split() if word in known]


def test_tables_that_cannot_be_made(converted: ExportedProgram) -> None:
    report = gq.report(converted)
    with pytest.raises(ConfigError, match=r"nothing was measured: report\(source, measure\(source, batches\)\)"):
        report.table(worst_first=True)
    with pytest.raises(ConfigError, match=r"unknown table format 'gitub'.* 'github'.*\(known: .*html, .*simple"):
        report.table("gitub")
    for limit in (0, -1):
        with pytest.raises(ConfigError, match=f"limit {limit} leaves no row to show"):
            report.table(limit=limit)


@pytest.mark.parametrize("fmt", tabulate_formats)
def test_every_format_of_tabulate(converted: ExportedProgram, measured: gq.Measurement, fmt: str) -> None:
    report = gq.report(converted, measured)
    text = report.table(fmt, limit=2).replace("\\_", "_")  # LaTeX escapes
    for row in report.rows[:2]:
        assert row.node in text
        assert f"{row.sqnr_db:.4g}" in text
    assert "2 of 4 rows left out" in text


def test_html_closes_what_it_opens(converted: ExportedProgram, measured: gq.Measurement) -> None:
    class Balance(HTMLParser):
        open_tags: list[str]
        cells = 0

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            self.open_tags.append(tag)
            self.cells += tag == "td"

        def handle_endtag(self, tag: str) -> None:
            assert self.open_tags.pop() == tag

    parser = Balance()
    parser.open_tags = []
    parser.feed(gq.report(converted, measured).table("html", limit=3))
    assert parser.open_tags == []
    assert parser.cells == 3 * 13


def test_markdown(converted: ExportedProgram, measured: gq.Measurement) -> None:
    lines = gq.report(converted, measured, EVALUATION).to_markdown().splitlines()
    assert lines[1].startswith("|---")
    assert {line.count("|") for line in lines[:6]} == {14}
    assert "- converted: perplexity 19.703, KL from original 0.001235 nats/token, same top-1 token at 97.35%" in lines


def test_json_is_strict(converted: ExportedProgram, measured: gq.Measurement) -> None:
    key = "model.layers.0.self_attn.key_states"
    lossless = dataclasses.replace(measured, errors=measured.errors | {key: ErrorSums(count=9, signal=1.0)})
    endless = dataclasses.replace(
        EVALUATION, results={"original": ModelResult(perplexity=math.inf, kl=0.0, top1_percent=100.0, tokens=3)}
    )
    report = gq.report(converted, lossless, endless)
    assert report.rows[0].sqnr_db == math.inf

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    data = json.loads(report.to_json(), parse_constant=refuse)
    assert data == report.to_dict() | {"totals": data["totals"]}
    assert data["rows"][0]["sqnr_db"] is None
    assert data["rows"][1]["sqnr_db"] == report.rows[1].sqnr_db
    assert data["evaluation"]["results"]["original"]["perplexity"] is None
    assert data["totals"]["worst_sqnr_db"] == min(row["sqnr_db"] for row in data["rows"][1:])
    assert data["totals"]["tokens_measured"] == 36
    assert data["totals"]["bits"] == {"8": 4}
