"""Styles of look-up tables (Megatron-LM's vocabulary-parallel embedding, arXiv 1909.08053)."""

from shardplan.core.layout import I, P, V

from .style_record import EMBEDDING, Lookup, ParameterStyle, Style, Trial

STYLES = (
    Style(
        name="embedding_rowwise",
        summary="Split the rows (the vocabulary) in ceil-chunks; the looked-up vectors are all-reduced.",
        kinds=EMBEDDING,
        weight=ParameterStyle("in", "V"),
        output_source=P,
        output_destination=I,
        lookup=Lookup(),
        comment="Each rank holds a part of the vocabulary's rows.",
        trials=(Trial(on=EMBEDDING, whole=1, sliced=3),),
    ),
    Style(
        name="embedding_rowwise_seq",
        summary="As embedding_rowwise, but the vectors stay partial sums, at full length, until the `split_seq_input` "
        "block input that follows reduces and splits them at once.",
        kinds=EMBEDDING,
        weight=ParameterStyle("in", "V"),
        output_source=P,
        lookup=Lookup(until_block_input=True),
        comment="The look-up stays a partial sum at full length; the first block's input reduces and splits it at once.",
        trials=(Trial(on=EMBEDDING, sliced=1),),
        source="arXiv 2205.05198",
    ),
    Style(
        name="embedding_replicated_seq",
        summary="A whole table (learned positions) whose vectors are added to those of an embedding_rowwise_seq: each "
        "rank adds 1/tp of them to the partial sum.",
        kinds=EMBEDDING,
        output_source=I,
        lookup=Lookup(until_block_input=True),
        trials=(Trial(on=EMBEDDING, sliced=2),),
    ),
    Style(
        name="embedding_colwise",
        summary="Split the features of each row; the looked-up vectors are gathered.",
        kinds=EMBEDDING,
        weight=ParameterStyle("out", "V"),
        output_source=V(-1),
        output_destination=I,
        lookup=Lookup(),
        trials=(Trial(on=EMBEDDING, whole=2, sliced=4),),
    ),
)
