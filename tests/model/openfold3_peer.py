"""OpenFold3's configuration with the sizes of ours; imported only where the peer is installed."""

from __future__ import annotations

import copy
from typing import Any

from openfold3.projects.of3_all_atom.config.model_config import model_config

from tpf.config import ModelConfig


def peer_config(c: ModelConfig) -> Any:  # noqa: ANN401
    """Return OpenFold3's default configuration with the sizes of ``c``."""
    config = copy.deepcopy(model_config)
    a = config.architecture
    channels = {"c_s": c.c_s, "c_z": c.c_z, "c_m": c.c_m, "c_t": c.c_t, "c_s_input": c.c_s_input}
    atoms = {
        "c_atom": c.c_atom,
        "c_atom_pair": c.c_atom_pair,
        "no_blocks": c.atom_blocks,
        "no_heads": c.atom_heads,
        "c_hidden": c.c_atom // c.atom_heads,
    }
    triangle = {
        "c_hidden_mul": c.c_hidden_mul,
        "c_hidden_pair_att": c.tri_dim,
        "no_heads_pair": c.tri_heads,
    }
    single = {
        "c_hidden_pair_bias": c.c_s // c.single_heads,
        "no_heads_pair_bias": c.single_heads,
    }
    module, stack = a.diffusion_module, a.template.template_pair_stack
    heads, msa = a.heads, a.msa
    nodes: list[tuple[Any, dict[str, int]]] = [
        (a.shared, {}),
        (a.input_embedder, {}),
        (a.input_embedder.atom_attn_enc, atoms | {"c_token": c.c_token}),
        (module.atom_attn_enc, atoms | {"c_token": c.c_token_diffusion}),
        (module.atom_attn_dec, atoms | {"c_token": c.c_token_diffusion}),
        (module.diffusion_conditioning, {"c_fourier_emb": c.fourier_dim}),
        (module.diffusion_module, {"c_token": c.c_token_diffusion}),
        (
            module.diffusion_transformer,
            {
                "c_a": c.c_token_diffusion,
                "no_blocks": c.diffusion_blocks,
                "no_heads": c.diffusion_heads,
                "c_hidden": c.c_token_diffusion // c.diffusion_heads,
            },
        ),
        *((heads[name], {}) for name in ("distogram", "pae", "pde", "lddt")),
        (heads.experimentally_resolved, {}),
        (heads.pairformer_embedding, {}),
        (
            heads.pairformer_embedding.pairformer,
            triangle | single | {"no_blocks": c.confidence_blocks},
        ),
        (a.pairformer, triangle | single | {"no_blocks": c.pairformer_blocks}),
        (
            msa.msa_module,
            triangle
            | {
                "no_blocks": c.msa_blocks,
                "no_heads_msa": c.msa_heads,
                "c_hidden_msa_att": c.msa_head_dim,
                "c_hidden_opm": c.c_opm,
            },
        ),
        (msa.msa_module_embedder, {}),
        (a.template, {}),
        (a.template.template_pair_embedder, {"c_in": c.c_z, "c_out": c.c_t}),
        (
            stack,
            {
                "c_hidden_tri_att": c.template_dim,
                "c_hidden_tri_mul": c.c_t,
                "no_blocks": c.template_blocks,
                "no_heads": c.template_heads,
            },
        ),
    ]
    for node, sizes in nodes:
        shared = {name: value for name, value in channels.items() if name in node}
        node.update(shared | sizes)
    config.settings.memory.eval.use_triton_triangle_kernels = False
    return config
