"""Plans by hand for models of `own_structures` and `own_streams`."""

from __future__ import annotations

from functools import partial

from tests import own_streams as streams
from tests import own_structures as structures

from .hand import attention, decoder, own

SOFTMAX = "attn: {style: input_with_grad_allreduce, shares: num_heads}\nattn.{q,k,v}: colwise\nattn.o: rowwise\n"

KNOWN = {
    "einsum by heads": attention(
        structures.EinsumAttention,
        """
        attention: moe_tp_experts
        attention.{q,k,v}: colwise
        attention.o: headwise
        """,
    ),
    "fused keys and values": attention(
        structures.FusedKeyValues,
        """
        attention: {style: input_with_grad_allreduce, shares: num_heads}
        attention.q: colwise
        attention.kv: packed_colwise
        attention.proj: rowwise
        """,
    ),
    "multi-query, chunked": attention(
        structures.MultiQuery,
        """
        attention: input_with_grad_allreduce
        attention.q: colwise
        attention.kv: replicated_with_grad_allreduce
        attention.out: rowwise
        """,
    ),
    "grouped and fused": attention(
        structures.GroupedFused,
        """
        attention: {style: input_with_grad_allreduce, shares: [n_heads, n_kv]}
        attention.wqkv: {style: packed_colwise, packed: [32, 16, 16]}
        attention.wo: rowwise
        """,
    ),
    "fused by heads (BLOOM)": attention(
        structures.Interleaved,
        """
        attention: {style: input_with_grad_allreduce, shares: heads}
        attention.query_key_value: colwise
        attention.dense: rowwise
        """,
    ),
    "norms and gates of heads": attention(
        structures.NormedHeads,
        """
        attention: input_with_grad_allreduce
        attention.qkv: {style: packed_colwise, packed: 3}
        attention.gate: colwise
        attention.{q,k}_norm: replicated_with_grad_allreduce
        attention.temperature: headwise
        attention.out: rowwise
        """,
    ),
    "ALiBi in a buffer": attention(
        structures.Slopes,
        """
        attention: {style: input_with_grad_allreduce, shares: {slopes: {dim: 0}}}
        attention.{q,k,v}: colwise
        attention.o: rowwise
        """,
    ),
    "torch's attention": attention(
        structures.Standard,
        """
        attention.attn:
          style: input_with_grad_allreduce
          arguments: {key: input_with_grad_allreduce, value: input_with_grad_allreduce}
          output: all_reduce
        attention.attn.in_proj_{weight,bias}: {style: packed_colwise, packed: 3}
        attention.attn.out_proj.weight: rowwise
        attention.attn.out_proj.bias: replicated_divided
        """,
    ),
    "a width that is read (nanoGPT)": attention(
        structures.NormGPT,
        """
        attention.c_attn: colwise_gather_output
        attention.c_proj: rowwise_split_input
        """,
    ),
    "norms after sums (BERT)": decoder(
        structures.PostNorm,
        """
        "{query,key,value,intermediate}": colwise
        "{dense,output}": rowwise
        """,
    ),
    "parallel, gated": decoder(
        structures.GptJ,
        """
        norm: output_with_grad_allreduce
        "": {style: replicate, sum_outputs: [attention.out, mlp.w3]}
        attention: {style: replicate, shares: heads}
        attention.qkv: {style: packed_colwise, packed: 3}
        attention.out: rowwise
        mlp.w12: packed_colwise
        mlp.w3: rowwise
        """,
    ),
    "buckets of positions (T5)": own(
        structures.Buckets,
        """
        embed: embedding_rowwise
        blocks.*.{q,k,v}: colwise
        blocks.*.o: rowwise
        blocks.*.norm1: output_with_grad_allreduce
        blocks.0.bias: local_params
        blocks.0.bias.weight: colwise
        blocks.*.mlp: input_with_grad_allreduce
        blocks.*.mlp.up: colwise
        blocks.*.mlp.down: rowwise
        """,
    ),
    "biases of all heads, given": own(
        partial(streams.Slopes, True),
        """
        embed: embedding_rowwise
        blocks.*.attn:
          style: input_with_grad_allreduce
          shares: [num_heads, {bias: {dim: 0, heads: 4}}]
        blocks.*.attn.{q,k,v}: colwise
        blocks.*.attn.o: rowwise
        blocks.*.mlp: input_with_grad_allreduce
        blocks.*.mlp.up: colwise
        blocks.*.mlp.down: rowwise
        head: colwise_gather_output
        """,
    ),
    "two attentions in lists": decoder(
        streams.Twice,
        """
        attns.*: {style: input_with_grad_allreduce, shares: num_heads}
        attns.*.{q,k,v}: colwise
        attns.*.o: rowwise
        mlps.*: input_with_grad_allreduce
        mlps.*.up: colwise
        mlps.*.down: rowwise
        """,
    ),
    "experts and a shared one, normed": decoder(
        partial(streams.Mixed, streams.Softmax, streams.Closing),
        SOFTMAX,
        """
        "": {style: replicate, sum_outputs: [mlp.experts, mlp.shared.down]}
        mlp.experts: moe_tp_experts
        mlp.experts.up: colwise
        mlp.experts.down: rowwise
        mlp.shared.up: colwise
        mlp.shared.down: rowwise
        """,
    ),
    "retention and softmax": own(
        streams.Hybrid,
        """
        embed: embedding_rowwise
        blocks.0.attn: {style: input_with_grad_allreduce, shares: [num_heads, {decay: {dim: 0}}]}
        blocks.1.attn: {style: input_with_grad_allreduce, shares: num_heads}
        blocks.*.attn.{q,k,v}: colwise
        blocks.0.attn.gate: colwise
        blocks.*.attn.o: rowwise
        blocks.*.mlp: input_with_grad_allreduce
        blocks.*.mlp.up: colwise
        blocks.*.mlp.down: rowwise
        head: colwise_gather_output
        """,
    ),
}
