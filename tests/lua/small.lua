-- A small GLM-5.2 for the Lua tests, whose steps take no time.
local glm52 = require "glm52"

local small = {}

local options = [[{"model": {"vocab_size": 37, "hidden_size": 20, "num_hidden_layers": 2, "first_k_dense_replace": 1,
  "intermediate_size": 28, "moe_intermediate_size": 12, "n_routed_experts": 5, "num_experts_per_tok": 2,
  "num_attention_heads": 3, "q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
  "v_head_dim": 7, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 5, "rope_theta": 100,
  "initializer_range": 0.3, "max_position_embeddings": 4096},
  "data.pack_tokens": 64, "train.microbatch_tokens": 64, "optim.lr": 1e-2, "optim.schedule": "constant",
  "train.seed": 3}]]

function small.config(context)
  local config = glm52.config(context)
  config:load_json(options)
  return config
end

-- {context, config, model, optimizer, step, batch}, by name.
function small.open(log)
  local s = { context = glm52.context { threads = 1, log = log } }
  s.config = small.config(s.context)
  s.model = glm52.model(s.context, s.config)
  s.optimizer = glm52.optimizer(s.model)
  s.step = glm52.step(s.model, s.optimizer)
  s.batch = small.batch(s.context, 24)
  return s
end

function small.batch(context, tokens)
  local ids = {}
  for i = 1, tokens do ids[i] = i * i * 7 % 37 end
  local batch = glm52.batch(context)
  batch:set("tokens", ids)
  return batch
end

return small
