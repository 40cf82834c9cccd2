"""Globs: what they match, against a brute-force reading; what is refused; and that nothing explodes."""

import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.language.globs import MAX_ALTERNATIVES, MAX_LENGTH, Glob, GlobError, _read, parse_glob
from tests.sampling import examples


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("lm_head", ["lm_head"], ["model.lm_head", "lm_head.weight", "LM_head", ""]),
        (
            "model.layers.*.mlp",
            ["model.layers.0.mlp", "model.layers.12.mlp"],
            ["model.layers.mlp", "model.layers.0.1.mlp"],
        ),
        ("model.*_proj", ["model.q_proj", "model._proj"], ["model.mlp.q_proj", "model.q_proj.weight"]),
        ("*.{q,k}_proj", ["a.q_proj", "a.k_proj"], ["a.v_proj", "q_proj", "a.{q,k}_proj"]),
        ("a.{b.c,d}.e", ["a.b.c.e", "a.d.e"], ["a.b.e", "a.c.e", "a.b.c.d.e"]),
        ("a.{b.,}c", ["a.b.c", "a.c"], ["a..c", "a.bc"]),
        ("{a,{b,c}d}.e", ["a.e", "bd.e", "cd.e"], ["b.e", "ad.e"]),
        ("**.norm", ["norm", "a.norm", "a.b.norm"], ["anorm", "a.norm.weight"]),
        ("a.**", ["a", "a.b", "a.b.c"], ["b", "ab"]),
        ("a.**.b.**.c", ["a.b.c", "a.x.b.c", "a.b.b.y.c"], ["a.c", "a.c.b"]),
        ("a.**.**.b", ["a.b", "a.x.y.b"], ["b"]),
        ("**", ["", "a", "a.b"], []),
        ("a.?", ["a.1"], ["a.10", "a.", "a.1.2"]),
        ("a.[0-3x]", ["a.0", "a.3", "a.x"], ["a.4", "a.-", "a.00"]),
        ("a.[!0-3]", ["a.4", "a.y"], ["a.0", "a.b.c"]),
        ("a.[^0]", ["a.1"], ["a.0"]),
        ("a.[*?-]", ["a.*", "a.?", "a.-"], ["a.b"]),
        ("a.[,{}]{b,c}", ["a.,b", "a.}c"], ["a.b"]),
        ("{*,x}*.a", ["q.a", "xq.a"], ["p.q.a"]),
    ],
)
def test_what_a_glob_matches(pattern: str, yes: list[str], no: list[str]) -> None:
    glob = parse_glob(pattern)
    assert [name for name in yes if not glob.matches(name)] == []
    assert [name for name in no if glob.matches(name)] == []


@pytest.mark.parametrize(
    ("pattern", "reason", "meant"),
    [
        ("", "the pattern is empty", ""),
        ("a..b", "it has an empty segment", "a..b"),
        (".a", "it has an empty segment", ".a"),
        ("a.", "it has an empty segment", "a."),
        ("a.{b,}.c", "`a..c`, one of its alternatives, has an empty segment", "a.{b,}.c"),
        ("{a,}", "``, one of its alternatives, has an empty segment", "{a,}"),
        ("a.{b", "a `{` is not closed", "{"),
        ("a.b}", "a `}` has no `{`", "}"),
        ("a.{}", "`{}` holds no alternatives", "{}"),
        ("q,k", "a comma separates alternatives only between `{` and `}`", ","),
        ("a.[01", "a `[` is not closed", "["),
        ("a.]", "a `]` has no `[`", "]"),
        ("a.[]", "`[...]` holds no characters", "[]"),
        ("a.[!]", "`[...]` holds no characters", "[!]"),
        ("a.[3-0]", "the range `3-0` is empty", "[3-0]"),
        ("a.[x.y]", "`[...]` matches one character of a segment, never a dot", "[x.y]"),
        ("a.b**", "`**` matches whole segments, and cannot be a part of one (`b**`)", "a.b**"),
        ("a.***", "more than two `*` in a row", "***"),
        ("{q, k}", "the character ' ' cannot be in a name", " "),
        ("a\u202eb", "the character '\\u202e' cannot be in a name", "\u202e"),
        ("a/b", "names are separated by dots, not by `/`", "/"),
        ("a\\*", "a backslash has no meaning in a pattern; `[*]` matches the character `*`", "\\"),
    ],
)
def test_what_is_no_glob(pattern: str, reason: str, meant: str) -> None:
    with pytest.raises(GlobError) as raised:
        parse_glob(pattern)
    assert raised.value.reason == reason
    assert pattern[raised.value.start : raised.value.end] == meant
    assert not raised.value.too_large


def test_size_is_limited_before_anything_is_expanded() -> None:
    for pattern in ("{a,b}" * 100, "a" * (MAX_LENGTH + 1), "{" * 20 + "a,b" + "}" * 20):
        with pytest.raises(GlobError) as raised:
            parse_glob(pattern)
        assert raised.value.too_large
    layers = ",".join(map(str, range(126)))
    assert len(parse_glob(f"model.layers.{{{layers}}}.self_attn.{{q,k,v,o}}_proj").alternatives) == 126 * 4
    assert MAX_ALTERNATIVES >= 126 * 4


def test_many_stars_do_not_backtrack() -> None:
    assert not parse_glob("*a" * 200 + "b").matches("a" * 5000)
    assert not parse_glob("**.a." * 100 + "b").matches(".".join("a" * 2000))


def test_structure_for_a_walk_over_a_tree() -> None:
    glob = parse_glob("model.layers.*.self_attn.{q,k,q}_proj")
    assert glob.texts == ("model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.k_proj")
    assert [(s.text, s.literal, s.any_depth) for s in parse_glob("a.b*.**").alternatives[0]] == [
        ("a", True, False),
        ("b*", False, False),
        ("**", False, True),
    ]


def expand(pattern: str) -> set[str]:
    """Braces, one innermost pair at a time; a set of characters may hold a brace only where the tests above try it."""
    innermost = re.search(r"\{([^{}]*)\}", pattern)
    if innermost is None:
        return {pattern}
    head, tail = pattern[: innermost.start()], pattern[innermost.end() :]
    return {text for option in innermost[1].split(",") for text in expand(head + option + tail)}


def oracle(pattern: list[str], name: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return oracle(pattern[1:], name) or (bool(name) and oracle(pattern, name[1:]))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and oracle(pattern[1:], name[1:])


words = st.lists(st.sampled_from(["a", "b", "ab", "*", "?", "[ab]", "[!a]", "a*"]), min_size=1, max_size=3).map("".join)
pieces = st.recursive(
    words.filter(lambda text: "**" not in text) | st.just("**"),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(lambda options: "{" + ",".join(options) + "}")
        | st.lists(inner, min_size=2, max_size=3).map(".".join)
    ),
    max_leaves=8,
)
names = st.lists(st.text("abc", min_size=1, max_size=3), max_size=5)


@settings(max_examples=examples(300), deadline=None)
@given(pattern=st.lists(pieces, min_size=1, max_size=3).map(".".join), name=names)
def test_agrees_with_brute_force(pattern: str, name: list[str]) -> None:
    glob = parse_glob(pattern)
    assert glob.matches(".".join(name)) == any(oracle(text.split("."), name) for text in expand(pattern))


@settings(max_examples=examples(200), deadline=None)
@given(st.text("ab.*?[]{},!-\\ \u2028é", max_size=30))
def test_any_text_is_a_glob_or_is_refused_with_a_place(text: str) -> None:
    try:
        glob = parse_glob(text)
    except GlobError as error:
        assert error.reason and 0 <= error.start <= error.end <= len(text)
    else:
        assert isinstance(glob, Glob) and glob.alternatives
        assert {parse_glob(alternative).texts for alternative in glob.texts} == {(t,) for t in glob.texts}


@given(st.lists(st.sampled_from(["model", "layers", "*", "0", "q_proj", "ünï", "_", "**", "a*", "", "²"]), max_size=6))
def test_simple_patterns_are_read_as_all_others_are(words):
    def outcome(read):
        try:
            return read(".".join(words))
        except GlobError as error:
            return (error.reason, error.start, error.end)

    assert outcome(parse_glob) == outcome(_read)
