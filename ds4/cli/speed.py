"""How near the kernels of DeepSeek V4 come to what the machine can do: `ds4 bench synthetic`.

Nothing is timed before the logits of backend "cpu" were those of "ref", bit for bit. The roofline: the bytes of a pass
at the speed at which memory is read, or its multiply-adds at the speed of numpy's matrix product, whichever takes
longer.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4.cli.roofs import Roofs, busy, measure_roofs, roofs_text
from ds4.cli.scenario import time_text
from ds4.cli.synthetic import Kind, Writer, kinds, kinds_that_fit
from ds4.errors import Ds4Error
from ds4.families.deepseek_v4 import OVERLAP, Sizes, pieces, stored_bytes
from ds4.memory import size_text, usable_cpus
from ds4.plan import make_plan

if TYPE_CHECKING:
    from ds4.cli.output import Output
    from ds4.engine import Engine, Session

PREFILLS = (128, 512)  # no more than the engine computes in one pass
STEPS = 8  # tokens that are decoded one by one; the median counts
COMPARED = {"v4-tiny": 300, "v4-layer": 5}  # tokens whose logits are compared


@dataclass(frozen=True)
class Speed:
    """One figure: `tokens` evaluated behind `depth` others in `seconds`, and what is read and multiplied for them.
    `of_read`: the share of the bandwidth; `of_roofline`: the time that the roofs allow / the time it took."""

    layers: str
    work: str
    depth: int
    tokens: int
    seconds: float
    tokens_per_second: float
    bytes_per_token: float
    macs_per_token: float
    bytes_per_second: float
    macs_per_second: float
    of_read: float
    of_roofline: float
    compared_tokens: int


# ---- the work


def work_of(s: Sizes, depth: int, n: int, kv_dtype: str) -> tuple[float, float]:
    """(bytes read, multiply-adds) of `n` tokens behind `depth` others in one pass. A matrix is read once; of the
    experts those that `n` tokens are expected to choose, if all are as likely. Rows: those of the last token."""
    used = s.n_experts_used / s.n_experts
    chosen = 1 - (1 - used) ** n
    scored = (depth + n) // OVERLAP > s.index_keep
    size = macs = 0.0
    for piece in pieces(s, mtp=False):
        stored, table = stored_bytes(piece)[1], piece.core == "embed" or piece.stored == "I64"
        if piece.core.rpartition(".")[2] in ("index_q", "index_weight") and not scored:
            continue
        size += stored * (min(1.0, n / s.vocab) if table else chosen if piece.expert is not None else 1)
        if len(piece.shape) == 2 and not table and not piece.core.endswith("_ape"):
            times = 1 if piece.core.startswith("head") else n  # only the last token needs the head
            macs += piece.shape[0] * piece.shape[1] * times * (used if piece.expert is not None else 1)
    size += make_plan(s, ctx=depth + n, kv_dtype=kv_dtype).read_rows
    return size, macs + sum(_attention(s, ratio, depth, n) for ratio in s.ratios)


def _attention(s: Sizes, ratio: int, depth: int, n: int) -> float:
    """Multiply-adds of one layer with rows: scores, sums, and the indexer's scores where it has to choose."""
    held = np.arange(depth + 1, depth + n + 1)
    far = held // ratio if ratio else 0 * held
    scored = far[far > s.index_keep].sum() if ratio == OVERLAP else 0
    if ratio == OVERLAP:
        far = np.minimum(far, s.index_keep)
    keys = (np.minimum(held, s.window) + far).sum()
    return float(2 * s.n_heads * s.head_dim * keys + s.index_heads * s.index_dim * scored)


# ---- what is measured


class Bench:
    """Random models, checked and timed one after the other; a context manager that removes their files."""

    def __init__(self, name: str, out: Output, depth: int, repeat: int, threads: int | None, kv_dtype: str) -> None:
        self.name, self.out, self.depth, self.repeat = name, out, depth, repeat
        self.threads, self.kv_dtype = threads or usable_cpus(), kv_dtype
        self.compared, self.load = COMPARED[name], os.getloadavg()[0]
        self._temporary = tempfile.TemporaryDirectory(prefix="ds4-bench-")

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *unused: object) -> None:
        self._temporary.cleanup()

    def measure(self) -> tuple[Roofs, list[Speed]]:
        folder = Path(self._temporary.name)
        self.kinds = kinds_that_fit(self.name, folder)
        s, real = self.kinds[0].sizes, kinds(self.name)[0].sizes.n_experts
        self.out.event("models", name=self.name, layers=[k.label for k in self.kinds], experts=s.n_experts, of=real)
        with self.out.progress("writing random weights", "bytes", phase="weights") as report:
            paths = Writer(folder, self.kinds, report).write()
        roofs = measure_roofs(self.threads, self.out)
        self.out.event("roofs", **asdict(roofs))
        found: list[Speed] = []
        for kind, path in zip(self.kinds, paths, strict=True):
            found += self._kind(kind, path, roofs)
        return roofs, found

    def notes(self, roofs: Roofs) -> list[str]:
        """What the table does not say."""
        s = self.kinds[0].sizes
        real = kinds(self.name)[0].sizes.n_experts
        fewer = "" if s.n_experts == real else f" (of {real}: there is no room for more)"
        layers = "one layer at a time" if len(self.kinds) > 1 else f"{s.n_layers} layers"
        what = f"{self.name}: {layers}, {s.dim} wide, {s.n_experts} experts{fewer}, {s.n_experts_used} for a token"
        return [
            f"{what}, vocabulary {s.vocab}, rows as {self.kv_dtype}, {self.threads} threads, {self.isa}",
            f"compared: the logits of the first {self.compared} tokens of each, cpu and ref, bit for bit",
            roofs_text(roofs),
            "read: weights as stored, of the experts those expected to be chosen, and the rows of the last token",
            *busy(self.load),
        ]

    def _engine(self, path: Path, backend: str) -> Engine:
        from ds4.engine import Engine

        room = max(self.depth, *PREFILLS, self.compared) + 8192
        with self.out.progress(f"loading for {backend}", "bytes", type="load") as report:
            return Engine(
                path, backend=backend, threads=self.threads, kv_dtype=self.kv_dtype, rounding=True, pool_tokens=room,
                progress=report,
            )  # fmt: skip

    def _kind(self, kind: Kind, path: Path, roofs: Roofs) -> list[Speed]:
        longest = max(self.depth + STEPS, *PREFILLS, self.compared)
        tokens = np.random.default_rng(7).integers(0, kind.sizes.vocab, longest, dtype=np.int32)
        with self._engine(path, "ref") as engine:
            wanted = self._logits(engine, tokens, f"{kind.label}: the definition")
        with self._engine(path, "cpu") as engine:
            self.isa = engine.isa
            if self._logits(engine, tokens, f"{kind.label}: comparing") != wanted:
                raise Ds4Error(
                    f"{kind.label}: the logits of backend cpu differ from those of ref: please report this as a bug"
                )
            _touch_experts(engine)
            return self._times(engine, kind, tokens, roofs)

    def _logits(self, engine: Engine, tokens: Any, label: str) -> bytes:
        with engine.session() as session, self.out.progress(label, phase="compare") as report:
            logits = session.eval(tokens[: self.compared], logits="all", progress=report)
        assert logits is not None
        if not np.isfinite(logits).all():
            raise Ds4Error("the random weights give logits that are no numbers")
        return logits.tobytes()

    def _times(self, engine: Engine, kind: Kind, tokens: Any, roofs: Roofs) -> list[Speed]:
        found = []
        with engine.session() as session:
            for n in PREFILLS:
                seconds = [self._prefill(session, tokens[:n], kind) for _ in range(self.repeat)]
                found.append(self._speed(kind, f"prefill of {n}", 0, n, statistics.median(seconds), roofs))
            with self.out.progress(f"{kind.label}: context of {self.depth}", phase="context") as report:
                session.sync(tokens[: self.depth], progress=report)
            seconds = [_timed(session, tokens[i : i + 1]) for i in range(self.depth, self.depth + STEPS)]
        found.append(self._speed(kind, f"decode at {self.depth}", self.depth, 1, statistics.median(seconds), roofs))
        return found

    def _prefill(self, session: Session, tokens: Any, kind: Kind) -> float:
        session.truncate(0)
        with self.out.progress(f"{kind.label}: prefill of {len(tokens)}", phase="prefill") as report:
            return _timed(session, tokens, report)

    def _speed(self, kind: Kind, work: str, depth: int, n: int, seconds: float, roofs: Roofs) -> Speed:
        size, macs = work_of(kind.sizes, depth, n, self.kv_dtype)
        least = max(size / roofs.read, macs / roofs.macs)
        speed = Speed(
            kind.label, work, depth, n, seconds, n / seconds, size / n, macs / n, size / seconds, macs / seconds,
            size / seconds / roofs.read, least / seconds, self.compared,
        )  # fmt: skip
        self.out.event("figure", **asdict(speed), bit_exact=True)
        return speed


def _timed(session: Session, tokens: Any, report: Callable[[int, int], object] | None = None) -> float:
    start = time.perf_counter()
    session.eval(tokens, progress=report)
    return time.perf_counter() - start


def _touch_experts(engine: Engine) -> None:
    """Brings the pages of the mapped file in, so that no figure pays for that."""
    for name, tensor in engine.spec.tensors:
        if ".experts." in name:
            np.frombuffer(tensor.data, np.uint8)[::4096].max()


def table(found: Sequence[Speed]) -> list[list[str]]:
    """For people: a row for each figure."""
    head = ["layer", "work", "time", "tokens/s", "read a token", "GB/s", "of bandwidth", "GMAC/s", "of roofline"]
    rows = [
        [
            speed.layers, speed.work, time_text(speed.seconds), f"{speed.tokens_per_second:.3g}",
            size_text(speed.bytes_per_token), f"{speed.bytes_per_second / 1e9:.3g}", f"{speed.of_read:.0%}",
            f"{speed.macs_per_second / 1e9:.3g}", f"{speed.of_roofline:.0%}",
        ]
        for speed in found
    ]  # fmt: skip
    return [head, *rows]
