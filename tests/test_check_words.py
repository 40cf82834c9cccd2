"""The words of messages."""

from shardplan.compiler.check.check_words import feature_words, head_words, join, sizes
from shardplan.core.tree import ModuleInfo, named, starred


def test_names_of_repeated_layers_are_told_as_keys_would_name_them():
    assert starred("model.layers.10.mlp.up_proj") == "model.layers.*.mlp.up_proj"
    assert named(["model.layers.0.mlp.up_proj"]) == "model.layers.0.mlp.up_proj"
    assert named(["layers.0.mlp.up", "layers.1.mlp.up"]) == "layers.*.mlp.up"
    assert named(["layers.0.mlp.up", "layers.0.mlp.gate", "layers.1.mlp.up"]) == "layers.*.mlp.{up,gate}"
    assert named(["layers.0.q.bias", "layers.0.k.bias", "lm_head"]) == "layers.*.{q,k}.bias and lm_head"
    assert named(["wte.weight", "lm_head.weight", "norm"]) == "{wte,lm_head}.weight and norm"
    assert named(["a", "b", "c"]) == "a, b and c"
    assert named(["a.b", "a.b.c"]) == "a.b and a.b.c"


def test_sizes_are_an_instruction():
    assert sizes((1, 2, 4)) == "use tp 2 or 4: each fits everything that this plan splits"
    assert sizes((1, 3)) == "use tp 3: it fits everything that this plan splits"
    assert sizes((1,)) == "use tp 1: no larger size fits everything that this plan splits"
    assert sizes(range(1, 30)).startswith("use tp 2, 3, 4, 5, 6, 7, 8, ... or 29: ")
    assert join(["a", "b", "c"], "or") == "a, b or c"


def test_a_count_of_heads_has_the_name_that_the_configuration_gives_it():
    numbers = {"num_attention_heads": 8, "num_key_value_heads": 8, "n_head": 8, "linear_num_value_heads": 32}
    assert head_words(8, False, numbers) == "num_attention_heads"
    assert head_words(8, True, numbers) == "num_key_value_heads"
    assert head_words(32, False, numbers) == "linear_num_value_heads"
    assert head_words(4, False, numbers) is None


def test_a_width_has_the_name_of_the_module_that_knows_it():
    mlp = ModuleInfo("mlp", "MLP", "other", numbers={"dim": 64, "width": 256, "gated": True})
    assert feature_words(256, [mlp], {"width": 256, "intermediate_size": 256}) == "width"
    assert feature_words(256, [mlp], {"intermediate_size": 256}) == "intermediate_size"
    assert feature_words(256, [mlp], {"intermediate_size": 256, "hidden_size": 256}) == "width", "it could be either"
    assert feature_words(1, [mlp], {}) is None
