"""The parts of ``objkv demo`` that need vLLM: run as programs, never imported by the command."""
