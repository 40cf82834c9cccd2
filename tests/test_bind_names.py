"""Walking a tree with a glob finds exactly the names that the glob matches."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.compiler.bind.dead import suggestions
from shardplan.compiler.bind.matching import Names
from shardplan.core.tree import ModuleInfo, ModuleTree, ParameterInfo
from shardplan.language.globs import parse_glob
from tests.examples import tree
from tests.sampling import examples
from tests.trees import Builder, llama_8b

SEGMENTS = st.sampled_from(["a", "b", "ab", "0", "1", "weight"])
PATHS = st.lists(SEGMENTS, min_size=1, max_size=4).map(tuple)
PATTERN_SEGMENTS = st.sampled_from(["*", "**", "a", "b*", "?", "[ab]", "{a,b}", "{a.b,0}", "weight", "{0,1}", "*b"])
PATTERNS = st.lists(PATTERN_SEGMENTS, min_size=1, max_size=5).map(".".join)


def made_tree(paths: set[tuple[str, ...]], owners: set[tuple[str, ...]], prefix: str) -> ModuleTree:
    """A tree with these modules and all around them; `owners` own a parameter `w` each."""
    every = {()} | {path[:i] for path in paths | owners for i in range(len(path) + 1)}
    modules = {
        ".".join(path): ModuleInfo(".".join(path), "M", "other", (ParameterInfo("w", (1,)),) if path in owners else ())
        for path in sorted(every)
    }
    return ModuleTree(("M",), None, modules, base_prefix=prefix)


@settings(max_examples=examples(300), deadline=None)
@given(st.sets(PATHS, max_size=12), st.sets(PATHS, max_size=6), PATTERNS, st.sampled_from(["", "a", "a.b"]))
def test_the_walk_finds_what_the_glob_matches(paths, owners, pattern, prefix):
    made, glob = made_tree(paths, owners, prefix), parse_glob(pattern)
    reached = Names(made).reach(glob)
    modules = {name for name in made.modules if made.address(name) and glob.matches(made.address(name))}
    parameters = {name for name in made.parameters if glob.matches(made.address(name))}
    assert (set(reached.modules), set(reached.parameters)) == (modules, parameters)
    assert len(set(reached.modules)) == len(reached.modules)
    assert len(set(reached.parameters)) == len(reached.parameters)


def test_the_root_is_named_by_the_prefix_of_a_base_model():
    assert Names(llama_8b(headless=True)).reach(parse_glob("model")).modules == ("",)
    assert Names(llama_8b()).reach(parse_glob("**")).modules[0] == "model"


def near(key: str) -> tuple[str, ...]:
    return suggestions(parse_glob(key), Names(tree("llama-3.1-8b")).starred(modules_only=False))


def test_suggestions_are_keys_of_real_names():
    assert near("model.layers.*.attn.o_proj") == ("model.layers.*.self_attn.o_proj",)
    assert near("layers.*.self_attn.q_proj") == ("model.layers.*.self_attn.q_proj",)
    assert near("q_proj") == ("model.layers.*.self_attn.q_proj",)
    assert near("model.layers.3.mlp.dwn_proj") == ("model.layers.*.mlp.down_proj",)
    assert near("module.model.layers.*.mlp.down_proj") == ("model.layers.*.mlp.down_proj",)
    assert near("Model.Layers.*.MLP.down_proj") == ("model.layers.*.mlp.down_proj",)
    assert near("model.layers.*.mlp.{gate,up}_prj") == (
        "model.layers.*.mlp.gate_proj",
        "model.layers.*.mlp.up_proj",
    )
    assert near("model.layers.*.mlp.down_proj.weigth") == ("model.layers.*.mlp.down_proj.weight",)


def test_what_the_model_does_not_have_is_not_replaced_by_something_else():
    assert near("model.layers.*.self_attn.{q,k}_norm") == ()
    assert near("transformer.h.*.attn.c_attn") == ()
    assert near("a" * 900) == ()


def test_suggestions_for_modules_name_no_parameters():
    names = Names(tree("mixtral-8x7b"))
    assert suggestions(parse_glob("model.layers.*.mlp.expert"), names.starred(modules_only=True)) == (
        "model.layers.*.mlp.experts",
    )
    assert not any(name.endswith(".weight") for name in names.starred(modules_only=True))


def experts(layers: int, count: int) -> ModuleTree:
    """A mixture of experts with one module for each expert: DeepSeek-V3 has 58 layers of 256."""
    b = Builder("Moe")
    b.add("model", "MoeModel")
    b.add("model.layers", "ModuleList", "list")
    for i in range(layers):
        for name, kind in ((f"{i}", "other"), (f"{i}.mlp", "other"), (f"{i}.mlp.experts", "list")):
            b.add(f"model.layers.{name}", "M", kind)
        for j in range(count):
            expert = f"model.layers.{i}.mlp.experts.{j}"
            b.add(expert, "MLP", intermediate_size=2048)
            b.linear(f"{expert}.gate_proj", 2048, 7168)
            b.linear(f"{expert}.up_proj", 2048, 7168)
            b.linear(f"{expert}.down_proj", 7168, 2048)
    return b.tree(("Moe",), None, {})
