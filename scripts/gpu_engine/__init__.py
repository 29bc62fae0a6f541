"""A real engine on a GPU, without objkv and with it: ``make gpu-engine``."""
