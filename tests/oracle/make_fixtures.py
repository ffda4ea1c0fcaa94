"""Writes the fixtures that the C++ forward and backward are compared with.

    /usr/bin/python3 tests/oracle/make_fixtures.py [--out DIR] [case ...]

Each folder is a tiny model (config.json, model.safetensors) and what the float64 oracle says about it:
  tokens.txt          token ids, separated by blanks
  coeffs.npy          c[t], for the loss  sum_t c[t] * log p(token[t + 1] | token[0..t])
  logits.npy          [tokens, vocab]
  hidden.npy          [layers, tokens, hidden]: the residual stream (block residuals: the running prefix) after a layer
  grads.safetensors   d loss / d W of every tensor; selected sets are constants, so indexers and router biases get zeros
  adapter/            a LoRA adapter in PEFT form on every linear map; lora_logits.npy and lora_grads.safetensors
                      (A and B only, base frozen) are the same loss with it
  index_grads.safetensors  d index_loss / d W of the indexers (see Oracle.index_loss), over all layers and tokens
  meta.json           the losses, the smallest decision margins, and the error of the same oracle run in float32
Arrays are float32, rounded once from float64. Seeds are fixed; the same machine writes the same bytes.
"""
import argparse
import json
import os

import numpy as np
import torch

import safetensors_io
from torch_model import Oracle, adapter_targets, gradients, policy_loss, random_adapter, random_weights

HERE = os.path.dirname(os.path.abspath(__file__))
MARGIN = 1e-4  # the least gap of a discrete choice: float32 must make the same one
ADAPTER_RANK, ADAPTER_ALPHA = 3, 6


def layers(pattern):
    """'kkm' -> the two 1-indexed layer lists."""
    at = lambda letter: [i + 1 for i, x in enumerate(pattern) if x == letter]
    return {"kda_layers": at("k"), "full_attn_layers": at("m")}


def linear_config():
    return {
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "hidden_size": 40,
        "num_hidden_layers": 5, "num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 53,
        "intermediate_size": 52, "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 7, "num_experts_per_token": 2,
        "num_shared_experts": 1, "moe_intermediate_size": 20, "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True, "routed_scaling_factor": 2.446, "use_grouped_topk": True, "num_expert_group": 1,
        "topk_group": 1, "q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6,
        "v_head_dim": 10, "mla_use_nope": True, "num_nextn_predict_layers": 0,
        "linear_attn_config": {"head_dim": 16, "num_heads": 3, "short_conv_kernel_size": 4, **layers("kkmkm")},
    }  # fmt: skip


def k3_config():
    return {
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "hidden_size": 44,
        "num_hidden_layers": 5, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 67,
        "intermediate_size": 60, "hidden_act": "situ", "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 6, "num_experts_per_token": 2,
        "num_shared_experts": 2, "moe_intermediate_size": 18, "routed_expert_hidden_size": 28,
        "latent_moe_use_norm": True, "moe_router_activation_func": "sigmoid", "moe_renormalize": True,
        "routed_scaling_factor": 1.0, "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
        "q_lora_rank": 18, "kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 14,
        "mla_use_nope": True, "mla_use_output_gate": True, "attn_res_block_size": 2, "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "head_dim": 32, "num_heads": 3, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
            "gate_lower_bound": -5.0, **layers("kkmkm"),
        },
    }  # fmt: skip


def k31_config(pattern="kmmkm", topk=8, block=2):
    config = k3_config()
    linear = dict(config["linear_attn_config"], head_dim=16, **layers(pattern))
    config.update({"hidden_size": 40, "num_hidden_layers": len(pattern), "num_attention_heads": 3})
    config.update({"num_key_value_heads": 3, "linear_attn_config": linear, "attn_res_block_size": block})
    dsa = {"index_n_heads": 3, "index_head_dim": 12, "index_topk": topk, "layers": linear["full_attn_layers"]}
    config["dsa_config"] = dsa
    return config


CASES = {
    "linear": {"config": linear_config(), "seed": 11, "tokens": 45, "adapter": True},
    "k3": {"config": k3_config(), "seed": 12, "tokens": 45, "tied_experts": True},
    # The published files keep these tensors in float32 and pad A_log.
    "k3_bf16": {"config": k3_config(), "seed": 12, "tokens": 45, "bf16": True, "backward": False},
    "k31": {"config": k31_config(), "seed": 28, "tokens": 53, "adapter": True},
    # The top-k exceeds the context: must equal dense attention. The last residual block is cut short.
    "k31_wide": {"config": k31_config("kmk", topk=64, block=2), "seed": 14, "tokens": 45},
}


def in_bf16(name):
    return not name.endswith(("A_log", "dt_bias", "e_score_correction_bias", "conv1d.weight", "o_norm.weight"))


def case_weights(case):
    weights = random_weights(case["config"], case["seed"])
    if case.get("tied_experts"):  # two experts score exactly the same: the lower index must win
        for name in weights:
            if name.endswith(("block_sparse_moe.gate.weight", "e_score_correction_bias")):
                weights[name][4] = weights[name][1]
    if case.get("bf16"):
        for name, value in weights.items():
            if in_bf16(name):
                weights[name] = safetensors_io.bf16_values(safetensors_io.bf16_bits(value)).reshape(value.shape)
            elif name.endswith("A_log"):
                weights[name] = np.concatenate([value, np.zeros(5, np.float32)])
    return weights


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")


def write_array(path, value):
    np.save(path, np.ascontiguousarray(value, dtype="<f4"))


def relative(a, b):
    """Largest difference over the largest value."""
    return float(np.abs(np.asarray(a, np.float64) - b).max() / max(np.abs(b).max(), 1e-30))


def run(case, weights, tokens, coeffs, adapter=None, dtype=torch.float64):
    """Forward and the gradients of the trainable leaves: {logits, hidden, loss, grads, index_loss, index_grads}."""
    oracle = Oracle(case["config"], weights, adapter, ADAPTER_ALPHA / ADAPTER_RANK, dtype=dtype)
    logits = oracle.forward(tokens)
    loss = policy_loss(logits, tokens, coeffs)
    out = {"logits": logits.detach().numpy(), "trace": oracle.trace, "loss": loss.item()}
    out["hidden"] = torch.stack(oracle.trace["hidden"]).detach().numpy()
    if case.get("backward", True):
        out["grads"] = gradients(loss, oracle.adapter if adapter else oracle.weights)
    if oracle.trace["index_losses"] and not adapter:
        index_loss = sum(oracle.trace["index_losses"])
        leaves = {n: w for n, w in oracle.weights.items() if ".indexer." in n}
        others = {n: w for n, w in oracle.weights.items() if ".indexer." not in n}
        out["index_loss"], out["index_grads"] = index_loss.item(), gradients(index_loss, leaves)
        assert not any(g.any() for g in gradients(index_loss, others).values()), "index loss reached the model"
        assert not any(out["grads"][n].any() for n in leaves), "policy loss reached an indexer"
    return out


def summary(result, single):
    """What meta.json says about one run; `single` is the same run in float32."""
    trace, std = result["trace"], float(result["logits"].std())
    meta = {"loss": result["loss"], "logits_std": std, "router_margin": trace["router_margin"]}
    meta["router_ties"] = trace["router_ties"]
    if trace["index_losses"]:
        meta["index_margin"] = None if trace["index_margin"] == float("inf") else trace["index_margin"]
        meta["index_zero_ties"] = trace["zero_ties"]
    meta["float32_logits_error"] = relative(single["logits"], result["logits"])
    if "grads" in result:
        meta["float32_grads_error"] = max(relative(single["grads"][n], g) for n, g in result["grads"].items() if g.any())
    assert trace["router_margin"] > MARGIN and trace["index_margin"] > MARGIN, f"choose another seed: {meta}"
    assert 0.7 < std < 4, f"choose other scales: {meta}"
    return meta


def write_case(name, out):
    case, folder = CASES[name], os.path.join(out, name)
    os.makedirs(folder, exist_ok=True)
    path = lambda *parts: os.path.join(folder, *parts)
    weights, rng = case_weights(case), np.random.RandomState(case["seed"] + 1000)
    tokens = [int(t) for t in rng.randint(0, case["config"]["vocab_size"], case["tokens"])]
    coeffs = rng.standard_normal(case["tokens"] - 1).astype(np.float32)
    write_json(path("config.json"), case["config"])
    safetensors_io.save(path("model.safetensors"), weights, in_bf16 if case.get("bf16") else lambda _: False)
    with open(path("tokens.txt"), "w", encoding="utf-8") as file:
        file.write(" ".join(map(str, tokens)) + "\n")
    write_array(path("coeffs.npy"), coeffs)

    result = run(case, weights, tokens, coeffs)
    meta = summary(result, run(case, weights, tokens, coeffs, dtype=torch.float32))
    write_array(path("logits.npy"), result["logits"])
    write_array(path("hidden.npy"), result["hidden"])
    if "grads" in result:
        safetensors_io.save(path("grads.safetensors"), result["grads"])
    if "index_grads" in result:
        meta["index_loss"] = result["index_loss"]
        safetensors_io.save(path("index_grads.safetensors"), result["index_grads"])
    if case.get("adapter"):
        meta["lora"] = write_adapter(case, weights, tokens, coeffs, path)
    write_json(path("meta.json"), meta)
    size = sum(os.path.getsize(os.path.join(d, f)) for d, _, files in os.walk(folder) for f in files)
    print(f"{name}: {size / 1e6:.2f} MB {json.dumps(meta)}", flush=True)


def write_adapter(case, weights, tokens, coeffs, path):
    adapter = random_adapter(case["config"], ADAPTER_RANK, case["seed"] + 2000)
    modules = sorted({m.rsplit(".", 1)[-1] for m in adapter_targets(case["config"])})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_ALPHA}
    config.update({"lora_dropout": 0.0, "bias": "none", "use_rslora": False, "target_modules": modules})
    os.makedirs(path("adapter"), exist_ok=True)
    write_json(path("adapter", "adapter_config.json"), config)
    safetensors_io.save(path("adapter", "adapter_model.safetensors"), adapter)
    result = run(case, weights, tokens, coeffs, adapter)
    write_array(path("lora_logits.npy"), result["logits"])
    safetensors_io.save(path("lora_grads.safetensors"), result["grads"])
    return summary(result, run(case, weights, tokens, coeffs, adapter, torch.float32))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.path.join(HERE, "fixtures"))
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.cases or CASES:
        write_case(name, arguments.out)


if __name__ == "__main__":
    main()
