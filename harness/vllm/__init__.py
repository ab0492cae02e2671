"""Real vLLM engines and servers on the CPU, with small random models."""
