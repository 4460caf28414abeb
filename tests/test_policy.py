"""The numbers and triggers of spec sections 1 and 2, and what a policy refuses."""

from __future__ import annotations

import pytest
from surfaces import WRITERS

from ds4.compaction.policy import CompactionPolicy
from ds4.compaction.whole import request_size
from ds4.errors import ArgumentError


@pytest.mark.parametrize(
    ("ctx", "used"),
    [(4096, 3072), (8192, 6144), (12000, 9000), (32768, 24576), (65536, 55705), (100000, 85000)],
)
def test_the_first_used_that_fires_the_soft_trigger(ctx, used):
    limits = CompactionPolicy().limits(ctx, 200)
    assert limits.soft == used
    assert not limits.soft_fires(used - 1) and limits.soft_fires(used)
    # the two rules as they are written
    assert [n for n in range(ctx) if n >= ctx * 85 // 100 or ctx - n <= min(8192, ctx / 4)][0] == used


@pytest.mark.parametrize(
    ("ctx", "tail", "summary", "tool_result", "generation", "ledger", "human"),
    [
        (2048, 204, 256, 256, 256, 128, 102),
        (4096, 409, 512, 512, 256, 256, 204),
        (8192, 819, 1024, 1024, 512, 512, 409),
        (32768, 3276, 4096, 1024, 2048, 2048, 1638),
        (131072, 13107, 4096, 1024, 4096, 8192, 6553),
        (1 << 20, 50000, 4096, 1024, 4096, 65536, 52428),
    ],
)
def test_the_numbers_for_a_context(ctx, tail, summary, tool_result, generation, ledger, human):
    limits = CompactionPolicy().limits(ctx, 100)
    assert (limits.tail, limits.summary, limits.tool_result) == (tail, summary, tool_result)
    assert limits.generation == 100 + 1 + generation
    assert (limits.ledger, limits.human, limits.human_keep) == (ledger, human, ctx // 4)
    assert (limits.summary_min, limits.error) == (256, 16)
    assert limits.landing == limits.soft - ctx // 10
    assert limits.pre == limits.soft - ctx * 15 // 100


def test_numbers_that_the_user_gives():
    policy = CompactionPolicy(
        soft_fraction=0.5, min_free=100, tail_fraction=0.2, tail_max=1000, summary_max=300, summary_min_room=64,
        tool_result_reserve=32, error_reserve=8, generation_reserve=128, ledger_max=70, human_max=30,
    )  # fmt: skip
    limits = policy.limits(8000, 50)
    assert (limits.soft, limits.tail, limits.summary, limits.summary_min) == (4000, 1000, 300, 64)
    assert (limits.tool_result, limits.error, limits.generation) == (32, 8, 50 + 1 + 128)
    assert (limits.ledger, limits.human) == (70, 30)
    assert CompactionPolicy(ledger_max=10**6, human_max=10**6).limits(8000, 50).ledger == 500


def test_a_fraction_is_taken_as_it_is_written():
    for percent in range(1, 100):
        policy = CompactionPolicy(soft_fraction=percent / 100, tail_fraction=0.005, min_free=0)
        assert policy.limits(10_000, 1).soft == percent * 100


def test_the_hard_trigger():
    limits = CompactionPolicy().limits(4096, 100)
    assert limits.reserve == max(512, 357) == 512
    assert limits.fits(3000, 4096 - 512 - 3000 - 1) and not limits.fits(3000, 4096 - 512 - 3000)
    assert limits.fits_error(4000, 79) and not limits.fits_error(4000, 80)
    large = CompactionPolicy().limits(131072, 100)
    assert large.reserve == large.generation == 4197


@pytest.mark.parametrize("name", ["tags are text", "alternating", "gemma"])
def test_a_summary_has_room_from_2048_on(name):
    """L33, L34: the generation reserve begins above the soft trigger."""
    for ctx in (2048, 2049, 3000, 4096, 10_000, 100_000, 1_000_000):
        size = request_size(WRITERS[name], CompactionPolicy(request="short"))
        assert size < 600  # the tiny tokenizer has a token for nearly every character
        limits = CompactionPolicy(request="short").limits(ctx, 60)
        assert ctx - limits.generation > limits.soft


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"soft": 0.5}, "no field 'soft'; its fields are soft_fraction, min_free"),
        ({"soft_fraction": 0}, "soft_fraction is 0; give a share of ctx between 0 and 1"),
        ({"soft_fraction": 1.0}, "soft_fraction is 1.0"),
        ({"soft_fraction": float("nan")}, "soft_fraction is nan"),
        ({"soft_fraction": "0.5"}, "soft_fraction is '0.5'"),
        ({"tail_fraction": True}, "tail_fraction is True"),
        ({"min_free": -1}, "min_free is -1; give a whole number of tokens, at least 0"),
        ({"min_free": 1.5}, "min_free is 1.5"),
        ({"tail_max": 0}, "tail_max is 0; .* at least 1"),
        ({"summary_max": 8}, "summary_max is 8"),
        ({"summary_max": 1 << 31}, "summary_max is 2147483648"),
        ({"error_reserve": None}, "error_reserve is None"),
        ({"ledger_max": -1}, "ledger_max is -1"),
        ({"thinking_budget": 0}, "thinking_budget is 0"),
        ({"background": 1}, "background is 1; give True or False"),
        ({"background": None}, "background is None"),
        ({"summary_penalty": "yes"}, "summary_penalty is 'yes'"),
        ({"request": "long"}, 'request is \'long\'; give "full" or "short"'),
        ({"summary_max": 100}, "summary_min_room 256 is more than summary_max 100"),
        ({"tail_fraction": 0.9}, "tail_fraction 0.9 is not below soft_fraction 0.85"),
    ],
)
def test_a_wrong_policy_is_refused_by_field(values, message):
    with pytest.raises(ArgumentError, match=message):
        CompactionPolicy.from_mapping(values)


def test_the_models_entry_fills_only_what_is_left_open():
    small = {"request": "short", "summary_penalty": True}
    policy = CompactionPolicy().for_model(small)
    assert (policy.request, policy.summary_penalty) == ("short", True)
    policy = CompactionPolicy(request="full", summary_penalty=False, background=True).for_model(small)
    assert (policy.request, policy.summary_penalty, policy.background) == ("full", False, True)
    policy = CompactionPolicy().for_model({})
    assert (policy.request, policy.summary_penalty) == ("full", False)


@pytest.mark.parametrize(
    ("policy", "ctx", "asked", "overhead", "message"),
    [
        ({}, 2047, 100, 0, "ctx is 2047, and .* needs at least 2048"),
        ({}, 2048, 256, 0, "reserve of 513 tokens leaves 1535 of ctx 2048, .* trigger at 1536"),
        ({"generation_reserve": 100_000, "summary_min_room": 2000}, 4096, 10, 0, "generation reserve of 2011 tokens"),
        ({}, 4096, 100, 874, "prompt and tools 874 .* summary 512 .* ledger 256 .* 818 .* messages 204 = 2664 .* 2663"),
        ({}, 4096, 100, 4198, "ctx 4096 is too small: system prompt and tools 4198"),
        ({"tail_fraction": 0.4}, 8192, 100, 0, r"kept end 6552 .* = 8497 tokens, .* may have 5325"),
    ],
)  # fmt: skip
def test_L18_a_context_that_is_too_small_is_refused_with_the_numbers(policy, ctx, asked, overhead, message):
    # smallest input: window 4k, system + tools 4.1k, one U
    with pytest.raises(ArgumentError, match=message):
        CompactionPolicy(**policy).limits(ctx, asked).check(overhead)


def test_a_context_that_just_suffices():
    CompactionPolicy().limits(4096, 100).check(873)
    CompactionPolicy().limits(2048, 254).check(438)
    with pytest.raises(ArgumentError):
        CompactionPolicy().limits(2048, 254).check(439)
