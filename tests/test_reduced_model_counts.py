"""Small numbers stand to tp and to each other as the large ones do."""

from hypothesis import given
from hypothesis import strategies as st

from shardplan.model.reduced.counts import like, same_relation, small_counts, small_head_dims, small_widths

TP = st.sampled_from([1, 2, 3, 4, 6, 8, 16])


@given(st.integers(1, 300_000), TP, st.integers(1, 200))
def test_like(large, tp, at_least):
    small = like(large, tp, at_least=at_least)
    assert same_relation(small, large, tp) and small >= 1
    assert small >= at_least or large < tp


@given(st.lists(st.integers(1, 256), max_size=5), TP)
def test_counts(values, tp):
    small = small_counts(values, tp)
    assert small.keys() == set(values)
    for one in values:
        assert same_relation(small[one], one, tp)
        if one % tp == 0 and one > tp:
            assert small[one] > tp, "several per rank stay several"
        for other in values:
            assert (small[one] < small[other]) == (one < other)


@given(st.integers(1, 64), st.integers(1, 16), TP)
def test_groups_stay_groups(key_value_heads, group, tp):
    heads = key_value_heads * group
    small = small_counts([heads, key_value_heads], tp)
    if same_relation(small[heads], heads, tp) and key_value_heads % tp == 0:
        assert small[heads] % small[key_value_heads] == 0


def test_known_counts():
    assert small_counts([32, 8], 2) == {8: 4, 32: 8}
    assert small_counts([32, 8], 8) == {8: 8, 32: 16}
    assert small_counts([28, 4], 4) == {4: 4, 28: 8}
    assert small_counts([4, 1], 2) == {1: 1, 4: 4}
    assert small_counts([71], 2) == {71: 3}
    assert small_counts([25, 5], 2) == {5: 3, 25: 9}


def test_counts_over_cp():
    """Several ranks of cp have each key-value head as in the original, and each rank has four of its queries."""
    assert small_counts([32, 8], 1, cp=2) == {8: 2, 32: 4}
    assert small_counts([32, 8], 1, cp=4, shared={8: 2}) == {8: 2, 32: 16}
    assert small_counts([32, 8], 1, cp=2, shared={8: 1}) == {8: 1, 32: 8}
    assert small_counts([64, 8], 2, cp=4, shared={8: 2}) == {8: 4, 64: 32}
    assert small_counts([32, 16, 2], 1, cp=4, shared={2: 2}) == {2: 2, 16: 16, 32: 32}
    assert small_counts([32, 8], 2, shared={8: 2}) == small_counts([32, 8], 2)


@given(st.lists(st.sampled_from([32, 48, 64, 96, 128, 192, 256, 512]), min_size=1, max_size=4))
def test_head_dims_keep_sums(values):
    small = small_head_dims(values)
    assert all(s % 2 == 0 and s > 0 for s in small.values())
    ratios = {small[v] / v for v in values}
    assert len(ratios) == 1


def test_rotary_parts_stay_even():
    assert small_head_dims([128]) == {128: 8}
    assert small_head_dims([80], [(80, 0.4)]) == {80: 10}
    assert small_head_dims([64, 128, 192]) == {64: 8, 128: 16, 192: 24}
    assert small_head_dims([192, 128], [(192, 0.334)]) == {128: 8, 192: 12}
    assert small_head_dims([4]) == {4: 4}
    assert small_head_dims([]) == {}


@given(st.lists(st.integers(8, 60_000), max_size=6), st.sampled_from([(4096, 64), (768, 32), (1152, 48)]), TP)
def test_widths(values, hidden, tp):
    small = small_widths(values, hidden, tp)
    others = set(values) - {hidden[0]}
    assert len({small[v] for v in others}) == len(others), "different widths stay different"
    for value in others:
        assert same_relation(small[value], value, tp)
        assert small[value] != small[hidden[0]]
