"""The commands that compute, on the real model."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ds4 import cli
from ds4.engine import Engine

pytestmark = pytest.mark.model
ROOT = Path(__file__).resolve().parent.parent
PROMPT = "The capital of France is"


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.delenv("DS4_DEBUG", raising=False)


def ds4(capsys, *args):
    """Events of one command that succeeds without a word on stderr."""
    code = cli.main([*map(str, args), "--json"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, ""), err
    return [json.loads(line) for line in out.splitlines()]


def greedy(path, n):
    with Engine(path) as engine, engine.session() as session:
        session.sync(engine.tokenizer.encode(PROMPT))
        return "".join(token.text for token in session.generate(max_tokens=n))


def test_tokenize(capsys, smollm2):
    (event,) = ds4(capsys, "tokenize", "-m", "smollm2-135m", "-p", "<|im_end|> Grüße")
    assert len(event["ids"]) > 3 and event["text"] == "<|im_end|> Grüße"
    (special,) = ds4(capsys, "tokenize", "-m", smollm2, "-p", "<|im_end|> Grüße", "--special")
    assert len(special["ids"]) < len(event["ids"]) and special["pieces"][0] == "<|im_end|>"
    (back,) = ds4(capsys, "tokenize", "-m", smollm2, "--ids", ",".join(map(str, event["ids"])))
    assert back["text"] == event["text"]
    assert cli.main(["tokenize", "-m", str(smollm2), "--ids", "49152"]) == 2
    assert capsys.readouterr().err == "ds4: token id 49152 is outside 0..49151\n"


def test_inspect(capsys, smollm2):
    events = {}
    for event in ds4(capsys, "inspect", smollm2, "--pool-tokens", "4096"):
        events.setdefault(event["type"], []).append(event)
    (facts,) = events["file"]
    assert (facts["architecture"], facts["name"]) == ("llama", "smollm2-135m")
    assert sum(e["weights"] for e in events["tensors"]) == 134_515_008
    assert events["config"][0]["options"]["n_layers"] == 30
    (stream,) = events["stream"]
    assert (stream["stride"], stream["reach"]) == (1, None)
    assert events["memory"][0]["token_bytes"] == stream["row_bytes"]
    assert events["memory"][0]["pool_tokens"] >= 4096
    assert cli.main(["inspect", str(smollm2)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^Q4_1 +210 +106,168,320 +66.4 MB +5.00$", out, re.M)
    assert "sessions of 8,192 positions" in out


def test_run_raw_is_the_engine_and_nothing_else(capsys, smollm2):
    events = ds4(capsys, "run", "-m", smollm2, "--raw", "-p", PROMPT, "-n", "8", "--temperature", "0", "--top-p", "1")
    assert "".join(e["text"] for e in events if e["type"] == "text") == greedy(smollm2, 8)
    assert {k: events[-1][k] for k in ("finish", "generated", "reused")} == {
        "finish": "length",
        "generated": 8,
        "reused": 0,
    }


def test_run_reads_stdin_and_a_seed_repeats(smollm2):
    def run():
        args = ["run", "-m", smollm2, "--raw", "-p", "-", "-n", "6", "--temperature", "1", "--seed", "7"]
        done = subprocess.run(
            [sys.executable, "-m", "ds4", *args], cwd=ROOT, input=PROMPT.encode(), capture_output=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run() == run() != b"\n"


def test_ctrl_c_in_an_answer(smollm2):
    args = ["run", "-m", smollm2, "--raw", "-p", PROMPT, "-n", "8000", "--temperature", "0", "--json"]
    with subprocess.Popen([sys.executable, "-m", "ds4", *args], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if json.loads(line)["type"] == "text":
                process.send_signal(signal.SIGINT)
                break
        rest = [json.loads(line) for line in process.stdout]
        assert process.wait(timeout=60) == 130
    assert rest[-1]["finish"] == "cancelled" and rest[-1]["generated"] == 1 + sum(e["type"] == "text" for e in rest)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--raw", "-p", ""], 2, "the prompt is empty"),
        (["-p", "x", "--top-p", "2"], 2, "top_p is 2.0; give a number above 0 and up to 1"),
        (["-p", "x", "--seed", "-1"], 2, "seed is -1; give"),
        (["-p", "x", "--chat-format", "nope"], 1, "no chat format 'nope'"),
        (["-p", "x", "--stop", "y"], 2, "--stop goes with --raw"),
        (["--raw", "-p", "a b c d", "--ctx", "2"], 1, "2"),
    ],
)
def test_wrong_values(capsys, smollm2, args, code, message):
    assert cli.main(["run", "-m", str(smollm2), *args]) == code
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1
