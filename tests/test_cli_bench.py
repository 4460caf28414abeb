"""`ds4 bench`: tables of what was compared, on a tiny model with random weights."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from oracle import settled
from scenes import small_chat_model

from ds4 import cli
from ds4.cli import bench, costs, tables
from ds4.cli.output import Output
from ds4.engine import Engine

COST = costs.Cost(4096, 3045, 448, "ledger", 6.5, 28e-6, 4.4, 245, 8.0, 0, 0.0005, 11.0, 0.57, 24)


@pytest.fixture(scope="module")
def tiny_chat(tmp_path_factory) -> Path:
    return small_chat_model(tmp_path_factory.mktemp("bench") / "tiny")


def test_a_table_in_three_forms():
    lines = bench.markdown([COST, COST]).splitlines()
    assert lines[0].split() == ["|", "ctx", "|", "4096", "|", "4096", "|"]
    assert re.fullmatch(r"\|-+\|-+:\|-+:\|", lines[1]) and len({len(line) for line in lines}) == 1
    cells = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in lines}
    assert cells["tokens before -> after"] == "3045 -> 448" and cells["rollback"] == "28 us"
    assert cells["summary"] == "6.50 s, none kept" and cells["interrupted: evaluated again"] == "0"
    (row,) = csv.DictReader(io.StringIO(tables.table_csv([COST])))
    assert (row["ctx"], row["pause_seconds"], row["step"]) == ("4096", "11.0", "ledger")
    (row,) = json.loads(tables.table_json([COST]))
    assert costs.Cost(**row) == COST


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["bench", "compaction", "--ctx", "1024"], "1024 is not between 2048"),
        (["bench", "compaction", "--ctx", "4096,x"], "'x' is not a whole number"),
        (["bench", "moves", "--tokens", "8"], "8 is not between 64"),
    ],
)
def test_wrong_usage(capsys, args, message):
    assert cli.main(args) == 2
    assert message in capsys.readouterr().err


def test_a_context_that_the_model_has_not(capsys, tiny_chat):
    assert cli.main(["bench", "compaction", "-m", str(tiny_chat), "--ctx", "65536"]) == 2
    assert "has a context of 40000: --ctx 65536 is more" in capsys.readouterr().err


def test_a_model_without_tool_calls(capsys, tiny):
    assert cli.main(["bench", "compaction", "-m", str(tiny)]) == 1
    assert "has no way to call tools" in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_compaction_costs(capsys, tiny_chat):
    with Engine(tiny_chat, threads=1) as engine:
        start = settled(engine.ledger())
        cost = costs.measure(engine, 8192, Output(json=True), repeat=2)
        assert settled(engine.ledger()) == start
    assert cost.ctx == 8192 and 0 < cost.evaluated < cost.after < cost.before < 6144
    assert cost.interrupted_evaluated == 0 and cost.interrupted_seconds < 0.2
    assert 0 < cost.rollback_seconds < 0.01 < cost.summary_seconds < cost.pause_seconds
    assert cost.background_pause_seconds < cost.pause_seconds and cost.since > 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    seen = {event["phase"] for event in events if event["type"] == "progress" and "phase" in event}
    for phase in ("filling", "to be interrupted in its summary", "compaction: summary", "compaction: rebuild"):
        assert f"ctx 8192, {phase}" in seen
    compared = [event for event in events if event["type"] == "compared"]
    assert len(compared) == 4 and all(event["bit_exact"] for event in compared)
    assert [event["kind"] for event in compared] == ["asked for", "background"] * 2


def test_moves_shows_only_what_was_compared(capsys, tiny_chat):
    assert cli.main(["bench", "moves", "-m", str(tiny_chat), "--tokens", "64", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    figures = {event["operation"]: event for event in events if event["type"] == "figure"}
    assert len(figures) == 7 and all(figure["bit_exact"] for figure in figures.values())
    edit = figures["sync after an edit 20 tokens back"]
    assert (edit["reused"], edit["evaluated"]) == (64 - 21, 21)
