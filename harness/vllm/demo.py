"""Demonstration: a vLLM server prefills, another with twice the tensor parallelism and other blocks decodes.

Every answer through the proxy is compared with that of one undivided server: decode itself, asked directly. Exits with an error
if one differs, or if decode has computed a prompt itself.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from disagg.commands.shell.text import plain_table
from harness.servers import Server, vllm_pair
from harness.tables import table_text
from harness.vllm.models import write_model

SENTENCE = "The quick brown fox jumps over the lazy dog. "
PROMPTS = (SENTENCE, SENTENCE * 4, SENTENCE * 12, SENTENCE * 25)
ROUNDS = 3
SENT = "vllm:disagg_sent_bytes_total"


def run(prefill: Server, decode: Server, proxy: Server) -> bool:
    """Print a table with a row for each prompt. Returns whether all is as it should be."""
    columns = ("prompt tokens", "equal to one server's", "first token (one server)", "tokens moved", "KiB moved")
    good, lines = True, []
    for prompt in (text.encode() for text in PROMPTS):
        loaded, sent = decode.num_moved(), prefill.metric(SENT)
        replies = [(decode.complete(prompt), proxy.complete(prompt)) for _ in range(ROUNDS)]
        moved = (decode.num_moved() - loaded) / ROUNDS
        nbytes = (prefill.metric(SENT) - sent) / ROUNDS
        equal = all(both.tokens == alone.tokens for alone, both in replies)
        good &= equal and moved == len(prompt) - 1
        alone_ms, both_ms = (min(reply.first_token_s for reply in column) * 1e3 for column in zip(*replies, strict=True))
        times = f"{both_ms:.0f} ms ({alone_ms:.0f} ms)"
        lines.append((str(len(prompt)), "yes" if equal else "NO", times, f"{moved:.0f}", f"{nbytes / 1024:.1f}"))
    print(table_text(plain_table(columns, lines, right=(columns[0], *columns[3:]))))
    print(f"first token: the best of {ROUNDS}, through the proxy with prefill, and from decode alone")
    return good


def main() -> None:
    """Start three servers on this machine and ask them."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model("llama", Path(folder) / "llama")
        print("demo-vllm: starting vLLM twice: TP 1 with blocks of 32 prefills, TP 2 with blocks of 64 decodes", flush=True)
        with vllm_pair(model) as servers:
            good = run(*servers)
    sys.exit(0 if good else "demo-vllm: an answer differs, or decode has computed a prompt itself")


if __name__ == "__main__":
    main()
