"""ds4_sample and ds4_random against plain numpy, and the options that Sampling accepts."""

import dataclasses
import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.core import ffi, lib
from ds4.errors import ArgumentError, Ds4Error, NonFiniteError
from ds4.sampling import SCRATCH, Sampling, _CoreOptions, sample

INF, NAN = math.inf, math.nan
EINVAL, ENONFINITE = 1, 18
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


# ---- plain versions of what C does ----


def philox(counter, key):
    """Philox4x32-10, straight from the paper."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def random_number(seed, position):
    counter = (position & 0xFFFFFFFF, position >> 32, 0, 0)
    return (philox(counter, (seed & 0xFFFFFFFF, seed >> 32))[0] >> 8) / 2**24


def adjusted(logits, s, history=(), allowed=None):
    x = logits.astype(np.float64)
    if allowed is not None:
        x[[i for i in range(len(x)) if i not in set(allowed)]] = -INF
    for token, bias in s.logit_bias.items():
        x[token] = np.float32(x[token] + np.float32(bias))
    for token in set(history):
        factor = float(np.float32(s.repetition))
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        x[token] -= float(np.float32(s.presence)) + float(np.float32(s.frequency)) * list(history).count(token)
    return x.astype(np.float32)


def kept(x, s):
    """(ids in descending order, their probabilities) after temperature and filters; by sorting everything."""
    order = np.lexsort((np.arange(len(x)), -x))
    order = order[x[order] > -INF]
    p = np.exp((x[order].astype(np.float64) - x[order[0]]) / float(np.float32(s.temperature)))
    if s.top_k:
        p = p[: s.top_k]
    mass = np.cumsum(p)
    p = p[: int(np.searchsorted(mass, float(np.float32(s.top_p)) * mass[-1])) + 1] if s.top_p < 1 else p
    p = p[p >= float(np.float32(s.min_p)) * p[0]]
    return order[: len(p)], p / p.sum()


def expected(logits, s, history=(), position=0, allowed=None):
    x = adjusted(logits, s, history, allowed)
    if s.temperature < 1e-6:
        return int(np.argmax(x))
    ids, p = kept(x, s)
    at = int(np.searchsorted(np.cumsum(p), random_number(s.seed, position), side="right"))
    return int(ids[min(at, len(ids) - 1)])


def normal(n, seed=0, scale=3.0):
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def raw(logits, **options):
    """The C function itself, with nothing checked in Python: (status, index or number, text, id)."""
    o = ffi.new("ds4_sampling *", {"top_p": 1, "repetition": 1, "n_allowed": -1})
    keep = []
    for name, value in options.items():
        if isinstance(value, list):
            value = ffi.new("float[]" if name == "bias" else "int32_t[]", value)
            keep.append(value)
        setattr(o, name, value)
    data = ffi.new("float[]", [float(v) for v in logits])
    out, err = ffi.new("ds4_sampled *", {"id": -7}), ffi.new("ds4_error *")
    status = lib.ds4_sample(data, len(logits), o, out, err)
    return status, err.a, ffi.string(err.text).decode(), out.id


# ---- random numbers ----


def test_philox_known_answers():
    """The three vectors that the Random123 library publishes for philox4x32 with 10 rounds."""
    vectors = [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, out in vectors:
        assert philox(counter, key) == out
    assert lib.ds4_random(0, 0) == (0x6627E8D5 >> 8) / 2**24


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_random_is_philox_of_seed_and_position(seed, position):
    assert lib.ds4_random(seed, position) == random_number(seed, position)


def test_random_uses_all_bits_of_both_arguments():
    seen = {lib.ds4_random(1 << i, 0) for i in range(64)} | {lib.ds4_random(0, 1 << i) for i in range(64)}
    assert len(seen) == 128


def test_random_is_uniform():
    values = np.array([lib.ds4_random(7, i) for i in range(50_000)])
    assert values.min() >= 0 and values.max() < 1
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 85.4  # chi-square, 49 degrees of freedom, p = 0.001


# ---- greedy ----


@pytest.mark.parametrize("temperature", [0, 1e-45, 1e-38, 1e-20, 1e-7])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 255, 256, 257, 5000])
def test_tiny_temperatures_are_greedy(temperature, n):
    for seed in range(5):
        x = normal(n, seed)
        x[np.random.default_rng(seed).integers(0, n, 3)] = x.max()  # ties
        for position in range(4):
            assert sample(x, Sampling(temperature=temperature, seed=seed), (), position)[0] == int(np.argmax(x))


def test_greedy_cases():
    assert sample(np.float32([0.0, -0.0, 0.0]), Sampling())[0] == 0
    assert sample(np.float32([-0.0, 0.0]), Sampling())[0] == 0
    assert sample(np.float32([-INF, -3e38, -INF]), Sampling())[0] == 1
    assert sample(np.float32([3.4e38, -3.4e38, 3.4e38]), Sampling())[0] == 0


@pytest.mark.parametrize("temperature", [0.3, 1.0, 50.0])
def test_top_k_1_and_a_tiny_top_p_are_greedy(temperature):
    for seed in range(50):
        x = normal(300, seed)
        best = int(np.argmax(x))
        assert sample(x, Sampling(temperature=temperature, top_k=1, seed=seed))[0] == best
        assert sample(x, Sampling(temperature=temperature, top_p=1e-6, seed=seed))[0] == best
        assert sample(x, Sampling(temperature=temperature, min_p=0.9999999, seed=seed))[0] == best


# ---- the whole pipeline against the plain version ----

logit = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 1.0, -1.0, 2.5, -INF, 20.0, -80.0]),
    st.floats(-30, 30, width=32),
)


@st.composite
def cases(draw):
    n = draw(st.integers(1, 40))
    x = np.float32([draw(logit) for _ in range(n)])
    x[draw(st.integers(0, n - 1))] = np.float32(draw(st.floats(-5, 5, width=32)))  # at least one is finite
    ids = st.lists(st.integers(0, n - 1), max_size=2 * n)
    finite = [i for i in range(n) if x[i] > -INF]
    allowed = draw(st.none() | ids.map(lambda more: [finite[0], *more]))
    s = Sampling(
        temperature=draw(st.sampled_from([0, 0.05, 0.7, 1, 1.5, 8, 1e30])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 100, INT_MAX])),
        top_p=draw(st.sampled_from([1, 1, 0.999, 0.9, 0.41, 0.01])),
        min_p=draw(st.sampled_from([0, 0, 0.01, 0.3, 0.97])),
        repetition=draw(st.sampled_from([1, 1, 1.1, 1.37, 0.8])),
        presence=draw(st.sampled_from([0, 0, 0.3, -0.3, 2])),
        frequency=draw(st.sampled_from([0, 0, 0.1, -0.1])),
        logit_bias=draw(st.dictionaries(st.integers(0, n - 1), st.floats(-9, 9, width=32), max_size=4)),
        seed=draw(st.integers(0, 2**64 - 1)),
    )
    return x, s, draw(ids), draw(st.integers(0, 2**40)), allowed


@settings(max_examples=600, deadline=None)
@given(cases())
@pytest.mark.slow
def test_equals_the_plain_version(case):
    x, s, history, position, allowed = case
    before = x.copy()
    token, logprob = sample(x, s, history, position, allowed)
    assert token == expected(x, s, history, position, allowed)
    z = x.astype(np.float64) - x.max()
    assert logprob == pytest.approx(z[token] - np.log(np.exp(z).sum()), rel=1e-6, abs=1e-6)
    assert np.array_equal(x, before)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 40},
        {"top_k": 149_999},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.02},
        {"temperature": 1e30},
        {"top_k": 5000, "top_p": 0.95, "min_p": 0.001, "repetition": 1.2, "frequency": 0.1},
    ],
)
def test_large_vocabulary(options):
    n = 150_000
    history = np.random.default_rng(5).integers(0, n, 300).tolist()
    spread, peaked, flat = normal(n, 1), np.float32([30] + [0] * (n - 1)), np.zeros(n, np.float32)
    few = np.round(normal(n, 2))  # some 25 different values, thousands of ties each
    for x in (spread, peaked, flat, few):
        for position in range(3):
            s = Sampling(**{"temperature": 0.9, "seed": 11} | options)
            assert sample(x, s, history, position)[0] == expected(x, s, history, position)


@pytest.mark.parametrize("options", [{}, {"top_k": 40, "repetition": 1.2}, {"temperature": 0, "logit_bias": {3: 2.0}}])
def test_memory_that_the_caller_lends_changes_nothing(options):
    """Dirty memory, too little memory, and none."""
    x, s = normal(5000, 3), Sampling(**{"temperature": 0.9, "seed": 4} | options)
    scratch = np.full(SCRATCH * len(x), 0xAB, np.uint8)
    for position in range(20):
        found = {sample(x, s, [1, 2, 3], position, scratch=lent) for lent in (None, scratch, scratch[:64])}
        assert len(found) == 1


@pytest.mark.parametrize("odd", [lambda x: x[1:], lambda x: x[::2], lambda x: np.frombuffer(bytes(x), np.uint8)])
def test_memory_that_cannot_be_worked_in_is_refused(odd):
    x = normal(64, 3)
    with pytest.raises(ArgumentError, match="scratch is not writable memory"):
        sample(x, Sampling(temperature=1.0, seed=4), scratch=odd(np.zeros(2 * SCRATCH * len(x), np.uint8)))


# ---- distribution ----


@pytest.mark.parametrize(
    "options",
    [{"temperature": 1}, {"temperature": 0.5}, {"temperature": 2.5, "top_k": 5}, {"temperature": 1, "top_p": 0.8},
     {"temperature": 1.3, "min_p": 0.15}],
)  # fmt: skip
def test_frequencies_follow_the_probabilities(options):
    x = np.float32([1.2, -0.5, 0.3, 2.0, -1.1, 0.9, 0.3, -0.2])
    s = Sampling(seed=123456789, **options)
    ids, p = kept(x, s)
    n = 10_000
    counts = np.bincount([sample(x, s, (), i)[0] for i in range(n)], minlength=len(x))
    assert set(np.flatnonzero(counts)) == set(ids.tolist())
    chi2 = ((counts[ids] - n * p) ** 2 / (n * p)).sum()
    assert chi2 < 24.4  # p < 0.001 for 7 degrees of freedom, less for fewer
    by_seed = np.bincount([sample(x, dataclasses.replace(s, seed=i), (), 5)[0] for i in range(n)], minlength=len(x))
    assert ((by_seed[ids] - n * p) ** 2 / (n * p)).sum() < 24.4


@pytest.mark.parametrize(("top_p", "count"), [(0.25, 1), (0.5, 2), (0.50001, 3), (0.75, 3), (0.9, 4)])
def test_top_p_takes_no_more_than_it_needs(top_p, count):
    x = np.zeros(4, np.float32)
    assert {sample(x, Sampling(temperature=1, top_p=top_p, seed=i))[0] for i in range(200)} == set(range(count))
    x = np.float32([40, 30, 20, 10])  # different logits, equal probabilities
    assert {sample(x, Sampling(temperature=1e30, top_p=top_p, seed=i))[0] for i in range(200)} == set(range(count))


def test_a_number_on_the_border_of_two_tokens_takes_the_upper_one():
    n, borders = 2**16, 0
    x = np.zeros(n, np.float32)
    for i in range(1000):
        place = lib.ds4_random(1, i) * n
        borders += place == int(place)
        assert sample(x, Sampling(temperature=1, seed=1), (), i)[0] == int(place)
    assert borders > 0


def test_runs_at_a_high_temperature_differ():
    x = normal(500, 3)
    runs = {tuple(sample(x, Sampling(temperature=1.5, seed=seed), (), i)[0] for i in range(12)) for seed in range(4)}
    assert len(runs) == 4


def test_no_seed_draws_anew():
    x = normal(500, 3)
    assert len({tuple(sample(x, Sampling(temperature=1.5), (), i)[0] for i in range(8)) for _ in range(4)}) == 4


def test_a_seed_is_independent_of_neighbours_and_threads():
    x = normal(2000, 4)
    alone = [sample(x, Sampling(temperature=1.2, seed=1), (), i)[0] for i in range(100)]
    mixed = []
    for i in range(100):
        sample(x, Sampling(temperature=1.2), (), i)
        mixed.append(sample(x, Sampling(temperature=1.2, seed=1), (), i)[0])
        sample(x, Sampling(temperature=1.2, seed=2), (), i)
    assert mixed == alone
    results = {}

    def work(name):
        results[name] = [sample(x, Sampling(temperature=1.2, seed=1), (), i)[0] for i in range(100)]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(results[name] == alone for name in range(4))


# ---- penalties, bias, mask, log-probability ----


def test_penalties_by_hand():
    x = np.float32([4.0, 3.0, -1.0])
    assert sample(x, Sampling(repetition=2), [0])[0] == 1  # 4 / 2 < 3
    assert sample(np.float32([-1.0, -1.5]), Sampling(repetition=2), [0])[0] == 1  # -1 * 2 < -1.5
    assert sample(x, Sampling(presence=1.5), [0, 0, 0])[0] == 1
    assert sample(x, Sampling(presence=0.5), [0, 0, 0])[0] == 0
    assert sample(x, Sampling(frequency=0.4), [0, 0])[0] == 0
    assert sample(x, Sampling(frequency=0.4), [0, 0, 0])[0] == 1
    assert sample(x, Sampling(presence=-9), [2])[0] == 2  # negative ones attract
    assert sample(x, Sampling(logit_bias={0: -2}, repetition=2), [1])[0] == 0  # bias before penalties: 2 against 3 / 2
    assert sample(x, Sampling(presence=9, repeat_last=0), [0])[0] == 0


def test_bias_and_mask():
    x = np.float32([5, 1, 4, -INF, 0])
    assert sample(x, Sampling(logit_bias={0: -INF}))[0] == 2
    assert sample(x, Sampling(logit_bias={1: 100}))[0] == 1
    assert sample(x, Sampling(), allowed=[4, 1, 4])[0] == 1
    assert sample(x, Sampling(), allowed=np.array([4], np.int64))[0] == 4
    assert sample(x, Sampling(), allowed={4, 2})[0] == 2
    assert sample(x, Sampling(), allowed=range(1, 5))[0] == 2
    options = _CoreOptions(Sampling(), None)
    options.set((), 0, [1, 4])
    options.set((), 1, None)
    assert options.struct.n_allowed == -1 and not options.struct.allowed, "those of the token before are gone"
    seen = {sample(x, Sampling(temperature=50, seed=i), allowed=[0, 3, 4])[0] for i in range(200)}
    assert seen == {0, 4}
    huge = np.float32([3e38, 3.2e38, 0])
    assert sample(huge, Sampling(logit_bias={0: 3e38, 2: -3e38}))[0] == 0
    assert sample(huge, Sampling(repetition=1e-38), [1])[0] == 1
    assert sample(huge, Sampling(temperature=1, logit_bias={0: 3e38}, seed=0))[0] == 0


def test_logprob_is_the_models_own():
    x = normal(1000, 6)
    z = x.astype(np.float64) - np.log(np.exp(x.astype(np.float64)).sum())
    for s, allowed in [(Sampling(), None), (Sampling(temperature=3, top_k=9, seed=1), None), (Sampling(), [17]),
                       (Sampling(logit_bias={3: 50}), None)]:  # fmt: skip
        token, logprob = sample(x, s, (), 0, allowed)
        assert logprob == pytest.approx(z[token], abs=1e-6)
    assert sample(np.float32([7]), Sampling()) == (0, 0.0)
    assert sample(np.float32([2e38, 2e38, -2e38]), Sampling())[1] == pytest.approx(-math.log(2))
    assert sample(np.float32([0, -3e38]), Sampling(), allowed=[1])[1] == pytest.approx(-3e38)


# ---- numbers that are none ----


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("value", [NAN, -NAN, INF])
@pytest.mark.parametrize("at", [0, 1, 7, 8, 300, 601])
def test_nan_and_infinity_are_refused_with_the_index(temperature, value, at):
    x = normal(602)
    x[at] = value
    with pytest.raises(NonFiniteError, match=f"logit {at} "):
        sample(x, Sampling(temperature=temperature, seed=1))
    with pytest.raises(NonFiniteError, match=f"logit {at} "):  # also when a mask would hide it
        sample(x, Sampling(temperature=temperature, seed=1), allowed=[2])
    x[:] = -INF
    x[at] = value
    assert raw(x, temperature=temperature)[:2] == (ENONFINITE, at)


@pytest.mark.parametrize("temperature", [0, 1])
def test_nothing_to_choose(temperature):
    s = Sampling(temperature=temperature, seed=1)
    for n in (1, 8, 9):
        with pytest.raises(NonFiniteError):
            sample(np.full(n, -INF, np.float32), s)
    with pytest.raises(NonFiniteError, match="allowed and bias"):
        sample(np.float32([1, -INF]), s, allowed=[1])
    with pytest.raises(NonFiniteError, match="allowed and bias"):
        sample(np.float32([1, 2]), dataclasses.replace(s, logit_bias={0: -INF, 1: -INF}))
    assert sample(np.float32([-INF] * 20 + [3]), s)[0] == 20


# ---- arguments ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": -1e-45}, "temperature is -1.4"),
        ({"temperature": NAN}, "temperature is "),
        ({"temperature": INF}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": INT_MIN}, "top_k is -2147483648"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": -0.5}, "top_p is -0.5"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": NAN}, "top_p is "),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1}, "min_p is 1"),
        ({"min_p": NAN}, "min_p is "),
        ({"repetition": 0}, "repetition is 0"),
        ({"repetition": -2}, "repetition is -2"),
        ({"repetition": INF}, "repetition is inf"),
        ({"repetition": NAN}, "repetition is "),
        ({"presence": NAN}, "presence is "),
        ({"presence": -INF}, "presence is -inf"),
        ({"frequency": INF}, "frequency is inf"),
        ({"n_history": -1}, "history has a count of -1"),
        ({"n_history": INT_MIN}, "history has a count of -2147483648"),
        ({"n_history": 3}, "history is NULL"),
        ({"n_history": 2, "history": [1, 4]}, "history[1] is token 4"),
        ({"n_history": 1, "history": [-1]}, "history[0] is token -1"),
        ({"n_history": 1, "history": [INT_MIN]}, "token -2147483648"),
        ({"n_history": 1, "history": [INT_MAX]}, "token 2147483647"),
        ({"n_bias": INT_MIN}, "bias_ids has a count of -2147483648"),
        ({"n_bias": 1}, "bias_ids is NULL"),
        ({"n_bias": 1, "bias_ids": [0]}, "bias is NULL"),
        ({"n_bias": 1, "bias_ids": [4], "bias": [1.0]}, "bias_ids[0] is token 4"),
        ({"n_bias": 1, "bias_ids": [2], "bias": [NAN]}, "the bias of token 2 is "),
        ({"n_bias": 1, "bias_ids": [2], "bias": [INF]}, "the bias of token 2 is inf"),
        ({"n_allowed": 0}, "n_allowed is 0: no token is allowed"),
        ({"n_allowed": -2}, "n_allowed is -2"),
        ({"n_allowed": INT_MIN}, "n_allowed is -2147483648"),
        ({"n_allowed": 1}, "allowed is NULL"),
        ({"n_allowed": 2, "allowed": [0, 4]}, "allowed[1] is token 4"),
        ({"n_allowed": 1, "allowed": [-1]}, "allowed[0] is token -1"),
    ],
)
def test_c_refuses_by_name_and_changes_nothing(options, words):
    status, _, text, token = raw([1, 2, 3, 4], **options)
    assert status == EINVAL and words in text and token == -7


def test_c_refuses_null_and_empty():
    data, o = ffi.new("float[]", [1.0]), ffi.new("ds4_sampling *", {"top_p": 1, "repetition": 1, "n_allowed": -1})
    out, err = ffi.new("ds4_sampled *"), ffi.new("ds4_error *")
    null = [(ffi.NULL, 1, o, out), (data, 1, ffi.NULL, out), (data, 1, o, ffi.NULL)]
    for call in [*null, (data, 0, o, out), (data, 2**31, o, out)]:
        assert lib.ds4_sample(*call, err) == EINVAL and ffi.string(err.text)
        assert lib.ds4_sample(*call, ffi.NULL) == EINVAL
    assert lib.ds4_sample(data, 1, o, out, ffi.NULL) == 0


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-1, -1e-30, NAN, INF, 1e39, 10**400, "1", None, True, 1j]),
        ("top_k", [-1, 2**31, 1.0, "3", None, False, INT_MIN]),
        ("top_p", [0, 1.0001, -1, NAN, 1e-60, "1", None]),
        ("min_p", [1, 1.5, -0.1, NAN, 1 - 1e-12, None]),
        ("repetition", [0, -1, NAN, INF, 1e-60, 1e60]),
        ("presence", [NAN, INF, -INF, 1e60, None]),
        ("frequency", [NAN, INF, -INF, "0"]),
        ("repeat_last", [-2, 2**31, 1.5, None, True]),
        ("seed", [-1, 2**64, 1.5, "1", True]),
        ("logit_bias", [None, [(1, 2)], {"1": 2}, {-1: 0}, {2**31: 0}, {1.5: 0}, {True: 1}]),
        ("logit_bias", [{1: NAN}, {1: INF}, {1: "2"}, {1: 1e60}]),
        ("mask", [[1, 2], 3, "x"]),
    ],
)
def test_sampling_refuses_by_field_and_value(field, values):
    for value in values:
        with pytest.raises(ArgumentError, match=f"^{field}") as caught:
            Sampling(**{field: value})
        assert isinstance(caught.value, ValueError) and isinstance(caught.value, Ds4Error)
        shown = list(value.items())[0] if isinstance(value, dict) else (value,)
        assert any(repr(part) in str(caught.value) for part in shown)


def test_sampling_is_a_value():
    bias = {np.int64(3): 1, 4: -INF}
    s = Sampling(temperature=1, top_k=np.int64(5), logit_bias=bias, seed=2**64 - 1)
    bias[3] = 9
    assert s.logit_bias == {3: 1.0, 4: -INF} and s.top_k == 5 and type(s.top_k) is int
    assert s == Sampling(temperature=1.0, top_k=5, logit_bias={3: 1, 4: -INF}, seed=2**64 - 1)
    assert hash(s) == hash(dataclasses.replace(s)) and dataclasses.replace(s, top_k=6).top_k == 6
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.top_k = 3


def test_sample_refuses_what_are_no_ids():
    x, s = np.zeros(9, np.float32), Sampling(presence=1)
    wrong = [[1.5], ["a"], [[1]], 5, [2**40], [2**70], [-1], [9], [True], [None], [[1], [1, 2]]]
    for ids in [*wrong, np.array([-1], np.int32), np.array([2**32 + 1])]:
        with pytest.raises(ArgumentError, match="allowed"):
            sample(x, s, (), 0, ids)
        with pytest.raises(ArgumentError, match="history"):
            sample(x, s, ids)
    with pytest.raises(ArgumentError, match="no token is allowed"):
        sample(x, s, (), 0, [])
    with pytest.raises(ArgumentError, match="shape"):
        sample(np.zeros((2, 3), np.float32), s)
    with pytest.raises(ArgumentError, match="vocab"):
        sample(np.zeros(0, np.float32), s)
    with pytest.raises(ArgumentError, match="token 9"):
        sample(x, Sampling(logit_bias={9: 1}))
