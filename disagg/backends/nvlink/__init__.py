"""Backend `nvlink`: copies between GPUs of one machine through mapped peer memory."""
