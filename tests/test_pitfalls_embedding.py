"""The sequence-parallel entrance, vocabularies and padding: each pitfall shown with its remedy taken away."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from shardplan import compile_plan
from shardplan.model import find_any
from shardplan.model.reduced.reduced_model import make_reduced_model
from shardplan.runtime.parallel import direct_calls
from shardplan.runtime.parallel import vocabulary_lookup as vocabulary
from shardplan.runtime.parallel.regime import PartialEmbedding
from tests.collective_counter import CollectiveCounter
from tests.proofs import Case, assert_equal, case, fake_mesh, plan_like, planned, reduced_model, step


def embedded(model, inputs):
    """The same call with the embeddings looked up outside the model."""
    inputs = dict(inputs)
    vectors = model.get_input_embeddings()(inputs.pop("input_ids"))
    output = model(inputs_embeds=vectors, **inputs)
    return {"loss": output.loss, "logits": output.logits}


def own_vectors(name: str, tp: int) -> dict:
    """Inputs that no embedding made."""
    inputs = dict(reduced_model(name, tp).inputs())
    ids = inputs.pop("input_ids")
    width = reduced_model(name, tp).config.get_text_config().hidden_size
    inputs["inputs_embeds"] = torch.randn((*ids.shape, width), generator=torch.Generator().manual_seed(7))
    return inputs


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "gemma3"])
def test_the_door_knows_that_the_embedding_did_not_run(name, monkeypatch):
    assert_equal(case(name, sp=True, inputs=own_vectors(name, 2)).rows())
    if name == "gemma3":
        return  # its embeddings are reduced at once: there is nothing to know
    monkeypatch.setattr(PartialEmbedding, "take", lambda self, x: True)
    wrong = case(name, sp=True, inputs=own_vectors(name, 2)).wrong()
    assert wrong["logits"] > 0.1, "a complete value, reduced once more, is multiplied by tp"


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text"])
def test_an_embedding_that_runs_outside_the_model_is_complete(name, monkeypatch):
    """The user looks the tokens up and hands the vectors in: nobody is there to reduce a partial sum later."""
    assert_equal(case(name, sp=True, call=embedded).rows())
    monkeypatch.setattr(PartialEmbedding, "keeps_partial", lambda self, source: True)
    monkeypatch.setattr(direct_calls._Part, "__call__", lambda self, module, args, kwargs: None)
    assert case(name, sp=True, call=embedded).wrong()["logits"] > 0.1


@pytest.mark.parametrize("call", [step, embedded])
@pytest.mark.parametrize(
    ("name", "builtin", "table"),
    [
        ("gpt2", "gpt2", "transformer.wpe"),
        ("megatron-bert", "megatron_bert", "bert.embeddings.position_embeddings"),  # a whole table runs between the two
    ],
)
def test_several_split_tables_make_one_sum(name, builtin, table, call):
    def compiled(model, plan, tp, *, logits, **options):
        return compile_plan(model, {"tp": tp}, plan, **options)

    plan = plan_like(builtin, {table: "embedding_rowwise"}, {table: "embedding_rowwise_seq"})
    assert_equal(replace(case(name, sp=True, plan=plan, call=call), compiled=compiled).rows())


def test_what_is_known_of_one_call_does_not_leak_into_the_next():
    def both(model, inputs):
        outside = embedded(model, inputs)["loss"]
        output = model(**inputs)
        return {"loss": output.loss + embedded(model, inputs)["loss"], "logits": output.logits, "outside": outside}

    for name in ("llama", "gpt2"):
        assert_equal(case(name, sp=True, call=both).rows())


@pytest.mark.parametrize(
    ("name", "failure", "again"),
    [
        ("llama", KeyError, embedded),
        ("llama", KeyboardInterrupt, embedded),  # torch runs no hooks after it
        ("fuyu", KeyboardInterrupt, step),  # its table is called outside of the module around both
    ],
)
def test_a_call_that_fails_between_embedding_and_door_leaves_nothing_behind(name, failure, again):
    """The scope ends with an exception too."""

    def after_failure(model, inputs):
        layer = model.get_decoder().layers[0]

        def fail(module, args):
            raise failure("of the user's hook")

        handle = layer.register_forward_pre_hook(fail, prepend=True)
        with pytest.raises(failure):
            model(**inputs)
        handle.remove()
        return again(model, inputs)

    assert_equal(case(name, sp=True, call=after_failure).rows())


@pytest.mark.parametrize("kind", ["text", pytest.param("image", marks=pytest.mark.slow)])
def test_image_features_need_complete_embeddings(kind, monkeypatch):
    """The embedding runs before the language model's forward, which holds the block input, so its sum is completed at once.
    Scattered into a partial sum, the features would be counted tp times."""
    assert_equal(case("gemma3", sp=True, kind=kind).rows())
    partial = plan_like("gemma3", {}, {"model.language_model.embed_tokens": "embedding_rowwise_seq"})
    assert_equal(case("gemma3", sp=True, kind=kind, plan=partial).rows())
    monkeypatch.setattr(PartialEmbedding, "keeps_partial", lambda self, source: True)
    monkeypatch.setattr(PartialEmbedding, "take", lambda self, x: True)
    wrong = case("gemma3", sp=True, kind=kind, plan=partial).wrong()
    assert wrong == {} if kind == "text" else wrong["logits"] > 0.01


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_door(reentrant):
    """A layer checkpointed from outside runs its block input again in backward, when the embedding is long over: it must
    know what it did, or refuse."""

    def checkpointed(model, inputs):
        layer, forward = model.model.layers[0], type(model.model.layers[0]).__call__

        class Around(torch.nn.Module):
            def forward(self, hidden, **kwargs):
                run = lambda hidden: forward(layer, hidden, **kwargs)  # noqa: E731
                return torch.utils.checkpoint.checkpoint(run, hidden, use_reentrant=reentrant)

        layers = model.model.layers
        model.model.layers = torch.nn.ModuleList([Around(), *layers[1:]])
        try:
            output = model(**inputs)
            output.loss.backward()
        finally:
            model.model.layers = layers
        return {"logits": output.logits, "loss": output.loss.detach()}

    if reentrant:
        with pytest.raises(RuntimeError, match="checkpoint around the sequence-parallel block input"):
            case("llama", sp=True, call=checkpointed).rows()
    else:
        assert_equal(case("llama", sp=True, call=checkpointed).rows())


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "mixtral", "gemma3_text", "gemma3"])
def test_a_length_that_tp_does_not_divide_is_refused_before_communicating(name):
    inputs = {key: value[:, :10] for key, value in reduced_model(name, 4).inputs().items()}
    with fake_mesh(4) as mesh:
        model = planned(reduced_model(name, 4).build(), mesh, name, sequence_parallel=True)
        with CollectiveCounter() as counter, pytest.raises(ValueError, match=r"10.*tp=4.*12"):
            model(**inputs)
        # Image features need the embeddings complete before anything is split.
        assert counter.counts == ({"all_reduce": 1} if name == "gemma3" else {})
        inputs = {key: value[:, :8] for key, value in reduced_model(name, 4).inputs().items()}
        model(**inputs).loss.backward()  # a refused call leaves the model usable


def resized(name: str, tp: int, vocabulary: int, tied: bool):
    """The reduced model with another vocabulary."""
    config = copy.deepcopy(reduced_model(name, tp).config)
    config.vocab_size = vocabulary
    config.tie_word_embeddings = tied
    for special in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, special, None)
    small = make_reduced_model(find_any(config), tp=tp)

    def build():
        model = small.build()
        model.resize_token_embeddings(vocabulary, mean_resizing=False)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
                embedding.weight.copy_(torch.randn(embedding.weight.shape, generator=generator))
        return model

    ids = torch.arange(2 * small.seq_len).reshape(2, -1).mul(5).remainder(vocabulary)
    return build, {"input_ids": ids, "labels": ids.roll(-1, 1)}


# At tp 4: chunks of 17, 17, 17 and 16 rows; of 4, 4, 4 and 2. (A single row on the last rank is for real processes,
# tests/test_processes_calls.py: the simulation cannot say whether "the" number of rows is 1.)
@pytest.mark.parametrize(("tp", "vocabulary"), [(2, 67), (4, 67), (4, 14)])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("logits", ["replicated", "sharded"])
def test_vocabularies_that_tp_does_not_divide(tp, vocabulary, tied, logits):
    build, inputs = resized("llama", tp, vocabulary, tied)
    options = {"sequence_parallel": tied, "logits": logits}
    assert_equal(Case(build, inputs, "llama", tp, options=options).rows())


def test_embedding_head_and_loss_cut_the_vocabulary_by_one_formula(monkeypatch):
    """With floor-chunks in the look-up, tokens at the borders would be looked up in another rank's rows."""
    build, inputs = resized("llama", 4, 67, False)
    monkeypatch.setattr(vocabulary, "chunk_size", lambda size, ranks: size // ranks)
    assert Case(build, inputs, "llama", 4).wrong()["logits"] > 0.1


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("padding", [0, 3, 40])
def test_padding_idx_is_a_row_of_the_whole_table(sp, tp, padding, monkeypatch):
    def pad(model):
        model.get_input_embeddings().padding_idx = padding

    inputs = dict(reduced_model("llama", tp).inputs())
    inputs["input_ids"] = inputs["input_ids"].clone()
    inputs["input_ids"][0, 1::4] = padding
    padded = case("llama", tp, sp=sp, inputs=inputs, prepare=pad)
    rows = padded.rows()
    assert_equal(rows)
    model = padded.model(torch.float32)
    model(**inputs).loss.backward()
    assert not model.model.embed_tokens.weight.grad[padding].any(), "the unsharded row learns nothing"
    if padding == 3 and not sp:
        # Left to the local table, row 3 of *every* rank would learn nothing, and where tp > 1 other ids meet it.
        monkeypatch.setattr(
            vocabulary.VocabularyLookup, "__call__", _without_exchange(vocabulary.VocabularyLookup.__call__)
        )
        assert "model.embed_tokens.weight" in padded.wrong()


def _without_exchange(real):
    def call(self, forward, module, args, kwargs):
        padding = module.padding_idx

        def left_to_the_table(ids):
            module.padding_idx = padding
            return forward(ids)

        return real(self, left_to_the_table, module, args, kwargs)

    return call
