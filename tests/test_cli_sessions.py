"""`ds4 sessions` and `ds4 spill`, and what they stand on: where conversations lie, how they are named, what is damaged."""

from __future__ import annotations

import json
import os
import stat
import sys

import pytest
from saved import make, open_engine
from test_cli import Terminal
from test_spill import tree
from test_transcript import answer, checkpoint, texts, user

from ds4 import cli, conversations, snapshot_check
from ds4.chat_formats import ToolCall
from ds4.errors import ArgumentError, StoreError
from ds4.node_json import from_json
from ds4.sealed import Damage
from ds4.store import Store
from ds4.transcript import Held, Transcript

HOSTILE = "\x1b]0;title\x07\x1b[31mred\r\b\x9b1m\u202e"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DS4_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DS4_DEBUG", raising=False)
    return tmp_path / "home"


def make_one(text="one", name=None):
    """A conversation with two turns, the first of them compacted and spilled; closed."""
    path = conversations.new_path()
    path = path if name is None else path.parent / name
    t = Transcript(Store.create(path, {"model": "m"}))
    t.append(user(text))
    t.append(answer("first", calls=(ToolCall("read", {"path": "\x1b[2J"}, "call-1"),), thinking="let me see"))
    t.append(user("two\nlines"))
    entry = t.store.spill.prepare(t.surface[:2])
    t.replace([checkpoint("the sum", 50), t.surface[2]], spills=[entry])
    t.store.close()
    return path


def events(text):
    """JSON lines; `splitlines` would also split at what a text may hold."""
    return [json.loads(line) for line in text.split("\n") if line]


def run(capsys, *args):
    code = cli.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return code, out, err


# ---- where they lie ------------------------------------------------------------------------------------------------


def test_the_folder_of_conversations(monkeypatch, tmp_path, home):
    assert conversations.data_home() == home / "conversations"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert conversations.data_home() == home / "conversations"
    monkeypatch.delenv("DS4_HOME")
    assert conversations.data_home() == tmp_path / "data" / "ds4" / "conversations"
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_DATA_HOME", value)
        assert conversations.data_home() == tmp_path / "me" / ".local" / "share" / "ds4" / "conversations"
    assert not (tmp_path / "me").exists(), "asking makes nothing"
    path = conversations.new_path()
    assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700 and not path.exists()
    with Store.create(path) as store:
        assert store.id == path.name


def test_listed_are_conversations_and_nothing_else(home, tmp_path):
    assert conversations.conversations() == []
    path = make_one("a question that is much longer than the sixty characters that a title may have\nand more")
    root = path.parent
    os.symlink(path, root / "link")
    (root / "empty").mkdir()
    (root / "file").write_text("x")
    (root / ".hidden").mkdir()
    (root / ".hidden" / "log-000001.jsonl").write_text("x")
    [one] = conversations.conversations()
    assert (one.id, one.path, one.nodes, one.in_use, one.damage, one.snapshot_bytes) == (
        path.name,
        path,
        2,
        False,
        None,
        0,
    )
    assert one.tokens == 1 + len((9, 7)) and one.title == "a question that is much longer than the sixty characters ..."
    assert one.changed == (path / "log-000001.jsonl").stat().st_mtime
    (path / "kv.ds4").write_bytes(b"x" * 10)
    second = make_one("second")
    os.utime(second / "log-000001.jsonl", (1, 1))
    assert [(one.title[:6], one.snapshot_bytes) for one in conversations.conversations()] == [
        ("a ques", 10),
        ("second", 0),
    ]
    assert conversations.conversations(tmp_path / "none") == []


def test_names_are_matched_inside_the_folder_only(home, tmp_path):
    for name in ("alpha", "alp", "beta"):
        make_one(name=name)
    root = home / "conversations"
    Store.create(tmp_path / "outside").close()
    os.symlink(tmp_path / "outside", root / "gamma")
    assert conversations.find("b") == root / "beta" and conversations.find("alp") == root / "alp"
    with pytest.raises(ArgumentError, match="2 conversations begin with 'al': alp, alpha; give more of it"):
        conversations.find("al")
    for wrong in ("", "x", "..", "../outside", "beta/", str(tmp_path / "outside"), "gamma", ".", "*", "BETA", "\0"):
        with pytest.raises(ArgumentError, match="there is no conversation"):
            conversations.find(wrong)


# ---- sessions ------------------------------------------------------------------------------------------------------


def test_list(capsys):
    assert run(capsys, "sessions", "list") == (0, "", f"no conversation is kept in {conversations.data_home()} yet\n")
    path = make_one(f"hello {HOSTILE}")
    bad = make_one("broken")
    (bad / "log-000001.jsonl").write_bytes(b"x" + (bad / "log-000001.jsonl").read_bytes())
    os.utime(bad / "log-000001.jsonl", (1, 1))
    with Store.open(path):
        code, out, err = run(capsys, "sessions", "list")
        assert code == 0 and err == ""
        header, first, second = out.splitlines()
        assert header.split() == ["id", "changed", "nodes", "tokens", "snapshot", "state", "begins", "with"]
        assert (
            first.startswith(path.name)
            and "in use" in first
            and "hello \\x1b]0;title\\x07" in first
            and "\x1b" not in out
        )
        assert second.startswith(bad.name) and "damaged" in second
        code, out, _ = run(capsys, "sessions", "list", "--json")
    first, second = events(out)
    assert first["type"] == "session" and first["id"] == path.name and first["path"] == str(path) and first["in_use"]
    assert (first["nodes"], first["tokens"], first["damage"]) == (2, len((50,)) + len((9, 7)), None)
    assert second["damage"]["file"] == "log-000001.jsonl" and second["damage"]["line"] == 1


def test_show(capsys):
    path = make_one(f"{HOSTILE}\nsecond line")
    code, out, err = run(capsys, "sessions", "show", path.name[:-2])
    assert code == 0 and err == ""
    assert [line.split() for line in out.splitlines()] == [
        ["node", "role", "tokens", "first", "line"], ["#4", "user", "(checkpoint)", "1", "the", "sum"], ["#3", "user", "2", "two"],
    ]  # fmt: skip
    code, out, _ = run(capsys, "sessions", "show", path.name, "--all")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["node", "#1", "#2", "#3", "#4"]
    assert (
        "replaced" in lines[1]
        and "\\x1b]0;title\\x07\\x1b[31mred" in lines[1]
        and "second line" not in out
        and "\x1b" not in out
    )
    assert "first [call read]" in lines[2] and "replaced" in lines[2] and "replaced" not in lines[3] + lines[4]
    code, out, _ = run(capsys, "sessions", "show", path.name, "--all", "--json")
    found = events(out)
    assert [(e["number"], e["surface"], e["kind"]) for e in found] == [
        (1, False, ""),
        (2, False, ""),
        (3, True, ""),
        (4, True, "checkpoint"),
    ]
    assert [e["text"] for e in found] == [f"{HOSTILE}\nsecond line", "first", "two\nlines", "the sum"]
    code, out, err = run(capsys, "sessions", "show", "nothing")
    assert (code, out) == (1, "") and err.startswith("ds4: there is no conversation 'nothing' in ")


def test_show_what_is_held_and_what_is_lost(capsys):
    path = make_one()
    with Store.open(path) as store:
        Transcript(store).hold(Held("user", "wait for me"))
    with open(path / "log-000001.jsonl", "ab") as file:
        file.write(b"{}\n")
    before = (path / "log-000001.jsonl").read_bytes()
    code, out, err = run(capsys, "sessions", "show", path.name)
    assert code == 0 and "two" in out
    assert "waiting to be appended: a user message of 11 characters" in err
    assert "cannot be read: log-000001.jsonl, line 7: changed: it does not end with a checksum" in err
    assert (path / "log-000001.jsonl").read_bytes() == before
    assert events(run(capsys, "sessions", "show", path.name, "--json")[1])[-1] == {
        "type": "held", "kind": "user", "text": "wait for me",
    }  # fmt: skip


def test_delete(capsys, home, monkeypatch):
    path = make_one("a", "a-first")
    make_one("b", "b-second")
    code, out, err = run(capsys, "sessions", "delete", "a")
    assert code == 2 and "a-first is deleted only when you say so: run it with --yes" in err and path.exists()
    with Store.open(path):
        code, out, err = run(capsys, "sessions", "delete", "a", "--yes")
        assert (code, out) == (1, "") and err == "ds4: a-first is in use: close it first.\n" and path.exists()
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    code, out, err = run(capsys, "sessions", "delete", "a")
    assert (
        code == 1 and "delete a-first with all its files? [y/N]" in out and "a-first is kept" in err and path.exists()
    )
    monkeypatch.setattr(sys, "stdin", Terminal("yes\n"))
    code, out, err = run(capsys, "sessions", "delete", "a")
    assert code == 0 and out.endswith("deleted a-first\n") and tree(home / "conversations")[0] == "b-second"
    code, out, err = run(capsys, "sessions", "delete", "b", "--yes", "--json")
    assert code == 0 and events(out) == [{"type": "deleted", "id": "b-second"}] and tree(home / "conversations") == []
    assert run(capsys, "sessions", "delete", "../home", "--yes")[0] == 1


def test_delete_takes_a_damaged_one_and_stays_inside(home, tmp_path):
    path = make_one()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("x")
    os.symlink(tmp_path / "mine", path / "spill" / "link")
    (path / "log-000001.jsonl").write_text("x")
    conversations.delete(path)
    assert tree(home / "conversations") == [] and tree(tmp_path / "mine") == ["thesis"]
    with pytest.raises(StoreError, match="holds no conversation"):
        conversations.delete(tmp_path / "mine")
    os.symlink(make_one(), home / "link")
    with pytest.raises(StoreError, match="holds no conversation"):
        conversations.delete(home / "link")


# ---- verify --------------------------------------------------------------------------------------------------------


def damage(path, file, at, value=None):
    data = bytearray((path / file).read_bytes())
    data[at] = data[at] ^ 1 if value is None else value
    (path / file).write_bytes(data)


def test_verify(capsys):
    sound, bad = make_one("a", "a-sound"), make_one("b", "b-bad")
    code, out, err = run(capsys, "sessions", "verify")
    assert (code, sorted(out.splitlines()), err) == (0, ["a-sound: sound", "b-bad: sound"], "")
    [spill] = (bad / "spill").glob("session-*/000001.jsonl")
    damage(bad, spill.relative_to(bad), 200)
    at = (bad / "log-000001.jsonl").read_bytes().index(b"the sum")
    damage(bad, "log-000001.jsonl", at)
    (bad / "kv.ds4").write_bytes(b"x" * 500)
    files = {path: path.read_bytes() for path in bad.rglob("*") if path.is_file()}
    code, out, err = run(capsys, "sessions", "verify")
    assert code == 1 and err == "" and "a-sound: sound\n" in out
    name = spill.relative_to(bad)
    assert [line for line in out.splitlines() if line.startswith("b-")] == [
        "b-bad: log-000001.jsonl, line 5: its checksum does not fit: it was changed, or the line before it is another one",
        f"b-bad: {name}, line 2: its checksum does not fit: it was changed, or the line before it is another one",
        "b-bad: kv.ds4: does not begin like a snapshot",
    ]
    code, out, err = run(capsys, "sessions", "verify", "b", "--json")
    assert code == 1 and [(e["type"], e["id"], e["file"], e["line"]) for e in events(out)] == [
        ("damage", "b-bad", "log-000001.jsonl", 5), ("damage", "b-bad", str(name), 2), ("damage", "b-bad", "kv.ds4", 0),
    ]  # fmt: skip
    assert run(capsys, "sessions", "verify", "a", "--json") == (0, '{"type": "sound", "id": "a-sound"}\n', "")
    assert {path: path.read_bytes() for path in files} == files, "read-only"
    spill.unlink()
    assert conversations.verify(sound) == []
    damage(bad, "log-000001.jsonl", at)
    assert conversations.verify(bad)[0] == Damage(str(name), 0, "the log refers to it, and it is missing")


def test_verify_is_content_where_a_cut_line_was_gone_on_behind(capsys):
    """A crash has cut a line: nothing that counted is lost, and the next event opens the next file."""
    path = make_one("a", "a-cut")
    with open(path / "log-000001.jsonl", "ab") as file:
        file.write(b'{"seq":')
    assert run(capsys, "sessions", "verify")[0] == 1
    with Store.open(path) as store:
        Transcript(store).record("note")
    code, out, _ = run(capsys, "sessions", "verify")
    text = "cut before its end; a later file goes on behind the line before it"
    assert (code, out) == (0, f"a-cut: log-000001.jsonl, line 6: {text}\n")
    assert [e["passed"] for e in events(run(capsys, "sessions", "verify", "--json")[1])] == [True]


def test_verify_of_a_log_without_a_beginning(capsys):
    path = make_one("b", "b-bad")
    damage(path, "log-000001.jsonl", 5)
    [spill] = (path / "spill").glob("session-*/000001.jsonl")
    damage(path, spill.relative_to(path), -1, ord(" "))
    assert [(d.file, d.line) for d in conversations.verify(path)] == [
        ("log-000001.jsonl", 1), (str(spill.relative_to(path)), 3),
    ]  # fmt: skip
    assert run(capsys, "sessions", "list")[0] == 0 and run(capsys, "sessions", "show", "b")[0] == 0


def test_a_line_in_the_making_is_no_damage():
    path = make_one()
    with Store.open(path):
        with open(path / "log-000001.jsonl", "ab") as file:
            file.write(b'{"seq":')
        assert conversations.verify(path) == []
    assert [(d.file, d.line) for d in conversations.verify(path)] == [("log-000001.jsonl", 6)]


@pytest.mark.skipif(os.environ.get("DS4_CORE") != "test", reason="needs the test build: DS4_CORE=test")
def test_every_damaged_byte_of_a_snapshot_is_found(tmp_path):
    """The checks without an engine and the engine's own agree on which files are whole."""
    path = tmp_path / "s"
    with open_engine() as engine:
        with make(engine, 200) as s:
            s.save(path)
        data = path.read_bytes()
        assert snapshot_check.fault(path) is None
        places = [*range(0, 24), *range(24, len(data), len(data) // 60), len(data) - 1]
        cases = [data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :] for at in places]
        cases += [data[:n] for n in (0, 1, 8, 135, 136, 200, len(data) // 2, len(data) - 1)] + [data + b"\0"]
        cases += [b"x" * 1000, data[:128] + b"\xff" * 8 + data[136:], data[:16] + b"\xff" * 4 + data[20:]]
        for case in cases:
            path.write_bytes(case)
            assert snapshot_check.fault(path), case[:200]
            with pytest.raises(Exception, match=str(path)):
                engine.load(path)
    path.unlink()
    assert snapshot_check.fault(path) == "cannot be read (No such file or directory)"
    os.mkfifo(path)
    assert snapshot_check.fault(path) == "cannot be read (it is not a regular file)"


# ---- spill ---------------------------------------------------------------------------------------------------------


def test_spill_show_is_lossless(capsys, monkeypatch):
    path = make_one(f"question {HOSTILE}\n\n second \u2028 line\n")
    code, out, err = run(capsys, "spill", "show", path.name, "1")
    assert code == 0 and err == ""
    assert out == (
        f"#1 user, 2 tokens\nquestion {HOSTILE}\n\n second \u2028 line\n\n\n"
        "#2 assistant, 2 tokens\n(thinking) let me see\nfirst\n"
        '[call call-1] read {"path": "\\u001b[2J"}\n\n'
    )
    code, out, _ = run(capsys, "spill", "show", path.name, "000001", "--json")
    lines = events(out)
    nodes = [from_json({key: value for key, value in line.items() if key != "type"}) for line in lines]
    with Store.open(path) as store:
        t = Transcript(store)
        assert nodes == t.history()[:2] and [line["ids"] for line in lines] == [list(n.ids) for n in nodes]
    [file] = (path / "spill").glob("*/*")
    assert run(capsys, "spill", "show", path.name, str(file), "--json")[1] == out
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["spill", "show", path.name, "1"]) == 0
    assert (
        "question \\x1b]0;title\\x07\\x1b[31mred\\x0d\\x08\\x9b1m" in terminal.getvalue()
        and "\x1b" not in terminal.getvalue()
    )


def test_spill_show_what_is_not_there(capsys, tmp_path):
    path = make_one()
    for number, message in (
        ("2", "spill 2 does not exist; there are 1 to 1"),
        ("../../lock", "names no spill of this conversation"),
        (str(tmp_path / "session-000000000000" / "000001.jsonl"), "names no spill of this conversation"),
    ):
        code, out, err = run(capsys, "spill", "show", path.name, number)
        assert (code, out) == (1, "") and message in err
    assert run(capsys, "spill", "show", "../conversations", "1")[0] == 1


def test_spill_show_of_a_damaged_file(capsys):
    path = make_one()
    [file] = (path / "spill").glob("*/*")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2]) + lines[2][:30])
    code, out, err = run(capsys, "spill", "show", path.name, "1")
    assert (
        code == 1
        and out == "#1 user, 2 tokens\none\n\n"
        and err == f"ds4: {path.name}: 000001.jsonl, line 3: cut before its end.\n"
    )


def test_spill_of_a_fork(capsys):
    path = make_one()
    with Store.open(path) as store:
        t = Transcript(store)
        child = t.fork(conversations.new_path().parent / "child")
        locator = store.spill.folder / "000001.jsonl"
        child.store.close()
    assert run(capsys, "spill", "show", "child", locator) == run(capsys, "spill", "show", path.name, locator)
    assert texts([from_json(n) for n in conversations.read(child.store.path).spill.read(str(locator))]) == [
        "one",
        "first",
    ]


def test_usage(capsys):
    for args, message in (
        (["sessions"], "the following arguments are required: COMMAND"),
        (["sessions", "fly"], "invalid choice: 'fly'"),
        (["sessions", "show"], "the following arguments are required: conversation"),
        (["sessions", "delete"], "the following arguments are required: conversation"),
        (["spill", "show", "x"], "the following arguments are required: number"),
    ):
        code, out, err = run(capsys, *args)
        assert code == 2 and out == "" and message in err and err.startswith("ds4: ")
