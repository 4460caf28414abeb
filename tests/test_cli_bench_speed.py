"""`ds4 bench` without WHAT: the speed suite, on tiny models of random weights. What it says of time is not tested, what
it compares, counts and prints is."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import fake_peer
import numpy as np
import pytest
from oracle import DATA
from scenes import small_chat_model

import ds4
from ds4 import cli
from ds4.cli import bench_models, bench_report, bench_suite, bench_tests, bench_work, roofs
from ds4.cli.bench_peer import Peer
from ds4.cli.options import UsageError
from ds4.cli.output import Output
from ds4.engine import Engine, Session
from ds4.errors import SystemResourceError

EVERY = [
    "pp16", "tg4", "batch8 tg16", "python/eval", "python/generate", "pp16 @ d70", "tg4 @ d70", "truncate @ d70", "fork @ d70",
    "first eval after fork @ d70", "mark+rollback @ d70", "save @ d70", "load @ d70", "resync 25% @ d70",
    "resync 50% @ d70", "resync 90% @ d70", "batch8 tg16 @ d70", "python/eval @ d70", "python/generate @ d70",
]  # fmt: skip


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Less memory to read, few runs of the short tests, temporary files in a folder of the test."""
    monkeypatch.setattr(roofs, "READ", 1 << 26)
    monkeypatch.setattr(bench_suite, "SEVERAL", 3)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bench_models.write(tmp_path_factory.mktemp("bench"), "tiny:q4_0", lambda done, total: None)


def bench(model: Path | str, *more: str) -> int:
    return cli.main(["bench", "-m", str(model), "-p", "16", "-n", "4", "-d", "0,70", "-r", "2", "-t", "1", *more])


def test_a_note_says_that_others_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofs, "usable_cpus", lambda: 4)
    assert roofs.busy(2.0) == []
    (note,) = roofs.busy(2.1)
    assert "load 2.1 on 4 CPUs" in note


def events_of(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# ---- forms


def test_every_test_once(capsys, quick, model):
    assert bench(model, "--json") == 0
    events = events_of(capsys)
    (where,) = (event for event in events if event["type"] == "machine")
    assert where["threads"] == 1 and where["isa"] and where["read"] > 1e8 and where["kv_dtype"] == "f16"
    figures = {event["test"]: event for event in events if event["type"] == "figure"}
    assert list(figures) == EVERY
    for figure in figures.values():
        assert figure["bit_exact"] and figure["engine"] == "ds4" and figure["ratio"] is None
        assert 0 < figure["least"] <= figure["seconds"] <= figure["most"]
        evaluates = figure["tokens"] > 0
        assert evaluates == (figure["tokens_per_second"] is not None)
        if evaluates:
            assert figure["tokens_per_second"] == pytest.approx(figure["tokens"] / figure["seconds"])
            assert figure["of_roofline"] > 0
    assert [figures[name]["tokens"] for name in EVERY[:5]] == [16, 4, 128, 0, 0]
    assert figures["truncate @ d70"]["detail"] == "to 35" and figures["truncate @ d70"]["runs"] == 3
    assert figures["resync 25% @ d70"]["detail"] == "evaluated 53, reused 17"
    assert figures["resync 90% @ d70"]["tokens"] == 7
    assert figures["save @ d70"]["of_roofline"] > 0 < figures["load @ d70"]["of_roofline"]
    assert "x one session" in figures["batch8 tg16 @ d70"]["detail"]
    assert not list(quick.iterdir())


def test_a_table_csv_and_json(capsys, quick, model):
    few = ("--tests", "tg,truncate")
    assert bench(model, *few) == 0
    out, notes = capsys.readouterr()
    first, _, name, _, *rows = out.splitlines()
    assert "1 threads" in first and "/s" in first and name == str(model)
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["tg4", "tg4 @ d70", "truncate @ d70"]
    assert len({len(row) for row in rows}) == 1 and "t/s" in rows[2] and "to 35" in rows[4]
    assert "fresh prefill in other chunks" in notes
    assert bench(model, *few, "--output", "csv") == 0
    found = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["test"] for row in found] == ["tg4", "tg4 @ d70", "truncate @ d70"] and found[0]["tokens"] == "4"
    assert bench(model, *few, "--output", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["threads"] == 1 and [figure["depth"] for figure in found["figures"]] == [0, 70, 70]


def test_a_model_with_windows(capsys, quick):
    assert (
        cli.main(
            ["bench", "-m", str(DATA / "gemma3"), "-p", "8", "-n", "2", "-d", "60", "-r", "1", "-t", "1", "--json"]
        )
        == 0
    )
    assert len([event for event in events_of(capsys) if event["type"] == "figure"]) == 14


def test_rows_of_q8_0(capsys, quick, model):
    assert bench(model, "--kv-dtype", "q8_0", "--tests", "pp,tg,save,load", "--json") == 0
    events = events_of(capsys)
    assert next(event["kv_dtype"] for event in events if event["type"] == "machine") == "q8_0"


def test_several_models(capsys, quick, model, tmp_path):
    other = small_chat_model(tmp_path / "chat")
    assert bench(model, "-m", str(other), "--tests", "pp", "--json") == 0
    figures = [event for event in events_of(capsys) if event["type"] == "figure"]
    assert [figure["model"] for figure in figures] == [str(model)] * 2 + [str(other)] * 2


def test_a_plot(capsys, quick, model, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra `bench`)")
    path = tmp_path / "speed.png"
    assert bench(model, "--tests", "pp,tg", "--plot", str(path)) == 0
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 10000
    assert cli.main(["bench", "--plot", str(tmp_path / "speed.exe")]) == 2
    assert cli.main(["bench", "--plot", str(tmp_path / "nowhere" / "speed.png")]) == 2
    assert capsys.readouterr().err.count("in a folder that is there") == 2


def test_a_plot_without_matplotlib(capsys, quick, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "--plot", str(tmp_path / "speed.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


# ---- verified before it is timed


def off_by_one(session: Session) -> Session:
    """The last token is another: what a truncate, a fork or a snapshot leaves that is wrong in one row."""
    if session.pos:
        position = session.pos - 1
        last = session.tokens[position]
        session.truncate(position)
        RIGHT[Session, "eval"](session, [last ^ 1])
    return session


RIGHT: dict[tuple[type, str], Callable] = {
    (cls, name): vars(cls)[name]
    for cls, names in ((Session, ("eval", "truncate", "fork", "rollback", "save", "sync")), (Engine, ("load", "eval_batch")))
    for name in names
}  # fmt: skip


def wrong_eval(session: Session, tokens, **options):
    """Chunks of the default size lose their last bit; those of the fresh prefill do not."""
    right = RIGHT[Session, "eval"]
    if len(tokens) == 16 and "chunk" not in options:
        tokens = [*tokens[:-1], tokens[-1] ^ 1]
    return right(session, tokens, **options)


def wrong_decode(session: Session, tokens, **options):
    right = RIGHT[Session, "eval"]
    return right(session, [tokens[0] ^ 1] if len(tokens) == 1 else tokens, **options)


def wrong_batch(engine: Engine, segments, **options):
    """Two sessions get each other's tokens."""
    (a, x), (b, y), *rest = segments
    return RIGHT[Engine, "eval_batch"](engine, [(a, y), (b, x), *rest], **options)


def wrong_rollback(session: Session, mark) -> None:
    RIGHT[Session, "rollback"](session, mark)
    off_by_one(session)


def wrong_truncate(session: Session, pos: int) -> None:
    RIGHT[Session, "truncate"](session, pos)
    if pos:
        held = session.tokens
        RIGHT[Session, "truncate"](session, pos - 1)
        RIGHT[Session, "eval"](session, [held[-1] ^ 1])


def wrong_sync(session: Session, tokens, **options):
    done = RIGHT[Session, "sync"](session, tokens, **options)
    off_by_one(session)
    return done


WRONG = [
    ("pp", Session, "eval", wrong_eval, "pp16"),
    ("tg", Session, "eval", wrong_decode, "tg4"),
    ("truncate", Session, "truncate", wrong_truncate, "truncate"),
    ("fork", Session, "fork", lambda s, pos=None: off_by_one(RIGHT[Session, "fork"](s, pos)), "fork"),
    ("mark+rollback", Session, "rollback", wrong_rollback, "mark+rollback"),
    ("load", Engine, "load", lambda e, path: off_by_one(RIGHT[Engine, "load"](e, path)), "load"),
    ("save", Session, "save", lambda s, path: RIGHT[Session, "save"](off_by_one(s), path), "save"),
    ("resync", Session, "sync", wrong_sync, "resync"),
    ("batch", Engine, "eval_batch", wrong_batch, "batch8"),
]


@pytest.mark.parametrize(("test", "cls", "name", "wrong", "said"), WRONG, ids=[case[0] for case in WRONG])
def test_nothing_is_timed_when_an_operation_is_wrong(capsys, quick, model, monkeypatch, test, cls, name, wrong, said):
    monkeypatch.setattr(cls, name, wrong)
    assert bench(model, "--tests", test, "--json") == 1
    events = events_of(capsys)
    assert not [event for event in events if event["type"] == "figure"]
    assert events[-1]["message"].startswith(said) and "no figure is printed" in events[-1]["message"]
    assert not list(quick.iterdir())


def test_nothing_is_printed_when_a_later_run_goes_wrong(capsys, quick, model, monkeypatch):
    """The comparison is not only for the first run."""
    forks = 0

    def fork(session: Session, pos: int | None = None) -> Session:
        nonlocal forks
        forks += 1
        child = RIGHT[Session, "fork"](session, pos)
        return off_by_one(child) if forks == 4 else child

    monkeypatch.setattr(Session, "fork", fork)
    assert bench(model, "--tests", "fork") == 1
    out, err = capsys.readouterr()
    assert not out and "fork @ d70" in err and "no figure is printed" in err


@pytest.mark.parametrize("kind", ["kernel", "write"])
def test_a_failure_of_the_core_ends_it(capsys, quick, model, monkeypatch, kind):
    if not ds4.core.lib.ds4_test_build():
        pytest.skip("needs the test build of the core: DS4_CORE=test")
    prepare = bench_tests.Timeline.prepare

    def and_then_it_fails(timeline, positions) -> None:
        prepare(timeline, positions)
        timeline.engine.fault(kind, 1)

    monkeypatch.setattr(bench_tests.Timeline, "prepare", and_then_it_fails)
    assert bench(model, "--tests", "save", "--json") == 1
    events = events_of(capsys)
    assert not [event for event in events if event["type"] == "figure"] and events[-1]["type"] == "error"


# ---- peers


def test_a_missing_package_is_named(capsys, monkeypatch):
    for name, module, package in (
        ("llama.cpp", "llama_cpp", "llama-cpp-python"),
        ("ik_llama.cpp", "ik_llama_cpp", "ik-llama-cpp-python"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        assert cli.main(["bench", "-m", str(DATA / "llama"), "--vs", name]) == 1
        assert f"pip install {package}" in capsys.readouterr().err


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    return lambda **options: fake_peer.install(folder, **options)


def test_both_do_the_same_work_in_turn(capsys, quick, model, fake, monkeypatch):
    log = fake()
    ours = bench_tests.Decode.work

    def noted(test) -> None:
        with log.open("a") as file:
            file.write(f"ds4 at {test.depth}\n")
        ours(test)

    monkeypatch.setattr(bench_tests.Decode, "work", noted)
    assert bench(model, "--tests", "tg,truncate", "--vs", "llama.cpp", "--json") == 0
    events = events_of(capsys)
    assert next(event["peers"] for event in events if event["type"] == "machine") == {"llama.cpp": "0.0"}
    figures = [event for event in events if event["type"] == "figure"]
    assert [(figure["test"], figure["engine"]) for figure in figures] == [
        ("tg4", "ds4"), ("tg4", "llama.cpp"), ("tg4 @ d70", "ds4"), ("tg4 @ d70", "llama.cpp"),
        ("truncate @ d70", "ds4"), ("truncate @ d70", "llama.cpp"),
    ]  # fmt: skip
    for mine, theirs in zip(figures[::2], figures[1::2], strict=True):
        assert theirs["ratio"] == pytest.approx(theirs["seconds"] / mine["seconds"])
        assert theirs["bit_exact"] is None and theirs["detail"].startswith(("flash attention", "no flash attention"))
    calls = log.read_text().splitlines()
    contexts = [call for call in calls if call.startswith("context")]
    assert contexts == [f"context flash={flash} threads=1 ctx=256 rows=1" for flash in (1, 0)]
    tokens = np.random.default_rng(bench_tests._SEED).integers(0, 512, 74 + bench_tests.MARGIN, dtype=np.int32)
    assert f"decode 1 at 0 in 1 first={tokens[0]}" in calls and f"decode 1 at 73 in 1 first={tokens[73]}" in calls
    assert [call for call in calls if call.startswith("truncate to 35")]
    # A B A B: between two of ours there are four tokens of the peer, in both timed rounds
    turns = [call for call in calls if call.startswith("ds4 at 0") or " at 3 in" in call][-4:]
    assert [turn.startswith("ds4") for turn in turns] == [True, False, True, False]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_peer_sleeps_while_it_is_not_its_turn(quick, fake):
    fake()
    with Peer("llama.cpp") as peer:
        peer.open(Path("model"), [1, 2, 3], 1, 64, "f16")
        stat = Path(f"/proc/{peer._process.pid}/stat")
        assert stat.read_text().rpartition(")")[2].split()[0] == "T"
        assert peer.run("tg", 2, 1, 0)[1] == 0
        assert stat.read_text().rpartition(")")[2].split()[0] == "T"
    assert not stat.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"status": 3}, "llama.cpp: llama_decode has ended with 3"),
        ({"context": "None"}, "llama.cpp: it makes no context"),
        ({"begin": "raise RuntimeError('no such processor')"}, "llama.cpp: no such processor"),
        ({"begin": "os.write(2, b'out of memory') and os._exit(9)"}, "llama.cpp has ended by itself: out of memory"),
    ],
)
def test_a_peer_that_fails(capsys, quick, model, fake, options, message):
    fake(**options)
    assert bench(model, "--tests", "tg", "--vs", "llama.cpp") == 1
    assert message in capsys.readouterr().err
    assert not list(quick.iterdir())


def test_a_peer_that_cannot_truncate_is_measured_all_the_same(capsys, quick, model, fake):
    fake(removes="begin == 0")
    assert bench(model, "--tests", "tg,truncate", "--vs", "llama.cpp", "--output", "csv") == 0
    out, notes = capsys.readouterr()
    rows = [(row["test"], row["engine"]) for row in csv.DictReader(io.StringIO(out))]
    assert ("tg4 @ d70", "llama.cpp") in rows and ("truncate @ d70", "llama.cpp") not in rows
    assert "truncate @ d70: llama.cpp: it does not go back from 70 to 35" in notes


def test_a_setting_that_the_peer_refuses_is_left_out(quick, fake):
    fake(context="options.flash_attn_type or None")
    with Peer("llama.cpp") as peer:
        peer.open(Path("model"), [1, 2, 3], 1, 64, "q8_0")
        assert peer.settings == ["flash attention"]


@pytest.mark.parametrize("name", ["llama.cpp", "ik_llama.cpp"])
@pytest.mark.parametrize("format", ["q8_0", "q4_k"])
def test_a_real_peer_reads_the_same_file(tmp_path, name, format):
    if importlib.util.find_spec({"llama.cpp": "llama_cpp", "ik_llama.cpp": "ik_llama_cpp"}[name]) is None:
        pytest.skip(f"{name}'s Python package is not installed (extra `bench`)")
    path = bench_models.write(tmp_path, f"tiny:{format}", lambda done, total: None)
    tokens = np.random.default_rng(1).integers(0, 512, 40).tolist()
    with Engine(path, threads=1) as engine, engine.session() as session, Peer(name) as peer:
        session.eval(tokens[:32])
        top = int(session.logits.argmax())
        session.eval(tokens[32:])
        peer.open(path, tokens, 1, 64, "f16")
        for setting in range(len(peer.settings)):
            assert peer.run("pp", 32, 0, setting)[1] == top
            assert peer.run("tg", 8, 32, setting)[1] == int(session.logits.argmax())
            assert peer.run("truncate", 16, 40, setting)[0] > 0
            assert peer.run("tg", 8, 32, setting)[1] == int(session.logits.argmax())


def test_what_peers_cannot_read(capsys, quick, model, fake, tmp_path):
    fake()
    assert cli.main(["bench", "-m", str(small_chat_model(tmp_path / "chat")), "--vs", "llama.cpp"]) == 2
    assert cli.main(["bench", "-m", str(model), "--vs", "llama.cpp", "--kv-dtype", "fp8"]) == 2
    err = capsys.readouterr().err
    assert "on one GGUF file" in err and "fp8 is DeepSeek V4's" in err


# ---- models of random weights


@pytest.mark.parametrize("name", sorted(bench_models.FILL))
def test_a_random_model_has_the_size_of_its_products(tmp_path, name):
    gguf = pytest.importorskip("gguf", reason="needs the gguf library (extra `test`)")
    seen: list[tuple[int, int]] = []
    path = bench_models.write(tmp_path, f"tiny:{name.lower()}", lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] < path.stat().st_size
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert len(tensors) == 2 + 2 * 9
    down = tensors["blk.1.ffn_down.weight"]
    values = gguf.dequantize(down.data, down.tensor_type)
    assert values.shape == (256, 512) and values.std() * 512**0.5 == pytest.approx(1, rel=0.1)
    assert abs(values.mean()) < values.std() / 5
    with Engine(path, threads=1, pool_tokens=4096) as engine, engine.session() as session:
        logits = session.eval(list(range(100)), logits="all")
        assert engine.tokenizer is not None and engine.tokenizer.encode("ab") == [97, 98]
        assert np.isfinite(logits).all() and 0.1 < logits.std() < 10


def test_the_same_bytes_every_time(tmp_path):
    one, two = tmp_path / "1", tmp_path / "2"
    for folder in (one, two):
        folder.mkdir()
    files = [bench_models.write(folder, "tiny:q4_k", lambda done, total: None).read_bytes() for folder in (one, two)]
    assert files[0] == files[1]


def test_1b_is_as_wide_as_llama_3_2_1b():
    shape, format = bench_models.parse("1b:q4_k")
    entries = bench_models._entries(shape, format)
    weights = sum(np.prod(entry.shape) for entry in entries)
    assert weights - 32768 * 2048 == pytest.approx(973_144_064, rel=1e-3)  # Llama 3.2 1B without its embedding
    assert sum(entry.bytes for entry in entries) == pytest.approx(weights * 144 / 256, rel=1e-3)


def test_no_room_for_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_models.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1 << 20}))
    with pytest.raises(SystemResourceError, match="1048576 are free"):
        bench_models.write(tmp_path, "tiny:q4_0", lambda done, total: None)
    assert not list(tmp_path.iterdir())


def test_synthetic_models_in_the_suite(capsys, quick):
    args = [
        "bench",
        "-r",
        "1",
        "-d",
        "8",
        "--synthetic",
        "tiny:q4_0",
        "-p",
        "8",
        "--synthetic",
        "tiny:q8_0",
        "--tests",
        "pp",
    ]
    assert cli.main([*args, "--output", "json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert [(figure["model"], figure["test"]) for figure in figures] == [
        ("tiny:q4_0", "pp8 @ d8"), ("tiny:q8_0", "pp8 @ d8")
    ]  # fmt: skip
    assert not list(quick.iterdir())
    for text in ("1b", "9b:q4_0", "1b:q5_9"):
        with pytest.raises(UsageError, match="1b:q4_k"):
            bench_models.parse(text)


# ---- the roofline


def test_bytes_and_multiply_adds_of_a_token(model):
    shape = bench_models.SHAPES["tiny"]
    matrices = sum(np.prod(e.shape) for e in bench_models._entries(shape, "Q4_0") if len(e.shape) == 2)
    layers = matrices - shape.vocab * shape.dim
    with Engine(model, threads=1, pool_tokens=4096) as engine:
        size, macs = bench_work.work_of(engine, 99, 1)
        row = 2 * 2 * 2 * 64 * 2  # K and V, 2 layers, 2 heads of 64, f16
        norms = 5 * 256 * 4
        assert size == matrices * 18 / 32 + norms + 100 * row
        assert macs == matrices + 2 * 2 * 256 * 100
        batch = bench_work.work_of(engine, 99, 1, sessions=8)
        assert batch == (size + 7 * 100 * row, 8 * macs)
        prefill = bench_work.work_of(engine, 0, 10)
        assert prefill[1] == 10 * layers + shape.vocab * shape.dim + 2 * 2 * 256 * 55
    assert bench_work.keys(0, 10, 4) == 1 + 2 + 3 + 4 * 7 and bench_work.keys(7, 3, None) == 8 + 9 + 10


def test_python_costs_little_and_is_counted(quick, model):
    """The clock sees the core's part: what is left for Python is less than the whole."""
    with Engine(model, threads=1, pool_tokens=4096) as engine:
        with bench_tests.Timeline(engine, 64, Output(quiet=True)) as timeline:
            tests = [bench_tests.Overhead(timeline, 0), bench_tests.Generation(timeline, 0)]
            seconds = [test.run() for test in tests]
            assert timeline._fresh and tests[1].logits not in timeline._fresh.values()  # it has tokens of its own
        with engine.session() as session, bench_tests.core_clock() as clock:
            session.eval([1, 2, 3])
            first = clock.seconds
            session.truncate(1)
            assert clock.seconds == first > 0
        with engine.session() as session:
            session.eval([1])
            assert clock.seconds == first
    assert min(seconds) > 0 and tests[0].detail.endswith("inside the core")


# ---- usage


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["bench", "nothing"], "invalid choice: 'nothing'"),
        (["bench", "-p", "0"], "0 is not between 1"),
        (["bench", "-d", "x"], "'x' is not a whole number"),
        (["bench", "--tests", "pp,speed"], "there is no test 'speed'"),
        (["bench", "--vs", "vllm"], "invalid choice: 'vllm'"),
        (["bench", "--synthetic", "9b:q4_0"], "--synthetic takes SHAPE:FORMAT such as 1b:q4_k"),
        (["bench", "--synthetic", "tiny:q4_0", "--nothing"], "--nothing"),
        (["bench", "-d", "0", "--tests", "fork"], "fork needs a context to work on"),
        (["bench", "-m", str(DATA / "llama"), "-d", "999999"], "a smaller -d, -p or -n needs less"),
    ],
)
def test_wrong_usage(capsys, quick, args, message):
    assert cli.main(args) == 2
    assert message in capsys.readouterr().err


def test_an_interrupt_leaves_nothing(capsys, quick, model, monkeypatch):
    def interrupted(test) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_tests.Decode, "work", interrupted)
    assert bench(model, "--tests", "tg") == 130
    assert not list(quick.iterdir()) and not capsys.readouterr().out


def test_a_report_of_two_engines():
    mine = bench_suite.Figure(
        "m", "ds4", "tg128", "tg", 128, 0, 128, 5, 0.5, 0.4, 0.64, 256.0, 1e9, 1e9, 0.83, None, "", True
    )  # fmt: skip
    theirs = bench_suite.Figure(
        "m", "llama.cpp", "tg128", "tg", 128, 0, 128, 5, 1.0, 0.9, 1.28, 128.0, 5e8, 5e8, 0.4, 2.0, "", None
    )  # fmt: skip
    moved = bench_suite.Figure(
        "m", "ds4", "fork @ d64", "fork", 0, 64, 0, 5, 3e-6, 2e-6, 4e-6, None, None, None, None, None, "", True
    )  # fmt: skip
    table = bench_report.table([mine, theirs, moved], "m")
    assert table[0] == ["test", "what", "ds4", "min .. max", "of roofline", "llama.cpp", "ds4 / llama.cpp"]
    assert table[1] == ["tg128", "", "256 t/s", "200 .. 320", "83%", "128 t/s", "2.00"]
    assert table[2] == ["fork @ d64", "", "3 us", "2 us .. 4 us", "", "", ""]
