"""What prefill, mark, fork, sync, snapshots and truncate cost on one session: `ds4 bench moves`.

No figure is shown before its result was compared, bit for bit, with a session that evaluated the same tokens from
nothing.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ds4.cli.options import with_words
from ds4.cli.output import Output
from ds4.cli.scenario import time_text
from ds4.errors import Ds4Error
from ds4.memory import size_text

if TYPE_CHECKING:
    from ds4.engine import Engine, Session

EDIT = 20  # tokens before the end that the edit changes
STEP = 8  # tokens that a branch goes on with


class Figures:
    """Measures one operation after the other on one session of `n` tokens."""

    def __init__(self, engine: Engine, out: Output, n: int) -> None:
        self.engine, self.out, self.n = engine, out, n
        self.open = ExitStack()
        self.rows: list[list[object]] = []
        self.prefill_seconds = 0.0
        encode = with_words(engine.tokenizer, engine.model).encode
        text = "".join(
            f"Entry {i}: at {i % 24} o'clock sensor {i * 7 % 10} read {i * 37 % 100} degrees.\n" for i in range(n)
        )
        self.tokens = encode(text)[:n]
        other = encode(" Nobody had expected that the next morning would be so quiet and so cold.")
        self.other = [other[:STEP], other[1 : STEP + 1], other[2 : STEP + 2]]

    def __enter__(self) -> Figures:
        return self

    def __exit__(self, *unused: object) -> None:
        self.open.close()

    def session(self) -> Session:
        return self.open.enter_context(self.engine.session(ctx=self.n + 64))

    def measure(self) -> None:
        s, tokens, cut = self.session(), self.tokens, self.n // 2
        with self.out.progress(f"prefill of {self.n} tokens") as report:
            done = s.sync(tokens, progress=report)
        self.prefill_seconds = done.seconds
        self.figure("prefill from nothing", done.seconds, 0, self.n, s, tokens)

        mark, seconds = self.timed(s.mark)
        self.open.callback(mark.release)
        branch = self.other[0]
        s.eval(branch)
        self.check("eval after mark", s, tokens + branch)
        _, back = self.timed(lambda: s.rollback(mark))
        self.figure(f"mark, {STEP} tokens, rollback", seconds + back, self.n, 0, s, tokens)

        child, seconds = self.timed(s.fork)
        self.open.callback(child.close)
        child.eval(self.other[1])
        self.check("the parent of a fork", s, tokens)
        self.figure("fork (the copy goes on)", seconds, self.n, 0, child, tokens + self.other[1])

        edited = tokens[: -EDIT - 1] + self.other[2][:1] + tokens[-EDIT:]
        done = s.sync(edited)
        self.figure(f"sync after an edit {EDIT} tokens back", done.seconds, done.reused, done.evaluated, s, edited)

        self.snapshot(s, edited)

        _, seconds = self.timed(lambda: s.truncate(cut))
        s.eval(self.other[0])
        self.figure(f"truncate to {cut} (then other text)", seconds, cut, 0, s, tokens[:cut] + self.other[0])
        s.check()

    def snapshot(self, s: Session, tokens: Sequence[int]) -> None:
        with tempfile.TemporaryDirectory(prefix="ds4-bench-") as folder:
            path = os.path.join(folder, "context.ds4")
            _, seconds = self.timed(lambda: s.save(path))
            size = size_text(os.path.getsize(path))
            loaded, back = self.timed(lambda: self.engine.load(path))
            self.open.callback(loaded.close)
            self.figure(f"snapshot saved ({size})", seconds, self.n, 0, s, tokens)
            self.figure("snapshot loaded", back, self.n, 0, loaded, tokens)

    @staticmethod
    def timed(do: Callable[[], object]):  # type: ignore[no-untyped-def]
        start = time.perf_counter()
        result = do()
        return result, time.perf_counter() - start

    def check(self, what: str, s: Session, tokens: Sequence[int]) -> None:
        """Compares with a fresh session that evaluated the tokens in other chunks."""
        with self.engine.session(ctx=self.n + 64) as fresh, self.out.progress(f"checking {what}") as report:
            fresh.sync(tokens, progress=report)
            if list(s.tokens) != list(tokens) or s.logits.tobytes() != fresh.logits.tobytes():
                raise Ds4Error(
                    f"{what} differs from a fresh prefill of the same {len(tokens)} tokens: please report this as a bug"
                )

    def figure(self, what: str, seconds: float, reused: int, evaluated: int, s: Session, tokens: Sequence[int]) -> None:
        self.check(what, s, tokens)
        self.out.event("figure", operation=what, seconds=seconds, reused=reused, evaluated=evaluated, bit_exact=True)
        self.rows.append([what, time_text(seconds), reused, evaluated, "same bits"])

    def show(self) -> None:
        self.out.table(
            ["operation", "time", "tokens reused", "evaluated", "vs a fresh prefill"], self.rows, right=[1, 2, 3]
        )
        self.out.line()
        again = time_text(self.prefill_seconds)
        self.out.line(
            f"To evaluate all {self.n} tokens again takes {again} here. What is reused above was not evaluated again."
        )
