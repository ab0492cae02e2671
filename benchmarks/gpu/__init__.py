"""Programs that need two NVIDIA GPUs. `scripts/gpu_all.sh` runs them all."""
