"""What users take from a model: losses, logits, hidden states; base models, other heads; evaluation."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from shardplan.runtime.apply import without_sequence_parallel
from shardplan.runtime.parallel.outputs import HiddenStates
from shardplan.runtime.parallel.regime import LeftBehind, memory_of
from shardplan.runtime.parallel.vocabulary_probabilities import IGNORE_INDEX
from shardplan.runtime.training import causal_lm_loss, vocabulary_parallel_nll
from tests.proofs import PLANS, assert_equal, case, fake_mesh, on_ranks, ranked, reduced_model, sharded, unsharded

BOTH = pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
FEW = ("llama", "gemma3_text", "gpt2")


def own_loss(model, inputs):
    """A loss of the user's own on whole logits, labels kept out of the model."""
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    picked = logits[:, :-1].float().log_softmax(-1)
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    return {"loss": loss + picked.exp().square().sum(-1).mean(), "logits": logits}


@BOTH
@pytest.mark.parametrize("name", FEW)
def test_an_own_loss_on_whole_logits(name, sp):
    assert_equal(case(name, sp=sp, logits="replicated", call=own_loss).rows())


def shifted(labels):
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]


def split_loss(model, inputs):
    """The library's loss on split logits; torch's on the unsharded model's."""
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    if isinstance(logits, DTensor):
        return {"loss": causal_lm_loss(logits, labels), "logits": logits}
    return {"loss": cross_entropy(logits.flatten(0, 1), shifted(labels).flatten()), "logits": logits}


def per_token(model, inputs):
    """A loss that weighs the tokens' negative log-likelihoods itself."""
    labels = shifted(inputs.pop("labels"))
    logits = model(**inputs).logits
    if isinstance(logits, DTensor):
        nll = vocabulary_parallel_nll(logits, labels)
    else:
        nll = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return {"loss": nll.square().mean(), "logits": logits, "nll": nll}


@BOTH
@pytest.mark.parametrize("call", [split_loss, per_token])
@pytest.mark.parametrize("name", FEW)
def test_an_own_loss_on_split_logits(name, call, sp):
    rows = case(name, sp=sp, logits="sharded", call=call).rows_in(torch.float32)  # the loss is float32 by itself
    assert_equal(rows)


@BOTH
def test_the_number_of_items_that_a_trainer_counts(sp):
    """Gradient accumulation as trainers do it: the sum over the number of tokens of all micro-batches."""

    def counted(model, inputs):
        output = model(**inputs, num_items_in_batch=100)
        return {"loss": output.loss, "logits": output.logits}

    for logits in ("replicated", "sharded"):
        assert_equal(case("llama", sp=sp, logits=logits, call=counted).rows())


def test_split_logits_are_a_dtensor_of_the_full_shape():
    small = reduced_model("llama", 2)
    inputs = small.inputs()
    with on_ranks(model := small.build(), "llama", 2, logits="sharded"):
        logits = model(**ranked(inputs, 2)).logits
        assert isinstance(logits, DTensor)
        assert logits.shape == (*small.inputs()["input_ids"].shape, small.config.vocab_size)
        with pytest.raises(TypeError, match="DTensor"):
            vocabulary_parallel_nll(logits.to_local(), ranked(inputs, 2)["labels"])


def hidden_states(model, inputs):
    output = model(**inputs, output_hidden_states=True)
    states = output.hidden_states
    picked = {f"hidden {i}": state for i, state in enumerate(states)}
    weights = [1.0 + i for i in range(len(states))]
    extra = sum((state.float().square().mean() * w for state, w in zip(states, weights, strict=True)))
    return {"loss": output.loss + extra, "logits": output.logits, **picked}


@BOTH
@pytest.mark.parametrize("name", PLANS)
def test_hidden_states_are_whole_and_so_are_gradients_through_them(name, sp):
    """The first (the embeddings), the inner ones and the last (after the final norm), each read by the loss."""
    assert_equal(case(name, sp=sp, call=hidden_states).rows())


@pytest.mark.parametrize(
    ("name", "cls"), [("bart", "BartForConditionalGeneration"), ("t5", "T5ForConditionalGeneration")]
)
def test_hidden_states_of_an_encoder_have_its_own_length(name, cls):
    """Half as many labels as tokens: on two ranks, a slice of the encoder's is as long as a whole state of the decoder."""

    def of_both(model, inputs):
        ids = inputs["input_ids"]
        half = ids.chunk(2, 1)[0].contiguous()
        output = model(input_ids=ids, decoder_input_ids=half, labels=half, output_hidden_states=True)
        states = [*output.encoder_hidden_states, *output.decoder_hidden_states]
        extra = sum(state.float().square().mean() * (1.0 + i) for i, state in enumerate(states))
        picked = {f"hidden {i}": state for i, state in enumerate(states)}
        return {"loss": output.loss + extra, "logits": output.logits, **picked}

    assert_equal(case(name, sp=True, classes=cls, call=of_both).rows())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_hidden_states_in_a_tuple_are_whole_too(name):
    def in_a_tuple(model, inputs):
        loss, logits, *_, states = model(**inputs, use_cache=False, output_hidden_states=True, return_dict=False)
        extra = sum(state.float().square().mean() * (1.0 + i) for i, state in enumerate(states))
        return {"loss": loss + extra, "logits": logits, **{f"hidden {i}": state for i, state in enumerate(states)}}

    assert_equal(case(name, sp=True, call=in_a_tuple).rows())


def test_a_value_that_was_given_on_as_a_view_is_the_same_hidden_state() -> None:
    """As FSDP2 gives a unit its arguments. Its gradient is complete, though that of the value that was gathered last is not."""
    embedded, last = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    left = LeftBehind(gathered=[(memory_of(embedded.view_as(embedded)), False), (memory_of(last), True)])
    assert not left.is_partial(embedded) and left.is_partial(last.view(2, 4, 2, 4)) and left.is_partial(last + 1)


@BOTH
@pytest.mark.parametrize("keep", [1, 5])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_logits_to_keep(name, keep, sp):
    def last(model, inputs):
        inputs.pop("labels")
        logits = model(**inputs, logits_to_keep=keep).logits
        assert logits.shape[1] == keep
        return {"loss": logits.float().logsumexp(-1).mean(), "logits": logits}

    assert_equal(case(name, sp=sp, call=last).rows())


@BOTH
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_evaluation_without_gradients(name, sp):
    def evaluate(model, inputs):
        model.eval()
        with torch.no_grad():
            output = model(**inputs)
        return {"loss": output.loss, "logits": output.logits}

    assert_equal(case(name, sp=sp, call=evaluate).rows())


@BOTH
def test_training_goes_on_after_evaluation(sp):
    def both(model, inputs):
        with torch.no_grad():
            model.eval()(**inputs)
        output = model.train()(**inputs)
        return {"loss": output.loss, "logits": output.logits}

    assert_equal(case("qwen3", sp=sp, call=both).rows())


def test_without_sequence_parallelism_any_length_runs_in_a_sequence_parallel_model():
    """In one model, one after the other: training with sequence parallelism, evaluation without, and back."""

    def mixed(model, inputs):
        seven = {name: value[:, :7] for name, value in inputs.items()}
        manager = without_sequence_parallel(model) if hasattr(model.lm_head.weight, "placements") else None
        if manager is None:
            short = model(**seven)
        else:
            with pytest.raises(ValueError, match=r"7.*tp=2.*8"):
                model(**seven)
            with manager:
                short = model(**seven)
        long = model(**inputs)
        return {"loss": long.loss, "logits": long.logits, "short": short.logits.detach()}

    for name in ("llama", "gpt2"):
        assert_equal(case(name, sp=True, call=mixed).rows())


def test_gradients_without_sequence_parallelism_are_those_of_tensor_parallelism():
    def inside(model, inputs):
        if not hasattr(model.lm_head.weight, "placements"):
            output = model(**inputs)
            output.loss.backward()
        else:
            with without_sequence_parallel(model):
                output = model(**inputs)
                output.loss.backward()
        return {"loss": output.loss.detach(), "logits": output.logits}

    for name in ("qwen3", "mixtral", "gpt2"):
        assert_equal(case(name, sp=True, call=inside).rows())


WHOLE_ON_SLICES = {
    "version": "1",
    "name": "whole-on-slices",
    "extends": "llama",
    "sequence_parallel": {
        "model.layers.*.mlp": "none",
        "model.layers.*.mlp.{gate,up,down}_proj": "sequence_parallel",
    },
}
SPLIT_ON_SLICES = {
    "version": "1",
    "name": "split-on-slices",
    "extends": "llama",
    "tensor_parallel": {"model.layers.*.mlp": "none", "model.layers.*.mlp.{gate,up,down}_proj": "replicate"},
    "sequence_parallel": {
        "model.layers.*.mlp": "gather_seq_input",
        "model.layers.*.mlp.{gate,up}_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise_seq",
    },
}


@pytest.mark.parametrize("plan", [WHOLE_ON_SLICES, SPLIT_ON_SLICES], ids=["whole", "split"])
def test_what_is_stored_otherwise_with_sequence_parallelism(plan):
    """Matrices that one variant splits and the other does not are cut or gathered where they are read."""

    def both(model, inputs):
        if not hasattr(model.lm_head.weight, "placements"):
            output, long = model(**inputs), model(**inputs)
            (output.loss + long.loss).backward()
        else:
            with without_sequence_parallel(model):
                output = model(**inputs)
                output.loss.backward()
            long = model(**inputs)
            long.loss.backward()
        return {"loss": output.loss.detach(), "logits": output.logits, "long": long.logits}

    assert_equal(case("llama", sp=True, plan=plan, call=both).rows())


def test_packed_parameters_that_are_stored_otherwise_are_refused():
    """Before anything is computed: the rows of a whole copy are in another order."""
    plan = {
        "version": "1",
        "name": "packed-on-slices",
        "extends": "phi3",
        "sequence_parallel": {
            "model.layers.*.mlp": "none",
            "model.layers.*.mlp.{gate_up,down}_proj": "sequence_parallel",
        },
    }
    with on_ranks(reduced_model("phi3", 2).build(), plan, 2, sequence_parallel=True) as model:
        with pytest.raises(ValueError, match=r"stores model\.layers\.0\.mlp\.gate_up_proj\.weight differently"):
            with without_sequence_parallel(model):
                raise AssertionError("it runs")


def last_state(model, inputs):
    inputs.pop("labels", None)
    state = model(**inputs).last_hidden_state
    return {"state": state, "loss": state.float().square().mean() + state[:, -1].float().sigmoid().mean()}


@BOTH
@pytest.mark.parametrize(("name", "base"), [("llama", "LlamaModel"), ("qwen3", "Qwen3Model"), ("gpt2", "GPT2Model")])
def test_a_base_model_without_a_head(name, base, sp):
    """The same plan: the head's rule is optional, the base model's prefix is left out."""
    assert_equal(case(name, sp=sp, classes=base, call=last_state).rows())


@BOTH
@pytest.mark.parametrize(
    ("name", "classes"),
    [("llama", "LlamaForSequenceClassification"), ("llama", "LlamaForTokenClassification"),
     ("gpt2", "GPT2ForSequenceClassification")],
)  # fmt: skip
def test_classification_heads_stay_whole(name, classes, sp):
    assert_equal(case(name, sp=sp, classes=classes).rows())


@BOTH
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_activation_checkpointing_changes_nothing(name, sp):
    assert_equal(case(name, sp=sp, activation_checkpointing={"mode": "full"}).rows())


@BOTH
def test_transformers_own_checkpointing_changes_nothing(sp):
    def enable(model):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    for name in ("llama", "gpt2"):
        assert_equal(case(name, sp=sp, prepare=enable).rows())


@BOTH
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "phi3", "gpt2"])
def test_bfloat16(name, sp):
    """Against float32, the sharded model's error is at most twice the unsharded bfloat16 model's: in the logits, and
    in all gradients together (a loss is one number, whose error is a matter of luck)."""
    small = reduced_model(name, 2)
    inputs = small.inputs()
    exact = unsharded(small.build(), inputs)
    plain = unsharded(small.build().bfloat16(), inputs)
    split = sharded(lambda: small.build().bfloat16(), inputs, name, 2, sequence_parallel=sp)
    (_, first), *others = split.values["logits"]
    assert first.dtype == plain.values["logits"].dtype
    assert all(first.equal(other) for _, other in others), "the ranks agree"
    logits = exact.values["logits"]
    assert (first.float() - logits).abs().max() <= 2 * (plain.values["logits"].float() - logits).abs().max()
    assert split.gradients.keys() == exact.gradients.keys()
    mine = {key: values[0][1] for key, values in split.gradients.items()}
    assert all(g.dtype == torch.bfloat16 for g in mine.values())
    assert total_error(mine, exact.gradients) <= 2 * total_error(plain.gradients, exact.gradients)


def total_error(gradients, exact) -> float:
    """Each gradient's mean square error relative to its size, averaged over the parameters, and the root of it."""
    errors = [(gradients[k].float() - g).square().mean() / g.square().mean() for k, g in exact.items()]
    return torch.stack(errors).mean().sqrt().item()


def test_hidden_states_of_each_tower_are_gathered() -> None:
    """As BridgeTower returns them; what no split layer returned is left alone."""
    split, other = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    output = BaseModelOutput(hidden_states=((split, other), (split,)))
    with fake_mesh(2) as mesh:
        HiddenStates(LeftBehind([(split, frozenset((8,)))]), 1, mesh["tp"]).of_model(output)
    (first, same), (second,) = output.hidden_states
    assert first.shape == second.shape == (2, 8, 8) and same is other


def test_hidden_states_of_an_output_in_the_output_are_gathered() -> None:
    """As CLIP returns those of its text and of its picture."""
    split = torch.randn(2, 4, 8)
    output = ModelOutput(text_model_output=BaseModelOutput(hidden_states=(split,)), logits=split)
    with fake_mesh(2) as mesh:
        HiddenStates(LeftBehind([(split, frozenset((8,)))]), 1, mesh["tp"]).of_model(output)
    assert output.text_model_output.hidden_states[0].shape == (2, 8, 8) and output.logits is split


def test_the_embeddings_that_a_hook_saw_as_a_sum_are_added_up() -> None:
    state = torch.randn(2, 8, 8)
    output = BaseModelOutput(hidden_states=(state,))
    with fake_mesh(2) as mesh:
        HiddenStates(LeftBehind(lengths={8}, sums=[memory_of(state)]), 1, mesh["tp"]).of_model(output)
    assert output.hidden_states[0].shape == state.shape and output.hidden_states[0] is not state


def test_hidden_states_of_layers_over_two_lengths() -> None:
    """VideoPrism's patches and frames; PE Audio returns its last state without the first token, which is no slice."""
    lengths = frozenset((8, 6))
    states = tuple(torch.randn(2, length, 8) for length in (4, 3, 7))
    with fake_mesh(2) as mesh:
        left = LeftBehind([(state, lengths) for state in states])
        output = HiddenStates(left, 1, mesh["tp"]).of_model(BaseModelOutput(hidden_states=states))
        assert [state.shape[1] for state in output.hidden_states] == [8, 6, 7]
        left = LeftBehind([(states[0], frozenset((8, 4)))])
        with pytest.raises(RuntimeError, match="length 4 may be whole, or slices of 8"):
            HiddenStates(left, 1, mesh["tp"]).of_model(BaseModelOutput(hidden_states=states[:1]))
