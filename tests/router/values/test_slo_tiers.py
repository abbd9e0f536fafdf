from __future__ import annotations

import pytest

from diptych.common.errors import ConfigError, InvalidRequest
from diptych.generation.slo import Slo
from diptych.router.values.slo_tiers import DEFAULT_TIER, NO_WISH, SloWish, Tier, tiers_of, wish_in, wish_of

COMMON = Slo(1.0, 0.1)
INTERACTIVE = Slo(0.3, 0.04, 4.0)
BATCH = Slo(1.0, 0.1, 0.2, sheddable=True)
TIERS = tiers_of(["interactive:ttft_ms=300:tpot_ms=40:weight=4", "batch:weight=0.2:sheddable"], COMMON)


def test_a_tier_has_what_it_says_and_what_is_common_besides() -> None:
    assert TIERS.slos == {DEFAULT_TIER: COMMON, "interactive": INTERACTIVE, "batch": BATCH}
    assert TIERS.have_sheddable
    assert tiers_of(["default:sheddable"], COMMON).slos == {DEFAULT_TIER: COMMON._replace(sheddable=True)}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["two words"], "the name of a tier takes up to 32"),
        ([""], "the name of a tier"),
        (["a", "a"], "'a' twice"),
        (["default:weight=2", "default:weight=3"], "'default' twice"),
        (["a:ttft=300"], "'ttft=300': after its name a tier has ttft_ms=N"),
        (["a:sheddable=no"], "'sheddable=no'"),
        (["a:weight"], "'weight'"),
        (["a:weight=2:weight=3"], "each once at most"),
        (["a:weight=heavy"], "slo.weight must be between 0.001 and 1000"),
        (["a:ttft_ms=-1"], "slo.ttft_ms must be 0, or between 0.1"),
        ([f"t{index}" for index in range(16)], "17 tiers with 'default'; at most 16"),
    ],
)
def test_tiers_that_make_no_sense_are_refused_with_words(texts: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiers_of(texts, COMMON)


def test_a_request_is_of_the_tier_that_it_names_with_the_times_that_it_says() -> None:
    assert TIERS.of(NO_WISH) == Tier(DEFAULT_TIER, COMMON)
    assert TIERS.of(SloWish("interactive")) == Tier("interactive", INTERACTIVE)
    assert TIERS.of(SloWish("batch", ttft_ms=250)) == Tier("batch", BATCH._replace(ttft_s=0.25))
    assert TIERS.of(SloWish(tpot_ms=20)) == Tier(DEFAULT_TIER, COMMON._replace(tpot_s=0.02))


def test_a_key_is_held_to_its_tiers_and_the_first_is_its_own() -> None:
    assert TIERS.of(NO_WISH, ["gone", "batch", "interactive"]).name == "batch"
    assert TIERS.of(SloWish("interactive", ttft_ms=400), ["batch", "interactive"]).slo.ttft_s == 0.4
    for wish, allowed, param, words in (
        (SloWish("interactive"), ["batch"], "slo.tier", "no SLO tier 'interactive' for this request: use batch"),
        (NO_WISH, ["gone"], "slo.tier", "ask the operator: the key may use gone"),
        (SloWish(ttft_ms=999.0), ["batch"], "slo.ttft_ms", "must be at least 1000 in the tier 'batch', not 999"),
        (SloWish(tpot_ms=1.0), ["batch"], "slo.tpot_ms", "must be at least 100"),
    ):
        with pytest.raises(InvalidRequest, match=words) as refused:
            TIERS.of(wish, allowed)
        assert refused.value.param == param


def test_a_key_may_ask_for_just_the_times_of_its_tier_and_for_none_where_it_has_none() -> None:
    tiers = tiers_of(["even:ttft_ms=2007", "free:sheddable"], Slo())
    assert tiers.of(SloWish("even", ttft_ms=2007), ["even"]).slo.ttft_s == 2.007
    with pytest.raises(InvalidRequest, match=r"slo.tpot_ms can't be said in the tier 'free', which has none"):
        tiers.of(SloWish("free", tpot_ms=1.0), ["free"])


def test_common_times_that_no_request_may_have_are_no_options() -> None:
    with pytest.raises(ConfigError, match=r"--ttft-slo-ms and --tpot-slo-ms: slo.ttft_ms must be"):
        tiers_of([], Slo(1e6))


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        (SloWish("nobody"), "slo.tier"),
        (SloWish(ttft_ms=-1.0), "slo.ttft_ms"),
        (SloWish(tpot_ms=float("nan")), "slo.tpot_ms"),
        (SloWish(ttft_ms=1e12), "slo.ttft_ms"),
    ],
)
def test_a_wish_that_cannot_be_is_refused_by_name(wish: SloWish, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        TIERS.of(wish)
    assert refused.value.param == param


def test_a_header_says_the_same_in_one_line_and_goes_before_the_body() -> None:
    assert wish_of("interactive") == SloWish("interactive")
    assert wish_of(" batch : ttft_ms=250 : tpot_ms=20.5") == SloWish("batch", 250.0, 20.5)
    assert wish_of(":tpot_ms=20") == SloWish(tpot_ms=20.0)
    assert wish_in({}) == NO_WISH
    said = wish_in({"x-diptych-slo": "interactive:ttft_ms=250"}).over(SloWish("batch", 100.0, 10.0))
    assert said == SloWish("interactive", 250.0, 10.0)
    for text in ("a:ttft_ms", "a:ttft_ms=0", "a:ttft_ms=nan", "a:weight=9", "a:sheddable", "a:"):
        with pytest.raises(InvalidRequest, match="the name of a tier, then :ttft_ms=N") as refused:
            wish_of(text)
        assert refused.value.param == "x-diptych-slo"
