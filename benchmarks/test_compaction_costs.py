"""A compaction, one that is interrupted, and one that was prepared in the background, through pytest-benchmark: `make
bench`. Needs SmolLM2 135M, which `ds4 pull smollm2-135m` fetches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

import ds4
from ds4 import models
from ds4.cli.costs import Conversation
from ds4.cli.output import Output
from ds4.cli.scenario import MODEL, write_log

CTX = 2048
ROUNDS = 2


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conversation]:
    """A conversation at its soft trigger. All that is measured was compared bit for bit once."""
    if not models.load(MODEL).present:
        pytest.skip(f"needs the model: ds4 pull {MODEL}")
    folder = tmp_path_factory.mktemp("bench") / "station"
    write_log(folder, CTX)
    with ds4.Engine(MODEL) as engine, Conversation(engine, CTX, Output(quiet=True), folder) as talk:
        assert talk.run().interrupted_evaluated == 0
        yield talk


@pytest.fixture
def copies(talk: Conversation) -> Iterator[Callable[..., ds4.Chat]]:
    """Makes copies of the conversation that are closed at the end."""
    with ExitStack() as opened:

        def make(background: bool = False) -> ds4.Chat:
            copy = opened.enter_context(talk.copy(background))
            copy.background.idle()
            copy.background.wait()
            talk.turn_since(copy)
            return copy

        yield make


def test_pause(benchmark, copies: Callable[..., ds4.Chat]) -> None:
    benchmark.pedantic(lambda chat: list(chat.compact()), setup=lambda: ((copies(),), {}), rounds=ROUNDS)


def test_pause_in_background_mode(benchmark, copies: Callable[..., ds4.Chat]) -> None:
    benchmark.pedantic(lambda chat: list(chat.compact()), setup=lambda: ((copies(True),), {}), rounds=ROUNDS)


def test_way_back_from_the_summary(benchmark, copies: Callable[..., ds4.Chat]) -> None:
    def interrupted() -> tuple[tuple[ds4.Chat, Iterator[ds4.events.Event]], dict[str, object]]:
        chat = copies()
        events = chat.compact()
        assert any(event.type == "summary" for event in events)  # and no further
        return (chat, events), {}

    def back(chat: ds4.Chat, events: Iterator[ds4.events.Event]) -> None:
        chat.cancel()
        assert list(events)[-1].type == "compaction_failed"

    benchmark.pedantic(back, setup=interrupted, rounds=ROUNDS)
