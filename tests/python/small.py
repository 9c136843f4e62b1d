"""A small GLM-5.2 for the tests, and a reader of golden files."""
import json
import os

import numpy as np

import glm52

SHAPE = {
    "vocab_size": 37, "hidden_size": 20, "num_hidden_layers": 4, "first_k_dense_replace": 1, "intermediate_size": 28,
    "moe_intermediate_size": 12, "n_routed_experts": 5, "num_experts_per_tok": 2, "num_attention_heads": 3,
    "q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7,
    "index_n_heads": 2, "index_head_dim": 8, "index_topk": 5, "indexer_types": ["full", "full", "shared", "full"],
    "rope_theta": 100, "initializer_range": 0.3, "max_position_embeddings": 4096,
}
OPTIONS = {"model": SHAPE, "data.pack_tokens": 64, "train.microbatch_tokens": 64, "optim.lr": 1e-2,
           "optim.schedule": "constant", "train.seed": 3}
WEIGHT = "model.layers.1.self_attn.q_b_proj.weight"
SOURCE = os.environ.get("GLM52_SOURCE", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))


def sanitized():
    """Whether everything is many times slower than it should be."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return "libasan" in maps.read()


def config(context, **options):
    return glm52.Config(context, OPTIONS, **options)


def model(context, **options):
    return glm52.Model(context, config(context, **options))


def trainer(context, **options):
    made = model(context, **options)
    return made, glm52.Step(made, glm52.Optimizer(made))


def tokens(length=40, seed=1):
    return np.random.RandomState(seed).randint(0, 37, length)


def batch(context, length=40, seed=1):
    return glm52.Batch(context, tokens(length, seed), cu_seqlens=[0, length // 3, length])


class Golden:
    """Tensors of a golden case, by name; `about` is its sidecar."""

    kinds = {"F64": "<f8", "F32": "<f4", "I64": "<i8", "I32": "<i4"}

    def __init__(self, name):
        self.path = os.path.join(SOURCE, "tests", "golden", name)
        with open(self.path + ".json", encoding="utf-8") as file:
            self.about = json.load(file)
        with open(self.path + ".safetensors", "rb") as file:
            head = int.from_bytes(file.read(8), "little")
            self.entries = json.loads(file.read(head))
            self.values = file.read()

    def __getitem__(self, name):
        entry = self.entries[name]
        first, last = entry["data_offsets"]
        return np.frombuffer(self.values[first:last], self.kinds[entry["dtype"]]).reshape(entry["shape"])

    def tolerance(self, name):
        return self.about["tensors"][name]["atol"]
