"""Parts of ``objkv bench`` that need torch or vLLM: run as programs, never imported elsewhere."""
