"""What a model's ``config.json`` says about its KV cache, without vLLM."""
