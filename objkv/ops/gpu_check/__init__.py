"""``gpu-check``: whether objkv moves the right bytes on this machine's GPU, and how fast."""
