"""`ds4 demo`: three compactions live, and nothing that was not compared."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from scenes import small_chat_model

from ds4 import cli
from ds4.agent.chat import Chat
from ds4.cli import demo, scenario
from ds4.cli.scenario import time_text
from ds4.engine import Engine
from ds4.errors import Ds4Error

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tiny_chat(tmp_path_factory) -> Path:
    return small_chat_model(tmp_path_factory.mktemp("demo") / "tiny")


def events(text):
    return [json.loads(line) for line in text.splitlines()]


# ---- the parts


def test_the_log_is_the_same_every_time():
    text = scenario.log_text(40)
    assert text == scenario.log_text(40) and scenario.log_text(41).startswith(text)
    lines = text.splitlines()
    assert len(lines) == len(set(lines)) == 40
    assert lines[0] == (
        "Day 1: Tomas looked at the fuel tank: worn, a spare is needed. Sky: low cloud. Wind 7 knots, fuel 887 litres."
    )


def test_a_read_of_so_many_tokens(tiny_chat, tmp_path):
    scenario.write_log(tmp_path / "station", 4096)
    tools = scenario.reading_tools(tmp_path / "station")
    with Engine(tiny_chat, threads=1) as engine, Chat(engine, ctx=16384, tools=tools) as chat:

        def size(lines):
            return len(chat.writer.result("", chat.toolbox.call(scenario.read(9, lines)).text))

        for tokens in (500, 1000, 5000):
            lines = scenario.lines_for(chat, 9, tokens)
            assert size(lines) <= tokens < size(lines + 1)
        assert scenario.lines_for(chat, 9, 20) == 0
        chat.force("I wait.")
        chat.ask(scenario.TASK)
        lines = scenario.lines_up_to(chat, 9, 6000, scenario.READ_ON)
        chat.force(scenario.READING, [scenario.read(9, lines)])
        chat.force("")
        list(chat.send(scenario.READ_ON))
        end = len(chat.writer.assistant("")) + 1
        assert 6000 - 150 < chat.live.used - end <= 6000


def test_a_bit_that_differs_is_an_error(tiny_chat):
    with Engine(tiny_chat, threads=1) as engine, engine.session() as session:
        session.eval(list(range(10, 90)))
        assert scenario.same_bits(engine, session, 128, None, []) > 0

        class Wrong:
            tokens = session.tokens
            logits = session.logits + 1

        with pytest.raises(Ds4Error, match="the same 80 tokens from nothing"):
            scenario.same_bits(engine, Wrong, 128, None, [])


def test_durations():
    assert [time_text(s) for s in (3e-5, 0.0009996, 0.0123, 0.9994, 0.9996, 12.345)] == [
        "30 us", "1 ms", "12.3 ms", "999 ms", "1.00 s", "12.35 s",
    ]  # fmt: skip


# ---- the command


def test_a_model_without_tool_calls(capsys, tiny):
    assert cli.main(["demo", "-m", str(tiny)]) == 1
    assert "has no way to call tools" in capsys.readouterr().err


@pytest.mark.slow
def test_three_compactions(capsys, tiny_chat):
    """With random weights: what the model says is nothing, all else is as with a good one."""
    assert cli.main(["demo", "-m", str(tiny_chat), "--ctx", "8192", "--threads", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    check_demo(events(out))
    assert err == ""


def check_demo(found):
    kinds = ["hard", "soft", "background"]
    compared = [event for event in found if event["type"] == "compared"]
    assert [event["kind"] for event in compared] == kinds and all(event["bit_exact"] for event in compared)
    (report,) = [event for event in found if event["type"] == "report"]
    assert [row["kind"] for row in report["compactions"]] == kinds
    for row in report["compactions"]:
        assert row["after"] < row["before"] and row["reused"] + row["evaluated"] == row["after"]
    hard, soft, ahead = report["compactions"]
    assert hard["rollback_seconds"] > 0 and soft["summary_seconds"] > 0
    assert ahead["prepared_seconds"] > 0 and ahead["pause_seconds"] < soft["pause_seconds"]
    assert [event["type"] for event in found].count("reopened") == 2
    assert [event["ready"] for event in found if event["type"] == "prepared"] == [True]
    # 5 calls and 3 answers are forced, all others are the model's own
    assert sum(event["type"] == "tool_call" for event in found) == 6
    assert sum(event["type"] == "forced" for event in found) == 9
    assert sum(event["type"] == "turn_end" for event in found) == 6
    reads = [event["text"].split("\n")[0] for event in found if event["type"] == "tool_result"]
    spans = [list(map(int, re.match(r"log.txt lines (\d+)-(\d+) of", read).groups())) for read in reads]
    assert spans[0][0] == 1 and all(b[0] == a[1] + 1 for a, b in zip(spans, spans[1:], strict=False))


def test_a_free_model_is_not_forced(capsys, tiny_chat, monkeypatch):
    monkeypatch.setattr(demo, "FREE_ANSWER", 20)
    monkeypatch.setattr(demo, "FREE_TURNS", 2)
    assert cli.main(["demo", "-m", str(tiny_chat), "--ctx", "8192", "--threads", "1", "--free"]) == 0
    out = capsys.readouterr().out
    assert "Every answer is the model's own." in out and "[forced]" not in out
    assert out.count("> Read on.\n") == 8 and "not prepared: too little has been said" in out
    assert "No compaction was needed: the model has read too little." in out


@pytest.mark.slow
@pytest.mark.parametrize("at", ["summary", "tool_call"])
def test_ctrl_c_ends_it(tiny_chat, at):
    args = ["demo", "-m", str(tiny_chat), "--ctx", "8192", "--threads", "1", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "ds4", *args], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if json.loads(line)["type"] == at:
                process.send_signal(signal.SIGINT)
                break
        rest = [json.loads(line) for line in process.stdout]
        assert process.wait(timeout=60) == 130 and process.stderr.read() == ""
    assert not any(event["type"] in ("report", "error", "compaction_done") for event in rest)


@pytest.mark.slow
@pytest.mark.model
def test_on_smollm2(capsys, smollm2):
    assert cli.main(["demo", "-m", str(smollm2), "--ctx", "2048"]) == 0
    out = capsys.readouterr().out
    assert "Answers marked [forced] are given" in out and "[forced] I read the next part.\n-> read " in out
    assert re.search(r"^compaction +hard +soft +background$", out, re.M)
    assert re.search(r"^next logits +same bits +same bits +same bits$", out, re.M)
    assert "After each of the 3 compactions the next logits were those of a session" in out
    assert re.search(r"stood still for [\d.]+ m?s without background mode and for [\d.]+ m?s with it", out)
