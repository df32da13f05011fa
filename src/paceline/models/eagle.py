"""EAGLE: one decoder layer that continues the hidden states of a target model, with a head over few tokens.

Source: Li et al. 2024 (EAGLE, 2401.15077), section 3; Li et al. 2025 (EAGLE-3, 2503.01840) for norms of both inputs;
Zhao et al. 2025 (FR-Spec, 2502.14856) and Goel et al. 2025 (VocabTrim, 2506.22694) for the head over frequent tokens.

Notation
    f  features of a row: the target's residual stream after its last layer, at the token before the row's own; for a
       token that was drafted after a drafted one, this graph's own residual stream there
    e  embedding of the row's token
    x  the residual stream here, x = W_e e + W_f f before the layer; after it, an estimate of the target's own at the
       row's token

Departures: the layer normalises its input, as every Llama layer does; EAGLE's has no first norm. f is taken before the
target's final norm. The norms of e and f (``input_norms``) may be left out, and then this is EAGLE; with them it is
EAGLE-3 but for its three features, from three layers, of which this has one.

Checked by: tests/native/test_eagle_nodes.py, tests/unit/test_ops_reference.py.
"""

from __future__ import annotations

from paceline.config import ModelConfig
from paceline.models.family import Family
from paceline.models.llama import attention_block, feed_forward_block
from paceline.ops.builder import GraphBuilder
from paceline.ops.graph import Graph


def build(config: ModelConfig) -> Graph:
    """The graph of a step, from tokens and features to logits of the trimmed vocabulary."""
    g = GraphBuilder()
    # e is used up before f is normed: values of one role share a buffer in a lowered program.
    e = g.embed("token_embd.weight", vocab_size=config.vocab_size, width=config.hidden_size)
    if config.input_norms:
        e = g.rms_norm(e, "embed_norm.weight", eps=config.rms_norm_eps)
    (from_e,) = g.linear(e, [("fc_embed.weight", config.hidden_size)])
    f = g.features(config.hidden_size)
    if config.input_norms:
        f = g.rms_norm(f, "feature_norm.weight", eps=config.rms_norm_eps)
    (from_f,) = g.linear(f, [("fc_feature.weight", config.hidden_size)])
    x = g.add(from_e, from_f)
    for layer in range(config.num_layers):
        x = g.add(x, attention_block(g, x, config, layer))
        x = g.add(x, feed_forward_block(g, x, config, layer))
    x = g.select_outputs(x)
    x = g.rms_norm(x, "output_norm.weight", eps=config.rms_norm_eps)
    (logits,) = g.linear(x, [("output.weight", config.num_logits)], role="head")
    return g.finish(logits)


FAMILY = Family("eagle", build, {}, None)
"""Its files are read by ``weights.eagle_checkpoint``: they say only how a head differs from its target."""
