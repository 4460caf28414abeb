"""Chat: whatever happens to a turn, the session holds exactly the ids of the conversation, with the bits of a fresh
prefill."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oracle import DATA, NEEDS_TEST_BUILD, TEST_BUILD, assert_same, settled
from tiny_tokenizer import CHATML, DEEPSEEK, QWEN, tokenizer_json

import ds4
from ds4 import chat_formats
from ds4.agent.chat import Chat
from ds4.chat_formats import Message
from ds4.cli.output import Output
from ds4.cli.talk import talk
from ds4.errors import ArgumentError, ContextFull, UnsupportedError
from ds4.events import Prefill, Text, Thinking, TurnEnd
from ds4.sampling import Sampling

GEMMA = ["<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
SYSTEM, HELLO, MORE = "Be brief, and kind.", "hello the 123", "And then?"


def checkpoint(folder: Path, control: list[str], user: list[str], **config: Any) -> Path:
    """The tiny Llama with a tokenizer of bytes."""
    shutil.copytree(DATA / "llama", folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(control, user)))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Iterator[dict[str, ds4.Engine]]:
    """By name: ChatML, the same with a window, and Gemma's format, which has no system role."""
    folder = tmp_path_factory.mktemp("chat")
    chatml = checkpoint(folder / "chatml", CHATML, QWEN)
    gemma = checkpoint(folder / "gemma", GEMMA, [], bos_token="<bos>", eos_token="<eos>", add_bos_token=True)
    made = {"chatml": ds4.Engine(chatml, threads=1, pool_tokens=16384),
            "gemma": ds4.Engine(gemma, threads=1, pool_tokens=16384)}  # fmt: skip
    if TEST_BUILD:
        made["window"] = ds4.Engine(chatml, threads=1, pool_tokens=16384, test_options={"toy_window": 24})
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(params=["chatml", "window", "gemma"])
def engine(request, engines) -> Iterator[ds4.Engine]:
    """After the test nothing is left in the pool."""
    if request.param not in engines:
        pytest.skip(NEEDS_TEST_BUILD)
    engine = engines[request.param]
    start = settled(engine.ledger())
    yield engine
    for session in list(engine._sessions):
        session.close()
    assert settled(engine.ledger()) == start


def start(engine: ds4.Engine, **options: Any) -> Chat:
    name = "gemma" if "<start_of_turn>" in engine.tokenizer.control else "chatml"
    options = {
        "chat_format": name,
        "system": SYSTEM,
        "ctx": 1024,
        "max_tokens": 12,
        "sampling": plain(engine),
        "policy": None,
        **options,
    }
    return Chat(engine, **options)


def plain(engine: ds4.Engine, **options: Any) -> Sampling:
    """Greedy, and no control tokens: random weights would write some."""
    return Sampling(logit_bias=dict.fromkeys(engine.tokenizer.control.values(), -math.inf), **options)


def question(chat: Chat, text: str, first: bool = True, after: str = "assistant") -> list[int]:
    """The ids of a question and of what follows until the answer begins, from the format alone."""
    ids: list[int] = []
    if first:
        ids += chat.format.begin()
        after = "system"
        if "system" in chat.format.roles:
            ids += chat.format.render(Message("system", SYSTEM))
        else:
            text = f"{SYSTEM}\n\n{text}"
    return ids + chat.format.render(Message("user", text), after) + chat.format.generation_prefix()


def answer(chat: Chat, before: list[int]) -> list[int]:
    """What the session holds behind these ids, which must be its head."""
    held = chat.session.tokens
    assert held[: len(before)] == before
    assert_same(chat.session, held)
    return held[len(before) :]


# ---- whole turns ----


def test_a_turn_is_its_ids_and_its_events(engine):
    with start(engine) as chat:
        events = list(chat.send(HELLO))
        prompt = question(chat, HELLO)
        said = answer(chat, prompt)
        assert len(said) == 12
        kinds = [type(event) for event in events]
        assert kinds[0] is Prefill and kinds[-1] is TurnEnd and set(kinds) <= {Prefill, Text, TurnEnd}
        assert "".join(event.text for event in events if isinstance(event, Text)) == engine.tokenizer.decode(said)
        end = events[-1]
        assert (end.finish, end.prompt_tokens, end.reused, end.generated) == ("length", len(prompt), 0, 12)
        assert [e.done for e in events if isinstance(e, Prefill)][-1] == len(prompt)


def test_the_second_turn_evaluates_only_what_is_new(engine):
    with start(engine) as chat:
        chat.ask(HELLO)
        before = chat.session.tokens
        *_, end = chat.send(MORE)
        said = before[len(question(chat, HELLO)) :]
        prompt = before + chat.format.end_turn(said) + question(chat, MORE, first=False)
        assert len(answer(chat, prompt)) == end.generated
        assert end.reused == len(before) and end.prompt_tokens == len(prompt)


def test_nothing_happens_until_it_is_read(engine):
    with start(engine) as chat:
        chat.send(HELLO)
        assert chat.session.pos == 0


def test_ask_twice_is_the_same_as_two_chats(engine):
    with start(engine) as one, start(engine) as two:
        assert one.ask(HELLO) == two.ask(HELLO)
        assert one.ask(MORE) == two.ask(MORE)
        assert one.session.tokens == two.session.tokens


def test_a_long_prompt_comes_in_pieces(engine):
    with start(engine) as chat:
        events = list(chat.send("hello the 123 " * 60))
        done = [event.done for event in events if isinstance(event, Prefill)]
        assert len(done) > 2 and done == sorted(done)
        answer(chat, question(chat, "hello the 123 " * 60))


def test_an_end_that_the_model_writes_is_not_written_twice(engine):
    end = engine.tokenizer.control["<end_of_turn>" if "<end_of_turn>" in engine.tokenizer.control else "<|im_end|>"]
    script = [*engine.tokenizer.encode("hi"), end]
    with start(engine, sampling=Sampling(mask=lambda sampled: [script[len(sampled)]])) as chat:
        *_, last = chat.send(HELLO)
        assert last.finish == "stop" and chat.session.tokens == question(chat, HELLO) + script
        chat.ask(HELLO)
        newline = engine.tokenizer.encode("\n")
        expected = question(chat, HELLO) + script + newline + question(chat, HELLO, first=False)
        assert answer(chat, expected) == script


def test_thinking_is_told_from_the_answer(engines):
    tokenizer = engines["chatml"].tokenizer
    inside, outside = tokenizer.encode("hm"), tokenizer.encode("Yes.")
    script = [tokenizer.control["<think>"], *inside, tokenizer.control["</think>"], *outside, 2]
    with start(engines["chatml"], sampling=Sampling(mask=lambda sampled: [script[len(sampled)]])) as chat:
        events = list(chat.send(HELLO))
        assert "".join(e.text for e in events if isinstance(e, Thinking)) == "hm"
        assert "".join(e.text for e in events if isinstance(e, Text)) == "Yes."
        assert chat.session.tokens == question(chat, HELLO) + script


def test_a_format_whose_prefix_opens_the_thinking(tmp_path):
    path = checkpoint(tmp_path / "v4", DEEPSEEK, [], bos_token=DEEPSEEK[0], eos_token=DEEPSEEK[1])
    with ds4.Engine(path, threads=1, pool_tokens=2048) as engine:
        inside, end = engine.tokenizer.encode("hm"), engine.tokenizer.control["</think>"]
        script = [*inside, end, *engine.tokenizer.encode("Yes."), 1]
        sampling = Sampling(mask=lambda sampled: [script[len(sampled)]])
        with start(engine, chat_format="deepseek-v4", sampling=sampling) as chat:
            events = list(chat.send(HELLO))
            assert "".join(e.text for e in events if isinstance(e, Thinking)) == "hm"
            assert "".join(e.text for e in events if isinstance(e, Text)) == "Yes."
            assert chat.session.tokens == question(chat, HELLO) + script
            chat.max_tokens = len(inside)  # cut while it thinks: the block is closed before the next question
            chat.ask(MORE)
            held = chat.session.tokens
            chat.ask(MORE)
            assert answer(chat, held + [end, 1] + question(chat, MORE, first=False)) == inside


# ---- ways back ----


def test_undo_stands_where_the_question_was_asked(engine):
    with start(engine) as chat:
        chat.ask(HELLO)
        held = chat.session.tokens
        first = chat.ask(MORE)
        chat.undo()
        whole = held + chat.format.end_turn(held)
        assert chat.session.tokens == whole[: chat.session.pos]
        assert_same(chat.session, chat.session.tokens)
        assert chat.ask(MORE) == first
        chat.undo()
        chat.undo()
        assert chat.session.pos <= len(question(chat, HELLO))
        chat.ask(HELLO)
        assert chat.session.tokens == held
        assert_same(chat.session, held)


def test_undo_reuses_the_front(engine):
    with start(engine) as chat:
        chat.ask(HELLO)
        kept = len(chat.session.tokens)
        chat.ask(MORE)
        chat.undo()
        *_, end = chat.send("Another one")
        assert end.reused >= kept - (64 if len(engine.streams) > 1 or engine.streams[0].reach else 1)


def test_without_a_turn_there_is_no_way_back(engine):
    with start(engine) as chat:
        with pytest.raises(ArgumentError, match="nothing to undo"):
            chat.undo()
        with pytest.raises(ArgumentError, match="no answer to try again"):
            next(chat.retry())


def test_retry_is_a_function_of_its_seed(engine):
    with start(engine) as chat:
        chat.ask(HELLO)
        answers = []
        for seed in (1, 2, 1):
            list(chat.retry(seed))
            answers.append(answer(chat, question(chat, HELLO)))
        assert answers[0] == answers[2] != answers[1]


def test_retry_answers_only_the_last_question(engine):
    with start(engine) as chat:
        chat.ask(HELLO)
        before = chat.session.tokens
        chat.ask(MORE)
        list(chat.retry(3))
        assert chat.session.tokens[: len(before)] == before
        chat.undo()
        chat.undo()
        with pytest.raises(ArgumentError):
            chat.undo()


def test_a_fork_goes_its_own_way(engine):
    with start(engine) as chat:
        chat.ask(HELLO)
        held = chat.session.tokens
        with chat.fork() as other:
            assert other.session.tokens == held
            chat.ask(MORE)
            other.ask("Another one")
            assert chat.session.tokens != other.session.tokens
            for each in (chat, other):
                assert each.session.tokens[: len(held)] == held
                assert_same(each.session, each.session.tokens)
            other.undo()
            other.undo()
        chat.undo()
        assert chat.ask(MORE)


# ---- turns that are cut ----


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("way", ["cancel", "close"])
def test_a_turn_that_is_cut_stays_as_it_is(engine, way, after):
    with start(engine) as chat:
        prompt, events, last = question(chat, HELLO), chat.send(HELLO), None
        for event in events:
            last = event
            if chat.session.pos - len(prompt) >= after:
                events.close() if way == "close" else chat.session.cancel()
        said = answer(chat, prompt)
        assert after <= len(said) <= after + 3  # the text of some tokens is not a whole character
        if way == "cancel":
            assert last.finish == "cancelled" and last.generated == len(said)
        *_, end = chat.send(MORE)
        assert end.finish == "length" and end.generated == 12
        expected = question(chat, HELLO)
        if said:
            expected += said + chat.format.end_turn(said)
        else:
            expected = expected[: -len(chat.format.generation_prefix())]
            if chat.format.alternating:
                expected += chat.format.render(Message("assistant", "Noted."), "user")
        answer(chat, expected + question(chat, MORE, first=False))


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_cancel_while_a_token_is_chosen_ends_the_turn_behind_it(engine, after):
    def mask(sampled):
        if len(sampled) == after:
            chat.session.cancel()
        return range(20, 100)

    with start(engine, sampling=Sampling(mask=mask)) as chat:
        *_, end = chat.send(HELLO)
        assert (end.finish, end.generated) == ("cancelled", after + 1)
        assert len(answer(chat, question(chat, HELLO))) == after + 1
        chat.sampling = plain(engine)
        assert chat.ask(MORE)
        assert_same(chat.session, chat.session.tokens)


def test_a_cancel_between_the_pieces_of_a_prompt_ends_the_turn(engine):
    with start(engine) as chat:
        for event in chat.send("hello the 123 " * 60):
            if isinstance(event, Prefill):
                chat.session.cancel()
        assert event.finish == "cancelled" and chat.session.pos < len(question(chat, "hello the 123 " * 60))
        assert_same(chat.session, chat.session.tokens)
        list(chat.retry(1))
        assert len(answer(chat, question(chat, "hello the 123 " * 60))) == 12


def test_a_question_without_an_answer_can_be_tried_again_and_undone(engine):
    with start(engine) as chat:
        chat.ask(HELLO)
        before = chat.session.tokens
        for again in (lambda: chat.send(MORE), lambda: chat.retry(1)):
            events = again()
            next(events)
            events.close()
        list(chat.retry(1))
        said = before[len(question(chat, HELLO)) :]
        expected = before + chat.format.end_turn(said) + question(chat, MORE, first=False)
        assert len(answer(chat, expected)) == 12
        chat.undo()
        assert chat.session.tokens == expected[: chat.session.pos]
        assert chat.session.pos <= len(before + chat.format.end_turn(said))


def test_undo_takes_the_filler_with_it(engines):
    with start(engines["gemma"]) as chat:
        chat.ask(HELLO)
        whole = chat.session.tokens
        for _ in range(2):
            events = chat.send(MORE)
            next(events)
            events.close()
        chat.undo()
        chat.undo()
        chat.ask(MORE)
        said = whole[len(question(chat, HELLO)) :]
        answer(chat, whole + chat.format.end_turn(said) + question(chat, MORE, first=False))


def test_ctrl_c_in_the_command_line_ends_the_turn(engine, capsys):
    def pressed(events):
        done = False
        for event in events:
            yield event
            if isinstance(event, Text) and not done:
                done = True
                os.kill(os.getpid(), signal.SIGINT)

    with start(engine) as chat:
        end = talk(Output(quiet=True), pressed(chat.send(HELLO)), chat.session.cancel)
        assert end.finish == "cancelled" and 0 < end.generated < 12
        assert_same(chat.session, chat.session.tokens)
        assert len(answer(chat, question(chat, HELLO))) == end.generated
        assert chat.ask(MORE)


@pytest.mark.parametrize("after", [0, 4])
def test_a_keyboard_interrupt_passes_through_and_leaves_the_chat_usable(engine, after):
    def mask(sampled):
        if len(sampled) == after:
            raise KeyboardInterrupt
        return range(20, 100)

    with start(engine, sampling=Sampling(mask=mask)) as chat:
        with pytest.raises(KeyboardInterrupt):
            chat.ask(HELLO)
        assert len(answer(chat, question(chat, HELLO))) == after
        chat.sampling = plain(engine)
        chat.ask(MORE)
        assert_same(chat.session, chat.session.tokens)


# ---- limits ----


def test_a_message_that_does_not_fit_changes_nothing(engine):
    with start(engine, ctx=160) as chat:
        chat.ask(HELLO)
        held = chat.session.tokens
        with pytest.raises(ContextFull, match="more than ctx 160") as caught:
            chat.ask("hello " * 200)
        assert caught.value.ctx == 160 and caught.value.wanted > 160
        assert chat.session.tokens == held
        assert_same(chat.session, held)
        chat.undo()
        chat.ask(HELLO)
        assert chat.session.tokens == held


def test_an_answer_ends_where_the_context_does(engine):
    with start(engine, ctx=96, max_tokens=None) as chat:
        *_, end = chat.send(HELLO)
        assert end.finish == "length" and chat.session.pos == 96 - chat.closing and chat.live.used <= 96
        with pytest.raises(ContextFull):
            chat.ask(MORE)
        chat.undo()
        assert chat.ask("a")


def test_a_system_prompt_that_does_not_fit(engine):
    with pytest.raises(ContextFull):
        start(engine, ctx=32, system="the " * 100)


def test_a_chat_needs_words_and_a_format(engines, tmp_path):
    with ds4.Engine(DATA / "llama", threads=1, pool_tokens=1024) as bare:
        with pytest.raises(UnsupportedError, match="takes token ids only"):
            Chat(bare)
    with pytest.raises(ArgumentError, match="give chat_format=, one of: chatml, deepseek-v4, gemma, llama3"):
        Chat(engines["chatml"])
    with pytest.raises(UnsupportedError, match="<start_of_turn>"):
        Chat(engines["chatml"], chat_format="gemma")


def test_without_a_system_prompt(engine):
    with start(engine, system=None) as chat:
        chat.ask(HELLO)
        head = chat.format.begin() + chat.format.render(Message("user", HELLO)) + chat.format.generation_prefix()
        assert len(answer(chat, head)) == 12


# ---- the real model ----


@pytest.mark.model
def test_smollm2(smollm2):
    with ds4.Engine(smollm2, threads=2, pool_tokens=4096) as engine:
        with Chat(engine, system="You answer in one word.", max_tokens=8, ctx=2048, sampling=Sampling()) as chat:
            assert chat.format.name == "chatml"
            first = chat.ask("What is the capital of France?")
            assert "Paris" in first
            held = chat.session.tokens
            assert_same(chat.session, held)
            second = chat.ask("And of Italy?")
            chat.undo()
            assert chat.session.tokens == (held + chat.format.end_turn(held))[: chat.session.pos]
            assert chat.ask("And of Italy?") == second
            assert_same(chat.session, chat.session.tokens)
            with chat.fork() as other:
                list(other.retry(7))
                assert_same(other.session, other.session.tokens)


def test_formats_of_the_engines_are_known(engines):
    assert {chat_formats.get(name, engines[name].tokenizer).name for name in ("chatml", "gemma")} == {"chatml", "gemma"}
