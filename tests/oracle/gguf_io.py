"""Writing small models as GGUF files, with the standard library and numpy only: the layout of spec/model.md 5.1.

The names are written here a second time on purpose: the C++ reader is checked against this file, not against its own
table. Types: F32 (0) and, for matrices, F16 (1).
"""
import struct

import numpy as np

NAMES = {
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight", "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight", "self_attn.q_conv1d.weight": "ssm_conv1d_q.weight",
    "self_attn.k_conv1d.weight": "ssm_conv1d_k.weight", "self_attn.v_conv1d.weight": "ssm_conv1d_v.weight",
    "self_attn.f_a_proj.weight": "ssm_f_a.weight", "self_attn.f_b_proj.weight": "ssm_f_b.weight",
    "self_attn.b_proj.weight": "ssm_beta.weight", "self_attn.dt_bias": "ssm_dt.bias",
    "self_attn.g_a_proj.weight": "ssm_g_a.weight", "self_attn.g_b_proj.weight": "ssm_g_b.weight",
    "self_attn.o_norm.weight": "ssm_norm.weight", "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight", "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight", "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight", "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight", "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight", "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight", "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "block_sparse_moe.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "block_sparse_moe.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "block_sparse_moe.routed_expert_down_proj.weight": "ffn_routed_down.weight",
    "block_sparse_moe.routed_expert_up_proj.weight": "ffn_routed_up.weight",
    "block_sparse_moe.routed_expert_norm.weight": "ffn_routed_norm.weight",
}  # fmt: skip
ENDS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight"}  # fmt: skip
SCORES = {"self_attention_res": "attn_res_score", "mlp_res": "ffn_res_score"}
STACKS = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}


def convert(keys, weights):
    """{HF name: array} -> {GGUF name: array whose shape reversed is ne}."""
    full = keys["linear_attn_config"]["full_attn_layers"]
    heads, nope, value = keys["num_attention_heads"], keys["qk_nope_head_dim"], keys["v_head_dim"]
    out, stacks = {}, {}
    for name, array in weights.items():
        name = name.replace("language_model.", "")
        if name in ENDS:
            out[ENDS[name]] = array
            continue
        if name.startswith("model.output_attn_res"):
            out["output_res_score.weight"] = out.get("output_res_score.weight", 1) * array.reshape(-1)
            continue
        _, _, layer, rest = name.split(".", 3)
        block, parts = f"blk.{layer}.", rest.split(".")
        if rest == "self_attn.A_log":
            decay = -np.exp(np.float64(array))
            out[block + "ssm_a"] = decay if keys.get("attn_res_block_size") else decay.reshape(1, 1, heads, 1)
        elif rest == "self_attn.g_proj.weight":
            out[block + ("attn_gate.weight" if int(layer) + 1 in full else "ssm_g.weight")] = array
        elif rest == "self_attn.kv_b_proj.weight":
            both = array.reshape(heads, nope + value, -1)
            out[block + "attn_k_b.weight"] = both[:, :nope].transpose(0, 2, 1)
            out[block + "attn_v_b.weight"] = both[:, nope:]
        elif parts[0].rsplit("_", 1)[0] in SCORES:
            score = block + SCORES[parts[0].rsplit("_", 1)[0]] + ".weight"
            out[score] = out.get(score, 1) * array.reshape(-1)
        elif parts[1] == "experts":
            stacks.setdefault(block + STACKS[parts[3]] + ".weight", {})[int(parts[2])] = array
        elif rest.endswith("conv1d.weight"):
            out[block + NAMES[rest]] = array.reshape(1, array.shape[0], 1, 4)
        else:
            out[block + NAMES[rest]] = array
    out.update({name: np.stack([stack[i] for i in range(len(stack))]) for name, stack in stacks.items()})
    return out


def metadata(keys):
    """[(key, type, value)] with type u32, f32, bool, str or list."""
    k3, linear = bool(keys.get("attn_res_block_size")), keys["linear_attn_config"]
    arch = "kimi-k3" if k3 else "kimi-linear"
    full = [int(i + 1 in linear["full_attn_layers"]) for i in range(keys["num_hidden_layers"])]
    out = [
        ("vocab_size", "u32", keys["vocab_size"]), ("context_length", "u32", 4096),
        ("embedding_length", "u32", keys["hidden_size"]), ("block_count", "u32", keys["num_hidden_layers"]),
        ("feed_forward_length", "u32", keys["intermediate_size"]),
        ("attention.head_count", "u32", keys["num_attention_heads"]), ("attention.head_count_kv", "list", full),
        ("attention.layer_norm_rms_epsilon", "f32", keys["rms_norm_eps"]), ("ssm.conv_kernel", "u32", 4),
        ("kda.head_dim", "u32", linear["head_dim"]), ("attention.kv_lora_rank", "u32", keys["kv_lora_rank"]),
        ("rope.dimension_count", "u32", keys["qk_rope_head_dim"]),
        ("attention.key_length", "u32", keys["kv_lora_rank"] + keys["qk_rope_head_dim"]),
        ("attention.key_length_mla", "u32", keys["qk_nope_head_dim"] + keys["qk_rope_head_dim"]),
        ("attention.value_length_mla", "u32", keys["v_head_dim"]), ("expert_count", "u32", keys["num_experts"]),
        ("expert_used_count", "u32", keys["num_experts_per_token"]),
        ("expert_feed_forward_length", "u32", keys["moe_intermediate_size"]),
        ("expert_shared_count", "u32", keys["num_shared_experts"]),
        ("leading_dense_block_count", "u32", keys["first_k_dense_replace"]),
        ("expert_weights_scale", "f32", keys["routed_scaling_factor"]), ("expert_gating_func", "u32", 2),
    ]  # fmt: skip
    if keys.get("q_lora_rank"):
        out.append(("attention.q_lora_rank", "u32", keys["q_lora_rank"]))
    if k3:
        out += [
            ("kda.gate_lower_bound", "f32", linear["gate_lower_bound"]), ("expert_weights_norm", "bool", True),
            ("expert_latent_length", "u32", keys["routed_expert_hidden_size"]),
            ("attn_res.block_size", "u32", keys["attn_res_block_size"]),
            ("activation.situ_beta", "f32", keys["activation_situ_beta"]),
            ("activation.situ_linear_beta", "f32", keys["activation_situ_linear_beta"]),
            ("attention.value_length", "u32", keys["kv_lora_rank"]),
        ]  # fmt: skip
    dsa = keys.get("dsa_config")
    if dsa:
        out += [
            ("attention.indexer.head_count", "u32", dsa["index_n_heads"]),
            ("attention.indexer.key_length", "u32", dsa["index_head_dim"]),
            ("attention.indexer.top_k", "u32", dsa["index_topk"]), ("attention.indexer.types", "list", full),
            ("attention.layer_norm_epsilon", "f32", keys["rms_norm_eps"]),
        ]  # fmt: skip
    first = [("general.architecture", "str", arch), ("tokenizer.ggml.model", "str", "none")]
    return first + [(f"{arch}.{key}", kind, value) for key, kind, value in out]


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def write(path, keys, weights, half=lambda name: False):
    """Matrices for which half(name) holds are stored as F16; returns {GGUF name: what was stored, as float64}."""
    tensors, entries, stored = convert(keys, weights), metadata(keys), {}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
    for key, kind, value in entries:
        head += text(key)
        if kind == "list":
            head += struct.pack("<IIQ", 9, 4, len(value)) + struct.pack(f"<{len(value)}I", *value)
        else:
            code, pattern = {"u32": (4, "<I"), "f32": (6, "<f"), "bool": (7, "<?"), "str": (8, None)}[kind]
            head += struct.pack("<I", code) + (text(value) if pattern is None else struct.pack(pattern, value))
    data = b""
    for name, array in tensors.items():
        narrow = half(name) and array.ndim > 1
        array = np.ascontiguousarray(array, dtype="<f2" if narrow else "<f4")
        stored[name] = array.astype(np.float64)
        head += text(name) + struct.pack("<I", array.ndim)
        head += struct.pack(f"<{array.ndim}Q", *reversed(array.shape)) + struct.pack("<IQ", int(narrow), len(data))
        data += array.tobytes()
        data += b"\0" * (-len(data) % 32)
    with open(path, "wb") as file:
        file.write(head + b"\0" * (-len(head) % 32) + data)
    return stored


def restore(keys, shapes, tensors):
    """The inverse of convert: {GGUF name: flat array} -> {HF name: array of shapes[name]}. A residual score comes back as a
    norm of ones and itself."""
    full, heads = keys["linear_attn_config"]["full_attn_layers"], keys["num_attention_heads"]
    nope, value = keys["qk_nope_head_dim"], keys["v_head_dim"]
    out = {}
    for full_name, shape in shapes.items():
        name = full_name.replace("language_model.", "")
        get = lambda key, shape=shape: np.asarray(tensors[key], np.float64).reshape(shape)
        if name.endswith("_res_norm.weight"):
            out[full_name] = np.ones(shape)
        elif name in ENDS:
            out[full_name] = get(ENDS[name])
        elif name.startswith("model.output_attn_res"):
            out[full_name] = get("output_res_score.weight")
        else:
            _, _, layer, rest = name.split(".", 3)
            block, parts = f"blk.{layer}.", rest.split(".")
            if rest == "self_attn.A_log":
                out[full_name] = np.log(-get(block + "ssm_a"))
            elif rest == "self_attn.g_proj.weight":
                out[full_name] = get(block + ("attn_gate.weight" if int(layer) + 1 in full else "ssm_g.weight"))
            elif rest == "self_attn.kv_b_proj.weight":
                k = get(block + "attn_k_b.weight", (heads, -1, nope)).transpose(0, 2, 1)
                out[full_name] = np.concatenate([k, get(block + "attn_v_b.weight", (heads, value, -1))], 1).reshape(shape)
            elif parts[0].rsplit("_", 1)[0] in SCORES:
                out[full_name] = get(block + SCORES[parts[0].rsplit("_", 1)[0]] + ".weight")
            elif parts[1] == "experts":
                stack = get(block + STACKS[parts[3]] + ".weight", (keys["num_experts"], *shape))
                out[full_name] = stack[int(parts[2])]
            else:
                out[full_name] = get(block + NAMES[rest])
    return out
