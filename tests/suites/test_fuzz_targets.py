"""Readers of strangers' bytes on random changes of valid inputs."""

import re

import pytest
from fuzz_targets import TARGETS, FuzzTarget
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nightly import sized

VALUE = re.compile(rb'"[^"]*"|-?\d[\d.e+-]*|true|false|null|[\[{]')
"""A value of JSON or TOML, or the beginning of one."""

ODD = (
    *("null", "true", "-1", "1e999", "NaN", "inf", "1979-05-27", "9" * 400, "9" * 5000, "0x" + "f" * 5000),
    *('""', '"a\\nb\\u202e"', '"\\ud800"', "[]", "{}", "[1, null, {}]", "[{}, 1]", '{"a": [1]}', "{a = 1}"),
    *("[" * 900 + "]" * 900, '{"a":' * 150 + "1" + "}" * 150, '"rewriter-plan"', "2", "0.5"),
)
"""Values of another type than is expected, or beyond what Python converts."""

EVERY = [pytest.param(target, id=name) for name, target in TARGETS.items()]


@pytest.mark.parametrize("target", EVERY)
def test_its_seeds_are_valid(target: FuzzTarget) -> None:
    """A seed that is declined would test nothing."""
    for seed in target.seeds:
        target.read(seed)


@pytest.mark.parametrize("target", EVERY)
@settings(deadline=None, max_examples=sized(100, 5000), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_changed_bytes_give_a_result_or_an_error_of_ours(target: FuzzTarget, data: st.DataObject) -> None:
    changed = bytearray(data.draw(st.sampled_from(target.seeds)))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, max(0, len(changed) - 1)))
        length = data.draw(st.integers(0, 6))
        changed[at : at + length] = data.draw(st.binary(max_size=6))
    target.survive(bytes(changed))


@pytest.mark.parametrize("target", EVERY)
@settings(deadline=None, max_examples=sized(100, 5000), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_other_types_give_a_result_or_an_error_of_ours(target: FuzzTarget, data: st.DataObject) -> None:
    changed = data.draw(st.sampled_from(target.seeds))
    for _ in range(data.draw(st.integers(1, 3))):
        values = list(VALUE.finditer(changed))
        value = data.draw(st.sampled_from(values)) if values else re.search(b"", changed)
        assert value is not None
        odd = data.draw(st.sampled_from(ODD)).encode()
        changed = changed[: value.start()] + odd + changed[value.end() :]
    target.survive(changed)
