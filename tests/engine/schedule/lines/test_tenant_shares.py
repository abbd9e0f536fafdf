from __future__ import annotations

from collections import Counter

from diptych.engine.schedule.lines.tenant_shares import MANY_TENANTS, TenantShares


def turns(shares: TenantShares, tenants: list[str], num_turns: int, cost: int = 10) -> Counter[str]:
    """Let all tenants wait all the time, each turn costing the same."""
    taken: Counter[str] = Counter()
    for _ in range(num_turns):
        tenant = shares.next(tenants)
        shares.charge(tenant, prompt_tokens=cost)
        taken[tenant] += 1
    return taken


def test_tenants_share_equally() -> None:
    shares = TenantShares({})
    for tenant in "abc":
        shares.enter(tenant)
    assert turns(shares, ["a", "b", "c"], 30) == {"a": 10, "b": 10, "c": 10}


def test_a_weight_is_a_larger_share() -> None:
    shares = TenantShares({"gold": 3.0})
    for tenant in ("gold", "free"):
        shares.enter(tenant)
    assert turns(shares, ["gold", "free"], 40) == {"gold": 30, "free": 10}


def test_long_requests_count_for_more() -> None:
    shares = TenantShares({})
    taken: Counter[str] = Counter()
    for _ in range(100):
        tenant = shares.next(["long", "short"])
        shares.charge(tenant, output_tokens=90 if tenant == "long" else 10)
        taken[tenant] += 1
    assert taken == {"long": 10, "short": 90}


def test_a_pause_earns_no_credit() -> None:
    shares = TenantShares({})
    shares.enter("busy")
    turns(shares, ["busy"], 1000)
    shares.enter("idle")
    assert turns(shares, ["busy", "idle"], 20)["idle"] <= 11


def test_a_debt_is_not_forgotten_by_a_pause() -> None:
    shares = TenantShares({})
    for tenant in ("heavy", "light"):
        shares.enter(tenant)
    shares.charge("heavy", output_tokens=500)
    shares.enter("heavy")
    assert turns(shares, ["heavy", "light"], 100) == {"light": 100}


def test_no_more_than_so_many_tenants_are_remembered() -> None:
    shares = TenantShares({})
    for number in range(10 * MANY_TENANTS):
        tenant = str(number)
        shares.enter(tenant)
        shares.charge(shares.next([tenant]), prompt_tokens=1)
    assert len(shares) <= MANY_TENANTS
