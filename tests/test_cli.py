"""The command line: exit codes, one-sentence errors, the three ways of output."""

import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ds4 import cli, models
from ds4.cli import models as models_command
from ds4.cli import turns
from ds4.cli.output import Output, printable
from ds4.cli.talk import interruptible
from ds4.errors import PoolFull

ROOT = Path(__file__).resolve().parent.parent
ESCAPE = re.compile(r"\x1b\[")
DATA = b"weights" * 1000


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DS4_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DS4_DEBUG", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    (tmp_path / "home" / "models").mkdir(parents=True)
    return tmp_path / "home"


@pytest.fixture
def toy(home, tmp_path):
    """A model that a file URL gives; returns its TOML."""
    (tmp_path / "source").write_bytes(DATA)
    path = home / "models" / "toy.toml"
    path.write_text(
        f'title = "Toy"\nlicence = "MIT"\nfile = "toy.gguf"\nsize = {len(DATA)}\n'
        f'sha256 = "{hashlib.sha256(DATA).hexdigest()}"\n[source]\nkind = "url"\nurl = "file://{tmp_path}/source"\n'
    )
    return path


class Terminal(io.StringIO):
    def isatty(self):
        return True


def ds4(*args, **options):
    """The command in a process of its own."""
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": ROOT} | options
    return subprocess.run([sys.executable, "-m", "ds4", *args], **options)


def events(text):
    return [json.loads(line) for line in text.splitlines()]


# ---- usage ---------------------------------------------------------------------------------------------------------


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in ("run", "chat", "agent", "tokenize", "inspect", "pull", "models", "demo"):
        assert re.search(rf"^ +{name} ", out, re.M)
        assert cli.main([name, "--help"]) == 0
        assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: COMMAND; see `ds4 --help`"),
        (["fly"], "invalid choice: 'fly'"),
        (["pull"], "the following arguments are required: name; see `ds4 pull --help`"),
        (["models", "--colour"], "unrecognized arguments: --colour"),
        (["run", "-m", "x"], "required: -p/--prompt"),
        (["run", "-m", "x", "-p", "y", "--threads", "0"], "0 is not between 1 and"),
        (["run", "-m", "x", "-p", "y", "--threads", "two"], "'two' is not a whole number"),
        (["run", "-m", "x", "-p", "y", "-n", "9999999999"], "9999999999 is not between 1 and"),
        (["run", "-m", "x", "-p", "y", "--raw", "--system", "z"], "--raw continues plain text: it takes no --system"),
        (["run", "-m", "x", "-p", "\udcff"], "not UTF-8"),
        (["tokenize", "-m", "x"], "give either -p TEXT or --ids IDS"),
    ],
)
def test_wrong_usage_is_one_sentence_and_code_2(capsys, args, message):
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("ds4: ") and err.count("\n") == 1


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("ds4 ")


# ---- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (PoolFull("too few\n pages"), 1, "ds4: too few pages\n"),
        (cli.UsageError("no such thing"), 2, "ds4: no such thing\n"),
        (FileNotFoundError(2, "No such file or directory", "x.gguf"), 1, "ds4: x.gguf: No such file or directory\n"),
        (MemoryError(), 1, "ds4: this machine has too little memory for that"),
        (KeyError("x"), 1, "ds4: internal error, KeyError: 'x' (DS4_DEBUG=1 shows where)\n"),
        (PoolFull("\x1b]0;title\x07 [bold]"), 1, "ds4: \\x1b]0;title\\x07 [bold]\n"),
    ],
)
def test_a_failure_is_one_sentence(capsys, monkeypatch, error, code, message):
    def fail(args, out):
        raise error

    monkeypatch.setattr(models_command, "run", fail)
    assert cli.main(["models"]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(message) and err.count("\n") == 1
    assert cli.main(["models", "--json"]) == code
    (event,) = events(capsys.readouterr().out)
    assert event["type"] == "error"
    monkeypatch.setenv("DS4_DEBUG", "1")
    with pytest.raises(type(error)):
        cli.main(["models"])


def test_ctrl_c_is_130(capsys, monkeypatch):
    def interrupted(args, out):
        out.stream("half a l")
        raise KeyboardInterrupt

    monkeypatch.setattr(models_command, "run", interrupted)
    assert cli.main(["models"]) == 130
    assert capsys.readouterr() == ("half a l\n", "")


def test_a_reader_that_went_away(home):
    read, write = os.pipe()
    os.close(read)
    done = ds4("models", "--json", capture_output=False, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_ctrl_c_during_a_pull_leaves_nothing_half_installed(home, tmp_path, toy):
    os.mkfifo(tmp_path / "pipe")  # a source that begins and never ends
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    toy.write_text(toy.read_text().replace("/source", "/pipe"))
    folder = home / "weights" / "toy"
    command = [sys.executable, "-m", "ds4", "pull", "toy"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        os.write(pipe, DATA[:100])
        while process.poll() is None and not list(folder.glob("*.part")):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    os.close(pipe)
    assert (process.returncode, out, err) == (130, "", "")
    assert not (folder / "toy.gguf").exists()


# ---- models and pull -----------------------------------------------------------------------------------------------


def test_models(capsys, toy):
    assert cli.main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "size", "licence", "chat", "format", "file"]
    row = {line.split()[0]: line for line in lines}
    assert re.match(r"smollm2-135m +98.4 MB +Apache-2.0 +chatml +not here: ds4 pull smollm2-135m$", row["smollm2-135m"])
    assert re.match(r"toy +7 kB +MIT +- +not here: ds4 pull toy$", row["toy"])
    assert cli.main(["pull", "toy", "--quiet"]) == 0
    path = models.load("toy").path
    assert capsys.readouterr() == (f"toy: {path}\n", "")
    assert cli.main(["models", "--json"]) == 0
    found = {e["name"]: e for e in events(capsys.readouterr().out)}
    assert found["toy"]["path"] == str(path) and found["smollm2-135m"]["path"] is None
    assert found["smollm2-135m"]["chat_format"] == "chatml"


def test_a_broken_toml_hides_no_other_model(capsys, home):
    (home / "models" / "bad.toml").write_text("colour = 1")
    assert cli.main(["models"]) == 1
    out, err = capsys.readouterr()
    assert "smollm2-135m" in out and "bad.toml" in err and err.count("\n") == 1


def test_pull_events(capsys, toy):
    assert cli.main(["pull", "toy", "--json"]) == 0
    out, err = capsys.readouterr()
    found = events(out)
    assert err == ""
    assert found[0] == {"type": "progress", "name": "toy", "stage": "download", "done": len(DATA), "total": len(DATA)}
    assert found[-1] == {"type": "pulled", "name": "toy", "path": str(models.load("toy").path)}


@pytest.mark.parametrize("flags", [[], ["--quiet"], ["--json"]])
def test_pull_of_a_wrong_file(capsys, toy, flags):
    toy.write_text(re.sub(r'sha256 = "[0-9a-f]+"', f'sha256 = "{"0" * 64}"', toy.read_text()))
    assert cli.main(["pull", "toy", *flags]) == 1
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and hashlib.sha256(DATA).hexdigest() in err and "0" * 64 in err
    assert [e["type"] for e in events(out)][-1:] == (["error"] if flags == ["--json"] else [])
    assert not models.load("toy").path.exists()


def test_an_unknown_model_is_code_1(capsys):
    assert cli.main(["pull", "smollm2-135"]) == 1
    assert capsys.readouterr().err == "ds4: no model is called 'smollm2-135': did you mean smollm2-135m?\n"


# ---- output --------------------------------------------------------------------------------------------------------


def on_terminal(monkeypatch, do):
    """What `do` writes to stdout and stderr when both are a terminal."""
    streams = Terminal(), Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        do()
    return tuple(s.getvalue() for s in streams)


def speak(out):
    with out.progress("prefill") as report:
        for done in range(0, 101, 10):
            report(done, 100)
    out.stream("\x1b[31mred")
    out.note("a note")
    out.table(["a", "b"], [["1", "\x1b[2J[bold]"]], right=[0])
    out.event("thing", text="ü\n")


def test_a_terminal_gets_colour_but_no_escape_of_a_model(monkeypatch):
    out, err = on_terminal(monkeypatch, lambda: speak(Output()))
    assert "\\x1b[31mred\n" in out and "\\x1b[2J[bold]" in out
    assert ESCAPE.search(err) and "100/100 tokens" in err and "a note" in err
    assert "\x1b[31m" not in out and "\x1b[2J" not in out


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_color_is_plain_text(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    out, err = on_terminal(monkeypatch, lambda: speak(Output()))
    assert out == "\\x1b[31mred\na  b\n1  \\x1b[2J[bold]\n"
    assert err == "a note\n"


def test_a_pipe_gets_the_text_as_it_is(capsys):
    speak(Output())
    assert capsys.readouterr() == ("\x1b[31mred\na  b\n1  \\x1b[2J[bold]\n", "a note\n")


def test_quiet_keeps_results(capsys):
    speak(Output(quiet=True))
    assert capsys.readouterr() == ("\x1b[31mreda  b\n1  \\x1b[2J[bold]\n", "")


def test_json_is_one_event_a_line(capsys):
    speak(Output(json=True))
    out, err = capsys.readouterr()
    assert err == ""
    assert events(out) == [
        {"type": "progress", "done": 0, "total": 100},
        {"type": "progress", "done": 100, "total": 100},
        {"type": "thing", "text": "ü\n"},
    ]


def test_plain_progress_is_a_line_now_and_then(capsys, monkeypatch):
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr("ds4.cli.output.time.monotonic", lambda: next(clock))
    with Output().progress("pull", "bytes") as report:
        for done in range(0, 10_000_001, 1_000_000):
            report(done, 10_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert 3 <= len(lines) <= 5
    assert all(re.fullmatch(r"pull: \d+ MB of 10 MB, \d+ kB/s", line) for line in lines)


def test_printable_keeps_text_and_shows_the_rest():
    assert printable("a\tb\nü\u4e2d") == "a\tb\nü\u4e2d"
    assert printable("\x00\x1b\x7f\x9b\r") == "\\x00\\x1b\\x7f\\x9b\\x0d"


# ---- the prompt ----------------------------------------------------------------------------------------------------


def typed(keys):
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    with create_pipe_input() as pipe:
        pipe.send_text(keys)
        return turns.prompt_session(input=pipe, output=DummyOutput()).prompt("> ")


def test_the_prompt(home):
    assert typed("one line\r") == "one line"
    assert typed("first\x1b\rsecond\r") == "first\nsecond"  # Alt-Enter
    assert typed("first\\\rsecond\r") == "first\nsecond"  # a backslash at the end
    assert typed("\x1b[A\x1b[A\r") == "first\nsecond"  # history: equal entries are there once each
    with pytest.raises(KeyboardInterrupt):
        typed("half\x03")
    with pytest.raises(EOFError):
        typed("\x04")
    assert (home / "history").stat().st_mode & 0o077 == 0


def test_lines_from_a_pipe(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo \\\nmore\n\nlast\\"))
    assert list(turns.lines()) == ["one", "two \nmore", "", "last\n"]


def test_threads_do_not_hear_signals():
    seen = []

    def work():
        with interruptible(lambda: None) as pressed:
            seen.append(pressed.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
