"""Unmodified SGLang servers on the CPU, and a tiny random model for them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


def write_llama(folder: Path) -> Path:
    """A Llama with three layers, four KV heads and random weights, large enough for attention to decide the tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=8,
                         num_key_value_heads=4, head_dim=32, max_position_embeddings=4096, dtype="float32")  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return folder


class Server:
    """One `sglang.launch_server` process and its schedulers."""

    def __init__(self, model: Path, log: Path, *options: str, **environ: str) -> None:
        self.port, self.log = free_port(), log
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu",
            "--attention-backend", "torch_native", "--dtype", "float32", "--skip-tokenizer-init", "--skip-server-warmup",
            "--host", HOST, "--port", str(self.port), "--max-total-tokens", "8192", "--mem-fraction-static", "0.1",
            "--disable-overlap-schedule", *options,
        ]  # fmt: skip
        environ = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "SGLANG_HOST_IP": HOST,
            "OMP_NUM_THREADS": "1",
            **environ,
        }
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environ}, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, timeout_s: float = 180.0) -> Server:
        """Wait until it answers."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            assert self.process.poll() is None, f"the server has ended\n{self.tail()}"
            try:
                with urllib.request.urlopen(f"http://{HOST}:{self.port}/v1/models", timeout=5):
                    return self
            except (urllib.error.URLError, TimeoutError):
                time.sleep(0.5)
        raise TimeoutError(f"the server does not answer after {timeout_s} s\n{self.tail()}")

    def generate(self, prompt: list[int], num_tokens: int, **fields: Any) -> dict[str, Any]:
        """The answer to `/generate`; `error` for an HTTP error."""
        sampling = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **fields}).encode()
        request = urllib.request.Request(f"http://{HOST}:{self.port}/generate", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            return {"error": error.read().decode()}

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def stop(self) -> None:
        """SIGKILL, to the schedulers as well: that is how SGLang ends, too."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def route(
    prefill: Server, decode: Server, bootstrap_port: int, room: int, prompt: list[int], num_tokens: int
) -> dict[str, Any]:
    """What SGLang's router does: the request goes to both at once, and decode answers."""
    where = {"bootstrap_host": HOST, "bootstrap_port": bootstrap_port, "bootstrap_room": room}
    answers: dict[str, dict[str, Any]] = {}
    other = threading.Thread(target=lambda: answers.update(prefill=prefill.generate(prompt, num_tokens, **where)))
    other.start()
    answer = decode.generate(prompt, num_tokens, **where)
    other.join()
    return {**answer, "prefill": answers["prefill"]}
