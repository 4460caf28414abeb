"""`ds4 perplexity`: every token is scored once, given exactly the context that the window says."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from oracle import DATA
from tiny_tokenizer import CHATML, tokenizer_json

import ds4
from ds4 import cli

TEXT = "the cat hello the 123\n" * 12 + "é€😀"


@pytest.fixture(scope="module", params=[False, True], ids=["no_bos", "bos"])
def model(request, tmp_path_factory) -> Path:
    """The tiny Llama with a tokenizer of bytes, with and without BOS."""
    folder = tmp_path_factory.mktemp("perplexity") / "model"
    shutil.copytree(DATA / "llama", folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(CHATML)))
    config = {"bos_token": "<|im_start|>", "add_bos_token": request.param}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def events(capsys, *args: object) -> list[dict]:
    code = cli.main(["perplexity", *map(str, args), "--threads", "1", "--json"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, ""), err
    return [json.loads(line) for line in out.splitlines()]


def by_hand(model: Path, ctx: int, stride: int) -> np.ndarray:
    """The loss of each token from the logits of a session of its own for each window."""
    losses = []
    with ds4.Engine(model, threads=1, pool_tokens=4096) as engine:
        tokens = engine.tokenizer.encode(TEXT)
        bos = [engine.tokenizer.bos_id] if engine.tokenizer.add_bos else []
        room, done = ctx - len(bos), 0
        while done < len(tokens):
            end = min(len(tokens), done + (stride if done else room))
            window = bos + tokens[max(0, end - room) : end]
            with engine.session() as session:
                logits = session.eval(window, logits="all").astype(np.float64)
            logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
            first = max(len(window) - (end - done), 1)
            losses += [-logs[i - 1, window[i]] for i in range(first, len(window))]
            done = end
    return np.array(losses)


@pytest.mark.parametrize(("ctx", "stride"), [(512, None), (64, None), (64, 1), (64, 40), (33, 32), (10000, None)])
def test_it_is_the_mean_over_windows(model, capsys, tmp_path, ctx, stride):
    (tmp_path / "text").write_text(TEXT)
    more = ["--stride", stride] if stride else []
    *progress, found = events(capsys, tmp_path / "text", "-m", model, "--ctx", ctx, *more)
    losses = by_hand(model, found["ctx"], found["stride"])
    assert found["ctx"] == min(ctx, 4096) and found["stride"] == (stride or found["ctx"] // 2)
    assert found["tokens"] == len(losses)
    assert found["nll"] == pytest.approx(losses.mean(), abs=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))
    error = losses.std(ddof=1) / math.sqrt(len(losses))
    assert found["nll_error"] == pytest.approx(error, rel=1e-3)
    assert found["perplexity_error"] == pytest.approx(found["perplexity"] * error, rel=1e-3)
    done = [e["done"] for e in progress if e["type"] == "progress"]
    assert done == sorted(done) and done[-1] == progress[-1]["total"]


def test_windows_of_a_model_without_bos_may_not_overlap_at_all(capsys, tmp_path, model):
    """Then the first token of each has nothing before it, and is left out."""
    (tmp_path / "text").write_text(TEXT)
    found = events(capsys, tmp_path / "text", "-m", model, "--ctx", 64, "--stride", 63)[-1]
    assert found["tokens"] == len(by_hand(model, 64, 63))


def test_text_and_stdin(model):
    command = [sys.executable, "-m", "ds4", "perplexity", "-", "-m", str(model), "--quiet"]
    done = subprocess.run(command, input=TEXT.encode(), capture_output=True, timeout=60)
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0 and [line.split()[0] for line in lines] == ["tokens", "nll", "perplexity"]
    assert "in windows of 512, 256 new ones in each" in lines[0] and done.stderr == b""


@pytest.mark.parametrize(
    ("content", "more", "code", "words"),
    [
        (b"", [], 2, "too few tokens"),
        (b"\xff\xfe", [], 2, "is not UTF-8"),
        (b"the cat", ["--ctx", "8", "--stride", "9"], 2, "--stride up to"),
        (b"the cat", ["--stride", "0"], 2, "not between 1"),
        (None, [], 1, "No such file"),
    ],
)
def test_what_cannot_be_scored(model, capsys, tmp_path, content, more, code, words):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    assert cli.main(["perplexity", str(tmp_path / "text"), "-m", str(model), *more]) == code
    assert words in capsys.readouterr().err
